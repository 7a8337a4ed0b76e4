"""Readers of foreign files take time in proportion to the file: twice the file, about twice the work."""

import cProfile
import pstats

import pytest

from lockstep.config import ConfigError
from lockstep.io.safe_read import YAML_PARTS, parse_json, parse_yaml
from lockstep.tools.report.charts import Reference
from lockstep.tools.report.page import Extras, write_page
from lockstep.tools.report.reference_curves import ReferencePoint, read_reference, scores_by_step
from lockstep.tools.report.run_data import read_runs
from written_runs import lines, write_run


def calls(work, *arguments):
    """How many functions some work calls."""
    profile = cProfile.Profile()
    profile.runcall(work, *arguments)
    return pstats.Stats(profile).total_calls


class Counted:
    """A point that counts how often it is looked at."""

    looks = 0

    def __init__(self, step):
        self._step = step
        self.score = 1.0

    @property
    def step(self):
        Counted.looks += 1
        return self._step


def test_a_reference_twice_as_long_is_looked_at_twice_as_often():
    looks = []
    for size in (1000, 2000):
        Counted.looks = 0
        assert len(scores_by_step([Counted(float(n)) for n in range(size)], size)) == size
        looks.append(Counted.looks)
    assert looks == [1000, 2000]


def test_a_reference_is_shown_up_to_the_run_and_one_step_beyond():
    points = [
        ReferencePoint(20.0, 2.0, "b"),
        ReferencePoint(10.0, 1.0),
        ReferencePoint(20.0, 4.0),
        ReferencePoint(40.0, 5.0),
        ReferencePoint(30.0, 9.0),
    ]
    assert scores_by_step(points, 15.0) == [(10.0, [1.0]), (20.0, [2.0, 4.0])]
    assert scores_by_step(points, 20.0) == [(10.0, [1.0]), (20.0, [2.0, 4.0])]
    assert scores_by_step(points, 25.0) == [(10.0, [1.0]), (20.0, [2.0, 4.0]), (30.0, [9.0])]
    assert scores_by_step(points, 0.0) == [(10.0, [1.0])]
    assert len(scores_by_step(points, 100.0)) == 4


def test_a_page_with_a_reference_twice_as_long_takes_twice_the_work(tmp_path):
    runs = read_runs([write_run(tmp_path / "run")])
    work = []
    for size in (4000, 8000):
        path = tmp_path / f"{size}.csv"
        path.write_text("step,reward,seed\n" + "".join(f"{n / 2},{n},0\n" for n in range(size)))
        reference = Reference("other", read_reference(path), 1.0)
        work.append(calls(write_page, runs, Extras(reference=reference)) + calls(read_reference, path))
    assert work[1] < 2.5 * work[0]


def test_a_reference_that_is_too_large_is_refused(tmp_path):
    with (tmp_path / "a.csv").open("wb") as file:
        file.truncate(2**30)
    with pytest.raises(ConfigError, match="more than the 8,388,608 it may"):
        read_reference(tmp_path / "a.csv")


def test_a_log_twice_as_long_takes_twice_the_work(tmp_path):
    few = write_run(tmp_path / "few", lines(count=1000))
    many = write_run(tmp_path / "many", lines(count=2000))
    work = [calls(lambda run: write_page(read_runs([run]), Extras()), run) for run in (few, many)]
    assert work[1] < 2.3 * work[0]


@pytest.mark.timeout(60)  # seconds are enough; by counting each name among all it took hours
def test_a_key_that_stands_twice_is_found_in_one_pass():
    names = [f'"{n}":0' for n in range(300_000)]
    with pytest.raises(ValueError, match="it says '299999' twice"):
        parse_json("{" + ",".join([*names, names[-1]]) + "}")
    names = [f"{n}: 0" for n in range(YAML_PARTS // 2 - 2)]
    with pytest.raises(ValueError, match="twice"):
        parse_yaml("\n".join([*names, names[-1]]))
