"""Untrusted settings and measurements: invalid YAML and JSON is refused with a message and runs no code."""

import json
import os

import pytest

from lockstep.checkpoint.format_version import FORMAT
from lockstep.cli import main
from lockstep.cli.plan import _read_network, _read_shares
from lockstep.config import ConfigError, apply_overrides, read_yaml
from lockstep.inference import load_recipe
from lockstep.recipes.snake_ppo import SnakePPO

# -- configs -----------------------------------------------------------------------------------------------------------

BOMB = "a: &a [1,1,1,1,1,1,1,1,1]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{f'*{chr(97 + i)},' * 9}]\n" for i in range(12)
)
CONFIGS = {
    "an alias bomb": (BOMB, "aliases expand to too many values"),
    "a list of itself": ("a: &a [*a, *a]", "is not valid yaml"),
    "lists nested deep": ("[" * 10**4, "nested too deep"),
    "an object": ("run: !!python/object/apply:os.system ['touch /tmp/lockstep-was-here']", "is not valid yaml"),
    "a key twice": ("run: {seed: 1, seed: 2}", "the key 'seed' is duplicated"),
    "two documents": ("a: 1\n---\nb: 2", "is not valid yaml"),
    "an int of nothing": ('run: {seed: !!int ""}', "is not valid yaml"),
    "a day that is none": ("run: {seed: 2001-99-99}", "is not valid yaml"),
    "bytes": ("\udcff\udcfe", "cannot be read"),
    "a zero byte": ("a: \0", "is not valid yaml"),
    "a megabyte": ("# " + "x" * 2**20, "more than the limit of 262,144"),
    "a key that is a list": ("? [a]\n: 1", "is not valid yaml"),
    "a key that is a number": ("1: 2", "'1' is not a setting"),
    "a group that is a number": ("run: 3", "'run' is a group of settings, not 3"),
    "a number of infinite samples": ("run: {total_samples: .inf}", "'run.total_samples' is inf, which is not int"),
    "a number of no samples": ("run: {total_samples: .nan}", "'run.total_samples' is nan, which is not int"),
    "1e999 samples": ("run: {total_samples: 1e999}", "'run.total_samples' is '1e999', which is not int"),
    "samples of 300,000 bits": (
        "run: {total_samples: 0x" + "f" * 75000 + "}",
        "a number too long to show, which is not int",
    ),
    "a long list for a number": (f"run: {{seed: [{'1,' * 15000}]}}", "characters), which is not int"),
    "a setting in words": ("task: {size: big}", "'task.size' is 'big', which is not int"),
    "a choice that is none": ("run: {reduction: [exact]}", "which is not fast or exact"),
    "an unknown setting": ("run: {sede: 1}", "Did you mean 'seed'?"),
}


@pytest.mark.parametrize(("text", "sentence"), CONFIGS.values(), ids=CONFIGS)
def test_invalid_config_is_refused_with_a_message(tmp_path, capsys, text, sentence):
    (tmp_path / "a.yaml").write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(ConfigError) as refused:
        apply_overrides(SnakePPO(), read_yaml(tmp_path / "a.yaml"))
    assert sentence in str(refused.value)
    assert len(str(refused.value)) < 1000
    run = tmp_path / "runs" / "[bold]"  # a name that looks like rich markup
    run.mkdir(parents=True)
    (run / "config.yaml").write_bytes(text.encode(errors="surrogateescape"))
    assert main(["ls", str(run.parent)]) == 0
    assert "[bold]" in capsys.readouterr().out
    assert main(["eval", str(run)]) == 2
    assert not os.path.exists("/tmp/lockstep-was-here")


@pytest.mark.parametrize("run", ["3", "[1, 2]", "text"])
def test_config_without_run_settings_is_refused(tmp_path, run):
    (tmp_path / "config.yaml").write_text(f"format: {FORMAT}\nrecipe: snake-ppo\nrun: {run}")
    with pytest.raises(ConfigError, match="has no settings of the run"):
        load_recipe(tmp_path)


@pytest.mark.parametrize(
    "recipe", ["evil.py", "./evil.py", "/proc/self/cwd/evil.py", "{run}/evil.py", "{run}/../run/evil.py"]
)
def test_recipe_file_next_to_an_untrusted_run_is_not_executed(tmp_path, monkeypatch, recipe):
    run = tmp_path / "run"
    run.mkdir()
    (run / "evil.py").write_text("raise SystemExit('it ran')")
    (tmp_path / "evil.py").write_text("raise SystemExit('it ran')")
    monkeypatch.chdir(tmp_path)
    (run / "config.yaml").write_text(f"format: {FORMAT}\nrecipe: {recipe.format(run=run)}")
    with pytest.raises(ConfigError, match="the recipe of"):
        load_recipe(run)


# -- measurements for a plan -------------------------------------------------------------------------------------------

LINE = {"fixed": 0.1, "per_sample": 0.1}
SHARES = {"rollout_step": LINE, "update": LINE, "rest": LINE, "sent": [["pool", 8, 1.0]], "state_bytes": 1}
SHARES |= {"num_envs": 8, "batch_size": 8, "horizon": 8, "updates": 1, "samples": 64}
SHARES |= {"rollout_bytes": 1.0, "activation_bytes": 1.0}
MEASURED = [
    "",
    "[]",
    "{}",
    "[" * 10**5,
    '{"shares": 1}',
    *(
        json.dumps({"shares": SHARES | changed})
        for changed in (
            {"num_envs": "8"},
            {"num_envs": 0},
            {"num_envs": 1.5},
            {"num_envs": True},
            {"samples": float("nan")},
            {"samples": 10**400},
            {"rest": {"fixed": float("inf"), "per_sample": 0}},
            {"rest": {"fixed": 1}},
            {"rest": [1, 2]},
            {"sent": [["pool"]]},
            {"sent": 3},
            {"sent": [["pool", "8", 1]]},
            {"more": 1},
        )
    ),
]


@pytest.mark.parametrize("text", MEASURED)
def test_plan_invalid_measurement_is_refused(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ConfigError, match="contains no measurement"):
        _read_shares(tmp_path / "a.json", "snake-ppo")


def test_plan_valid_measurement_is_read(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"shares": SHARES}))
    assert _read_shares(tmp_path / "a.json", "snake-ppo").num_envs == 8


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"seconds": {"8": 1}, "processes": 1}',
        '{"seconds": {"8": "a", "9": 1}, "processes": 2}',
        '{"seconds": {"a": 1, "9": 1}, "processes": 2}',
        '{"seconds": {"8": NaN, "9": 1}, "processes": 2}',
        '{"seconds": {"8": 1e-999, "9": 1}, "processes": 2}',
        '{"seconds": {"8": 1, "9": 1}, "processes": 1' + "0" * 400 + "}",
        '{"seconds": [1, 2], "processes": 2}',
    ],
)
def test_plan_invalid_network_times_are_refused(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ConfigError, match="contains no all-reduce times"):
        _read_network(tmp_path / "a.json")
