"""The words people bring along mean what they meant: flags or key=value, dashes or underscores."""

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
"""Words for flags of the verb itself, which are no settings of the recipe."""


@pytest.mark.parametrize(("word", "field"), (GUIDES | OWN).items())
def test_a_word_of_the_guides_is_a_flag_of_ours(word, field):
    assert normalize_args([f"--{word}", "7"], {}).flags == [f"--{field}", "7"]
    assert normalize_args([f"--{word}=7"], {}).flags == [f"--{field}", "7"]
    assert normalize_args([f"--{word.replace('-', '_')}", "7"], {}).flags == [f"--{field}", "7"]


@pytest.mark.parametrize(("word", "field"), GUIDES.items())
def test_a_word_of_the_guides_may_be_given_as_key_and_value(word, field):
    assert normalize_args([f"{word}=7"], {}).settings == {field: "7"}
    assert normalize_args([f"{word.replace('-', '_')}=7"], {}).settings == {field: "7"}


@pytest.mark.parametrize(("word", "flag"), OWN.items())
def test_a_key_and_value_for_the_verb_itself_becomes_its_flag(word, flag):
    words = normalize_args([f"{word.replace('-', '_')}=7"], {})
    assert (words.flags, words.settings) == ([f"--{flag}", "7"], {})


def test_our_own_words_stay_as_they_are():
    line = ["snake-ppo", "--task.size", "8", "-n", "2", "--smoke", "--run.runs-dir", "/tmp/x"]
    line += ["--task.death-reward", "-1"]
    words = normalize_args(line, {})
    assert (words.flags, words.settings, words.notes) == (line, {}, [])


def test_underscores_become_dashes_in_names_and_never_in_values():
    assert normalize_args(["--task.num_envs=a_b"], {}).flags == ["--task.num-envs", "a_b"]
    assert normalize_args(["task.num_envs=a_b", "--run.name", "a_b"], {}).settings == {"task.num-envs": "a_b"}
    assert normalize_args(["--run.name", "a_b"], {}).flags == ["--run.name", "a_b"]


def test_a_value_may_hold_an_equals_sign():
    assert normalize_args(["run.name=a=b"], {}).settings == {"run.name": "a=b"}


def test_a_recipes_own_words_beat_the_common_ones():
    assert normalize_args(["--seed", "1", "--env", "Pong"], {"seed": "task.seed", "env": "task.id"}).flags == [
        *("--task.seed", "1"),
        *("--task.id", "Pong"),
    ]


@pytest.mark.parametrize("word", DROPPED)
@pytest.mark.parametrize("form", [["--{}"], ["--{}", "true"], ["--{}=1"], ["--{}", "29500"], ["{}=true"]])
def test_a_word_that_is_not_needed_is_dropped_with_its_value_and_one_note(word, form):
    for name in (word, word.replace("-", "_")):
        words = normalize_args(["snake-ppo", *(part.format(name) for part in form), "--smoke"], {})
        assert words.flags == ["snake-ppo", "--smoke"]
        assert words.settings == {}
        assert words.notes == [f"--{word} is not needed: {DROPPED[word]}."]


def test_a_dropped_word_does_not_swallow_the_word_that_follows_it():
    assert normalize_args(["--load-model", "snake-ppo", "--smoke"], {}).flags == ["snake-ppo", "--smoke"]
    words = normalize_args(["--load-model", "--load-model-run", "runs/a", "run.seed=1"], {})
    assert (words.flags, words.settings) == (["--init-from", "runs/a"], {"run.seed": "1"})


@pytest.mark.parametrize(
    "form", [["--distributed"], ["--distributed", "true"], ["--distributed=1"], ["distributed=true"]]
)
def test_distributed_alone_means_one_process_for_each_gpu(form):
    words = normalize_args([*form, "snake-ppo", "--smoke"], {})
    assert words.flags == ["--procs", "auto", "snake-ppo", "--smoke"]
    assert words.notes == ["--distributed means --procs auto: one process for each GPU."]


@pytest.mark.parametrize("count", [["--procs", "2"], ["-n", "2"], ["--num_gpus", "2"], ["--world-size=2"]])
def test_distributed_with_a_number_of_processes_leaves_it_alone(count):
    words = normalize_args(["snake-ppo", "--distributed", *count], {})
    assert "auto" not in words.flags
    assert "2" in words.flags
    assert words.notes == []


def test_distributed_false_means_nothing():
    assert normalize_args(["snake-ppo", "--distributed", "false"], {}).flags == ["snake-ppo"]


def test_the_guides_words_for_opponents_and_models_become_ours():
    line = ["--enable_opponent_evasion", "--opponent_evasion_start_episode", "30", "--load_model"]
    line += ["--load_model_run_episode", "50", "--load_model_run", "runs/old"]
    words = normalize_args(line, {}, 200)
    assert words.flags == ["--task.evade-after-samples", "6000", "--init-from", "runs/old@10000"]
    assert "--enable-opponent-evasion is not needed: --task.evade-after-samples SAMPLES says it all." in words.notes
    assert len(words.notes) == 4


@pytest.mark.parametrize("name", ["episodes", "max-episodes", "max_episodes"])
def test_episodes_become_samples_and_the_user_is_told_once(name):
    word = name.replace("_", "-")
    note = f"--{word} 20 becomes 4,000 global samples: episodes of at most 200 steps."
    as_flag = normalize_args([f"--{name}", "20", "--smoke"], {}, episode_length=200)
    assert (as_flag.flags, as_flag.notes) == (["--run.total-samples", "4000", "--smoke"], [note])
    as_setting = normalize_args([f"{name}=20"], {}, episode_length=200)
    assert (as_setting.settings, as_setting.notes) == ({"run.total-samples": "4000"}, [note])


@pytest.mark.parametrize(
    ("line", "length", "problem"),
    [
        (["--episodes", "20"], None, "--episodes counts episodes, which have no fixed length in this recipe."),
        (["--episodes", "many"], 200, "--episodes is 'many', which is not a whole number."),
        (["--episodes"], 200, "--episodes is '', which is not a whole number."),
    ],
)
def test_episodes_that_cannot_be_counted_are_refused_in_words(line, length, problem):
    with pytest.raises(ConfigError) as caught:
        normalize_args(line, {}, length)
    assert str(caught.value).startswith(problem)


@given(st.lists(st.text("ab-_=.7 ", max_size=6), max_size=5))
def test_no_command_line_is_too_strange_to_be_taken_apart(line):
    words = normalize_args(line, {"a": "task.a task.b="}, 10)
    assert all(isinstance(word, str) for word in words.flags)


def test_every_word_means_a_setting_or_a_flag_of_the_verb():
    verb = {"procs", "resume", "init-from"}
    assert {field for field in ALIASES.values() if "." not in field} <= verb
    assert {field.partition(".")[0] for field in ALIASES.values() if "." in field} <= {"task", "algo", "run"}
    assert not ALIASES.keys() & DROPPED.keys()
