"""A disk in memory, with a scheduler that selects the next process after every operation.

A process can be killed between any two of its operations, or be stalled while others run. A power cut ends all of them.
It keeps what was synced, any prefix of the later changes to each directory, and truncated files.
"""

import json
from dataclasses import dataclass, field

from greenlet import getcurrent, greenlet

from lockstep.checkpoint.disk import Disk
from lockstep.checkpoint.format import CorruptCheckpointError


class Killed(BaseException):
    """Raised inside a killed process, so that its further operations have no effect."""


@dataclass(eq=False)
class File:
    text: str = ""
    synced: str | None = None


@dataclass(eq=False)
class Directory:
    entries: dict = field(default_factory=dict)
    synced: dict = field(default_factory=dict)
    unsynced: list = field(default_factory=list)
    """Changes since the last sync: each a dict of names, with None for a removed name."""

    def change(self, **names):
        self.unsynced.append(names)
        for name, node in names.items():
            if node is None:
                self.entries.pop(name, None)
            else:
                self.entries[name] = node

    def sync(self):
        self.synced, self.unsynced = dict(self.entries), []

    def after_power_cut(self, random):
        for change in self.unsynced[: random.randint(0, len(self.unsynced))]:
            for name, node in change.items():
                if node is None:
                    self.synced.pop(name, None)
                else:
                    self.synced[name] = node
        self.entries, self.unsynced = dict(self.synced), []
        for node in self.entries.values():
            if isinstance(node, Directory):
                node.after_power_cut(random)
            elif node.synced is None:
                node.text = node.text[: random.randint(0, len(node.text))]
            else:
                node.text = node.synced


@dataclass(eq=False)
class Process:
    name: str
    disk: "SimulatedDisk"
    work: greenlet | None = None
    dead: bool = False
    asleep: int = 0
    """Number of operations of other processes for which it stays stalled."""
    loaded: bool = False
    """Whether it has loaded a checkpoint or found none."""
    ended: str = ""
    generation: int = 0


class SimulatedDisk(Disk):
    """One process's view of the shared tree."""

    def __init__(self, world):
        self.world = world
        self.process = Process("", self)

    # -- hook of every operation ---------------------------------------------------------------------------------------

    def _step(self, what, path):
        self.world.pause(self.process, what, path)

    def _at(self, path):
        node = self.world.root
        for part in path.parts[1:]:
            node = node.entries.get(part) if isinstance(node, Directory) else None
            if node is None:
                raise FileNotFoundError(str(path))
        return node

    def _directory(self, path):
        node = self._at(path)
        if not isinstance(node, Directory):
            raise NotADirectoryError(str(path))
        return node

    # -- the interface -------------------------------------------------------------------------------------------------

    def names(self, directory):
        self._step("list", directory)
        return list(self._directory(directory).entries)

    def is_directory(self, path):
        try:
            return isinstance(self._at(path), Directory)
        except FileNotFoundError:
            return False

    def exists(self, path):
        self._step("stat", path)
        try:
            self._at(path)
        except FileNotFoundError:
            return False
        return True

    def read(self, path):
        self._step("read", path)
        try:
            return self._at(path).text
        except FileNotFoundError:
            raise CorruptCheckpointError(f"{path} is missing") from None

    def read_json(self, path):
        try:
            return json.loads(self.read(path))
        except ValueError:
            raise CorruptCheckpointError(f"{path} is not json") from None

    def verify(self, checkpoint):
        for name in FILES:
            if self.read(checkpoint / name) != content(checkpoint, name):
                raise CorruptCheckpointError(f"{checkpoint / name} is not what was written")

    def is_milestone(self, checkpoint):
        return False

    def make(self, directory):
        self._step("mkdir", directory)
        parent = self._directory(directory.parent)
        if directory.name not in parent.entries:
            parent.change(**{directory.name: Directory()})

    def make_all(self, directory):
        self._step("mkdir", directory)

    def make_new(self, directory):
        self._step("mkdir", directory)
        parent = self._directory(directory.parent)
        if directory.name in parent.entries:
            raise FileExistsError(str(directory))
        parent.change(**{directory.name: Directory()})

    def create(self, path, text):
        self._step("create", path)
        parent = self._directory(path.parent)
        if path.name in parent.entries:
            raise FileExistsError(str(path))
        file = File()
        parent.change(**{path.name: file})
        self._step("write", path)
        file.text = text
        self._step("fsync", path)
        file.synced = text

    def replace(self, path, text):
        beside = path.with_name(f".{path.name}.{self.process.name}.partial")
        self._step("create", beside)
        file = File(text)
        self._directory(path.parent).change(**{beside.name: file})
        self._step("fsync", beside)
        file.synced = text
        self.rename(beside, path)

    def rename(self, source, target):
        self._step("rename", source)
        parent = self._directory(source.parent)
        node = self._at(source)
        there = parent.entries.get(target.name)
        if isinstance(there, Directory) and there.entries:
            raise OSError(39, "Directory not empty", str(target))
        self.world.note_unpublished(self.process, source)
        parent.change(**{source.name: None, target.name: node})
        self.world.note_published(self.process, target)

    def remove(self, path):
        try:
            node = self._at(path)
        except FileNotFoundError:
            return
        if isinstance(node, Directory):
            self.remove_tree(path)
        else:
            self._step("unlink", path)
            self._directory(path.parent).change(**{path.name: None})

    def remove_tree(self, directory):
        self._step("rmtree", directory)
        node = self._directory(directory)
        self.world.note_unpublished(self.process, directory)
        for name in list(node.entries):
            self._step("unlink", directory / name)
            node.change(**{name: None})
        self._step("rmdir", directory)
        self._directory(directory.parent).change(**{directory.name: None})

    def fsync_directory(self, directory):
        self._step("fsync", directory)
        self._directory(directory).sync()


FILES = ("shared", "manifest.json")


def content(checkpoint, name):
    """Return the content of a checkpoint file, which depends only on the samples, not on the writer."""
    samples, _, _ = checkpoint.name.lstrip(".").partition("-")
    return json.dumps([name, int(samples)])


class Scheduler:
    """Runs processes as greenlets, one operation at a time."""

    def __init__(self, random):
        self.random = random
        self.processes: list[Process] = []
        self.trace: list[str] = []
        self.main = getcurrent()

    def add(self, process, function):
        process.work = greenlet(function, parent=self.main)
        self.processes.append(process)

    def runnable(self):
        return [p for p in self.processes if not p.dead and not p.work.dead]

    def run_one_and_hear(self, process):
        """Let a process do its next operation; return the one it is about to do then, or None if it has ended."""
        return process.work.switch()
