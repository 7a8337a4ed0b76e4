"""`lockstep prove` on four emulated GPUs: one agent on 1, 2 and 4 of them, killed or not."""

import json
import sys

import pytest

import emulated_cuda
from helpers.multiprocess import command
from lockstep.registry import RECIPES

SECONDS = 1200.0
"""Time limit for the largest recipe on two cores shared with other tests."""


@pytest.mark.slow
@pytest.mark.parametrize("name", RECIPES)
def test_prove_on_1_2_4_gpus_with_kills_finds_one_hash(tmp_path, name):
    words = [sys.executable, "-m", "lockstep", "prove", name, "--procs", "1", "2", "4", "--kill"]
    words += ["--json", tmp_path / "proof.json", "run.device=cuda"]
    ended = command(words, directory=tmp_path, environment=emulated_cuda.environment(4), seconds=SECONDS)
    assert ended.code == 0, ended.output
    proof = json.loads((tmp_path / "proof.json").read_text())
    assert proof["verdict"] == "one agent"
    assert len({row["hash"] for row in proof["rows"]}) == 1
    assert [row["processes"] for row in proof["rows"]][:3] == ["1", "2", "4"]  # followed by the killed runs
    assert len(proof["rows"]) == 5
