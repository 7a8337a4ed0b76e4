"""Lockstep: many processes, one agent."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.inference import LoadedPolicy as LoadedPolicy
    from lockstep.inference import load as load

__version__ = "0.1.0"
__all__ = ["__version__", "load"]


def __getattr__(name: str) -> Any:
    # Deferred, so that `import lockstep` and `lockstep --help` do not pay for torch. The module is not called `load`,
    # because importing it would put the module where the function belongs.
    if name == "load":
        from lockstep.inference import load

        return load
    raise AttributeError(f"module 'lockstep' has no attribute '{name}'")
