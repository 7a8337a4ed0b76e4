"""Agreement on a save over the store: clients in threads, of both kinds of stores."""

import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from lockstep.checkpoint import handshake
from lockstep.checkpoint.handshake import SaveHandshake
from lockstep.distributed.kv_store import KeyValueStore

SIZE = 8


@pytest.fixture(params=["tcp", "file"])
def connect(request, tmp_path):
    if request.param == "tcp":
        server = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)
        yield lambda: KeyValueStore(
            dist.PrefixStore("run", dist.TCPStore("127.0.0.1", server.port, None, False, timedelta(seconds=30)))
        )
    else:
        yield lambda: KeyValueStore(dist.PrefixStore("run", dist.FileStore(str(tmp_path / "store"), SIZE)))


def start_all(connect, timeout=30.0, size=SIZE):
    told = []
    return [SaveHandshake(connect, rank, size, timeout, lambda: told.append(1)) for rank in range(size)], told


def save(one, results, verdict, problem="", wait=0.0):
    """Take part in a save as the manager does."""
    with one.beating():
        time.sleep(wait)
        one.report({f"lanes-{one.rank}": {"bytes": one.rank}}, problem)
        if one.rank == 0:
            results["collected"] = one.collect()
            one.announce(verdict)
            return
    results[one.rank] = one.verdict()


def run_all(processes, verdict=("", True), **special):
    """Run a save on all processes at once. `special` has arguments by rank."""
    results, threads = {}, []
    for one in processes:
        arguments = special.get(f"rank_{one.rank}", {})
        threads.append(threading.Thread(target=save, args=(one, results, verdict), kwargs=arguments))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


def test_main_process_gets_all_files_and_the_others_the_verdict(connect):
    processes, _ = start_all(connect)
    results = run_all(processes)
    assert results["collected"] == ({f"lanes-{rank}": {"bytes": rank} for rank in range(SIZE)}, [])
    assert [results[rank] for rank in range(1, SIZE)] == [["", True]] * (SIZE - 1)


def test_problems_are_collected_and_the_next_save_starts_clean(connect):
    processes, _ = start_all(connect)
    results = run_all(processes, rank_3={"problem": "disk full"}, rank_5={"problem": "disk full"})
    assert results["collected"][1] == ["disk full", "disk full"]
    processes[0].forget()
    assert run_all(processes)["collected"][1] == []


def test_next_save_does_not_get_the_verdict_of_a_failed_one_that_is_not_forgotten_yet(connect):
    processes, _ = start_all(connect)
    run_all(processes, verdict=["disk full", False])
    late = {f"rank_{rank}": {"wait": 0.5} for rank in (0, 1)}  # the others ask for the verdict first
    results = run_all(processes, **late)
    assert [results[rank] for rank in range(1, SIZE)] == [["", True]] * (SIZE - 1)
    assert len(results["collected"][0]) == SIZE


def test_slow_process_is_waited_for_while_it_sends_heartbeats(connect, monkeypatch):
    monkeypatch.setattr(handshake, "LOOK_SECONDS", 0.2)
    processes, told = start_all(connect, timeout=1.0)
    results = run_all(processes, rank_6={"wait": 3.0})
    assert len(results["collected"][0]) == SIZE
    assert told


def test_process_without_heartbeat_is_named(connect, monkeypatch):
    monkeypatch.setattr(handshake, "LOOK_SECONDS", 0.2)
    processes, _ = start_all(connect, timeout=1.0)
    silent, failures = 4, {}

    def collect(one):
        with one.beating():
            one.report({}, "")
            try:
                one.collect()
            except TimeoutError as error:
                failures["problem"] = str(error)

    def take_part(one):
        with one.beating():
            one.report({}, "")

    threads = [threading.Thread(target=collect, args=(processes[0],))]
    threads += [threading.Thread(target=take_part, args=(one,)) for one in processes[1:] if one.rank != silent]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert failures == {"problem": f"process {silent} has sent no heartbeat for 1 s"}


def test_process_that_dies_between_two_saves_is_named(connect, monkeypatch):
    monkeypatch.setattr(handshake, "LOOK_SECONDS", 0.2)
    processes, _ = start_all(connect, timeout=1.0)
    run_all(processes)
    for one in processes[:4] + processes[5:]:
        with one.beating():
            one.report({}, "")
    with pytest.raises(TimeoutError, match="process 4 has sent no heartbeat for 1 s"):
        processes[0].collect()


def test_requests_of_the_main_process_do_not_grow_with_the_processes(monkeypatch):
    counts = {}
    for size in (4, 64):
        requests = []

        class Counting(KeyValueStore):
            def __init__(self, store, requests=requests):
                super().__init__(store)
                self.requests = requests

            def wait(self, key, seconds):
                self.requests.append(key)
                return super().wait(key, seconds)

            def read(self, keys):
                self.requests.append("read")
                return super().read(keys)

            def delete(self, keys):
                self.requests += list(keys)
                super().delete(keys)

        server = dist.HashStore()
        processes, _ = start_all(lambda server=server, Counting=Counting: Counting(server), size=size)
        for one in processes[1:]:
            one.report({}, "")
        requests.clear()
        processes[0].report({}, "")
        processes[0].collect()
        counts[size] = len(requests)
    assert counts[4] == counts[64]
