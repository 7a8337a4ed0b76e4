"""All-reduce times over all GPUs from 64 B to 256 MB, in the form that `lockstep plan` reads."""

from lockstep.io.safe_read import read_json
from lockstep.launch.launcher import launch_captured
from lockstep.tools.doctor.gpu.worker import Failure, ResultRecord, Skip

RECIPE = "gym-ppo"
SIZES = tuple(4**power for power in range(3, 15))
"""Bytes of each all-reduce: 64 B, 256 B, ... 256 MB."""
QUICK_SIZES = SIZES[:7:2]


def bandwidth(record: ResultRecord) -> None:
    """Time all-reduces of many sizes with one process for each GPU."""
    if record.gpus < 2:
        raise Skip("one GPU: there is nothing to reduce over")
    path = record.scratch / "network.json"
    sizes = QUICK_SIZES if record.quick else SIZES
    words = ["plan", RECIPE, "--smoke", "--time-network", str(path), "run.device=cuda"]
    cause = launch_captured([*words, "--sizes", *map(str, sizes)], record.gpus)
    if cause:
        raise Failure(f"all-reduces on {record.gpus} GPUs: {' '.join(cause.split())[:500]}")
    network = read_json(path)
    record.add("network", network)
    record.add("rows", rows(network["seconds"], network["processes"]))


def rows(seconds: dict[str, float], processes: int) -> list[dict[str, float]]:
    """Time and bandwidth by size. Bus bandwidth is what each link of a ring carries, as nccl-tests define it."""
    share = 2 * (processes - 1) / processes
    return [
        {"bytes": int(size), "seconds": taken, "bytes_per_second": int(size) / taken}
        | {"bus_bytes_per_second": share * int(size) / taken}
        for size, taken in seconds.items()
    ]
