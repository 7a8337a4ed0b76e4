"""Mixed precision on the CPU: small networks act in float32, where that is faster."""

import pytest
import torch

from lockstep.clock import TrainState
from lockstep.config import apply_overrides
from lockstep.distributed import Runtime
from lockstep.nn import actor_critic
from lockstep.recipes.snake_ppo import SnakePPO


@pytest.mark.parametrize(
    ("kind", "width", "acts_in"),
    [("mlp", 8, torch.float32), ("mlp", 300, torch.bfloat16), ("cnn", 8, torch.bfloat16)],
)
def test_bf16_run_acts_in_float32_only_for_small_mlps(kind, width, acts_in, monkeypatch):
    monkeypatch.setattr(actor_critic, "BF16_MIN_MACS", 50_000)
    settings = {
        "task.size": 5,
        "task.num_envs": 4,
        "algo.rollout_steps": 4,
        "algo.batch_size": 16,
        "run.precision": "bf16",
    }
    recipe = apply_overrides(
        SnakePPO(), settings | {"algo.encoder.kind": kind, "algo.encoder.hidden_sizes": (width,), "run.lanes": 1}
    )
    runtime = Runtime.single_process(recipe.run)
    ppo = recipe.algo.build(recipe.task.build(runtime.lanes, runtime.device), runtime)
    made_in = {}
    ppo.net.policy_head.register_forward_hook(lambda _, __, out: made_in.update({torch.is_grad_enabled(): out.dtype}))
    ppo.collect(TrainState(total_samples=64))
    ppo.update(TrainState(total_samples=64))
    assert made_in == {False: acts_in, True: torch.bfloat16}
