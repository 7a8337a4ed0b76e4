"""Resume: larger budgets, older checkpoints, kills, checkpoint retention, initial weights and consistent logs."""

import json
import os
import shutil
import signal
import threading
import time

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from helpers.tiny_recipes import ITERATION, checkpoints_of, hash_of, tiny
from lockstep.algorithms.ppo import PPO
from lockstep.checkpoint import format as form
from lockstep.config import ConfigError, apply_overrides, read_yaml
from lockstep.inference import load_recipe
from lockstep.io.jsonl import read_jsonl
from lockstep.training_loop import train


class Killed(Exception):
    """Simulates a kill: no later code of the iteration runs."""


def resume_run(path, at=None, **changes):
    """Run `lockstep resume PATH` in this process."""
    return train(apply_overrides(load_recipe(path), {"run": changes}), resume=True, at=at)


def killed_run(directory, monkeypatch, iteration, **settings):
    """Start a run that dies during an iteration; its last checkpoint is that of the previous iteration."""
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
        if "_write" in thread.name:  # wait for the last save, which is not under test
            thread.join()
    return directory / "run"


def logged(path, name="rollout/ep_return_mean"):
    """Return (samples, value) pairs of one metric from metrics.jsonl and from TensorBoard."""
    lines = [(line["samples"], line[name]) for line in read_jsonl(path / "metrics.jsonl") if name in line]
    board = EventAccumulator(str(path / "tensorboard"))
    board.Reload()
    return lines, [(event.step, event.value) for event in board.Scalars(name)]


def agree(lines, events):
    """Return whether both logs have the same entries; TensorBoard stores float32."""
    return [step for step, _ in lines] == [step for step, _ in events] and all(
        event == pytest.approx(line, rel=1e-6) for (_, line), (_, event) in zip(lines, events, strict=True)
    )


# -------------------------------------------------------------------------------------------------------------- resume


def test_resume_continues_to_larger_budget(tmp_path):
    first = train(tiny(tmp_path, total_samples=2 * ITERATION))
    second = resume_run(first.path, total_samples=5 * ITERATION)
    assert (first.clock.samples, second.clock.samples) == (2 * ITERATION, 5 * ITERATION)
    assert second.path == first.path
    assert second.clock.iteration == 5
    assert checkpoints_of(first.path) == [n * ITERATION for n in range(1, 6)]
    assert read_yaml(first.path / "config.yaml")["run"]["total_samples"] == 5 * ITERATION


def test_resume_to_larger_budget_matches_run_with_that_budget(tmp_path):
    short = train(tiny(tmp_path, "short", total_samples=2 * ITERATION)).path
    resume_run(short, total_samples=4 * ITERATION)
    long = train(tiny(tmp_path, "long", total_samples=4 * ITERATION)).path
    assert hash_of(short) == hash_of(long)


def test_resume_of_finished_run_changes_nothing(tmp_path):
    path = train(tiny(tmp_path, total_samples=2 * ITERATION)).path
    before = hash_of(path)
    result = resume_run(path)
    assert result.clock.samples == 2 * ITERATION
    assert hash_of(path) == before


@pytest.mark.parametrize("iteration", [0, 1, 3])
def test_resume_after_kill_matches_uninterrupted_run(tmp_path, monkeypatch, iteration):
    whole = train(tiny(tmp_path / "whole", digest_every=1)).path
    path = killed_run(tmp_path / "killed", monkeypatch, iteration, digest_every=1)
    assert checkpoints_of(path) == [n * ITERATION for n in range(1, iteration + 1)]
    resume_run(path)
    assert hash_of(path) == hash_of(whole)
    assert (path / "digests.jsonl").read_text() == (whole / "digests.jsonl").read_text()


def test_interrupt_finishes_iteration_and_saves_checkpoint(tmp_path, monkeypatch):
    whole = train(tiny(tmp_path / "whole", save_every=None)).path
    update = PPO.update

    def interrupted(self, clock):
        if clock.iteration == 1:
            os.kill(os.getpid(), signal.SIGINT)
            # The watchdog thread handles the signal. On a busy machine that can take longer than this iteration.
            deadline = time.monotonic() + 60
            while not self.runtime.status.stop_requested and time.monotonic() < deadline:
                time.sleep(0.001)
        return update(self, clock)

    with monkeypatch.context() as patch:
        patch.setattr(PPO, "update", interrupted)
        result = train(tiny(tmp_path / "stopped", save_every=None))
    assert not result.clock.done
    assert checkpoints_of(result.path) == [2 * ITERATION]
    assert resume_run(result.path).clock.done
    assert hash_of(result.path) == hash_of(whole)


@pytest.mark.parametrize("stop_at", [ITERATION + 1, 2 * ITERATION])
def test_stop_at_ends_whole_iteration_and_resume_matches_uninterrupted_run(tmp_path, stop_at):
    settings = {"save_every": None, "eval_every": 2 * ITERATION, "eval_episodes": 2}
    whole = train(tiny(tmp_path / "whole", **settings)).path
    stopped = train(tiny(tmp_path / "stopped", **settings), stop_at=stop_at)
    assert (stopped.preempted, stopped.clock.samples, stopped.clock.evaluations) == (True, 2 * ITERATION, 1)
    assert resume_run(stopped.path).clock.done
    assert hash_of(stopped.path) == hash_of(whole)


def test_resume_with_reached_stop_at_trains_nothing(tmp_path):
    recipe = tiny(tmp_path)
    path = train(recipe, stop_at=2 * ITERATION).path
    before = hash_of(path)
    assert train(recipe, resume=True, stop_at=ITERATION).clock.samples == 2 * ITERATION
    assert hash_of(path) == before


def test_resume_removes_partial_checkpoint_directories(tmp_path):
    path = train(tiny(tmp_path, total_samples=ITERATION)).path
    leftover = path / "checkpoints" / ".000000000999-g0001.partial"
    leftover.mkdir()
    resume_run(path)
    assert not leftover.exists()


# --------------------------------------------------------------------------------------------------------------- errors


def test_train_into_existing_run_is_rejected_with_resume_command(tmp_path):
    path = train(tiny(tmp_path, total_samples=ITERATION)).path
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file()}
    with pytest.raises(ConfigError, match=f"{path} already contains a run.\nResume it: lockstep resume {path}"):
        train(tiny(tmp_path))
    assert {file: file.read_bytes() for file in path.rglob("*") if file.is_file()} == before


def test_resume_with_different_lane_count_is_rejected(tmp_path):
    path = train(tiny(tmp_path, total_samples=ITERATION, lanes=4)).path
    with pytest.raises(ConfigError, match="was written with 4 lanes and the config says 8"):
        resume_run(path, lanes=8)


def test_resume_at_missing_checkpoint_error_lists_available(tmp_path):
    path = train(tiny(tmp_path, total_samples=2 * ITERATION)).path
    with pytest.raises(ConfigError, match=r"no checkpoint at 77 samples(.|\n)*There are: 128, 256\."):
        resume_run(path, at=77)


def test_train_into_unwritable_directory_is_rejected(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"cannot be written(.|\n)*--run.runs-dir"):
        train(tiny(tmp_path / "file"))


# ---------------------------------------------------------------------------------------------------------- older start


def test_resume_from_older_checkpoint_discards_later_ones(tmp_path):
    path = train(tiny(tmp_path)).path
    end = hash_of(path)
    again = resume_run(path, at=2 * ITERATION, total_samples=3 * ITERATION)
    assert again.clock.samples == 3 * ITERATION
    assert checkpoints_of(path) == [n * ITERATION for n in (1, 2, 3)]  # the one at 4 belongs to the abandoned history
    resume_run(path, total_samples=4 * ITERATION)
    assert hash_of(path) == end


# ------------------------------------------------------------------------------------------------ checkpoint retention


def scripted(monkeypatch, *scores):
    """Make the evaluations return these scores in order."""
    script = iter(scores)
    others = {"return_std": 0.0, "episodes": 1.0}
    monkeypatch.setattr(
        "lockstep.training_loop.evaluate_during_training", lambda *_: {"return_mean": next(script)} | others
    )


def kept(path):
    """Return the iterations of the checkpoints on disk."""
    names = [name.name for name in (path / "checkpoints").iterdir() if name.is_dir()]
    return sorted(int(name.partition("-")[0]) // ITERATION for name in names)


def test_keep_last_keeps_only_newest_checkpoints(tmp_path):
    assert kept(train(tiny(tmp_path, total_samples=6 * ITERATION, keep_last=2)).path) == [5, 6]


def test_keep_every_keeps_milestones_in_addition_to_newest(tmp_path):
    recipe = tiny(tmp_path, total_samples=7 * ITERATION, keep_last=1, keep_every=3 * ITERATION)
    assert kept(train(recipe).path) == [3, 6, 7]


def test_keep_every_saves_milestones_between_regular_saves(tmp_path):
    recipe = tiny(tmp_path, total_samples=5 * ITERATION, save_every=100 * ITERATION, keep_every=2 * ITERATION)
    assert kept(train(recipe).path) == [2, 4, 5]


def test_best_checkpoint_is_kept_until_a_better_one_exists(tmp_path, monkeypatch):
    scripted(monkeypatch, 1.0, 5.0, 2.0, 5.0, 4.0)
    recipe = tiny(tmp_path, total_samples=5 * ITERATION, eval_every=ITERATION, keep_last=1)
    result = train(recipe)
    assert kept(result.path) == [2, 5]  # an equal score does not replace the best
    assert result.clock.best == 5.0
    assert (result.path / "checkpoints" / "best").read_text() == f"{2 * ITERATION:012d}-g0001"
    assert (result.path / "checkpoints" / "latest").read_text() == f"{5 * ITERATION:012d}-g0001"
    scripted(monkeypatch, 4.5, 6.0)
    resume_run(result.path, total_samples=7 * ITERATION)
    assert kept(result.path) == [5, 7]  # the parent of this start is never deleted
    assert (result.path / "checkpoints" / "best").read_text() == f"{7 * ITERATION:012d}-g0002"


def test_best_checkpoint_is_saved_between_regular_saves(tmp_path, monkeypatch):
    scripted(monkeypatch, 1.0, 5.0, 2.0)
    recipe = tiny(tmp_path, total_samples=3 * ITERATION, eval_every=ITERATION, save_every=100 * ITERATION, keep_last=1)
    assert kept(train(recipe).path) == [2, 3]


def test_best_score_of_abandoned_history_is_ignored(tmp_path, monkeypatch):
    scripted(monkeypatch, 1.0, 2.0, 9.0)
    path = train(tiny(tmp_path, total_samples=3 * ITERATION, eval_every=ITERATION)).path
    scripted(monkeypatch, 3.0)
    result = resume_run(path, at=2 * ITERATION)
    assert result.clock.best == 3.0
    assert (path / "checkpoints" / "best").read_text() == f"{3 * ITERATION:012d}-g0002"


# ------------------------------------------------------------------------------------------------------ initial weights


def agent_at(path, samples):
    (name,) = (path / "checkpoints").glob(f"{samples:012d}-g*")
    return form.strip_prefix(form.read_shared(name), "algorithm")


@pytest.fixture
def begun(monkeypatch):
    """The shared state of the next run at its first iteration."""
    seen = {}
    collect = PPO.collect

    def watched(self, clock):
        if not seen:
            seen.update({name: tensor.detach().clone() for name, tensor in self.shared_state().items()})
        return collect(self, clock)

    monkeypatch.setattr(PPO, "collect", watched)
    return seen


@pytest.mark.parametrize(("suffix", "samples"), [("", 4 * ITERATION), (f"@{2 * ITERATION}", 2 * ITERATION)])
def test_init_from_loads_weights_only(tmp_path, begun, suffix, samples):
    source = train(tiny(tmp_path, "source")).path
    begun.clear()
    result = train(tiny(tmp_path, "new", total_samples=ITERATION, seed=7), init_from=f"{source}{suffix}")
    given = agent_at(source, samples)
    assert given["optimizer.updates"] > 0
    for name, tensor in begun.items():
        if name.startswith("net."):
            assert torch.equal(tensor, given[name]), name
        else:
            assert not tensor.any(), name  # optimizer moments and counters
    assert result.clock.iteration == 1


def test_init_from_uses_best_checkpoint(tmp_path, begun, monkeypatch):
    scores = iter((1.0, 5.0, 2.0, 3.0))
    result = {"return_std": 0.0, "episodes": 1.0}
    monkeypatch.setattr(
        "lockstep.training_loop.evaluate_during_training", lambda *_: {"return_mean": next(scores)} | result
    )
    source = train(tiny(tmp_path, "source", eval_every=ITERATION)).path
    begun.clear()
    train(tiny(tmp_path, "new", total_samples=ITERATION), init_from=str(source))
    given = agent_at(source, 2 * ITERATION)
    assert all(torch.equal(tensor, given[name]) for name, tensor in begun.items() if name.startswith("net."))


def test_init_from_prints_what_was_loaded_and_task_differences(tmp_path, capsys):
    source = train(tiny(tmp_path, "source", total_samples=ITERATION)).path
    weights = [tensor for name, tensor in agent_at(source, ITERATION).items() if name.startswith("net.")]
    other = apply_overrides(tiny(tmp_path, "new", total_samples=ITERATION), {"task.max_steps_without_food": 77})
    capsys.readouterr()
    train(other, init_from=str(source))
    text = " ".join(capsys.readouterr().out.split())
    assert f"{len(weights)} tensors with {sum(map(torch.numel, weights)):,} values" in text
    assert f"checkpoint {ITERATION:012d}-g0001" in text
    assert "Not loaded: optimizer, return_moments, training state, environments." in text
    assert "task.max_steps_without_food is 77 here and None in" in text
    assert "num_envs" not in text


def test_init_from_with_different_network_error_names_tensor_and_setting(tmp_path):
    source = train(tiny(tmp_path, "source", total_samples=ITERATION)).path
    other = apply_overrides(tiny(tmp_path, "new"), {"algo.encoder.out_features": 16})
    words = r"net\.\S+ was saved as(.|\n)*algo.encoder.out_features is 16 here and 8 in"
    with pytest.raises(ConfigError, match=words):
        train(other, init_from=str(source))


def test_init_from_with_different_spaces_error_names_both(tmp_path):
    source = train(tiny(tmp_path, "source", total_samples=ITERATION)).path
    other = apply_overrides(tiny(tmp_path, "new"), {"task.size": 5})
    words = r"observation space of .* is Box\(.*\(3, 4, 4\), uint8\), but that of this task is Box\(.*\(3, 5, 5\)"
    with pytest.raises(ConfigError, match=words):
        train(other, init_from=str(source))


def test_init_from_run_without_checkpoints_is_rejected(tmp_path):
    with pytest.raises(ConfigError, match="has no checkpoint to start from"):
        train(tiny(tmp_path, "new"), init_from=str(tmp_path / "nowhere"))


# ----------------------------------------------------------------------------------------------------------------- logs


def test_jsonl_and_tensorboard_logs_have_equal_entries(tmp_path):
    path = train(tiny(tmp_path)).path
    lines, events = logged(path)
    assert [samples for samples, _ in lines] == [n * ITERATION for n in (1, 2, 3, 4)]
    assert agree(lines, events)


def test_logs_after_resume_match_uninterrupted_run(tmp_path, monkeypatch):
    whole = train(tiny(tmp_path / "whole", log_every=ITERATION)).path
    path = killed_run(tmp_path / "killed", monkeypatch, 3, save_every=ITERATION)
    shutil.rmtree(path / "checkpoints" / f"{3 * ITERATION:012d}-g0001")  # as if killed before this save
    assert logged(path)[0][-1][0] == 3 * ITERATION  # the log is ahead of the newest checkpoint
    resume_run(path)
    lines, events = logged(path)
    assert lines == logged(whole)[0]
    assert agree(lines, events)


def test_events_of_resume_follow_those_written_by_faster_clock(tmp_path, monkeypatch):
    """TensorBoard reads event files by name, which begins with the time of the machine that wrote them."""
    path = killed_run(tmp_path, monkeypatch, 3, save_every=ITERATION)
    for file in (path / "tensorboard").iterdir():
        parts = file.name.split(".")
        parts[3] = str(int(parts[3]) + 3600)
        file.rename(file.with_name(".".join(parts)))
    resume_run(path)
    lines, events = logged(path)
    assert [samples for samples, _ in lines] == [n * ITERATION for n in (1, 2, 3, 4)]
    assert agree(lines, events)


def test_logs_restart_when_killed_before_first_checkpoint(tmp_path, monkeypatch):
    path = killed_run(tmp_path, monkeypatch, 2)
    shutil.rmtree(path / "checkpoints")
    assert len(logged(path)[1]) == 2
    resume_run(path)
    lines, events = logged(path)
    assert [samples for samples, _ in lines] == [n * ITERATION for n in (1, 2, 3, 4)]
    assert agree(lines, events)


def test_metrics_between_log_entries_survive_kill(tmp_path, monkeypatch):
    whole = train(tiny(tmp_path / "whole", log_every=4 * ITERATION)).path
    path = killed_run(tmp_path / "killed", monkeypatch, 2, log_every=4 * ITERATION)
    resume_run(path)
    assert logged(path)[0] == logged(whole)[0] != []


def test_metrics_lines_are_json_with_samples_and_iteration(tmp_path):
    path = train(tiny(tmp_path, eval_every=2 * ITERATION, eval_episodes=8)).path
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert all(line["samples"] == line["iteration"] * ITERATION for line in lines)
    names = set().union(*lines)
    assert {"time/global_fps", "rollout/ep_return_mean", "train/policy_loss", "eval/return_mean"} <= names
