"""Checkpoints: the whole run, written in the background, published by one rename, restored on any world size."""

import json
import os
import shutil
import threading
import time
from dataclasses import asdict
from pathlib import Path

from lockstep.config import ConfigError, RunConfig
from lockstep.lanes import deal
from lockstep.protocols import Algorithm, Clock, State, VecEnv
from lockstep.run import format as form
from lockstep.run.format import Damaged
from lockstep.run.lineage import Name, claim, claimant, lineage, newest_generation, parent_of, published
from lockstep.run.records import CHECKPOINTS
from lockstep.runtime import Runtime
from lockstep.runtime.store import heartbeat, wait_while_beating
from lockstep.trees import copy_into

FIRST_SAVE, LEAST, MOST = 20.0, 10.0, 600.0
"""Seconds to the first save when the config leaves it open, and between two of them at least and at most."""
SHARE = 0.01
"""How much of the time saves may take."""


class Outdated(RuntimeError):
    """Somebody started this run anew: what this process still does belongs to no run."""


class Checkpoints:
    """The checkpoints of one run directory, seen from a process that takes part in the run."""

    def __init__(self, directory: Path, run: RunConfig, runtime: Runtime) -> None:
        self.directory, self.run, self.runtime = directory, run, runtime
        self.generation = 0
        self.notes: list[str] = []
        """What the user should know about the restore, in sentences."""
        self._last: Name | None = None
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None
        self._saved_at = time.monotonic()
        self._cost: float | None = None
        """Seconds of work that the last save took."""
        self._said_interval = 0.0
        self._looked_at = 0.0
        self.outdated = ""
        """Why this process may publish nothing more, in a sentence; empty as long as it may."""

    # -- restoring -----------------------------------------------------------------------------------------------------

    def restore(self, algorithm: Algorithm, task: VecEnv, clock: Clock, at: int | None = None) -> None:
        """Put the newest whole checkpoint, or the one at so many samples, into agent, task and clock, if any."""
        chosen, self.generation, self.notes = self.runtime.from_main(lambda: self._choose(at))
        if chosen is None:
            return
        path = self.directory / chosen
        files = form.read_json(path / form.MANIFEST)["files"]
        values = form.read_json(path / form.VALUES)
        if values["lanes"] != self.runtime.lanes.count:
            raise ConfigError(
                f"{path} was written with {values['lanes']} lanes and the config says {self.runtime.lanes.count}.",
                f"Lanes are fixed when a run starts: set run.lanes to {values['lanes']} in its config.yaml.",
            )
        shared = form.read_shared(path)
        algorithm.load_shared_state(form.split(shared, "algorithm"))
        task.load_shared_state(form.split(shared, "task"))
        for lane in self.runtime.lanes.local:
            state = form.read_lane(path, lane, files)
            algorithm.load_lane_state(lane, form.split(state, "algorithm"))
            task.load_lane_state(lane, form.split(state, "task"))
        budget = clock.budget
        for name, value in values["clock"].items():
            setattr(clock, name, value)
        clock.budget = budget  # a resumed run may be given a larger one
        self.notes.append(_deal_sentence(self.runtime.lanes.count, self.runtime.size, values["processes"]))

    def _choose(self, at: int | None) -> tuple[str | None, int, list[str]]:
        """On the main process: the checkpoint to go on from, and the generation claimed with it as parent."""
        self.directory.mkdir(exist_ok=True)
        job = self.runtime.job
        if job and claimant(self.directory, newest_generation(self.directory)).get("job") == job:
            at = None  # this job went on from there once already, and came further
        chosen, notes = find(self.directory, at)
        generation = claim(self.directory, chosen, job)
        for leftover in self.directory.glob(".*.partial"):
            shutil.rmtree(leftover, ignore_errors=True)
        return (str(chosen) if chosen else None), generation, notes

    # -- saving --------------------------------------------------------------------------------------------------------

    def due(self) -> bool:
        """Whether the main process finds it time to save; others hear of it through the loop's agreement."""
        automatic = self.run.save_every is None and self.runtime.main
        return automatic and time.monotonic() - self._saved_at > self.interval

    @property
    def interval(self) -> float:
        """Seconds between saves: so many that saving takes a hundredth of the time."""
        return FIRST_SAVE if self._cost is None else min(max(self._cost / SHARE, LEAST), MOST)

    def news(self) -> list[str]:
        """What to tell about the cadence, whenever it has changed much."""
        if self.run.save_every is not None or self._cost is None or not self.runtime.main:
            return []
        if 0.5 < self.interval / max(self._said_interval, 1e-9) < 2.0:
            return []
        self._said_interval = self.interval
        return [f"Saving every {self.interval:.0f} s: a save takes {self._cost:.2f} s of work."]

    def superseded(self) -> bool:
        """Whether somebody has claimed a newer generation of this run; asked on the main process."""
        if not self.outdated and self.runtime.main and newest_generation(self.directory) > self.generation:
            newest = newest_generation(self.directory)
            by = claimant(self.directory, newest)
            self.outdated = (
                f"this run was started anew (generation {newest}, by pid {by.get('pid', '?')} on"
                f" {by.get('host', '?')}), so generation {self.generation} stops here and publishes nothing more."
            )
        return bool(self.outdated)

    def look_for_newer(self) -> bool:
        """The same, at most once a second."""
        if time.monotonic() - self._looked_at > 1.0:
            self._looked_at = time.monotonic()
            self.superseded()
        return bool(self.outdated)

    def save(self, algorithm: Algorithm, task: VecEnv, clock: Clock, *, best: bool = False) -> None:
        """Copy everything to host memory now; write and publish it in the background."""
        began = time.perf_counter()
        with self.runtime.phase("copy"):
            self.wait()
            name = Name(clock.samples, self.generation)
            if name == self._last:
                # Known here, not read from disk: processes may find the directory at different stages of its writing.
                if best and self.runtime.main:
                    self._point("best", name)
                return
            self._last = name
            lanes = lanes_copy(algorithm, task, self.runtime.lanes.local)
            shared = shared_copy(algorithm, task) if self.runtime.main else {}
            values = {"clock": asdict(clock), "lanes": self.runtime.lanes.count, "processes": self.runtime.size}
            keep = clock.every(self.run.keep_every)
        self._saved_at = time.monotonic()
        copying = time.perf_counter() - began
        arguments = (name, lanes, shared, values, keep, best, copying)
        self._thread = self.runtime.watchdog.saving = threading.Thread(target=self._write, args=arguments, daemon=True)
        self._thread.start()

    def leave(self) -> None:
        """On the way out after a failure: a save that has all it needs is let finish."""
        if self._thread is not None:
            self._thread.join(3.0)

    def wait(self) -> None:
        """Until the save under way, if any, is on disk as far as this process has a part in it."""
        if self._thread is not None:
            self._thread.join()
            self._thread = None
        if self._error is not None:
            raise RuntimeError(f"the checkpoint could not be written: {self._error}") from self._error

    def _write(
        self, name: Name, lanes: State, shared: State, values: object, keep: bool, best: bool, copying: float
    ) -> None:
        began = time.monotonic()
        try:
            self._write_files(name, lanes, shared, values, keep, best)
        except BaseException as error:
            self._error = error
        self._cost = copying + time.thread_time()  # of this thread, which wrote this one checkpoint
        watchdog = self.runtime.watchdog
        watchdog.longest_save = max(0.8 * watchdog.longest_save, copying + time.monotonic() - began)

    def _write_files(self, name: Name, lanes: State, shared: State, values: object, keep: bool, best: bool) -> None:
        partial = self.directory / f".{name}.partial"
        partial.mkdir(exist_ok=True)
        mine, word = form.lane_file(self.runtime.lanes.local), f"save/{name}/{self.runtime.rank}"
        with heartbeat(self.runtime.mailbox(), f"{word}/beat", self.run.timeout):
            files = {mine: form.write_tensors(partial / mine, lanes)}
        self.runtime.pass_through("save")
        mailbox = self.runtime.mailbox()
        mailbox.post(word, json.dumps(files))
        if not self.runtime.main:
            return
        files[form.SHARED] = form.write_tensors(partial / form.SHARED, shared)
        files[form.VALUES] = form.write_json(partial / form.VALUES, values)
        words = {rank: f"save/{name}/{rank}" for rank in range(self.runtime.size)}
        for rank, word in words.items():
            # However long it takes, as long as that process is at work; no collective would tell of its end here.
            silence = f"process {rank} has said nothing for {self.run.timeout:.0f} s"
            files |= json.loads(wait_while_beating(mailbox, word, f"{word}/beat", self.run.timeout, silence))
        mailbox.forget([*words.values(), *(f"{word}/beat" for word in words.values())])
        form.write_json(partial / form.MANIFEST, {"files": files, "keep": keep})
        self.runtime.pass_through("publish")
        if self.superseded():
            shutil.rmtree(partial, ignore_errors=True)
            return
        os.rename(partial, self.directory / str(name))
        self._point("latest", name)
        if best:
            self._point("best", name)
        self._rotate()

    def _point(self, pointer: str, name: Name) -> None:
        form.replace_text(self.directory / pointer, str(name))

    def _rotate(self) -> None:
        """Delete what is neither among the newest, nor the best, nor a milestone, nor this generation's parent."""
        if newest_generation(self.directory) != self.generation:
            return  # somebody started this run anew: it is theirs to tidy
        line = lineage(self.directory)
        spared = {*line[: self.run.keep], parent_of(self.directory, self.generation), best_of(self.directory)}
        for name in published(self.directory):
            path = self.directory / str(name)
            if name not in spared and not (name in line and form.is_milestone(path)):
                shutil.rmtree(path)


def shared_copy(algorithm: Algorithm, task: VecEnv) -> State:
    """What all lanes share, copied to host memory."""
    return form.join(algorithm=algorithm.shared_state(), task=task.shared_state())


def lanes_copy(algorithm: Algorithm, task: VecEnv, lanes: range) -> State:
    """What some lanes own, copied to host memory."""
    return {
        form.lane_prefix(lane) + name: tensor
        for lane in lanes
        for name, tensor in form.join(algorithm=algorithm.lane_state(lane), task=task.lane_state(lane)).items()
    }


def find(directory: Path, at: int | None = None) -> tuple[Name | None, list[str]]:
    """The newest whole checkpoint of a run (or the one at so many samples), and a sentence for each damaged one."""
    notes: list[str] = []
    line = lineage(directory) if directory.is_dir() else []
    wanted = [name for name in line if at is None or name.samples == at]
    if at is not None and not wanted:
        there = ", ".join(str(name.samples) for name in sorted(line)) or "none"
        raise ConfigError(f"there is no checkpoint at {at} samples in {directory}.", f"There are: {there}.")
    for name in wanted:
        try:
            form.verify(directory / str(name))
            return name, [f"{note} Using the one before it." for note in notes]
        except Damaged as damage:
            notes.append(f"Checkpoint {name} is damaged: {damage}.")
    if notes and at is not None:
        raise ConfigError("\n".join(notes), "Ask for another one, or for none: then the newest whole one is used.")
    if notes:
        raise ConfigError("\n".join(notes), f"No whole checkpoint is left in {directory}.")
    return None, notes


def best_of(directory: Path) -> Name | None:
    """The checkpoint with the best evaluation, if the run as it is now has one."""
    pointer = directory / "best"
    name = Name.parse(pointer.read_text().strip()) if pointer.exists() else None
    return name if name in lineage(directory) else None


def _deal_sentence(lanes: int, now: int, before: int) -> str:
    shares = [len(share) for share in deal(lanes, now)]
    dealt = f"{shares[0]} each" if len(set(shares)) == 1 else ", ".join(map(str, shares))
    hosts = f"1 process hosts all {lanes} lanes" if now == 1 else f"{now} processes host the {lanes} lanes ({dealt})"
    return f"{hosts} of this run; the checkpoint was written by {before}."


def load_weights(source: str, algorithm: Algorithm, runtime: Runtime) -> None:
    """Start an agent from the weights of another run, `RUN` or `RUN@STEP`; everything else stays fresh."""
    run, _, step = source.partition("@")
    directory = Path(run) / CHECKPOINTS
    name = runtime.from_main(lambda: str(find(directory, int(step) if step else None)[0] or ""))
    if not name:
        raise ConfigError(f"{run} has no checkpoint to start from.", "Give a run directory, or RUN@STEP.")
    saved, weights = form.split(form.read_shared(directory / name), "algorithm"), algorithm.weights()
    copy_into(weights, {key: saved[key] for key in weights if key in saved}, f"the agent in {source}")
