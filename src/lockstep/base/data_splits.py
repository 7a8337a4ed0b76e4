"""Parts of the data that a task plays on. Optional: most tasks have no data."""

from typing import Any

from lockstep.protocols import Split


class DataSplits:
    """Part of the settings of a task that has training, validation and test data."""

    def with_split(self, split: Split) -> Any:
        """Return settings whose episodes use a part of the data. By default, all parts are equal.

        Evaluations during training use the validation part, and `eval` and `play` the test part.
        """
        return self

    def describe_data(self) -> list[dict[str, Any]]:
        """Return symbol, part, first, last and bars of each file that episodes use, for `eval` and `play`."""
        return []
