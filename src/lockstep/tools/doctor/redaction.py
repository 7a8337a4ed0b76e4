"""Remove names, addresses and secrets from text that a user may send to others."""

import getpass
import ipaddress
import math
import os
import re
import socket
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASS|CREDENTIAL|AUTH")
"""Names of environment variables whose values are secret."""
_SHORTEST_SECRET = 6
_TOKEN = re.compile(r"\b(?:hf_|gh[pousr]_|github_pat_|glpat-|sk-|xox[abprs]-|AKIA|ya29\.)[A-Za-z0-9_\-]{8,}")
_CREDENTIALS = re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)")
_UUID = re.compile(r"\b(?:GPU-|MIG-)?[0-9a-fA-F]{8}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{4}-[0-9a-fA-F]{12}\b")
_MAC = re.compile(r"(?<![\w:])[0-9a-fA-F]{2}(?::[0-9a-fA-F]{2}){5}(?![\w:])")
_IPV4 = re.compile(r"\b\d{1,3}(\.\d{1,3}){3}\b")
_IPV6 = re.compile(r"(?<![\w:])(?!c10)[0-9a-fA-F:]*:[0-9a-fA-F:]*:[0-9a-fA-F]*(?![\w:])")  # c10::add is C++
_HOME = re.compile(r"(/home/|/Users/)[^/\s'\"]+")


def without_names(text: str, environment: Mapping[str, str] | None = None) -> str:
    """Replace secrets, the home directory, user and host names, UUIDs, and addresses other than loopback."""
    for value in _secrets(os.environ if environment is None else environment):
        text = text.replace(value, "SECRET")
    text = _TOKEN.sub("SECRET", _CREDENTIALS.sub("SECRET", text))
    host = socket.gethostname()
    names = {str(Path.home()): "~", host: "HOST", host.partition(".")[0]: "HOST", _user(): "USER"}
    for name, replacement in names.items():
        if len(name) > 1:
            text = re.sub(rf"(?<![A-Za-z0-9]){re.escape(name)}(?![A-Za-z0-9])", replacement, text)
    text = _HOME.sub("~", text)
    text = _MAC.sub("ADDRESS", _UUID.sub("UUID", text))
    text = _IPV6.sub(lambda found: "ADDRESS" if _is_outside_ipv6(found[0]) else found[0], text)
    return _IPV4.sub(lambda found: found[0] if found[0].startswith("127.") else "ADDRESS", text)


def scrub(value: Any) -> Any:
    """Apply `without_names` to every string inside a JSON value. Keys are kept, because programs look them up.

    Non-finite numbers become strings, because JSON cannot represent them.
    """
    if isinstance(value, str):
        return without_names(value)
    if isinstance(value, Mapping):
        return {key: scrub(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [scrub(part) for part in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _secrets(environment: Mapping[str, str]) -> list[str]:
    """Return values of variables whose names match `SECRET_NAME`, longest first."""
    found = [value for name, value in environment.items() if SECRET_NAME.search(name.upper())]
    return sorted((value for value in found if len(value) >= _SHORTEST_SECRET), key=len, reverse=True)


def _is_outside_ipv6(text: str) -> bool:
    try:
        address = ipaddress.IPv6Address(text)
    except ValueError:
        return False
    return not (address.is_loopback or address.is_unspecified)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""
