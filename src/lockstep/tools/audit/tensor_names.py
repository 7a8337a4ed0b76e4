"""Find the script's names of its tensors: the variable that holds a module, then the path inside the module."""

import gc
from collections.abc import Iterator
from types import FrameType

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel


class ModuleNames:
    """Root modules of a script and their names. The recorder searches for new ones at every step."""

    def __init__(self) -> None:
        # Keep references, so that the id of a module is not reused. An audit is short.
        self._known: dict[int, tuple[str, nn.Module]] = {}

    def find_roots(self, frame: FrameType | None) -> None:
        """Find new root modules. Their names are variables of the frame or of its callers."""
        modules = [candidate for candidate in gc.get_objects() if issubclass(type(candidate), nn.Module)]
        inner = {id(child) for module in modules for child in module._modules.values()}
        roots = [module for module in modules if id(module) not in inner and id(module) not in self._known]
        if not roots:
            return
        variables = _variables(frame)
        taken = {name for name, _ in self._known.values()}
        for root in roots:
            base_name = variables.get(id(root)) or variables.get(id(unwrap(root))) or type(unwrap(root)).__name__
            name, number = base_name, 2
            while name in taken:
                name, number = f"{base_name}#{number}", number + 1
            taken.add(name)
            self._known[id(root)] = name, root

    def wrappers(self) -> Iterator[tuple[str, DistributedDataParallel]]:
        """Yield DDP wrappers with their names."""
        for name, root in self._known.values():
            for path, module in root.named_modules():
                if isinstance(module, DistributedDataParallel):
                    yield ".".join(filter(None, (name, path))), module

    def parameters(self) -> dict[str, Tensor]:
        return {
            f"{name}.{path}": tensor
            for name, root in self._known.values()
            for path, tensor in unwrap(root).named_parameters()
        }

    def buffers(self) -> dict[str, Tensor]:
        return {
            f"{name}.{path}": tensor
            for name, root in self._known.values()
            for path, tensor in unwrap(root).named_buffers()
        }


def unwrap(module: nn.Module) -> nn.Module:
    """Return the module inside a DDP wrapper, so that names have no `module.` in them."""
    return module.module if isinstance(module, DistributedDataParallel) else module


def name_parameters(optimizer: torch.optim.Optimizer, number: int, modules: ModuleNames) -> dict[str, Tensor]:
    """Return the parameters of an optimizer by name. Parameters of no module are named by their index."""
    known = {id(tensor): name for name, tensor in modules.parameters().items()}
    named: dict[str, Tensor] = {}
    for group in optimizer.param_groups:
        param_names = group.get("param_names") or [None] * len(group["params"])
        for tensor, name in zip(group["params"], param_names, strict=True):
            named[known.get(id(tensor)) or name or f"optimizer{number}.parameter{len(named)}"] = tensor
    return named


def _variables(frame: FrameType | None) -> dict[int, str]:
    """Return variable names by object id: variables of a frame and its callers, and attributes of their values."""
    names: dict[int, str] = {}
    while frame is not None:
        for name, value in frame.f_locals.items():
            names.setdefault(id(value), name)
            fields = getattr(value, "__dict__", None)
            if name == "__builtins__" or not isinstance(fields, dict) or issubclass(type(value), nn.Module | type(gc)):
                continue
            for field_name, field in list(fields.items()):
                if issubclass(type(field), nn.Module):
                    names.setdefault(id(field), field_name if name == "self" else f"{name}.{field_name}")
        frame = frame.f_back
    return names
