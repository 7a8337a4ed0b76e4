"""A run goes on: to a larger budget, from an older point, after a kill, and its records with it."""

import json
import os
import shutil
import signal
import threading
import time

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from lockstep.algorithms.ppo import PPO
from lockstep.checkpoint import format as form
from lockstep.config import ConfigError, apply_overrides, read_yaml
from lockstep.inference import load_recipe
from lockstep.io.jsonl import read_jsonl
from lockstep.train import train
from tiny import ITERATION, checkpoints_of, hash_of, tiny


class Killed(Exception):
    """Stands for a kill: nothing after it is done."""


def go_on(path, at=None, **changes):
    """`lockstep resume PATH`, in this process."""
    return train(apply_overrides(load_recipe(path), {"run": changes}), resume=True, at=at)


def killed_run(directory, monkeypatch, iteration, **settings):
    """A run that died in the middle of an iteration, its last checkpoint that of the iteration before."""
    update = PPO.update

    def dying(self, clock):
        if clock.iteration == iteration:
            raise Killed
        return update(self, clock)

    with monkeypatch.context() as patch:
        patch.setattr(PPO, "update", dying)
        with pytest.raises(Killed):
            train(tiny(directory, **settings))
    for thread in threading.enumerate():
        if "_write" in thread.name:  # the last save may be under way, and is not what is tried here
            thread.join()
    return directory / "run"


def logged(path, name="rollout/ep_return_mean"):
    """The samples at which metrics.jsonl and TensorBoard have a number, and those numbers."""
    lines = [(line["samples"], line[name]) for line in read_jsonl(path / "metrics.jsonl") if name in line]
    board = EventAccumulator(str(path / "tensorboard"))
    board.Reload()
    return lines, [(event.step, event.value) for event in board.Scalars(name)]


def agree(lines, events):
    """Whether the two records tell the same; TensorBoard keeps single precision."""
    return [step for step, _ in lines] == [step for step, _ in events] and all(
        event == pytest.approx(line, rel=1e-6) for (_, line), (_, event) in zip(lines, events, strict=True)
    )


# ------------------------------------------------------------------------------------------------------------- going on


def test_a_run_goes_on_to_a_larger_budget(tmp_path):
    first = train(tiny(tmp_path, total_samples=2 * ITERATION))
    second = go_on(first.path, total_samples=5 * ITERATION)
    assert (first.clock.samples, second.clock.samples) == (2 * ITERATION, 5 * ITERATION)
    assert second.path == first.path
    assert second.clock.iteration == 5
    assert checkpoints_of(first.path) == [n * ITERATION for n in range(1, 6)]
    assert read_yaml(first.path / "config.yaml")["run"]["total_samples"] == 5 * ITERATION


def test_a_run_that_went_on_to_a_larger_budget_is_the_run_that_had_it_from_the_start(tmp_path):
    short = train(tiny(tmp_path, "short", total_samples=2 * ITERATION)).path
    go_on(short, total_samples=4 * ITERATION)
    long = train(tiny(tmp_path, "long", total_samples=4 * ITERATION)).path
    assert hash_of(short) == hash_of(long)


def test_a_run_that_is_done_stays_as_it_is(tmp_path):
    path = train(tiny(tmp_path, total_samples=2 * ITERATION)).path
    before = hash_of(path)
    result = go_on(path)
    assert result.clock.samples == 2 * ITERATION
    assert hash_of(path) == before


@pytest.mark.parametrize("iteration", [1, 3])
def test_a_killed_run_resumes_as_if_it_had_not_been(tmp_path, monkeypatch, iteration):
    whole = train(tiny(tmp_path / "whole")).path
    path = killed_run(tmp_path / "killed", monkeypatch, iteration)
    assert checkpoints_of(path) == [n * ITERATION for n in range(1, iteration + 1)]
    go_on(path)
    assert hash_of(path) == hash_of(whole)


def test_an_interrupt_ends_the_iteration_and_saves_it(tmp_path, monkeypatch):
    whole = train(tiny(tmp_path / "whole", save_every=None)).path
    update = PPO.update

    def interrupted(self, clock):
        if clock.iteration == 1:
            os.kill(os.getpid(), signal.SIGINT)
            # The watchdog's thread receives the signal, and this iteration is shorter than its delay on a busy machine.
            deadline = time.monotonic() + 60
            while not self.runtime.status.stop_requested and time.monotonic() < deadline:
                time.sleep(0.001)
        return update(self, clock)

    with monkeypatch.context() as patch:
        patch.setattr(PPO, "update", interrupted)
        result = train(tiny(tmp_path / "stopped", save_every=None))
    assert not result.clock.done
    assert checkpoints_of(result.path) == [2 * ITERATION]
    assert go_on(result.path).clock.done
    assert hash_of(result.path) == hash_of(whole)


def test_what_a_killed_save_left_behind_is_tidied_away(tmp_path):
    path = train(tiny(tmp_path, total_samples=ITERATION)).path
    leftover = path / "checkpoints" / ".000000000999-g0001.partial"
    leftover.mkdir()
    go_on(path)
    assert not leftover.exists()


# ------------------------------------------------------------------------------------------------------------- refusals


def test_a_second_start_into_a_run_is_refused_with_the_command_that_resumes_it(tmp_path):
    path = train(tiny(tmp_path, total_samples=ITERATION)).path
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    with pytest.raises(ConfigError, match=f"{path} already holds a run.\nGo on with it: lockstep resume {path}"):
        train(tiny(tmp_path))
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before


def test_a_run_cannot_go_on_with_another_number_of_lanes(tmp_path):
    path = train(tiny(tmp_path, total_samples=ITERATION, lanes=4)).path
    with pytest.raises(ConfigError, match="was written with 4 lanes and the config says 8"):
        go_on(path, lanes=8)


def test_a_checkpoint_that_is_not_there_is_refused_with_those_that_are(tmp_path):
    path = train(tiny(tmp_path, total_samples=2 * ITERATION)).path
    with pytest.raises(ConfigError, match=r"no checkpoint at 77 samples(.|\n)*There are: 128, 256\."):
        go_on(path, at=77)


def test_a_directory_that_cannot_be_written_is_refused_in_words(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written(.|\n)*--run.runs-dir"):
        train(tiny(tmp_path / "file"))


# ----------------------------------------------------------------------------------------------------------- going back


def test_a_run_goes_on_from_an_older_checkpoint_and_leaves_the_later_ones(tmp_path):
    path = train(tiny(tmp_path)).path
    end = hash_of(path)
    again = go_on(path, at=2 * ITERATION, total_samples=3 * ITERATION)
    assert again.clock.samples == 3 * ITERATION
    assert checkpoints_of(path) == [n * ITERATION for n in (1, 2, 3)]  # the one at 4 is of another history
    go_on(path, total_samples=4 * ITERATION)
    assert hash_of(path) == end


# --------------------------------------------------------------------------------------------------- what is kept of it


def scripted(monkeypatch, *scores):
    """Let the evaluations come to these scores, one after another."""
    script = iter(scores)
    others = {"return_std": 0.0, "episodes": 1.0}
    monkeypatch.setattr("lockstep.train.evaluate", lambda *_: {"return_mean": next(script)} | others)


def kept(path):
    """The checkpoints on disk, in iterations."""
    names = [name.name for name in (path / "checkpoints").iterdir() if name.is_dir()]
    return sorted(int(name.partition("-")[0]) // ITERATION for name in names)


def test_only_the_newest_checkpoints_are_kept(tmp_path):
    assert kept(train(tiny(tmp_path, total_samples=6 * ITERATION, keep_last=2)).path) == [5, 6]


def test_milestones_are_kept_beside_the_newest(tmp_path):
    recipe = tiny(tmp_path, total_samples=7 * ITERATION, keep_last=1, keep_every=3 * ITERATION)
    assert kept(train(recipe).path) == [3, 6, 7]


def test_milestones_are_saved_though_nothing_else_is_due(tmp_path):
    recipe = tiny(tmp_path, total_samples=5 * ITERATION, save_every=100 * ITERATION, keep_every=2 * ITERATION)
    assert kept(train(recipe).path) == [2, 4, 5]


def test_the_best_checkpoint_is_kept_until_there_is_a_better_one(tmp_path, monkeypatch):
    scripted(monkeypatch, 1.0, 5.0, 2.0, 5.0, 4.0)
    recipe = tiny(tmp_path, total_samples=5 * ITERATION, eval_every=ITERATION, keep_last=1)
    result = train(recipe)
    assert kept(result.path) == [2, 5]  # an equal score later is not a better one
    assert result.clock.best == 5.0
    assert (result.path / "checkpoints" / "best").read_text() == f"{2 * ITERATION:012d}-g0001"
    assert (result.path / "checkpoints" / "latest").read_text() == f"{5 * ITERATION:012d}-g0001"
    scripted(monkeypatch, 4.5, 6.0)
    go_on(result.path, total_samples=7 * ITERATION)
    assert kept(result.path) == [5, 7]  # the parent of this start is never deleted
    assert (result.path / "checkpoints" / "best").read_text() == f"{7 * ITERATION:012d}-g0002"


def test_the_best_is_kept_though_nothing_else_was_due_to_be_saved(tmp_path, monkeypatch):
    scripted(monkeypatch, 1.0, 5.0, 2.0)
    recipe = tiny(tmp_path, total_samples=3 * ITERATION, eval_every=ITERATION, save_every=100 * ITERATION, keep_last=1)
    assert kept(train(recipe).path) == [2, 3]


def test_a_best_of_a_history_that_was_left_is_no_best(tmp_path, monkeypatch):
    scripted(monkeypatch, 1.0, 2.0, 9.0)
    path = train(tiny(tmp_path, total_samples=3 * ITERATION, eval_every=ITERATION)).path
    scripted(monkeypatch, 3.0)
    result = go_on(path, at=2 * ITERATION)
    assert result.clock.best == 3.0
    assert (path / "checkpoints" / "best").read_text() == f"{3 * ITERATION:012d}-g0002"


# ------------------------------------------------------------------------------------------------ starting from another


def agent_at(path, samples):
    (name,) = (path / "checkpoints").glob(f"{samples:012d}-g*")
    return form.strip_prefix(form.read_shared(name), "algorithm")


@pytest.fixture
def begun(monkeypatch):
    """What the next run starts with: its shared state at the first iteration."""
    seen = {}
    collect = PPO.collect

    def watched(self, clock):
        if not seen:
            seen.update({name: tensor.detach().clone() for name, tensor in self.shared_state().items()})
        return collect(self, clock)

    monkeypatch.setattr(PPO, "collect", watched)
    return seen


@pytest.mark.parametrize(("suffix", "samples"), [("", 4 * ITERATION), (f"@{2 * ITERATION}", 2 * ITERATION)])
def test_a_new_run_may_start_from_the_weights_of_another_and_from_nothing_else(tmp_path, begun, suffix, samples):
    source = train(tiny(tmp_path, "source")).path
    begun.clear()
    result = train(tiny(tmp_path, "new", total_samples=ITERATION, seed=7), init_from=f"{source}{suffix}")
    given = agent_at(source, samples)
    assert given["optimizer.updates"] > 0
    for name, tensor in begun.items():
        if name.startswith("net."):
            assert torch.equal(tensor, given[name]), name
        else:
            assert not tensor.any(), name  # moments of the optimizer, counts
    assert result.clock.iteration == 1


def test_weights_of_another_network_are_refused_by_name(tmp_path):
    source = train(tiny(tmp_path, "source", total_samples=ITERATION)).path
    other = apply_overrides(tiny(tmp_path, "new"), {"algo.encoder.out_features": 16})
    with pytest.raises(ValueError, match=r"net\.\S+ was saved as"):
        train(other, init_from=str(source))


def test_a_run_without_checkpoints_has_no_weights_to_start_from(tmp_path):
    with pytest.raises(ConfigError, match="has no checkpoint to start from"):
        train(tiny(tmp_path, "new"), init_from=str(tmp_path / "nowhere"))


# -------------------------------------------------------------------------------------------------------------- records


def test_a_run_is_logged_the_same_in_both_records(tmp_path):
    path = train(tiny(tmp_path)).path
    lines, events = logged(path)
    assert [samples for samples, _ in lines] == [n * ITERATION for n in (1, 2, 3, 4)]
    assert agree(lines, events)


def test_the_records_of_a_resumed_run_are_those_of_the_uninterrupted_one(tmp_path, monkeypatch):
    whole = train(tiny(tmp_path / "whole", log_every=ITERATION)).path
    path = killed_run(tmp_path / "killed", monkeypatch, 3, save_every=ITERATION)
    shutil.rmtree(path / "checkpoints" / f"{3 * ITERATION:012d}-g0001")  # it died before this one was on disk
    assert logged(path)[0][-1][0] == 3 * ITERATION  # while the log was ahead of it
    go_on(path)
    lines, events = logged(path)
    assert lines == logged(whole)[0]
    assert agree(lines, events)


def test_the_records_of_a_run_that_died_before_its_first_checkpoint_begin_anew(tmp_path, monkeypatch):
    path = killed_run(tmp_path, monkeypatch, 2)
    shutil.rmtree(path / "checkpoints")
    assert len(logged(path)[1]) == 2
    go_on(path)
    lines, events = logged(path)
    assert [samples for samples, _ in lines] == [n * ITERATION for n in (1, 2, 3, 4)]
    assert agree(lines, events)


def test_metrics_between_two_log_entries_survive_a_kill(tmp_path, monkeypatch):
    whole = train(tiny(tmp_path / "whole", log_every=4 * ITERATION)).path
    path = killed_run(tmp_path / "killed", monkeypatch, 2, log_every=4 * ITERATION)
    go_on(path)
    assert logged(path)[0] == logged(whole)[0] != []


def test_every_line_of_the_records_is_json_with_its_samples(tmp_path):
    path = train(tiny(tmp_path, eval_every=2 * ITERATION, eval_episodes=8)).path
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert all(line["samples"] == line["iteration"] * ITERATION for line in lines)
    names = set().union(*lines)
    assert {"time/global_fps", "rollout/ep_return_mean", "train/policy_loss", "eval/return_mean"} <= names
