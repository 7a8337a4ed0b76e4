"""Every recipe on a device without float64, such as MPS: an emulated GPU that rejects float64 tensors."""

import pytest
import torch

from helpers.multiprocess import together
from lockstep import transfer
from lockstep.cli.options import parse_recipe, parse_train, resolve
from lockstep.clock import TrainState
from lockstep.distributed import Runtime
from lockstep.evaluation import evaluate
from lockstep.ops.philox import draws
from lockstep.registry import RECIPES
from lockstep.training_loop import iterate

ENVIRONMENT = {"EMULATED_GPUS": "1", "EMULATED_GPU_DOUBLE": "0"}

ON_HOST = ["algo.replay.device=cpu"]
REPLAY = dict.fromkeys(("gym-ddpg", "gym-sac", "team-ddpg", "dmc-tdmpc2", "gym-tdmpc2"), ON_HOST)
"""Replay is kept on the device only with CUDA, so these recipes keep it on the host."""


def trained(name, reduction):
    """Train, evaluate and restore a recipe as on MPS; return the number of evaluation scores."""
    # Settings that depend on the device name "mps". This process is forked for one test.
    transfer.WITHOUT_FLOAT64.add("cuda")
    draws._DRAWN_ON_HOST |= {"cuda"}
    with pytest.raises(TypeError, match="float64"):
        torch.zeros(1, dtype=torch.float64, device="cuda")
    words = [name, "--smoke", "run.device=cuda", f"run.reduction={reduction}", *REPLAY.get(name, [])]
    start, rest, _ = parse_train(words)
    recipe = resolve(parse_recipe(start, rest, "lockstep train"), 1)
    with Runtime.start(recipe.run) as runtime:
        task = recipe.task.build(runtime.lanes, runtime.device)
        algorithm, clock = recipe.algo.build(task, runtime), TrainState(total_samples=10**9)
        while algorithm.updates < 3:
            iterate(task, algorithm, clock, runtime, 1)
        scores = evaluate(algorithm.policy(), recipe.task, runtime, 4)
        state = {name: tensor.cpu() for name, tensor in algorithm.shared_state().items()}
        algorithm.load_shared_state(state)
        task.close()
    return len(scores)


@pytest.mark.parametrize(("name", "reduction"), [*((name, "fast") for name in RECIPES), ("snake-ppo", "exact")])
def test_recipe_trains_and_evaluates_without_float64(name, reduction):
    assert together(trained, 1, name, reduction, environment=ENVIRONMENT)[0] > 0
