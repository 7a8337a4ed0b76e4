"""Random shift of images: pad by repeating the edge, and crop at a random offset (DrQ, arXiv:2004.13649)."""

import torch
from torch import Tensor


def random_shift(images: Tensor, offsets: Tensor, pad: int, channels_last: bool = False) -> Tensor:
    """Shift images [..., C, H, W] by offsets [..., 2] from 0 to 2 x `pad`: rows, then columns. `pad` shifts by nothing.

    Pixels are selected, not interpolated, so that the type and the bits of an image stay. With `channels_last`, images
    are [..., H, W, C].
    """
    if channels_last:
        return random_shift(images.movedim(-1, -3), offsets, pad).movedim(-3, -1)
    height, width = images.shape[-2:]
    # A crop of the padded image is a selection of rows and columns, with indices beyond the edge moved to the edge.
    rows, columns = (
        (torch.arange(size, device=images.device) + offsets[..., axis : axis + 1] - pad).clamp(0, size - 1)
        for axis, size in enumerate((height, width))
    )  # [..., H], [..., W]
    shifted = images.gather(-2, rows[..., None, :, None].expand_as(images))
    return shifted.gather(-1, columns[..., None, None, :].expand_as(images))
