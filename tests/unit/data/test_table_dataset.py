"""Tables: columns of CSV and Parquet files, statistics of training rows only, and every target type."""

import numpy as np
import pytest
import torch

from lockstep.config import ConfigError
from lockstep.data.table_dataset import TableConfig, TableDataset
from lockstep.nn.networks import MLPConfig, check_network
from lockstep.tasks.env_checker import check_env

HEADER = "area,rooms,city,heated,price,grade,part"
ROWS = [
    "10,1,Bern,yes,100,low,train",
    "20,2,Basel,no,200,mid,train",
    "30,,Bern,yes,300,high,train",
    "40,4,Basel,no,400,mid,train",
    "50,5,Chur,yes,500,low,validation",
    "60,6,Bern,no,600,mid,test",
]
INPUTS = {"numeric": ("area", "rooms"), "categorical": ("city",), "split_column": "part"}


@pytest.fixture
def table(tmp_path):
    path = tmp_path / "homes.csv"
    path.write_text("\n".join([HEADER, *ROWS]) + "\n")
    return str(path)


def build(**settings):
    return TableDataset(TableConfig(**(INPUTS | settings)))


def test_numeric_columns_are_standardized_by_training_rows(table):
    data = build(path=table, target=("price",))
    numeric = data.read("train", np.arange(4))["inputs"]["numeric"]
    torch.testing.assert_close(numeric.mean(0), torch.zeros(2), atol=1e-6, rtol=0)
    assert numeric[2, 1] == 0.0  # a missing number
    std = np.std([10, 20, 30, 40])
    assert data.read("test", np.array([0]))["inputs"]["numeric"][0, 0] == pytest.approx((60 - 25) / std)
    assert data.target_mean_std == (250.0, pytest.approx(np.std([100, 200, 300, 400])))
    assert data.targets("validation").tolist() == [500.0]


def test_categories_unknown_in_training_share_an_id(table):
    data = build(path=table, target=("price",), categorical=("city", "heated"))
    assert data.vocabularies == {"categories": 3 + 3}
    train = data.read("train", np.arange(4))["inputs"]["categories"]
    assert train.tolist() == [[2, 5], [1, 4], [2, 5], [1, 4]]
    assert data.read("validation", np.array([0]))["inputs"]["categories"].tolist() == [[0, 5]]  # Chur
    assert not check_network(MLPConfig().build(data), data, torch.device("cpu"))


def test_targets_of_each_type(table):
    several = build(path=table, target=("price", "area"), numeric=("rooms",))
    assert several.output_shape == (2,)
    assert several.target_names == ("price", "area")
    assert np.allclose(several.target_mean_std[0], [250, 25])
    label = build(path=table, target=("heated",), target_type="binary")
    assert label.targets("train").tolist() == [1, 0, 1, 0]
    assert label.targets("train").dtype == np.float32
    grade = build(path=table, target=("grade",), target_type="multiclass")
    assert (grade.target_names, grade.num_classes) == (("high", "low", "mid"), 3)
    assert grade.targets("train").tolist() == [1, 2, 0, 2]
    for data in (several, label, grade):
        assert check_env(data.config) == []


def test_parquet_equals_csv(table, tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow.csv"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.read_csv(table), tmp_path / "homes.parquet")
    one, other = (build(path=path, target=("price",)) for path in (table, str(tmp_path / "homes.parquet")))
    assert torch.equal(one.shared_state()["digest"], other.shared_state()["digest"])


def test_random_split_covers_every_row_once(tmp_path):
    path = tmp_path / "numbers.csv"
    path.write_text("x,y\n" + "\n".join(f"{n},{2 * n}" for n in range(100)))
    data = TableDataset(TableConfig(path=str(path), numeric=("x",), target=("y",)))
    parts = [data.targets(split) for split in ("train", "validation", "test")]
    assert [len(part) for part in parts] == [80, 10, 10]
    assert sorted(np.concatenate(parts).tolist()) == [2.0 * n for n in range(100)]
    other = TableDataset(TableConfig(path=str(path), numeric=("x",), target=("y",), split_seed=1))
    assert not np.array_equal(other.targets("test"), parts[2])


def test_resume_with_another_table_is_refused(table, tmp_path):
    saved = build(path=table, target=("price",)).shared_state()
    changed = tmp_path / "changed.csv"
    changed.write_text("\n".join([HEADER, *ROWS]).replace("400", "401"))
    build(path=table, target=("price",)).load_shared_state(saved)
    with pytest.raises(ConfigError, match="not the one that this run was started with"):
        build(path=str(changed), target=("price",)).load_shared_state(saved)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"target": ("cost",)}, "has no column cost; it has area, rooms"),
        ({"target": ()}, "0 target and 3 input columns"),
        ({"target": ("price",), "numeric": ("city",)}, "'Bern' in data row 1, which is not a number"),
        ({"target": ("rooms",)}, "target rooms is missing in 1 rows, the first of them data row 3"),
        ({"target": ("grade",), "target_type": "binary"}, "3 different values"),
        ({"target": ("city",), "target_type": "multiclass", "categorical": ("grade",)}, "'Chur', which no training"),
        ({"target": ("price",), "split_column": "heated"}, "no row for train and validation and test"),
        ({"target": ("price",), "path": "missing.csv"}, "missing.csv does not exist"),
    ],
)
def test_invalid_table_settings_are_explained(table, settings, message):
    with pytest.raises(ConfigError, match=message):
        build(**({"path": table} | settings))
