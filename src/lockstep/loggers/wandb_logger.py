"""Weights & Biases, for runs that ask for it: what the log writes goes there, too, or into files to be sent later.

A curve has samples on its axis. A run that goes on after a kill goes on with the same run there; what it had logged
beyond its checkpoint stays there, and is logged a second time.
"""

import importlib.util
import os
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.config import ConfigError, Recipe, RunConfig, as_dict

_ID = "wandb/id"


def require_wandb(run: RunConfig) -> None:
    """Say so before anything starts, if W&B is asked for and not installed."""
    if run.wandb and importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            "--run.wandb needs wandb, which is not installed.",
            "pip install 'lockstep-rl[wandb]', or leave --run.wandb out.",
        )


class WandbLog:
    """One run at Weights & Biases. Nothing about it can end a run, or hold it up for longer than was allowed."""

    def __init__(self, path: Path, recipe: Recipe) -> None:
        self.notes: list[str] = []
        """What there is to say about it."""
        self._run: Any = None
        mode, why = os.environ.get("WANDB_MODE", recipe.run.wandb_mode), ""
        for attempt in dict.fromkeys((mode, "offline")):
            try:
                self._run = _begin(path, recipe, attempt)
                break
            except Exception as error:  # whatever it is, training does not depend on it
                why = why or (str(error).splitlines() or [type(error).__name__])[0]
        if self._run is None:
            self.notes.append(f"W&B cannot be used ({why}).")
        elif self._run.offline and mode != "disabled":
            words = f"W&B cannot be used ({why}), so this run is written" if why else "W&B: written"
            self.notes.append(f"{words} to {Path(self._run.dir).parent}; `wandb sync` sends it.")
        elif self._run.url:
            self.notes.append(f"W&B: {self._run.url}")

    def put(self, samples: int, values: dict[str, float]) -> None:
        with suppress(Exception):
            self._run.log({"samples": samples} | values)

    def close(self) -> None:
        with suppress(Exception):
            self._run.finish()


def _begin(path: Path, recipe: Recipe, mode: Any) -> Any:
    """Open the run there, or in files here; never by asking a person for a key."""
    # Its reporter of its own errors would hold up the end of a run for ten seconds where there is no network.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    wandb.teardown()  # of an attempt that failed, which still holds the run's id
    settings = recipe.run
    seconds = settings.wandb_timeout
    bounds = wandb.Settings(init_timeout=seconds, finish_timeout=seconds, silent=True, console="off")
    wandb.setup(settings=bounds)
    if mode == "online" and not wandb.login(prompt=False, verify=False):
        raise PermissionError("nobody is logged in: `wandb login`, or WANDB_API_KEY")
    run = wandb.init(
        project=settings.wandb_project,
        entity=settings.wandb_entity or None,
        name=path.name,
        id=_id_of(path),
        dir=path,
        mode=mode,
        resume="allow" if mode == "online" else None,
        config=as_dict(recipe),
        settings=bounds,
    )
    run.define_metric("*", step_metric="samples")
    return run


def _id_of(path: Path) -> str:
    """The name of this run at W&B: one for each run directory, whoever goes on with it."""
    place = path / _ID
    place.parent.mkdir(exist_ok=True)
    with suppress(FileExistsError), place.open("x") as file:
        file.write(uuid.uuid4().hex[:12])
    return place.read_text()[:64]
