"""Packages that Gymnasium environments need, and how to install them."""

EXTRAS = {
    "mujoco": "mujoco",
    "imageio": "mujoco",
    "Box2D": "box2d",
    "ale_py": "atari",
    "minatar": "minatar",
    "minigrid": "minigrid",
    "pygame": "gym",
    "pettingzoo": "pettingzoo",
    "mpe2": "pettingzoo",
}
"""Extra of this package by the module that it installs."""


def install_hint(error: BaseException, id: str) -> str:
    """Return the pip command for the module whose import caused an error of an environment, or the error's message."""
    cause: BaseException | None = error
    while cause is not None and not (isinstance(cause, ImportError) and cause.name):
        cause = cause.__cause__ or cause.__context__
    if not isinstance(cause, ImportError) or not cause.name:
        return str(error)
    module = cause.name.partition(".")[0]
    if module in EXTRAS:
        return f"pip install 'lockstep-rl[{EXTRAS[module]}]'"
    if id.startswith((f"{module}:", f"{module}.")):
        return f"pip install {module}, or name a file of your own: --task.id PATH/{module}.py:{id.rpartition(':')[2]}"
    return f"Install the package with the module {module}, which may have another name: pip install {module}"
