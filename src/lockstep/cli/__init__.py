"""The command line: verbs first, one file each. Nothing here imports torch before a verb needs it."""

import errno
import gc
import importlib
import os
import sys
from collections.abc import Sequence

from lockstep.io.printable import make_errors_printable, write_text

_NO_PATH = (errno.ENAMETOOLONG, errno.ELOOP)

COMMANDS = {
    "train": "train a recipe on one process or many",
    "resume": "go on with a run, on any number of processes",
    "eval": "score a run's policy over many episodes",
    "play": "watch a run's policy in the terminal, a window, a GIF or an MP4",
    "export": "take a model away: safetensors, ONNX, pt2, for Stable-Baselines3 or for Jidi",
    "import": "bring a model in: of Stable-Baselines3, of an export, or a state dict",
    "verify-files": "check the files of a run's checkpoints, and repair damaged replay",
    "ls": "list runs and where they stand",
    "report": "write one HTML file about runs: curves, evaluations, speed, proof, config",
    "bench": "measure a recipe's speed beside the bare engine",
    "plan": "predict what more GPUs would bring, before renting them",
    "backtest": "walk a trading recipe forward over a file of prices",
    "jobfile": "print a job file for SLURM, Kubernetes or SkyPilot",
    "doctor": "look whether this machine is fit to train on, and say what mends it",
    "audit": "find out whether the processes of any training script train one model",
    "prove": "show that any number of processes, killed or not, trains the same agent",
}


SERVE = "--fork-server"
"""First argument of a fork server that is started as a process of its own. It is not a flag for users."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `lockstep VERB ...`; the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if arguments is None:  # a process of its own
        make_errors_printable()
    if words[:1] == [SERVE]:
        words = _serve(words)
    if not words or words[0] in ("-h", "--help"):
        _print_help()
        return 0
    if words[0] == "--version":
        from lockstep import __version__

        write_text(sys.stdout, f"lockstep {__version__}\n")
        return 0
    verb = words[0]
    if verb not in COMMANDS:
        import difflib

        near = difflib.get_close_matches(verb, COMMANDS, n=1)
        return fail(f"'{verb}' is not a verb.\n" + (f"Did you mean '{near[0]}'?" if near else "See lockstep --help."))
    from lockstep.config import ConfigError
    from lockstep.launch.process_lifetime import die_with_launcher

    die_with_launcher()  # before torch is imported, which takes seconds in which a launcher may die
    # Threads that spin while they wait make torch fifteen times slower where anything else wants the cores. It must
    # be said before torch is imported; a policy of the user's own stands.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    if arguments is None:  # this process is the command's own: what it has imported is known
        from lockstep.cli.preload import preload

        words = preload(words) or words
        verb = words[0]
    try:
        module = "import_model" if verb == "import" else verb.replace("-", "_")
        return int(importlib.import_module(f"lockstep.cli.{module}").run(words[1:]))
    except ConfigError as error:
        return fail(str(error))
    except OSError as error:
        if error.errno not in _NO_PATH:
            raise
        return fail(f"{error.filename!r:.300} cannot be a path: {error.strerror}.\nGive another one.")
    except KeyboardInterrupt:
        return 130
    finally:
        if arguments is None:
            gc.freeze()  # the interpreter would spend most of a second on collecting torch's modules before it ends


def _serve(words: Sequence[str]) -> list[str]:
    """Be a fork server. Returns only in a worker that it forked, with the worker's arguments."""
    from lockstep.cli.preload import serve

    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    return serve(int(words[1]))


def fail(message: str) -> int:
    """Say what is wrong on standard error; the exit code for a command that cannot be done."""
    write_text(sys.stderr, f"lockstep: {message}\n")
    return 2


def _print_help() -> None:
    from rich.table import Table

    from lockstep.io.rich_console import PrintableConsole

    console = PrintableConsole(markup=True)
    console.print("[bold]lockstep[/bold]  many processes, one agent\n")
    table = Table.grid(padding=(0, 3))
    for verb, words in COMMANDS.items():
        table.add_row(f"  lockstep [bold]{verb}[/bold]", words)
    console.print(table)
    console.print("\nlockstep VERB --help says more. A first run: [bold]lockstep train snake-ppo --smoke[/bold]")
