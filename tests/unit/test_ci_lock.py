"""CI requirements with hashes match the CI constraints."""

import re
from pathlib import Path

CI = Path(__file__).parents[2] / ".ci"


def pins(name):
    """Return the pinned versions of a requirements file by normalized package name."""
    found = re.findall(r"^([A-Za-z0-9._-]+)==(\S+)", (CI / name).read_text(), re.MULTILINE)
    return {re.sub(r"[-_.]+", "-", package).lower(): version for package, version in found}


def test_lock_contains_every_constraint_except_torch():
    wanted = pins("constraints.txt")
    wanted.pop("torch")
    locked = pins("requirements.txt")
    assert {name: locked.get(name) for name in wanted} == wanted
    assert pins("uv.txt") == {"uv": wanted["uv"]}


def test_lock_has_hash_for_every_package_and_excludes_torch():
    for name in ("requirements.txt", "uv.txt"):
        parts = re.split(r"^(?=[a-zA-Z0-9])", (CI / name).read_text(), flags=re.MULTILINE)[1:]
        assert parts
        assert all("--hash=sha256:" in part for part in parts)
    assert not {name for name in pins("requirements.txt") if name == "torch" or name.startswith("cuda-")}
