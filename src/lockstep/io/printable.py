"""Escape control characters in text for the terminal, so that names cannot control the terminal.

Names of runs, settings and errors may quote text from untrusted files. Every message passes through here or through
`lockstep.io.rich_console.PrintableConsole`. tests/architecture/test_import_rules.py checks that no module writes to the
terminal in another way.
"""

import logging
import re
import sys
import threading
import traceback
import unicodedata
import warnings
from types import TracebackType
from typing import Any, TextIO

_PLAIN = re.compile(r"[\n\t\x20-\x7e]*")


def printable(text: str, newlines: bool = True) -> str:
    r"""Show characters that a terminal would act on, or that cannot be encoded, as `\u001b`.

    These are control characters, bidirectional overrides and other format characters, and surrogates. Newlines and
    tabs stay unless `newlines` is false. The escapes are valid in JSON strings, so JSON stays JSON.
    """
    if text.isprintable() or (newlines and _PLAIN.fullmatch(text)):
        return text
    return "".join(char if char.isprintable() or (newlines and char in "\n\t") else _escaped(char) for char in text)


def _escaped(char: str) -> str:
    if unicodedata.category(char) == "Zs":  # spaces such as U+3000, used in Chinese text
        return char
    code = ord(char)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def write_text(stream: TextIO, text: str) -> None:
    """Write text to standard output or standard error, made printable."""
    text = printable(text)
    try:
        stream.write(text)
    except UnicodeEncodeError:  # a terminal that is not UTF-8
        stream.write(text.encode("ascii", "backslashreplace").decode())
    stream.flush()


def print_line(line: str) -> None:
    """Write a line to standard output, made printable."""
    write_text(sys.stdout, f"{line}\n")


def make_errors_printable() -> None:
    """Escape what Python itself prints: uncaught errors, warnings, and log records without a handler."""
    sys.excepthook = _print_error
    threading.excepthook = _print_thread_error
    warnings.formatwarning = _format_warning
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(_Formatter())


def _print_error(error_type: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    write_text(sys.stderr, "".join(traceback.format_exception(error_type, error, trace)))


def _print_thread_error(args: threading.ExceptHookArgs) -> None:
    if args.exc_type is not SystemExit and args.exc_value is not None:
        _print_error(args.exc_type, args.exc_value, args.exc_traceback)


_plain_warning = warnings.formatwarning


def _format_warning(*args: Any, **kwargs: Any) -> str:
    return printable(_plain_warning(*args, **kwargs))


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return printable(super().format(record))
