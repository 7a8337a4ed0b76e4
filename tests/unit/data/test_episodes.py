"""Data sets of episodes: sequences, padding, tasks, and independence of the processes."""

import json

import numpy as np
import pytest
import torch

from lockstep.config import ConfigError
from lockstep.data.episodes import INDEX, EpisodeData, EpisodeWriter, read_index
from lockstep.lanes import Lanes

CPU = torch.device("cpu")


def chunk(lengths, task, features=2, actions=1, start=0):
    """Episodes whose values say their number and step: obs 100 e + t, action t / 100, reward e."""
    longest, count = max(lengths), len(lengths)
    number, step = np.arange(start, start + count)[:, None], np.arange(longest + 1)[None]
    obs = np.repeat((100.0 * number + step)[:, :, None], features, 2).astype(np.float32)
    return {
        "obs": obs,
        "action": np.repeat((step[:, :-1, None] / 100).repeat(count, 0), actions, 2).astype(np.float32),
        "reward": np.repeat(number, longest, 1).astype(np.float32),
        "task": np.array(task, np.int32),
        "length": np.array(lengths, np.int32),
        "terminated": np.array([n % 2 == 0 for n in range(count)]),
    }


def write(path, *chunks, tasks=("a", "b")):
    writer = EpisodeWriter(path, tasks)
    for each in chunks:
        writer.add(each)
    writer.close()
    return str(path)


def opened(paths, tasks=("a", "b"), features=2, actions=1, steps=3, local=range(4)):
    return EpisodeData(paths, tasks, (features,), actions, steps, Lanes(4, local, 7), "offline", CPU)


def test_slices_are_consecutive_steps_of_one_episode(tmp_path):
    data = opened([write(tmp_path / "d", chunk([5, 3, 2, 9], [0, 1, 0, 1]), chunk([4], [0], start=50))])
    batch = data.slices(3, 64)
    obs, tasks = batch["obs"]["obs"], batch["obs"]["task"]
    assert obs.shape == (256, 4, 2)
    assert (obs[:, 1:] - obs[:, :-1] == 1).all()
    episode, step = (obs[:, 0, 0] / 100).floor(), obs[:, 0, 0] % 100
    assert torch.equal(batch["reward"], episode.unsqueeze(1).expand(-1, 3))
    torch.testing.assert_close(batch["action"][:, :, 0] * 100, step.unsqueeze(1) + torch.arange(3))
    assert set(episode.tolist()) == {0, 1, 3, 50}  # the third has two steps, fewer than a sequence
    lengths = {0: 5, 1: 3, 3: 9, 50: 4}
    for n, t, ended in zip(episode.tolist(), step.tolist(), batch["terminated"][:, -1].tolist(), strict=True):
        assert t + 3 <= lengths[n]
        assert ended == (t + 3 == lengths[n] and n in (0, 50))
    assert not batch["terminated"][:, :-1].any()
    assert torch.equal(tasks[:, 0], torch.tensor([{0: 0, 1: 1, 3: 1, 50: 0}[n] for n in episode.tolist()]))
    assert batch["whole"].all()


def test_slices_of_valid_starts_are_equally_likely(tmp_path):
    data = opened([write(tmp_path / "d", chunk([5, 3], [0, 0]))])
    found = torch.cat([data.slices(n, 100)["obs"]["obs"][:, 0, 0] for n in range(20)])
    values, counts = found.unique(return_counts=True)
    assert values.tolist() == [0, 1, 2, 100]
    assert (counts / len(found)).tolist() == pytest.approx([0.25] * 4, abs=0.03)


def test_slices_of_a_lane_do_not_depend_on_its_process(tmp_path):
    path = write(tmp_path / "d", chunk([20] * 8, [0, 1] * 4))
    whole, part = opened([path]).slices(5, 8), opened([path], local=range(2, 3)).slices(5, 8)
    assert torch.equal(whole["obs"]["obs"][16:24], part["obs"]["obs"])
    assert not torch.equal(whole["obs"]["obs"], opened([path]).slices(6, 8)["obs"]["obs"])


def test_tasks_are_matched_by_name_and_vectors_padded(tmp_path):
    one = write(tmp_path / "one", chunk([6] * 3, [0, 1, 0], features=2), tasks=("b", "x"))
    two = write(tmp_path / "two", chunk([6] * 2, [0, 0], features=3, actions=2, start=70), tasks=("a",))
    batch = opened([one, two], features=4, actions=3).slices(0, 64)
    obs, task = batch["obs"]["obs"], batch["obs"]["task"][:, 0]
    episode = (obs[:, 0, 0] / 100).floor()
    assert set(episode.tolist()) == {0, 2, 70, 71}  # the task x is not one of the run
    assert torch.equal(task, (episode < 70).long())
    assert not obs[episode < 70][:, :, 2:].any()
    assert not obs[:, :, 3:].any()
    assert batch["action"].shape == (256, 3, 3)


def test_single_task_has_no_task_numbers(tmp_path):
    path = write(tmp_path / "d", chunk([6] * 2, [0, 1]))
    batch = opened([path], tasks=("b",)).slices(0, 4)
    assert (batch["obs"][:, 0, 0] >= 100).all()
    assert opened([path], tasks=()).slices(0, 4)["obs"].shape == (16, 4, 2)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tasks": ("c",)}, "has 0 sequences of 3 steps for the tasks c. Its tasks are a, b"),
        ({"steps": 7}, "has 0 sequences of 7 steps"),
        ({"features": 1}, "has observations (2,) and 1 action features"),
    ],
)
def test_data_that_does_not_fit_is_rejected(tmp_path, settings, words):
    path = write(tmp_path / "d", chunk([6] * 2, [0, 1]))
    with pytest.raises(ConfigError) as error:
        opened([path], **settings)
    assert words in str(error.value)


def test_invalid_index_and_chunks_are_rejected(tmp_path):
    with pytest.raises(ConfigError, match="there is no data set"):
        read_index(tmp_path)
    path = write(tmp_path / "d", chunk([6], [0]))
    index = json.loads((tmp_path / "d" / INDEX).read_text())
    for wrong in ({"version": 9}, {"chunks": ["../x"]}, {"tasks": 3}):
        (tmp_path / "d" / INDEX).write_text(json.dumps(index | wrong))
        with pytest.raises(ConfigError):
            read_index(path)
    (tmp_path / "d" / INDEX).write_text(json.dumps(index))
    np.save(tmp_path / "d" / "00000.obs.npy", np.array([{}], dtype=object), allow_pickle=True)
    with pytest.raises(ConfigError, match="cannot be read"):
        opened([path])


@pytest.mark.parametrize("name", ["obs", "action", "reward"])
def test_writer_refuses_nonfinite_values(tmp_path, name):
    broken = chunk([6], [0])
    broken[name][0, 0] = np.nan
    with pytest.raises(ValueError, match=f"{name} has non-finite values"):
        EpisodeWriter(tmp_path / "d", ["a"]).add(broken)


def test_digest_changes_with_any_value(tmp_path):
    digests = {opened([write(tmp_path / "0", chunk([6], [0]))]).digest}
    for number, name in enumerate(("obs", "action", "reward")):
        changed = chunk([6], [0])
        changed[name][0, 2] += 0.5
        digests.add(opened([write(tmp_path / str(number + 1), changed)]).digest)
    assert len(digests) == 4
