"""Order and division of the runs of an experiment, by a simulation of the scheduler."""

from fractions import Fraction

import pytest

from lockstep.experiment.seed_queue import SeedRun, divide_runs

STEPS = 840 * 1000  # divides by every number of places


def make_runs(number, tmp_path):
    return [SeedRun(seed, tmp_path / f"seed-{seed}", STEPS, 1) for seed in range(number)]


@pytest.mark.parametrize("places", range(1, 9))
@pytest.mark.parametrize("number", range(0, 20))
def test_no_place_is_empty_before_the_end(tmp_path, number, places):
    end = simulate(divide_runs(make_runs(number, tmp_path), places), places)
    rounds = Fraction(number, places) if number > places else min(number, 1)
    assert end == rounds * STEPS


@pytest.mark.parametrize(
    ("number", "places", "stops"), [(5, 2, [420_000]), (7, 3, [560_000, 280_000]), (6, 4, [420_000, 420_000])]
)
def test_places_minus_one_runs_are_divided_at_most(tmp_path, number, places, stops):
    divided = divide_runs(make_runs(number, tmp_path), places)
    assert [run.stop_at for run in divided if run.stop_at is not None] == stops
    assert len(divided) == number + len(stops)
    assert {run.seed for run in divided if run.stop_at is None} == set(range(number))


def test_a_part_has_at_least_one_step(tmp_path):
    runs = [SeedRun(seed, tmp_path / f"seed-{seed}", 1, 1) for seed in range(5)]
    assert [run.stop_at for run in divide_runs(runs, 2)] == [1, None, None, None, None, None]


def simulate(parts, places):
    """Return the steps after which all parts have ended, if a free place takes the next part of an inactive run."""
    waiting, trained, active, now = list(parts), {}, [], 0
    while waiting or active:
        while len(active) < places:
            part = next((part for part in waiting if part.seed not in {other.seed for _, other in active}), None)
            if part is None:
                break
            waiting.remove(part)
            target = part.steps if part.stop_at is None else part.stop_at
            active.append((now + target - trained.get(part.seed, 0), part))
            trained[part.seed] = target
        now = min(end for end, _ in active)
        active = [(end, part) for end, part in active if end > now]
    assert all(steps == STEPS for steps in trained.values())
    return now
