"""Flag aliases of other tools: flags or key=value, dashes or underscores."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.cli.flag_aliases import ALIASES, DROPPED, normalize_args, normalize_run_args
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
    "n-epochs": "algo.epochs",
    "ent-coef": "algo.entropy-coef",
    "clip-range": "algo.clip-coef",
    "checkpoint-dir": "run.runs-dir",
}
OWN = {
    "resume-from": "resume",
    "num-gpus": "procs",
    "nproc-per-node": "procs",
    "world-size": "procs",
    "load-model-run": "init-from",
}
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


def test_run_and_episode_of_a_model_become_one_flag():
    line = ["--load_model", "--load_model_run_episode", "50", "--load_model_run", "runs/old"]
    assert normalize_args(line, {}).flags == ["--init-from", "runs/old@50ep"]


@pytest.mark.parametrize("form", [["--episodes", "20"], ["--episodes=20"], ["episodes=20"]])
def test_flag_with_unit_is_kept_for_the_recipe(form):
    parsed = normalize_args([*form, "--smoke"], {})
    assert (parsed.flags, parsed.unit_flags) == (["--smoke"], {"episodes": "20"})
    assert normalize_args(parsed.rest([]), {}).unit_flags == {"episodes": "20"}


@pytest.mark.parametrize(("value", "setting"), [("true", "true"), ("False", "false")])
def test_boolean_flag_of_another_tool_may_have_a_value(value, setting):
    assert normalize_args(["--enable_wandb", value, "--smoke"], {}).settings == {"run.wandb": setting}


@pytest.mark.parametrize("line", [["--resume"], ["--resume", "--smoke"], ["--resume", "run.seed=1"]])
def test_bare_resume_means_the_newest_run(line):
    assert normalize_args(line, {}).flags[:2] == ["--resume", "newest"]
    assert normalize_args(["--resume", "runs/a"], {}).flags == ["--resume", "runs/a"]


def test_flag_without_equivalent_is_refused_with_a_hint():
    with pytest.raises(ConfigError, match="updates-per-sample"):
        normalize_args(["--gradient-steps", "4"], {})


def test_master_address_becomes_rendezvous_with_same_job_on_every_host():
    hosts = [
        normalize_args(["--nnodes", "2", "--node-rank", str(rank), "--master-addr", "10.0.0.1", "--seed", "3"], {})
        for rank in range(2)
    ]
    assert hosts[0].flags == hosts[1].flags
    assert hosts[0].flags[:2] == ["--nnodes", "2"]
    assert hosts[0].flags[hosts[0].flags.index("--rdzv-endpoint") + 1] == "10.0.0.1:29500"
    other = normalize_args(["--nnodes", "2", "--node-rank", "0", "--master-addr", "10.0.0.1", "--seed", "4"], {})
    assert other.flags[-1] != hosts[0].flags[-1]


def test_master_address_of_one_host_is_dropped_with_a_message():
    parsed = normalize_args(["--master-addr", "localhost", "--master-port", "29501"], {})
    assert parsed.flags == []
    assert [note.split()[0] for note in parsed.notes] == ["--master-addr", "--master-port"]


@pytest.mark.parametrize("line", [["--model", "runs/a", "--n-episodes", "5"], ["--model=runs/a", "--n_episodes=5"]])
def test_flags_of_commands_on_runs_are_translated(line):
    assert normalize_run_args(line) == ["runs/a", "--episodes", "5"]


@given(st.lists(st.text("ab-_=.7 ", max_size=6), max_size=5))
def test_normalize_args_accepts_any_strings(line):
    words = normalize_args(line, {"a": "task.a task.b="})
    assert all(isinstance(word, str) for word in words.flags)


def test_aliases_map_to_settings_or_command_flags():
    verb = {"procs", "resume", "init-from", "debug"}
    assert {field for field in ALIASES.values() if "." not in field} <= verb
    assert {field.partition(".")[0] for field in ALIASES.values() if "." in field} <= {"task", "algo", "run"}
    assert not ALIASES.keys() & DROPPED.keys()
