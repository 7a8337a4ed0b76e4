"""Command line: fast help without torch, suggestions for typos, worker specs and the list of runs."""

import json
import os
import resource
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.tiny_recipes import ITERATION, tiny
from lockstep import __version__
from lockstep.cli import COMMANDS, main
from lockstep.cli import train as train_verb
from lockstep.cli.options import parse_recipe, parse_train, resolve
from lockstep.cli.worker_spec import write_spec
from lockstep.launch.launcher import LaunchResult
from lockstep.recipes.snake_ppo import SnakePPO
from lockstep.registry import RECIPES
from lockstep.training_loop import train

WIDE = {"COLUMNS": "200"}
LIMIT = 3.0
"""Maximum time of a help page relative to importing tyro and rich."""
HELP = """
import sys
from lockstep.cli import main
code = 1
try:
    code = main({words})
except SystemExit as exit:
    code = exit.code
sys.stderr.write("torch" if "torch" in sys.modules else "no torch")
sys.exit(code)
"""
PROGRAMS = {"baseline": "import tyro, rich", "lockstep": HELP.format(words=["--help"])} | {
    verb: HELP.format(words=[verb, "--help"]) for verb in COMMANDS
}
each_help = pytest.mark.parametrize("name", list(PROGRAMS)[1:])


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | WIDE)


def seconds_of_children():
    """Return CPU time of child processes; wall time would include other jobs on the machine."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


@pytest.fixture(autouse=True)
def _wide_pages(monkeypatch):
    for name, value in WIDE.items():
        monkeypatch.setenv(name, value)


@pytest.fixture(scope="module")
def helped():
    """Results of each help page, and CPU time relative to the baseline.

    The CPU time of a process depends on what else the machine does. So a page that seems slow is measured again, five
    times in turns with the baseline, and the median of these ratios counts.
    """
    ended, ratios = {}, {}

    def seconds_of(name):
        began = seconds_of_children()
        ended[name] = run(PROGRAMS[name])
        return seconds_of_children() - began

    baseline = statistics.median(seconds_of("baseline") for _ in range(3))
    for name in list(PROGRAMS)[1:]:
        ratios[name] = seconds_of(name) / baseline
        if ratios[name] > LIMIT:
            ratios[name] = statistics.median(seconds_of(name) / seconds_of("baseline") for _ in range(5))
    return ended, ratios


@each_help
def test_help_does_not_import_torch(helped, name):
    ended = helped[0][name]
    assert ended.returncode == 0
    assert ended.stderr == "no torch"


def test_help_torch_check_detects_imported_torch():
    code = HELP.format(words=["--help"]).replace("import sys", "import sys; sys.modules['torch'] = sys", 1)
    assert run(code).stderr == "torch"


@each_help
def test_help_cpu_time_is_within_limit(helped, name):
    assert helped[1][name] <= LIMIT, f"{helped[1][name]:.2f} times the baseline"


def test_help_lists_every_command_with_description(helped):
    for verb, words in COMMANDS.items():
        assert f"lockstep {verb}" in helped[0]["lockstep"].stdout
        assert words in helped[0]["lockstep"].stdout


@pytest.mark.parametrize("verb", COMMANDS)
def test_command_help_shows_usage(helped, verb):
    page = helped[0][verb].stdout
    assert f"lockstep {verb}" in page
    assert "(required)" in page or verb in ("ls", "doctor", "warmup")


def test_train_help_lists_recipes(helped):
    assert "snake-ppo" in helped[0]["train"].stdout
    assert "gym-ppo" in helped[0]["train"].stdout


# ------------------------------------------------------------------------------------------------------------ arguments


@pytest.mark.parametrize(("word", "near"), [("trian", "train"), ("resum", "resume"), ("watch", "See lockstep --help.")])
def test_unknown_command_error_suggests_closest_name(capsys, word, near):
    assert main([word]) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith(f"lockstep: '{word}' is not a command.\n")
    assert near in told.err


def test_no_arguments_print_help(capsys):
    assert main([]) == 0
    assert "First run: lockstep train snake-ppo --smoke" in capsys.readouterr().out


@pytest.mark.parametrize("words", [["--help"], ["train", "--help"], ["--version"], ["ls", "."]])
def test_closed_pipe_ends_command_without_traceback(words):
    read, write = os.pipe()
    os.close(read)  # as `lockstep train --help | head` does once it has read enough
    command = [sys.executable, "-m", "lockstep", *words]
    ended = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (ended.returncode, ended.stderr) == (1, "")


def test_version_flag_prints_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"lockstep {__version__}\n"


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["train", "snake-pp"], "Did you mean 'snake-ppo'?"),
        (["train", "snake-ppo", "task.sise=3"], "Did you mean 'size'?"),
        (["train", "snake-ppo", "--task.num-envs", "100"], "num_envs is 100"),
        (["resume", "/nowhere/at/all"], "is not a run directory"),
        (["resume", "/nowhere/at/all", "--algo.gamma", "1"], "is not a run directory"),
        (["eval", "/nowhere/at/all"], "is not a run directory"),
        (["play", "/nowhere/at/all"], "is not a run directory"),
    ],
)
def test_invalid_arguments_exit_with_message_without_traceback(capsys, line, words):
    assert main(line) == 2
    told = capsys.readouterr().err
    assert told.startswith("lockstep: ")
    assert words in told
    assert "Traceback" not in told


# --------------------------------------------------------------------------------------------------------- worker specs


@pytest.fixture
def launched(monkeypatch):
    """Record worker specs instead of starting processes."""
    calls = []

    def launch(words, fleet):
        calls.append((json.loads(Path(words[2]).read_text()), fleet.processes))
        return LaunchResult(0)

    monkeypatch.setattr("lockstep.launch.launcher.launch", launch)
    return calls


def test_worker_spec_has_run_name_lanes_and_settings(launched, tmp_path):
    line = [
        "train",
        "snake-ppo",
        "--smoke",
        "--num-gpus",
        "3",
        "--run.seed",
        "5",
        f"run.runs_dir={tmp_path}",
        "-n",
        "3",
    ]
    assert main(line) == 0
    ((spec, count),) = launched
    assert count == 3
    assert (spec["recipe"], spec["options"]) == ("snake-ppo", {"init_from": None, "stop_at": None})
    run = spec["settings"]["run"]
    assert (run["seed"], run["lanes"], run["total_samples"]) == (5, 8, SnakePPO.smoke_overrides["run"]["total_samples"])
    assert run["name"].startswith("snake-ppo-2")


def test_flag_message_is_printed_once_by_launcher(launched, capsys, tmp_path):
    line = ["train", "--load-model", "snake-ppo", "--smoke", "--procs", "2", f"run.runs_dir={tmp_path}"]
    assert main(line) == 0
    assert capsys.readouterr().err.count("--load-model is not needed") == 1


def test_workers_of_a_job_choose_lanes_by_their_number(launched, monkeypatch, tmp_path):
    trained = []
    monkeypatch.setattr("lockstep.training_loop.train", lambda recipe, **_: trained.append(recipe.run.lanes))
    monkeypatch.setattr("lockstep.cli.workers.run_training_worker", lambda work, stop_at: work() or 0)
    line = ["train", "snake-ppo", "--smoke", "--procs", "2", f"run.runs_dir={tmp_path}", "--rdzv-id", "job"]
    assert main(line) == 0
    ((spec, count),) = launched
    assert (count, spec["settings"]["run"]["lanes"], spec["settings"]["run"]["name"]) == (2, None, "")
    (tmp_path / "spec.json").write_text(json.dumps(spec))
    monkeypatch.setattr("lockstep.launch.process_lifetime.die_with_launcher", lambda: None)  # there is no launcher
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "16")
    assert main(["train", "--worker", str(tmp_path / "spec.json")]) == 0
    assert trained == [16]


def test_resume_from_forwards_allowed_settings(monkeypatch):
    seen = []
    monkeypatch.setattr("lockstep.cli.resume.run", lambda words: seen.append(words) or 0)
    line = ["snake-ppo", "--resume-from", "runs/a", "--total-timesteps", "900", "--procs", "2", "--device", "cpu"]
    assert train_verb.run(line) == 0
    assert seen == [["runs/a", "--procs", "2", "--run.total-samples", "900", "--run.device", "cpu"]]


def test_train_into_existing_run_is_rejected_before_launch(launched, capsys, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.yaml").write_text("")
    assert main(["train", "snake-ppo", "--smoke", "-n", "2", f"run.runs_dir={tmp_path}", "run.name=mine"]) == 2
    assert f"Resume it: lockstep resume {tmp_path / 'mine'}" in capsys.readouterr().err
    assert launched == []


@pytest.mark.parametrize("procs", ["1", "2"])
def test_requeued_job_on_one_host_resumes_its_run(launched, tmp_path, procs):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.yaml").write_text("")  # the processes read the owner of the run from its status
    line = [
        "train",
        "snake-ppo",
        "--smoke",
        "-n",
        procs,
        "--rdzv-id",
        "job7",
        f"run.runs_dir={tmp_path}",
        "run.name=mine",
    ]
    assert main(line) == 0
    assert [count for _, count in launched] == [int(procs)]


def test_resume_accepts_budget_and_device_as_flags_or_keys(launched, tmp_path):
    train(tiny(tmp_path, total_samples=ITERATION))
    path = str(tmp_path / "run")
    assert (
        main(["resume", path, "-n", "2", "--total-timesteps", "512", "--run.device", "cpu", "run.log_every=256"]) == 0
    )
    ((spec, count),) = launched
    assert count == 2
    assert spec["options"] == {"resume": True, "at": None, "without_replay": False, "stop_at": None}
    run = spec["settings"]["run"]
    assert (run["total_samples"], run["device"], run["log_every"], run["name"]) == (512, "cpu", 256, "run")


@pytest.mark.parametrize("name", RECIPES)
def test_worker_trains_recipe_resolved_by_launcher(name, launched, monkeypatch, tmp_path):
    if name == "dmc-tdmpc2":
        pytest.importorskip("dm_control")  # not installed on Python 3.13
    trained = []
    monkeypatch.setattr("lockstep.training_loop.train", lambda recipe, **options: trained.append((recipe, options)))
    monkeypatch.setattr("lockstep.cli.workers.run_training_worker", lambda work, stop_at: work() or 0)
    start, rest, _ = parse_train([name, "--smoke", "run.seed=3", f"run.runs_dir={tmp_path}"])
    recipe = resolve(parse_recipe(start, rest, ""), 1)
    assert main(write_spec(tmp_path / "spec.json", recipe, init_from="other@5")) == 0
    assert trained == [(recipe, {"init_from": "other@5"})]


# ------------------------------------------------------------------------------------------------------------------- ls


def test_ls_of_empty_directory_shows_train_command(capsys, tmp_path):
    for place in (tmp_path, tmp_path / "nowhere"):
        assert main(["ls", str(place)]) == 0
        assert "Start one: lockstep train snake-ppo --smoke" in capsys.readouterr().out


def test_ls_shows_status_samples_and_scores(capsys, tmp_path):
    train(tiny(tmp_path, "done", total_samples=2 * ITERATION, eval_every=ITERATION, eval_episodes=8))
    train(tiny(tmp_path, "longer", total_samples=ITERATION))
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "config.yaml").write_text("a: [")
    (tmp_path / "no-run").mkdir()
    capsys.readouterr()
    assert main(["ls", str(tmp_path)]) == 0
    page = capsys.readouterr().out
    lines = [line.split() for line in page.splitlines()[3:]]
    assert [line[0] for line in lines[::2]] == ["broken", "done", "longer"]
    assert "config.yaml cannot be read" in page
    done, below = lines[2], lines[3]
    assert done[1:3] == ["finished", "256/256"]
    assert -2 < float(done[3]) < 2
    assert below[:2] == ["snake-ppo,", "-"]
    assert float(below[2].replace(",", "")) > 0
    assert -2 < float(below[3]) < 2
    assert lines[5][3] == "-"


def test_ls_does_not_import_torch(tmp_path):
    code = HELP.format(words=["ls", str(tmp_path)])
    ended = run(code)
    assert (ended.returncode, ended.stderr) == (0, "no torch")
