"""Damaged checkpoints and read errors, and how a command reports them."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lockstep.config import ConfigError

READ_ERROR = "The checkpoint may be intact; nothing was deleted. Check the permissions and the disk, then try again."


class CorruptCheckpointError(Exception):
    """Damaged checkpoint. The message names the file and what is wrong with it."""


@contextmanager
def user_facing_errors(path: Path) -> Iterator[None]:
    """Turn errors while loading a checkpoint into ConfigError.

    An undamaged checkpoint may still belong to another run or be malicious, so loading it can raise many errors.
    """
    try:
        yield
    except ConfigError:
        raise
    except CorruptCheckpointError as damage:
        raise ConfigError(
            f"{damage}.", "Start again: the run then resumes from the newest undamaged checkpoint."
        ) from None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error}.", READ_ERROR) from None
    except (LookupError, TypeError, ValueError, RuntimeError) as error:
        message = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        raise ConfigError(
            f"{path} cannot be loaded: {message[:1000]}", f"To resume from the previous checkpoint, remove {path}."
        ) from error
