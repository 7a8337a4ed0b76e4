"""Whether several processes train one agent: replica checks, exact mode twice, and `lockstep prove`."""

import json
import os
from pathlib import Path
from typing import Any

from lockstep.doctor.gpu.worker import Failure, Record, Skip, expect, lockstep
from lockstep.reading import read_json

RECIPE = "gym-ppo"
CHECK_EVERY = 16
PROVED = ["run.device=cuda", "run.samples=1024", "run.save_every=256", "run.eval_every=none", "run.gif=false"]
"""Settings of the runs whose hashes are compared: four iterations with a checkpoint after each."""
NCCL, GLOO = "prove-nccl.json", "prove-gloo.json"
"""Records of the proofs in the kit's scratch directory, which the kill drill reads."""


def several(record: Record) -> tuple[int, list[str]]:
    """Processes for a step that needs more than one, and the setting that lets them share a single GPU."""
    return (record.gpus, []) if record.gpus > 1 else (2, ["run.share_gpu=true"])


def replicas(record: Record) -> None:
    """Train 128 updates or more on all GPUs and compare the replicas every few updates."""
    processes, sharing = several(record)
    settings = ["run.device=cuda", "run.eval_every=none", f"run.check_every={CHECK_EVERY}", *sharing]
    settings += [f"run.dir={record.scratch}", "run.name=replicas", "run.log_every=1"]
    ended = lockstep("train", RECIPE, "--smoke", "--procs", processes, "--max-restarts", 0, *settings)
    expect(ended, "training with replica checks")
    lines = (record.scratch / "replicas" / "metrics.jsonl").read_text().splitlines()
    compared = {line["sync/update"] for line in map(json.loads, lines) if "sync/update" in line}
    found = {"processes": processes, "checks": len(compared), "updates": max(compared, default=0)}
    record.add("replicas", found | {"backend": "gloo" if sharing else "nccl"})
    if found["updates"] < 128:
        raise Failure(f"replicas were last compared at update {found['updates']}, not at 128 or later")


def exact(record: Record) -> None:
    """Train twice in exact mode on one GPU: both runs must have the same hash."""
    from lockstep.config import overlay
    from lockstep.doctor.gpu.recipes import smoke_recipe
    from lockstep.doctor.trial import hash_of_run
    from lockstep.train import train

    settings = {"run.device": "cuda", "run.reduction": "exact", "run.eval_every": None, "run.samples": 1024}
    recipe = overlay(smoke_recipe(RECIPE), settings | {"run.dir": str(record.scratch)})
    hashes = []
    for name in ("exact-1", "exact-2"):
        train(overlay(recipe, {"run.name": name}))
        hashes.append(hash_of_run(record.scratch / name))
        record.add("hashes", hashes)
    if hashes[0] != hashes[1]:
        raise Failure("two runs in exact mode have different hashes")


def prove_nccl(record: Record) -> None:
    """Prove one agent on 1, 2, 4, ... and all GPUs over NCCL."""
    if record.gpus < 2:
        raise Skip("one GPU: NCCL needs two")
    _prove(record, doubling(record.gpus), NCCL)


def prove_gloo(record: Record) -> None:
    """Prove one agent on one process and on two that share a GPU, over gloo."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
    _prove(record, [1, 2], GLOO, CUDA_VISIBLE_DEVICES=visible)


def doubling(most: int) -> list[int]:
    """1, 2, 4, ... and `most`."""
    return sorted({2**power for power in range(most.bit_length())} | {most})


def lanes(record: Record) -> str:
    """The setting that gives runs on few processes the lanes of runs on all GPUs."""
    return f"run.lanes={max(8, record.gpus)}"


def _prove(record: Record, processes: list[int], name: str, **environment: str) -> None:
    path = record.scratch / name
    words = ["prove", RECIPE, "--procs", *processes, "--json", path, *PROVED, lanes(record)]
    ended = lockstep(*words, **environment)
    if path.exists():
        proof = read_json(path)
        record.add("runs", proof["rows"])
        record.add("verdict", proof["verdict"])
    expect(ended, f"lockstep prove on {', '.join(map(str, processes))} processes")


def proved_hash(scratch: Path) -> str | None:
    """The hash that a proof of this kit found for the undisturbed run. None if no proof succeeded."""
    for name in (NCCL, GLOO):
        if (scratch / name).exists():
            proof: dict[str, Any] = read_json(scratch / name)
            if proof["verdict"] == "one agent":
                return str(proof["rows"][0]["hash"])
    return None
