"""Formatting of numbers for the console, log lines and the final summary."""

import math
from collections.abc import Mapping
from statistics import median
from typing import TYPE_CHECKING

from lockstep.ops.prediction_metrics import overall_metrics

if TYPE_CHECKING:  # reports use this module without importing torch
    from lockstep.clock import TrainState

_BARS = "▁▂▃▄▅▆▇█"


def sparkline(values: list[float]) -> str:
    """Render values as a row of bars, with a gap for each non-finite value."""
    finite = [value / 2 for value in values if math.isfinite(value)]  # halved so that differences cannot overflow
    low = min(finite, default=0.0)
    span = max(finite, default=0.0) - low or 1.0
    return "".join(
        _BARS[round((value / 2 - low) / span * (len(_BARS) - 1))] if math.isfinite(value) else " " for value in values
    )


def format_duration(seconds: float) -> str:
    """Format seconds as s, min or h."""
    seconds = max(0.0, seconds)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def format_results(means: Mapping[str, float]) -> list[str]:
    """Format the per-episode metrics of a task from means by name. Wins are shown as a fraction of trades."""
    means = {name.removeprefix("rollout/ep_"): value for name, value in means.items() if name.endswith("_mean")}
    by_name = {name.removesuffix("_mean"): value for name, value in means.items()}
    counts = {name: value for name, value in by_name.items() if "/" not in name and name not in ("return", "length")}
    parts = [f"{name} {value:.2f}" for name, value in counts.items() if name != "wins" or "trades" not in counts]
    if counts.get("trades", 0.0) > 0.0 and "wins" in counts:
        # Both means are over the same episodes, so this is the pooled rate and not a mean of rates.
        parts.append(f"win rate {counts['wins'] / counts['trades']:.0%}")
    return parts


def format_losses(metrics: Mapping[str, float]) -> list[str]:
    """Format the losses of an algorithm with several networks, by network name."""
    parts = [name.split("/") for name in metrics if name.startswith("train/") and name.endswith("/loss")]
    return [f"{part[1]} loss {metrics['/'.join(part)]:.4g}" for part in parts if len(part) == 3]


def format_evaluation(clock: "TrainState") -> str:
    """Format the last evaluation."""
    result = clock.evaluation
    if "score" in result:  # predictions: show the overall metrics, not those of subsets
        metrics = [f"{name} {value:.4g}" for name, value in overall_metrics(result).items()]
        best = _format_best(clock, "best score {:.4g}")
        return ", ".join([f"evaluation: {metrics[0]}", *metrics[1:], f"{result['examples']:,.0f} examples", best])
    returns = f"evaluation: return {result['return_mean']:.2f} ± {result['return_std']:.2f}"
    best = _format_best(clock, "best {:.2f}")
    return ", ".join([returns, *format_results(result), f"{result['episodes']:.0f} episodes", best])


def _format_best(clock: "TrainState", template: str) -> str:
    if clock.best is None:
        return "no best yet"  # every score was NaN
    return template.format(clock.best) if clock.evals_since_best else "the best so far"


def format_speed(speed: float, loads: Mapping[int, float]) -> str:
    """Format steps per second and the speedup over one process, which is the sum of all processes' utilization."""
    times = f" · {sum(loads.values()):.1f}x one process" if len(loads) > 1 else ""
    return f"{speed:,.0f} steps/s{times}"


def format_utilization(loads: Mapping[int, float]) -> str:
    """Format the utilization of each process; for more than 8 processes, as bars with median and minimum."""
    if len(loads) <= 8:
        return " · ".join(f"{process}: {load:.0%}" for process, load in loads.items())
    least = min(loads, key=lambda process: loads[process])
    bars = "".join(_BARS[round(load * (len(_BARS) - 1))] for load in list(loads.values())[:64])
    return f"{bars}  median {median(loads.values()):.0%}, least {loads[least]:.0%} (process {least})"


def format_resources(resources: Mapping[str, float]) -> dict[str, str]:
    """Format resource usage by kind: CPU and memory summed over all processes, GPUs one by one."""
    text = {}
    cores = [value for name, value in resources.items() if name.endswith("_cpu_percent")]
    memory = [value for name, value in resources.items() if name.startswith("process") and name.endswith("_memory_gb")]
    if cores:
        text["cpu"] = f"{sum(cores) / 100:.1f} cores · {sum(memory):.1f} GB"
    gpus = [name.removesuffix("_memory_allocated_gb") for name in resources if name.endswith("_memory_allocated_gb")]
    if gpus:
        utilization = {gpu: resources.get(f"{gpu}_util_percent") for gpu in gpus}
        text["gpu"] = " · ".join(
            f"{gpu.removeprefix('gpu')}: {'' if utilization[gpu] is None else f'{utilization[gpu]:.0f}% '}"
            f"{resources[f'{gpu}_memory_allocated_gb']:.1f} GB"
            for gpu in gpus
        )
    return text


def format_replica_check(processes: int, checked: int) -> str:
    """Format the update of the last replica check; empty for one process or before the first check."""
    return f"in sync at update {checked:,}" if processes > 1 and checked else ""
