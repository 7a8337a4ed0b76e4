"""Measure scaling with `lockstep bench`; the shares of one process and all-reduces with `lockstep plan`."""

from typing import Any

from lockstep.io.safe_read import read_json
from lockstep.launch.launcher import launch_captured
from lockstep.tools.doctor.gpu.proofs import as_args, process_counts
from lockstep.tools.doctor.gpu.worker import Failure, ResultRecord, Skip, expect, lockstep

RECIPE, SHARES_RECIPES, QUICK_RECIPE = "snake-ppo", ("snake-ppo", "gym-ppo"), "gym-ppo"
QUICK = {"algo.rollout_steps": 8, "algo.batch_size": 32, "algo.epochs": 1}
KEPT_KEYS = ("processes", "steps_per_second", "ratio_to_bare", "bf16_gain", "rounds", "split", "verdict")
"""Keys that are kept from a report of `lockstep bench`."""
SIZES = tuple(4**power for power in range(3, 15))
"""Bytes of each all-reduce: 64 B, 256 B, ... 256 MB."""
QUICK_SIZES = SIZES[:7:2]


def scaling(record: ResultRecord) -> None:
    """Measure steps per second on 1, 2, 4, ... and all GPUs at the same global batch with `lockstep bench`."""
    name = QUICK_RECIPE if record.quick else RECIPE
    record.add("recipe", name)
    rows: list[dict[str, Any]] = []
    for processes in sorted({1, record.gpus}) if record.quick else process_counts(record.gpus):
        directory = record.scratch / f"scaling-{processes}"
        args = ["bench", name, "--procs", processes, "--out", directory]
        args += ["run.device=cuda", f"run.lanes={record.lanes}"]
        args += ["--smoke", "--seconds", "0", *as_args(QUICK)] if record.quick else ["--seconds", "4"]
        expect(lockstep(*args), f"lockstep bench on {processes} GPUs")
        bench = read_json(directory / "bench.json")
        row = {key: bench[key] for key in KEPT_KEYS if key in bench}
        row["speedup"] = row["steps_per_second"] / (rows or [row])[0]["steps_per_second"]
        row["efficiency"] = row["speedup"] / processes
        rows.append(row)
        record.add("rows", rows)


def shares(record: ResultRecord) -> None:
    """Measure the work of one process for `lockstep plan --measured`."""
    measured: dict[str, Any] = {}
    for name in (QUICK_RECIPE,) if record.quick else SHARES_RECIPES:
        with record.part(name):
            path = record.scratch / f"shares-{name}.json"
            args = ["plan", name, "--gpus", "1", "--save", path, "run.device=cuda"]
            args += ["--smoke", "--rounds", "1", *as_args(QUICK)] if record.quick else []
            expect(lockstep(*args), "lockstep plan")
            measured[name] = read_json(path)["shares"]
            record.add("shares", measured)


def bandwidth(record: ResultRecord) -> None:
    """Time all-reduces of many sizes with one process for each GPU."""
    if record.gpus < 2:
        raise Skip("one GPU: there is nothing to reduce over")
    path = record.scratch / "network.json"
    sizes = QUICK_SIZES if record.quick else SIZES
    args = ["plan", QUICK_RECIPE, "--smoke", "--time-network", str(path), "run.device=cuda"]
    cause = launch_captured([*args, "--sizes", *map(str, sizes)], record.gpus)
    if cause:
        raise Failure(f"all-reduces on {record.gpus} GPUs: {' '.join(cause.split())[:500]}")
    network = read_json(path)
    record.add("network", network)
    record.add("rows", bandwidths(network["seconds"], network["processes"]))


def bandwidths(seconds: dict[str, float], processes: int) -> list[dict[str, float]]:
    """Time and bandwidth by size. Bus bandwidth is what each link of a ring carries, as nccl-tests define it."""
    share = 2 * (processes - 1) / processes
    return [
        {"bytes": int(size), "seconds": time, "bytes_per_second": int(size) / time}
        | {"bus_bytes_per_second": share * int(size) / time}
        for size, time in seconds.items()
    ]
