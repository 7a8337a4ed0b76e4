"""Workers forked from a preloaded server behave like fresh interpreters."""

import json
import os
import re
import subprocess
import sys

import pytest

from helpers.multiprocess import command
from lockstep.cli.preload import asks_for_workers

pytestmark = pytest.mark.distributed

LOCKSTEP = [sys.executable, "-m", "lockstep"]
FACTS = """
import json, os, signal, sys, threading
from pathlib import Path

import numpy as np
import torch

import lockstep.recipes.gym_ppo as base


class Reporting(base.GymPPO): ...


if "RANK" in os.environ:
    facts = {
        "environment": dict(os.environ),
        "argv": sys.argv,
        "path": sys.path,
        "directory": os.getcwd(),
        "threads": torch.get_num_threads(),
        "debug": str(torch.distributed.get_debug_level()),
        "handlers": [str(signal.getsignal(number)) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)],
        "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])),
        "leader": os.getpgid(0) == os.getpid(),
        "session": os.getsid(0) == os.getpid(),
        "drawn": float(np.random.rand()),
        "grad": torch.is_grad_enabled(),
    }
    out = Path(__file__).with_name(f"{os.environ.get('LOCKSTEP_START', 'fork')}-{os.environ['RANK']}.json")
    out.write_text(json.dumps(facts))
"""
CHANGING = (
    "LOCKSTEP_START",
    "LOCKSTEP_LAUNCH_DIR",
    "LOCKSTEP_PROGRESS_FD",
    "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_ERROR_FILE",
)
CHANGING += ("MASTER_PORT",)


@pytest.fixture(scope="module")
def facts(tmp_path_factory):
    """The process state that two workers report, by start method, and the output of each command."""
    directory = tmp_path_factory.mktemp("facts")
    (directory / "recipe.py").write_text(FACTS)
    found, output = {}, {}
    for start in ("fork", "spawn"):
        words = [
            *LOCKSTEP,
            "train",
            "recipe.py",
            "--smoke",
            "--procs",
            "2",
            f"run.runs_dir={directory}",
            "run.total_samples=512",
        ]
        environment = {"OMP_NUM_THREADS": "3", "TORCH_DISTRIBUTED_DEBUG": "DETAIL", "A_NAME": "a value"}
        environment |= {"LOCKSTEP_START": "spawn"} if start == "spawn" else {}
        ended = command([*words, f"run.name={start}"], directory=directory, environment=environment, fresh=True)
        assert ended.code == 0, ended.output
        output[start] = ended.output
        found[start] = [json.loads((directory / f"{start}-{rank}.json").read_text()) for rank in range(2)]
    return found, output


def test_forked_worker_has_the_state_of_a_spawned_one(facts):
    for forked, fresh in zip(facts[0]["fork"], facts[0]["spawn"], strict=True):
        assert forked["argv"][:-1] == fresh["argv"][:-1]  # the last is the file to which the launcher wrote the recipe
        for name in CHANGING:
            forked["environment"].pop(name, None)
            fresh["environment"].pop(name, None)
        assert forked["environment"] == fresh["environment"]
        differing = {"argv", "environment", "drawn"}
        assert {k: v for k, v in forked.items() if k not in differing} == {
            k: v for k, v in fresh.items() if k not in differing
        }
        assert forked["debug"].endswith("DETAIL")


def test_workers_do_not_share_numpys_global_generator(facts):
    first, second = facts[0]["fork"]
    assert first["drawn"] != second["drawn"]


def test_launch_reports_no_fallback(facts):
    assert "imports torch itself" not in facts[1]["fork"]


@pytest.mark.slow
def test_preload_that_starts_threads_falls_back_to_a_plain_start(tmp_path):
    (tmp_path / "sitecustomize.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,), daemon=True).start()\n"
    )
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    words = ["train", "gym-ppo", "--smoke", "--procs", "2", f"run.runs_dir={tmp_path}", "run.total_samples=512"]
    ended = command([*LOCKSTEP, *words], environment={"PYTHONPATH": path})
    assert ended.code == 0, ended.output
    assert ended.output.count("imports torch itself") == 1
    assert "has started threads" in ended.output


ENDINGS = """
import os, signal, sys, time
import lockstep.recipes.gym_ppo as base

class Ending(base.GymPPO): ...

if os.environ.get("RANK") == "1":
    ENDING
elif "RANK" in os.environ:
    time.sleep(3)
"""


@pytest.mark.parametrize(
    ("ending", "said"),
    [
        pytest.param("os._exit(7)", "process 1 of 2 failed first, with exit code 7.", marks=pytest.mark.slow),
        ("sys.exit(9)", "process 1 of 2 failed first, with exit code 9."),
        ("os.kill(os.getpid(), signal.SIGKILL)", "process 1 of 2 failed first: it was ended by SIGKILL."),
        ("os.kill(os.getppid(), signal.SIGKILL); time.sleep(60)", "it was ended by SIGKILL."),  # the server itself
    ],
)
def test_exit_codes_and_signals_reach_the_launcher(tmp_path, ending, said):
    (tmp_path / "ending.py").write_text(ENDINGS.replace("ENDING", ending))
    words = ["train", "ending.py", "--smoke", "--procs", "2", "--max-restarts", "0", f"run.runs_dir={tmp_path}"]
    ended = command([*LOCKSTEP, *words], directory=tmp_path)
    assert ended.code == 1, ended.output
    assert said in ended.output


def test_worker_of_a_killed_server_counts_as_killed(tmp_path):
    script = (
        "import os, signal, time\n"
        "from lockstep.launch import fork_server\n"
        "server = fork_server.obtain(os.environ)\n"
        "first = server.start(['--version'], os.environ, [], 1)\n"
        "os.kill(server.pid, signal.SIGKILL)\n"
        "worker = server.start(['--version'], os.environ, [], 1)\n"
        "print('codes', worker.poll(), worker.pid, first.wait(60))\n"
        "print('new server', fork_server.obtain(os.environ).pid != server.pid)\n"
    )
    ended = command([sys.executable, "-c", script])
    assert re.search(r"codes -9 0 (-9|0)\nnew server True", ended.output), ended.output


def test_run_restarts_if_the_server_is_killed_while_workers_start(tmp_path):
    once = "if not os.path.exists('killed'): open('killed', 'w'); os.kill(os.getppid(), signal.SIGKILL)"
    (tmp_path / "ending.py").write_text(ENDINGS.replace('"1"', '"0"').replace("ENDING", once))
    words = ["train", "ending.py", "--smoke", "--procs", "4", f"run.runs_dir={tmp_path}", "run.total_samples=512"]
    ended = command([*LOCKSTEP, *words], directory=tmp_path)
    assert ended.code == 0, ended.output
    assert "it was ended by SIGKILL." in ended.output
    assert "Starting again" in ended.output


def test_several_launches_of_one_process_use_one_server(tmp_path):
    script = (
        "from lockstep.launch.launcher import launch_captured\n"
        "from lockstep.launch import fork_server\n"
        "pids = set()\n"
        "for n in (1, 2, 3):\n"
        f"    words = ['train', 'gym-ppo', '--smoke', 'run.total_samples=512', 'run.runs_dir={tmp_path}', "
        f"f'run.name={{n}}']\n"
        "    assert not (cause := launch_captured(words, n)), cause\n"
        "    pids.add(fork_server._server.pid)\n"
        "print('servers', len(pids))\n"
    )
    ended = command([sys.executable, "-c", script])
    assert "servers 1\n" in ended.output, ended.output


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("train gym-ppo --procs 4", True),
        ("train gym-ppo -n 2", True),
        ("train gym-ppo --procs=auto", True),
        ("resume RUN --gpus 0,1", True),
        ("prove gym-ppo", True),
        ("train gym-ppo", False),
        ("train gym-ppo --procs 1", False),
        ("train gym-ppo --procs 4 --help", False),
        ("ls", False),
        ("doctor --gpu", False),
    ],
)
def test_command_lines_that_start_workers_are_recognized(words, wanted):
    assert asks_for_workers(words.split()) == wanted


def test_commands_that_start_no_workers_import_no_torch():
    code = (
        "import sys\nfrom lockstep.cli import main\nsys.argv = ['lockstep', 'ls', '--help']\n"
        "try: main()\nfinally: print('torch' in sys.modules)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert re.search(r"False\s*$", ended.stdout), ended.stdout + ended.stderr


COMPILED = """
import atexit, json, os
from pathlib import Path

import lockstep.recipes.snake_ppo as base
import lockstep.tasks.snake.env as snake
import lockstep.tasks.kernels as kernels


class Counting(base.SnakePPO): ...


def count():
    owned = {**vars(snake), **vars(kernels)}
    kernels_of = {name: kernel for name, kernel in owned.items() if hasattr(kernel, "stats")}
    misses = {name: sum(kernel.stats.cache_misses.values()) for name, kernel in kernels_of.items()}
    Path(__file__).with_name(f"misses-{os.environ['RANK']}.json").write_text(json.dumps(misses))


if "RANK" in os.environ:
    atexit.register(count)
"""


@pytest.mark.slow  # compiles every kernel
def test_kernels_are_compiled_by_one_worker_for_all(tmp_path):
    (tmp_path / "counting.py").write_text(COMPILED)
    words = ["train", "counting.py", "--smoke", "--procs", "3", f"run.runs_dir={tmp_path}", "run.total_samples=512"]
    words += ["run.record_video=false"]
    ended = command([*LOCKSTEP, *words], directory=tmp_path, environment={"NUMBA_CACHE_DIR": str(tmp_path / "cache")})
    assert ended.code == 0, ended.output
    by_rank = [json.loads((tmp_path / f"misses-{rank}.json").read_text()) for rank in range(3)]
    compiled = {name: sum(misses[name] for misses in by_rank) for name in by_rank[0]}
    assert sum(compiled.values()) > 0
    assert max(compiled.values()) == 1, by_rank
