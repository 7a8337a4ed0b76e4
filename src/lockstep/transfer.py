"""Transfers between host and device: all tensors of a step, a batch or a log entry in one copy.

Separate copies would cost one launch per tensor, and a copy from pageable memory blocks the host.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.pytree import leaves, tree_map

_ALIGNMENT = 64
"""Alignment in bytes of tensors in a buffer, so that a view of any dtype is valid."""

WITHOUT_FLOAT64 = {"mps"}
"""Device types without float64."""


def has_float64(device: torch.device) -> bool:
    """Return whether a device supports float64."""
    return device.type not in WITHOUT_FLOAT64


def download(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors to the host, with one transfer per device.

    This synchronizes with the device: call it once per iteration, where the host needs the values.
    """
    copies: list[Tensor] = list(tensors)
    for device in {x.device for x in tensors if x.device.type != "cpu"}:
        indices = [index for index, x in enumerate(tensors) if x.device == device]
        flat = torch.cat([tensors[index].reshape(-1) for index in indices]).cpu()
        pieces = flat.split([tensors[index].numel() for index in indices])
        for index, piece in zip(indices, pieces, strict=True):
            copies[index] = piece.view(tensors[index].shape)
    return copies


def download_bytes(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copy tensors of any dtypes on one device to the host, with one transfer of bytes."""
    flat = torch.cat([x.contiguous().view(-1).view(torch.uint8) for x in tensors]).cpu()
    pieces = flat.split([x.nbytes for x in tensors])
    # Clone, because a piece may not be aligned for its dtype.
    return [piece.clone().view(x.dtype).view(x.shape) for piece, x in zip(pieces, tensors, strict=True)]


def upload(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy a small host tensor to a device without blocking. Return it unchanged if it is already there."""
    if tensor.device == device:
        return tensor
    tensor = _to_supported(device, tensor)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)


def _to_supported(device: torch.device, tensor: Tensor) -> Tensor:
    """Convert float64 to float32 if the device does not support float64."""
    return tensor.float() if tensor.dtype == torch.float64 and not has_float64(device) else tensor


class Uploader:
    """Copy trees of host tensors to a device. On the CPU they are returned unchanged.

    The tensors returned share one device buffer, which the next call overwrites. Work that was launched before that
    call still sees the old contents: copies and kernels run in the order in which they were launched.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._layout: list[tuple[torch.dtype, torch.Size]] = []
        self._ranges: list[tuple[int, int]] = []
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)
        self._views: list[Tensor] = []

    def __call__(self, tree: Any) -> Any:
        if self.device.type == "cpu":
            return tree
        tree = tree_map(lambda x: _to_supported(self.device, x), tree)
        if self.device.type != "cuda":
            return tree_map(lambda x: x.to(self.device), tree)
        tensors = leaves(tree)
        layout = [(tensor.dtype, tensor.shape) for tensor in tensors]
        if layout != self._layout:
            self._lay_out(layout)
        # Allocate pinned memory per call: torch reuses it only after the copy has finished, so nothing blocks.
        size = self._ranges[-1][1] if self._ranges else 0
        pinned = torch.empty(size, dtype=torch.uint8, pin_memory=True)
        torch._foreach_copy_(self._views_of(pinned), tensors)
        self._buffer[:size].copy_(pinned, non_blocking=True)
        views = iter(self._views)
        return tree_map(lambda _: next(views), tree)

    def _lay_out(self, layout: list[tuple[torch.dtype, torch.Size]]) -> None:
        """Assign an offset in the buffer to every tensor. Grow the buffer if it is too small."""
        self._layout, self._ranges, start = layout, [], 0
        for dtype, shape in layout:
            stop = start + math.prod(shape) * dtype.itemsize
            self._ranges.append((start, stop))
            start = -(-stop // _ALIGNMENT) * _ALIGNMENT
        if start > len(self._buffer):
            capacity = start + start // 4  # the next batch may be a little larger
            self._buffer = torch.empty(capacity, dtype=torch.uint8, device=self.device)
        self._views = self._views_of(self._buffer)

    def _views_of(self, buffer: Tensor) -> list[Tensor]:
        """Return the views of a buffer for the tensors of the layout."""
        slots = zip(self._layout, self._ranges, strict=True)
        return [buffer[start:stop].view(dtype).view(shape) for (dtype, shape), (start, stop) in slots]
