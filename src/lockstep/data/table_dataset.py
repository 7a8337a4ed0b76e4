"""Data sets of tables: columns of a CSV or Parquet file as inputs and targets.

Shapes: R rows of the table, N examples, F numeric and C categorical columns, T targets.
"""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from lockstep.base import Dataset
from lockstep.config import ConfigError
from lockstep.data.table_files import ordered_categories, read_header, read_table, to_numbers, to_texts
from lockstep.protocols import Split, StateDict, TargetType
from lockstep.pytree import Tree, load_into
from lockstep.rng import RandomStream

SHARES = (0.8, 0.9)
"""Ends of the training and the validation split in a random order."""


@dataclass(frozen=True, kw_only=True)
class TableConfig(Dataset.Config):
    """Table, its columns and the prediction target."""

    path: str = ""
    """CSV or Parquet file."""
    numeric: tuple[str, ...] = ()
    """Input columns of numbers. They are standardized with statistics of the training rows; missing values are 0."""
    categorical: tuple[str, ...] = ()
    """Input columns of categories, texts or whole numbers. Values that are missing in the training rows share an id."""
    target: tuple[str, ...] = ()
    """Columns to predict."""
    target_type: TargetType = "regression"
    """regression: numbers. binary: columns of two values. multiclass: one column of categories."""
    split_column: str = ""
    """Column with the values train, validation and test. Empty: a random split of 80/10/10."""
    split_seed: int = 0
    """Seed of the random split."""

    def with_absolute_paths(self) -> "TableConfig":
        """Return these settings with an absolute path, so that workers and later commands find the file."""
        return dataclasses.replace(self, path=str(Path(self.path).expanduser().resolve()) if self.path else "")


class TableDataset(Dataset):
    """Rows of a table as examples. Inputs are `numeric` [N, F] float32 and `categories` [N, C] int64.

    `MLPConfig` embeds categories. Implement `read_columns` to take columns from elsewhere than a file.
    """

    Config = TableConfig
    config: TableConfig

    def setup(self) -> None:
        """Read the table, split its rows, and number and standardize its columns by the training rows."""
        config = self.config
        if not config.target or not (config.numeric or config.categorical):
            raise ConfigError(
                f"the table has {len(config.target)} target and {len(config.numeric) + len(config.categorical)} input "
                "columns.",
                "Name columns with task.target and with task.numeric or task.categorical.",
            )
        split_names = (config.split_column,) if config.split_column else ()
        names = list(dict.fromkeys((*config.numeric, *config.categorical, *config.target, *split_names)))
        columns = self.read_columns(names)
        self._rows = self._split_rows(columns, len(columns[names[0]]))
        self.target_type = config.target_type
        self._inputs = self._prepare_inputs(columns)
        self._values = self._prepare_targets(columns)

    def read_columns(self, names: Sequence[str]) -> Mapping[str, Sequence[Any]]:
        """Return columns of the table by name, all of the same length. By default, read them from `config.path`.

        Args:
            names: Columns that are needed.
        """
        path = self.config.path
        if not Path(path).is_file():
            raise ConfigError(f"table {path or '(none)'} does not exist.", "Set task.path to a CSV or Parquet file.")
        header = read_header(path)
        if missing := [name for name in names if name not in header]:
            raise ConfigError(
                f"{path} has no column {', '.join(missing)}; it has {', '.join(header)[:300] or 'none'}.",
                "Name existing columns in task.numeric, task.categorical and task.target.",
            )
        return read_table(path, names)

    def count(self, split: Split) -> int:
        """Return the number of rows of a split."""
        return len(self._rows[split])

    def read(self, split: Split, rows: np.ndarray) -> dict[str, Tree]:
        """Return rows of a split."""
        index = self._rows[split][rows]
        inputs: Tree = {name: torch.from_numpy(values[index]) for name, values in self._inputs.items()}
        return {"inputs": inputs, "target": torch.from_numpy(self._values[index])}

    def targets(self, split: Split) -> np.ndarray:
        """Return all targets of a split."""
        return np.asarray(self._values[self._rows[split]])

    def _split_rows(self, columns: Mapping[str, Sequence[Any]], count: int) -> dict[Split, np.ndarray]:
        splits: tuple[Split, ...] = get_args(Split)
        if self.config.split_column:
            texts = np.char.lower(to_texts(columns[self.config.split_column]))
            found = {split: np.flatnonzero(texts == split) for split in splits}
        else:
            order = RandomStream(self.config.split_seed, "table.split").permutation(0, count).numpy()
            first, second = (round(count * share) for share in SHARES)
            parts = (order[:first], order[first:second], order[second:])
            found = {split: np.sort(part) for split, part in zip(splits, parts, strict=True)}
        if empty := [split for split, rows in found.items() if not len(rows)]:
            raise ConfigError(
                f"the table has no row for {' and '.join(empty)}.",
                "Use more rows, or a task.split_column with the values train, validation and test.",
            )
        return found

    def _prepare_inputs(self, columns: Mapping[str, Sequence[Any]]) -> dict[str, np.ndarray]:
        config, trained = self.config, self._rows["train"]
        inputs: dict[str, np.ndarray] = {}
        if config.numeric:
            numbers = np.stack([to_numbers(columns[name], name) for name in config.numeric], axis=1)  # [R, F]
            known = np.isfinite(numbers[trained])
            counts = np.maximum(known.sum(axis=0), 1)
            mean = np.where(known, numbers[trained], 0.0).sum(axis=0) / counts
            variance = np.where(known, numbers[trained] - mean, 0.0)
            std = np.sqrt(np.square(variance).sum(axis=0) / counts)
            scaled = (numbers - mean) / np.where(std > 0, std, 1.0)
            inputs["numeric"] = np.where(np.isfinite(scaled), scaled, 0.0).astype(np.float32)
        if config.categorical:
            ids, size = [], 0  # every column has ids of its own, from `size`: the first is for unknown values
            for name in config.categorical:
                texts = to_texts(columns[name])
                numbered = {text: number for number, text in enumerate(ordered_categories(texts[trained]), 1)}
                ids.append([size + numbered.get(text, 0) for text in texts.tolist()])
                size += len(numbered) + 1
            inputs["categories"] = np.array(ids, dtype=np.int64).T.copy()  # [R, C]
            self.vocabularies = {"categories": size}
        return inputs

    def _prepare_targets(self, columns: Mapping[str, Sequence[Any]]) -> np.ndarray:
        """Return the targets [R] or [R, T], and describe them."""
        names, trained = self.config.target, self._rows["train"]
        used = np.concatenate(list(self._rows.values()))
        if self.target_type == "multiclass" and len(names) > 1:
            raise ConfigError(
                f"task.target names {len(names)} columns, but a multiclass target has one.", "Name one column."
            )
        if self.target_type == "regression":
            numbers = [to_numbers(columns[name], name) for name in names]
            for name, values in zip(names, numbers, strict=True):
                _refuse_missing(np.isnan(values), used, name)
            table = np.stack(numbers, axis=1)
            mean, std = table[trained].mean(axis=0), table[trained].std(axis=0)
            std = np.where(std > 0, std, 1.0)
            single = len(names) == 1
            self.target_mean_std = (float(mean[0]), float(std[0])) if single else (mean, std)
        else:
            labels = []
            for name in names:
                texts = to_texts(columns[name])
                _refuse_missing(texts == "", used, name)
                classes = self._classes(texts[trained], name)
                number_of = {text: number for number, text in enumerate(classes)}
                unknown = [text for text in texts[used].tolist() if text not in number_of]
                if unknown:
                    raise ConfigError(
                        f"column {name} has the value {unknown[0]!r}, which no training row has.",
                        "Use another split, or remove these rows.",
                    )
                labels.append([number_of.get(text, 0) for text in texts.tolist()])
                if self.target_type == "multiclass":
                    self.num_classes, self.target_names = len(classes), tuple(classes)
            table = np.array(labels).T
        if len(names) > 1:
            self.target_names = names
        targets = table[:, 0] if len(names) == 1 else table
        return np.ascontiguousarray(targets).astype(np.int64 if self.target_type == "multiclass" else np.float32)

    def _classes(self, texts: np.ndarray, name: str) -> list[str]:
        classes = ordered_categories(texts)
        if self.target_type == "binary" and len(classes) != 2:
            raise ConfigError(
                f"column {name} has {len(classes)} different values in training rows, but a binary target has two.",
                "Use task.target_type multiclass, or another column.",
            )
        return classes

    # -- state: only the checksum of the data --------------------------------------------------------------------------

    def shared_state(self) -> StateDict:
        """Return the checksum of the data, so that a run cannot be resumed with other data."""
        digest = hashlib.sha256()
        for values in (*self._inputs.values(), self._values, *self._rows.values()):
            digest.update(np.ascontiguousarray(values).tobytes())
        return {"digest": torch.frombuffer(bytearray(digest.digest()), dtype=torch.uint8)}

    def load_shared_state(self, state: StateDict) -> None:
        """Compare the checksum with that of the data which the run was started with."""
        saved = {"digest": torch.empty(32, dtype=torch.uint8)}
        load_into(saved, state, "the table")
        if not torch.equal(self.shared_state()["digest"], saved["digest"]):
            raise ConfigError(
                f"the table {self.config.path or type(self).__name__} is not the one that this run was started with.",
                "Give the same file with --task.path, or start a new run.",
            )


def _refuse_missing(missing: np.ndarray, used: np.ndarray, name: str) -> None:
    """Raise ConfigError if a target is missing in a row that is used."""
    rows = used[missing[used]]
    if len(rows):
        raise ConfigError(
            f"the target {name} is missing in {len(rows)} rows, the first of them data row {rows.min() + 1}.",
            "Remove these rows from the table.",
        )
