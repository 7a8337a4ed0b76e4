"""Many lanes on few and on many processes: the same agent, and what start-up, checkpoints and saves cost.

python benchmarks/lane_count.py

32 lanes, exact mode, on 1 and on 32 processes: one hash. 1,024 lanes, fast mode, on 1 and on 4 processes: they train.
Start-up is the time from the command to the first iteration's end; the save is timed where the loop waits for it.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from lockstep.checkpoint.format import hash_checkpoint
from lockstep.checkpoint.lineage import find
from lockstep.io.jsonl import METRICS, read_jsonl

TINY = [
    "task.size=4",
    "algo.rollout_steps=8",
    "algo.epochs=1",
    "algo.encoder.hidden_sizes=4",
    "algo.encoder.num_layers=1",
    "algo.encoder.out_features=8",
    "run.eval_every=none",
]


def train(directory, lanes, processes, reduction, iterations=4):
    """Train on some processes; seconds until the first log line, and the run's directory."""
    name = f"{lanes}-{processes}"
    samples = lanes * 2 * 8
    settings = [
        f"task.num_envs={lanes * 2}",
        f"algo.batch_size={lanes * 4}",
        f"run.lanes={lanes}",
        f"run.reduction={reduction}",
        f"run.total_samples={iterations * samples}",
        f"run.log_every={samples}",
        f"run.save_every={samples}",
        f"run.runs_dir={directory}",
        f"run.name={name}",
        "run.collective_timeout=300",
    ]
    command = [sys.executable, "-m", "lockstep", "train", "snake-ppo", *TINY, *settings, "--procs", str(processes)]
    run = Path(directory) / name
    began = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    started = None
    while process.poll() is None:
        if started is None and (run / METRICS).exists() and read_jsonl(run / METRICS):
            started = time.perf_counter() - began
        time.sleep(0.05)
    assert process.returncode == 0, process.stderr.read()
    return started or time.perf_counter() - began, run


def report(lanes, processes, reduction, directory):
    started, run = train(directory, lanes, processes, reduction)
    lines = [line for line in read_jsonl(run / METRICS) if "time/global_fps" in line]
    step = lines[-1]["samples"] - lines[-2]["samples"]
    copying = lines[-1].get("time/copy", 0.0) * step / lines[-1]["time/global_fps"]
    name, _ = find(run / "checkpoints")
    path = run / "checkpoints" / str(name)
    size = sum(file.stat().st_size for file in path.iterdir())
    print(
        f"{lanes:>6,} lanes on {processes:>2} processes, {reduction}: first iteration after {started:5.1f} s, "
        f"checkpoint {size / 1024:7,.0f} KiB ({size / lanes:,.0f} bytes a lane), the loop waits "
        f"{copying * 1e3:6.1f} ms for a save, hash {hash_checkpoint(path)[:16]}",
        flush=True,
    )
    return hash_checkpoint(path)


def main():
    os.environ["OMP_NUM_THREADS"] = "1"
    print(f"{psutil.cpu_count()} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB")
    with tempfile.TemporaryDirectory() as directory:
        hashes = {report(32, processes, "exact", directory) for processes in (1, 32)}
        print("32 lanes on 1 and on 32 processes: " + ("one hash" if len(hashes) == 1 else "NOT one hash"))
        for lanes, processes in ((8, 1), (64, 1), (256, 1), (1024, 1), (1024, 4)):
            report(lanes, processes, "fast", directory)


if __name__ == "__main__":
    main()
