"""Export and import: exported files act like the policy, and files that do not fit are rejected."""

import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import lockstep
from helpers.tiny_recipes import ITERATION, tiny
from lockstep.cli import main
from lockstep.config import apply_overrides
from lockstep.pytree import named_leaves
from lockstep.registry import find_recipe
from lockstep.tools.export import formats
from lockstep.tools.export.exportable_policy import ExportablePolicy, draw_observations, largest_difference
from lockstep.tools.export.import_weights import unwrapped
from lockstep.tools.export.pickle_writer import PickleGlobal, PickleReduce, pickled
from lockstep.training_loop import train

SHORT = {"run.total_samples": 64, "run.eval_every": None, "run.save_every": 64}
REPLAY = {
    "algo.batch_size": 8,
    "algo.rollout_steps": 8,
    "algo.learning_starts": 8,
    "algo.buffer_size": 64,
    "algo.encoder.hidden_sizes": 16,
}
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
    "ddpg": ("gym-ddpg", REPLAY),
    "sac": ("gym-sac", REPLAY),
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
    assert "compared with the policy on 64 random observations" in told
    return told


# ----------------------------------------------------------------------------------------------------------------- onnx


@pytest.mark.parametrize("kind", ["cnn", "mlp", "lstm"])
def test_export_onnx_outputs_match_policy(capsys, runs, tmp_path, kind):
    """Compare without the exporter's own check: own inputs, recurrent state and batch size."""
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


def test_export_onnx_without_onnxruntime_exits_with_install_command(capsys, monkeypatch, runs, tmp_path):
    monkeypatch.setattr(formats, "find_spec", lambda name: None if name == "onnxruntime" else True)
    assert main(["export", str(runs / "mlp"), "--to", "onnx", "--out", str(tmp_path / "x.onnx")]) == 2
    assert 'pip install "lockstep-rl[onnx]"' in capsys.readouterr().err


# -------------------------------------------------------------------------------------------------- pt2 and safetensors


@pytest.mark.parametrize("kind", ["motion", "ddpg", "sac", "lstm"])
def test_export_pt2_loads_with_torch_only_and_matches_policy(capsys, runs, tmp_path, kind):
    export(capsys, runs / kind, "pt2", tmp_path / "policy.pt2")
    with zipfile.ZipFile(tmp_path / "policy.pt2") as file:  # no local installation path is included
        assert not [name for name in file.namelist() if lockstep.__path__[0].encode() in file.read(name)]
    policy = lockstep.load(runs / kind)
    obs, memory = draw_observations(policy.recipe, 7, seed=9), policy.policy.initial_state(7)
    found = torch.export.load(tmp_path / "policy.pt2").module()(*([obs, memory] if memory else [obs]))
    assert largest_difference(found[0], policy.policy.forward(obs, memory)[0]) < 1e-6


def test_export_safetensors_has_weights_under_plain_names(capsys, runs, tmp_path):
    assert "bit-identical" in export(capsys, runs / "mlp", "safetensors", tmp_path / "p.safetensors")
    weights = load_file(tmp_path / "p.safetensors")
    layer = torch.nn.Linear(4, 64)
    layer.load_state_dict(
        {"weight": weights["net.encoder.layers.0.weight"], "bias": weights["net.encoder.layers.0.bias"]}
    )


def test_export_file_that_differs_from_policy_is_deleted(capsys, monkeypatch, runs, tmp_path):
    whole = ExportablePolicy.forward

    def wrong(self, obs, memory=None):
        action, outputs, *rest = whole(self, obs, memory)
        return (action, outputs + 1e-3, *rest)

    monkeypatch.setattr(ExportablePolicy, "forward", wrong)
    assert main(["export", str(runs / "mlp"), "--to", "pt2", "--out", str(tmp_path / "policy.pt2")]) == 2
    assert "does not act like the policy: outputs differ by 0.001" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_export_untraceable_network_exits_with_advice(capsys, monkeypatch, runs, tmp_path):
    def branches(self, obs, memory=None):
        return (obs, obs) if obs.sum() > 0 else (obs, obs * 2)

    monkeypatch.setattr(ExportablePolicy, "forward", branches)
    assert main(["export", str(runs / "mlp"), "--to", "pt2", "--out", str(tmp_path / "policy.pt2")]) == 2
    told = capsys.readouterr().err
    assert "torch cannot export this network: " in told
    assert "Use --to safetensors." in told


@pytest.mark.parametrize(
    ("kind", "to", "told"),
    [
        ("lstm", "sb3", "this policy is recurrent, but PPO of Stable-Baselines3 is not"),
        ("ddpg", "sb3", "gym-ddpg is not PPO"),
        ("nowhere", "onnx", "is not a run directory"),
    ],
)
def test_export_unsupported_format_or_run_exits_with_message(capsys, runs, tmp_path, kind, to, told):
    assert main(["export", str(runs / kind), "--to", to, "--out", str(tmp_path / "x")]) == 2
    assert told in capsys.readouterr().err


OWN_POLICY = """
import torch

class Chooser(BASE):
    def __init__(self, net, actions):
        super().__init__()
        self.net, self.actions = net, actions

    def initial_state(self, count):
        return {}

    def act(self, obs, memory):
        return self.actions.mode(self.net(obs)[0]), memory

class A2C("""


@pytest.fixture(scope="module")
def own_file(tmp_path_factory):
    """A file of a user with an algorithm whose policy acts but cannot be exported; `run` beside it is a run of it."""
    file = tmp_path_factory.mktemp("own") / "own.py"
    source = (Path(__file__).parents[3] / "examples" / "a2c.py").read_text()
    source = source.replace("import Loss", "import Loss, Policy").replace("GreedyPolicy(self", "Chooser(self")
    file.write_text(source.replace("class A2C(", OWN_POLICY.replace("BASE", "Policy")))
    assert main(["train", str(file), "--smoke", f"run.runs_dir={file.parent}", "run.name=run"]) == 0
    return file


@pytest.fixture
def edited(own_file):
    """Function that replaces text in that file until the end of the test. It returns the run."""
    before = own_file.read_text()

    def edit(old, new):
        own_file.write_text(before.replace(old, new))
        return own_file.parent / "run"

    yield edit
    own_file.write_text(before)


@pytest.mark.parametrize("to", ["safetensors", "onnx", "pt2"])
@pytest.mark.parametrize("base", ["Policy", "object", "torch.nn.Module"])
def test_export_names_the_method_that_a_policy_lacks(capsys, edited, tmp_path, monkeypatch, base, to):
    run = edited("Chooser(Policy)", f"Chooser({base})")
    monkeypatch.setattr(formats, "draw_observations", None)  # the error comes before any computation
    assert main(["export", str(run), "--to", to, "--out", str(tmp_path / "x")]) == 2
    assert "Chooser has no forward(), which an export needs." in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_export_names_the_method_that_an_algorithm_lacks(capsys, edited, tmp_path):
    run = edited("def policy(", "def renamed(")
    assert main(["export", str(run), "--out", str(tmp_path / "x")]) == 2
    assert "A2C has no policy()." in capsys.readouterr().err


def test_export_to_missing_directory_exits_with_fix(capsys, runs, tmp_path):
    assert main(["export", str(runs / "mlp"), "--out", str(tmp_path / "no" / "x")]) == 2
    assert "mkdir -p" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------------------ sb3


@pytest.mark.parametrize("kind", ["mlp", "cnn", "motion"])
def test_export_sb3_is_verified_and_has_required_entries(capsys, runs, tmp_path, kind):
    assert "bit-identical" in export(capsys, runs / kind, "sb3", tmp_path / "policy.zip")
    with zipfile.ZipFile(tmp_path / "policy.zip") as file:
        assert {"data", "policy.pth", "policy.optimizer.pth"} <= set(file.namelist())
        assert {"policy_class", "observation_space", "action_space"} <= set(json.loads(file.read("data")))


def test_pickled_output_is_readable_by_pickle():
    import pickle

    value = {
        "a": [1, -2, 2.5, True, None, "é"],
        "b": (PickleReduce(PickleGlobal("numpy", "dtype"), ("uint8",)), PickleGlobal("math", "sqrt")),
    }
    read = pickle.loads(pickled(value))
    assert read["a"] == [1, -2, 2.5, True, None, "é"]
    assert read["b"][0] == np.dtype("uint8")
    assert read["b"][1](9) == 3
    with pytest.raises(TypeError, match="set cannot be pickled here"):
        pickled({1, 2})


# --------------------------------------------------------------------------------------------------------------- import


def import_file(capsys, place, file, *words):
    code = main(["import", str(file), *words, f"run.runs_dir={place}", "run.name=brought"])
    return code, capsys.readouterr()


def same_actions(one, other, count=16):
    here, there = lockstep.load(one), lockstep.load(other)
    obs = draw_observations(here.recipe, count, seed=3)
    np.testing.assert_array_equal(here.act(obs), there.act(obs))


@pytest.mark.parametrize("kind", ["lstm", "ddpg", "sac", "motion"])
def test_import_of_exported_safetensors_needs_no_recipe(capsys, runs, tmp_path, kind):
    export(capsys, runs / kind, "safetensors", tmp_path / "p.safetensors")
    code, told = import_file(capsys, tmp_path, tmp_path / "p.safetensors")
    assert code == 0, told.err
    assert f"lockstep eval {tmp_path / 'brought'}" in told.out
    same_actions(runs / kind, tmp_path / "brought")


@pytest.mark.parametrize("prefix", ["", "module.", "module._orig_mod."])
def test_import_state_dict_accepts_wrapper_prefixes(capsys, runs, tmp_path, prefix):
    state = lockstep.load(runs / "mlp").policy.net.state_dict()
    torch.save({f"{prefix}{name}": tensor for name, tensor in state.items()}, tmp_path / "model.pt")
    code, told = import_file(capsys, tmp_path, tmp_path / "model.pt", "--recipe", "gym-ppo")
    assert code == 0, told.err
    same_actions(runs / "mlp", tmp_path / "brought")


def test_import_sb3_file_uses_its_network_size(capsys, runs, tmp_path):
    export(capsys, runs / "mlp", "sb3", tmp_path / "policy.zip")
    code, told = import_file(
        capsys, tmp_path, tmp_path / "policy.zip", "--recipe", "gym-ppo", "--algo.encoder.hidden-sizes", "8"
    )
    assert (code, "does not fit" in told.err) == (2, True)
    code, told = import_file(capsys, tmp_path, tmp_path / "policy.zip", "--recipe", "gym-ppo")
    assert code == 0, told.err
    same_actions(runs / "mlp", tmp_path / "brought")


def test_unwrapped_removes_only_a_common_prefix():
    assert set(unwrapped({"module.a": 1, "module.b": 2})) == {"a", "b"}
    assert set(unwrapped({"module.a": 1, "b": 2})) == {"module.a", "b"}


class Evil:
    """Runs code when it is unpickled."""

    def __reduce__(self):
        return print, ("hunter2",)


def test_import_pickle_with_code_is_rejected_without_running_it(capsys, tmp_path):
    torch.save({"net.weight": Evil()}, tmp_path / "model.pt")
    with zipfile.ZipFile(tmp_path / "model.zip", "w") as file:
        file.writestr("data", "{}")
        file.writestr("policy.pth", (tmp_path / "model.pt").read_bytes())
    for name in ("model.pt", "model.zip"):
        code, told = import_file(capsys, tmp_path, tmp_path / name, "--recipe", "gym-ppo")
        assert code == 2
        assert "torch cannot load it with weights_only=True" in told.err
        assert "hunter2" not in told.out


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("none.zip", None, "there is no file"),
        ("torn.zip", b"PK", "is not a file of Stable-Baselines3"),
        ("torn.safetensors", b"xx", "has no readable weights"),
        ("torn.pt", b"xx", "has no readable weights"),
    ],
)
def test_import_unreadable_file_exits_with_message(capsys, tmp_path, name, content, told):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    code, ended = import_file(capsys, tmp_path, tmp_path / name, "--recipe", "gym-ppo")
    assert code == 2
    assert told in ended.err


def test_import_weights_without_recipe_exits_with_fix(capsys, tmp_path):
    torch.save({"weight": torch.zeros(2)}, tmp_path / "model.pt")
    assert "Add --recipe" in import_file(capsys, tmp_path, tmp_path / "model.pt")[1].err
    assert "it lacks net." in import_file(capsys, tmp_path, tmp_path / "model.pt", "--recipe", "gym-ppo")[1].err
    assert not (tmp_path / "brought").exists()
