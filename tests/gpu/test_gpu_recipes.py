"""Every recipe on emulated GPUs: one hash in exact mode on any number of GPUs, and close weights in fast mode."""

import pytest
import torch

from helpers.multiprocess import together
from helpers.tiny_recipes import hash_of
from lockstep.cli.options import parse_recipe, parse_train, resolve
from lockstep.clock import TrainState
from lockstep.config import resolve_lanes
from lockstep.distributed import Runtime
from lockstep.registry import RECIPES
from lockstep.training_loop import iterate, train

UPDATES = 20


def parse(*words):
    start, rest, _ = parse_train([*words, "--smoke"])
    return resolve(parse_recipe(start, rest, "lockstep train"), 1)


def trained(words):
    """Train a recipe as one process of a group; return whether it used the GPU."""
    train(parse(*words))
    return torch.cuda.max_memory_allocated() > 0


def short(name, path):
    """Return a command line for four iterations in exact mode on CUDA, with evaluations and saves."""
    recipe = parse(name)
    step = recipe.algo.samples_per_iteration(recipe.task)
    settings = {
        "total_samples": 4 * step,
        "save_every": step,
        "log_every": step,
        "eval_every": 2 * step,
        "eval_episodes": 8,
    }
    settings |= {"reduction": "exact", "device": "cuda", "runs_dir": path.parent, "name": path.name}
    return [name, *(f"run.{key}={value}" for key, value in settings.items())]


# CI runs an on-policy and an off-policy recipe; the others are slow tests.
KINDS = ("snake-ppo", "gym-ddpg")
each_recipe = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in KINDS else pytest.mark.slow) for name in RECIPES]
)


@each_recipe
def test_exact_training_has_one_hash_on_one_and_two_gpus(name, tmp_path):
    hashes = []
    for gpus in (1, 2):
        path = tmp_path / f"gpus-{gpus}"
        used = together(trained, gpus, short(name, path), environment={"EMULATED_GPUS": str(gpus)})
        assert used == [True] * gpus  # the GPU was used
        hashes.append(hash_of(path))
    assert hashes[0] == hashes[1]


def weights(words):
    """Return the weights of an agent after some updates in fast mode."""
    recipe = parse(*words)
    with Runtime.start(recipe.run) as runtime:
        task = recipe.task.build(runtime.lanes, runtime.device)
        algorithm, clock = recipe.algo.build(task, runtime), TrainState(total_samples=10**9)
        while algorithm.updates < UPDATES:
            iterate(task, algorithm, clock, runtime, 1)
        state = algorithm.model_state_dict()
        task.close()
        return {name: tensor.detach().double().flatten().tolist() for name, tensor in state.items()}


# The pendulum of the smoke settings has no reward at first: gradients are only rounding errors, which Adam amplifies.
# A planned action is the best of several samples: if two are nearly equal, rounding selects one.
SMOOTH = {"dmc-tdmpc2": ["--task.tasks", "cartpole-balance", "algo.mpc=false"]}


QUICK = ("gym-ppo", "gym-ddpg")
CASES = [
    pytest.param(name, gpus, marks=[] if name in QUICK and gpus == 2 else pytest.mark.slow)
    for name in RECIPES
    for gpus in (2, 4)
]


@pytest.mark.parametrize(("name", "gpus"), CASES)
def test_fast_training_on_several_gpus_matches_one_gpu(name, gpus):
    words = [name, "run.device=cuda", *SMOOTH.get(name, [])]
    one = together(weights, 1, words, environment={"EMULATED_GPUS": "1"})[0]
    for several in together(weights, gpus, words, environment={"EMULATED_GPUS": str(gpus)}):
        ours, theirs = (torch.tensor([x for values in w.values() for x in values]) for w in (several, one))
        assert (ours - theirs).norm() / theirs.norm() < 1e-5


def stepped(name):
    """Run each benchmark operation of a recipe; return their kinds."""
    recipe = parse(name)
    runtime = Runtime.single_process(resolve_lanes(recipe.run, 1), "cuda:0")
    task = recipe.task.build(runtime.lanes, runtime.device)
    algorithm = recipe.algo.build(task, runtime)
    iterate(task, algorithm, TrainState(total_samples=10**9), runtime, 10**9)
    works = algorithm.benchmark_ops()
    for work in works:
        work.run()
    task.close()
    return [work.kind for work in works]


# One for each kind of batch; tests/unit/tools/test_measure.py measures every recipe on the CPU.
@pytest.mark.parametrize("name", ["snake-ppo", "team-ddpg", "dmc-tdmpc2", "cricket-gnn"])
def test_benchmark_ops_run_on_a_gpu(name):
    parts = together(stepped, 1, name, environment={"EMULATED_GPUS": "1"})[0]
    assert parts[-1] == "learning"
    assert ("env" in parts) == (name != "cricket-gnn")
