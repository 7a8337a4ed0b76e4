"""Flag aliases of other tools: flags or key=value, dashes or underscores."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.cli.flag_aliases import ALIASES, DROPPED, normalize_args
from lockstep.config import ConfigError

GUIDES = {
    "total-timesteps": "run.total-samples",
    "n-envs": "task.num-envs",
    "n-steps": "algo.rollout-steps",
    "batch-size": "algo.batch-size",
    "precision": "run.precision",
    "seed": "run.seed",
    "run-name": "run.name",
    "device": "run.device",
    "steps": "run.total-samples",
    "eval-freq": "run.eval-every",
    "sync-freq": "algo.grad-accum-steps",
    "epochs": "algo.epochs",
    "checkpoint-dir": "run.runs-dir",
}
OWN = {"resume-from": "resume", "num-gpus": "procs", "world-size": "procs", "load-model-run": "init-from"}
"""Aliases for flags of the command itself, which are not recipe settings."""


@pytest.mark.parametrize(("word", "field"), (GUIDES | OWN).items())
def test_alias_flag_is_translated(word, field):
    assert normalize_args([f"--{word}", "7"], {}).flags == [f"--{field}", "7"]
    assert normalize_args([f"--{word}=7"], {}).flags == [f"--{field}", "7"]
    assert normalize_args([f"--{word.replace('-', '_')}", "7"], {}).flags == [f"--{field}", "7"]


@pytest.mark.parametrize(("word", "field"), GUIDES.items())
def test_alias_as_key_and_value_is_translated(word, field):
    assert normalize_args([f"{word}=7"], {}).settings == {field: "7"}
    assert normalize_args([f"{word.replace('-', '_')}=7"], {}).settings == {field: "7"}


@pytest.mark.parametrize(("word", "flag"), OWN.items())
def test_command_alias_as_key_and_value_becomes_flag(word, flag):
    words = normalize_args([f"{word.replace('-', '_')}=7"], {})
    assert (words.flags, words.settings) == ([f"--{flag}", "7"], {})


def test_own_flags_are_unchanged():
    line = ["snake-ppo", "--task.size", "8", "-n", "2", "--smoke", "--run.runs-dir", "/tmp/x"]
    line += ["--task.death-reward", "-1"]
    words = normalize_args(line, {})
    assert (words.flags, words.settings, words.notes) == (line, {}, [])


def test_underscores_become_dashes_in_names_only():
    assert normalize_args(["--task.num_envs=a_b"], {}).flags == ["--task.num-envs", "a_b"]
    assert normalize_args(["task.num_envs=a_b", "--run.name", "a_b"], {}).settings == {"task.num-envs": "a_b"}
    assert normalize_args(["--run.name", "a_b"], {}).flags == ["--run.name", "a_b"]


def test_value_may_contain_equals_sign():
    assert normalize_args(["run.name=a=b"], {}).settings == {"run.name": "a=b"}


def test_recipe_aliases_override_common_ones():
    assert normalize_args(["--seed", "1", "--env", "Pong"], {"seed": "task.seed", "env": "task.id"}).flags == [
        *("--task.seed", "1"),
        *("--task.id", "Pong"),
    ]


@pytest.mark.parametrize("word", DROPPED)
@pytest.mark.parametrize("form", [["--{}"], ["--{}", "true"], ["--{}=1"], ["--{}", "29500"], ["{}=true"]])
def test_unneeded_flag_is_dropped_with_value_and_one_message(word, form):
    for name in (word, word.replace("-", "_")):
        words = normalize_args(["snake-ppo", *(part.format(name) for part in form), "--smoke"], {})
        assert words.flags == ["snake-ppo", "--smoke"]
        assert words.settings == {}
        assert words.notes == [f"--{word} is not needed: {DROPPED[word]}."]


def test_unneeded_flag_does_not_consume_next_argument():
    assert normalize_args(["--load-model", "snake-ppo", "--smoke"], {}).flags == ["snake-ppo", "--smoke"]
    words = normalize_args(["--load-model", "--load-model-run", "runs/a", "run.seed=1"], {})
    assert (words.flags, words.settings) == (["--init-from", "runs/a"], {"run.seed": "1"})


@pytest.mark.parametrize(
    "form", [["--distributed"], ["--distributed", "true"], ["--distributed=1"], ["distributed=true"]]
)
def test_distributed_flag_means_one_process_per_gpu(form):
    words = normalize_args([*form, "snake-ppo", "--smoke"], {})
    assert words.flags == ["snake-ppo", "--smoke", "--procs", "auto"]
    assert words.notes == ["--distributed means --procs auto: one process for each GPU."]


@pytest.mark.parametrize("count", [["--procs", "2"], ["-n", "2"], ["--num_gpus", "2"], ["--world-size=2"]])
def test_distributed_flag_with_process_count_keeps_it(count):
    words = normalize_args(["snake-ppo", "--distributed", *count], {})
    assert "auto" not in words.flags
    assert "2" in words.flags
    assert words.notes == []


def test_distributed_false_has_no_effect():
    assert normalize_args(["snake-ppo", "--distributed", "false"], {}).flags == ["snake-ppo"]


def test_opponent_and_model_aliases_are_translated():
    line = ["--enable_opponent_evasion", "--opponent_evasion_start_episode", "30", "--load_model"]
    line += ["--load_model_run_episode", "50", "--load_model_run", "runs/old"]
    words = normalize_args(line, {}, 200)
    assert words.flags == ["--task.evade-after-samples", "6000", "--init-from", "runs/old@10000"]
    assert "--enable-opponent-evasion is not needed: use --task.evade-after-samples SAMPLES." in words.notes
    assert len(words.notes) == 4


@pytest.mark.parametrize("name", ["episodes", "max-episodes", "max_episodes"])
def test_episodes_are_converted_to_samples_with_one_message(name):
    word = name.replace("_", "-")
    note = f"--{word} 20 is read as 4,000 global samples: an episode has at most 200 steps."
    as_flag = normalize_args([f"--{name}", "20", "--smoke"], {}, episode_length=200)
    assert (as_flag.flags, as_flag.notes) == (["--run.total-samples", "4000", "--smoke"], [note])
    as_setting = normalize_args([f"{name}=20"], {}, episode_length=200)
    assert (as_setting.settings, as_setting.notes) == ({"run.total-samples": "4000"}, [note])


@pytest.mark.parametrize(
    ("line", "length", "problem"),
    [
        (["--episodes", "20"], None, "--episodes counts episodes, but episodes of this recipe have no fixed length."),
        (["--episodes", "many"], 200, "--episodes is 'many', which is not a whole number."),
        (["--episodes"], 200, "--episodes is '', which is not a whole number."),
    ],
)
def test_episodes_that_cannot_be_converted_are_rejected(line, length, problem):
    with pytest.raises(ConfigError) as caught:
        normalize_args(line, {}, length)
    assert str(caught.value).startswith(problem)


@given(st.lists(st.text("ab-_=.7 ", max_size=6), max_size=5))
def test_normalize_args_accepts_any_strings(line):
    words = normalize_args(line, {"a": "task.a task.b="}, 10)
    assert all(isinstance(word, str) for word in words.flags)


def test_aliases_map_to_settings_or_command_flags():
    verb = {"procs", "resume", "init-from"}
    assert {field for field in ALIASES.values() if "." not in field} <= verb
    assert {field.partition(".")[0] for field in ALIASES.values() if "." in field} <= {"task", "algo", "run"}
    assert not ALIASES.keys() & DROPPED.keys()
