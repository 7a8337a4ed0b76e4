"""`lockstep plan RECIPE --gpus 1 8 64`: predict throughput on more GPUs, and what limits scaling."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from lockstep.cli.options import RecipeOptions, parse_command, parse_recipe, resolve
from lockstep.cli.plan_bill import ASSUMPTIONS as BILL_ASSUMPTIONS
from lockstep.cli.plan_bill import BillOptions, bill_table, bills, bills_as_json, interval_advice
from lockstep.config import ConfigError, Recipe
from lockstep.io.printable import print_line
from lockstep.io.safe_read import UnreadableFileError, read_json
from lockstep.io.temporary_directory import temporary_directory

if TYPE_CHECKING:
    from lockstep.tools.bench.network_model import NetworkModel
    from lockstep.tools.bench.scaling_model import CostProfile, Prediction

ASSUMPTIONS = (
    "Compute time is measured on one process of this machine, or read from --measured. The share of a process costs a "
    "fixed time plus a time per sample, fitted to the shares of 1, 2, 4, ... processes.",
    "Gradient buckets overlap with half of the compute time of an update; other communication does not overlap.",
    "All processes are equally fast: the model has no stragglers with slower environments.",
    "Memory counts parameters, optimizer, gradients, rollout and saved activations; not torch itself.",
)


@dataclass(frozen=True, kw_only=True)
class Plan(BillOptions, RecipeOptions):
    """Predict steps/s, efficiency, hours, memory and dollars on many GPUs from a short measurement on this machine.

    Accepts settings of the recipe, as `train` does. Prints all assumptions.
    """

    gpus: Annotated[tuple[int, ...], tyro.conf.arg(aliases=["-n"])] = (1, 8, 64, 512, 4096)
    """Numbers of GPUs (processes) to predict."""
    network: str | None = None
    """Network: nvlink+ib, nvlink+ethernet-100g, pcie+ethernet-100g, pcie+ethernet-25g, ethernet-25g or
    ethernet-10g; here: measure the cores and loopback of this machine; or a file of --time-network or of
    `lockstep doctor --gpu`. None: the network in --measured if it has one, else nvlink+ib."""
    measured: Path | None = None
    """File with a measurement, from --save or `lockstep doctor --gpu`. None: measure this machine."""
    save: Path | None = None
    """File to write the measurement to. None: it is not kept."""
    rounds: int = 3
    """Iterations to time for each share of the work."""
    json: bool = False
    """Print one JSON object instead of tables."""
    time_network: Path | None = None
    """Only time all-reduces between the processes of torchrun and write them to this file, for --network."""
    sizes: tuple[int, ...] = ()
    """Sizes in bytes of the all-reduces of --time-network. Empty: 64 B, 64 KiB, 1 MiB and 4 MiB."""


def run(arguments: Sequence[str]) -> int:
    command, rest = parse_command(Plan, arguments, "plan")
    if not command.gpus or min(command.gpus) < 1 or command.rounds < 1:
        raise ConfigError("--gpus and --rounds must be at least 1.", "Use for example --gpus 1 8 64 --rounds 3.")
    command.check()
    recipe = resolve(parse_recipe(command, rest, f"lockstep plan {command.recipe}"), 1)
    if command.time_network is not None:
        return _time_network(recipe, command.time_network, command.sizes)

    from lockstep.launch.device import threads_per_process
    from lockstep.protocols import TaskConfig
    from lockstep.tools.bench.scaling_model import as_json, predict

    if not isinstance(recipe.task, TaskConfig):
        raise ConfigError(
            f"{command.recipe} collects no rollouts, so its scaling cannot be predicted.",
            f"Measure it: lockstep bench {command.recipe} --scaling 1,2",
        )
    measured = None if command.measured is None else _read_shares(command.measured, recipe.name)
    network = _network(command, rest)
    shares = measured or _measure_shares(command, recipe)
    cores = threads_per_process(1) if command.network == "here" else None
    budget = recipe.run.total_samples
    fixed = [predict(shares, count, network, budget, cores=cores) for count in sorted(command.gpus)]
    growing = [predict(shares, count, network, budget, grow=True, cores=cores) for count in sorted(command.gpus)]
    if command.json:
        print_line(json.dumps(as_json(shares, network, fixed, growing) | bills_as_json(command, fixed)))
    else:
        _print(command, shares, network, fixed, growing, cores)
    return 0


def _read_shares(path: Path, recipe: str) -> "CostProfile":
    """Read the costs of a recipe from a file of --save or of `lockstep doctor --gpu`, which has them by recipe."""
    from lockstep.tools.bench.scaling_model import shares_from

    try:
        record = read_json(path)
        shares = record["shares"]
        if "steps" not in record:
            return shares_from(shares)
        if recipe in shares:
            return shares_from(shares[recipe])
    except (OSError, UnreadableFileError, ValueError, LookupError, TypeError) as error:
        raise ConfigError(
            f"{path} contains no measurement: {error}.", "Create one: lockstep plan RECIPE --save FILE."
        ) from None
    raise ConfigError(
        f"{path} contains no measurement of {recipe}. It contains: {', '.join(map(str, shares)) or 'none'}.",
        f"Measure it on that machine: lockstep plan {recipe} --save FILE.",
    )


def _measure_shares(command: Plan, recipe: Recipe) -> "CostProfile":
    """Measure this machine. Use one thread if the predicted processes share it."""
    from lockstep.io.rich_console import PrintableConsole
    from lockstep.launch.device import configure_torch, threads_per_process
    from lockstep.launch.world import WorldInfo
    from lockstep.tools.bench.busy import warn_if_busy
    from lockstep.tools.bench.scaling_model import measure_shares

    if command.network != "here":  # _measure_network has warned
        warn_if_busy()
    configure_torch(recipe.run, WorldInfo(local_size=threads_per_process(1) if command.network == "here" else 1))
    with PrintableConsole(stderr=True).status("measuring") as status:
        shares = measure_shares(recipe, command.rounds, status.update)
    if command.save is not None:
        command.save.write_text(json.dumps({"recipe": recipe.name, "shares": asdict(shares)}, indent=1) + "\n")
    return shares


def _network(command: Plan, rest: list[str]) -> "NetworkModel":
    """Return the network of --network, or the one in --measured if it has one."""
    from lockstep.tools.bench.network_model import find_network

    if command.network == "here":
        return _measure_network(command, rest)
    if command.network is not None and command.network.endswith(".json"):
        return _read_network(Path(command.network))
    if command.network is None and command.measured is not None and read_json(command.measured).get("network"):
        return _read_network(command.measured)
    return find_network(command.network or "nvlink+ib")


def _measure_network(command: Plan, rest: list[str]) -> "NetworkModel":
    """Measure the loopback of this machine by timing all-reduces between two processes."""
    from lockstep.io.rich_console import PrintableConsole
    from lockstep.launch.launcher import launch_captured
    from lockstep.tools.bench.busy import warn_if_busy

    warn_if_busy()
    args = ["plan", command.recipe, *rest, *command.flags()]
    with temporary_directory("plan") as directory, PrintableConsole(stderr=True).status("measuring the network"):
        path = directory / "here.json"
        cause = launch_captured([*args, "--time-network", str(path)], 2)
        if cause:
            raise ConfigError(f"all-reduces could not be timed on two processes: {cause}")
        return _read_network(path)


def _read_network(path: Path) -> "NetworkModel":
    """Fit a network of equal links to the times in a file of --time-network or of `lockstep doctor --gpu`."""
    from lockstep.tools.bench.network_model import NetworkModel, fit_link

    try:
        record = read_json(path)
        times = record.get("network") or record
        link = fit_link([int(size) for size in times["seconds"]], list(times["seconds"].values()), times["processes"])
        contention = float(times.get("contention", 1.0))
        jitter = tuple(float(factor) for factor in times.get("jitter", ()))
        if not all(map(math.isfinite, (link.latency, link.bandwidth, contention, *jitter))):
            raise ValueError("its times are not finite")
    except (OSError, UnreadableFileError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError) as error:
        raise ConfigError(
            f"{path} contains no all-reduce times: {error!r}.",
            f"Create it: torchrun ... -m lockstep plan RECIPE --time-network {path}",
        ) from None
    return NetworkModel(path.stem, 2**20, link, link, launch=0.0, contention=contention, jitter=jitter)


def _time_network(recipe: Recipe, path: Path, sizes: tuple[int, ...]) -> int:
    from lockstep.distributed import Runtime
    from lockstep.tools.bench import measure

    if sizes and min(sizes) < 4:
        raise ConfigError("--sizes must be at least 4, the bytes of one float32.", "Use for example --sizes 64 65536.")
    with Runtime.start(recipe.run) as runtime:
        if runtime.size == 1:
            raise ConfigError(
                "--time-network needs at least 2 processes.", "Start them: torchrun --nproc-per-node=2 ..."
            )
        seconds = measure.time_reductions(runtime, sizes=sizes or measure.REDUCTIONS)
        iteration_times = measure.time_contention(measure.IterationTimer(recipe, runtime), times=24)
        if runtime.is_main:
            contention, jitter = measure.contention_and_jitter(iteration_times)
            record = {"processes": runtime.size, "seconds": seconds, "contention": contention, "jitter": jitter}
            path.write_text(json.dumps(record))
    return 0


def _print(
    command: Plan,
    shares: "CostProfile",
    network: "NetworkModel",
    fixed: list["Prediction"],
    growing: list["Prediction"],
    cores: int | None,
) -> None:
    from lockstep.io.rich_console import PrintableConsole
    from lockstep.tools.bench.scaling_model import scaling_limit, slowest_of

    console, name = PrintableConsole(), command.recipe
    console.print(f"{name}: fixed global batch")  # not the title of the table, which wraps to the width of the table
    console.print(_table(fixed))
    console.print(scaling_limit(shares, fixed, cores))
    console.print()
    console.print(f"{name}: global batch proportional to GPUs")
    console.print(_table(growing))
    console.print(
        "A larger batch learns less per sample: times are to the same number of samples, not to the same score. "
        "--algo.lr-scaling sets how the learning rate scales with the batch."
    )
    if command.has_bill:
        rows = bills(command, fixed)
        console.print(f"\n{name}: bill, fixed global batch")
        console.print(bill_table(rows, _duration))
        if advice := interval_advice(rows, {row.processes: row.steps_per_second for row in fixed}):
            console.print(advice)
    console.print("\nAssumptions:")
    slower = "" if network.contention == 1.0 else f", and {network.contention - 1:.0%} slower when all cores are busy"
    crowded = () if cores is None else (f"All processes share {cores} cores, one thread each{slower}.",)
    jitter = network.jitter or shares.jitter
    waits = f"All processes wait for the slowest: the slower of two takes {slowest_of(2, jitter):.2f}x the mean time."
    priced = BILL_ASSUMPTIONS if command.has_bill else ()
    for line in (network.describe(), *crowded, *([waits] if jitter else []), *ASSUMPTIONS, *priced):
        console.print(f"  - {line}")


def _table(rows: list["Prediction"]) -> Any:
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))  # fits 80 columns
    for column in ("GPUs", "batch", "steps/s", "effic.", "time", "waiting", "memory", "way"):
        table.add_column(column, justify="right", overflow="fold")  # never truncate a number
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
    """Format hours in a readable unit."""
    for unit, length in (("days", 24.0), ("h", 1.0), ("min", 1 / 60)):
        if hours >= (2 * length if unit == "days" else length):
            return f"{hours / length:,.1f} {unit}"
    return f"{hours * 3600:.1f} s"


def _size(memory: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if memory >= size:
            return f"{memory / size:,.1f} {unit}"
    return f"{memory / 2**10:,.0f} KiB"
