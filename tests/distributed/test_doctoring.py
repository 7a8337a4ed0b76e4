"""The doctor passes a sound machine, on real processes, and leaves nothing behind."""

import pytest

from lockstep.cli import main

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    "processes", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)]
)
def test_a_sound_machine_passes(capsys, monkeypatch, tmp_path, processes):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    code = main(["doctor", "--procs", str(processes)])
    told = capsys.readouterr().out
    assert code == 0, told
    assert "and one alone trained the same agent" in told
    assert "read by one, which acts" in told
    assert ("a sum over all takes" in told) == (processes > 1)
    assert list(tmp_path.iterdir()) == []
