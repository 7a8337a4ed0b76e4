"""How a run is told: numbers as people say them, for the screen, for lines and for the end."""

import math
from collections.abc import Mapping
from statistics import median
from typing import TYPE_CHECKING

from lockstep.ops.prediction_metrics import overall_metrics

if TYPE_CHECKING:  # a report says these words without torch
    from lockstep.clock import TrainState

_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: list[float]) -> str:
    """Values as a row of little bars, with a gap where one is no number: a screen must not end a run."""
    known = [value / 2 for value in values if math.isfinite(value)]  # halved, so that no difference is infinite
    low = min(known, default=0.0)
    span = max(known, default=0.0) - low or 1.0
    return "".join(
        _BARS[round((value / 2 - low) / span * (len(_BARS) - 1))] if math.isfinite(value) else " " for value in values
    )


def format_duration(seconds: float) -> str:
    """Seconds as people say them."""
    seconds = max(0.0, seconds)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def format_results(means: Mapping[str, float]) -> list[str]:
    """What a task counts over an episode, from means by name; wins are said as a part of the trades they are of."""
    found = {name.removesuffix("_mean"): value for name, value in means.items() if name.endswith("_mean")}
    counts = {name: value for name, value in found.items() if "/" not in name and name not in ("return", "length")}
    words = [f"{name} {value:.2f}" for name, value in counts.items() if name != "wins" or "trades" not in counts]
    if (
        counts.get("trades", 0.0) > 0.0 and "wins" in counts
    ):  # of sums over the same episodes: pooled, not a mean of means
        words.append(f"win rate {counts['wins'] / counts['trades']:.0%}")
    return words


def format_losses(metrics: Mapping[str, float]) -> list[str]:
    """The losses of an algorithm that has several networks, by their names."""
    parts = [name.split("/") for name in metrics if name.startswith("train/") and name.endswith("/loss")]
    return [f"{part[1]} loss {metrics['/'.join(part)]:.4g}" for part in parts if len(part) == 3]


def format_evaluation(clock: "TrainState") -> str:
    """The last evaluation as a phrase."""
    result = clock.evaluation
    if "score" in result:  # predictions, of which the whole measures are told, not those of parts
        measures = [f"{name} {value:.4g}" for name, value in overall_metrics(result).items()]
        best = "the best so far" if clock.best == result["score"] else f"best score {clock.best:.4g}"
        return ", ".join([f"evaluation: {measures[0]}", *measures[1:], f"{result['examples']:,.0f} examples", best])
    words = f"evaluation: return {result['return_mean']:.2f} ± {result['return_std']:.2f}"
    best = "the best so far" if clock.best == result["return_mean"] else f"best {clock.best:.2f}"
    return ", ".join([words, *format_results(result), f"{result['episodes']:.0f} episodes", best])


def format_speed(speed: float, loads: Mapping[int, float]) -> str:
    """Steps a second, and how many times what one process would do: the work of all in which nobody waited."""
    times = f" · {sum(loads.values()):.1f}x one process" if len(loads) > 1 else ""
    return f"{speed:,.0f} steps/s{times}"


def format_utilization(loads: Mapping[int, float]) -> str:
    """How busy each process is; of many, a bar for each and who is least so."""
    if len(loads) <= 8:
        return " · ".join(f"{process}: {load:.0%}" for process, load in loads.items())
    least = min(loads, key=lambda process: loads[process])
    bars = "".join(_BARS[round(load * (len(_BARS) - 1))] for load in list(loads.values())[:64])
    return f"{bars}  median {median(loads.values()):.0%}, least {loads[least]:.0%} (process {least})"


def format_resources(use: Mapping[str, float]) -> dict[str, str]:
    """What the processes take of their machines, by kind: of processors all together, of GPUs each."""
    words = {}
    cores = [value for name, value in use.items() if name.endswith("_cpu_percent")]
    memory = [value for name, value in use.items() if name.startswith("process") and name.endswith("_memory_gb")]
    if cores:
        words["cpu"] = f"{sum(cores) / 100:.1f} cores · {sum(memory):.1f} GB"
    gpus = [name.removesuffix("_memory_allocated_gb") for name in use if name.endswith("_memory_allocated_gb")]
    if gpus:
        busy = {gpu: use.get(f"{gpu}_util_percent") for gpu in gpus}
        words["gpu"] = " · ".join(
            f"{gpu.removeprefix('gpu')}: {'' if busy[gpu] is None else f'{busy[gpu]:.0f}% '}"
            f"{use[f'{gpu}_memory_allocated_gb']:.1f} GB"
            for gpu in gpus
        )
    return words


def format_replica_check(processes: int, checked: int) -> str:
    """That all processes hold one agent, if there are several and they were compared."""
    return f"in sync at update {checked:,}" if processes > 1 and checked else ""
