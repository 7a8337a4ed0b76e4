"""Lockstep: many processes, one agent."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lockstep.load import LoadedPolicy as LoadedPolicy
    from lockstep.load import load as load

__version__ = "0.1.0"
__all__ = ["__version__", "load"]


def __getattr__(name: str) -> Any:
    # Deferred, so that `import lockstep` and `lockstep --help` do not pay for torch.
    if name == "load":
        from lockstep.load import load

        return load
    raise AttributeError(f"module 'lockstep' has no attribute '{name}'")
