"""Summarize a report in a few lines of text."""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

GIB = 2**30

Steps = Sequence[dict[str, Any]]
"""Records of the steps that have ended."""


def found_by(steps: Steps, name: str) -> dict[str, Any]:
    """Return the findings of a step. Empty if it has not run."""
    return next((step["found"] for step in steps if step["name"] == name), {})


def summarize(steps: Steps) -> list[str]:
    """Return one line for each subject with results, then the steps that failed or were skipped."""
    lines: list[str] = []
    for write in (_machine, _gradients, _replicas, _hashes, _precisions, _syncs, _modes, _scaling, _bandwidth, _memory):
        # A step that ended before it wrote its results has no line.
        with contextlib.suppress(LookupError, TypeError, ValueError, ArithmeticError):
            lines += list(write(steps))
    for result in ("failed", "skipped"):
        lines += [f"{result}: {step['name']}: {step['reason']}"[:300] for step in steps if step["result"] == result]
    return lines


def _machine(steps: Steps) -> Iterator[str]:
    found = found_by(steps, "machine")
    gpu, versions = found["gpus"][0], found["versions"]
    size = f"{gpu['memory_bytes'] / GIB:.0f} GiB, capability {gpu['capability']}"
    yield f"GPUs: {len(found['gpus'])} x {gpu['name']} ({size}, {gpu['architecture']} in torch's architecture list)"
    driver = next((row["driver_version"] for row in found["nvidia_smi"]), "unknown")
    libraries = f"CUDA {versions['cuda']}, cuDNN {versions['cudnn']}, NCCL {versions['nccl']}"
    yield f"versions: driver {driver}, torch {versions['torch']}, {libraries}"


def _by_recipe(steps: Steps, key: str) -> dict[str, Any]:
    """Return one finding of the recipe steps, by recipe."""
    recipes = [step for step in steps if step["name"].startswith("recipe ")]
    return {step["name"].removeprefix("recipe "): step["found"][key] for step in recipes if key in step["found"]}


def _gradients(steps: Steps) -> Iterator[str]:
    found = _by_recipe(steps, "gradients")
    differences = {name: value["largest_relative_difference"] for name, value in found.items() if len(value) > 1}
    worst = max(differences, key=lambda name: differences[name])
    count = f"{len(differences)} recipes"
    yield f"gradients: {count}, largest relative difference from the CPU {differences[worst]:.1e} ({worst})"


def _replicas(steps: Steps) -> Iterator[str]:
    found = found_by(steps, "replicas")["replicas"]
    processes = f"{found['processes']} processes over {found['backend']}"
    yield f"replicas: equal on {processes} up to update {found['updates']}, compared {found['checks']} times"


def _hashes(steps: Steps) -> Iterator[str]:
    for name in ("prove over NCCL", "prove over gloo"):
        found = found_by(steps, name)
        if found:
            counts = ", ".join(row["processes"] for row in found["runs"])
            yield f"{name}: {found['verdict']} on {counts} processes ({found['runs'][0]['hash'][:16]})"


def _precisions(steps: Steps) -> Iterator[str]:
    found = found_by(steps, "precision")
    distances = {name: row["difference_from_fp32"] for name, row in found.items() if name != "fp32"}
    rows = [f"{name} overflowed" if value is None else f"{name} {value:.1e}" for name, value in distances.items()]
    yield f"precision: distance of the first gradient from fp32: {', '.join(rows)}"


def _syncs(steps: Steps) -> Iterator[str]:
    found = _by_recipe(steps, "host_syncs")
    rows = [f"{name} {row['total'] / row['iterations']:.0f}" for name, row in found.items() if "total" in row]
    yield f"host synchronizations per iteration (smoke settings): {', '.join(rows)}"


def _modes(steps: Steps) -> Iterator[str]:
    for step in steps:
        if step["name"].startswith("bench "):
            rates = {name: row.get("updates_per_second") for name, row in step["found"].items()}
            rows = [f"{name} {rate:,.0f}" for name, rate in rates.items() if rate]
            if rows:
                yield f"updates/s with {step['name'].removeprefix('bench ')}: {', '.join(rows)}"


def _scaling(steps: Steps) -> Iterator[str]:
    found = found_by(steps, "scaling")
    rows = [f"{row['processes']}: {row['steps_per_second']:,.0f} ({row['efficiency']:.0%})" for row in found["rows"]]
    yield f"scaling of {found['recipe']}, steps/s by GPUs: {', '.join(rows)}"


def _bandwidth(steps: Steps) -> Iterator[str]:
    rows = found_by(steps, "bandwidth")["rows"]
    small, large = rows[0], rows[-1]
    rate = f"{large['bus_bytes_per_second'] / 1e9:.3g} GB/s bus bandwidth at {large['bytes'] / 2**20:.3g} MiB"
    yield f"all-reduce: {small['seconds'] * 1e6:.0f} us at {small['bytes']} B, {rate}"


def _memory(steps: Steps) -> Iterator[str]:
    peaks = _by_recipe(steps, "memory") | {
        name: row for name, row in _by_recipe(steps, "memory_full").items() if row.get("allocated_bytes")
    }
    rows = [f"{name} {row['allocated_bytes'] / 2**20:.1f}" for name, row in peaks.items() if row["allocated_bytes"]]
    yield f"memory peaks, MiB: {', '.join(rows)}"
