"""The section of a report about a sweep, from files that no training wrote."""

import json
import re

import pytest

from helpers.run_fixtures import CONFIG, line, write_run
from lockstep.cli import main

SPACE = {
    "algo.learning_rate": {"low": 1e-5, "high": 1e-1, "log": True, "step": None},
    "algo.gamma": {"choices": [0.9, 0.99]},
}
RECORD = {"format": 1, "recipe": "gym-ppo", "command": "lockstep sweep gym-ppo", "space": SPACE, "procs": 1}
RECORD |= {"trials": 12, "metric": None, "direction": "maximize", "prune": "none", "min_samples": 4000, "eta": 3}
RECORD |= {"sampler": "tpe", "seed": 0, "window": 8}


def write_sweep(path, trials=12):
    """Write a sweep whose value depends on the learning rate only."""
    path.mkdir()
    settings = {key: CONFIG[key] for key in ("task", "algo", "run")}
    settings["run"] = settings["run"] | {"total_samples": 4000}
    (path / "sweep.json").write_text(json.dumps(RECORD | {"settings": settings}))
    records = []
    for number in range(trials):
        searched = {"algo.learning_rate": 10.0 ** -(1 + number % 4), "algo.gamma": (0.9, 0.99)[number % 2]}
        values = [float(number % 4)]
        records.append({"settings": searched, "values": values, "failure": None})
        run = CONFIG["run"] | {"name": f"trial-{number}"}
        told = [line(4000, eval__return_mean=values[-1]), line(4000, rollout__ep_return_mean=1.0)]
        status = {"state": "finished", "processes": 1}
        write_run(path / f"trial-{number}", told, config=CONFIG | {"run": run}, status=status)
    (path / "trials.json").write_text(json.dumps({"format": 1, "trials": records}))
    return path


def test_report_of_a_sweep_has_its_trials_and_importances(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["report", str(write_sweep(tmp_path / "lr"))]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "<h2>Sweep lr</h2>" in page
    section = page[page.index("<h2>Sweep lr</h2>") : page.index("<h2>Curves</h2>")]
    assert "12 of 12 trials: 12 finished" in section
    assert len(re.findall("<title>trial ", section)) == 12
    assert section.count("--c:var(--c0)") == 3
    importances = section[section.index("importance for the value") :]
    assert 0 < importances.index("algo.learning_rate") < importances.index("algo.gamma")
    assert "Curves of the best 8 of 12 trials" in page


def test_report_of_a_damaged_sweep_is_refused(tmp_path, capsys):
    sweep = write_sweep(tmp_path / "lr", trials=1)
    changed = json.loads((sweep / "trials.json").read_text())
    changed["trials"][0]["settings"] = {"algo.<script>": 1}
    (sweep / "trials.json").write_text(json.dumps(changed))
    assert main(["report", str(sweep), "--out", str(tmp_path / "report.html")]) == 2
    assert "does not have the settings of the space" in capsys.readouterr().err


@pytest.mark.parametrize(("key", "value"), [("eta", 1), ("trials", "12"), ("space", {}), ("prune", "best")])
def test_sweep_file_with_an_invalid_value_is_refused(tmp_path, capsys, key, value):
    sweep = write_sweep(tmp_path / "lr", trials=1)
    record = json.loads((sweep / "sweep.json").read_text())
    (sweep / "sweep.json").write_text(json.dumps(record | {key: value}))
    assert main(["report", str(sweep)]) == 2
    assert f"sweep.json is not the file of a sweep: {key} is invalid" in capsys.readouterr().err


def test_ls_shows_a_sweep_as_one_entry(tmp_path, capsys):
    write_sweep(tmp_path / "lr")
    assert main(["ls", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "lr" in shown
    assert "12/12 done" in shown
    assert "3.00" in shown
