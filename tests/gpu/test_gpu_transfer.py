"""Transfers between host and device: packed, asynchronous, and never overwritten in flight."""

import pytest
import torch

import emulated_cuda
from helpers.multiprocess import together
from lockstep.lanes import Lanes
from lockstep.pytree import named_leaves
from lockstep.rng import RandomStream
from lockstep.tasks.gym.env import GymConfig
from lockstep.tasks.kernels import Buffers
from lockstep.tasks.snake.env import SnakeConfig
from lockstep.transfer import Uploader

DEVICE = torch.device("cuda", 0)


def on_gpu(function, *arguments):
    return together(function, 1, *arguments, environment={"EMULATED_GPUS": "1"})[0]


def uploaded():
    """Upload several trees in sequence; return what the device received, and the copies and synchronizations."""
    upload, seen, counts = Uploader(DEVICE), [], []
    for number in range(4):
        tree = {
            "a": torch.full((3,), number, dtype=torch.uint8),
            "b": {"c": torch.full((2, 2), number + 0.5), "d": torch.tensor(number % 2 == 0)},
            "e": torch.full((5,), number, dtype=torch.int64),
        }
        with emulated_cuda.counting() as count:
            shown = named_leaves(upload(tree))
        counts.append((count.by_name.get("copy host to device", 0), count.syncs))
        seen.append({name: tensor.clone() for name, tensor in shown.items()})  # before the next upload overwrites it
        torch.cuda.current_stream().synchronize()
    return [{name: tensor.flatten().tolist() for name, tensor in each.items()} for each in seen], counts


def test_tree_is_uploaded_in_one_copy_without_waiting():
    seen, counts = on_gpu(uploaded)
    assert [each["a"][0] for each in seen] == [0, 1, 2, 3]
    assert [each["b.c"] for each in seen] == [[number + 0.5] * 4 for number in range(4)]
    assert [each["b.d"] for each in seen] == [[True], [False], [True], [False]]
    assert [each["e"] for each in seen] == [[number] * 5 for number in range(4)]
    assert counts == [[1, 0]] * 4


def written_again():
    """Overwrite a kernel's arrays immediately after each copy to the device."""
    buffers, kept = Buffers(DEVICE, obs=(torch.int64, (1 << 12,)), done=(torch.bool, (3,))), []
    for step in range(8):
        buffers.arrays["obs"][:] = step
        kept.append(buffers.copy_to_device()["obs"].clone())
    return [(obs == step).all().item() for step, obs in enumerate(kept)]


def test_buffers_overwritten_after_copy_arrive_unchanged():
    assert on_gpu(written_again) == [True] * 8


def equal(one, other):
    """Return whether two tensors are equal. NaN stands for a value that no environment reported."""
    return bool(((one == other) | ((one != one) & (other != other))).all())


def played(config):
    """Compare an environment on the device with the same one on the CPU, step by step."""
    here, there = (config.build(Lanes(8, range(8), 0), device) for device in (torch.device("cpu"), DEVICE))
    same = [torch.equal(here.reset(), there.reset().cpu())]
    for time in range(50):
        action = RandomStream(1, "actions").integers(time, int(here.action_space.n), here.num_envs)
        expected, shown = (
            named_leaves(here.step(action)._asdict()),
            named_leaves(there.step(action.to(DEVICE))._asdict()),
        )
        names = [name for name, value in expected.items() if isinstance(value, torch.Tensor)]
        same += [equal(expected[name], shown[name].cpu()) for name in names]
        same.append(torch.equal(here.observations(), there.observations().cpu()))
    return all(same), len(same)


def played_gym(workers):
    return played(GymConfig(num_envs=16, num_workers=workers))


def played_snake():
    return played(SnakeConfig(num_envs=16, size=6))


@pytest.mark.parametrize("workers", [0, 2])
def test_gym_env_on_device_matches_cpu(workers):
    assert on_gpu(played_gym, workers) == [True, 351]


def test_compiled_env_on_device_matches_cpu():
    same, compared = on_gpu(played_snake)
    assert same
    assert compared > 300
