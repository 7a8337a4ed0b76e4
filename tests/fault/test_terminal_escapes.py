"""Untrusted names and settings on the terminal: no command prints control sequences."""

import io
import json
import shutil
import sys

import pytest
import yaml

from helpers.multiprocess import command
from helpers.tiny_recipes import ITERATION, tiny
from lockstep.cli import main
from lockstep.io.jsonl import CONFIG
from lockstep.training_loop import train

NASTY = "a\x1b]0;owned\x07\x1b[2J\u202eb\x9b1m"


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    directory = tmp_path_factory.mktemp("trained")
    train(tiny(directory, total_samples=ITERATION))
    return directory / "run"


@pytest.fixture
def named(trained, tmp_path):
    """An undamaged run in a directory with a hostile name."""
    shutil.copytree(trained, tmp_path / "runs" / NASTY)
    return tmp_path / "runs" / NASTY


def hostile_config(trained, tmp_path, change):
    """Create an undamaged run with an ordinary name and hostile settings."""
    run = tmp_path / "runs" / "run"
    shutil.copytree(trained, run)
    values = yaml.safe_load((run / CONFIG).read_text())
    change(values)
    (run / CONFIG).write_text(yaml.safe_dump(values))
    return run


def shown(capsys, *words):
    """Run a command, check that its output is printable, and return the output."""
    try:
        code = main([str(word) for word in words])
    except SystemExit as exit:  # raised by tyro
        code = exit.code
    captured = capsys.readouterr()
    text = captured.out + captured.err
    assert code in (0, 2), text
    assert [letter for letter in text if not letter.isprintable() and letter not in "\n\t"] == [], repr(text)
    return text


VERBS = {
    "ls": lambda run: ["ls", run.parent],
    "ls without runs": lambda run: ["ls", run],
    "report": lambda run: ["report", run, "--out", run.parent / f"{NASTY}.html"],
    "eval": lambda run: ["eval", run, "--episodes", 1],
    "eval of a directory": lambda run: ["eval", run.parent],
    "standings": lambda run: ["eval", run, "--opponents", "random"],
    "no opponent": lambda run: ["eval", run, "--opponents", NASTY],
    "play": lambda run: ["play", run, "--gif", run.parent / f"{NASTY}.gif"],
    "export": lambda run: ["export", run, "--to", "safetensors", "--out", run.parent / f"{NASTY}.safetensors"],
    "resume": lambda run: ["resume", run],
    "resume another setting": lambda run: ["resume", run, f"run.{NASTY}=1"],
    "init": lambda run: ["train", "gym-ppo", "--smoke", "--init-from", run, f"run.runs_dir={run.parent}"],
    "train under that name": lambda run: ["train", "gym-ppo", "--smoke", f"run.name={run.name}"],
    "train with a flag": lambda run: ["train", "gym-ppo", "--smoke", "--run.name", run.name],
    "train no recipe": lambda run: ["train", NASTY],
    "train no file": lambda run: ["train", f"{NASTY}.py"],
    "train a setting": lambda run: ["train", "gym-ppo", f"task.{NASTY}=1"],
    "train a value": lambda run: ["train", "gym-ppo", f"task.num_envs={NASTY}"],
    "train a preset": lambda run: ["train", "gym-ppo", "--preset", NASTY],
    "config": lambda run: ["train", "gym-ppo", "--config", run / CONFIG],
    "plan": lambda run: ["plan", NASTY],
    "plan measured": lambda run: ["plan", "gym-ppo", "--measured", run / CONFIG],
    "bench": lambda run: ["bench", NASTY],
    "prove": lambda run: ["prove", NASTY],
    "import": lambda run: ["import", run / CONFIG],
    "import no file": lambda run: ["import", run / NASTY],
    "backtest": lambda run: ["backtest", NASTY],
    "benchmark": lambda run: ["benchmark", NASTY],
    "benchmark a task": lambda run: ["benchmark", "classic", "--tasks", NASTY],
    "sweep": lambda run: ["sweep", NASTY],
    "space": lambda run: ["sweep", "gym-ppo", "--space", run / CONFIG],
    "audit": lambda run: ["audit", run / NASTY],
    "a verb": lambda run: [NASTY],
}


@pytest.mark.parametrize("words", VERBS.values(), ids=VERBS.keys())
def test_command_output_escapes_a_hostile_run_name(capsys, named, words):
    shown(capsys, *words(named))


CHANGES = {
    "recipe": lambda values: values.update(recipe=NASTY),
    "recipe file": lambda values: values.update(recipe=f"/tmp/{NASTY}.py"),
    "task": lambda values: values["task"].update(id=NASTY),
    "option": lambda values: values["task"].update(options={NASTY: NASTY}),
    "setting": lambda values: values["run"].update({NASTY: 1}),
    "value": lambda values: values["run"].update(total_samples=NASTY),
    "choice": lambda values: values["run"].update(reduction=NASTY),
    "group": lambda values: values.update(algo=NASTY),
    "device": lambda values: values["run"].update(device=NASTY),
    "version": lambda values: values.update(lockstep=NASTY),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES.keys())
def test_command_output_escapes_hostile_settings(capsys, trained, tmp_path, change):
    run = hostile_config(trained, tmp_path, change)
    (run / "status.json").write_text(json.dumps({"state": NASTY, "why": NASTY}))
    shown(capsys, "ls", run.parent)
    shown(capsys, "report", run, "--out", tmp_path / "report.html")
    shown(capsys, "eval", run, "--episodes", 1)
    shown(capsys, "export", run, "--to", "safetensors", "--out", tmp_path / "a.safetensors")
    shown(capsys, "resume", run)
    shown(capsys, "train", "gym-ppo", "--config", run / CONFIG, "--smoke", "run.total_samples=nonsense")


def test_flag_error_escapes_hostile_defaults_of_a_config(capsys, tmp_path):
    """A config's values become the defaults of flags, which tyro prints next to an invalid flag."""
    (tmp_path / "a.yaml").write_text(yaml.safe_dump({"task": {"options": {"a": NASTY}}}))
    for flag in ("--task.optionz", "--task.options", "--help"):
        shown(capsys, "train", "gym-ppo", "--config", tmp_path / "a.yaml", flag, "1")


def test_error_on_ascii_terminal_is_escaped(monkeypatch, tmp_path):
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(raw, encoding="ascii"))
    assert main(["eval", str(tmp_path / "é\udcff")]) == 2
    assert b"\\xe9\\udcff" in raw.getvalue()


def test_uncaught_errors_and_warnings_are_escaped(tmp_path):
    (tmp_path / "recipe.py").write_text(
        f"import warnings\nwarnings.warn({NASTY!r})\nraise KeyboardInterrupt({NASTY!r})"
    )
    ended = command([sys.executable, "-m", "lockstep", "train", tmp_path / "recipe.py"])
    assert "\x1b" not in ended.output
    (tmp_path / "recipe.py").write_text(f"import warnings\nwarnings.warn({NASTY!r})\nraise SyntaxError({NASTY!r})")
    ended = command([sys.executable, "-m", "lockstep", "train", tmp_path / "recipe.py"])
    assert "\\u001b[2J" in ended.output
    assert "\x1b" not in ended.output
