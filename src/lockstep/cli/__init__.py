"""Command line: one module per subcommand. Torch is imported only by the subcommands that need it."""

import errno
import gc
import importlib
import os
import select
import sys
from collections.abc import Sequence

from lockstep import UNSUPPORTED_PLATFORM, __version__
from lockstep.io.printable import make_errors_printable, print_line, write_text

_INVALID_PATH_ERRNOS = (errno.ENAMETOOLONG, errno.ELOOP)

COMMANDS = {
    "train": "Train a recipe on one or more processes.",
    "resume": "Resume a run from its newest checkpoint, on any number of processes.",
    "fork": "Start a new run from a whole checkpoint of another run, with changed settings.",
    "sweep": "Search for good settings of a recipe; stop bad trials early.",
    "eval": "Evaluate a run's policy over many episodes or a dataset split.",
    "play": "Watch a run's policy in the terminal or a window, or record a GIF or MP4.",
    "export": "Export a policy: safetensors, ONNX, pt2, Stable-Baselines3 or Jidi.",
    "import": "Import weights (Stable-Baselines3, an export, a state dict) as a new run.",
    "episodes": "Write a data set of episodes for offline training, from runs or the authors' TD-MPC2 data.",
    "verify": "Train random segments of a run again and compare, or compare an export with its run.",
    "replay": "Train a run again up to one update, and dump or debug what goes into it.",
    "bisect": "Find the first iteration, update and tensor in which two runs differ.",
    "verify-files": "Check the checkpoint files of a run and repair damaged replay data.",
    "push": "Publish a run on the Hugging Face Hub.",
    "pull": "Download a run from the Hugging Face Hub or from a bucket.",
    "ls": "List runs with their state, progress and returns.",
    "report": "Write one HTML file about runs: curves, evaluations, speed, proof, config.",
    "check": "Check a task or data set of your own before training on it.",
    "bench": "Measure a recipe's throughput and compare it with the bare engine.",
    "benchmark": "Train a suite of tasks with several seeds and compare with published scores.",
    "plan": "Predict throughput, time, memory and dollars on more GPUs.",
    "backtest": "Backtest a trading recipe on price files (walk-forward), or a run.",
    "jobfile": "Print a job file for SLURM, Kubernetes or SkyPilot.",
    "doctor": "Check this machine and print a fix for every problem found.",
    "warmup": "Compile all kernels ahead, so that the first run starts at once.",
    "audit": "Check that all processes of a training script train the same model.",
    "prove": "Prove that any number of processes, killed or not, trains the same agent.",
}


SERVE = "--fork-server"
"""Internal first argument of a fork server that runs as a separate process."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `lockstep COMMAND ...` and return the exit code."""
    if arguments is not None:  # called from Python, not as a program
        return _run(list(arguments), is_program=False)
    make_errors_printable()
    try:
        return _run(sys.argv[1:], is_program=True)
    except BrokenPipeError:
        if not _stdout_is_closed():
            raise
        return 1


def _run(args: list[str], is_program: bool) -> int:
    if args[:1] == [SERVE]:
        from lockstep.cli.preload import serve

        args = serve(int(args[1]))  # returns only in a forked worker, with the worker's arguments
    if not args or args[0] in ("-h", "--help"):
        _print_help()
        return 0
    if args[0] == "--version":
        print_line(f"lockstep {__version__}")
        return 0
    if UNSUPPORTED_PLATFORM:
        return fail(UNSUPPORTED_PLATFORM)
    command = args[0]
    if command not in COMMANDS:
        import difflib

        matches = difflib.get_close_matches(command, COMMANDS, n=1)
        hint = f"Did you mean '{matches[0]}'?" if matches else "See lockstep --help."
        return fail(f"'{command}' is not a command.\n{hint}")
    from lockstep.config import ConfigError
    from lockstep.launch.process_lifetime import die_with_launcher

    die_with_launcher()  # before the torch import: it takes seconds, in which the launcher may die
    if is_program:  # the imports of this process are known
        from lockstep.cli.preload import preload

        args = preload(args) or args
        command = args[0]
    try:
        module = "import_model" if command == "import" else command.replace("-", "_")
        run = importlib.import_module(f"lockstep.cli.{module}").run
        if not any("://" in argument for argument in args):
            return int(run(args[1:]))
        from lockstep.cli.bucket_runs import with_local_copies

        with with_local_copies(command, args[1:]) as arguments:
            return int(run(arguments))
    except ConfigError as error:
        return fail(str(error))
    except OSError as error:
        if error.errno not in _INVALID_PATH_ERRNOS:
            raise
        return fail(f"{error.filename!r:.300} is not a valid path: {error.strerror}.\nUse another path.")
    except KeyboardInterrupt:
        return 130
    finally:
        if is_program:
            gc.freeze()  # skip the final garbage collection of torch's modules, which takes most of a second


def _stdout_is_closed() -> bool:
    """Return whether the reader of standard output is gone, as with `lockstep ls | head`. If so, discard the rest."""
    poll = select.poll()
    poll.register(sys.stdout.fileno())
    closed = any(events & select.POLLERR for _, events in poll.poll(0))
    if closed:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes it at exit
    return closed


def fail(message: str) -> int:
    """Print an error to stderr and return the exit code of a failed command."""
    write_text(sys.stderr, f"lockstep: {message}\n")
    return 2


def _print_help() -> None:
    from rich.table import Table

    from lockstep.io.rich_console import PrintableConsole

    console = PrintableConsole(markup=True)
    console.print("[bold]lockstep[/bold]  many processes, one agent\n")
    table = Table.grid(padding=(0, 3))
    for command, description in COMMANDS.items():
        table.add_row(f"  lockstep [bold]{command}[/bold]", description)
    console.print(table)
    console.print(
        "\nOptions of a command: lockstep COMMAND --help. First run: [bold]lockstep train snake-ppo --smoke[/bold]"
    )
