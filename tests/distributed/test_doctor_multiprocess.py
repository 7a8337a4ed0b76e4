"""`lockstep doctor` passes on a working machine, on real processes, and leaves no files."""

import pytest

from lockstep.cli import main

pytestmark = pytest.mark.distributed


@pytest.mark.parametrize(
    "processes", [pytest.param(1, marks=pytest.mark.slow), 2, pytest.param(4, marks=pytest.mark.slow)]
)
def test_doctor_passes_on_a_working_machine_and_leaves_no_files(capsys, monkeypatch, tmp_path, processes):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    code = main(["doctor", "--procs", str(processes)])
    told = capsys.readouterr().out
    assert code == 0, told
    assert "and a single process trained the same agent" in told
    assert "loaded by a single process, which computed actions" in told
    assert ("an all-reduce takes" in told) == (processes > 1)
    assert list(tmp_path.iterdir()) == []
