"""Replay on an emulated GPU: samples are bitwise equal to those of host replay, without synchronization."""

import random

import pytest
import torch

import emulated_cuda
from helpers.multiprocess import together
from lockstep.data.replay_buffer import Replay, ReplayConfig
from lockstep.lanes import Lanes
from lockstep.protocols import AppendOnlyTensor
from lockstep.pytree import named_leaves

LANES, ENVS = 4, 2
GPU = torch.device("cuda", 0)


def on_gpu(function, *arguments, **settings):
    return together(function, 1, *arguments, environment={"EMULATED_GPUS": "1", **settings})[0]


def step_of(chance, agents, end_every):
    """Return a random step of every environment, with random episode ends."""
    count = LANES * ENVS
    over = torch.tensor([chance.random() < 1 / end_every for _ in range(count)])
    kind = torch.tensor([chance.random() < 0.5 for _ in range(count)])
    numbers = torch.tensor([[chance.gauss(0, 1) for _ in range(3)] for _ in range(count)])
    reward = torch.tensor([chance.gauss(0, 1) for _ in range(count * max(1, agents))])
    return {
        "obs": {"a": numbers, "b": torch.tensor([chance.randrange(256) for _ in range(count)], dtype=torch.uint8)},
        "action": torch.tensor([chance.randrange(9) for _ in range(count)]),
        "reward": reward.view(count, agents) if agents else reward,
        "terminated": over & kind,
        "truncated": over & ~kind,
        "next_obs": {"a": numbers + 1.0, "b": torch.zeros(count, dtype=torch.uint8)},
    }


def to_gpu(tree):
    return {name: to_gpu(part) if isinstance(part, dict) else part.to(GPU) for name, part in tree.items()}


def pair(rows, steps, agents, end_every, seed):
    """Return replay on the device, on the host for a learner on the device, and on the host, with equal contents."""
    chance, lanes = random.Random(seed), Lanes(LANES, range(LANES), seed)
    values = [step_of(chance, agents, end_every) for _ in range(steps)]
    kinds = [(ReplayConfig(device="cuda"), GPU), (ReplayConfig(device="cpu"), GPU), (None, None)]
    replays = [Replay(rows * LANES * ENVS, lanes, values[0], "replay", *kind) for kind in kinds]
    for value in values:
        for replay, (_, learner) in zip(replays, kinds, strict=True):
            replay.write(to_gpu(value) if learner else value)
    return replays


def compared(cases):
    """Return where samples of the three differ, and the devices of the samples."""
    differences, devices = [], set()
    for rows, steps, agents, end_every, ahead, discount, seed in cases:
        replays = pair(rows, steps, agents, end_every, seed)
        # Copied: host replay uploads every sample into the same buffer.
        draws = [
            {name: x.clone() for name, x in named_leaves(replay.sample(3, 25, ahead, discount)).items()}
            for replay in replays
        ]
        if steps >= ahead and rows >= ahead:
            draws = [
                draw | {f"slice {name}": x for name, x in named_leaves(replay.slices(3, 25, ahead)).items()}
                for draw, replay in zip(draws, replays, strict=True)
            ]
            whole = draws[2]["slice whole"]
        for draw in draws[:2]:
            devices.add(str(next(iter(draw.values())).device))
            for name, expected in draws[2].items():
                found = draw[name].cpu()
                if name.startswith("slice") and name != "slice whole":
                    found, expected = found[whole], expected[whole]  # incomplete slices are masked
                if not torch.equal(found, expected):
                    differences.append((rows, steps, agents, end_every, ahead, name))
    return differences, sorted(devices)


def cases():
    chance = random.Random(7)
    for number in range(40):
        rows, ahead = chance.randrange(1, 12), chance.randrange(1, 6)
        yield rows, chance.randrange(1, 30), chance.choice([0, 3]), chance.choice([1.5, 3, 10]), ahead, 0.97, number


def test_replay_samples_on_device_are_bitwise_equal_to_host():
    differences, devices = on_gpu(compared, list(cases()))
    assert differences == []
    assert devices == ["cuda:0"]


def waits():
    """Return the host synchronizations of a write and of samples, for replay on the device and on the host."""
    found = {}
    on_device, in_host, _ = pair(50, 60, 0, 5, 0)
    value = to_gpu(step_of(random.Random(1), 0, 5))
    for name, replay in (("device", on_device), ("host", in_host)):
        replay.sample(0, 8, 3, 0.9)
        replay.slices(0, 8, 3)
        with emulated_cuda.counting() as writing:
            replay.write(value)
        with emulated_cuda.counting() as drawing:
            replay.sample(1, 8, 3, 0.9)
            replay.slices(1, 8, 3)
        found[name] = writing.syncs, drawing.syncs
    return found


def test_only_writes_to_host_replay_synchronize():
    assert on_gpu(waits) == {"device": [0, 0], "host": [1, 0]}


def moved():
    """Save and load replay from the device to the host and back; return the comparisons."""
    on_device, _, in_host = pair(7, 20, 0, 4, 3)
    found = []
    for source, target in ((on_device, in_host), (in_host, on_device)):
        fresh = pair(7, 3, 0, 4, 9)[0 if target is on_device else 2]
        for lane in range(LANES):
            state = source.lane_state(lane).items()
            fresh.load_lane_state(lane, {name: x.all() if isinstance(x, AppendOnlyTensor) else x for name, x in state})
        ours = named_leaves(fresh.buffers)
        found += [torch.equal(x.cpu(), ours[name].cpu()) for name, x in named_leaves(source.buffers).items()]
        found += [
            x.all().device.type == "cpu" for x in source.lane_state(0).values() if isinstance(x, AppendOnlyTensor)
        ]
    return found


def test_replay_state_moves_between_device_and_host():
    found = on_gpu(moved)
    assert all(found)
    assert len(found) > 20


def kept(wanted, capacity):
    lanes = Lanes(LANES, range(LANES), 0)
    example = step_of(random.Random(0), 0, 3)
    return Replay(capacity, lanes, example, "replay", ReplayConfig(device=wanted), GPU).device.type


@pytest.mark.parametrize(
    ("wanted", "memory", "device"), [("auto", 2**30, "cuda"), ("auto", 2**17, "cpu"), ("cpu", 2**30, "cpu")]
)
def test_replay_is_on_the_device_if_it_fits(wanted, memory, device):
    assert on_gpu(kept, wanted, 4000, EMULATED_GPU_MEMORY=str(memory)) == device
