"""The store under thousands of processes: a save's handshake, agreements, heartbeats, and files in the run directory.

    ulimit -n 20000
    unshare -n sh -c 'ip link set lo up; python benchmarks/control_plane.py [--sizes 8 64 512 4096]'

One real TCPStore, and a client with its own connections for each process of the run, in four programs. All clients of a
program report to a save one after the other, and then get the verdict. The handshake ends when the last one has it. An
agreement (`Runtime.run_on_main`) opens a connection per process and waits for one key. Heartbeats are those of hosts
without a common directory, with a stack of 20 lines; all are written and read once. Files are heartbeats in a directory
and the lane files of a checkpoint, of 4 kB each, written by one process after the other and published with one rename.

`unshare -n` hides the DNS server: torch looks up the name of every client, in the only thread of the store, and each
answer that is lost blocks the store for 5 s. A cluster needs a fast reverse DNS, or names in /etc/hosts.
"""

import argparse
import json
import multiprocessing
import os
import resource
import statistics
import tempfile
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from lockstep.checkpoint import format as form
from lockstep.checkpoint.handshake import SaveHandshake
from lockstep.distributed.heartbeat import Heartbeat, HeartbeatFiles, HeartbeatStore
from lockstep.distributed.kv_store import KeyValueStore

PROGRAMS, ROUNDS = 4, 3
TIMEOUT = 300.0
FILES = {"lanes-0000-0007.bin": {"bytes": 123_456_789, "sha256": "0" * 64}, "replay-000001.bin": {"bytes": 1}}
"""What a process reports."""
HEARTBEAT = Heartbeat(
    process=0,
    host="host",
    pid=1,
    sequence=1,
    phase="learn",
    update=1,
    collective=1,
    name="sum",
    wait_seconds=None,
    busy=1.0,
    stack=[f"/path/of/a/module/file.py:{line} in function" for line in range(20)],
)


def connect(port: int) -> KeyValueStore:
    store = dist.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=TIMEOUT), wait_for_workers=False)
    return KeyValueStore(dist.PrefixStore("run", store))


def run_clients(port, size: int, ranks: range, barrier, results) -> None:
    """Run the clients of some ranks. `barrier` separates the phases."""
    barrier.wait()
    clients = [SaveHandshake(lambda: connect(port.value), rank, size, TIMEOUT, lambda: None) for rank in ranks]
    barrier.wait()
    for _ in range(ROUNDS):
        barrier.wait()
        begun = time.monotonic()
        for one in clients:
            one.report(FILES, "")
        for one in clients:
            one.verdict()
        results.put(time.monotonic() - begun)
        barrier.wait()
    barrier.wait()
    begun = time.monotonic()
    for _ in clients:
        connect(port.value).wait("answer", TIMEOUT)
    results.put(time.monotonic() - begun)
    barrier.wait()
    boards = [HeartbeatStore(one._store, size) for one in clients]
    for one, board in zip(clients, boards, strict=True):
        board.write(replace(HEARTBEAT, process=one.rank))
    barrier.wait()
    # Heartbeats of a save as fast as the store takes them; a real process sends one every 5 s.
    barrier.wait()
    begun, beats = time.monotonic(), 0
    while time.monotonic() - begun < 3.0:
        for one in clients[:: max(1, len(clients) // 64)]:
            one._store.set(f"save/{one.rank}/beat", str(beats))
            beats += 1
    results.put(beats / (time.monotonic() - begun))
    barrier.wait()


def allow_files() -> None:
    """Raise the limit of open files: each client has two sockets."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def measure(size: int) -> dict[str, float]:
    """Return the medians of one size. The main process hosts the store, as in a run."""
    context = multiprocessing.get_context("fork")  # before this process has threads
    barrier, results, port = context.Barrier(PROGRAMS + 1), context.Queue(), context.Value("i")
    shares = [range(1 + k, size, PROGRAMS) for k in range(PROGRAMS)]
    programs = [context.Process(target=run_clients, args=(port, size, share, barrier, results)) for share in shares]
    for program in programs:
        program.start()
    server = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=TIMEOUT), wait_for_workers=False)
    port.value = server.port
    barrier.wait()
    main = SaveHandshake(lambda: connect(server.port), 0, size, TIMEOUT, lambda: None)
    barrier.wait()
    collected, ended = [], []
    for _ in range(ROUNDS):
        barrier.wait()
        begun = time.monotonic()
        main.report(FILES, "")
        main.collect()
        collected.append(time.monotonic() - begun)
        main.announce(["", False])
        ended.append(max(results.get() for _ in programs))
        barrier.wait()
        main.forget()
    barrier.wait()
    connect(server.port).set("answer", "{}")
    agreed = max(results.get() for _ in programs)
    barrier.wait()
    begun, board = time.monotonic(), HeartbeatStore(connect(server.port), size)
    board.write(HEARTBEAT)
    barrier.wait()
    assert len(board.read()) == size
    heartbeats = time.monotonic() - begun
    barrier.wait()
    barrier.wait()
    beats = sum(results.get() for _ in programs)
    for program in programs:
        program.join()
    return {
        "processes": size,
        "collect_seconds": round(statistics.median(collected), 3),
        "handshake_seconds": round(statistics.median(ended), 3),
        "agreement_seconds": round(agreed, 3),
        "heartbeats_seconds": round(heartbeats, 3),
        "beats_per_second": round(beats),
        "beats_needed_per_second": round(size / 5, 1),
        **measure_files(size),
    }


def measure_files(size: int) -> dict[str, float]:
    """Time the files of all processes in one directory: heartbeats, and a checkpoint with its publication."""
    with tempfile.TemporaryDirectory() as directory:
        beats, partial = Path(directory) / "heartbeats", Path(directory) / ".checkpoint.partial"
        beats.mkdir()
        partial.mkdir()
        begun, board = time.monotonic(), HeartbeatFiles(beats)
        for rank in range(size):
            board.write(replace(HEARTBEAT, process=rank))
        assert len(board.read()) == size
        heartbeats, begun = time.monotonic() - begun, time.monotonic()
        for rank in range(size):
            form.write_tensors(partial / f"lanes-{rank:04d}-{rank:04d}.safetensors", {"x": torch.zeros(1000)})
        written = time.monotonic() - begun
        partial.rename(Path(directory) / "checkpoint")
        files = len(os.listdir(Path(directory) / "checkpoint"))
    return {
        "heartbeat_files_seconds": round(heartbeats, 3),
        "checkpoint_files": files,
        "checkpoint_files_seconds": round(written, 3),
    }


def print_measurement(size: int) -> None:
    print(json.dumps(measure(size)), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sizes", type=int, nargs="+", default=[8, 64, 512, 4096])
    allow_files()
    for size in parser.parse_args().sizes:
        # Each in a program of its own: the store's threads must not exist when the clients are forked.
        program = multiprocessing.get_context("fork").Process(target=print_measurement, args=(size,))
        program.start()
        program.join()


if __name__ == "__main__":
    main()
