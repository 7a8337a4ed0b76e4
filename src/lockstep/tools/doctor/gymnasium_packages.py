"""Check the packages that families of Gymnasium environments need."""

from collections.abc import Iterator

from lockstep.tools.doctor.finding import CheckResult, ok, warning

FAMILIES = {
    "mujoco": ("MuJoCo", "Hopper-v5"),
    "box2d": ("Box2D", "LunarLander-v3"),
    "atari": ("Atari", "ALE/Pong-v5"),
    "minatar": ("MinAtar", "MinAtar/Breakout-v1"),
    "minigrid": ("MiniGrid", "MiniGrid-DoorKey-5x5-v0"),
}
"""Name and one environment of each family, by the extra that installs its packages."""


def check_gymnasium_packages() -> Iterator[CheckResult]:
    """Make and reset one environment of each family whose packages are installed."""
    import gymnasium

    from lockstep.tasks.gym.sync_envs import make

    for extra, (family, id) in FAMILIES.items():
        try:
            env = make(id, {})
            env.reset(seed=0)
            env.close()
        except (gymnasium.error.DependencyNotInstalled, ModuleNotFoundError):
            yield ok("gymnasium", f"no {family}: to train {id} and similar, pip install 'lockstep-rl[{extra}]'")
        except Exception as error:  # third-party simulators raise arbitrary exceptions
            fix = f"pip install --force-reinstall 'lockstep-rl[{extra}]'"
            yield warning("gymnasium", f"{family} is installed, but {id} does not start: {error}", fix)
        else:
            yield ok("gymnasium", f"{family} environments start")
