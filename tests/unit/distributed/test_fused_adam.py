"""FusedAdam: same steps and hooks as torch.optim.Adam without importing the torch compiler."""

import subprocess
import sys

import pytest
import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from lockstep.distributed import FusedAdam

STARTS = """
import sys
from lockstep.cli import main

main(["train", "gym-ppo", "--smoke", "run.runs_dir={directory}", "run.reduction=exact"])
print("compiler:", "torch._dynamo" in sys.modules)
"""


def gradients(steps: int = 5) -> list[torch.Tensor]:
    return list(torch.randn(steps, 7, 3, generator=torch.Generator().manual_seed(3)))


def walk(kind, **options) -> list[torch.Tensor]:
    """Return a parameter after each of a few steps, with alternating gradient scales."""
    weight = torch.nn.Parameter(torch.ones(7, 3))
    optimizer, seen = kind([("weight", weight)], lr=0.1, **options), []
    for number, gradient in enumerate(gradients()):
        optimizer.zero_grad()
        weight.grad = gradient * 2
        optimizer.grad_scale = torch.tensor(1.0 + number % 2)
        optimizer.found_inf = torch.tensor(0.0)
        optimizer.step()
        seen.append(weight.detach().clone())
    return seen


@pytest.mark.parametrize(
    ("options", "theirs"),
    [
        ({}, torch.optim.Adam),
        ({"eps": 1e-5, "weight_decay": 0.1}, torch.optim.Adam),
        ({"weight_decay": 0.1, "decoupled_weight_decay": True}, torch.optim.AdamW),
    ],
)
def test_fused_adam_is_bit_identical_to_torch(options, theirs):
    plain = {name: value for name, value in options.items() if name != "decoupled_weight_decay"}
    ours, expected = walk(FusedAdam, **options), walk(theirs, fused=True, **plain)
    assert all(torch.equal(a, b) for a, b in zip(ours, expected, strict=True))
    assert not torch.equal(ours[0], ours[-1])


def test_step_builds_no_graph_and_keeps_grad_mode():
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = FusedAdam([weight])
    weight.sum().backward()
    optimizer.step()
    assert torch.is_grad_enabled()
    assert weight.is_leaf
    assert all(not value.requires_grad for value in optimizer.state[weight].values())


def test_step_calls_global_post_hooks():
    seen = []
    handle = register_optimizer_step_post_hook(lambda optimizer, *_: seen.append(optimizer))
    try:
        optimizer = FusedAdam([torch.nn.Parameter(torch.ones(3))])
        optimizer.step()
    finally:
        handle.remove()
    assert seen == [optimizer]


@pytest.mark.slow
def test_exact_run_does_not_import_torch_dynamo(tmp_path):
    script = STARTS.format(directory=tmp_path)
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=True)
    assert ended.stdout.splitlines()[-1] == "compiler: False", ended.stdout + ended.stderr
