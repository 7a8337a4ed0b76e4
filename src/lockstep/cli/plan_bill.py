"""Dollars of `lockstep plan --price`: options, check and table."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from lockstep.config import ConfigError

if TYPE_CHECKING:
    from lockstep.tools.bench.cost_model import Bill
    from lockstep.tools.bench.scaling_model import Prediction

ASSUMPTIONS = (
    "Interruptions are independent, with a constant rate for each machine. One of them stops the run until a new "
    "machine trains; all GPUs are paid meanwhile.",
    "Without --notice, all work since the last save is lost. With it, the run saves when its machine is announced to "
    "stop (SIGTERM), and loses only the restart.",
)


@dataclass(frozen=True, kw_only=True)
class BillOptions:
    """Prices, and what interrupts a run."""

    price: float | None = None
    """Price of one GPU for an hour on demand, in dollars. With it, or with --spot-price, a bill is printed."""
    spot_price: float | None = None
    """Price of one GPU for an hour on interruptible machines, in dollars."""
    interruptions: str = "4/day"
    """Interruptions of one spot machine: N/hour, N/day or N/week."""
    gpus_per_machine: int = 8
    """GPUs of one machine."""
    save_seconds: float = 1.0
    """Seconds by which a save delays training. A run prints it as the work of a save."""
    restart_seconds: float = 120.0
    """Seconds from an interruption until the run trains again: a new machine, start and load."""
    notice: bool = False
    """Machines are stopped with a notice, and the run saves in time."""

    @property
    def has_bill(self) -> bool:
        return self.price is not None or self.spot_price is not None

    def check(self) -> None:
        """Raise ConfigError for invalid numbers."""
        from lockstep.tools.bench.cost_model import parse_interruptions

        for name in ("price", "spot_price", "save_seconds", "restart_seconds"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ConfigError(f"--{name.replace('_', '-')} is {value}.", "Use a number of 0 or more.")
        if self.gpus_per_machine < 1:
            raise ConfigError(f"--gpus-per-machine is {self.gpus_per_machine}.", "Use 1 or more.")
        try:
            parse_interruptions(self.interruptions)
        except ValueError:
            raise ConfigError(
                f"--interruptions is {self.interruptions!r}.", "Use a number for each machine, as 4/day or 0.5/hour."
            ) from None


def bills(options: BillOptions, rows: list["Prediction"]) -> list["Bill"]:
    """Return the bills of the predictions that are possible, on demand and on spot machines."""
    from lockstep.tools.bench.cost_model import Interruptions, bill, parse_interruptions

    result = []
    for row in rows:
        if row.impossible:
            continue
        machines = math.ceil(row.processes / options.gpus_per_machine)
        per_day = parse_interruptions(options.interruptions) * machines
        spot = Interruptions(per_day, options.save_seconds, options.restart_seconds, options.notice)
        on_demand = Interruptions(0, options.save_seconds, 0)
        for kind, price, what in (("on demand", options.price, on_demand), ("spot", options.spot_price, spot)):
            if price is not None:
                result.append(bill(kind, row.processes, row.hours, price, what))
    return result


def bills_as_json(options: BillOptions, rows: list["Prediction"]) -> dict[str, Any]:
    if not options.has_bill:
        return {}
    return {"bills": [{k: v if v != math.inf else None for k, v in asdict(b).items()} for b in bills(options, rows)]}


def bill_table(bills: list["Bill"], duration: Callable[[float], str]) -> Any:
    """Return the table. `duration` formats hours."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=(0, 1, 0, 0))
    for column in ("GPUs", "machines", "dollars", "time", "lost", "interruptions", "save every"):
        table.add_column(column, justify="left" if column == "machines" else "right", overflow="fold")
    for row in bills:
        often = "-" if row.save_interval >= row.training_hours * 3600 else duration(row.save_interval / 3600)
        totals = ["never ends", "-", "-", "-"]
        if row.hours < math.inf:
            lost = 1 - row.training_hours / row.hours if row.hours else 0.0
            totals = [f"{row.dollars:,.2f}", duration(row.hours), f"{lost:.1%}", f"{row.interruptions:,.1f}"]
        table.add_row(f"{row.processes:,}", row.kind, *totals, often)
    return table


def interval_advice(bills: list["Bill"], samples_per_second: dict[int, float]) -> str:
    """Return how to set the save interval of the cheapest bill with interruptions. Empty: there is none."""
    spot = [row for row in bills if row.kind == "spot" and row.hours < math.inf]
    if not spot:
        return ""
    best = min(spot, key=lambda row: row.dollars)
    if best.save_interval >= best.training_hours * 3600:
        return ""
    samples = max(1, round(best.save_interval * samples_per_second[best.processes]))
    gpus = "1 spot GPU" if best.processes == 1 else f"{best.processes} spot GPUs"
    return f"Best save interval on {gpus}: --run.save-every {samples}"
