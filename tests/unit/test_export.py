"""Models taken away and brought in: what was written acts as the policy does, and what does not fit is refused."""

import json
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import lockstep
from lockstep.cli import main
from lockstep.config import apply_overrides
from lockstep.pytree import named_leaves
from lockstep.registry import find_recipe
from lockstep.tools.export import formats
from lockstep.tools.export.exportable_policy import ExportablePolicy, draw_observations, largest_difference
from lockstep.tools.export.import_weights import unwrapped
from lockstep.tools.export.pickle_writer import PickleGlobal, PickleReduce, pickled
from lockstep.train import train
from tiny import ITERATION, tiny

SHORT = {"run.total_samples": 64, "run.eval_every": None, "run.save_every": 64}
SMALL = {
    "mlp": ("gym-ppo", {"algo.rollout_steps": 8, "algo.batch_size": 64, "algo.epochs": 1}),
    "lstm": (
        "gym-ppo-lstm",
        {
            "algo.rollout_steps": 8,
            "algo.bptt_steps": 8,
            "algo.batch_size": 64,
            "algo.epochs": 1,
            "algo.recurrent.hidden_size": 16,
        },
    ),
    "motion": (
        "gym-ppo",
        {"task.id": "Pendulum-v1", "algo.rollout_steps": 8, "algo.batch_size": 64, "algo.normalize_obs": True},
    ),
    "ddpg": (
        "gym-ddpg",
        {
            "algo.batch_size": 8,
            "algo.rollout_steps": 8,
            "algo.learning_starts": 8,
            "algo.buffer_size": 64,
            "algo.encoder.hidden_sizes": 16,
        },
    ),
}


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A small run of each kind of network."""
    place = tmp_path_factory.mktemp("runs")
    for name, (recipe, settings) in SMALL.items():
        where = {"run.runs_dir": str(place), "run.name": name, "run.device": "cpu"}
        train(apply_overrides(find_recipe(recipe)(), SHORT | settings | where))
    train(tiny(place, "cnn", total_samples=ITERATION))
    return place


def export(capsys, run, to, out):
    assert main(["export", str(run), "--to", to, "--out", str(out)]) == 0
    told = capsys.readouterr().out
    assert "tried on 64 random observations beside the policy" in told
    return told


# ----------------------------------------------------------------------------------------------------------------- onnx


@pytest.mark.parametrize("kind", ["cnn", "mlp", "lstm"])
def test_onnxruntime_computes_what_the_policy_does(capsys, runs, tmp_path, kind):
    """Here without any help of the exporter's own check: names, memory and numbers of observations of its own."""
    import onnxruntime

    export(capsys, runs / kind, "onnx", tmp_path / "policy.onnx")
    session = onnxruntime.InferenceSession(str(tmp_path / "policy.onnx"), providers=["CPUExecutionProvider"])
    policy = lockstep.load(runs / kind)
    memory = policy.policy.initial_state(5)
    states = named_leaves(memory, "memory") if memory else {}
    assert [given.name for given in session.get_inputs()] == ["obs", *states]
    assert [given.name for given in session.get_outputs()] == ["action", "outputs", *(f"{n}.after" for n in states)]
    for step in range(3):
        obs = draw_observations(policy.recipe, 5, seed=100 + step)
        _, outputs, memory = policy.policy.forward(obs, memory)
        given = {"obs": obs.numpy()} | {name: tensor.numpy() for name, tensor in states.items()}
        found = session.run(None, given)
        np.testing.assert_allclose(found[1], outputs.numpy(), atol=1e-5, rtol=0)
        states = {name: torch.from_numpy(x) for name, x in zip(states, found[2:], strict=True)}


def test_a_missing_extra_is_named_with_the_command_that_installs_it(capsys, monkeypatch, runs, tmp_path):
    monkeypatch.setattr(formats, "find_spec", lambda name: None if name == "onnxruntime" else True)
    assert main(["export", str(runs / "mlp"), "--to", "onnx", "--out", str(tmp_path / "x.onnx")]) == 2
    assert 'pip install "lockstep-rl[onnx]"' in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------- pt2 and others


@pytest.mark.parametrize("kind", ["motion", "ddpg", "lstm"])
def test_a_pt2_file_needs_torch_alone(capsys, runs, tmp_path, kind):
    export(capsys, runs / kind, "pt2", tmp_path / "policy.pt2")
    with zipfile.ZipFile(tmp_path / "policy.pt2") as file:  # and it does not tell where lockstep is installed here
        assert not [name for name in file.namelist() if lockstep.__path__[0].encode() in file.read(name)]
    policy = lockstep.load(runs / kind)
    obs, memory = draw_observations(policy.recipe, 7, seed=9), policy.policy.initial_state(7)
    found = torch.export.load(tmp_path / "policy.pt2").module()(*([obs, memory] if memory else [obs]))
    assert largest_difference(found[0], policy.policy.forward(obs, memory)[0]) < 1e-6


def test_a_safetensors_file_has_the_weights_under_plain_names(capsys, runs, tmp_path):
    assert "the same to the last bit" in export(capsys, runs / "mlp", "safetensors", tmp_path / "p.safetensors")
    weights = load_file(tmp_path / "p.safetensors")
    layer = torch.nn.Linear(4, 64)
    layer.load_state_dict(
        {"weight": weights["net.encoder.layers.0.weight"], "bias": weights["net.encoder.layers.0.bias"]}
    )


def test_a_file_that_acts_otherwise_is_not_kept(capsys, monkeypatch, runs, tmp_path):
    whole = ExportablePolicy.forward

    def wrong(self, obs, memory=None):
        action, outputs, *rest = whole(self, obs, memory)
        return (action, outputs + 1e-3, *rest)

    monkeypatch.setattr(ExportablePolicy, "forward", wrong)
    assert main(["export", str(runs / "mlp"), "--to", "pt2", "--out", str(tmp_path / "policy.pt2")]) == 2
    assert "does not act as the policy does: outputs differ by 0.001" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_a_network_that_torch_cannot_trace_is_told_so(capsys, monkeypatch, runs, tmp_path):
    def branches(self, obs, memory=None):
        return (obs, obs) if obs.sum() > 0 else (obs, obs * 2)

    monkeypatch.setattr(ExportablePolicy, "forward", branches)
    assert main(["export", str(runs / "mlp"), "--to", "pt2", "--out", str(tmp_path / "policy.pt2")]) == 2
    told = capsys.readouterr().err
    assert "torch cannot make a graph of this network: " in told
    assert "Use --to safetensors." in told


@pytest.mark.parametrize(
    ("kind", "to", "told"),
    [
        ("lstm", "sb3", "PPO of Stable-Baselines3 has no memory"),
        ("ddpg", "sb3", "gym-ddpg is not PPO"),
        ("nowhere", "onnx", "is not a run directory"),
    ],
)
def test_what_has_no_such_form_is_said_in_words(capsys, runs, tmp_path, kind, to, told):
    assert main(["export", str(runs / kind), "--to", to, "--out", str(tmp_path / "x")]) == 2
    assert told in capsys.readouterr().err


def test_where_there_is_no_directory_nothing_is_written(capsys, runs, tmp_path):
    assert main(["export", str(runs / "mlp"), "--out", str(tmp_path / "no" / "x")]) == 2
    assert "mkdir -p" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------------------ sb3


@pytest.mark.parametrize("kind", ["mlp", "cnn", "motion"])
def test_a_file_for_sb3_is_tried_as_sb3_would_use_it(capsys, runs, tmp_path, kind):
    assert "the same to the last bit" in export(capsys, runs / kind, "sb3", tmp_path / "policy.zip")
    with zipfile.ZipFile(tmp_path / "policy.zip") as file:
        assert {"data", "policy.pth", "policy.optimizer.pth"} <= set(file.namelist())
        assert {"policy_class", "observation_space", "action_space"} <= set(json.loads(file.read("data")))


def test_a_pickle_written_by_hand_is_one():
    import pickle

    value = {
        "a": [1, -2, 2.5, True, None, "é"],
        "b": (PickleReduce(PickleGlobal("numpy", "dtype"), ("uint8",)), PickleGlobal("math", "sqrt")),
    }
    read = pickle.loads(pickled(value))
    assert read["a"] == [1, -2, 2.5, True, None, "é"]
    assert read["b"][0] == np.dtype("uint8")
    assert read["b"][1](9) == 3
    with pytest.raises(TypeError, match="set has no form"):
        pickled({1, 2})


# --------------------------------------------------------------------------------------------------------------- import


def bring(capsys, place, file, *words):
    code = main(["import", str(file), *words, f"run.runs_dir={place}", "run.name=brought"])
    return code, capsys.readouterr()


def same_actions(one, other, count=16):
    here, there = lockstep.load(one), lockstep.load(other)
    obs = draw_observations(here.recipe, count, seed=3)
    np.testing.assert_array_equal(here.act(obs), there.act(obs))


@pytest.mark.parametrize("kind", ["lstm", "ddpg", "motion"])
def test_what_was_exported_comes_back_as_a_run_without_being_told_its_recipe(capsys, runs, tmp_path, kind):
    export(capsys, runs / kind, "safetensors", tmp_path / "p.safetensors")
    code, told = bring(capsys, tmp_path, tmp_path / "p.safetensors")
    assert code == 0, told.err
    assert f"lockstep eval {tmp_path / 'brought'}" in told.out
    same_actions(runs / kind, tmp_path / "brought")


@pytest.mark.parametrize("prefix", ["", "module.", "module._orig_mod."])
def test_a_state_dict_comes_in_whatever_wrapped_it(capsys, runs, tmp_path, prefix):
    state = lockstep.load(runs / "mlp").policy.net.state_dict()
    torch.save({f"{prefix}{name}": tensor for name, tensor in state.items()}, tmp_path / "model.pt")
    code, told = bring(capsys, tmp_path, tmp_path / "model.pt", "--recipe", "gym-ppo")
    assert code == 0, told.err
    same_actions(runs / "mlp", tmp_path / "brought")


def test_an_sb3_file_comes_in_with_the_size_of_its_network(capsys, runs, tmp_path):
    export(capsys, runs / "mlp", "sb3", tmp_path / "policy.zip")
    code, told = bring(
        capsys, tmp_path, tmp_path / "policy.zip", "--recipe", "gym-ppo", "--algo.encoder.hidden-sizes", "8"
    )
    assert (code, "does not fit" in told.err) == (2, True)
    code, told = bring(capsys, tmp_path, tmp_path / "policy.zip", "--recipe", "gym-ppo")
    assert code == 0, told.err
    same_actions(runs / "mlp", tmp_path / "brought")


def test_only_a_prefix_that_all_names_have_is_taken_off():
    assert set(unwrapped({"module.a": 1, "module.b": 2})) == {"a", "b"}
    assert set(unwrapped({"module.a": 1, "b": 2})) == {"module.a", "b"}


class Evil:
    """Runs code when it is unpickled."""

    def __reduce__(self):
        return print, ("hunter2",)


def test_a_file_that_would_run_code_is_refused_and_runs_none(capsys, tmp_path):
    torch.save({"net.weight": Evil()}, tmp_path / "model.pt")
    with zipfile.ZipFile(tmp_path / "model.zip", "w") as file:
        file.writestr("data", "{}")
        file.writestr("policy.pth", (tmp_path / "model.pt").read_bytes())
    for name in ("model.pt", "model.zip"):
        code, told = bring(capsys, tmp_path, tmp_path / name, "--recipe", "gym-ppo")
        assert code == 2
        assert "torch does not read it as weights alone" in told.err
        assert "hunter2" not in told.out


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("none.zip", None, "there is no file"),
        ("torn.zip", b"PK", "is no file of Stable-Baselines3's"),
        ("torn.safetensors", b"xx", "holds no weights that can be read"),
        ("torn.pt", b"xx", "holds no weights that can be read"),
    ],
)
def test_files_that_are_none_are_refused_in_words(capsys, tmp_path, name, content, told):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    code, ended = bring(capsys, tmp_path, tmp_path / name, "--recipe", "gym-ppo")
    assert code == 2
    assert told in ended.err


def test_weights_that_do_not_say_what_they_are_for_need_a_recipe(capsys, tmp_path):
    torch.save({"weight": torch.zeros(2)}, tmp_path / "model.pt")
    assert "Add --recipe" in bring(capsys, tmp_path, tmp_path / "model.pt")[1].err
    assert "it lacks net." in bring(capsys, tmp_path, tmp_path / "model.pt", "--recipe", "gym-ppo")[1].err
    assert not (tmp_path / "brought").exists()
