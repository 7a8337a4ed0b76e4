"""Console output: plain lines, live screen and formatting of numbers."""

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.clock import TrainState
from lockstep.config import RunConfig
from lockstep.distributed import Runtime
from lockstep.distributed.heartbeat import UtilizationReport
from lockstep.io.rich_console import PrintableConsole
from lockstep.loggers.console import RETURN, LiveConsole, PlainConsole, Snapshot, open_console
from lockstep.loggers.formatting import (
    format_duration,
    format_evaluation,
    format_resources,
    format_speed,
    format_utilization,
    sparkline,
)
from lockstep.registry import find_recipe

SPLIT = {"env": 0.2, "act": 0.3, "learn": 0.25, "reduce": 0.15, "other": 0.1}
SCORES = {"return_mean": 1.25, "return_std": 0.5, "length_mean": 7.0, "apples_mean": 3.0, "episodes": 8.0}


USE = {"process0_cpu_percent": 99.0, "process0_memory_gb": 0.75, "process1_cpu_percent": 90.0}
USE |= {"process1_memory_gb": 0.75, "gpu0_memory_allocated_gb": 10.2, "gpu0_util_percent": 93.0}
WORK = UtilizationReport(utilization={0: 0.9, 1: 0.8}, resources=USE | {"gpu1_memory_allocated_gb": 9.8})


@pytest.fixture(autouse=True)
def no_status_thread(monkeypatch):
    monkeypatch.setattr("lockstep.io.status_line.StatusLine.start", lambda *_: None)


def snapshot(value=2.5, speed=1000.0, checked=0, work=WORK, eta=60.0):
    return Snapshot({} if value is None else {RETURN: value}, speed, eta, SPLIT, checked, work)


def captured(screen):
    """Return the screen and the buffer that it writes to."""
    page = io.StringIO()
    screen.console = PrintableConsole(file=page, width=200, soft_wrap=True, highlight=False, color_system=None)
    if isinstance(screen, LiveConsole):
        screen.console = screen.live.console = PrintableConsole(
            file=page, width=100, force_terminal=True, color_system=None
        )
    return screen, page


# ----------------------------------------------------------------------------------------------------------- sparklines


@pytest.mark.parametrize(
    ("values", "bars"),
    [
        ([0, 1, 2, 3, 4, 5, 6, 7], "▁▂▃▄▅▆▇█"),
        ([7, 0, 7], "█▁█"),
        ([-1, 1], "▁█"),
        ([3.0], "▁"),
        ([5, 5, 5], "▁▁▁"),
        ([1.0, float("nan"), 2.0], "▁ █"),
        ([1.0, float("inf"), 2.0, float("-inf")], "▁ █ "),
        ([float("nan")], " "),
        ([-1.7e308, 0.0, 1.7e308], "▁▅█"),
        ([], ""),
    ],
)
def test_sparkline_height_follows_value(values, bars):
    found = sparkline(values)
    assert found in (bars, bars.replace("▅", "▄"))  # one half may round up or down


@given(st.lists(st.floats(), max_size=20))
def test_sparkline_has_one_bar_per_value(values):
    bars = sparkline(values)
    assert len(bars) == len(values)
    assert set(bars) <= set(" ▁▂▃▄▅▆▇█")


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=2, max_size=20))
def test_sparkline_is_monotonic(values):
    bars = sparkline(values)
    for one, other in zip(zip(values, bars, strict=True), list(zip(values, bars, strict=True))[1:], strict=False):
        low, high = sorted([one, other])
        assert low[1] <= high[1]


# ------------------------------------------------------------------------------------------------------------ durations


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-5, "0 s"),
        (0, "0 s"),
        (59.6, "60 s"),
        (89, "89 s"),
        (90, "2 min"),
        (600, "10 min"),
        (5399, "90 min"),
        (5400, "1.5 h"),
        (36_000, "10.0 h"),
    ],
)
def test_format_duration_uses_readable_units(seconds, words):
    assert format_duration(seconds) == words


# ---------------------------------------------------------------------------------------------------------------- lines


def test_plain_console_shows_progress_speed_and_return():
    screen, page = captured(PlainConsole("snake-ppo · 2 processes", 2))
    clock = TrainState(total_samples=100_000, samples=40_000)
    screen.start(clock)
    screen.show(clock, snapshot(checked=64))
    heading, line = page.getvalue().splitlines()
    assert heading == "snake-ppo · 2 processes"
    for part in (
        "40,000 of 100,000 steps",
        "1,000/s",
        "return     2.50",
        "eta 60 s",
        "env 20% act 30% learn 25% reduce 15% other 10%",
        "one agent: in sync at update 64",
    ):
        assert part in line


def test_plain_console_shows_sync_only_if_checked():
    for processes, checked in ((2, 0), (1, 64)):
        screen, page = captured(PlainConsole("heading", processes))
        screen.show(TrainState(total_samples=10), snapshot(checked=checked))
        assert "in sync" not in page.getvalue()


def test_plain_console_without_return_shows_dash():
    screen, page = captured(PlainConsole("heading", 1))
    screen.show(TrainState(total_samples=10), snapshot(value=None))
    assert "return   -  " in page.getvalue()


def test_plain_console_beyond_budget_shows_zero_eta():
    screen, page = captured(PlainConsole("heading", 1))
    screen.show(TrainState(total_samples=1000, samples=1024), snapshot(speed=1.0, eta=-24.0))
    assert "eta 0 s" in page.getvalue()


def test_plain_console_with_zero_speed_does_not_fail():
    screen, page = captured(PlainConsole("heading", 1))
    screen.show(TrainState(total_samples=1000), snapshot(speed=0.0))
    assert " 0/s" in page.getvalue()


def test_plain_console_does_not_interpret_markup():
    screen, page = captured(PlainConsole("runs/[red]a[/red]", 1))
    screen.start(TrainState(total_samples=1))
    screen.message("Checkpoint [bold]x is damaged.")
    assert page.getvalue() == "runs/[red]a[/red]\nCheckpoint [bold]x is damaged.\n"


def test_plain_console_does_not_wrap_long_lines(capsys):
    PlainConsole("x" * 500, 1).start(TrainState(total_samples=1))
    assert capsys.readouterr().out == "x" * 500 + "\n"


def test_evaluation_line_has_task_counts_and_best_score():
    clock = TrainState(total_samples=10, samples=5, evaluation=SCORES, best=1.25)
    assert format_evaluation(clock) == "evaluation: return 1.25 ± 0.50, apples 3.00, 8 episodes, the best so far"
    clock.record_evaluation(SCORES)  # a tie is not a new best
    assert format_evaluation(clock).endswith("8 episodes, best 1.25")
    screen, page = captured(PlainConsole("heading", 1))
    screen.evaluation(clock)
    assert page.getvalue().strip() == f"5 {format_evaluation(clock)}"


def test_evaluation_line_without_best_score():
    clock = TrainState(total_samples=10)
    clock.record_evaluation(SCORES | {"return_mean": float("nan")})
    assert format_evaluation(clock).endswith("8 episodes, no best yet")


# -------------------------------------------------------------------------------------------------------------- screens


def test_plain_console_shows_task_counts_and_win_rate():
    screen, page = captured(PlainConsole("heading", 2))
    counts = {"trades": 4.0, "wins": 1.0, "open": 0.5}
    metrics = {RETURN: 1.0, "rollout/ep_length_mean": 9.0, "train/kl": 0.1}
    metrics |= {f"rollout/ep_{name}_mean": value for name, value in counts.items()}
    screen.show(TrainState(total_samples=10, samples=5), Snapshot(metrics, 1.0, 5.0, SPLIT, 0))
    assert "trades 4.00, open 0.50, win rate 25%" in page.getvalue()
    assert "kl" not in page.getvalue()
    assert "length" not in page.getvalue()


@pytest.mark.parametrize(("terminal", "kind"), [(True, LiveConsole), (False, PlainConsole)])
def test_open_console_is_live_on_terminal_and_plain_otherwise(monkeypatch, tmp_path, terminal, kind):
    monkeypatch.setattr("sys.stdout.isatty", lambda: terminal)
    screen = open_console(str(tmp_path / "a"), find_recipe("snake-ppo")(), Runtime.single_process(RunConfig()))
    assert type(screen) is kind
    assert screen.heading.startswith("snake-ppo · 1 process · cpu · fast")
    assert str(tmp_path / "a") == (screen.path if terminal else screen.heading.rpartition(" · ")[2])


def test_consoles_show_losses_of_several_networks():
    metrics = {"rollout/ep_score_mean": 3.0, "rollout/ep_level_mean": 2.0, "train/critic/loss": 0.51234}
    metrics |= {"train/actor/loss": -1.5, "train/loss": 9.0, "train/critic/value": 8.0}
    entry = Snapshot(metrics, 1000.0, 60.0, SPLIT, 0)
    lines, page = captured(PlainConsole("team", 1))
    lines.show(TrainState(total_samples=100, samples=10), entry)
    assert "score 3.00, level 2.00, critic loss 0.5123, actor loss -1.5\n" in page.getvalue()
    live, page = captured(LiveConsole("team", "runs/team", 1))
    live.start(TrainState(total_samples=100, samples=10))
    live.show(TrainState(total_samples=100, samples=10), entry)
    live.stop()
    assert "critic loss 0.5123, actor loss -1.5" in page.getvalue()


def test_live_console_shows_same_values_as_plain_console():
    screen, page = captured(LiveConsole("heading", "runs/a", 2))
    clock = TrainState(total_samples=100_000, samples=40_000, evaluation=SCORES, best=1.25)
    screen.start(clock)
    assert "first iteration, running for" in page.getvalue()
    for value in (1.0, float("nan"), 2.5):
        screen.show(clock, snapshot(value, checked=64))
    screen.stop()
    for part in (
        "40,000 of 100,000 (global) · 40%",
        "1,000 steps/s · 1.7x one process",
        "60 s to go",
        "0: 90% · 1: 80%",
        "1.9 cores · 1.5 GB",
        "0: 93% 10.2 GB · 1: 9.8 GB",
        "2.50  ▁ █",
        "return 1.25 ± 0.50, apples 3.00",
        "env 20%",
        "in sync at update 64",
    ):
        assert part in page.getvalue()


def test_plain_console_on_full_disk_does_not_raise():
    full = open("/dev/full", "w")  # noqa: SIM115 - closing it would try to write once more
    lines = PlainConsole("heading", 1)
    lines.console = PrintableConsole(file=full)
    with pytest.raises(OSError, match="No space left"):
        lines.console.print("seen to fail")
    lines.start(TrainState(total_samples=1))
    lines.message("a sentence")


# ----------------------------------------------------------------------------------------------------------- formatting


def test_format_speed_shows_speedup_over_one_process():
    assert format_speed(1234.4, {}) == "1,234 steps/s"
    assert format_speed(1234.4, {0: 1.0}) == "1,234 steps/s"  # no speedup for one process
    assert format_speed(1234.4, {0: 0.95, 1: 0.85}) == "1,234 steps/s · 1.8x one process"


def test_format_utilization_summarizes_many_processes():
    assert format_utilization({}) == ""
    assert format_utilization({0: 1.0, 1: 0.5}) == "0: 100% · 1: 50%"
    many = format_utilization({process: 0.5 if process == 7 else 1.0 for process in range(100)})
    assert many.startswith("███████▅") or many.startswith("███████▄")
    assert many.endswith("median 100%, least 50% (process 7)")
    assert len(many) < 110


def test_format_resources_skips_unknown_values():
    assert format_resources({}) == {}
    assert format_resources({"gpu3_memory_allocated_gb": 1.0}) == {"gpu": "3: 1.0 GB"}


def test_live_console_in_narrow_terminal_truncates_nothing():
    screen = LiveConsole("heading", "runs/" + "long-name-" * 12, 2)
    page = io.StringIO()
    console = screen.console = screen.live.console = PrintableConsole(file=page, width=80, force_terminal=True)
    clock = TrainState(
        total_samples=100_000, samples=40_000, evaluation=SCORES | {"level_mean": 3.0, "score_mean": 2.0}, best=1.25
    )
    screen.start(clock)
    for value in range(100):
        screen.show(clock, snapshot(float(value), checked=64))
    console.print(screen._panel())
    screen.stop()
    shown = page.getvalue()
    assert "…" not in shown
    assert (
        max(len(line) for line in PrintableConsole(file=io.StringIO(), width=80).render_str(shown).plain.splitlines())
        < 400
    )
    assert "".join("long-name-" * 12)[-20:] in shown.replace("\n", "").replace("│", "").replace(" ", "")
