"""Check that several processes train one agent: replica checks, two runs in exact mode, and `lockstep prove`."""

import json
import os
from pathlib import Path
from typing import Any

from lockstep.config import apply_overrides
from lockstep.io.safe_read import read_json
from lockstep.tools.doctor.gpu.recipes import smoke_recipe
from lockstep.tools.doctor.gpu.worker import Failure, ResultRecord, Skip, expect, lockstep
from lockstep.tools.doctor.smoke_test import hash_of_run
from lockstep.training_loop import train

RECIPE = "gym-ppo"
CHECK_EVERY = 16
ITERATIONS = 4
QUICK = {"algo.rollout_steps": 4, "algo.batch_size": 32, "algo.epochs": 1}
"""Settings of the runs of a quick kit: one update per iteration."""
NCCL, GLOO = "prove-nccl.json", "prove-gloo.json"
"""Records of the proofs in the kit's scratch directory, which the kill drill reads."""


def share_gpu_args(record: ResultRecord) -> list[str]:
    """Setting that lets two processes share a single GPU, if there is only one."""
    return [] if record.gpus > 1 else ["run.share_gpu=true"]


def proof_settings(record: ResultRecord) -> dict[str, Any]:
    """Settings of the runs whose hashes are compared: four iterations with a checkpoint after each."""
    iteration = 8 * (QUICK["algo.rollout_steps"] if record.quick else 32)  # environments x steps
    run = {"device": "cuda", "total_samples": ITERATIONS * iteration, "save_every": iteration, "eval_every": None}
    run |= {"record_video": False, "lanes": record.lanes}
    return {f"run.{name}": value for name, value in run.items()} | (QUICK if record.quick else {})


def as_args(settings: dict[str, Any]) -> list[str]:
    """Return settings as command-line arguments."""
    return [f"{name}={str(value).lower()}" for name, value in settings.items()]


def replicas(record: ResultRecord) -> None:
    """Train 128 updates or more on all GPUs and compare the replicas every few updates."""
    processes = max(2, record.gpus)
    settings = ["run.device=cuda", "run.eval_every=none", f"run.replica_check_every={CHECK_EVERY}"]
    if record.quick:
        settings += ["algo.rollout_steps=4", "algo.batch_size=8", "algo.epochs=8", "run.total_samples=128"]
    settings += [f"run.runs_dir={record.scratch}", "run.name=replicas", "run.log_every=1", *share_gpu_args(record)]
    result = lockstep("train", RECIPE, "--smoke", "--procs", processes, "--max-restarts", 0, *settings)
    expect(result, "training with replica checks")
    lines = (record.scratch / "replicas" / "metrics.jsonl").read_text().splitlines()
    compared = {line["sync/update"] for line in map(json.loads, lines) if "sync/update" in line}
    found = {"processes": processes, "checks": len(compared), "updates": int(max(compared, default=0))}
    record.add("replicas", found | {"backend": "nccl" if record.gpus > 1 else "gloo"})
    if found["updates"] < 128:
        raise Failure(f"replicas were last compared at update {found['updates']}, not at 128 or later")


def exact(record: ResultRecord) -> None:
    """Train twice in exact mode on one GPU: both runs must have the same hash."""
    settings = proof_settings(record) | {"run.reduction": "exact", "run.runs_dir": str(record.scratch)}
    recipe = apply_overrides(smoke_recipe(RECIPE), settings)
    hashes = []
    for name in ("exact-1", "exact-2"):
        train(apply_overrides(recipe, {"run.name": name}))
        hashes.append(hash_of_run(record.scratch / name))
        record.add("hashes", hashes)
    if hashes[0] != hashes[1]:
        raise Failure("two runs in exact mode have different hashes")


def prove_nccl(record: ResultRecord) -> None:
    """Run `lockstep prove` on 1, 2, 4, ... and all GPUs over NCCL."""
    if record.gpus < 2:
        raise Skip("one GPU: NCCL needs two")
    _prove(record, [1, record.gpus] if record.quick else process_counts(record.gpus), NCCL)


def prove_gloo(record: ResultRecord) -> None:
    """Run `lockstep prove` on 1 and 2 processes that share a GPU, over gloo. The agent must equal that over NCCL."""
    first_gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
    over_nccl = proved_hash(record.scratch)
    _prove(record, [2] if record.quick and over_nccl else [1, 2], GLOO, CUDA_VISIBLE_DEVICES=first_gpu)
    if over_nccl not in (None, record.found["runs"][0]["hash"]):
        raise Failure("the agent trained over gloo differs from the agent trained over NCCL")


def process_counts(largest: int) -> list[int]:
    """1, 2, 4, ... and `largest`."""
    return sorted({2**power for power in range(largest.bit_length())} | {largest})


def _prove(record: ResultRecord, processes: list[int], name: str, **environment: str) -> None:
    path = record.scratch / name
    args = ["prove", RECIPE, "--procs", *processes, "--json", path, *as_args(proof_settings(record))]
    result = lockstep(*args, **environment)
    if path.exists():
        proof = read_json(path)
        record.add("runs", proof["rows"])
        record.add("verdict", proof["verdict"])
    expect(result, f"lockstep prove on {', '.join(map(str, processes))} processes")


def proved_hash(scratch: Path) -> str | None:
    """Return the hash of the run without faults from a proof of this kit. None if no proof succeeded."""
    for name in (NCCL, GLOO):
        if (scratch / name).exists():
            proof: dict[str, Any] = read_json(scratch / name)
            if proof["verdict"] == "one agent":
                return str(proof["rows"][0]["hash"])
    return None
