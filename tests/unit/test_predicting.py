"""A run that predicts, on the command line: a table by phase, pictures, and words where there is nothing to watch."""

import json

import pytest
from PIL import Image

from lockstep.cli import main


@pytest.fixture(scope="module", params=["score", "win"])
def run(request, tmp_path_factory):
    """A smoke run of each kind."""
    place = tmp_path_factory.mktemp(request.param)
    words = [f"run.dir={place}", "run.name=run", f"task.predict={request.param}", "run.device=cpu", "run.samples=480"]
    assert main(["train", "cricket-gnn", "--smoke", "task.matches=60", "task.thin=16", *words]) == 0
    return request.param, place / "run"


def test_eval_prints_a_row_for_each_phase_of_the_innings(run, capsys):
    kind, path = run
    assert main(["eval", str(path)]) == 0
    told = capsys.readouterr().out
    assert "the test split" in told
    assert all(word in told for word in ("all", "powerplay", "middle", "death"))
    assert all(word in told for word in (("mae", "rmse", "r2") if kind == "score" else ("log loss", "brier", "auc")))


def test_eval_says_the_same_as_json_and_knows_other_splits(run, capsys):
    _, path = run
    counts = []
    for split in ("validation", "test"):
        capsys.readouterr()
        assert main(["eval", str(path), "--split", split, "--json"]) == 0
        counts.append(json.loads(capsys.readouterr().out)["examples"])
    assert counts[0] != counts[1]


def test_eval_draws_pictures_on_request(run, tmp_path, capsys):
    kind, path = run
    assert main(["eval", str(path), "--pictures", str(tmp_path / "pictures")]) == 0
    found = {file.name for file in (tmp_path / "pictures").iterdir()}
    assert found == {"error-by-over.png", "calibration.png"} | ({"match.png"} if kind == "win" else set())
    for file in (tmp_path / "pictures").iterdir():
        with Image.open(file) as picture:
            assert len(picture.convert("L").getcolors(256)) > 20  # something is drawn


def test_play_and_plan_say_that_they_are_not_for_predictions(run, capsys):
    _, path = run
    assert main(["play", str(path)]) == 2
    assert f"lockstep eval {path}" in capsys.readouterr().err
    assert main(["plan", "cricket-gnn", "--smoke"]) == 2
    assert "collects no rollouts" in capsys.readouterr().err
