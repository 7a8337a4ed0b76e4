"""Damaged checkpoints and read errors, and how a command reports them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.config import ConfigError

READ_ERROR = "That is no damage, and nothing was deleted. Check the permissions and the disk, then try again."


class CorruptCheckpointError(Exception):
    """A checkpoint that must not be used: which file, and what is wrong with it."""


@contextmanager
def user_facing_errors(path: Path) -> Iterator[None]:
    """While a checkpoint is put to use: it may be whole and still be none of this run's, or made to do harm."""
    try:
        yield
    except ConfigError:
        raise
    except CorruptCheckpointError as damage:
        raise ConfigError(
            f"{damage}.", "Start again: an older checkpoint is used where the newest is damaged."
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}.", READ_ERROR) from None
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        words = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"{path} cannot be used here: {words[:1000]}", _REMOVE.format(path)) from error


_REMOVE = "To go on from the checkpoint before it, remove {}."
