"""Import the modules of workers and fork a server from this process, before a command does anything else."""

import ast
import importlib
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

from lockstep.cli.torch_import import import_torch_with_status
from lockstep.config import ConfigError, read_yaml
from lockstep.io.jsonl import CONFIG
from lockstep.launch.process_lifetime import started_by_a_launcher

_MODULES = (
    "lockstep.training_loop",
    "lockstep.cli.train",
    "lockstep.cli.resume",
    "lockstep.cli.workers",
    "lockstep.launch.launcher",
    "lockstep.launch.fork_server",
    "lockstep.ops.cpu_kernels",
    "lockstep.ops.philox.cpu",
    "torch.utils.tensorboard",
)
"""Modules that every worker imports. The launcher needs most of them as well."""
_PROCESS_FLAGS = ("procs", "n", "num-gpus", "world-size", "gpus", "nnodes", "distributed")
"""Flags of `train` and `resume` that ask for processes."""


def preload(args: Sequence[str]) -> list[str] | None:
    """Fork a server early if a command is likely to start workers.

    This runs before files of the user are imported, so that each worker imports them itself.

    Returns:
        None, or the arguments of a worker if this process is now one.
    """
    if started_by_a_launcher() or not asks_for_workers(args) or os.environ.get("LOCKSTEP_START") == "spawn":
        return None
    with _quiet_imports():
        import_torch_with_status()
        from lockstep.launch.fork_server import fork_here

        return fork_here(lambda: import_modules(args))


def serve(descriptor: int) -> list[str]:
    """Run as a separate fork server. Return only in a worker, with its arguments."""
    channel = socket.socket(fileno=descriptor)
    channel.set_inheritable(False)
    with _quiet_imports():
        from lockstep.launch import fork_server

        return fork_server.serve(channel, lambda: import_modules(()))


def import_modules(args: Sequence[str]) -> None:
    """Import the modules that workers of a command need, without starting a thread."""
    for module in (*_MODULES, *_recipe_modules(args)):
        importlib.import_module(module)
    from lockstep.ops.cpu_kernels import start_numba

    start_numba()


@contextmanager
def _quiet_imports() -> Iterator[None]:
    """Set variables that libraries read once, at import. Without them, OpenBLAS starts threads at import."""
    settings = {"OPENBLAS_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    previous = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    pid = os.getpid()
    yield
    if os.getpid() != pid:
        return  # a forked worker, which has its own environment
    for name, value in previous.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


def asks_for_workers(args: Sequence[str]) -> bool:
    """Return whether a command line is likely to start workers. A wrong guess only costs time."""
    if any(arg in ("-h", "--help") for arg in args):
        return False
    if args[0] in ("prove", "bench"):
        return True
    if args[0] == "doctor":
        return not {"--gpu", "--gpu-step", "--trial"} & set(args)
    if args[0] not in ("train", "resume", "fork") or "--seeds" in args:  # each run of several seeds has its launcher
        return False
    for arg, next_arg in zip(args, [*args[1:], ""], strict=True):
        name, has_value, value = arg.lstrip("-").replace("_", "-").partition("=")
        if name in _PROCESS_FLAGS and (arg.startswith("-") or has_value) and (value if has_value else next_arg) != "1":
            return True
    return False


def _recipe_modules(args: Sequence[str]) -> list[str]:
    """Return the lockstep modules that the recipes in a command line need."""
    from lockstep.registry import RECIPES, recipe_module

    modules = []
    for arg in [*args, *(["gym-ppo"] if args[:1] == ["doctor"] else [])]:
        if arg in RECIPES:
            modules.append(recipe_module(arg))
        elif arg.endswith(".py"):
            modules += _imports_of(Path(arg))
        elif args[:1] in (["resume"], ["fork"]):
            with suppress(ConfigError):  # not a run directory, or the command reports it
                recipe = read_yaml(Path(arg.partition("@")[0]) / CONFIG).get("recipe")
                modules += [recipe_module(name) for name in RECIPES if name == recipe]
    return modules


def _imports_of(path: Path) -> list[str]:
    """Return the lockstep modules that a user's file imports. The file is parsed and not run."""
    try:
        tree = ast.parse(path.read_bytes() if path.is_file() else b"")
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        return []  # the command reports it
    names = [node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module]
    names += [alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names]
    return [name for name in names if name.startswith("lockstep.") and find_spec(name) is not None]
