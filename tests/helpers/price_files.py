"""Synthetic prices, and files of them."""

import numpy as np

from lockstep.rng import RandomStream


def random_walk_bars(seed=0, bars=200, drift=0.0):
    """Return bars [T, 4] of a random walk."""
    moves = RandomStream(seed, "prices").normal(0, bars, 2).numpy().astype(float) * 0.01
    close = 100 * np.exp(np.cumsum(moves[:, 0] + drift))
    opened = close * np.exp(moves[:, 1])
    return np.stack([opened, np.maximum(opened, close) * 1.001, np.minimum(opened, close) * 0.999, close], axis=1)


def write_prices(path, prices, seconds=86_400, start=0, **columns):
    """Write bars [T, 4] to a CSV file, one per day, with further columns. Return its path as text."""
    rows = [
        ",".join([str(start + seconds * bar), *(repr(float(value)) for value in (*row, *extra))])
        for bar, (row, *extra) in enumerate(zip(prices, *columns.values(), strict=True))
    ]
    path.write_text(",".join(["unix,open,high,low,close", *columns]) + "\n" + "\n".join(rows))
    return str(path)


def normal_returns(seed, bars, mean=0.0, scale=0.01):
    """Return independent normal returns [T]."""
    return mean + scale * RandomStream(seed, "returns").normal(0, bars).numpy().astype(float)
