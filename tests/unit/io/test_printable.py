"""Untrusted text is printed without terminal control sequences."""

import io
import json
import logging
import sys
import threading
import warnings

import pytest
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from lockstep.io import printable as module
from lockstep.io.printable import make_errors_printable, printable, write_text
from lockstep.io.rich_console import PrintableConsole

HOSTILE = {
    "escape": "a\x1b[2Jb",
    "title": "a\x1b]0;owned\x07b",
    "C1": "a\x9b2Jb",
    "backspace": "a\x08b",
    "return": "a\rb",
    "delete": "a\x7fb",
    "override": "a\u202eb",
    "isolate": "a\u2066b",
    "zero width": "a\u200bb",
    "line separator": "a\u2028b",
    "surrogate": "a\udcffb",
    "tag": "a\U000e0041b",
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_printable_escapes_control_characters(text):
    shown = printable(text)
    assert shown.isprintable()
    assert shown.startswith("a\\")
    assert shown.endswith("b")
    shown.encode()


def test_printable_keeps_ordinary_text():
    for text in ("", "snake-ppo\n\tgoes on", "空\u3000白", "café 🙂", "1\u00a0000"):
        assert printable(text) == text
    assert printable("a\nb", newlines=False) == "a\\u000ab"


def test_printable_json_remains_valid_json():
    text = json.dumps({"name": "a\x7f\x1b\u202e"}, ensure_ascii=False)
    assert json.loads(printable(text)) == {"name": "a\x7f\x1b\u202e"}


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_console_print_emits_no_control_characters(text, terminal):
    stream = io.StringIO()
    console = PrintableConsole(file=stream, force_terminal=terminal, color_system=None, width=60)
    console.print(text)
    console.print(Text(text), Panel(text, title=text))
    table = Table(title=text)
    table.add_column(text)
    table.add_row(text)
    console.print(table)
    assert set(stream.getvalue()) - {"\n"} == {letter for letter in stream.getvalue() if letter.isprintable()}
    widths = {len(line) for line in stream.getvalue().splitlines() if line.startswith(("│", "┃"))}
    assert len(widths) <= 2, stream.getvalue()  # aligned edges of the panel and the table


def test_console_does_not_interpret_markup():
    stream = io.StringIO()
    console = PrintableConsole(file=stream, width=60)
    console.print("[/b] [red]x [link=http://e]")
    with console.status("reading [/b]") as status:
        status.update("reading [/c]")
    assert stream.getvalue() == "[/b] [red]x [link=http://e]\n"


def test_console_live_panel_keeps_its_own_controls():
    stream = io.StringIO()
    console = PrintableConsole(file=stream, force_terminal=True, width=60)
    with Live(Text("a\x1b[2Jb"), console=console, auto_refresh=False) as live:
        live.update(Text("c\x1b[2Jd"), refresh=True)
    assert "\x1b[2J" not in stream.getvalue()
    assert "\x1b[" in stream.getvalue()


def test_write_text_to_ascii_stream_escapes():
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    write_text(stream, "é\udcff\n")
    assert raw.getvalue() == b"\\xe9\\udcff\n"


def test_make_errors_printable_escapes_errors_warnings_and_logs(monkeypatch, capsys):
    for place, name in ((sys, "excepthook"), (threading, "excepthook"), (warnings, "formatwarning")):
        monkeypatch.setattr(place, name, getattr(place, name))
    monkeypatch.setattr(logging, "lastResort", logging._StderrHandler(logging.WARNING))
    make_errors_printable()
    error = ValueError("a\x1b[2Jb")
    sys.excepthook(ValueError, error, None)
    thread = threading.Thread(target=module.printable, args=(None,))
    thread.start()
    thread.join()
    sys.stderr.write(warnings.formatwarning("w\x1b[2J", UserWarning, "file", 1))
    logger = logging.Logger("alone")
    logger.parent = None
    logger.warning("l\x1b[2J")
    shown = capsys.readouterr().err
    assert "\x1b" not in shown
    assert shown.count("\\u001b[2J") == 3
    assert "AttributeError" in shown  # raised in the thread
