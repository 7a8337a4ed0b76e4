"""Rendezvous settings on one host and on several hosts."""

import pytest

from lockstep.config import ConfigError
from lockstep.launch import rendezvous
from lockstep.launch.rendezvous import interfaces, multi_host, single_host


class FakeSocket:
    """A fake socket with a fixed local address."""

    def __init__(self, *_):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def connect(self, target):
        self.target = target

    def getsockname(self):
        return ("10.1.2.3", 40000)


@pytest.fixture
def networked(monkeypatch):
    """A machine with a network interface; the first host is another machine."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(rendezvous.socket, "socket", FakeSocket)
    monkeypatch.setattr(rendezvous, "interfaces", lambda: {"lo": "127.0.0.1", "eth7": "10.1.2.3"})
    monkeypatch.setattr(rendezvous.socket, "gethostbyname", {"first": "10.1.2.1", "me": "10.1.2.3"}.__getitem__)


def test_single_host_uses_loopback(monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    host = single_host()
    assert host.address == "127.0.0.1"
    assert host.environment == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
    assert not host.warnings


def test_multi_host_uses_interface_that_reaches_endpoint(networked):
    host = multi_host("first:29500")
    assert host.address == "10.1.2.3"
    assert host.environment == {"GLOO_SOCKET_IFNAME": "eth7", "NCCL_SOCKET_IFNAME": "eth7"}
    assert not host.rendezvous["is_host"]
    assert multi_host("me:29500").rendezvous["is_host"]


def test_multi_host_keeps_interface_set_by_user(networked, monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    assert multi_host("first:29500").environment == {"GLOO_SOCKET_IFNAME": "eth7", "NCCL_SOCKET_IFNAME": "ib0"}


def test_multi_host_on_reachable_address_warns(networked):
    (warning,) = multi_host("first:29500").warnings
    assert "can be reached at 10.1.2.3" in warning
    assert "private network" in warning


def test_multi_host_on_loopback_does_not_warn():
    assert not multi_host("127.0.0.1:29500").warnings


@pytest.mark.parametrize("endpoint", ["", "first", "first:", ":29500", "first:port"])
def test_multi_host_with_invalid_endpoint_is_rejected(endpoint):
    with pytest.raises(ConfigError, match="--rdzv-endpoint"):
        multi_host(endpoint)


def test_multi_host_with_unknown_host_error_names_host():
    with pytest.raises(ConfigError, match=r"'no-such-host\.invalid'"):
        multi_host("no-such-host.invalid:29500")


def test_interfaces_contains_loopback():
    assert interfaces()["lo"] == "127.0.0.1"
