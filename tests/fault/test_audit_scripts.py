"""`lockstep audit` on real processes: scripts with one injected fault each, a correct script, and a recipe."""

import json
from pathlib import Path

import pytest

from lockstep.cli import main

SCRIPTS = Path(__file__).parent / "audited"

pytestmark = pytest.mark.distributed


def audit(capsys, *words):
    """Return the exit code, the findings by kind, and the verdict."""
    code = main(["audit", "--json", *map(str, words)])
    told = capsys.readouterr()
    assert told.out, told.err
    verdict = json.loads(told.out)
    return code, {finding["kind"]: finding for finding in verdict["findings"]}, verdict


def test_audit_correct_ddp_has_no_finding(capsys):
    code, found, verdict = audit(capsys, SCRIPTS / "correct.py")
    assert (code, found, verdict["unseen"], verdict["steps"]) == (0, {}, [], 5)
    assert "model.1.running_mean" in "".join(verdict["notes"])  # DDP broadcasts it, so it is not a finding


@pytest.mark.slow
def test_audit_bypassed_ddp_wrapper_is_found(capsys):
    code, found, _ = audit(capsys, SCRIPTS / "bypassed.py")
    assert code == 1
    assert set(found) == {"gradients", "parameters"}
    assert found["gradients"]["tensors"] == ["agent.actor.weight", "agent.actor.bias"]
    assert "wraps agent, but its own forward was never called" in found["gradients"]["why"]
    assert found["parameters"]["step"] == 1


def test_audit_missing_all_reduce_names_the_parameters(capsys):
    code, found, _ = audit(capsys, SCRIPTS / "forgotten.py")
    assert code == 1
    assert set(found) == {"gradients", "parameters", "state"}
    assert found["gradients"]["tensors"] == ["value.weight", "value.bias"]
    assert found["state"]["tensors"][0] == "value.weight.exp_avg"


@pytest.mark.slow
def test_audit_unsynchronized_buffers_are_found(capsys):
    code, found, _ = audit(capsys, SCRIPTS / "unsynced_buffers.py")
    assert code == 1
    assert set(found) == {"buffers"}
    assert found["buffers"]["tensors"] == ["agent.mean"]
    assert found["buffers"]["step"] == 1


@pytest.mark.slow
def test_audit_same_data_on_every_process_is_found(capsys):
    code, found, _ = audit(capsys, SCRIPTS / "same_data.py")
    assert code == 1
    assert set(found) == {"data"}
    assert "the global generators of torch" in found["data"]["why"]


@pytest.mark.slow
def test_audit_local_early_stop_names_the_line_where_others_wait(capsys):
    code, found, _ = audit(capsys, "--step-timeout", "10", SCRIPTS / "early_stop.py")
    assert code == 1
    assert set(found) == {"collectives"}
    assert found["collectives"]["step"] == 4
    assert "process 1 left the training loop" in found["collectives"]["what"]
    assert f"early_stop.py:{_line_of('loss = model')}" in found["collectives"]["why"]


def _line_of(text):
    lines = (SCRIPTS / "early_stop.py").read_text().splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line) + 1  # DDP reduces in backward


@pytest.mark.slow
def test_audit_gym_ppo_recipe_has_no_finding(capsys, tmp_path):
    code, found, verdict = audit(capsys, "-m", "lockstep", "train", "gym-ppo", "--smoke", f"run.runs_dir={tmp_path}")
    assert (code, found, verdict["unseen"]) == (0, {}, [])


def test_audit_failing_script_prints_its_error(capsys, tmp_path):
    script = tmp_path / "broken.py"
    script.write_text("raise ValueError('no data here')\n")
    assert main(["audit", str(script)]) == 2
    told = capsys.readouterr().err
    assert "broken.py failed before its first optimizer step" in told
    assert "ValueError: no data here" in told
