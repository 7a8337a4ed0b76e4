"""Data sets: map-style data sets of torch as they are, targets of every type, default losses and metrics."""

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import Subset, TensorDataset, random_split

from lockstep.base import Dataset
from lockstep.config import ConfigError
from lockstep.rng import RandomStream
from lockstep.tasks.env_checker import check_env

X = RandomStream(0, "test.dataset").normal(0, 40, 3)


def data_set(train, **attributes):
    """Return a Dataset whose splits are all the same map-style data set."""

    class Mine(Dataset):
        def setup(self):
            self.splits = dict.fromkeys(("train", "validation", "test"), train)
            for name, value in attributes.items():
                setattr(self, name, value)

    return Mine(Mine.Config())


class Pairs(TorchDataset):
    """A map-style data set without batched access, of arrays and Python numbers."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return X[index].numpy().astype(np.float64), index % 3


class Sentences(TorchDataset):
    """Several named inputs and two targets."""

    def __len__(self):
        return 12

    def __getitem__(self, index):
        return {"ids": np.array([index, 1]), "mask": np.array([True, False])}, np.array([index, 2.0 * index])


def test_read_of_map_style_data_set_stacks_its_examples():
    data = data_set(Pairs(), target_type="multiclass", num_classes=3)
    batch = data.read("train", np.array([4, 2]))
    assert torch.equal(batch["inputs"], X[[4, 2]])
    assert torch.equal(batch["target"], torch.tensor([1, 2]))
    assert data.count("validation") == 12
    assert (data.target_shape, data.output_shape, data.num_outputs) == ((), (3,), 3)


def test_read_of_dict_inputs_keeps_names_and_integer_types():
    data = data_set(Sentences())
    batch = data.read("test", np.array([5, 1]))
    assert {name: x.dtype for name, x in batch["inputs"].items()} == {"ids": torch.int64, "mask": torch.bool}
    assert batch["target"].dtype == torch.float32
    assert (data.target_shape, data.output_shape) == ((2,), (2,))
    assert np.array_equal(data.targets("test")[3], [3.0, 6.0])


def test_read_of_subsets_of_tensors_matches_their_items():
    parts = random_split(TensorDataset(X, X.sum(1)), [30, 10], torch.Generator().manual_seed(0))
    assert isinstance(parts[0], Subset)
    data = data_set(parts[1])
    batch = data.read("train", np.array([9, 0]))
    assert torch.equal(batch["inputs"][1], parts[1][0][0])
    assert torch.equal(batch["target"][0], parts[1][9][1])


def test_read_of_several_inputs_names_them_by_position():
    data = data_set(TensorDataset(X, X[:, 0], X.sum(1)))
    assert {k: list(x.shape) for k, x in data.example_inputs().items()} == {"input0": [1, 3], "input1": [1]}


@pytest.mark.parametrize(
    ("examples", "message"),
    [
        ([torch.zeros(3)] * 4, "a Tensor, not a tuple"),
        ([(torch.zeros(n), 0.0) for n in (1, 2, 3)], "cannot be stacked"),
        ([("words", 1.0)] * 4, "neither a tensor nor a dict"),
    ],
)
def test_examples_that_cannot_be_stacked_are_explained(examples, message):
    with pytest.raises(ConfigError, match=message):
        data_set(examples).read("train", np.array([0, 1]))


def test_missing_split_is_named():
    data = data_set(Pairs())
    data.splits = {"train": Pairs()}
    with pytest.raises(ConfigError, match="no test split; it has train"):
        data.count("test")


def test_iterable_data_set_is_rejected():
    with pytest.raises(ConfigError, match=r"is a generator, which is not map-style"):
        data_set(pair for pair in Pairs()).count("train")


def test_multiclass_without_num_classes_is_rejected():
    with pytest.raises(ConfigError, match="num_classes is 0"):
        _ = data_set(Pairs(), target_type="multiclass").output_shape


def test_default_losses_ignore_padding_and_match_torch():
    weight = torch.tensor([1.0, 1.0, 0.0])
    outputs, numbers = torch.tensor([0.5, -1.0, 9.0]), torch.tensor([3.0, 1.0, -5.0])
    loss = data_set(Pairs(), target_mean_std=(1.0, 2.0)).loss(outputs, numbers, weight)
    assert (loss.loss_sum, loss.num_samples) == (0.25 + 1.0, 2.0)
    labels = torch.tensor([1.0, 0.0, 1.0])
    loss = data_set(Pairs(), target_type="binary").loss(outputs, labels, weight)
    expected = torch.nn.functional.binary_cross_entropy_with_logits(outputs[:2], labels[:2], reduction="sum")
    torch.testing.assert_close(loss.loss_sum, expected)
    logits, classes = X[:3], torch.tensor([0, 2, 1])
    loss = data_set(Pairs(), target_type="multiclass", num_classes=3).loss(logits, classes, weight)
    torch.testing.assert_close(loss.loss_sum, torch.nn.functional.cross_entropy(logits[:2], classes[:2]) * 2)


def test_several_outputs_are_scaled_one_by_one():
    data = data_set(Sentences(), target_mean_std=(np.array([5.5, 11.0]), np.array([2.0, 4.0])))
    target = torch.tensor([[7.5, 15.0]])
    assert data.loss(torch.ones(1, 2), target, torch.ones(1)).loss_sum == 0.0
    assert torch.equal(data.predictions(torch.ones(1, 2)), target)


def test_metrics_of_segmentation_count_every_position():
    label = torch.arange(40 * 4).reshape(40, 2, 2) % 3
    data = data_set(TensorDataset(X, label), target_type="multiclass", num_classes=3, target_names=("a", "b", "c"))
    assert data.output_shape == (3, 2, 2)
    logits = torch.nn.functional.one_hot(label, 3).movedim(-1, 1).double().numpy() * 20
    found = data.compute_metrics("test", logits)
    assert (found["accuracy"], found["recall/c"], found["macro_f1"]) == (1.0, 1.0, 1.0)
    assert data.loss(torch.from_numpy(logits).float(), label, torch.ones(40)).loss_sum < 1e-6
    assert check_env(type(data).Config()) == []


def test_plot_of_each_target_type_writes_files(tmp_path):
    label = torch.arange(40) % 3
    cases = {
        "multiclass": (label, X.double().numpy(), {"confusion.png", "confusion.csv"}),
        "binary": ((label > 0).float(), X[:, 0].double().numpy(), {"confusion.png", "confusion.csv"}),
        "regression": (X[:, :2], X[:, :2].double().numpy(), {"predictions.png"}),
    }
    for kind, (target, predictions, names) in cases.items():
        data = data_set(TensorDataset(X, target), target_type=kind, num_classes=3)
        paths = data.plot("test", predictions, tmp_path / kind)
        assert {path.name for path in paths} == names == {path.name for path in (tmp_path / kind).iterdir()}
    table = np.loadtxt(tmp_path / "multiclass" / "confusion.csv", delimiter=",")
    assert table.sum(axis=1).tolist() == [14, 13, 13]
