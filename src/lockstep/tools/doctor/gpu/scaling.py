"""Measure scaling with `lockstep bench`, and the shares of one process with `lockstep plan`."""

from typing import Any

from lockstep.io.safe_read import read_json
from lockstep.tools.doctor.gpu.proofs import as_words, doubling, lanes
from lockstep.tools.doctor.gpu.worker import ResultRecord, expect, last_line, lockstep

RECIPE, SHARES_RECIPES, QUICK_RECIPE = "snake-ppo", ("snake-ppo", "gym-ppo"), "gym-ppo"
QUICK = {"algo.rollout_steps": 8, "algo.batch_size": 32, "algo.epochs": 1}
KEPT = ("processes", "steps_per_second", "ratio_to_bare", "bf16_gain", "rounds", "split", "verdict")
"""Keys that are kept from a report of `lockstep bench`."""


def scaling(record: ResultRecord) -> None:
    """Measure steps per second on 1, 2, 4, ... and all GPUs at the same global batch with `lockstep bench`."""
    name = QUICK_RECIPE if record.quick else RECIPE
    record.add("recipe", name)
    rows: list[dict[str, Any]] = []
    for processes in sorted({1, record.gpus}) if record.quick else doubling(record.gpus):
        directory = record.scratch / f"scaling-{processes}"
        words = ["bench", name, "--procs", processes, "--out", directory, "run.device=cuda", lanes(record)]
        words += ["--smoke", "--seconds", "0", *as_words(QUICK)] if record.quick else ["--seconds", "4"]
        expect(lockstep(*words), f"lockstep bench on {processes} GPUs")
        bench = read_json(directory / "bench.json")
        row = {key: bench[key] for key in KEPT if key in bench}
        row["speedup"] = row["steps_per_second"] / (rows or [row])[0]["steps_per_second"]
        row["efficiency"] = row["speedup"] / processes
        rows.append(row)
        record.add("rows", rows)


def shares(record: ResultRecord) -> None:
    """Measure the work of one process for `lockstep plan --measured`."""
    measured: dict[str, Any] = {}
    for name in (QUICK_RECIPE,) if record.quick else SHARES_RECIPES:
        path = record.scratch / f"shares-{name}.json"
        words = ["plan", name, "--gpus", "1", "--save", path, "run.device=cuda"]
        ended = lockstep(*words, *(["--smoke", "--rounds", "1", *as_words(QUICK)] if record.quick else []))
        if ended.problem:
            record.failures.append(f"{name}: {last_line(ended.output)}")
            continue
        measured[name] = read_json(path)["shares"]
        record.add("shares", measured)
