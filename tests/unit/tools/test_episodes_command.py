"""`lockstep episodes`: chunks in the authors' layout are read without unpickling, and replay buffers as episodes."""

import json
import os
import shutil
import sys
import types
import zipfile

import numpy as np
import pytest
import torch

import lockstep
from lockstep.checkpoint import format as form
from lockstep.checkpoint.lineage import find
from lockstep.cli import main
from lockstep.data.episodes import INDEX
from lockstep.tools.episodes.convert import read_chunk
from lockstep.tools.episodes.torch_archive import read_archive

pytest.importorskip("dm_control")

STEPS, FEATURES, ACTIONS = 7, 4, 2


class NewTensorDict:
    """Is pickled like a TensorDict: a call with the class and its state."""

    def __init__(self, tensors, batch):
        self.state = {"_tensordict": tensors, "_device": None, "_batch_size": torch.Size(batch), "_td_dim_names": None}

    def __reduce__(self):
        return sys.modules["tensordict._reductions"]._make_td, (type(self), self.state)


class OldTensorDict:
    """Is pickled like a TensorDict of 2023: an object with a state, whose tensors are in a subclass of dict."""

    def __init__(self, tensors, batch):
        self._tensordict = sys.modules["tensordict._td"]._StringOnlyDict(tensors)
        self._batch_size, self._is_locked = torch.Size(batch), False


class StringOnlyDict(dict):
    pass


def make_td(kind, state):
    raise AssertionError("nothing in a file may be called")


# A pickle stores the names of modules and classes.
for value, module, name in (
    (NewTensorDict, "tensordict._td", "TensorDict"),
    (OldTensorDict, "tensordict._td", "TensorDict"),
    (StringOnlyDict, "tensordict._td", "_StringOnlyDict"),
    (make_td, "tensordict._reductions", "_make_td"),
):
    value.__module__, value.__qualname__, value.__name__ = module, name, name


@pytest.fixture(params=["new", "old"])
def write_chunk(request, monkeypatch):
    """Return a function that saves tensors [N, T + 1, ...] in the authors' layout."""
    kind = NewTensorDict if request.param == "new" else OldTensorDict
    modules = {name: types.ModuleType(name) for name in ("tensordict", "tensordict._td", "tensordict._reductions")}
    modules["tensordict._td"].TensorDict = kind
    modules["tensordict._td"]._StringOnlyDict = StringOnlyDict
    modules["tensordict._reductions"]._make_td = make_td

    def write(path, tensors):
        with monkeypatch.context() as patch:
            for name, module in modules.items():
                patch.setitem(sys.modules, name, module)
            torch.save(kind(tensors, tensors["reward"].shape), path)

    return write


def tensors(count=3, seed=0, tasks=2):
    generator = torch.Generator().manual_seed(seed)
    action, reward = torch.randn(count, STEPS + 1, ACTIONS, generator=generator), torch.rand(count, STEPS + 1)
    action[:, 0], reward[:, 0] = torch.nan, torch.nan  # of the reset
    task = (torch.arange(count) % tasks).unsqueeze(1).expand(-1, STEPS + 1).clone()
    obs = torch.randn(count, STEPS + 1, FEATURES, generator=generator)
    return {"obs": obs, "action": action, "reward": reward, "task": task}


def test_chunk_of_the_authors_is_read_without_unpickling(tmp_path, write_chunk):
    values = tensors()
    write_chunk(tmp_path / "chunk_0.pt", values)
    assert "tensordict" not in sys.modules
    found = read_chunk(tmp_path / "chunk_0.pt")
    np.testing.assert_array_equal(found["obs"], values["obs"].numpy())
    np.testing.assert_array_equal(found["action"], values["action"][:, 1:].numpy())
    np.testing.assert_array_equal(found["reward"], values["reward"][:, 1:].numpy())
    assert found["task"].tolist() == [0, 1, 0]
    assert found["length"].tolist() == [STEPS] * 3
    assert not found["terminated"].any()


def test_archive_reads_views_of_a_shared_storage(tmp_path):
    base = torch.arange(24.0).view(2, 3, 4)
    torch.save({"a": base[:, 1:, ::2], "b": base.transpose(0, 2), "c": torch.tensor([True, False])}, tmp_path / "x.pt")
    found = read_archive(tmp_path / "x.pt", ("a", "b"))
    np.testing.assert_array_equal(found["a"], base[:, 1:, ::2].numpy())
    np.testing.assert_array_equal(found["b"], base.transpose(0, 2).numpy())
    assert found["c"].tolist() == [True, False]


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_code_in_a_chunk_is_not_executed(tmp_path):
    torch.save({"obs": torch.zeros(2), "other": Evil(tmp_path / "made")}, tmp_path / "x.pt")
    read_archive(tmp_path / "x.pt", ("obs",))
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("content", [b"", b"PK\x05\x06" + bytes(18), b"no zip at all"])
def test_file_without_tensors_exits_with_message(capsys, tmp_path, content):
    (tmp_path / "x.pt").write_bytes(content)
    assert main(["episodes", str(tmp_path / "x.pt"), "--out", str(tmp_path / "d"), "--tasks", "a"]) == 2
    assert "has no readable episodes" in capsys.readouterr().err
    assert not (tmp_path / "d").exists()


def test_tensor_beyond_its_storage_is_refused(tmp_path):
    torch.save({"obs": torch.arange(1000.0)}, tmp_path / "x.pt")
    with zipfile.ZipFile(tmp_path / "x.pt") as archive, zipfile.ZipFile(tmp_path / "y.pt", "w") as changed:
        for name in archive.namelist():
            data = archive.read(name)
            changed.writestr(name, data.replace(b"M\xe8\x03", b"M\xff\xff"))  # 1000 as a two-byte integer
    with pytest.raises(ValueError, match="larger than its data"):
        read_archive(tmp_path / "y.pt", ("obs",))


def test_tensor_that_repeats_values_beyond_the_file_is_refused(tmp_path):
    torch.save({"obs": torch.zeros(1).expand(10**9)}, tmp_path / "x.pt")
    with pytest.raises(ValueError, match="larger than its data"):
        read_archive(tmp_path / "x.pt", ("obs",))


def test_episodes_command_converts_chunks_with_named_tasks(capsys, tmp_path, write_chunk):
    for number in range(2):
        write_chunk(tmp_path / f"chunk_{number}.pt", tensors(seed=number))
    files = [str(tmp_path / f"chunk_{number}.pt") for number in range(2)]
    assert main(["episodes", *files, "--out", str(tmp_path / "d")]) == 2
    assert "Name the tasks in their order" in capsys.readouterr().err
    assert main(["episodes", *files, "--out", str(tmp_path / "d"), "--tasks", "walker-run,cup-catch"]) == 0
    index = json.loads((tmp_path / "d" / INDEX).read_text())
    assert (index["tasks"], index["episodes"], index["steps"]) == (["walker-run", "cup-catch"], 6, 6 * STEPS)
    assert main(["episodes", *files, "--out", str(tmp_path / "d"), "--tasks", "a"]) == 2
    assert "Give a new directory" in capsys.readouterr().err


# ----------------------------------------------------------------------------------------------------------------- runs


def train(path, *words):
    command = ["train", "dmc-tdmpc2", "--smoke", *words, f"run.runs_dir={path.parent}", f"run.name={path.name}"]
    assert main([*command, "run.device=cpu", "run.eval_every=none"]) == 0


def read(directory, name):
    return np.load(directory / f"00000.{name}.npy", allow_pickle=False)


def test_replay_buffer_of_a_run_becomes_episodes(capsys, tmp_path):
    train(tmp_path / "run")
    assert main(["episodes", str(tmp_path / "run"), "--out", str(tmp_path / "d")]) == 0
    out, index = tmp_path / "d", json.loads((tmp_path / "d" / INDEX).read_text())
    assert index["tasks"] == ["pendulum-swingup"]
    assert index["steps"] == 256  # all samples of the run fit the buffer
    assert set(read(out, "length").tolist()) == {10, 2}  # 32 steps of each environment, in episodes of 10
    # The first episode of lane 0, against the checkpoint
    checkpoints = tmp_path / "run" / "checkpoints"
    path = checkpoints / str(find(checkpoints)[0])
    state = form.read_lane(path, 0, form.read_manifest(path)["files"], form.read_values(path)["rows"])
    obs, after = state["algorithm.replay.obs"][:, 0].numpy(), state["algorithm.replay.next_obs"][:, 0].numpy()
    np.testing.assert_array_equal(read(out, "obs")[0], np.concatenate([obs[:10], after[9:10]]))
    np.testing.assert_array_equal(read(out, "action")[0], state["algorithm.replay.action"][:10, 0].numpy())


def test_runs_of_several_tasks_share_one_data_set(tmp_path):
    train(tmp_path / "one")
    train(tmp_path / "two", "task=cup-catch,pendulum-swingup")
    runs = [str(tmp_path / name) for name in ("one", "two")]
    assert main(["episodes", *runs, "--out", str(tmp_path / "d")]) == 0
    index = json.loads((tmp_path / "d" / INDEX).read_text())
    assert (index["tasks"], len(index["chunks"])) == (["pendulum-swingup", "cup-catch"], 2)
    assert set(np.load(tmp_path / "d" / "00001.task.npy").tolist()) == {0, 1}


def test_run_without_replay_exits_with_message(capsys, tmp_path):
    words = ["run.total_samples=2048", f"run.runs_dir={tmp_path}", "run.name=ppo", "run.eval_every=none"]
    assert main(["train", "gym-ppo", "--smoke", *words]) == 0
    assert main(["episodes", str(tmp_path / "ppo"), "--out", str(tmp_path / "d")]) == 2
    assert "it has no replay buffer" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------------------- training


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    place = tmp_path_factory.mktemp("offline")
    train(place / "source", "task=cup-catch,pendulum-swingup")
    assert main(["episodes", str(place / "source"), "--out", str(place / "data")]) == 0
    return place / "data"


OFFLINE = ["task=cup-catch,pendulum-swingup", "algo.offline.samples=128", "algo.updates_per_sample=0.125"]


def shared_state(path):
    checkpoints = path / "checkpoints"
    return form.read_shared(checkpoints / str(find(checkpoints)[0]))


def test_offline_samples_learn_without_environment_steps(tmp_path, data):
    words = [*OFFLINE, f"algo.offline.data={data}", "run.total_samples=128"]
    train(tmp_path / "run", *words)
    assert int(shared_state(tmp_path / "run")["algorithm.model_optimizer.updates"]) == 16
    assert main(["episodes", str(tmp_path / "run"), "--out", str(tmp_path / "d")]) == 2  # its replay buffer is empty


def test_online_training_continues_after_offline(tmp_path, data):
    words = [*OFFLINE, f"algo.offline.data={data}"]
    train(tmp_path / "run", *words)
    assert int(shared_state(tmp_path / "run")["algorithm.model_optimizer.updates"]) == 32
    assert main(["episodes", str(tmp_path / "run"), "--out", str(tmp_path / "d")]) == 0
    assert json.loads((tmp_path / "d" / INDEX).read_text())["steps"] == 128  # the second half of the samples


def test_another_run_starts_online_from_an_offline_run(tmp_path, data):
    train(tmp_path / "offline", *OFFLINE, f"algo.offline.data={data}", "run.total_samples=128")
    words = ["task=cup-catch,pendulum-swingup", "--init-from", str(tmp_path / "offline"), "algo.seed_policy=agent"]
    train(tmp_path / "online", *words, "run.total_samples=32", "algo.seed_samples=200")  # ends before its first update
    before, after = (shared_state(tmp_path / name) for name in ("offline", "online"))
    assert all(torch.equal(x, before[name]) for name, x in after.items() if name.startswith("algorithm.model."))


def test_resumed_run_refuses_changed_data(capsys, tmp_path, data):
    shutil.copytree(data, tmp_path / "data")
    words = [*OFFLINE, f"algo.offline.data={tmp_path / 'data'}"]
    train(tmp_path / "run", *words, "run.total_samples=64")
    index = json.loads((tmp_path / "data" / INDEX).read_text())
    (tmp_path / "data" / INDEX).write_text(json.dumps(index | {"digest": "0"}))
    assert main(["resume", str(tmp_path / "run"), "run.total_samples=128"]) != 0
    assert "has changed since the run started" in capsys.readouterr().err


def test_policy_is_loaded_without_the_data(tmp_path, data):
    shutil.copytree(data, tmp_path / "data")
    train(tmp_path / "run", *OFFLINE, f"algo.offline.data={tmp_path / 'data'}", "run.total_samples=64")
    shutil.rmtree(tmp_path / "data")
    policy = lockstep.load(tmp_path / "run")
    assert policy.act({"obs": np.zeros((2, 8), np.float32), "task": np.array([0, 1])}).shape == (2, 2)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["algo.offline.samples=64"], "and data for samples"),
        (["algo.offline.data=/nowhere", "algo.offline.samples=64"], "there is no data set of episodes at /nowhere"),
    ],
)
def test_invalid_offline_settings_are_rejected(capsys, words, told):
    assert main(["train", "dmc-tdmpc2", "--smoke", *words]) == 2
    assert told in capsys.readouterr().err
