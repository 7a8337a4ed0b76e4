"""Reference curves: step conversion of evaluations, plots, and invalid files."""

import json
from pathlib import Path

import pytest
from PIL import Image

from lockstep.config import ConfigError
from lockstep.tools.report.reference_curves import ReferencePoint, draw_curve, evaluations_of, read_reference

REFERENCE = "step,reward,seed\n0,10,1\n0,20,2\n100,500,1\n100,700,2\n1000,900,1\n"
CURVES = Path("/work/shared/data/tdmpc2-curves")


@pytest.fixture
def run(tmp_path):
    path = tmp_path / "run"
    path.mkdir()
    lines = [{"samples": 10, "train/loss": 1.0}, {"samples": 20, "eval/return_mean": 100.0}]
    lines += [{"samples": 40, "eval/return_mean": 300.0}]
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_evaluations_of_converts_samples_to_reference_steps(run):
    assert evaluations_of(run, 2.0) == [ReferencePoint(40.0, 100.0), ReferencePoint(80.0, 300.0)]


def test_draw_curve_with_reference_changes_the_plot(run, tmp_path):
    pytest.importorskip("matplotlib")
    (tmp_path / "walker-run.csv").write_text(REFERENCE)
    draw_curve(run, tmp_path / "alone.png")
    draw_curve(run, tmp_path / "both.png", tmp_path / "walker-run.csv", per_sample=2)
    alone, both = (Image.open(tmp_path / f"{name}.png").convert("RGB") for name in ("alone", "both"))
    assert alone.size == both.size
    assert alone.tobytes() != both.tobytes()


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "step,reward\n1,x\n", "step,reward\n1,nan\n", "step,reward\n1\n"])
def test_read_reference_invalid_or_missing_file_raises(tmp_path, text):
    (tmp_path / "no.csv").write_text(text)
    with pytest.raises(ConfigError, match=r"no\.csv"):
        read_reference(tmp_path / "no.csv")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_reference(tmp_path / "missing.csv")


def test_draw_curve_without_evaluations_raises(tmp_path):
    pytest.importorskip("matplotlib")
    with pytest.raises(ConfigError, match="has no evaluations yet"):
        draw_curve(tmp_path, tmp_path / "a.png")


@pytest.mark.skipif(not CURVES.is_dir(), reason="the reference curves are not available")
def test_read_reference_reads_published_curves():
    points = [p for p in read_reference(CURVES / "cartpole-balance.csv") if p.step == 100_000]
    assert len(points) == 3
    assert sum(p.score for p in points) / 3 == pytest.approx(998, abs=1)
