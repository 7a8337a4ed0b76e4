"""Write a submission: a directory with the controller, the files it needs, and the network as plain arrays."""

import hashlib
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from lockstep.algorithms.ddpg.networks import Actor
from lockstep.apps.jidi.controller import NETWORK, ControllerNetwork, as_one_hot, choose_direction, read_network
from lockstep.apps.jidi.platform import Controller, play_game
from lockstep.config import ConfigError
from lockstep.inference import LoadedPolicy
from lockstep.nn.encoders import MLP
from lockstep.tasks.team_snakes.env import TeamSnakesConfig
from lockstep.tasks.team_snakes.opponents import name_of

COPIED = (
    "apps/jidi/controller",
    "tasks/team_snakes/features",
    "tasks/team_snakes/opponents",
    "tasks/team_snakes/rules",
)
_PLAIN = '''"""Stubs for the compiler and random numbers: nothing is compiled or drawn in a submission."""

Integer = int


def njit(**settings):
    return lambda function: function


def random_below(*args):
    raise NotImplementedError("a controller draws no random numbers")
'''
_ENTRY = '''"""A team trained with Lockstep. The platform calls my_controller, which only needs numpy."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from PACKAGE.controller import my_controller

__all__ = ["my_controller"]
'''


def write_submission(policy: LoadedPolicy, directory: Path) -> None:
    """Write a submission and verify that its network matches the policy. Raise ConfigError if it cannot be written."""
    if directory.exists() and any(directory.iterdir()):
        raise ConfigError(f"{directory} is not empty.", "Choose a directory that does not exist yet.")
    network = network_of(policy)
    # Use a unique package name: two of our teams may play in one process, and each must load its own network.
    content = b"".join(part.tobytes() for part in (*network.weights, *network.biases))
    package = directory / f"lockstep_team_{hashlib.sha256(content).hexdigest()[:12]}"
    package.mkdir(parents=True)
    (directory / "submission.py").write_text(_ENTRY.replace("PACKAGE", package.name))
    (package / "__init__.py").write_text("")
    (package / "plain.py").write_text(_PLAIN)
    source = Path(__file__).parents[2]
    for name in COPIED:
        (package / f"{Path(name).name}.py").write_text(
            _rewrite_imports((source / f"{name}.py").read_text(), package.name)
        )
    arrays: dict[str, Any] = {f"weight{layer}": weight for layer, weight in enumerate(network.weights)}
    arrays |= {f"bias{layer}": bias for layer, bias in enumerate(network.biases)}
    np.savez(package / NETWORK, tanh=np.array(network.tanh), turned=np.array(network.turned), **arrays)
    _verify(policy, read_network(package / NETWORK))


def write_replay(policy: LoadedPolicy, path: Path, seed: int) -> None:
    """Write a replay of a game between a team and its evaluation opponent, for the viewer of the platform."""
    network, level = network_of(policy), policy.recipe.task.opponent_level
    teams: list[Controller | int] = [lambda observation, *_: as_one_hot(choose_direction(network, observation)), level]
    game = play_game(teams, ["lockstep", name_of(level)], seed)
    path.write_text(json.dumps(game))


def network_of(policy: LoadedPolicy) -> ControllerNetwork:
    """Return the network of a team. Raise ConfigError if a controller cannot compute its observations."""
    task, actor = policy.recipe.task, getattr(policy.policy, "actor", None)
    if not isinstance(task, TeamSnakesConfig) or not isinstance(actor, Actor):
        raise ConfigError("this run does not play team snakes.", "Use a run of team-ddpg.")
    if task.observation == "grid" or not isinstance(actor.encoder, MLP):
        raise ConfigError(
            "this team observes a grid, but a submission cannot run convolutions.",
            "Train with --task.observation egocentric or features.",
        )
    layers = [layer for layer in (*actor.encoder.layers, actor.head) if isinstance(layer, nn.Linear)]
    weights = [layer.weight.detach().numpy() for layer in layers]
    biases = [layer.bias.detach().numpy() for layer in layers]
    tanh = any(isinstance(layer, nn.Tanh) for layer in actor.encoder.layers)
    return ControllerNetwork(weights, biases, tanh, task.observation == "egocentric")


def _rewrite_imports(text: str, package: str) -> str:
    """Rewrite the imports of a lockstep module for the submission package, which has no compiler."""
    text = re.sub(r"from lockstep\.tasks\.kernels import", f"from {package}.plain import", text)
    text = text.replace("from numba import njit", f"from {package}.plain import njit")
    return re.sub(r"from lockstep\.(tasks\.team_snakes|apps\.jidi)\.", f"from {package}.", text)


@torch.no_grad()
def _verify(policy: Any, network: ControllerNetwork) -> None:
    """Check on random inputs that the network and the policy have the same outputs, up to rounding."""
    obs = torch.from_numpy(
        np.random.default_rng(0).uniform(-1, 1, (256, network.weights[0].shape[1])).astype("float32")
    )
    outputs = np.stack([network.outputs(row) for row in obs.numpy()])
    difference = float(np.abs(outputs - policy.policy.actor(obs).numpy()).max())
    if not difference < 1e-3:
        raise ConfigError(
            f"the outputs of the submission differ from those of the policy by {difference}.",
            "Report this as a bug in Lockstep.",
        )
