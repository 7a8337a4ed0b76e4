"""Environments in a Python file of the user: `my_env.py:Name-v0`, or `my_env:Name-v0` in the working directory.

Python does not import from the working directory here, because an untrusted run directory must not execute code. A file
is therefore loaded by its path, which the config of a run stores as an absolute path.
"""

import sys
from importlib.util import find_spec, module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

from lockstep.config import ConfigError


def env_file(id: str) -> Path | None:
    """Return the Python file that an id names, or None."""
    module = id.rpartition(":")[0]
    return Path(module) if module.endswith(".py") else None


def with_absolute_path(id: str) -> str:
    """Return an id with the absolute path of the file that it names. Relative paths start at the working directory.

    A module that is installed takes precedence over a file of its name in the working directory.
    """
    module, _, name = id.rpartition(":")
    if env_file(id) is None and (not module.isidentifier() or not _is_free(module, Path(f"{module}.py"))):
        return id
    file = Path(module).with_suffix(".py").resolve()
    return f"{file}:{name}" if file.is_file() or module.endswith(".py") else id


def load_env_file(file: Path) -> ModuleType:
    """Execute a Python file under its own name, once per process, so that it registers its environments."""
    file, name = file.resolve(), file.stem
    main = sys.modules["__main__"]
    if getattr(main, "__file__", None) and Path(str(main.__file__)).resolve() == file:
        return main  # the user's script, which defines the environment and trains on it
    if getattr(sys.modules.get(name), "__file__", None) == str(file):
        return sys.modules[name]
    if not file.is_file():
        raise ConfigError(f"there is no file {file}.", "Give the file of the environment: --task.id my_env.py:Name-v0")
    if not _is_free(name, file):
        raise ConfigError(f"{file} has the same name as another module, {name}.", "Rename the file.")
    if str(file.parent) not in sys.path:
        sys.path.append(str(file.parent))  # it may import modules next to it; last, so that they shadow no library
    spec = spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    sys.modules[name] = module_from_spec(spec)  # an entry point may name the module
    try:
        spec.loader.exec_module(sys.modules[name])
    except BaseException:
        del sys.modules[name]
        raise
    return sys.modules[name]


def _is_free(module: str, file: Path) -> bool:
    """Return whether no other file provides a module of that name."""
    if module in sys.modules:
        return getattr(sys.modules[module], "__file__", None) == str(file.resolve())
    spec = find_spec(module)
    return spec is None or spec.origin == str(file.resolve())
