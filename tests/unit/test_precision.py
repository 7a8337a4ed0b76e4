"""What a run in half precision computes in full: acting on a CPU, where that is faster."""

import pytest
import torch

from lockstep.config import overlay
from lockstep.nets import actor_critic
from lockstep.protocols import Clock
from lockstep.recipes.snake_ppo import SnakePPO
from lockstep.runtime import Runtime


@pytest.mark.parametrize(
    ("kind", "width", "acts_in"),
    [("mlp", 8, torch.float32), ("mlp", 300, torch.bfloat16), ("cnn", 8, torch.bfloat16)],
)
def test_small_products_are_acted_with_in_full_and_large_ones_and_convolutions_in_half(
    kind, width, acts_in, monkeypatch
):
    monkeypatch.setattr(actor_critic, "FEW_PRODUCTS", 50_000)
    settings = {"task.size": 5, "task.num_envs": 4, "algo.horizon": 4, "algo.batch_size": 16, "run.precision": "bf16"}
    recipe = overlay(SnakePPO(), settings | {"algo.encoder.kind": kind, "algo.encoder.width": (width,), "run.lanes": 1})
    runtime = Runtime.alone(recipe.run)
    ppo = recipe.algo.build(recipe.task.build(runtime.lanes, runtime.device), runtime)
    made_in = {}
    ppo.net.policy_head.register_forward_hook(lambda _, __, out: made_in.update({torch.is_grad_enabled(): out.dtype}))
    ppo.collect(Clock(budget=64))
    ppo.update(Clock(budget=64))
    assert made_in == {False: acts_in, True: torch.bfloat16}
