"""Random shift: equal to padding and cropping, and to the reference's interpolation."""

import torch
import torch.nn.functional as F

from lockstep.ops.random_shift import random_shift

PAD = 3


def images(*shape, seed=0):
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def offsets(*shape, seed=1):
    return torch.randint(0, 2 * PAD + 1, (*shape, 2), generator=torch.Generator().manual_seed(seed))


def test_random_shift_equals_pad_and_crop():
    x, at = images(4, 2, 3, 12, 10), offsets(4, 2)
    shifted = random_shift(x, at, PAD)
    assert shifted.dtype == torch.uint8
    padded = F.pad(x.flatten(0, 1).float(), (PAD,) * 4, "replicate").unflatten(0, (4, 2))
    for n in range(4):
        for t in range(2):
            row, column = at[n, t].tolist()
            assert torch.equal(shifted[n, t].float(), padded[n, t, :, row : row + 12, column : column + 10])


def test_random_shift_of_channels_last_moves_rows_and_columns():
    x, at = images(4, 9, 10, 3), offsets(4)
    assert torch.equal(
        random_shift(x, at, PAD, channels_last=True), random_shift(x.movedim(-1, 1), at, PAD).movedim(1, -1)
    )


def test_random_shift_by_pad_changes_nothing():
    x = images(5, 3, 8, 8)
    assert torch.equal(random_shift(x, torch.full((5, 2), PAD), PAD), x)


def test_random_shift_equals_bilinear_sampling_at_whole_pixels():
    x, at, size = images(6, 3, 16, 16), offsets(6), 16 + 2 * PAD
    padded = F.pad(x.float(), (PAD,) * 4, "replicate")
    centers = (torch.arange(16) + 0.5) * 2 / size - 1  # of the upper left crop, between -1 and 1
    base = torch.stack([centers.expand(16, 16), centers.unsqueeze(1).expand(16, 16)], -1)
    grid = base + at.flip(-1)[:, None, None] * 2 / size  # x before y
    sampled = F.grid_sample(padded, grid, padding_mode="zeros", align_corners=False)
    torch.testing.assert_close(random_shift(x, at, PAD).float(), sampled, rtol=0, atol=0.05)
