"""Lockstep: distributed training in which the number of processes changes the speed, never the result."""

import importlib
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.algorithms.ddpg.agent import DDPGConfig as DDPGConfig
    from lockstep.algorithms.ppo import PPOConfig as PPOConfig
    from lockstep.algorithms.sac import SACConfig as SACConfig
    from lockstep.algorithms.supervised import SupervisedConfig as SupervisedConfig
    from lockstep.algorithms.tdmpc2.agent import TDMPC2Config as TDMPC2Config
    from lockstep.api import evaluate as evaluate
    from lockstep.api import fork as fork
    from lockstep.api import make as make
    from lockstep.api import prove as prove
    from lockstep.api import resume as resume
    from lockstep.api import train as train
    from lockstep.base import Algorithm as Algorithm
    from lockstep.base import Dataset as Dataset
    from lockstep.base import VecEnv as VecEnv
    from lockstep.config import Recipe as Recipe
    from lockstep.config import RunConfig as RunConfig
    from lockstep.data.graph_dataset import GraphDataset as GraphDataset
    from lockstep.data.table_dataset import TableConfig as TableConfig
    from lockstep.data.table_dataset import TableDataset as TableDataset
    from lockstep.experiment.experiment import Experiment as Experiment
    from lockstep.inference import load as load
    from lockstep.nn.networks import MLPConfig as MLPConfig
    from lockstep.nn.networks import NetworkConfig as NetworkConfig
    from lockstep.protocols import Loss as Loss
    from lockstep.run_results import Run as Run
    from lockstep.search import sweep as sweep
    from lockstep.sweeps.sweep import Sweep as Sweep
    from lockstep.tasks.gym.env import GymConfig as GymConfig
    from lockstep.tasks.pettingzoo.env import PettingZooConfig as PettingZooConfig
    from lockstep.tasks.simulators.env import SimulatorConfig as SimulatorConfig
    from lockstep.tasks.snake.env import SnakeConfig as SnakeConfig

__version__ = "0.2.0"

# Spinning OpenMP threads make torch up to 20 times slower on busy cores. OpenMP reads this variable when torch is
# imported. A value set by the user is kept.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

_MODULES = {
    "train": "api",
    "resume": "api",
    "fork": "api",
    "sweep": "search",
    "evaluate": "api",
    "prove": "api",
    "make": "api",
    "load": "inference",
    "Run": "run_results",
    "Experiment": "experiment.experiment",
    "Sweep": "sweeps.sweep",
    "Recipe": "config",
    "RunConfig": "config",
    "Algorithm": "base.algorithm",
    "VecEnv": "base.vec_env",
    "Dataset": "base.dataset",
    "GraphDataset": "data.graph_dataset",
    "TableDataset": "data.table_dataset",
    "TableConfig": "data.table_dataset",
    "Loss": "protocols",
    "PPOConfig": "algorithms.ppo",
    "DDPGConfig": "algorithms.ddpg.agent",
    "SACConfig": "algorithms.sac",
    "TDMPC2Config": "algorithms.tdmpc2.agent",
    "SupervisedConfig": "algorithms.supervised",
    "NetworkConfig": "nn.networks",
    "MLPConfig": "nn.networks",
    "SnakeConfig": "tasks.snake.env",
    "GymConfig": "tasks.gym.env",
    "SimulatorConfig": "tasks.simulators.env",
    "PettingZooConfig": "tasks.pettingzoo.env",
}
"""Module of each public name. They are imported on first use: `lockstep --help` must not import torch."""

__all__ = ["__version__", *_MODULES]


UNSUPPORTED_PLATFORM = (
    ""
    if sys.platform != "win32"
    else (
        "Lockstep does not run on Windows: it needs POSIX signals and file locks.\n"
        "Use it in WSL: run `wsl --install` in PowerShell, open Ubuntu, and install Lockstep there. GPUs work in WSL 2."
    )
)
"""Why Lockstep cannot run here, and what to do. Empty on Linux and macOS."""


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'lockstep' has no attribute '{name}'")
    if UNSUPPORTED_PLATFORM:
        raise ImportError(UNSUPPORTED_PLATFORM)
    return getattr(importlib.import_module(f"lockstep.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
