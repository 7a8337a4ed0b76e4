"""How processes find each other: alone on a host, or among several."""

import pytest

from lockstep.config import ConfigError
from lockstep.launch import rendezvous
from lockstep.launch.rendezvous import interfaces, multi_host, single_host


class Way:
    """A socket to which the kernel has shown the way from one address."""

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
    """A machine with an interface of its own to a network, on which the first host is somebody else."""
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(rendezvous.socket, "socket", Way)
    monkeypatch.setattr(rendezvous, "interfaces", lambda: {"lo": "127.0.0.1", "eth7": "10.1.2.3"})
    monkeypatch.setattr(rendezvous.socket, "gethostbyname", {"first": "10.1.2.1", "me": "10.1.2.3"}.__getitem__)


def test_one_host_meets_in_a_file_and_talks_over_loopback(tmp_path, monkeypatch):
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.delenv(name, raising=False)
    host = single_host(tmp_path)
    assert host.endpoint.startswith(str(tmp_path))
    assert host.rendezvous == {"store_type": "file"}
    assert host.environment == {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "=lo"}
    assert not host.warnings


def test_several_hosts_use_the_interface_that_leads_to_the_endpoint(networked):
    host = multi_host("first:29500")
    assert host.address == "10.1.2.3"
    assert host.environment == {"GLOO_SOCKET_IFNAME": "eth7", "NCCL_SOCKET_IFNAME": "eth7"}
    assert not host.rendezvous["is_host"]
    assert multi_host("me:29500").rendezvous["is_host"]


def test_an_interface_of_the_users_own_stands(networked, monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    assert multi_host("first:29500").environment == {"GLOO_SOCKET_IFNAME": "eth7", "NCCL_SOCKET_IFNAME": "ib0"}


def test_a_rendezvous_beyond_this_machine_is_warned_of(networked):
    (warning,) = multi_host("first:29500").warnings
    assert "can be reached at 10.1.2.3" in warning
    assert "private network" in warning


def test_on_loopback_there_is_nothing_to_warn_of():
    assert not multi_host("127.0.0.1:29500").warnings


@pytest.mark.parametrize("endpoint", ["", "first", "first:", ":29500", "first:port"])
def test_an_endpoint_is_a_host_and_a_port(endpoint):
    with pytest.raises(ConfigError, match="--rdzv-endpoint"):
        multi_host(endpoint)


def test_a_host_without_an_address_is_named():
    with pytest.raises(ConfigError, match=r"'no-such-host\.invalid'"):
        multi_host("no-such-host.invalid:29500")


def test_this_machine_has_loopback():
    assert interfaces()["lo"] == "127.0.0.1"
