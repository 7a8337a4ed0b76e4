"""Changed manifests with a valid checksum."""

import json
from typing import Any

from lockstep.checkpoint import format as form


def sealed(manifest: dict[str, Any]) -> str:
    """Return a manifest as text, with an updated checksum if it has one."""
    values = {name: value for name, value in manifest.items() if name != "checksum"}
    return json.dumps(values | {"checksum": form._checksum(values)} if "checksum" in manifest else values)
