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
_PROCESSES = ("procs", "n", "num-gpus", "world-size", "gpus", "nnodes", "distributed")
"""Flags of `train` and `resume` that ask for processes."""


def preload(words: Sequence[str]) -> list[str] | None:
    """Fork a server early if a command is likely to start workers.

    This runs before files of the user are imported, so that each worker imports them itself.

    Returns:
        None, or the arguments of a worker if this process is now one.
    """
    if started_by_a_launcher() or not asks_for_workers(words) or os.environ.get("LOCKSTEP_START") == "spawn":
        return None
    with _quiet_imports():
        import_torch_with_status()
        from lockstep.launch.fork_server import fork_here

        return fork_here(lambda: import_modules(words))


def serve(descriptor: int) -> list[str]:
    """Run as a separate fork server. Return only in a worker, with its arguments."""
    channel = socket.socket(fileno=descriptor)
    channel.set_inheritable(False)
    with _quiet_imports():
        from lockstep.launch import fork_server

        return fork_server.serve(channel, lambda: import_modules(()))


def import_modules(words: Sequence[str]) -> None:
    """Import the modules that workers of a command need, without starting a thread."""
    for module in (*_MODULES, *_recipes(words)):
        importlib.import_module(module)
    from lockstep.ops.cpu_kernels import start_numba

    start_numba()


@contextmanager
def _quiet_imports() -> Iterator[None]:
    """Set variables that libraries read once, at import. Without them, OpenBLAS starts threads at import."""
    settings = {"OPENBLAS_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    before = {name: os.environ.get(name) for name in settings}
    os.environ.update(settings)
    process = os.getpid()
    yield
    if os.getpid() != process:
        return  # a forked worker, which has its own environment
    for name, value in before.items():
        if value is None:
            del os.environ[name]
        else:
            os.environ[name] = value


def asks_for_workers(words: Sequence[str]) -> bool:
    """Return whether a command line is likely to start workers. A wrong guess only costs time."""
    if any(word in ("-h", "--help") for word in words):
        return False
    if words[0] in ("prove", "bench"):
        return True
    if words[0] == "doctor":
        return not {"--gpu", "--gpu-step", "--trial"} & set(words)
    if words[0] not in ("train", "resume"):
        return False
    for word, following in zip(words, [*words[1:], ""], strict=True):
        name, has_value, value = word.lstrip("-").replace("_", "-").partition("=")
        if name in _PROCESSES and (word.startswith("-") or has_value) and (value if has_value else following) != "1":
            return True
    return False


def _recipes(words: Sequence[str]) -> list[str]:
    """Return the lockstep modules that the recipes in a command line need."""
    from lockstep.registry import RECIPES

    modules = []
    for word in [*words, *(["gym-ppo"] if words[:1] == ["doctor"] else [])]:
        if word in RECIPES:
            modules.append(RECIPES[word][0])
        elif word.endswith(".py"):
            modules += _imports_of(Path(word))
        elif words[:1] == ["resume"]:
            with suppress(ConfigError):  # not a run directory, or the command reports it
                recipe = read_yaml(Path(word) / CONFIG).get("recipe")
                modules += [module for name, (module, _) in RECIPES.items() if name == recipe]
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
