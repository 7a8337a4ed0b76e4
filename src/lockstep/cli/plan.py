"""`lockstep plan RECIPE --gpus 1 8 64`: before renting, what more GPUs would bring, where they stop paying, and why."""

import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from lockstep.config import ConfigError, Recipe
from lockstep.io.printable import write_text
from lockstep.io.safe_read import UnreadableFileError, read_json
from lockstep.io.temporary_directory import temporary_directory

if TYPE_CHECKING:
    from lockstep.tools.bench.network_model import NetworkModel
    from lockstep.tools.bench.scaling_model import CostProfile, Prediction

ASSUMPTIONS = (
    "Work is as measured on one process of this machine (or in --measured); a process's share of it costs a fixed time "
    "and a time for each sample, fitted to its shares as one of 1, 2, 4, ... processes.",
    "Buckets of the gradient travel during half of an update's work; everything else that is sent is waited for.",
    "All processes are equally fast: environments that take longer on some of them are not in the model.",
    "Memory is parameters, optimizer and gradient, the rollout, and what backward keeps; not torch itself.",
)


@dataclass(frozen=True)
class Plan:
    """Predict steps/s, efficiency, hours and memory on many GPUs from a short measurement on this machine.

    Its own flags may follow, as with `train`. Every assumption is printed.
    """

    recipe: tyro.conf.Positional[str]
    """A recipe's name, or a Python file with a recipe of your own."""
    gpus: Annotated[tuple[int, ...], tyro.conf.arg(aliases=["-n"])] = (1, 8, 64, 512, 4096)
    """Numbers of GPUs (processes) to plan for."""
    network: str | None = None
    """What joins them: nvlink+ib, nvlink+ethernet-100g, pcie+ethernet-100g, pcie+ethernet-25g, ethernet-25g,
    ethernet-10g; here: this machine's own cores and loopback, measured; or a file of --time-network or of
    `lockstep doctor --gpu`. None: the network in --measured if it holds one, else nvlink+ib."""
    measured: Path | None = None
    """Take the measurement in this file instead of making one: a file of --save, or of `lockstep doctor --gpu`."""
    save: Path | None = None
    """Leave the measurement in this file."""
    rounds: int = 3
    """Iterations to time for each share."""
    preset: str | None = None
    """One of the recipe's named variations."""
    smoke: bool = False
    """Take the recipe's smallest setting."""
    json: bool = False
    """Print one JSON object instead of tables."""
    time_network: Path | None = None
    """Only time reductions between the processes that torchrun started, and leave them in this file for --network."""
    sizes: tuple[int, ...] = ()
    """Bytes of the reductions that --time-network times. Empty: 64 B, 64 KiB, 1 MiB and 4 MiB."""


def run(arguments: Sequence[str]) -> int:
    from lockstep.cli.options import TrainOptions, parse_command, parse_recipe

    command, rest = parse_command(Plan, arguments, "plan")
    if not command.gpus or min(command.gpus) < 1 or command.rounds < 1:
        raise ConfigError("--gpus and --rounds count from 1.", "Give numbers such as --gpus 1 8 64 --rounds 3.")
    start = TrainOptions(recipe=command.recipe, smoke=command.smoke, preset=command.preset)
    recipe = parse_recipe(start, rest, f"lockstep plan {command.recipe}")
    if command.time_network is not None:
        return _time_network(recipe, command.time_network, command.sizes)

    from lockstep.launch.device import threads_per_process
    from lockstep.protocols import TaskConfig
    from lockstep.tools.bench.network_model import find_network
    from lockstep.tools.bench.scaling_model import as_json, predict

    if not isinstance(recipe.task, TaskConfig):
        raise ConfigError(
            f"{command.recipe} collects no rollouts, which is what a plan is made of.",
            f"Measure it: lockstep bench {command.recipe} --scaling 1,2",
        )
    here = command.network == "here"
    if command.network is None:
        found = None if command.measured is None else _network_of_kit(command.measured)
        network = found or find_network("nvlink+ib")
    elif here:
        network = _measure_network(command, rest)
    elif command.network.endswith(".json"):
        network = _network_of_kit(Path(command.network)) or _read_network(Path(command.network))
    else:
        network = find_network(command.network)
    shares = _measured(command, recipe)
    cores = threads_per_process(1) if here else None
    budget = recipe.run.total_samples
    fixed = [predict(shares, count, network, budget, cores=cores) for count in sorted(command.gpus)]
    growing = [predict(shares, count, network, budget, grow=True, cores=cores) for count in sorted(command.gpus)]
    if command.json:
        write_text(sys.stdout, json.dumps(as_json(shares, network, fixed, growing)) + "\n")
    else:
        _print(command.recipe, shares, network, fixed, growing, cores)
    return 0


def _measured(command: Plan, recipe: Recipe) -> "CostProfile":
    """The measurement in a file, or one made now; on one thread where processes are to share this machine."""
    from lockstep.io.rich_console import PrintableConsole
    from lockstep.launch.device import configure_torch, threads_per_process
    from lockstep.launch.world import WorldInfo
    from lockstep.tools.bench.scaling_model import measure_shares, shares_from

    if command.measured is not None:
        try:
            found = read_json(command.measured)
            if "steps" in found:  # a file of `lockstep doctor --gpu`, with shares by recipe
                return shares_from(_shares_of_kit(command.measured, found["shares"], recipe.name))
            return shares_from(found["shares"])
        except ConfigError:
            raise
        except (OSError, UnreadableFileError, ValueError, LookupError, TypeError) as error:
            raise ConfigError(
                f"{command.measured} holds no measurement: {error}.", "Make one: lockstep plan RECIPE --save FILE."
            ) from None
    configure_torch(recipe.run, WorldInfo(local_size=threads_per_process(1) if command.network == "here" else 1))
    console = PrintableConsole(stderr=True)
    with console.status("measuring") as status:
        shares = measure_shares(recipe, command.rounds, lambda words: status.update(words))
    if command.save is not None:
        from dataclasses import asdict

        command.save.write_text(json.dumps({"recipe": recipe.name, "shares": asdict(shares)}, indent=1) + "\n")
    return shares


def _shares_of_kit(path: Path, shares: dict[str, Any], recipe: str) -> Any:
    """The shares of a recipe in a file of `lockstep doctor --gpu`."""
    if recipe not in shares:
        there = ", ".join(shares) or "none"
        raise ConfigError(
            f"{path} holds no measurement of {recipe}. It holds: {there}.",
            f"Measure it on that machine: lockstep plan {recipe} --save FILE.",
        )
    return shares[recipe]


def _network_of_kit(path: Path) -> "NetworkModel | None":
    """The network that `lockstep doctor --gpu` measured. None: another file, or a machine with one GPU."""
    try:
        found = read_json(path)
        if "steps" not in found or not found["network"]:
            return None
    except (OSError, UnreadableFileError, LookupError, TypeError):
        return None  # whoever reads the file next says what is wrong with it
    return _network_from(path, found["network"])


def _measure_network(command: Plan, rest: list[str]) -> "NetworkModel":
    """This machine's loopback, by timing reductions of two processes."""
    from lockstep.io.rich_console import PrintableConsole
    from lockstep.launch.launcher import launch_captured

    words = ["plan", command.recipe, *rest, *(["--preset", command.preset] if command.preset else [])]
    words += ["--smoke"] if command.smoke else []
    with temporary_directory("plan") as directory, PrintableConsole(stderr=True).status("the network"):
        path = directory / "here.json"
        cause = launch_captured([*words, "--time-network", str(path)], 2)
        if cause:
            raise ConfigError(f"reductions could not be timed on two processes: {cause}")
        return _read_network(path)


def _read_network(path: Path) -> "NetworkModel":
    """A network of equal links that explains the times in a file."""
    try:
        timed = read_json(path)
    except (OSError, UnreadableFileError) as error:
        raise _no_times(path, error) from None
    return _network_from(path, timed)


def _network_from(path: Path, timed: Any) -> "NetworkModel":
    """The same for times that were read from a file."""
    from lockstep.tools.bench.network_model import NetworkModel, fit_link

    try:
        link = fit_link([int(size) for size in timed["seconds"]], list(timed["seconds"].values()), timed["processes"])
        contention = float(timed.get("contention", 1.0))
        jitter = tuple(float(part) for part in timed.get("jitter", ()))
        if not all(map(math.isfinite, (link.latency, link.bandwidth, contention, *jitter))):
            raise ValueError("its times are no numbers")
    except (ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise _no_times(path, error) from None
    return NetworkModel(path.stem, 2**20, link, link, launch=0.0, contention=contention, jitter=jitter)


def _no_times(path: Path, error: Exception) -> ConfigError:
    return ConfigError(
        f"{path} holds no times of reductions: {error!r}.",
        f"Make it: torchrun ... -m lockstep plan RECIPE --time-network {path}",
    )


def _time_network(recipe: Recipe, path: Path, sizes: tuple[int, ...]) -> int:
    from lockstep.distributed import Runtime
    from lockstep.tools.bench.measure import (
        REDUCTIONS,
        IterationTimer,
        contention_and_jitter,
        time_contention,
        time_reductions,
    )

    if sizes and min(sizes) < 4:
        raise ConfigError("--sizes counts bytes of float32 numbers.", "Give numbers from 4, such as --sizes 64 65536.")
    with Runtime.start(recipe.run) as runtime:
        if runtime.size == 1:
            raise ConfigError("one process has no network to time.", "Start several: torchrun --nproc-per-node=2 ...")
        timed = time_reductions(runtime, sizes=sizes or REDUCTIONS)
        crowding = time_contention(IterationTimer(recipe, runtime), times=24)
        if runtime.is_main:
            contention, jitter = contention_and_jitter(crowding)
            found = {"processes": runtime.size, "seconds": timed, "contention": contention, "jitter": jitter}
            path.write_text(json.dumps(found))
    return 0


def _print(
    name: str,
    shares: "CostProfile",
    network: "NetworkModel",
    fixed: list["Prediction"],
    growing: list["Prediction"],
    cores: int | None,
) -> None:
    from lockstep.io.rich_console import PrintableConsole
    from lockstep.tools.bench.scaling_model import imbalance, scaling_limit, slowest_of

    console = PrintableConsole()
    console.print(_table(f"{name}: the same global batch", fixed))
    console.print(scaling_limit(shares, fixed, cores))
    console.print()
    console.print(_table(f"{name}: a batch that grows with the GPUs", growing))
    console.print(
        "Faster, and another experiment: a larger batch learns less from each sample, so hours are those to the same "
        "number of samples, not to the same score. --algo.lr-scaling says how the learning rate follows."
    )
    console.print("\nAssumed:")
    slower = "" if network.contention == 1.0 else f", and {network.contention - 1:.0%} slower when all are busy"
    crowded = () if cores is None else (f"{cores} cores are shared by all processes, one thread each{slower}.",)
    jitter = imbalance(shares, network)
    waits = f"All wait for the slowest process: of two of them it takes {slowest_of(2, jitter):.2f}x."
    for line in (network.describe(), *crowded, *([waits] if jitter else []), *ASSUMPTIONS):
        console.print(f"  - {line}", soft_wrap=True)


def _table(title: str, rows: list["Prediction"]) -> Any:
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in ("GPUs", "batch", "steps/s", "efficiency", "time", "waiting", "memory", "way"):
        table.add_column(column, justify="right", overflow="fold")  # a number that is cut is another number
    for row in rows:
        if row.impossible:
            table.add_row(f"{row.processes:,}", f"{row.batch:,}", "-", "-", "-", "-", "-", "")
            continue
        table.add_row(
            f"{row.processes:,}",
            f"{row.batch:,}",
            f"{row.steps_per_second:,.0f}",
            f"{row.efficiency:.0%}",
            _duration(row.hours),
            f"{row.waiting / (row.waiting + row.compute):.1%}",
            _size(row.memory),
            row.way,
        )
    return table


def _duration(hours: float) -> str:
    """Hours as people say them, from a second to years."""
    for unit, length in (("days", 24.0), ("h", 1.0), ("min", 1 / 60)):
        if hours >= (2 * length if unit == "days" else length):
            return f"{hours / length:,.1f} {unit}"
    return f"{hours * 3600:.1f} s"


def _size(memory: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if memory >= size:
            return f"{memory / size:,.1f} {unit}"
    return f"{memory / 2**10:,.0f} KiB"
