"""The work every contender does, and how it is measured: the boards, the networks, the numbers of PPO, the clock.

Imported by the contenders, each in its own virtual environment, so it uses torch, numpy and lockstep's Snake alone.
"""

import argparse
import json
import logging
import math
import time
from collections import deque
from collections.abc import Callable

import torch
from torch import nn

from lockstep.lanes import Lanes
from lockstep.tasks.snake.env import Snake, SnakeConfig

SIZE, ENVS, HORIZON, BATCH, EPOCHS = 8, 64, 128, 2048, 4
GAMMA, LAMBDA, CLIP, ENTROPY, VALUE, MAX_NORM, RATE, EPSILON = 0.99, 0.95, 0.2, 0.01, 0.5, 0.5, 2.5e-4, 1e-5
ITERATION = ENVS * HORIZON
PARAMETERS = {"cnn": 320_005, "mlp": 41_861}


def boards(size: int = SIZE, envs: int = ENVS, seed: int = 0) -> Snake:
    """The compiled environment, all boards in one kernel call."""
    lanes = math.gcd(envs, 8)
    return SnakeConfig(size=size, num_envs=envs).build(Lanes(lanes, range(lanes), seed), torch.device("cpu"))


def trunk(net: str, size: int = SIZE) -> tuple[nn.Module, int]:
    """What policy and value share, from float planes [N, 3, G, G] to features, and how many features there are."""
    if net == "mlp":
        return nn.Sequential(nn.Flatten(), nn.Linear(3 * size**2, 128), nn.Tanh(), nn.Linear(128, 128), nn.Tanh()), 128
    convolutions = []
    for before, after in ((3, 32), (32, 64), (64, 64)):
        convolutions += [nn.Conv2d(before, after, 3, padding=1), nn.ReLU()]
    flat = 64 * (size // 2) ** 2
    return nn.Sequential(*convolutions, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(flat, 256), nn.ReLU()), 256


def arguments(**extra: dict) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--net", choices=("cnn", "mlp"), default="cnn")
    parser.add_argument("--steps", type=int, default=ITERATION, help="environment steps to measure")
    for name, options in extra.items():
        parser.add_argument(f"--{name}", **options)
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    return parser.parse_args()


def measure(peer: str, version: str, args: argparse.Namespace, parameters: int, train: Callable[[int], None]) -> None:
    """Time `train(iterations)` after two that warm up, and print the result as one line of JSON."""
    if parameters != PARAMETERS[args.net]:
        raise SystemExit(
            f"{peer}'s {args.net} has {parameters} parameters, not {PARAMETERS[args.net]}: not equal work."
        )
    iterations = math.ceil(args.steps / ITERATION)
    train(2)
    cpu, wall = time.process_time(), time.perf_counter()
    train(iterations)
    result = {
        "peer": peer,
        "version": version,
        "net": args.net,
        "steps": iterations * ITERATION,
        "cpu_seconds": time.process_time() - cpu,
        "wall_seconds": time.perf_counter() - wall,
        "parameters": parameters,
    }
    print(json.dumps(result), flush=True)


def count_parameters(*modules: nn.Module) -> int:
    """Each parameter once, however many modules share it."""
    return sum(parameter.numel() for parameter in {p for module in modules for p in module.parameters()})


def remember_apples(task: Snake, episodes: int = 100) -> deque[float]:
    """The apples of the episodes that ended last, kept up to date as the task is stepped, by whoever steps it."""
    recent: deque[float] = deque(maxlen=episodes)
    step = task.step

    def stepping(action):
        out = step(action)
        ended = out.terminated | out.truncated
        if ended.any():
            recent.extend(out.episode_info["apples"][ended].tolist())
        return out

    task.step = stepping
    return recent
