"""`run.compile=on` on the CPU: compiled training produces the same agent as eager training."""

import pytest
import torch

from lockstep.cli.options import parse_recipe, parse_train, resolve
from lockstep.clock import TrainState
from lockstep.config import ConfigError
from lockstep.distributed import Runtime
from lockstep.training_loop import iterate

UPDATES = 20
COMPILED = ["snake-ppo", "gym-ppo", "gym-ddpg", "gym-sac", "team-ddpg", "dmc-tdmpc2"]
# The pendulum of the smoke settings has no reward at first: gradients are only rounding errors, which Adam amplifies.
TASK = {"dmc-tdmpc2": ["--task.tasks", "cartpole-balance"]}


def parse(*words):
    start, rest, _ = parse_train([*words, "--smoke"])
    return resolve(parse_recipe(start, rest, "lockstep train"), 1)


def trained(*words):
    """Return the weights after some updates, the number of compilations and the pending messages."""
    recipe = parse(*words)
    runtime = Runtime.single_process(recipe.run)
    task = recipe.task.build(runtime.lanes, runtime.device)
    algorithm, clock = recipe.algo.build(task, runtime), TrainState(total_samples=10**9)
    while algorithm.updates < UPDATES:
        iterate(task, algorithm, clock, runtime, 1)
    task.close()
    weights = torch.cat([x.detach().double().flatten() for x in algorithm.model_state_dict().values()])
    return weights, runtime.status.phase_counts.get("compile", 0), runtime.pending_messages


@pytest.mark.slow
@pytest.mark.parametrize("name", COMPILED)
def test_compiled_training_matches_eager_training(name):
    words = [name, "run.device=cpu", *TASK.get(name, [])]
    plain, compiled = trained(*words), trained(*words, "run.compile=on")
    assert plain[1] == 0
    assert compiled[1] >= 2  # the update and the policy
    assert compiled[2] == []
    assert (compiled[0] - plain[0]).norm() / plain[0].norm() < 1e-5


@pytest.mark.parametrize("mode", ["on", "graphs"])
def test_exact_reduction_with_compile_is_rejected(mode):
    with pytest.raises(ConfigError, match=f"run.compile is {mode}, which is not supported by exact reduction"):
        parse("gym-ppo", "run.reduction=exact", f"run.compile={mode}")


@pytest.mark.parametrize(
    ("words", "mode"), [(["--compile"], "on"), (["compile=true"], "on"), (["--compile=false"], "off"), ([], "off")]
)
def test_compile_flag_alias_sets_run_compile(words, mode):
    pytest.importorskip("dm_control")  # not installed on Python 3.13
    assert parse("dmc-tdmpc2", *words).run.compile == mode
