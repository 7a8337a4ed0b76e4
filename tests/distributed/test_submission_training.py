"""Training against a submission gives one agent on any number of processes, also after kills."""

import pytest

from helpers.submissions import write_chaser
from lockstep.cli import main


@pytest.mark.slow
@pytest.mark.distributed
def test_prove_with_submission_gives_one_agent_on_1_and_2_processes_with_kills(tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    file = write_chaser(tmp_path / "chaser")
    settings = [
        "--task.submissions",
        str(file),
        "--task.submission-fraction",
        "0.5",
        "--algo.self-play-fraction",
        "0.5",
    ]
    words = ["prove", "team-ddpg", "--smoke", "--procs", "1", "2", "--kill", *settings]
    assert main(words) == 0, capfd.readouterr().err
