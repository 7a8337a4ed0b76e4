"""Commands on a prediction run: evaluation table, plots and match replay."""

import json
import re

import pytest
from PIL import Image

from lockstep.cli import main


@pytest.fixture(scope="module", params=["score", "win"])
def run(request, tmp_path_factory):
    """A smoke run of each target."""
    place = tmp_path_factory.mktemp(request.param)
    words = [
        f"run.runs_dir={place}",
        "run.name=run",
        f"task.target={request.param}",
        "run.device=cpu",
        "run.total_samples=480",
    ]
    assert (
        main(["train", "cricket-gnn", "--smoke", "task.num_synthetic_matches=60", "task.train_stride=16", *words]) == 0
    )
    return request.param, place / "run"


def test_eval_prints_row_per_innings_phase(run, capsys):
    kind, path = run
    assert main(["eval", str(path)]) == 0
    told = capsys.readouterr().out
    assert "the test split" in told
    assert all(word in told for word in ("all", "powerplay", "middle", "death"))
    assert all(word in told for word in (("mae", "rmse", "r2") if kind == "score" else ("log loss", "brier", "auc")))


def test_eval_json_has_results_of_given_split(run, capsys):
    _, path = run
    counts = []
    for split in ("validation", "test"):
        capsys.readouterr()
        assert main(["eval", str(path), "--split", split, "--json"]) == 0
        counts.append(json.loads(capsys.readouterr().out)["examples"])
    assert counts[0] != counts[1]


def test_eval_plots_writes_images(run, tmp_path, capsys):
    kind, path = run
    assert main(["eval", str(path), "--plots", str(tmp_path / "pictures")]) == 0
    found = {file.name for file in (tmp_path / "pictures").iterdir()}
    assert found == {"error-by-over.png", "calibration.png"} | ({"match.png"} if kind == "win" else set())
    for file in (tmp_path / "pictures").iterdir():
        with Image.open(file) as picture:
            assert len(picture.convert("L").getcolors(256)) > 20  # the image is not empty


def test_play_prints_match_ball_by_ball_and_writes_gif(run, tmp_path, capsys):
    _, path = run
    capsys.readouterr()
    assert main(["play", str(path)]) == 0
    told = capsys.readouterr().out
    assert re.match(r"Team \w chase \d+ against Team \w, 2010-\d\d-\d\d\n", told)
    assert re.search(r"over \d+\.\d   \d+/\d+   the chase (succeeded|failed)\n$", told)  # the match is complete
    assert main(["play", str(path), "--gif", str(tmp_path / "match.gif"), "--max-steps", "30"]) == 0
    with Image.open(tmp_path / "match.gif") as film:
        assert film.size == (640, 384)  # with the caption
        assert 20 <= film.n_frames <= 30
    assert main(["play", str(path), "--seed", "2", "--max-steps", "1"]) == 0
    assert told.splitlines()[0] not in capsys.readouterr().out  # another seed shows another match


def test_plan_of_prediction_recipe_is_rejected(capsys):
    assert main(["plan", "cricket-gnn", "--smoke"]) == 2
    assert "collects no rollouts" in capsys.readouterr().err
