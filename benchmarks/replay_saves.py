"""What a save costs with replay in it: the first one, and those after it, by how much there is and how much was added.

python benchmarks/replay_saves.py

One process, 8 lanes, 64 environments, transitions of two observations of 24 numbers (222 bytes each). Bytes are those
that are new on disk: what is linked costs none. The loop waits for the copy; the rest is written while it goes on.
"""

import tempfile
import time
from pathlib import Path

import torch

from lockstep.checkpoint.format import hash_checkpoint
from lockstep.checkpoint.manager import CheckpointManager
from lockstep.clock import TrainState
from lockstep.config import RunConfig
from lockstep.data.replay_buffer import Replay
from lockstep.distributed import Runtime

ENVS = 64


class Nothing:
    """An owner of no state."""

    def shared_state(self):
        return {}

    def lane_state(self, lane):
        return {}


class Memory(Nothing):
    """An algorithm that is all replay."""

    def __init__(self, capacity, runtime):
        self.replay = Replay(capacity, runtime.lanes, self.values(0))

    def values(self, step):
        obs = torch.full((ENVS, 24), float(step))
        ended = torch.zeros(ENVS, dtype=torch.bool)
        outcome = {"reward": torch.zeros(ENVS), "terminated": ended, "truncated": ended, "next_obs": obs + 1}
        return {"obs": obs, "action": torch.zeros(ENVS, 6), **outcome}

    def lane_state(self, lane):
        return self.replay.lane_state(lane)


def save(checkpoints, memory, clock):
    """Seconds that the loop waited and that all of it took, bytes that are new on disk, and where."""
    clock.advance(1)
    began = time.perf_counter()
    checkpoints.save(memory, Nothing(), clock)
    copied = time.perf_counter() - began
    checkpoints.wait()
    took = time.perf_counter() - began
    path = checkpoints.directory / str(checkpoints._last_complete)
    return copied, took, sum(file.stat().st_size for file in path.iterdir() if file.stat().st_nlink == 1), path


def measure(held, added, directory):
    run = RunConfig(lanes=8)
    runtime = Runtime.single_process(run)
    checkpoints, clock = CheckpointManager(Path(directory), run, runtime), TrainState(total_samples=10**9)
    checkpoints.fence.generation = 1
    (Path(directory) / "attempt-0001.json").write_text('{"parent": null}')
    memory = Memory(held, runtime)
    for step in range(held // ENVS):
        memory.replay.write(memory.values(step))
    first, later = save(checkpoints, memory, clock), []
    for number in range(9):
        for step in range(added // ENVS):
            memory.replay.write(memory.values(number * 10**6 + step))
        later.append(save(checkpoints, memory, clock))
    middle = sorted(later, key=lambda row: row[1])[len(later) // 2]
    for what, (copied, took, size, _) in (("first", first), (f"+{added:,}", middle)):
        print(
            f"{held:>9,} held, {what:>8}: the loop waits {copied * 1e3:8.1f} ms, {took * 1e3:8.1f} ms in all, "
            f"{size / 2**20:8.2f} MiB",
            flush=True,
        )
    began = time.perf_counter()
    hash_checkpoint(later[-1][3])
    print(f"{'':>9}  checked and hashed in {time.perf_counter() - began:.1f} s", flush=True)


def main():
    for held in (10_000, 1_000_000):
        for added in (640, 6_400):
            with tempfile.TemporaryDirectory(dir=".") as directory:
                measure(held // ENVS * ENVS, added, directory)


if __name__ == "__main__":
    main()
