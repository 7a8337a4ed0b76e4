"""The code, packages and CPU that computed a checkpoint, for its entry in the chain.

`machine` records what a resume compares. This module records in addition what may change results: the source of
Lockstep and of the user's recipe, the versions of Python and of packages of environments, and the features of the CPU.
"""

import functools
import hashlib
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import lockstep

PACKAGES = (
    *("gymnasium", "ale-py", "Box2D", "MinAtar", "minigrid", "mujoco", "dm-control"),
    *("pettingzoo", "mpe2", "torch-geometric"),
)
"""Packages of tasks: another version may simulate something else."""
_FEATURES = ("amx", "avx", "fma", "f16c", "sve", "asimd", "bf16")
"""Prefixes of the CPU features by which libraries such as MKL choose kernels."""


def describe_provenance(recipe: str) -> dict[str, Any]:
    """Describe code, packages and CPU of this process. `recipe` is a name, or the path of the user's file."""
    files = [Path(recipe)] if recipe.endswith(".py") else []
    return {
        "code": source_hash(),
        "recipe_code": hash_files(files) if files else "",
        "packages": packages(),
        "cpu": cpu(),
    }


@functools.cache
def source_hash() -> str:
    """SHA-256 of the source files of Lockstep, independent of their location."""
    root = Path(lockstep.__file__).parent
    return hash_files(sorted(root.rglob("*.py")), root)


def hash_files(files: list[Path], root: Path | None = None) -> str:
    """SHA-256 of names relative to `root`, if given, and of contents. Missing files count as empty."""
    sha256 = hashlib.sha256()
    for path in files:
        content = path.read_bytes() if path.is_file() else b""
        sha256.update(f"{path.relative_to(root).as_posix() if root else ''}|{len(content)}|".encode())
        sha256.update(content)
    return sha256.hexdigest()


@functools.cache
def packages() -> dict[str, str]:
    """Return the version of Python and those of the installed packages of tasks."""
    versions = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions


@functools.cache
def cpu() -> dict[str, str]:
    """Return the model and the vector features of the CPU; empty texts where the system does not say."""
    found = {"model": platform.processor(), "features": ""}
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").partition("\n\n")[0].splitlines()
    except OSError:
        return found
    values = {key.strip().lower(): value.strip() for key, _, value in (line.partition(":") for line in lines)}
    flags = values.get("flags", values.get("features", "")).split()
    return {
        "model": values.get("model name", found["model"]),
        "features": " ".join(sorted(flag for flag in flags if flag.startswith(_FEATURES))),
    }


def provenance_differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """List the differences as "NAME was A and is B". They may or may not change results."""
    found = []
    for key, name in (("code", "the source code of Lockstep"), ("recipe_code", "the file of the recipe")):
        if one.get(key) != other.get(key):
            found.append(f"{name} was changed")
    versions, here = _part(one, "packages"), _part(other, "packages")
    for package in sorted(versions.keys() | here.keys()):
        before, now = (str(known.get(package, "missing"))[:100] for known in (versions, here))
        if before != now:
            found.append(f"{package} was {before} and is {now}")
    there, now_here = _part(one, "cpu"), _part(other, "cpu")
    if there.get("model") != now_here.get("model"):
        found.append(f"the CPU was {str(there.get('model'))[:100]} and is {str(now_here.get('model'))[:100]}")
    features, here_features = (set(str(known.get("features", "")).split()) for known in (there, now_here))
    if features != here_features:
        different = sorted(features ^ here_features)
        found.append(f"CPU features that only one machine has: {' '.join(different)[:300]}")
    return found


def _part(provenance: dict[str, Any], key: str) -> dict[str, Any]:
    """Return a part of an untrusted description; empty if it has another type."""
    part = provenance.get(key)
    return part if isinstance(part, dict) else {}
