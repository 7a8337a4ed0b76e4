"""Other local users can neither reach the store of a single-host run nor connect to its processes."""

import os
import signal
import socket
import stat
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import suppress
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist

from lockstep.distributed.kv_store import KeyValueStore
from lockstep.launch.private_store import drop_new_connections, is_private, join_private_store, listening_sockets


def reachable(address):
    """Return whether a connection can be established."""
    with socket.socket() as client:
        client.settimeout(1.0)
        try:
            client.connect(address)
        except OSError:
            return False
        return True


def listeners(process):
    """Return the addresses at which a process and its children listen, by process."""
    found = {}
    with suppress(psutil.Error):
        for each in [process, *process.children(recursive=True)]:
            with suppress(psutil.Error):
                opened = [c.laddr for c in each.net_connections("inet") if c.status == psutil.CONN_LISTEN]
                found[each.pid] = [tuple(address) for address in opened]
    return found


@pytest.mark.distributed
def test_single_host_run_accepts_no_connections_while_training(tmp_path):
    words = [
        "train",
        "snake-ppo",
        "--smoke",
        "--procs",
        "2",
        f"run.runs_dir={tmp_path}",
        "run.name=run",
        "run.record_video=false",
    ]
    words += ["run.total_samples=100000000", "run.device=cpu", "run.log_every=512"]
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    environment = os.environ | {"TMPDIR": str(temporary)}
    process = subprocess.Popen([sys.executable, "-m", "lockstep", *words], stdout=subprocess.DEVNULL, env=environment)
    try:
        deadline = time.monotonic() + 200
        while not (tmp_path / "run" / "metrics.jsonl").exists():
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        launcher = psutil.Process(process.pid)
        found = listeners(launcher)
        assert sum(map(len, found.values())) >= 2  # one gloo listener per process
        for address in (address for addresses in found.values() for address in addresses):
            assert address[0] == "127.0.0.1"
            assert not reachable(address)
        (store,) = temporary.glob("*/store-0")
        assert stat.S_IMODE(store.parent.stat().st_mode) == 0o700
        size = (tmp_path / "run" / "metrics.jsonl").stat().st_size
        while (tmp_path / "run" / "metrics.jsonl").stat().st_size == size:  # training continues
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 75


@pytest.mark.skipif(sys.platform != "linux", reason="lists the descriptors of this process")
def test_listening_sockets_keeps_no_descriptor_open():
    with socket.create_server(("127.0.0.1", 0)) as server, tempfile.TemporaryFile():
        before = os.listdir("/proc/self/fd")
        assert server.fileno() in listening_sockets()
        assert os.listdir("/proc/self/fd") == before


def test_drop_new_connections_keeps_established_connections():
    before = listening_sockets()
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert listening_sockets() - before == {server.fileno()}
        with socket.create_connection(server.getsockname()) as peer:
            accepted, _ = server.accept()
            with accepted:
                assert reachable(server.getsockname())
                drop_new_connections(listening_sockets() - before)
                assert not reachable(server.getsockname())
                peer.sendall(b"a" * 100_000)
                assert len(accepted.recv(100_000, socket.MSG_WAITALL)) == 100_000
                accepted.sendall(b"b")
                assert peer.recv(1) == b"b"


def test_join_private_store_times_out_unless_all_processes_join(tmp_path):
    joined = []

    def join():
        joined.append(join_private_store(tmp_path, 0, 2, timedelta(seconds=60)))

    threads = [threading.Thread(target=join) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [is_private(dist.PrefixStore("a", store)) for store in joined] == [True, True]
    with pytest.raises(dist.DistStoreError, match="only 1 of 2 processes have joined"):
        join_private_store(tmp_path, 1, 2, timedelta(seconds=0.1))


def test_key_value_store_on_private_store_delivers_and_times_out(tmp_path):
    store = dist.PrefixStore("lockstep", join_private_store(tmp_path, 0, 1, timedelta(seconds=60)))
    mailbox, other = KeyValueStore(store.clone()), KeyValueStore(store.clone())
    with pytest.raises(TimeoutError, match="no process set a within 0 s"):
        mailbox.wait("a", 0.05)
    timer = threading.Timer(0.1, other.set, ("a", "word"))
    timer.start()
    assert mailbox.wait("a", 60.0) == "word"
    timer.join()
    mailbox.delete(["a"])
    with pytest.raises(TimeoutError):
        other.wait("a", 0.0)
    assert oct(os.stat(tmp_path / "store-0").st_mode & 0o022) == "0o0"
