"""Readers of untrusted files take linear time."""

import cProfile
import pstats

import pytest

from helpers.run_fixtures import lines, write_run
from lockstep.config import ConfigError
from lockstep.io.safe_read import YAML_PARTS, parse_json, parse_yaml
from lockstep.tools.report.charts import Reference
from lockstep.tools.report.page import write_page
from lockstep.tools.report.reference_curves import ReferencePoint, read_reference, scores_by_step
from lockstep.tools.report.run_data import read_runs


def calls(work, *arguments):
    """Return the number of function calls made by `work`."""
    profile = cProfile.Profile()
    profile.runcall(work, *arguments)
    return pstats.Stats(profile).total_calls


class Counted:
    """A point that counts accesses to its step."""

    looks = 0

    def __init__(self, step):
        self._step = step
        self.score = 1.0

    @property
    def step(self):
        Counted.looks += 1
        return self._step


def test_scores_by_step_reads_each_point_once():
    looks = []
    for size in (1000, 2000):
        Counted.looks = 0
        assert len(scores_by_step([Counted(float(n)) for n in range(size)], size)) == size
        looks.append(Counted.looks)
    assert looks == [1000, 2000]


def test_scores_by_step_ends_one_step_beyond_run():
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


def test_report_work_is_linear_in_reference_length(tmp_path):
    runs = read_runs([write_run(tmp_path / "run")])
    work = []
    for size in (4000, 8000):
        path = tmp_path / f"{size}.csv"
        path.write_text("step,reward,seed\n" + "".join(f"{n / 2},{n},0\n" for n in range(size)))
        reference = Reference("other", read_reference(path), 1.0)
        work.append(calls(write_page, runs, reference) + calls(read_reference, path))
    assert work[1] < 2.5 * work[0]


def test_reference_above_size_limit_is_rejected(tmp_path):
    with (tmp_path / "a.csv").open("wb") as file:
        file.truncate(2**30)
    with pytest.raises(ConfigError, match="more than the limit of 8,388,608"):
        read_reference(tmp_path / "a.csv")


def test_report_work_is_linear_in_log_length(tmp_path):
    few = write_run(tmp_path / "few", lines(count=1000))
    many = write_run(tmp_path / "many", lines(count=2000))
    work = [calls(lambda run: write_page(read_runs([run])), run) for run in (few, many)]
    assert work[1] < 2.3 * work[0]


@pytest.mark.timeout(60)  # a linear pass takes seconds; a quadratic one takes hours
def test_duplicate_key_in_large_file_is_found_in_linear_time():
    names = [f'"{n}":0' for n in range(300_000)]
    with pytest.raises(ValueError, match="the key '299999' is duplicated"):
        parse_json("{" + ",".join([*names, names[-1]]) + "}")
    names = [f"{n}: 0" for n in range(YAML_PARTS // 2 - 2)]
    with pytest.raises(ValueError, match="is duplicated"):
        parse_yaml("\n".join([*names, names[-1]]))
