"""`lockstep check`: faults of a data set or a network of the user, and recipe files that cannot be imported."""

import pytest

from lockstep.cli import main

RECIPE = """
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.data import TensorDataset

from lockstep import Dataset, NetworkConfig, Recipe, RunConfig, SupervisedConfig


class Points(Dataset):
    target_type = "multiclass"
    num_classes = 3

    def setup(self):
        x = torch.linspace(0, 1, 60)[:, None]
        self.splits = dict.fromkeys(("train", "validation", "test"), TensorDataset(x, LABELS))


@dataclass(frozen=True, kw_only=True)
class LinearConfig(NetworkConfig):
    outputs: int = 3

    def build(self, data):
        return nn.Linear(1, self.outputs)


@dataclass(frozen=True, kw_only=True)
class PointsRecipe(Recipe):
    task: Points.Config = Points.Config()
    algo: SupervisedConfig = SupervisedConfig(batch_size=8, net=LinearConfig())
    run: RunConfig = RunConfig(total_samples=16)
"""


@pytest.fixture
def recipe_file(tmp_path):
    def write(labels="torch.arange(60) % 3", before=""):
        path = tmp_path / "points.py"
        path.write_text(before + RECIPE.replace("LABELS", labels))
        return str(path)

    return write


def test_check_of_valid_data_set_finds_nothing(recipe_file, capsys):
    assert main(["check", recipe_file()]) == 0
    assert "no violation found" in capsys.readouterr().out


def test_check_names_classes_outside_of_range(recipe_file, capsys):
    assert main(["check", recipe_file("torch.arange(60) % 4")]) == 1
    assert "classes from 0 to 3, but num_classes is 3" in capsys.readouterr().out


def test_check_reports_network_of_wrong_shape(recipe_file, capsys):
    assert main(["check", recipe_file(), "--algo.net.outputs", "4"]) == 1
    assert "returns [1, 4] for one example of Points, not [1, 3]" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("before", "message"),
    [
        ("\nimport sklaern\n", "line 2 cannot be imported: No module named 'sklaern'.\nInstall the package"),
        ("from lockstep import Datasets\n", "line 1 cannot be imported"),
        ("x = = 1\n", "line 1 cannot be imported: invalid syntax.\nFix this line."),
    ],
)
def test_recipe_file_that_cannot_be_imported_is_explained(recipe_file, before, message, capsys):
    assert main(["check", recipe_file(before=before)]) == 2
    assert message in capsys.readouterr().err
