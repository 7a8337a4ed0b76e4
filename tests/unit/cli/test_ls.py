"""`lockstep ls` and its log reader: correct newest values while reading only the end of a log."""

import json
import os
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.experiments import write_experiment
from helpers.logs import last_values
from helpers.multiprocess import command
from helpers.run_fixtures import CONFIG, lines, write_run
from lockstep.cli import ls, main
from lockstep.io import jsonl, safe_read
from lockstep.io.jsonl import newest_values
from lockstep.registry import find_recipe
from lockstep.run_dir import to_yaml

NAMES = ("samples", "eval/return_mean", "time/global_fps")


def write(path, told):
    path.write_text("".join(each if isinstance(each, str) else json.dumps(each) + "\n" for each in told))
    return path


values = st.one_of(st.integers(0, 9), st.floats(0, 1), st.text('ab\n"é', max_size=3), st.none())
told = st.lists(
    st.one_of(
        st.dictionaries(st.sampled_from([*NAMES, "x", "y"]), values, max_size=4),
        st.sampled_from(["\n", "{\n", "[1]\n", '"samples"\n', '{"samples": "no"}\n', '{"samples": 1, "samples": 2}\n']),
    ),
    max_size=30,
)


@given(told, st.integers(1, 40), st.booleans())
def test_newest_values_match_full_read(tmp_path_factory, told, block, torn):
    path = write(tmp_path_factory.mktemp("log") / "metrics.jsonl", told)
    if torn:
        with path.open("a") as file:
            file.write('{"samples": 99, "eval/ret')
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonl, "BLOCK", block)
        found = newest_values(path, NAMES)
    whole = last_values(path)
    assert found == {name: whole[name] for name in NAMES if name in whole}


def bytes_read(path, monkeypatch):
    """Return the number of bytes of a log that are read."""
    total = 0
    plain = safe_read.open_regular

    class Counted:
        def __init__(self, file):
            self.file = file

        def read(self, size):
            nonlocal total
            total += size
            return self.file.read(size)

        def __getattr__(self, name):
            return getattr(self.file, name)

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

    monkeypatch.setattr(jsonl, "open_regular", lambda path: Counted(plain(path)))
    assert newest_values(path, NAMES).keys() == set(NAMES)
    return total


def test_newest_values_read_size_is_independent_of_log_length(tmp_path, monkeypatch):
    few = write(tmp_path / "few", lines(count=100))
    many = write(tmp_path / "many", lines(count=10_000))
    assert many.stat().st_size > 100 * 2**10
    assert bytes_read(many, monkeypatch) <= bytes_read(few, monkeypatch) <= 2 * jsonl.BLOCK


def test_newest_values_of_endless_line_is_empty(tmp_path):
    (tmp_path / "log").write_bytes(b'{"samples": 1}\n' + b"x" * (5 * 2**20))
    assert newest_values(tmp_path / "log", NAMES) == {}


def test_ls_parses_no_yaml_of_configs_written_by_lockstep(tmp_path, monkeypatch, capsys):
    for name in ("gym-ppo", "snake-ppo", "cricket-gnn", "dmc-tdmpc2"):
        run = write_run(tmp_path / name)
        (run / "config.yaml").write_text(to_yaml(find_recipe(name)()))

    def parsed(text):
        raise AssertionError(text)

    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(safe_read, "parse_yaml", parsed)
    monkeypatch.setattr("lockstep.config.parse_yaml", parsed)
    assert main(["ls", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    for text in ("gym-ppo, CartPole-v1", "snake-ppo, -", "cricket-gnn, -", "dmc-tdmpc2, walker-run"):
        assert text in printed


@pytest.mark.parametrize(
    ("task", "environment"),
    [
        ({"id": "Hopper-v5"}, "Hopper-v5"),
        ({"id": "ALE/Pong-v5"}, "ALE/Pong-v5"),
        ({"id": "/home/me/my env.py:Reach-v0"}, "Reach-v0"),
        ({"id": "Unversioned"}, "Unversioned"),
        ({"tasks": ["walker-run", "cup-catch"], "num_envs": 8}, "walker-run, cup-catch"),
        ({"tasks": ["mt30"]}, "mt30"),
        ({"id": None, "size": 3}, "-"),
        ({"env_kwargs": {"id": "Inner-v0"}}, "-"),
        ({}, "-"),
        (None, "-"),
        ([1], "-"),
    ],
)
def test_ls_shows_environment(tmp_path, capsys, task, environment):
    write_run(tmp_path / "run", config=CONFIG | {"task": task})
    assert main(["ls", str(tmp_path)]) == 0
    assert f"  gym-ppo, {environment}  " in capsys.readouterr().out


def test_ls_shows_start_date_seed_and_short_steps(tmp_path, capsys):
    run = CONFIG["run"] | {"total_samples": 10_000_000, "seed": 17}
    path = write_run(tmp_path / "run", told=[{"samples": 57_344}], config=CONFIG | {"run": run})
    began = time.mktime((2026, 3, 4, 5, 6, 0, 0, 0, -1))
    os.utime(path / "checkpoints" / "attempt-0001.json", (began, began))
    assert main(["ls", str(tmp_path)]) == 0
    first, second = capsys.readouterr().out.splitlines()[-2:]
    assert first.split() == ["run", "finished", "57.3k/10M", "-", "03-04", "05:06"]
    assert second.split()[-1] == "17"


@pytest.mark.parametrize("table_rows", [200, 0])
def test_ls_of_automatic_name_fits_80_columns_unfolded(tmp_path, monkeypatch, capsys, table_rows):
    name = "gym-ppo-Hopper-v5-20261117-223958"
    values = {"rollout/ep_return_mean": -1234.56, "eval/return_mean": -1234.56, "time/global_fps": 123_456}
    run = CONFIG["run"] | {"total_samples": 123_456_789}
    write_run(tmp_path / name, told=[{"samples": 98_765_432} | values], config=CONFIG | {"run": run})
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(ls, "MAX_TABLE_ROWS", table_rows)
    assert main(["ls", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert f"{name}  finished" in printed
    assert max(map(len, printed.splitlines())) <= 80


def test_ls_of_many_runs_shows_same_content_as_table(tmp_path, monkeypatch, capsys):
    for number in range(3):
        write_run(tmp_path / f"run-{number}[bold]", seed=number)
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "config.yaml").write_text("[")
    monkeypatch.setenv("COLUMNS", "200")
    main(["ls", str(tmp_path)])
    framed = capsys.readouterr().out
    monkeypatch.setattr(ls, "MAX_TABLE_ROWS", 2)
    main(["ls", str(tmp_path)])
    plain = capsys.readouterr().out
    assert plain.split() == [word for word in framed.split() if word.strip("┏━┳┓┃┡╇┩│└─┴┘")]
    assert len({line.index("gym-ppo,") for line in plain.splitlines() if "gym-ppo," in line}) == 1


def test_ls_shows_an_experiment_as_one_entry(tmp_path, capsys):
    scores, states = [10.0, 20.0, 30.0, 90.0], ["finished", "finished", "running", "running"]
    write_experiment(tmp_path / "exp", range(3, 8), scores, states=states)
    assert main(["ls", str(tmp_path)]) == 0
    first, second = capsys.readouterr().out.splitlines()[-2:]
    # The fifth run has not been started. The interquartile mean drops the lowest and the highest return.
    assert first.split()[:4] == ["exp", "running", "16k/20k", "25.00"]
    assert second.split() == ["gym-ppo,", "CartPole-v1", "2/5", "done", "200", "25.00", "3-7"]
    assert main(["ls", str(tmp_path / "exp")]) == 0
    assert capsys.readouterr().out.count("gym-ppo, CartPole-v1") == 4


def test_ls_of_runs_does_not_import_torch(tmp_path):
    write_run(tmp_path / "run")
    write_experiment(tmp_path / "exp", [0], [1.0])
    code = "import sys; from lockstep.cli import main; main(['ls', sys.argv[1]]); assert 'torch' not in sys.modules"
    ended = command([sys.executable, "-c", code, tmp_path], environment={"PYTHONPATH": os.pathsep.join(sys.path)})
    assert ended.code == 0, ended.output
