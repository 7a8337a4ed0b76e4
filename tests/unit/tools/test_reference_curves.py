"""Reference curves: published and invalid files."""

from pathlib import Path

import pytest

from lockstep.config import ConfigError
from lockstep.tools.report.reference_curves import read_reference

CURVES = Path("/work/shared/data/tdmpc2-curves")


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "step,reward\n1,x\n", "step,reward\n1,nan\n", "step,reward\n1\n"])
def test_read_reference_invalid_or_missing_file_raises(tmp_path, text):
    (tmp_path / "no.csv").write_text(text)
    with pytest.raises(ConfigError, match=r"no\.csv"):
        read_reference(tmp_path / "no.csv")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_reference(tmp_path / "missing.csv")


@pytest.mark.skipif(not CURVES.is_dir(), reason="the reference curves are not available")
def test_read_reference_reads_published_curves():
    points = [p for p in read_reference(CURVES / "cartpole-balance.csv") if p.step == 100_000]
    assert len(points) == 3
    assert sum(p.score for p in points) / 3 == pytest.approx(998, abs=1)
