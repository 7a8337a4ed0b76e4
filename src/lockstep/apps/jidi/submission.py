"""Write a submission: one file with the controller, what it needs of the rules and features, and the network."""

import base64
import json
import os
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from lockstep.apps.jidi.controller import ControllerNetwork, TeamController
from lockstep.apps.jidi.flat_file import flatten
from lockstep.apps.jidi.platform import Controller, play_game
from lockstep.apps.jidi.verification import verify
from lockstep.config import ConfigError
from lockstep.inference import LoadedPolicy
from lockstep.nn.encoders import MLP
from lockstep.nn.q_networks import Actor
from lockstep.tasks.team_snakes.env import TeamSnakesConfig
from lockstep.tasks.team_snakes.opponents import name_of

COPIED = (
    "tasks/team_snakes/rules.py",
    "tasks/team_snakes/opponents.py",
    "tasks/team_snakes/survival.py",
    "tasks/team_snakes/features.py",
    "apps/jidi/controller.py",
)
_DOCSTRING = "A team trained with Lockstep. The platform calls my_controller. It needs Python 3.7 or newer, and numpy."
_ENTRY = '''class PlainGame:
    """Game state. Python reads attributes faster than the fields of a record."""


def new_game():
    game = PlainGame()
    for name in FIELDS:
        kind, shape = FIELDS[name]
        setattr(game, name, np.zeros(shape, kind))
    return game


_SIZES = {sizes}
_NETWORK = """
{network}
"""
_TEAM = TeamController(unpack_network(_SIZES, base64.b64decode(_NETWORK), tanh={tanh}, egocentric={egocentric}))


def my_controller(observation, action_space, is_act_continuous=False):
    """Return the direction of one snake as a nested one-hot list: up, down, left, right."""
    return _TEAM.choose(observation)
'''


def write_submission(policy: LoadedPolicy, path: Path, games: int) -> int:
    """Write a submission and verify in whole games that its actions are those of the policy.

    Returns:
        The number of decisions that were compared.

    Raises:
        ConfigError: The file exists, the policy cannot be a submission, or an action differs. Nothing is written then.
    """
    if path.exists():
        raise ConfigError(f"{path} exists.", "Choose another file with --out, or remove it.")
    text = submission_text(network_of(policy))
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.partial.py")
    try:
        partial.write_text(text)
        compared = verify(policy, partial, games)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
    return compared


def submission_text(network: ControllerNetwork) -> str:
    """Return the Python source of a submission."""
    layers = [part for layer in zip(network.weights, network.biases, strict=True) for part in layer]
    values = b"".join(part.astype("<f4").tobytes() for part in layers)
    entry = _ENTRY.format(
        sizes=[network.weights[0].shape[1], *(len(bias) for bias in network.biases)],
        network="\n".join(textwrap.wrap(base64.b64encode(values).decode(), 116)),
        tanh=network.tanh,
        egocentric=network.egocentric,
    )
    package = Path(__file__).parents[2]
    return flatten([package / name for name in COPIED], entry, _DOCSTRING)


def write_replay(policy: LoadedPolicy, path: Path, seed: int) -> None:
    """Write a replay of a game between a team and its evaluation opponent, for the viewer of the platform."""
    team, level = TeamController(network_of(policy)), policy.recipe.task.opponent_level
    teams: list[Controller | int] = [lambda observation, *_: team.choose(observation), level]
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
    weights: list[np.ndarray[Any, Any]] = [layer.weight.detach().cpu().numpy() for layer in layers]
    biases: list[np.ndarray[Any, Any]] = [layer.bias.detach().cpu().numpy() for layer in layers]
    tanh = any(isinstance(layer, nn.Tanh) for layer in actor.encoder.layers)
    return ControllerNetwork(weights, biases, tanh, task.observation == "egocentric")
