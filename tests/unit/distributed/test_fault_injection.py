"""Fault injection: a scripted signal is sent by the given process, at the given phase and count, once."""

import os
import signal

import pytest

from lockstep.config import ConfigError
from lockstep.distributed import fault_injection
from lockstep.distributed.fault_injection import SWITCH, VARIABLE, read
from lockstep.launch.world import WorldInfo


@pytest.mark.parametrize(
    ("script", "number", "launcher"),
    [
        ("1:learn:3", signal.SIGKILL, False),
        ("1:learn:3:SIGTERM", signal.SIGTERM, False),
        ("1:learn:3:SIGINT:launcher", signal.SIGINT, True),
    ],
)
def test_fault_signal_is_sent_only_at_given_phase_and_count(monkeypatch, script, number, launcher):
    sent = []
    monkeypatch.setenv(VARIABLE, script)
    monkeypatch.setattr(fault_injection.os, "kill", lambda pid, signum: sent.append((pid, signum)))
    planned = read(WorldInfo(rank=1, size=2))
    for phase, count in [("learn", 2), ("collect", 3), ("learn", 4)]:
        planned.at(phase, count)
    assert sent == []
    planned.at("learn", 3)
    assert sent == [(os.getppid() if launcher else os.getpid(), number)]


@pytest.mark.parametrize(
    "script", ["1", "1:learn", "x:learn:3", "1:learn:soon", "1:learn:3:SIGNOTHING", "1:learn:3:SIGTERM:all", ":::::"]
)
def test_malformed_fault_script_is_rejected_with_usage(monkeypatch, script):
    monkeypatch.setenv(VARIABLE, script)
    with pytest.raises(ConfigError, match="PROCESS:PHASE:COUNT"):
        read(WorldInfo(rank=1, size=2))


def test_fault_script_without_switch_has_no_effect(monkeypatch):
    monkeypatch.setenv(VARIABLE, "1:learn:3")
    assert read(WorldInfo(rank=1, size=2)) is not None
    monkeypatch.delenv(SWITCH)
    assert read(WorldInfo(rank=1, size=2)) is None


def test_fault_script_is_ignored_by_other_ranks_and_after_restart(monkeypatch):
    monkeypatch.setenv(VARIABLE, "1:learn:3")
    assert read(WorldInfo(rank=0, size=2)) is None
    assert read(WorldInfo(rank=1, size=2, restarts=1)) is None
    monkeypatch.delenv(VARIABLE)
    assert read(WorldInfo(rank=1, size=2)) is None
