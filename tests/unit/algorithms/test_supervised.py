"""Supervised learning: padding rows, learning rate schedules, early stopping and evaluation."""

import math
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep
from helpers.tiny_recipes import hash_of
from helpers.toy_datasets import ToyConfig
from lockstep.algorithms.supervised import SupervisedConfig
from lockstep.api import resolve_recipe
from lockstep.base import Algorithm, Dataset
from lockstep.checkpoint.lineage import best_checkpoint
from lockstep.clock import TrainState
from lockstep.config import ConfigError, Recipe, RunConfig
from lockstep.distributed import Runtime
from lockstep.evaluation import evaluate
from lockstep.io.jsonl import read_jsonl
from lockstep.nn.gnn import GraphConfig
from lockstep.nn.networks import MLPConfig
from lockstep.protocols import Loss
from lockstep.pytree import tree_map
from lockstep.rng import RandomStream
from lockstep.run_dir import read_config
from lockstep.training_loop import train

NET = GraphConfig(num_layers=0, hidden_size=32, head_layers=1)


@dataclass(frozen=True, kw_only=True)
class ToyRecipe(Recipe):
    """A small network on the toy dataset."""

    task: ToyConfig = field(default_factory=ToyConfig)
    algo: SupervisedConfig = SupervisedConfig(batch_size=20, learning_rate=1e-2, net=NET)
    run: RunConfig = RunConfig(total_samples=103 * 40, log_every=103, eval_every=103, device="cpu", record_video=False)


def agent(config=ToyRecipe().algo, task=ToyRecipe().task, run=ToyRecipe().run):  # noqa: B008
    runtime = Runtime.single_process(run)
    return config.build(task.build(runtime.lanes, runtime.device), runtime)


@pytest.mark.parametrize("kind", ["regression", "binary", "multiclass", "several"])
def test_supervised_training_fits_every_target_type(kind, tmp_path):
    recipe = ToyRecipe(task=ToyConfig(kind=kind), run=replace(ToyRecipe().run, runs_dir=str(tmp_path), name="run"))
    found = train(recipe).clock.evaluation
    metric = {"binary": "auc", "multiclass": "accuracy"}.get(kind, "r2")
    assert found[metric] > 0.93
    assert found["examples"] == 51


def test_padding_rows_change_neither_loss_nor_gradient():
    learner = agent()
    learner.collect(TrainState(total_samples=1000))
    batch = dict(learner.batch)
    assert len(batch["weight"]) == 24  # 8 lanes of 3 rows: 20 samples and 4 padding rows
    spoiled = batch | {"target": torch.where(batch["weight"] > 0, batch["target"], 1e6)}
    for each in (batch, spoiled):
        learner.net.zero_grad()
        result = learner.loss(each)
        result.loss_sum.backward()
        each["came"] = result.loss_sum.item(), float(result.num_samples), learner.net.head[-1].weight.grad.clone()
    assert batch["came"][:2] == spoiled["came"][:2]
    assert batch["came"][1] == 20
    assert torch.equal(batch["came"][2], spoiled["came"][2])


def test_warmup_starts_with_one_step_and_ends_at_peak():
    learner = agent(SupervisedConfig(batch_size=10, learning_rate=1.0, schedule="cosine", warmup_fraction=0.1, net=NET))
    rates = [learner._learning_rate(TrainState(total_samples=1000, samples=samples)) for samples in range(0, 1000, 10)]
    assert rates[:10] == pytest.approx([0.1 * n for n in range(1, 11)])
    assert max(rates) == pytest.approx(1.0)
    assert rates[-1] < 0.001
    assert all(before >= after for before, after in pairwise(rates[10:]))


def test_lr_scaling_raises_peak_with_batch_size_and_adds_warmup():
    config = SupervisedConfig(
        batch_size=80, reference_batch_size=20, learning_rate=1.0, schedule="constant", warmup_fraction=0.0
    )
    for rule, peak in (("none", 1.0), ("sqrt", 2.0), ("linear", 4.0)):
        learner = agent(replace(config, lr_scaling=rule, net=NET))
        assert learner._learning_rate(TrainState(total_samples=8000, samples=4000)) == peak
        assert (learner._learning_rate(TrainState(total_samples=8000)) < peak) == (rule != "none")


def test_plateau_halves_rate_after_patience_without_improvement():
    learner = agent(
        SupervisedConfig(learning_rate=1.0, schedule="plateau", plateau_patience=2, warmup_fraction=0.0, net=NET)
    )
    clock, rates = TrainState(total_samples=1000), []
    for score in (1.0, 2.0, 1.9, 1.8, 1.7, 1.6, 3.0, 2.9, 2.8):
        clock.record_evaluation({"score": score})
        rates.append([learner._learning_rate(clock) for _ in range(3)][-1])  # repeated calls do not halve it again
    assert rates == [1.0, 1.0, 1.0, 0.5, 0.5, 0.25, 0.25, 0.25, 0.125]
    other = agent(
        SupervisedConfig(learning_rate=1.0, schedule="plateau", plateau_patience=2, warmup_fraction=0.0, net=NET)
    )
    other.load_shared_state({name: tensor.clone() for name, tensor in learner.shared_state().items()})
    assert other._learning_rate(clock) == 0.125


def test_plateau_without_evaluations_is_rejected():
    with pytest.raises(ConfigError, match="plateau"):
        SupervisedConfig(schedule="plateau").validate(ToyConfig(), RunConfig(eval_every=None))


def test_default_algorithm_config_accepts_data_set():
    @dataclass(frozen=True, kw_only=True)
    class Config(Algorithm.Config):
        batch_size: int = 24

    Config().validate(ToyConfig(), RunConfig())  # a data set has no num_envs
    assert Config().samples_per_iteration(ToyConfig()) == 24


def test_early_stop_without_improvement_ends_run_and_keeps_best(tmp_path):
    algo = SupervisedConfig(batch_size=20, learning_rate=1e-30, net=NET)  # the evaluation never improves
    run = replace(ToyRecipe().run, runs_dir=str(tmp_path), name="run", early_stop_patience=3)
    result = train(ToyRecipe(algo=algo, run=run))
    assert result.clock.evaluations == 4  # the first is the best; three more do not improve
    assert result.clock.samples < run.total_samples
    assert not result.preempted
    assert best_checkpoint(tmp_path / "run" / "checkpoints").samples == 103


def test_resume_after_early_stop_with_more_patience_continues(tmp_path):
    algo = SupervisedConfig(batch_size=20, learning_rate=1e-30, net=NET)
    run = replace(ToyRecipe().run, runs_dir=str(tmp_path), name="run", early_stop_patience=2)
    train(ToyRecipe(algo=algo, run=run))
    result = train(ToyRecipe(algo=algo, run=replace(run, early_stop_patience=5)), resume=True)
    assert result.clock.evaluations == 6


def test_record_evaluation_ignores_nan_score():
    clock = TrainState(total_samples=10)
    assert not clock.record_evaluation({"score": math.nan})
    assert clock.record_evaluation({"score": -5.0})
    assert (clock.evaluations, clock.evals_since_best, clock.best) == (2, 0, -5.0)


def test_evaluation_mae_matches_direct_computation():
    learner = agent(task=ToyConfig(examples=1201))
    found = evaluate(learner.policy(), ToyConfig(examples=1201), learner.runtime, 1)
    inputs = learner.task.read("validation", np.arange(600))
    by_hand = learner.policy().act(inputs["inputs"], {})[0]
    assert found["mae"] == pytest.approx((by_hand - inputs["target"]).abs().mean().item(), rel=1e-5)
    assert found["examples"] == 600


def test_interrupted_evaluation_returns_none():
    learner = agent()
    learner.runtime.status.stop_requested = True
    assert evaluate(learner.policy(), ToyConfig(), learner.runtime, 1) is None


def test_biases_and_embeddings_have_no_weight_decay():
    groups = agent().optimizer._inner.param_groups
    assert [group["weight_decay"] for group in groups] == [1e-2, 0.0]
    assert all(parameter.dim() > 1 for parameter in groups[0]["params"])


@pytest.mark.distributed
def test_run_with_data_workers_matches_run_without(tmp_path):
    for name, readers in (("plain", 0), ("read", 2)):
        run = replace(ToyRecipe().run, runs_dir=str(tmp_path), name=name, total_samples=250, eval_every=100)
        train(ToyRecipe(algo=replace(ToyRecipe().algo, num_workers=readers), run=run))
    assert hash_of(tmp_path / "read") == hash_of(tmp_path / "plain")


# -- data set, network and loss of the user --------------------------------------------------------------------------


class Huber(Dataset):
    """A data set of tensors with a loss of its own."""

    def setup(self):
        x = RandomStream(0, "test.huber").normal(0, 200, 3)
        self.splits = dict.fromkeys(("train", "validation", "test"), TensorDataset(x, x[:, 0] * 2 + 1))
        self.target_mean_std = (1.0, 2.0)

    def loss(self, outputs, target, weight):
        losses = nn.functional.huber_loss(outputs, (target - 1.0) / 2.0, reduction="none")
        return Loss((losses * weight).sum(), weight.sum(), {"absolute": ((outputs - target).abs() * weight).sum()})


@dataclass(frozen=True, kw_only=True)
class HuberRecipe(Recipe):
    """A loss of the user and dropout."""

    task: Huber.Config = field(default_factory=Huber.Config)
    algo: SupervisedConfig = SupervisedConfig(
        batch_size=30, learning_rate=1e-2, epochs=20, eval_every_epochs=10, net=MLPConfig(hidden_size=32)
    )
    run: RunConfig = RunConfig(total_samples=90, log_every=100, device="cpu")


def test_own_loss_trains_and_logs_its_metric_sums(tmp_path):
    run = lockstep.train(HuberRecipe, run={"runs_dir": str(tmp_path), "name": "run"})
    log = read_jsonl(tmp_path / "run" / "metrics.jsonl")
    assert any({"train/absolute", "train/example_loss"} <= entry.keys() for entry in log)
    assert [entry["eval/examples"] for entry in log if "eval/r2" in entry] == [200.0, 200.0]
    assert lockstep.evaluate(run)["r2"] > 0.9
    assert read_config(tmp_path / "run")[1]["run"]["total_samples"] == 20 * 200
    assert not (tmp_path / "run" / "best.gif").exists()  # there is nothing to play back


def test_dropout_draws_depend_on_position_not_on_global_state():
    learner = agent(SupervisedConfig(batch_size=20, net=MLPConfig(dropout=0.5)))
    sums = {}
    for position in (0, 20, 0):
        torch.rand(7)
        learner.collect(TrainState(total_samples=1000, samples=position))
        batch = learner.batch | {"inputs": tree_map(torch.ones_like, learner.batch["inputs"])}
        before = torch.get_rng_state()
        with learner._seeded(batch):
            sums.setdefault(position, []).append(learner.net(batch["inputs"]).sum().item())
        assert torch.equal(torch.get_rng_state(), before)
        predictions = learner.policy().act(batch["inputs"], {})[0]  # without dropout: equal inputs, equal predictions
        torch.testing.assert_close(predictions, predictions[:1].expand_as(predictions))
        assert learner.net.training
    assert sums[0][0] == sums[0][1] != sums[20][0]


def test_unknown_target_type_is_rejected_before_training(tmp_path):
    class Old(Huber):
        target_type = "classification"

    with pytest.raises(ConfigError, match=r"target_type of Old is 'classification'.\nUse 'regression'"):
        SupervisedConfig().check_task(Old(Old.Config()))


@pytest.mark.parametrize(
    ("settings", "total"),
    [
        ({}, 4000),
        ({"run": {"total_samples": 70}}, 70),
        ({"algo": {"epochs": 3}}, 600),
        ({"algo": {"epochs": 3}, "run": {"total_samples": 70}}, 600),
    ],
)
def test_epochs_become_samples_unless_samples_are_given(settings, total):
    recipe = resolve_recipe(HuberRecipe, smoke=False, preset=None, procs=1, settings=settings)
    assert (recipe.run.total_samples, recipe.run.eval_every) == (total, 2000)
    assert (recipe.algo.epochs, recipe.algo.eval_every_epochs) == (None, None)


def test_resume_with_more_epochs_continues(tmp_path):
    run = lockstep.train(HuberRecipe, algo={"epochs": 1}, run={"runs_dir": str(tmp_path), "name": "run"})
    again = lockstep.resume(run, overrides={"algo.epochs": 2})
    assert again.recipe.run.total_samples == 400


def test_zero_epochs_are_rejected():
    with pytest.raises(ConfigError, match="epochs is 0"):
        resolve_recipe(HuberRecipe, smoke=False, preset=None, procs=1, settings={"algo": {"epochs": 0}})
