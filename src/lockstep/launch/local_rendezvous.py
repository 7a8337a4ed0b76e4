"""Rendezvous of a single launcher, which has no other launchers to find or wait for."""

import torch.distributed as dist
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo


class LocalRendezvous(RendezvousHandler):
    """Forms a group of one launcher immediately. Torch's own rendezvous delays each start by up to 0.3 s."""

    def __init__(self, job: str) -> None:
        self._job, self._starts, self._closed = job, 0, False
        self._store = dist.HashStore()

    def get_backend(self) -> str:
        return "local"

    def get_run_id(self) -> str:
        return self._job

    def next_rendezvous(self) -> RendezvousInfo:
        self._starts += 1
        store = dist.PrefixStore(str(self._starts), self._store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo.build(0, store, "127.0.0.1"))

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def shutdown(self) -> bool:
        return True
