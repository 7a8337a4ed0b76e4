"""The memory limits in SECURITY.md, checked on the files that come closest to them."""

from contextlib import suppress
from pathlib import Path

import pytest
from test_untrusted_imports import status

from helpers.multiprocess import together
from lockstep.config import ConfigError, read_yaml
from lockstep.io.jsonl import iter_jsonl, newest_values
from lockstep.io.safe_read import JSON_BYTES, YAML_BYTES, UnreadableFileError, read_json
from lockstep.tools.report.reference_curves import REFERENCE_BYTES, read_reference

MIB = 2**20


def filled(head, part, tail, size):
    """Return a text of about `size` bytes that repeats a part."""
    return head + part * ((size - len(head) - len(tail)) // len(part)) + tail


def sparse(path, size):
    with path.open("wb") as file:
        file.truncate(size)


FILES = {
    "json of lists": (lambda p: p.write_text(filled("[", "[],", "0]", JSON_BYTES)), read_json, 256),
    "json of objects": (lambda p: p.write_text(filled("[", '{"":0},', "0]", JSON_BYTES)), read_json, 256),
    "json of numbers": (lambda p: p.write_text(filled("[", "9e9,", "0]", JSON_BYTES)), read_json, 256),
    "json beyond the bound": (lambda p: sparse(p, 2**36), read_json, 1),
    "yaml of lists": (lambda p: p.write_text(filled("a: [", "[],", "0]", YAML_BYTES)), read_yaml, 256),
    "yaml of brackets": (lambda p: p.write_text("[" * (YAML_BYTES - 1)), read_yaml, 256),
    "yaml of keys": (
        lambda p: p.write_text("".join(f"{n}:\n" for n in range(YAML_BYTES // 8))),
        read_yaml,
        256,
    ),
    "a log of one line": (lambda p: sparse(p, 2**28), lambda p: sum(1 for _ in iter_jsonl(p, 2**28)), 256),
    "a log of small lines": (
        lambda p: p.write_text(filled("", "{}\n", "", 2 * MIB)),
        lambda p: sum(1 for _ in iter_jsonl(p)),
        256,
    ),
    "the end of a log of one line": (lambda p: sparse(p, 2**36), lambda p: newest_values(p, ["samples"]), 64),
    "the end of a log of small lines": (
        lambda p: p.write_text(filled("", '{"a":1}\n', "", 80 * MIB)),
        lambda p: newest_values(p, ["samples"]),
        64,
    ),
    "a reference": (
        lambda p: p.write_text(filled("step,reward\n", "1,1\n", "", REFERENCE_BYTES)),
        read_reference,
        512,
    ),
}
"""Writer, reader and memory limit in MiB of each file."""


def memory_of(name, path):
    """Return the peak memory of reading a file, in MiB."""
    _, read, _ = FILES[name]
    Path("/proc/self/clear_refs").write_text("5")
    held = status("VmRSS")
    with suppress(UnreadableFileError, ConfigError):
        read(Path(path))
    return (status("VmHWM") - held) / MIB


@pytest.mark.parametrize("name", FILES)
def test_reading_a_file_stays_within_the_limit_of_security_md(tmp_path, name):
    write, _, bound = FILES[name]
    write(tmp_path / "file")
    (used,) = together(memory_of, 1, name, str(tmp_path / "file"))
    assert used < bound, f"{used:.0f} MiB"


if __name__ == "__main__":
    import sys
    import tempfile
    import time

    with tempfile.TemporaryDirectory() as scratch:
        for each, (write, _, bound) in FILES.items():
            write(Path(scratch) / "file")
            since = time.process_time()
            used = memory_of(each, Path(scratch) / "file")
            sys.stdout.write(f"{each:35} {used:7.1f} of {bound} MiB {time.process_time() - since:6.2f} s\n")
