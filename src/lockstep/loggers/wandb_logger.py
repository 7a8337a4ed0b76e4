"""Optional Weights & Biases logger: sends the metrics of a run, or writes them to files for `wandb sync`.

Curves have samples on their x-axis. A resumed run continues the same W&B run. Entries that it had logged after its
checkpoint stay there and are logged a second time.
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
    """Raise ConfigError before the run starts if W&B is requested but not installed."""
    if run.wandb and importlib.util.find_spec("wandb") is None:
        raise ConfigError(
            "--run.wandb needs wandb, which is not installed.",
            "pip install 'lockstep-rl[wandb]', or remove --run.wandb.",
        )


class WandbLog:
    """One run at Weights & Biases. Errors do not end the run, and `run.wandb_timeout` limits delays."""

    def __init__(self, path: Path, recipe: Recipe) -> None:
        self.notes: list[str] = []
        """Messages for the user."""
        self._run: Any = None
        mode, reason = os.environ.get("WANDB_MODE", recipe.run.wandb_mode), ""
        for attempt in dict.fromkeys((mode, "offline")):
            try:
                self._run = _start(path, recipe, attempt)
                break
            except Exception as error:  # no W&B error may end training
                reason = reason or (str(error).splitlines() or [type(error).__name__])[0]
        if self._run is None:
            self.notes.append(f"W&B cannot be used ({reason}).")
        elif self._run.offline and mode != "disabled":
            prefix = f"W&B cannot be used ({reason}), so this run is written" if reason else "W&B: written"
            self.notes.append(f"{prefix} to {Path(self._run.dir).parent}; `wandb sync` sends it.")
        elif self._run.url:
            self.notes.append(f"W&B: {self._run.url}")

    def put(self, samples: int, values: dict[str, float]) -> None:
        with suppress(Exception):
            self._run.log({"samples": samples} | values)

    def close(self) -> None:
        with suppress(Exception):
            self._run.finish()


def _start(path: Path, recipe: Recipe, mode: Any) -> Any:
    """Start the W&B run, online or in local files, without prompting for a key."""
    # Without network, W&B's error reporting would delay the end of a run by ten seconds.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    import wandb

    wandb.teardown()  # a failed attempt still holds the run's id
    config = recipe.run
    timeout = config.wandb_timeout
    wandb_settings = wandb.Settings(init_timeout=timeout, finish_timeout=timeout, silent=True, console="off")
    wandb.setup(settings=wandb_settings)
    if mode == "online" and not wandb.login(prompt=False, verify=False):
        raise PermissionError("not logged in: run `wandb login` or set WANDB_API_KEY")
    run = wandb.init(
        project=config.wandb_project,
        entity=config.wandb_entity or None,
        name=path.name,
        id=_run_id(path),
        dir=path,
        mode=mode,
        resume="allow" if mode == "online" else None,
        config=as_dict(recipe),
        settings=wandb_settings,
    )
    run.define_metric("*", step_metric="samples")
    return run


def _run_id(path: Path) -> str:
    """Return the W&B id of this run. It is stored in the run directory, so that a resumed run keeps it."""
    file_path = path / _ID
    file_path.parent.mkdir(exist_ok=True)
    with suppress(FileExistsError), file_path.open("x") as file:
        file.write(uuid.uuid4().hex[:12])
    return file_path.read_text()[:64]
