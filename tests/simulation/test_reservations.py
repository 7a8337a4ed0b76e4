"""Simultaneous starts with automatic names never share a directory."""

import random
from pathlib import Path
from types import SimpleNamespace

import pytest
from simulated_disk import Process, SimulatedDisk
from world import World

from lockstep import run_reservation

RECIPE = SimpleNamespace(name="gym-ppo", run=SimpleNamespace(runs_dir="/checkpoints", name=None))


def check_then_make(recipe, disk):
    """The earlier, racy implementation: check whether the name exists, then create it."""
    path = run_reservation.run_path(recipe)
    number = 1
    while disk.exists(path):
        number += 1
        path = path.with_name(f"{path.name}-{number}")
    disk.make(path)
    return path


def reserve_at_once(seed, reserve, starts=8):
    """Return the directories of `starts` simultaneous starts, in a random order of their operations."""
    world = World(seed)
    got = []
    for number in range(starts):
        disk = SimulatedDisk(world)
        disk.process = Process(f"start{number}", disk)
        world.scheduler.add(disk.process, lambda disk=disk: got.append(reserve(RECIPE, disk)))
    world.run(stall=random.Random(seed).choice([0, 0.1]))
    return got


@pytest.fixture(autouse=True)
def _one_moment(monkeypatch):
    path = "gym-ppo-20261116-120000"
    monkeypatch.setattr(run_reservation, "run_path", lambda recipe: Path(recipe.run.runs_dir) / path)


def test_reserve_simultaneous_starts_get_distinct_directories():
    for seed in range(500):
        assert len(set(reserve_at_once(seed, run_reservation.reserve))) == 8, f"seed {seed}"


def test_simulator_finds_the_race_of_check_then_make():
    assert any(len(set(reserve_at_once(seed, check_then_make))) < 8 for seed in range(20))
