"""Benchmark suites as data: tasks with their recipes and budgets, and published scores with their sources."""

from dataclasses import dataclass
from typing import Literal

from lockstep.config import ConfigError

Protocol = Literal["training", "last", "best"]
"""How a score is measured on the runs of a task."""

PROTOCOLS: dict[Protocol, str] = {
    "training": "last 100 training episodes",
    "last": "last evaluation",
    "best": "best evaluation",
}
"""Name of each protocol in tables. The best evaluation is the one with the highest mean over the seeds."""

SOURCES = {
    "CleanRL": "CleanRL fe8d8a0, docs/benchmark: mean of the last 100 training episodes; ± over seeds",
    "RL Zoo": "rl-baselines3-zoo 22e3ff2, benchmark.md: the final policy of one run; ± over episodes",
    "RL Zoo curve": "DLR-RM/rl-trained-agents cd35bde, evaluations.npz: an evaluation during one run",
    "Tianshou": "tianshou f240205, examples/mujoco: best mean over seeds during training; ± over seeds",
    "TD3 authors": "sfujim/TD3 34770cc, learning_curves: evaluations of 10 episodes; ± over seeds",
    "pgx": "pgx 079b2d7, examples/minatar-ppo: mean over seeds, read from its plots (± 3 %)",
    "SLM-Lab": "SLM-Lab 96be393, docs/BENCHMARKS.md: moving average of training returns at the end",
}
"""Where published scores are from and how they were measured."""


@dataclass(frozen=True)
class PublishedScore:
    """Score of another implementation."""

    source: str
    """Key of SOURCES."""
    score: float
    spread: float | None
    """Standard deviation over seeds, or over episodes if there is one seed. None: not published."""
    protocol: Protocol
    steps: int
    seeds: int | None = None
    env: str = ""
    """Environment, if it is not that of the task."""


@dataclass(frozen=True)
class SuiteTask:
    """Task of a suite."""

    id: str
    """Id of the Gymnasium environment."""
    recipe: str
    steps: int
    """Global samples to train for."""
    settings: tuple[str, ...] = ()
    """Settings of the recipe as arguments of `lockstep train`, in addition to the preset for the environment."""
    published: tuple[PublishedScore, ...] = ()
    """The first one has the normalized score 1."""
    random_return: float | None = None
    """Mean return of random actions, which has the normalized score 0. None: not measured."""


@dataclass(frozen=True)
class Suite:
    """Tasks that are trained and reported together."""

    name: str
    title: str
    install: str
    """Argument of `pip install` for the environments."""
    packages: tuple[str, ...]
    """Distributions whose versions are recorded, in addition to torch and gymnasium."""
    tasks: tuple[SuiteTask, ...]

    def select(self, ids: tuple[str, ...]) -> tuple[SuiteTask, ...]:
        """Return the tasks with these ids; all tasks if there are none."""
        known = {task.id: task for task in self.tasks}
        for id in ids:
            if id not in known:
                raise ConfigError(f"the suite {self.name} has no task '{id}'.", f"Use some of {', '.join(known)}.")
        return tuple(known[id] for id in dict.fromkeys(ids)) or self.tasks


def find_suite(name: str) -> Suite:
    """Return the suite with that name."""
    if name not in SUITES:
        raise ConfigError(f"there is no suite '{name}'.", f"Use one of {', '.join(SUITES)}.")
    return SUITES[name]


_RANDOM_RETURNS = {
    "CartPole-v1": 22.2,
    "Acrobot-v1": -499.7,
    "Pendulum-v1": -1217.0,
    "MountainCar-v0": -200.0,
    "LunarLander-v3": -182.1,
    "HalfCheetah-v4": -294.4,
    "Walker2d-v4": 2.243,
    "Hopper-v4": 16.18,
}
"""Mean return of random actions in 100 episodes, from `python benchmarks/baselines.py --env ID`."""


def _task(
    id: str, recipe: str, steps: int, settings: tuple[str, ...], published: tuple[PublishedScore, ...]
) -> SuiteTask:
    return SuiteTask(id, recipe, steps, settings, published, _RANDOM_RETURNS.get(id))


def _evaluated(every: int, episodes: int) -> tuple[str, ...]:
    return f"run.eval_every={every}", f"run.eval_episodes={episodes}"


def _zoo(score: float, spread: float, steps: int, env: str = "") -> PublishedScore:
    return PublishedScore("RL Zoo", score, spread, "last", steps, 1, env)


def _zoo_curve(score: float, steps: int, env: str = "") -> PublishedScore:
    return PublishedScore("RL Zoo curve", score, None, "last", steps, 1, env)


def _cleanrl(score: float, spread: float, steps: int, env: str = "") -> PublishedScore:
    return PublishedScore("CleanRL", score, spread, "training", steps, 3, env)


def _tianshou(score: float, spread: float, env: str) -> PublishedScore:
    return PublishedScore("Tianshou", score, spread, "best", 1_000_000, 10, env)


# -- suites ------------------------------------------------------------------------------------------------------------

_CLASSIC = Suite(
    "classic",
    "PPO on classic control and LunarLander",
    "lockstep-rl[gym,box2d]",
    ("Box2D",),
    (
        _task(
            "CartPole-v1",
            "gym-ppo",
            100_000,
            _evaluated(20_000, 32),
            (_zoo(500.0, 0.0, 100_000), _cleanrl(490.04, 6.12, 500_000)),
        ),
        _task(
            "Acrobot-v1",
            "gym-ppo",
            1_000_000,
            _evaluated(100_000, 32),
            (_zoo(-73.506, 18.201, 1_000_000), _cleanrl(-86.36, 1.32, 500_000)),
        ),
        _task("Pendulum-v1", "gym-ppo", 100_000, _evaluated(20_000, 32), (_zoo(-172.225, 104.159, 100_000),)),
        _task(
            "MountainCar-v0",
            "gym-ppo",
            1_000_000,
            _evaluated(100_000, 32),
            (_zoo(-110.423, 19.473, 1_000_000), _cleanrl(-200.0, 0.0, 500_000)),
        ),
        _task(
            "LunarLander-v3",
            "gym-ppo",
            1_000_000,
            _evaluated(100_000, 32),
            (_zoo(242.119, 31.823, 1_000_000, "LunarLander-v2"),),
        ),
    ),
)


def _mujoco_ppo(id: str, *published: PublishedScore) -> SuiteTask:
    return _task(id, "gym-ppo", 1_000_000, _evaluated(50_000, 10), published)


_MUJOCO_PPO = Suite(
    "mujoco-ppo",
    "PPO on MuJoCo, 1M steps",
    "lockstep-rl[mujoco]",
    ("mujoco",),
    (
        _mujoco_ppo(
            "HalfCheetah-v4",
            _cleanrl(1442.64, 46.03, 1_000_000),
            _tianshou(5783.9, 1244.0, "HalfCheetah-v3"),
            _zoo(5819.099, 663.530, 1_000_000, "HalfCheetah-v3"),
        ),
        _mujoco_ppo(
            "Walker2d-v4",
            _cleanrl(2287.95, 571.78, 1_000_000),
            _tianshou(3588.5, 756.6, "Walker2d-v3"),
            _zoo(3478.798, 821.708, 1_000_000, "Walker2d-v3"),
        ),
        _mujoco_ppo(
            "Hopper-v4",
            _cleanrl(2382.86, 271.74, 1_000_000),
            _tianshou(2609.3, 700.8, "Hopper-v3"),
            _zoo(2410.435, 10.026, 1_000_000, "Hopper-v3"),
        ),
    ),
)


def _td3_authors(score: float, spread: float, env: str) -> PublishedScore:
    return PublishedScore("TD3 authors", score, spread, "last", 300_000, 10, env)


_MUJOCO_TD3 = Suite(
    "mujoco-td3",
    "TD3 on MuJoCo, 300k steps",
    "lockstep-rl[mujoco]",
    ("mujoco",),
    (
        _task(
            "HalfCheetah-v4",
            "gym-ddpg",
            300_000,
            _evaluated(25_000, 10),
            (_td3_authors(7697.0, 727.0, "HalfCheetah-v1"),),
        ),
        _task("Hopper-v4", "gym-ddpg", 300_000, _evaluated(25_000, 10), (_td3_authors(2410.0, 900.0, "Hopper-v1"),)),
    ),
)

_MUJOCO_SAC = Suite(
    "mujoco-sac",
    "SAC on MuJoCo, 300k steps",
    "lockstep-rl[mujoco]",
    ("mujoco",),
    (
        _task(
            "HalfCheetah-v4",
            "gym-sac",
            300_000,
            _evaluated(25_000, 10),
            (_zoo_curve(7197.06, 300_000, "HalfCheetah-v3"), _cleanrl(9634.89, 1423.73, 1_000_000)),
        ),
        _task(
            "Hopper-v4",
            "gym-sac",
            300_000,
            _evaluated(25_000, 10),
            (_zoo_curve(1540.41, 300_000, "Hopper-v3"), _cleanrl(2310.46, 342.82, 1_000_000)),
        ),
    ),
)


def _minatar(game: str, score: float) -> SuiteTask:
    published = PublishedScore("pgx", score, None, "last", 20_000_000, None, f"minatar-{game}")
    return _task(f"MinAtar/{game}-v1", "gym-ppo", 5_000_000, _evaluated(500_000, 32), (published,))


_MINATAR = Suite(
    "minatar",
    "PPO on MinAtar, 5M steps",
    "lockstep-rl[minatar]",
    ("MinAtar",),
    (
        _minatar("Asterix", 23.5),
        _minatar("Breakout", 50.0),
        _minatar("Freeway", 63.5),
        _minatar("Seaquest", 54.0),
        _minatar("SpaceInvaders", 149.0),
    ),
)


def _minigrid(id: str, score: float, spread: float) -> SuiteTask:
    return _task(id, "gym-ppo", 100_000, _evaluated(20_000, 32), (_zoo(score, spread, 100_000),))


_MINIGRID = Suite(
    "minigrid",
    "PPO on MiniGrid, 100k steps",
    "lockstep-rl[minigrid]",
    ("minigrid",),
    (
        _minigrid("MiniGrid-Empty-Random-5x5-v0", 0.968, 0.013),
        _minigrid("MiniGrid-DoorKey-5x5-v0", 0.964, 0.006),
        _minigrid("MiniGrid-Unlock-v0", 0.963, 0.016),
    ),
)

_ATARI = Suite(
    "atari",
    "PPO on Atari Pong without sticky actions, 2.5M steps",
    "lockstep-rl[atari]",
    ("ale-py",),
    (
        _task(
            "ALE/Pong-v5",
            "gym-ppo",
            2_500_000,
            # As in PongNoFrameskip-v4, which most libraries report.
            (*_evaluated(250_000, 8), "--task.env-kwargs", "repeat_action_probability", "0.0"),
            (
                _zoo_curve(20.3, 3_000_000, "PongNoFrameskip-v4"),
                _cleanrl(20.36, 0.20, 10_000_000, "PongNoFrameskip-v4"),
                PublishedScore("SLM-Lab", 16.69, None, "training", 10_000_000, 4, "with sticky actions"),
            ),
        ),
    ),
)

SUITES = {suite.name: suite for suite in (_CLASSIC, _MUJOCO_PPO, _MUJOCO_TD3, _MUJOCO_SAC, _MINATAR, _MINIGRID, _ATARI)}
"""Suites by name."""
