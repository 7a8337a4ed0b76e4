"""Configs: immutability, overrides from YAML and the command line, type conversion, YAML round trip, recipes."""

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from lockstep.config import ConfigError, Recipe, RunConfig, apply_overrides, as_dict, coerce, read_yaml
from lockstep.registry import RECIPES, find_recipe
from lockstep.run_dir import read_config, to_yaml


@dataclass(frozen=True, kw_only=True)
class Net:
    width: int = 64
    channels: tuple[int, ...] = ()
    board: tuple[int, float] = (1, 2.0)


@dataclass(frozen=True, kw_only=True)
class Algo:
    rate: float = 0.1
    target: float | None = None
    kind: Literal["fast", "exact"] = "fast"
    check: bool = False
    options: dict[str, bool | int | float | str] = field(default_factory=dict)
    net: Net = Net()


@dataclass(frozen=True, kw_only=True)
class Small(Recipe):
    algo: Algo = Algo()
    run: RunConfig = RunConfig()


def every_variation():
    """Yield every recipe with its defaults, with each preset and with its smoke settings."""
    for name in RECIPES:
        kind = find_recipe(name)
        variations = {"": {}, "smoke": kind.smoke_overrides} | {
            f"preset {key}": values for key, values in kind.presets.items()
        }
        for word, values in variations.items():
            yield pytest.param(kind, values, id=f"{name} {word}".strip())


# ------------------------------------------------------------------------------------------------------------ overrides


def test_overrides_change_only_named_fields():
    changed = apply_overrides(Small(), {"algo": {"net": {"width": 8}}, "run": {"total_samples": 5}})
    assert changed == Small(algo=Algo(net=Net(width=8)), run=RunConfig(total_samples=5))


def test_override_keys_may_be_nested_or_dotted():
    wanted = apply_overrides(Small(), {"algo": {"rate": 0.5, "net": {"width": 8}}})
    assert apply_overrides(Small(), {"algo.rate": 0.5, "algo.net.width": 8}) == wanted
    assert apply_overrides(Small(), {"algo": {"rate": 0.5, "net.width": 8}}) == wanted
    assert apply_overrides(Small(), {"algo.rate": 0.5, "algo.net": {"width": 8}}) == wanted


def test_override_keys_may_contain_dashes():
    assert apply_overrides(Small(), {"run.log-every": 7}).run.log_every == 7


def test_later_override_wins():
    assert apply_overrides(Small(), {"algo.rate": 0.5, "algo": {"rate": 0.25}}).algo.rate == 0.25


def test_overrides_do_not_modify_original_config():
    recipe = Small()
    apply_overrides(recipe, {"algo.net.width": 8, "algo.options": {"a": 1}})
    assert recipe == Small()


@pytest.mark.parametrize(
    "config", [RunConfig(), *(find_recipe(name)() for name in RECIPES)], ids=lambda c: type(c).__name__
)
def test_configs_are_frozen_recursively(config):
    def visit(part):
        for entry in dataclasses.fields(part):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(part, entry.name, None)
            if dataclasses.is_dataclass(getattr(part, entry.name)):
                visit(getattr(part, entry.name))

    visit(config)


@pytest.mark.parametrize(
    ("values", "problem", "hint"),
    [
        ({"algo.raet": 1}, "'algo.raet' is not a setting: Algo has no 'raet'.", "Did you mean 'rate'?"),
        ({"algo": {"net": {"wdith": 1}}}, "'algo.net.wdith' is not a setting", "Did you mean 'width'?"),
        ({"ago.rate": 1}, "'ago.rate' is not a setting: Small has no 'ago'.", "Did you mean 'algo'?"),
        ({"run.total_samlpes": 1}, "'run.total_samlpes' is not a setting", "Did you mean 'total_samples'?"),
        ({"algo.net.qqq": 1}, "'algo.net.qqq' is not a setting", "It has: board, channels, width."),
        ({"algo.rate.x": 1}, "'algo.rate.x' is not a setting: 'rate' has no fields.", "Set 'rate' itself."),
        ({"algo.options.a-b": 1}, "'algo.options.a-b' is not a setting", "Use --algo.options a_b VALUE."),
        ({"algo": 3}, "'algo' is a group of settings, not 3.", "Set its fields one by one."),
    ],
)
def test_unknown_setting_error_suggests_closest_name(values, problem, hint):
    with pytest.raises(ConfigError) as caught:
        apply_overrides(Small(), values)
    first, second = str(caught.value).split("\n")
    assert first.startswith(problem)
    assert second == hint


# ---------------------------------------------------------------------------------------------------------------- types


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("algo.rate", "3e-4", 3e-4),  # YAML reads this as a string
        ("algo.rate", "1", 1.0),
        ("algo.target", "2e-2", 0.02),
        ("algo.target", "null", None),
        ("algo.target", "none", None),
        ("algo.target", "None", None),
        ("algo.kind", "exact", "exact"),
        ("algo.check", "true", True),
        ("algo.check", "'True'", True),
        ("algo.check", "'false'", False),
        ("run.total_samples", "1e6", 1_000_000),
        ("run.total_samples", "1.0e6", 1_000_000),
        ("run.total_samples", "'1_000'", 1000),
        ("run.lanes", "none", None),
        ("run.lanes", "4", 4),
        ("run.name", "17", "17"),
        ("algo.net.channels", "[32, 64]", (32, 64)),
        ("algo.net.channels", "32,64", (32, 64)),
        ("algo.net.channels", "'32'", (32,)),
        ("algo.net.channels", "32", (32,)),
        ("algo.net.channels", "''", ()),
        ("algo.net.channels", "[]", ()),
        ("algo.net.board", "[3, 4]", (3, 4.0)),
        (
            "algo.options",
            "{g: 9.0, slippery: true, map: 4x4, size: 3}",
            {"g": 9.0, "slippery": True, "map": "4x4", "size": 3},
        ),
    ],
)
def test_yaml_value_is_converted_to_field_type(key, text, value):
    found = apply_overrides(Small(), {key: yaml.safe_load(text)})
    for name in key.split("."):
        found = getattr(found, name)
    assert repr(found) == repr(value)  # 1, 1.0 and True compare equal but are different settings


@pytest.mark.parametrize(
    ("key", "value", "words"),
    [
        ("algo.rate", "fast", "'algo.rate' is 'fast', which is not float."),
        ("algo.rate", True, "'algo.rate' is True, which is not float."),
        ("algo.rate", None, "'algo.rate' is None, which is not float."),
        ("algo.kind", "slow", "'algo.kind' is 'slow', which is not fast or exact."),
        ("algo.check", 1, "'algo.check' is 1, which is not bool."),
        ("algo.check", "yes", "'algo.check' is 'yes', which is not bool."),
        ("run.total_samples", 1.5, "'run.total_samples' is 1.5, which is not int."),
        ("run.total_samples", "many", "'run.total_samples' is 'many', which is not int."),
        ("run.total_samples", float("inf"), "'run.total_samples' is inf, which is not int."),
        ("run.total_samples", float("nan"), "'run.total_samples' is nan, which is not int."),
        ("run.total_samples", None, "'run.total_samples' is None, which is not int."),
        ("run.lanes", "few", "'run.lanes' is 'few', which is not int | None."),
        ("algo.net.channels", ["a"], "'algo.net.channels' is 'a', which is not int."),
        ("algo.net.channels", {"a": 3}, "'algo.net.channels' is {'a': 3}, which is not tuple"),
        ("algo.net.board", [1], "'algo.net.board' is [1], which is not tuple"),
        ("algo.options", 3, "'algo.options' is 3, not names with values."),
    ],
)
def test_value_of_wrong_type_error_states_expected_type(key, value, words):
    with pytest.raises(ConfigError) as caught:
        apply_overrides(Small(), {key: value})
    assert str(caught.value).startswith(words)
    assert "\nGive " in str(caught.value)


@given(st.integers(-(2**200), 2**200))
def test_coerce_int_keeps_every_digit(number):
    assert coerce(number, int, "seed") == number
    assert coerce(str(number), int, "seed") == number


@given(st.floats(allow_nan=False))
def test_coerce_float_after_yaml_round_trip_is_bit_identical(number):
    assert coerce(yaml.safe_load(yaml.safe_dump(number)), float, "rate") == number


# -------------------------------------------------------------------------------------------------------------- on disk


@pytest.mark.parametrize(("kind", "values"), list(every_variation()))
def test_recipe_survives_config_file_round_trip(kind, values, tmp_path):
    recipe = apply_overrides(kind(), values)
    path = tmp_path / "run"
    path.mkdir()
    (path / "config.yaml").write_text(to_yaml(recipe))
    name, read = read_config(path)
    here = {"runs_dir": str(tmp_path), "name": "run"}
    assert name == kind.name
    assert apply_overrides(kind(), read) == dataclasses.replace(recipe, run=dataclasses.replace(recipe.run, **here))


runs = st.builds(
    RunConfig,
    total_samples=st.integers(1, 2**70),
    seed=st.integers(0, 2**70),
    name=st.text("abc-_.123", min_size=1, max_size=200).filter(lambda name: name not in (".", "..")),
    lanes=st.none() | st.integers(1, 2**10),
    reduction=st.sampled_from(["fast", "exact"]),
    precision=st.sampled_from(["fp32", "bf16", "fp16", "amp"]),
    eval_every=st.none() | st.integers(1, 2**40),
    collective_timeout=st.floats(1e-3, 1e9),
    digest_every=st.none() | st.integers(1, 10**6),
    log_tensor_digests=st.booleans(),
)
options = st.dictionaries(
    st.text("abc", min_size=1), st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(), max_size=4
)


@given(runs, options, st.lists(st.integers(0, 2**40)), st.none() | st.floats(allow_nan=False))
def test_settings_survive_yaml_round_trip(run, options, channels, target):
    recipe = Small(algo=Algo(options=options, target=target, net=Net(channels=tuple(channels))), run=run)
    back = apply_overrides(Small(), yaml.safe_load(yaml.safe_dump(as_dict(recipe), sort_keys=False)))
    assert repr(back) == repr(recipe)


def test_read_config_of_moved_run_uses_current_directory(tmp_path):
    path = tmp_path / "elsewhere"
    path.mkdir()
    (path / "config.yaml").write_text(
        to_yaml(dataclasses.replace(Small(), run=RunConfig(runs_dir="runs", name="first")))
    )
    _, values = read_config(path)
    assert (values["run"]["runs_dir"], values["run"]["name"]) == (str(tmp_path), "elsewhere")


def test_read_yaml_of_empty_file_returns_empty_dict(tmp_path):
    (tmp_path / "a.yaml").write_text("# nothing yet\n")
    assert read_yaml(tmp_path / "a.yaml") == {}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "does not exist"),
        ("- a\n- b\n", "contains list, not settings"),
        ("a: [", "is not valid yaml"),
        ("!!python/object/apply:os.system ['true']", "is not valid yaml"),  # the safe loader executes no code
    ],
)
def test_read_yaml_of_invalid_file_error_names_path(tmp_path, text, words):
    path = tmp_path / "a.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=words) as caught:
        read_yaml(path)
    assert str(path) in str(caught.value)


def test_read_config_without_config_file_is_rejected(tmp_path):
    with pytest.raises(ConfigError, match="is not a run directory"):
        read_config(tmp_path)


# -------------------------------------------------------------------------------------------------------------- recipes


def test_unknown_recipe_error_suggests_closest_name():
    with pytest.raises(ConfigError, match=r"there is no recipe 'snake-pp'.\nDid you mean 'snake-ppo'\?"):
        find_recipe("snake-pp")
    with pytest.raises(ConfigError, match=r"Use one of .*snake-ppo"):
        find_recipe("zzz")


RECIPE_FILE = '''
from dataclasses import dataclass
from lockstep.config import Recipe, RunConfig
from lockstep.recipes.snake_ppo import SnakePPO  # an imported recipe does not count

@dataclass(frozen=True, kw_only=True)
class Mine(Recipe):
    run: RunConfig = RunConfig(total_samples=17)
'''  # fmt: skip


def test_recipe_file_is_found_and_named_by_path(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(RECIPE_FILE)
    monkeypatch.chdir(tmp_path)
    recipe = find_recipe("mine.py")
    assert recipe().run.total_samples == 17
    assert recipe.name == str(tmp_path / "mine.py")


@pytest.mark.parametrize(("text", "count"), [("x = 1", 0), (RECIPE_FILE + RECIPE_FILE.replace("Mine", "Other"), 2)])
def test_recipe_file_without_exactly_one_recipe_is_rejected(tmp_path, text, count):
    (tmp_path / "mine.py").write_text(text)
    with pytest.raises(ConfigError, match=f"defines {count} recipes; it needs exactly one"):
        find_recipe(str(tmp_path / "mine.py"))


def test_missing_recipe_file_is_rejected():
    with pytest.raises(ConfigError, match=r"there is no recipe file nowhere\.py"):
        find_recipe("nowhere.py")


@pytest.mark.parametrize("name", RECIPES)
def test_recipe_name_matches_registry_key(name):
    assert find_recipe(name).name == name
    assert Path(find_recipe(name).__module__.replace(".", "/")).parent.name == "recipes"
