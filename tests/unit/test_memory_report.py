"""Consumers of memory that are named when a process runs out of it."""

import pytest
import torch

from lockstep.config import apply_overrides
from lockstep.inference import build_algorithm
from lockstep.launch.failures import to_user_error
from lockstep.launch.world import WorldInfo
from lockstep.memory_report import explain_out_of_memory, largest_consumers
from lockstep.recipes.gym_ddpg import GymDDPG
from lockstep.recipes.gym_ppo import GymPPO


def test_replay_buffer_is_named_with_what_halving_it_saves():
    recipe = apply_overrides(GymDDPG(), {"algo.buffer_size": 80_000_000, "run.lanes": 8})
    algorithm = build_algorithm(recipe)  # one of eight lanes; the buffer is allocated as it is written
    size = sum(tensor.nbytes for tensor in algorithm.replay.buffers.values())
    text = largest_consumers(recipe, algorithm)
    assert text.startswith(
        f"Of this process, replay buffer {size / 2**20:,.1f} MiB: half of algo.buffer_size (80,000,000)"
    )
    assert f"saves {size / 2**21:,.1f} MiB" in text
    assert "Half of algo.batch_size (128) halves the memory of backward." in text


def test_largest_consumer_is_named_first():
    recipe = apply_overrides(GymPPO(), {"algo.rollout_steps": 65_536, "algo.batch_size": 4096, "run.lanes": 8})
    text = largest_consumers(recipe, build_algorithm(recipe))
    assert text.index("collected samples") < text.index("networks, gradients and optimizer")
    assert "task.num_envs (8) or algo.rollout_steps (65,536)" in text


@pytest.mark.parametrize("error", [MemoryError("no memory"), torch.OutOfMemoryError("CUDA out of memory.")])
def test_error_about_memory_names_the_consumers(error):
    recipe = GymDDPG()
    with pytest.raises(type(error)) as caught, explain_out_of_memory(recipe):
        raise error
    text = str(to_user_error(caught.value, WorldInfo()))
    assert "half of algo.buffer_size" in text
    assert "lockstep plan" in text


def test_other_error_is_unchanged():
    with pytest.raises(ValueError, match="other") as caught, explain_out_of_memory(GymDDPG()):
        raise ValueError("other")
    assert not hasattr(caught.value, "__notes__")
