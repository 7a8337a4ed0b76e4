"""Machine record of checkpoints: an exact run rejects a different machine unless it is allowed."""

import json
import sys

import pytest
import torch

from helpers.multiprocess import command
from helpers.tiny_recipes import ITERATION, hash_of, tiny
from lockstep.checkpoint import format as form
from lockstep.checkpoint.lineage import find
from lockstep.checkpoint.machine import NAMES, compare_machines, describe_machine
from lockstep.cli import prove
from lockstep.config import ConfigError, RunConfig, read_yaml
from lockstep.training_loop import train

HERE = dict.fromkeys(NAMES, "1")
LOCKSTEP = [sys.executable, "-m", "lockstep"]


def test_describe_machine_has_every_compared_field():
    machine = describe_machine()
    assert machine.keys() == NAMES.keys()
    assert all(machine.values())
    assert machine["cpu_capability"] == torch.backends.cpu.get_cpu_capability()


@pytest.mark.parametrize("name", NAMES)
def test_machine_difference_warns_in_fast_and_is_rejected_in_exact(name):
    there = HERE | {name: "2"}
    (note,) = compare_machines(there, [HERE], RunConfig())
    assert f"{NAMES[name]} was 2 and is 1" in note
    with pytest.raises(ConfigError, match=f"{NAMES[name]} was 2 and is 1(.|\n)*run.allow_other_machine=true"):
        compare_machines(there, [HERE], RunConfig(reduction="exact"))
    assert compare_machines(there, [HERE], RunConfig(reduction="exact", allow_other_machine=True)) == [note]


def test_equal_or_unrecorded_machines_give_no_message():
    exact = RunConfig(reduction="exact")
    assert compare_machines(HERE, [HERE, HERE], exact) == []
    assert compare_machines({}, [HERE], exact) == []
    assert compare_machines(HERE | {"numba": ""}, [HERE], exact) == []


def test_machine_difference_names_process():
    with pytest.raises(ConfigError, match="torch was 1 and is 2 on process 1"):
        compare_machines(HERE, [HERE, HERE | {"torch": "2"}], RunConfig(reduction="exact"))


def test_proof_record_contains_machine(tmp_path):
    row = prove.RunRecord("1", "", "a", 1.0, tmp_path, machine=describe_machine())
    proof = prove.Verification("gym-ppo", [], tmp_path, 0, None, [row])
    record = prove.record(proof)
    assert {name: record[name] for name in NAMES} == describe_machine()


@pytest.mark.distributed
def test_exact_resume_on_other_cpu_capability_needs_permission(tmp_path):
    run = train(tiny(tmp_path, total_samples=ITERATION, reduction="exact")).path
    saved = form.read_manifest(run / "checkpoints" / str(find(run / "checkpoints")[0]))["machine"]
    assert saved == describe_machine()
    assert saved["cpu_capability"] != "DEFAULT", "this machine has no CPU capability to disable"
    before, environment = hash_of(run), {"ATEN_CPU_CAPABILITY": "default"}
    resume = [*LOCKSTEP, "resume", str(run), "--total-samples", str(2 * ITERATION)]
    ended = command(resume, environment=environment)
    assert ended.code == 2, ended.output
    told = " ".join(ended.output.split())
    assert f"CPU capability was {saved['cpu_capability']} and is DEFAULT" in told
    assert hash_of(run) == before
    ended = command([*resume, "run.allow_other_machine=true"], environment=environment)
    assert ended.code == 0, ended.output
    assert f"CPU capability was {saved['cpu_capability']} and is DEFAULT" in " ".join(ended.output.split())
    assert "allow_other_machine" not in read_yaml(run / "config.yaml")["run"]
    name, _ = find(run / "checkpoints")
    manifest = json.loads((run / "checkpoints" / str(name) / form.MANIFEST).read_text())
    assert (name.samples, manifest["machine"]["cpu_capability"]) == (2 * ITERATION, "DEFAULT")
