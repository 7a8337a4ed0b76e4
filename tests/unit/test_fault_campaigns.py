"""benchmarks/chaos.py: the logs of campaigns, how they continue, and their table; the settings of every recipe."""

import json
import sys
from pathlib import Path

import pytest

from lockstep.registry import RECIPES

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture(autouse=True)
def _faults(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    yield
    for name in [name for name in sys.modules if name.partition(".")[0] == "faults"]:
        del sys.modules[name]


def fault(seconds, kind="preempt", storage="directory"):
    return {"recipe": "gym-ppo", "storage": storage, "fault": kind, "recovered_after": seconds}


def ended(value="abc", storage="directory", left=()):
    run = {"hash": value, "undisturbed": "abc", "forks": 1, "left": list(left)}
    return {"recipe": "gym-ppo", "storage": storage, **run}


def test_campaign_continues_after_the_last_run_that_ended(tmp_path):
    from faults.log import CampaignLog

    path = tmp_path / "logs" / "gym-ppo.jsonl"
    log = CampaignLog(path)
    for line in (fault(1.0), fault(2.0), ended(), fault(3.0)):
        log.add(line)
    with path.open("a") as file:
        file.write('{"recipe": "gym')  # the campaign was killed
    again = CampaignLog(path)
    assert (again.faults, again.runs) == (2, 1)
    again.add(fault(4.0))
    assert [json.loads(line) for line in path.read_text().splitlines()] == [fault(1.0), fault(2.0), ended(), fault(4.0)]


def test_table_counts_kinds_and_runs_that_differ_or_left_something(tmp_path):
    from faults.log import CampaignLog, write_table

    directory, bucket = CampaignLog(tmp_path / "a.jsonl"), CampaignLog(tmp_path / "b.jsonl")
    for line in (fault(1.0), fault(3.0), fault(8.0, "take over"), ended()):
        directory.add(line)
    for line in (fault(5.0, storage="bucket"), ended("def", "bucket", ["a file"])):
        bucket.add(line)
    text = " ".join(write_table(tmp_path).read_text().split())
    assert "4 faults in 2 runs and 2 forks of them. 1 of 2 runs, with their forks, ended with the hash" in text
    assert "1 left processes" in text
    assert "it took 4.0 s (median), and 8.0 s at most" in text
    assert "| preempt | 2 | 1 | 3.0 | 5.0 |" in text
    assert "| take over | 1 | 0 | 8.0 | 8.0 |" in text
    assert "| gym-ppo | directory | 3 | 1 | 1 | 0 | abc |" in text


def test_every_recipe_has_a_campaign():
    from faults.settings import SAVES, run_settings

    for recipe in RECIPES:
        settings = dict(word.split("=", 1) for word in run_settings(recipe) if "=" in word)
        assert int(settings["run.total_samples"]) == SAVES * int(settings["run.save_every"]) > 0
