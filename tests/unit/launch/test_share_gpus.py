"""Refusal of processes on the same GPU."""

import threading
import time
from types import SimpleNamespace

import torch
import torch.distributed as dist

from lockstep.config import ConfigError
from lockstep.launch.device import share_gpus
from lockstep.launch.world import WorldInfo


class SlowStore:
    """A store whose answers take a while."""

    def __init__(self, store, seconds):
        self.store, self.seconds, self.read = store, seconds, []

    def get(self, key):
        time.sleep(self.seconds)
        value = self.store.get(key)
        self.read.append(key)
        return value

    def set(self, key, value):
        self.store.set(key, value)


def test_main_process_keeps_the_store_until_all_have_read_the_refusal(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="the only one"))
    store, ended = dist.HashStore(), []

    def start(rank, of_rank):
        try:
            share_gpus(of_rank, WorldInfo(rank=rank, size=2), torch.device("cuda", 0), allowed=False)
        except ConfigError as error:
            ended.append((rank, str(error).splitlines()[0]))

    slow = SlowStore(store, seconds=1.0)
    late = threading.Thread(target=start, args=(1, slow))
    late.start()
    start(0, store)  # it hosts the store, which ends with this process
    assert slow.read == ["devices"]
    message = "processes 0, 1 are on the same GPU."
    late.join()
    assert sorted(ended) == [(0, message), (1, message)]
