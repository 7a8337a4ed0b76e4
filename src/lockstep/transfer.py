"""Transfers between host and device: all tensors of a step, a batch or a log entry in one copy.

A copy of its own for every tensor would cost a launch each, and a copy from pageable memory makes the host wait.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.pytree import leaves, tree_map

_ALIGNMENT = 64
"""Bytes at multiples of which tensors start in a buffer, so that any dtype can be viewed there."""

WITHOUT_FLOAT64 = {"mps"}
"""Types of devices that cannot hold float64."""


def has_float64(device: torch.device) -> bool:
    """Whether tensors on a device may be float64."""
    return device.type not in WITHOUT_FLOAT64


def download(found: Sequence[Tensor]) -> list[Tensor]:
    """Copies of numbers on the host, with one transfer for each device that they are on.

    This waits for the device: call it where the host needs the numbers, once an iteration.
    """
    copies: list[Tensor] = list(found)
    for device in {x.device for x in found if x.device.type != "cpu"}:
        places = [place for place, x in enumerate(found) if x.device == device]
        flat = torch.cat([found[place].reshape(-1) for place in places]).cpu()
        pieces = flat.split([found[place].numel() for place in places])
        for place, piece in zip(places, pieces, strict=True):
            copies[place] = piece.view(found[place].shape)
    return copies


def download_bytes(found: Sequence[Tensor]) -> list[Tensor]:
    """The same for tensors of any dtypes on one device, packed as bytes."""
    flat = torch.cat([x.contiguous().view(-1).view(torch.uint8) for x in found]).cpu()
    pieces = flat.split([x.nbytes for x in found])
    # Cloned, because a piece may begin where no number of its dtype may.
    return [piece.clone().view(x.dtype).view(x.shape) for piece, x in zip(pieces, found, strict=True)]


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """A small tensor of the host on a device, without waiting for it; one that is there already as it is."""
    if tensor.device == device:
        return tensor
    tensor = _held_by(device, tensor)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _held_by(device: torch.device, tensor: Tensor) -> Tensor:
    """A tensor of the host in a dtype that a device can hold."""
    return tensor.float() if tensor.dtype == torch.float64 and not has_float64(device) else tensor


class Uploader:
    """Copies trees of host tensors to a device. On the CPU they are returned as they are.

    The tensors returned share one device buffer, which the next call overwrites. Work that was launched before that
    call still sees the old contents: copies and kernels run in the order in which they were launched.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._layout: list[tuple[torch.dtype, torch.Size]] = []
        self._ends: list[tuple[int, int]] = []
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)
        self._views: list[Tensor] = []

    def __call__(self, tree: Any) -> Any:
        if self.device.type == "cpu":
            return tree
        tree = tree_map(lambda x: _held_by(self.device, x), tree)
        if self.device.type != "cuda":
            return tree_map(lambda x: x.to(self.device), tree)
        tensors = leaves(tree)
        layout = [(tensor.dtype, tensor.shape) for tensor in tensors]
        if layout != self._layout:
            self._lay_out(layout)
        # Pinned memory is allocated for each call: torch uses it again only when the copy is done, so nothing waits.
        size = self._ends[-1][1] if self._ends else 0
        pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        torch._foreach_copy_(self._views_of(pinned), tensors)
        self._buffer[:size].copy_(pinned, non_blocking=True)
        views = iter(self._views)
        return tree_map(lambda _: next(views), tree)

    def _lay_out(self, layout: list[tuple[torch.dtype, torch.Size]]) -> None:
        """Give every tensor its place in the buffer, which grows where it is too small."""
        self._layout, self._ends, start = layout, [], 0
        for dtype, shape in layout:
            stop = start + math.prod(shape) * dtype.itemsize
            self._ends.append((start, stop))
            start = -(-stop // _ALIGNMENT) * _ALIGNMENT
        if start > len(self._buffer):
            room = start + start // 4  # the next batch may be a little larger
            self._buffer = torch.empty(room, dtype=torch.uint8, device=self.device)
        self._views = self._views_of(self._buffer)

    def _views_of(self, buffer: Tensor) -> list[Tensor]:
        """The parts of a buffer that tensors of the layout lie in."""
        places = zip(self._layout, self._ends, strict=True)
        return [buffer[start:stop].view(dtype).view(shape) for (dtype, shape), (start, stop) in places]
