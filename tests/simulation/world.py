"""Starts of one run on a simulated disk, and the invariants that must always hold."""

import random as randomness
from pathlib import Path

from greenlet import GreenletExit
from simulated_disk import FILES, Directory, Killed, Process, Scheduler, SimulatedDisk, content

from lockstep.checkpoint.fencing import GenerationFence
from lockstep.checkpoint.format import CorruptCheckpointError
from lockstep.checkpoint.lineage import find, lineage
from lockstep.checkpoint.naming import CheckpointName, generation_file
from lockstep.checkpoint.publishing import clear_leftovers, prune, publish
from lockstep.config import ConfigError

RUN = Path("/checkpoints")
KEEP = 2


class Violation(AssertionError):
    """An invariant is violated."""


class World:
    """One disk, its processes and its history."""

    def __init__(self, seed):
        self.random = randomness.Random(seed)
        self.root = Directory({"checkpoints": Directory()})
        self.root.sync()
        self.directory = self.root.entries["checkpoints"]
        self.scheduler = Scheduler(self.random)
        self.published_by: list[CheckpointName] = []
        """Published checkpoints in chronological order."""
        self.parents: dict[int, CheckpointName | None] = {}
        self.states: set[int] = set()
        self.watching = True

    # -- callbacks of the disk -----------------------------------------------------------------------------------------

    def pause(self, process, what, path):
        """Before every operation, let the scheduler choose the next process."""
        if process.dead:
            raise Killed
        if not self.watching:
            return
        self.scheduler.main.switch((process, what, path))
        if process.dead:
            raise Killed

    def whole(self, name, entries):
        node = entries.get(str(name))
        files = node.entries if isinstance(node, Directory) else {}
        return all(file in files and files[file].text == content(RUN / str(name), file) for file in FILES)

    def note_published(self, process, path):
        name = CheckpointName.parse(path.name)
        if name is not None:
            self.published_by.append(name)

    def note_unpublished(self, process, path):
        """Check that an undamaged checkpoint is deleted only if another with at least as many samples is durable."""
        gone = CheckpointName.parse(path.name)
        if gone is None or not self.whole(gone, self.directory.entries):
            return
        names = (CheckpointName.parse(name) for name in self.directory.synced)
        durable = [n for n in names if n and n != gone and self.whole(n, self.directory.synced)]
        if not any(name.samples >= gone.samples for name in durable):
            raise Violation(f"{process.name} deletes {gone}, the newest undamaged checkpoint; durable: {durable}")

    # -- processes -----------------------------------------------------------------------------------------------------

    def start(self, name, at=None, saves=3):
        """Add a process that starts or resumes the run, trains and saves."""
        disk = SimulatedDisk(self)
        process = disk.process = Process(name, disk)

        def work():
            try:
                process.ended = self._train(process, at, saves)
            except (ConfigError, OSError, CorruptCheckpointError) as error:
                process.ended = f"failed: {error}"
                self._check_nothing_is_left(process)
            except (Killed, GreenletExit):
                process.ended = "killed"

        self.scheduler.add(process, work)
        return process

    def _train(self, process, at, saves):
        disk = process.disk
        fence = GenerationFence(RUN, True, disk)
        try:
            chosen, _ = fence.begin(at)
        finally:
            process.generation = fence.generation
        while True:
            problems = self._load(disk, chosen)
            process.loaded |= not problems
            following, _ = fence.confirm(chosen, problems)
            if following == chosen:
                break
            chosen = following
        if problems:
            return f"failed: {problems}"
        self.parents[fence.generation] = chosen
        clear_leftovers(fence)
        samples = chosen.samples if chosen else 0
        for _ in range(saves):
            if fence.superseded():
                return self._stop(process)
            samples += 1
            try:
                self._save(fence, CheckpointName(samples, fence.generation))
            except (OSError, CorruptCheckpointError):
                if fence.superseded_by:
                    return self._stop(process)
                continue
            try:
                prune(fence, KEEP)
            except (OSError, CorruptCheckpointError):
                continue
        return "finished"

    def _check_nothing_is_left(self, process):
        """Check that a failed start has withdrawn its claim. Another start may have claimed the same number since."""
        holders = [p for p in self.scheduler.processes if p is not process and p.generation == process.generation]
        claim = generation_file(RUN, process.generation).name
        if not process.loaded and claim in self.directory.entries and not holders:
            raise Violation(f"{process.name} failed ({process.ended}) and left {claim}")

    def _load(self, disk, name):
        if name is None:
            return []
        try:
            disk.verify(RUN / str(name))
        except CorruptCheckpointError as damage:
            return [str(damage)]
        return []

    def _save(self, fence, name):
        disk, partial = fence.disk, RUN / f".{name}.partial"
        disk.make(partial)
        for file in FILES:
            disk.create(partial / file, content(RUN / str(name), file))
        disk.fsync_directory(partial)
        publish(fence, partial, name)

    def _stop(self, process):
        """Check that a start stops only for a newer one that has loaded its checkpoint."""
        newer = [p for p in self.scheduler.processes if p.loaded and p.generation > process.generation]
        if not newer:
            raise Violation(f"{process.name} stopped, but no newer start has loaded a checkpoint")
        return "superseded"

    # -- schedules -----------------------------------------------------------------------------------------------------

    def run(self, kill=0.0, stall=0.0, cut=0.0):
        """Run until every process has finished or was killed, or until a power cut."""
        random = self.random
        while True:
            runnable = self.scheduler.runnable()
            if not runnable:
                return
            awake = [p for p in runnable if not p.asleep] or runnable
            process = random.choice(awake)
            for other in runnable:
                other.asleep = max(0, other.asleep - 1)
            dice = random.random()
            if dice < kill:
                process.dead = True
                continue
            if dice < kill + stall:
                process.asleep = random.randint(5, 60)
                continue
            if dice < kill + stall + cut:
                self.cut_power()
                return
            told = self.scheduler.run_one_and_hear(process)
            if told is not None:
                self.scheduler.trace.append(f"{process.name} {told[1]} {told[2].name}")
            self.states.add(hash(tuple(self.directory.entries)))

    def cut_power(self):
        for process in self.scheduler.processes:
            process.dead = True
        self.directory.after_power_cut(self.random)
        alive = set(self.directory.entries)
        self.published_by = [name for name in self.published_by if str(name) in alive]

    def line(self):
        """Return the newest checkpoint of the newest generation that published: a resume must use it."""
        if not self.published_by:
            return None
        newest = max(name.generation for name in self.published_by)
        return max(name for name in self.published_by if name.generation == newest)

    def check_at_the_end(self):
        """With no active process, check that a resume uses the newest durable checkpoint of the newest lineage."""
        self.watching = False
        disk = SimulatedDisk(self)
        whole = [
            n for n in map(CheckpointName.parse, self.directory.entries) if n and self.whole(n, self.directory.entries)
        ]
        try:
            found, notes = find(RUN, None, None, disk)
        except ConfigError as error:
            if whole:
                raise Violation(f"a resume is refused although {whole} are undamaged: {error}") from None
            return
        wanted = self.line()
        if found is None and whole:
            raise Violation(f"a resume starts at zero although {whole} are undamaged")
        if wanted is not None and found != wanted:
            raise Violation(f"a resume uses {found} instead of {wanted} ({notes})")
        line = lineage(RUN, disk)
        newest = max((n.generation for n in self.published_by), default=0)
        late = [n for n in line if n.generation != newest and n.samples > (self.parents.get(newest) or n).samples]
        if late:
            raise Violation(f"{late} of older starts are part of the run")
