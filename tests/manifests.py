"""Manifests that a test has changed, with a valid checksum."""

import json
from typing import Any

from lockstep.checkpoint import format as form


def sealed(manifest: dict[str, Any]) -> str:
    """A manifest as text, with the checksum of its values where it has one."""
    values = {name: value for name, value in manifest.items() if name != "checksum"}
    return json.dumps(values | {"checksum": form._checksum(values)} if "checksum" in manifest else values)
