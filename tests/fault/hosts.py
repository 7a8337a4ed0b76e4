"""Two or three hosts on one machine: network namespaces, each linked to a switch in a namespace of its own.

    with hosts(2) as (first, second):                       # 10.77.0.1 and 10.77.0.2, called n0 and n1
        jobs = [host.start(words) for host in (first, second)]
        second.cut()                                        # the link, at the switch
        second.mend()
        jobs[0].wait()                                      # its exit code; raises Hung with stacks on timeout

Nothing here reaches the machine's own network. Only one set of hosts exists at a time: other test processes wait. The
next test removes whatever a killed test left behind.
"""

import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from helpers.multiprocess import SECONDS, Hung

SKIP = "LOCKSTEP_SKIP_HOSTS"
"""Environment variable. 1: skip the tests that need hosts if none can be created. Otherwise they fail."""
_PREFIX, _SWITCH = "lockstep-", "lockstep-switch"
_LOCK = Path(tempfile.gettempdir()) / "lockstep-hosts.lock"
_NAMES = Path("/etc/netns")
"""Files in a subdirectory replace those of /etc in the namespace of that name (`man ip-netns`)."""


@dataclass(frozen=True)
class Job:
    """A command on a host."""

    host: "Host"
    process: subprocess.Popen[bytes]
    log: Path

    @property
    def output(self) -> str:
        """Standard output and error, so far."""
        return self.log.read_text(errors="replace")

    def wait(self, seconds: float = SECONDS) -> int:
        """Return the exit code; on timeout raise Hung with the stacks of all Python processes on the host."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            _signal_all(self.host.namespace, signal.SIGABRT)
            time.sleep(2)  # while they write their stacks
            raise Hung(f"not over after {seconds:.0f} s on {self.host.name}\n{self.output}") from None


@dataclass(frozen=True)
class Host:
    """A host, identified by its number."""

    number: int
    logs: Path

    @property
    def name(self) -> str:
        return f"n{self.number}"

    @property
    def address(self) -> str:
        return f"10.77.0.{self.number + 1}"

    @property
    def namespace(self) -> str:
        return _PREFIX + self.name

    def start(self, words: Sequence[str | Path], environment: Mapping[str, str] | None = None) -> Job:
        """Run a command on this host, in the background."""
        surroundings = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
        surroundings |= {"OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1", "COLUMNS": "200"}
        log = self.logs / f"{self.name}-{len(list(self.logs.iterdir()))}.log"
        with open(log, "wb") as output:
            process = subprocess.Popen(
                ["ip", "netns", "exec", self.namespace, *(str(word) for word in words)],
                env=surroundings | dict(environment or {}),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return Job(self, process, log)

    def cut(self) -> None:
        """Take the host's link down at the switch."""
        _ip("-n", _SWITCH, "link", "set", self.name, "down")

    def mend(self) -> None:
        """Take the host's link up again."""
        _ip("-n", _SWITCH, "link", "set", self.name, "up")

    def processes(self) -> list[int]:
        """Return the pids of all processes on this host, including orphans."""
        return _processes(self.namespace)

    def power_off(self) -> None:
        """End everything on this host at once."""
        _end_all(self.namespace)


@contextmanager
def hosts(count: int) -> Iterator[list[Host]]:
    """Create `count` hosts that reach only each other; end all their processes at the end of the block."""
    with open(_LOCK, "w") as lock, tempfile.TemporaryDirectory(prefix="lockstep-hosts-") as logs:
        fcntl.flock(lock, fcntl.LOCK_EX)
        made = [Host(number, Path(logs)) for number in range(count)]
        try:
            try:
                _clear()
                _make(made)
            except (OSError, subprocess.CalledProcessError) as error:
                reason = getattr(error, "stderr", None) or str(error)
                refuse(
                    f"no network namespaces can be made here: {reason.strip()}\n"
                    "Tests of several hosts need Linux, root and iproute2 (`apt-get install iproute2`); "
                    f"{SKIP}=1 skips them.",
                    SKIP,
                )
            yield made
        finally:
            _clear()


def until(condition: Callable[[], object], what: str, *jobs: Job) -> None:
    """Wait for a condition; on timeout raise Hung with the output of the jobs."""
    deadline = time.monotonic() + SECONDS
    while not condition():
        if time.monotonic() > deadline:
            said = "\n".join(f"-- {job.host.name}\n{job.output}" for job in jobs)
            raise Hung(f"not after {SECONDS:.0f} s: {what}\n{said}")
        time.sleep(0.1)


def _make(made: Sequence[Host]) -> None:
    _ip("netns", "add", _SWITCH)
    _ip("-n", _SWITCH, "link", "add", "switch", "type", "bridge")
    _ip("-n", _SWITCH, "link", "set", "switch", "up")
    names = "".join(f"{host.address} {host.name}\n" for host in made)
    for host in made:
        folder = _NAMES / host.namespace
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
        _ip("netns", "add", host.namespace)
        cable = ["link", "add", "eth0", "type", "veth", "peer", "name", host.name, "netns", _SWITCH]
        _ip("-n", host.namespace, *cable)
        _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", "eth0")
        _ip("-n", host.namespace, "link", "set", "eth0", "up")
        _ip("-n", host.namespace, "link", "set", "lo", "up")
        _ip("-n", _SWITCH, "link", "set", host.name, "master", "switch", "up")


def _clear() -> None:
    """End all processes on all hosts and delete the hosts. Safe because the caller holds the lock."""
    for line in _ip("netns", "list").splitlines() if shutil.which("ip") else []:
        name = line.split()[0]
        if not name.startswith(_PREFIX):
            continue
        _end_all(name)
        _ip("netns", "delete", name)
        shutil.rmtree(_NAMES / name, ignore_errors=True)


def _end_all(namespace: str) -> None:
    """Kill until no process is left, because a process may start another one in between."""
    deadline = time.monotonic() + 10
    while _signal_all(namespace, signal.SIGKILL) and time.monotonic() < deadline:
        time.sleep(0.05)


def _signal_all(namespace: str, number: int) -> int:
    """Send a signal to every process in a namespace; return their number."""
    pids = _processes(namespace)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)
    return len(pids)


def _processes(namespace: str) -> list[int]:
    return [int(word) for word in _ip("netns", "pids", namespace).split()]


def refuse(sentence: str, skip: str) -> None:
    """Fail the test because a requirement is missing, or skip it if the environment variable `skip` is 1."""
    if os.environ.get(skip) == "1":
        pytest.skip(sentence)
    pytest.fail(sentence)


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=30).stdout
