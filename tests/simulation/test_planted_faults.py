"""The simulator detects injected faults: earlier bugs of the code and other likely ones."""

import pytest
from test_schedules import explore

from lockstep.checkpoint import fencing, lineage, publishing
from lockstep.checkpoint.fencing import GenerationFence
from lockstep.checkpoint.lineage import find, generations, list_checkpoints, parent_of
from lockstep.checkpoint.naming import CheckpointName

SCHEDULES = 3000


def any_claim_supersedes(patch):
    """A start stops as soon as a newer one has claimed a generation, even if the newer one cannot load."""

    def superseded(self):
        self.superseded_by = "a newer claim" if self._newer() else ""
        return bool(self.superseded_by)

    patch.setattr(GenerationFence, "superseded", superseded)


def parent_is_chosen_before_the_claim(patch):
    """The older start may delete the parent in between; the loaded checkpoint is not verified again."""

    def confirm(self, chosen, problems):
        if problems:
            return chosen, []
        return settle(self, chosen, problems)

    settle = GenerationFence.confirm
    patch.setattr(GenerationFence, "confirm", confirm)
    any_claim_supersedes(patch)


def line_follows_the_newest_claim(patch):
    """An aborted `resume --checkpoint` drops the newer checkpoints."""

    def lines(directory, disk):
        everything, line, limit = list_checkpoints(directory, disk), [], None
        generation = max(generations(disk.names(directory)), default=0)
        while generation:
            line += [n for n in everything if n.generation == generation and (limit is None or n <= limit)]
            try:
                limit = parent_of(directory, generation, disk)
            except lineage.CorruptCheckpointError:
                generation -= 1
                continue
            if limit is None:
                break
            generation = limit.generation
        return line

    for module in (lineage, fencing, publishing):
        patch.setattr(module, "lineage", lines)


def newer_checkpoints_of_another_line_are_deleted(patch):
    class Low(int):
        def __gt__(self, other):
            return False

    names = publishing.list_checkpoints
    patch.setattr(
        publishing, "list_checkpoints", lambda *a: [CheckpointName(Low(n.samples), n.generation) for n in names(*a)]
    )


def publishing_is_not_synced(patch):
    def publish(fencing, partial, name):
        if fencing.superseded():
            raise OSError(fencing.superseded_by)
        fencing.disk.rename(partial, fencing.directory / str(name))

    patch.setattr("world.publish", publish)


def deleting_takes_many_steps(patch):
    """A partly deleted checkpoint remains under its final name."""
    patch.setattr(publishing, "discard", lambda disk, path: disk.remove_tree(path))


def resume_begins_at_zero_if_it_finds_nothing(patch):
    def forgetful(directory, at=None, check=None, disk=None):
        try:
            return find(directory, at, check, disk)
        except Exception:
            return None, []

    patch.setattr(fencing, "find", forgetful)
    patch.setattr("world.find", lambda *a: (None, []))


@pytest.mark.parametrize(
    "plant",
    [
        any_claim_supersedes,
        parent_is_chosen_before_the_claim,
        line_follows_the_newest_claim,
        newer_checkpoints_of_another_line_are_deleted,
        publishing_is_not_synced,
        deleting_takes_many_steps,
        resume_begins_at_zero_if_it_finds_nothing,
    ],
    ids=lambda plant: plant.__name__,
)
def test_simulator_finds_injected_fault(monkeypatch, plant):
    plant(monkeypatch)
    violations, _, _ = explore(range(SCHEDULES), stop_at=1)
    assert violations
