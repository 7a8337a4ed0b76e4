"""Autoscale: when doubling stops, learning rate scaling, and settings stored with the run."""

import json
import math
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import yaml
from hypothesis import given
from hypothesis import strategies as st

from helpers.tiny_recipes import tiny
from lockstep.cli import main, workers
from lockstep.cli.options import parse_recipe, parse_train, resolve
from lockstep.clock import TrainState
from lockstep.config import apply_overrides
from lockstep.distributed import Runtime
from lockstep.launch import launcher
from lockstep.ops.functional import lr_scale
from lockstep.protocols import BenchmarkOp
from lockstep.recipes.snake_ppo import SnakePPO
from lockstep.registry import RECIPES, find_recipe
from lockstep.tools.bench import autoscale as scaling
from lockstep.tools.bench.autoscale import MAX_FACTOR, AutoscaleResult, autoscale

UNLIMITED = 2.0**60
ALWAYS_PAYS = {}
"""Seconds per sample by probed size; sizes not listed take half of the previous time."""


class Probe:
    """Stand-in for an IterationTimer with given costs."""

    def __init__(self, envs, horizon, costs):
        self.envs, self.horizon, self.costs = envs, horizon, costs
        self.algorithm = self

    def sample_buffers(self):
        return {"rollout": torch.empty(self.envs * self.horizon * self.costs.rollout_bytes, dtype=torch.uint8)}

    def ops(self):
        return [
            BenchmarkOp(part, self.envs * self.horizon, 1, lambda: self) for part in ("env", "inference", "learning")
        ]


@dataclass
class Costs:
    """Seconds per sample by number of environments and by batch size, and bytes."""

    acting: dict
    learning: dict
    rollout_bytes: int = 0
    activation_bytes: float = 0.0
    free: float = UNLIMITED

    def seconds(self, probe, phases):
        count = probe.envs if phases == ("env", "act") else probe.envs * probe.horizon
        assert phases in [("env", "act"), ("learn",)]
        by_count = self.acting if phases == ("env", "act") else self.learning
        return count * by_count.get(count, 1.0 / count)

    def saved_bytes(self, run):
        probe = run()
        return self.activation_bytes * probe.envs * probe.horizon


def choose(recipe, acting, learning, processes=1, **bytes_of):
    """Run autoscale with given costs."""
    costs = Costs(acting, learning, **bytes_of)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scaling, "_meter", lambda recipe, envs, horizon: Probe(envs, horizon, costs))
        patch.setattr(scaling, "_seconds", costs.seconds)
        patch.setattr(scaling, "saved_bytes", costs.saved_bytes)
        patch.setattr(scaling, "_free_memory", lambda processes: costs.free / processes)
        return autoscale(recipe, processes)


@pytest.fixture(scope="module")
def recipe():
    """A recipe with 16 environments x 8 steps in two minibatches of 64."""
    return tiny(Path("nowhere"))


# ------------------------------------------------------------------------------------------------------------- doubling


def test_autoscale_doubles_while_a_sample_gets_ten_percent_cheaper(recipe):
    found = choose(
        recipe,
        acting={16: 1.0, 32: 0.9, 64: 0.7, 128: 0.64},  # saves 10 %, more, and less than 10 %
        learning={64: 1.0, 128: 0.5, 256: 0.46},
    )
    assert found.settings["task.num_envs"] == 64
    assert found.settings["algo.batch_size"] == 128
    assert found.reasons[0] == "64 environments: 128 per process would save only 9% of the time per sample"
    assert found.reasons[1] == "batches of 128: 256 per process would save only 8% of the time per sample"


def test_autoscale_keeps_settings_when_doubling_costs_more(recipe):
    found = choose(recipe, acting={16: 1.0, 32: 2.0}, learning={64: 1.0, 128: 3.0})
    assert found.settings == {"task.num_envs": 16, "algo.batch_size": 64, "algo.rollout_steps": 8}
    assert "would save only 0% of the time per sample" in found.reasons[0]


def test_autoscale_stops_at_the_largest_probed_multiple(recipe):
    found = choose(recipe, ALWAYS_PAYS, ALWAYS_PAYS)
    assert found.settings["task.num_envs"] == MAX_FACTOR * 16
    assert (
        found.reasons[0]
        == f"{MAX_FACTOR * 16:,} environments: {MAX_FACTOR} times the recipe's own number, the largest that is probed"
    )
    assert found.settings["algo.batch_size"] == MAX_FACTOR * MAX_FACTOR * 16  # a batch covers all environments


def test_autoscale_stops_before_memory_is_full(recipe):
    gib = 2**30
    # One byte per step is 8 bytes per environment: 32 environments need 256 bytes, but 255 are free.
    found = choose(recipe, ALWAYS_PAYS, {64: 1.0, 128: 1.0}, rollout_bytes=1, free=255)
    assert found.settings["task.num_envs"] == 16
    assert "16 environments: twice as many need" in found.reasons[0]
    found = choose(recipe, ALWAYS_PAYS, {64: 1.0, 128: 1.0}, rollout_bytes=1, free=256)
    assert found.settings["task.num_envs"] == 32
    found = choose(recipe, {16: 1.0, 32: 1.0}, ALWAYS_PAYS, activation_bytes=gib / 64, free=3 * gib)
    assert found.settings["algo.batch_size"] == 128
    assert found.reasons[1] == "batches of 128: twice as many need 4 GiB, but 3 are free"


def test_autoscale_divides_memory_by_processes(recipe):
    found = choose(recipe, ALWAYS_PAYS, {64: 1.0, 128: 1.0}, processes=2, rollout_bytes=1, free=256)
    assert found.settings["task.num_envs"] == 2 * 16


def test_autoscale_multiplies_result_by_processes(recipe):
    costs = {"acting": {32: 1 / 32, 64: 1.0}, "learning": {128: 1 / 128, 256: 1.0}}
    one, four = choose(recipe, **costs), choose(recipe, **costs, processes=4)
    for name in ("task.num_envs", "algo.batch_size"):
        assert four.settings[name] == 4 * one.settings[name]
    assert four.settings["algo.rollout_steps"] == one.settings["algo.rollout_steps"]
    assert "measured on one process, and multiplied by 4" in four.reasons
    assert not any("multiplied" in reason for reason in one.reasons)


@pytest.mark.parametrize("doublings", [0, 1, 2, 3])
def test_autoscale_keeps_minibatches_per_rollout(recipe, doublings):
    batch = 64 * 2**doublings
    found = choose(recipe, {16: 1.0, 32: 1.0}, {2 * batch: 10.0})
    assert found.settings["algo.batch_size"] == batch
    chosen = apply_overrides(recipe, found.settings)
    assert chosen.algo.samples_per_iteration(chosen.task) == 2 * batch
    assert f"{found.settings['algo.rollout_steps']} steps per rollout: 2 minibatches" in found.reasons[2]


def test_autoscale_reason_states_actual_minibatch_count(recipe):
    # With this many environments two batches would be two steps, but a rollout has at least eight.
    found = choose(recipe, {512: 10.0}, {512: 1.0})
    chosen = apply_overrides(recipe, found.settings)
    minibatches = chosen.algo.samples_per_iteration(chosen.task) // chosen.algo.batch_size
    assert f"{minibatches} minibatches" in found.reasons[2]


@given(
    st.integers(1, 40), st.sampled_from([1, 2, 3, 4]), st.integers(0, 6), st.integers(0, 6), st.sampled_from([1, 2, 3])
)
def test_autoscale_result_always_passes_recipe_validation(recipe, horizon, minibatches, envs, batches, processes):
    horizon *= minibatches
    own = apply_overrides(recipe, {"algo": {"rollout_steps": horizon, "batch_size": 16 * horizon // minibatches}})
    own.algo.validate(own.task, own.run)
    first = max(own.algo.batch_size, 16 * 2**envs)
    rounded = -(-first // (16 * 2**envs)) * 16 * 2**envs  # probes have equally many samples per environment
    stop = {rounded * 2 ** (batches + 1): 1e9, (first * 2 ** (batches + 1)): 1e9}
    found = choose(own, {16 * 2 ** (envs + 1): 1e9}, stop, processes=processes)
    chosen = apply_overrides(own, found.settings)
    assert chosen.task.num_envs % (16 * processes) == 0
    chosen.algo.validate(chosen.task, chosen.run)


# -------------------------------------------------------------------------------------------------------- learning rate


def test_autoscale_enables_sqrt_lr_scaling_for_larger_batch(recipe):
    found = choose(recipe, {16: 1.0, 32: 1.0}, {512: 10.0})
    assert found.settings["algo.batch_size"] == 4 * 64
    assert found.settings["algo.lr_scaling"] == "sqrt"
    assert found.reasons[-1].startswith("learning rate times 2: the square root of the batch's growth")


def test_autoscale_leaves_lr_scaling_for_unchanged_batch(recipe):
    found = choose(recipe, {16: 1.0, 32: 1.0}, {64: 1.0, 128: 1.0})
    assert "algo.lr_scaling" not in found.settings
    assert not any("learning rate" in reason for reason in found.reasons)


def test_autoscale_enables_lr_scaling_when_processes_grow_the_batch(recipe):
    found = choose(recipe, {16: 1.0, 32: 1.0}, {64: 1.0, 128: 1.0}, processes=4)
    assert found.settings["algo.lr_scaling"] == "sqrt"


def test_autoscale_keeps_explicit_lr_scaling(recipe):
    linear = apply_overrides(recipe, {"algo.lr_scaling": "linear"})
    assert "algo.lr_scaling" not in choose(linear, {16: 1.0, 32: 1.0}, {512: 10.0}).settings


@pytest.mark.parametrize(
    ("rule", "batch", "reference", "factor"),
    [
        ("none", 4096, 1024, 1.0),
        ("sqrt", 4096, 1024, 2.0),
        ("linear", 4096, 1024, 4.0),
        ("sqrt", 1024, 1024, 1.0),
        ("linear", 256, 1024, 1.0),  # a smaller batch does not lower the rate
        ("sqrt", 4096, None, 1.0),  # the reference batch size is unknown
    ],
)
def test_lr_scale_matches_hand_calculation(rule, batch, reference, factor):
    assert lr_scale(rule, batch, reference) == factor


@given(st.integers(1, 10**6), st.integers(1, 10**6))
def test_lr_scale_is_at_least_one_and_sqrt_at_most_linear(batch, reference):
    root, ratio = (lr_scale(rule, batch, reference) for rule in ("sqrt", "linear"))
    assert 1.0 <= root <= ratio
    assert ratio == max(1.0, batch / reference)


def rate_of(recipe, progress, **settings):
    """Return the learning rate of an update at the given progress of the run."""
    recipe = apply_overrides(recipe, {"algo": {"learning_rate": 0.01, **settings}})
    runtime = Runtime.single_process(recipe.run)
    task = recipe.task.build(runtime.lanes, runtime.device)
    algorithm = recipe.algo.build(task, runtime)
    clock = TrainState(total_samples=10_000, samples=round(10_000 * progress))
    algorithm.collect(clock)
    rates, step = set(), algorithm.optimizer.step

    def watched(loss, batch, rate, *rest):
        rates.add(rate)
        return step(loss, batch, rate, *rest)

    algorithm.optimizer.step = watched
    algorithm.update(clock)
    (rate,) = rates
    return rate


GROWN = {"lr_scaling": "sqrt", "reference_batch_size": 16}  # a batch of 64 doubles the rate


@pytest.mark.parametrize(
    ("progress", "settings", "rate"),
    [
        (0.0, {}, 0.01),
        (0.5, GROWN, 0.02),
        (0.05, GROWN, 0.02),  # end of warm-up
        (0.025, GROWN, 0.01),  # half of the warm-up
        (0.0, GROWN, 0.0),
        (0.5, GROWN | {"lr_scaling": "linear"}, 0.04),
        (0.025, GROWN | {"lr_scaling": "none"}, 0.01),
        (0.025, GROWN | {"reference_batch_size": 64}, 0.01),  # no scaling, hence no warm-up
        (0.025, GROWN | {"reference_batch_size": None}, 0.01),
        (0.05, GROWN | {"warmup_fraction": 0.1}, 0.01),  # an explicit warm-up is kept
        (0.525, GROWN | {"schedule": "linear"}, 0.01),  # linear decay from 5 % on: half is left
    ],
)
def test_ppo_learning_rate_matches_hand_calculation(recipe, progress, settings, rate):
    assert rate_of(recipe, progress, **settings) == pytest.approx(rate)


# -------------------------------------------------------------------------------------------------------------- options


def ask(*words):
    """Return the recipe that `lockstep train WORDS` would train."""
    start, rest, _ = parse_train(words)
    return resolve(parse_recipe(start, rest, "lockstep train"), 1)


@pytest.mark.parametrize(
    ("words", "batch", "reference"),
    [
        ([], 1024, 1024),
        (["--algo.batch-size", "2048"], 2048, 1024),
        (["algo.batch_size=2048"], 2048, 1024),
        (["--batch-size", "512"], 512, 1024),
        (["--preset", "large"], 8192, 8192),
        (["--preset", "large", "--algo.batch-size", "16384"], 16384, 8192),
        (["--smoke", "--algo.batch-size", "256"], 256, 128),
        (["--algo.batch-size", "2048", "--algo.reference-batch-size", "512"], 2048, 512),
        (["algo.reference_batch_size=512"], 1024, 512),
    ],
)
def test_reference_batch_size_defaults_to_recipe_batch_size(words, batch, reference):
    algo = ask("snake-ppo", *words).algo
    assert (algo.batch_size, algo.reference_batch_size) == (batch, reference)


def test_reference_batch_size_ignores_batch_size_of_yaml_file(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("algo: {batch_size: 2048}\n")
    assert ask("snake-ppo", "--config", str(path)).algo.reference_batch_size == 1024


def test_lr_scaling_defaults_to_none():
    assert ask("snake-ppo", "--algo.batch-size", "2048").algo.lr_scaling == "none"


@pytest.mark.parametrize("flag", ["--autoscale", "--max-utilization"])
def test_autoscale_flag_has_two_names(flag):
    assert parse_train(["snake-ppo", flag])[0].autoscale
    assert not parse_train(["snake-ppo"])[0].autoscale


# ----------------------------------------------------------------------------------------------------------------- runs


@pytest.fixture
def _one_thread(monkeypatch):
    monkeypatch.setattr(launcher, "threads_per_process", lambda processes: 1)


@pytest.mark.usefixtures("_one_thread")
def test_train_autoscale_stores_chosen_settings_in_run_config(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(scaling, "MAX_FACTOR", 2)
    monkeypatch.setattr("lockstep.cli.train.run_probe", probe_here)
    words = [
        "--smoke",
        "--autoscale",
        f"run.runs_dir={tmp_path}",
        "run.name=scaled",
        "run.total_samples=1",
        "run.eval_every=none",
    ]
    assert main(["train", "snake-ppo", *words]) == 0
    told = capsys.readouterr().out
    config = yaml.safe_load((tmp_path / "scaled" / "config.yaml").read_text())
    task, algo = config["task"], config["algo"]
    assert task["num_envs"] in (16, 32)
    assert algo["batch_size"] in (128, 256)
    assert task["num_envs"] * algo["rollout_steps"] == 4 * algo["batch_size"]  # still four minibatches
    assert algo["reference_batch_size"] == 128
    assert algo["lr_scaling"] == ("sqrt" if algo["batch_size"] > 128 else "none")
    assert "Scaled to this machine:" in told
    again = told.split("to use these settings without probing: ")[1].split("\n")[0]
    assert overlay_of(again) == {"num_envs": task["num_envs"]} | {
        name: algo[name]
        for name in ("batch_size", "rollout_steps") + (("lr_scaling",) if "lr_scaling" in again else ())
    }


def probe_here(words, progress):
    """Probe in this process, where the test has shortened the probes."""
    return main(["train", *words])


def overlay_of(words):
    """Settings of a command line, by the last part of their names."""
    pairs = (word.split("=") for word in words.split())
    return {name.split(".")[1]: int(value) if value.isdigit() else value for name, value in pairs}


@pytest.mark.usefixtures("_one_thread")
def test_train_autoscale_starts_processes_with_chosen_settings(tmp_path, monkeypatch):
    started = []
    chosen = {"task.num_envs": 64, "algo.batch_size": 512, "algo.rollout_steps": 32, "algo.lr_scaling": "sqrt"}
    monkeypatch.setattr(scaling, "autoscale", lambda recipe, procs, say: AutoscaleResult(chosen, ["a reason"]))
    monkeypatch.setattr("lockstep.cli.train.run_probe", probe_here)
    monkeypatch.setattr(
        workers,
        "launch_and_report",
        lambda words, fleet: started.append((json.loads(Path(words[2]).read_text()), fleet.processes)) or 0,
    )
    line = ["snake-ppo", "--smoke", "--autoscale", "--procs", "2", f"run.runs_dir={tmp_path}", "algo.batch_size=256"]
    assert main(["train", *line]) == 0
    ((spec, procs),) = started
    assert procs == 2
    recipe = apply_overrides(SnakePPO(), spec["settings"])  # the recipe that each process trains
    assert recipe == apply_overrides(recipe, chosen)
    assert recipe.algo.reference_batch_size == 128


@pytest.mark.usefixtures("_one_thread")
def test_train_autoscale_invalid_settings_exit_before_start(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(scaling, "autoscale", lambda *_: AutoscaleResult({"algo.rollout_steps": 31}, []))
    monkeypatch.setattr("lockstep.cli.train.run_probe", probe_here)
    assert main(["train", "snake-ppo", "--smoke", "--autoscale", f"run.runs_dir={tmp_path}"]) == 2
    assert "which minibatches of 128 do not divide" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_train_autoscale_under_torchrun_is_rejected(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["train", "snake-ppo", "--smoke", "--autoscale", f"run.runs_dir={tmp_path}"]) == 2
    told = capsys.readouterr().err
    assert "--autoscale must probe the machine before processes start, but torchrun has already started them." in told
    assert "lockstep train --autoscale --procs N" in told


def test_autoscale_without_rollouts_changes_nothing(recipe):
    @dataclass(frozen=True)
    class Search:
        population: int = 8

    found = autoscale(replace(recipe, algo=Search()), 1)
    assert found.settings == {}
    assert found.reasons[0].startswith("snake-ppo collects no rollouts: nothing is scaled.")


def test_free_memory_is_divided_by_processes():
    assert not torch.cuda.is_available() or pytest.skip("a GPU has memory of its own")
    assert 0 < scaling._free_memory(4) < scaling._free_memory(1) < math.inf


@pytest.mark.parametrize("name", RECIPES)
def test_autoscale_probes_or_refuses_every_recipe(name):
    kind = find_recipe(name)
    recipe = apply_overrides(kind(), kind.smoke_overrides)
    if (why_not := scaling.refusal(recipe)) is not None:
        assert scaling.autoscale(recipe, 1) == scaling.AutoscaleResult({}, [why_not])
        assert name not in ("snake-ppo", "gym-ppo")  # the rollouts of these two can be split freely
        assert f"algo.batch_size ({recipe.algo.batch_size:,}" in why_not  # says which numbers to change
        return
    meter = scaling._meter(recipe, envs=recipe.task.num_envs, horizon=4)
    try:
        assert meter.task.num_envs == recipe.task.num_envs
        assert meter.algorithm.samples == 4 * recipe.task.num_envs
        assert scaling._seconds(meter, ("env", "act")) > 0
        assert scaling._seconds(meter, ("learn",)) > 0
    finally:
        meter.task.close()
