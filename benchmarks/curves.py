"""The curves on the pages of the systems: one number of the evaluations of some runs, over their samples.

python benchmarks/curves.py runs/ONE runs/TWO --of apples_mean --labels "one process" "two processes" --out curve.svg

Runs with the same label are seeds of one experiment, and have one colour.
"""

import argparse
from pathlib import Path

import matplotlib.ticker

from lockstep.io.jsonl import METRICS, read_jsonl

matplotlib.rcParams["svg.hashsalt"] = "lockstep"  # the same runs give the same file
matplotlib.rcParams["svg.fonttype"] = "none"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path)
    parser.add_argument("--of", default="return_mean", help="a number of evaluations, as metrics.jsonl calls it")
    parser.add_argument("--labels", nargs="*", default=[])
    parser.add_argument("--title", default="")
    parser.add_argument("--out", type=Path, default=Path("curve.svg"))
    words = parser.parse_args()

    from matplotlib.figure import Figure

    figure = Figure(figsize=(6.4, 3.2), layout="constrained")
    axes = figure.subplots()
    labels = words.labels or [run.name for run in words.runs]
    colours = {label: f"C{number}" for number, label in enumerate(dict.fromkeys(labels))}
    for run, label in zip(words.runs, labels, strict=True):
        lines = [line for line in read_jsonl(run / METRICS) if f"eval/{words.of}" in line]
        points = [(line["samples"], line[f"eval/{words.of}"]) for line in lines]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3.5, linewidth=1.5, color=colours[label])
    axes.set(xlabel="samples", ylabel=words.title or words.of)
    axes.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
    axes.grid(alpha=0.3)
    for label, colour in colours.items():
        axes.plot([], [], color=colour, label=label)
    axes.legend(loc="best", frameon=False)
    figure.savefig(words.out, metadata={"Date": None})


if __name__ == "__main__":
    main()
