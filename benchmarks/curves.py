"""Learning curves on the documentation pages: train the seeds of an experiment and plot them.

    python benchmarks/curves.py train gym-ppo --seeds 0 1 2
    python benchmarks/curves.py plot gym-ppo --references ../shared/data/rl-curves
    python benchmarks/curves.py plot --runs runs/ONE runs/TWO --metric apples_mean --labels fp32 bf16 --out curve.svg

`train` trains the missing seeds one after the other. It appends one line per finished seed to
benchmarks/results/curves/NAME.jsonl, and resumes an interrupted run. `plot` draws docs/pictures/NAME-curve.svg from
these lines, for all experiments that have some if no NAME is given.
"""

import argparse
import os
import resource
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter

from lockstep.io.jsonl import CONFIG, METRICS, append_jsonl, read_jsonl, read_status
from lockstep.tools.report.reference_curves import first_connected, read_reference, scores_by_step

ROOT = Path(__file__).parents[1]
RESULTS, PICTURES = ROOT / "benchmarks/results/curves", ROOT / "docs/pictures"
PREEMPTED = 75
"""Exit code of a run that saved and stopped because of a signal."""
NO_VIDEO = "run.record_video=false"  # rendering takes as long as many updates, and does not change a run
SVG = {"svg.hashsalt": "lockstep", "svg.fonttype": "none"}  # the same data give the same file; text is text


class Reference(NamedTuple):
    """A published curve: a CSV file with the columns step, reward and seed, in a directory of `--references`."""

    file: str
    label: str
    steps_per_sample: int = 1


class Overlay(NamedTuple):
    """Another experiment to draw in the same picture: a metric of a model of several tasks."""

    experiment: str
    metric: str
    tasks: int
    """Samples of the model are divided by the number of tasks."""
    label: str


class Experiment(NamedTuple):
    arguments: str
    """Arguments of `lockstep train`."""
    metric: str
    """Metric of evaluations, as in metrics.jsonl without `eval/`."""
    ylabel: str
    baselines: dict[str, float]
    """Values by label, from `python benchmarks/baselines.py NAME`."""
    reference: Reference | None = None
    stop_at: int | None = None
    """Stop at the first evaluation with at least this many samples. The schedules remain those of the whole run."""
    other_metrics: tuple[str, ...] = ()
    """Metrics to keep in the data file beside `metric`."""
    overlay: Overlay | None = None


THREE_TASKS = ("cartpole-swingup", "cup-catch", "walker-walk")


def tdmpc2_experiment(task: str, random_return: float) -> Experiment:
    return Experiment(
        f"dmc-tdmpc2 --preset small task={task} run.total_samples=50000 run.eval_every=5000",
        "return_mean",
        f"return, {task}",
        {"random actions": random_return},
        Reference(f"{task}.csv", "TD-MPC2 of its authors", steps_per_sample=2),
        overlay=Overlay("tdmpc2-three-tasks", f"return/{task}_mean", len(THREE_TASKS), "one model of three tasks"),
    )


EXPERIMENTS = {
    "snake": Experiment(
        "snake-ppo run.eval_every=131072", "apples_mean", "apples", {"greedy script": 19.7}, stop_at=1_500_000
    ),
    "snake-features": Experiment("snake-ppo --preset features", "apples_mean", "apples", {"greedy script": 19.7}),
    "snake-tiny": Experiment("snake-ppo --preset tiny", "apples_mean", "apples", {"greedy script": 12.05}),
    "gym-ppo": Experiment(
        "gym-ppo run.eval_every=10000 run.eval_episodes=32",
        "return_mean",
        "return, CartPole-v1",
        {"random actions": 22.2},
        Reference("zoo-ppo-CartPole-v1_1.csv", "PPO of SB3 (RL Zoo)"),
    ),
    "gym-ppo-lstm": Experiment(
        "gym-ppo-lstm run.eval_every=10000 run.eval_episodes=32",
        "return_mean",
        "return, CartPole-v1",
        {"random actions": 22.2},
    ),
    "gym-ddpg": Experiment(
        "gym-ddpg run.eval_every=2000 run.eval_episodes=32",
        "return_mean",
        "return, Pendulum-v1",
        {"random actions": -1217},
        Reference("zoo-ddpg-Pendulum-v1_1.csv", "DDPG of SB3 (RL Zoo)"),
    ),
    "gym-sac": Experiment(
        "gym-sac run.eval_every=2000 run.eval_episodes=32",
        "return_mean",
        "return, Pendulum-v1",
        {"random actions": -1217},
        Reference("zoo-sac-Pendulum-v1_1.csv", "SAC of SB3 (RL Zoo)"),
    ),
    "team-snakes": Experiment(
        "team-ddpg",
        "won_mean",
        "games won against level 2",
        {"level 2 against itself": 0.466},
    ),
    "trading": Experiment(
        "trading-lstm run.eval_every=16384",
        "return_mean",
        "log equity gained, after costs",
        {"no trades": 0.0, "buy and hold": 0.0287},
    ),
    "cricket": Experiment("cricket-gnn", "mae", "validation MAE, runs", {"linear regression": 8.003}),
    "tdmpc2": tdmpc2_experiment("cartpole-swingup", 46.6),
    "tdmpc2-cup-catch": tdmpc2_experiment("cup-catch", 23.9),
    "tdmpc2-walker-walk": tdmpc2_experiment("walker-walk", 41.2),
    "tdmpc2-three-tasks": Experiment(
        f"dmc-tdmpc2 --preset small task={','.join(THREE_TASKS)} task.num_envs=24 run.total_samples=150000 "
        "run.eval_every=15000 run.eval_episodes=24",
        "return_mean",
        "mean return of three tasks",
        {"random actions": 37.2},
        other_metrics=tuple(f"return/{task}_mean" for task in THREE_TASKS),
    ),
}


# -- train -------------------------------------------------------------------------------------------------------------


def train(args: argparse.Namespace) -> None:
    if args.name == "cricket" and not args.data:
        sys.exit("Give the Cricsheet archive with --data.")
    experiment = EXPERIMENTS[args.name]
    path = RESULTS / f"{args.name}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    finished = {line["seed"] for line in read_jsonl(path)} if path.exists() else set()
    for seed in args.seeds:
        if seed in finished:
            print(f"{args.name}: seed {seed} is in {path}.")
            continue
        append_jsonl(path, train_seed(args, experiment, seed))


def train_seed(args: argparse.Namespace, experiment: Experiment, seed: int) -> dict:
    """Train one seed to its end, or until `stop_at`. Return its line of the data file."""
    run = args.runs / f"{args.name}-{seed}"
    stop_at = args.stop_at or experiment.stop_at
    command = ["train", *experiment.arguments.split(), f"run.seed={seed}"]
    data = ["--data", str(args.data)] if args.data else []
    seconds = None
    if not (run / CONFIG).exists():
        directory = [f"run.runs_dir={args.runs}", f"run.name={run.name}", NO_VIDEO]
        seconds = start_lockstep([*command, *data, *directory], run, experiment.metric, stop_at)
    elif not is_complete(run, experiment.metric, stop_at):
        start_lockstep(["resume", str(run), NO_VIDEO], run, experiment.metric, stop_at)
    points = read_points(run, experiment.metric)
    # The run may have been evaluated once more before it stopped.
    last = min((samples for samples in points if stop_at and samples >= stop_at), default=max(points))
    line = {
        "command": "OMP_NUM_THREADS=1 "
        + shlex.join(["lockstep", *command, *(["--data", args.data.name] if args.data else [])]),
        "commit": subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=ROOT, text=True).strip(),
        "seed": seed,
        "metric": experiment.metric,
        "points": [[samples, value] for samples, value in sorted(points.items()) if samples <= last],
    }
    if experiment.other_metrics:
        line["other_points"] = {
            metric: [[samples, value] for samples, value in sorted(read_points(run, metric).items()) if samples <= last]
            for metric in experiment.other_metrics
        }
    if read_status(run).get("state") != "finished":
        line["stopped_at"] = last
    if seconds is not None:  # not known if the run was interrupted
        line["seconds"] = round(seconds)
    return line


def start_lockstep(arguments: list[str], run: Path, metric: str, stop_at: int | None) -> float:
    """Run a command of Lockstep on one thread until the run is complete. Return its CPU seconds.

    Exits if the command ends before that.
    """
    print("lockstep", shlex.join(arguments), flush=True)
    before = child_cpu_seconds()
    process = subprocess.Popen(
        [sys.executable, "-m", "lockstep", *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        start_new_session=True,  # Ctrl-C reaches this script only, which then asks the run to save and stop
    )
    try:
        while process.poll() is None and not (stop_at and is_complete(run, metric, stop_at)):
            time.sleep(1)
    finally:
        if process.poll() is None:
            process.terminate()
        code = process.wait()
    if code not in (0, PREEMPTED) or not is_complete(run, metric, stop_at):
        sys.exit(f"{run} ended early with exit code {code}. The same command resumes it.")
    return child_cpu_seconds() - before


def child_cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def is_complete(run: Path, metric: str, stop_at: int | None) -> bool:
    finished = read_status(run).get("state") == "finished"
    return finished or bool(stop_at and max(read_points(run, metric), default=0) >= stop_at)


def read_points(run: Path, metric: str) -> dict[int, float]:
    """Return the values of a metric of evaluations by samples."""
    lines = read_jsonl(run / METRICS) if (run / METRICS).exists() else []
    return {line["samples"]: line[f"eval/{metric}"] for line in lines if f"eval/{metric}" in line}


# -- plot --------------------------------------------------------------------------------------------------------------


def plot(args: argparse.Namespace) -> None:
    if args.runs:
        with matplotlib.rc_context(SVG):
            plot_runs(args).savefig(args.out, metadata={"Date": None})
        return
    names = args.names or [name for name in EXPERIMENTS if (RESULTS / f"{name}.jsonl").exists()]
    for name in names:
        path = RESULTS / f"{name}.jsonl"
        if not path.exists():
            sys.exit(f"There is no {path}. Train the experiment first.")
        plot_experiment(name, read_jsonl(path), args.references, PICTURES / f"{name}-curve.svg")


def plot_experiment(name: str, seeds: list[dict], references: list[Path], path: Path) -> None:
    """Draw each seed, their mean, the baselines and, if its file is in `references`, the published curve."""
    experiment = EXPERIMENTS[name]
    with matplotlib.rc_context(SVG):
        figure, axes = new_figure(experiment.ylabel)
        axes.set_title(title(experiment, seeds), fontsize="medium")
        if experiment.reference:
            draw_reference(name, axes, experiment.reference, references, max(line["points"][-1][0] for line in seeds))
        for line in seeds:
            axes.plot(*zip(*line["points"], strict=True), "C0", linewidth=0.8, alpha=0.6, gid=f"seed-{line['seed']}")
        curves = [dict(line["points"]) for line in seeds]
        shared = sorted(set.intersection(*map(set, curves)))
        means = [np.mean([curve[samples] for curve in curves]) for samples in shared]
        label = "Lockstep, mean of the seeds" if len(seeds) > 1 else "Lockstep"
        axes.plot(shared, means, "C0", linewidth=2.2, label=label, gid="mean")
        if experiment.overlay and (overlaid := RESULTS / f"{experiment.overlay.experiment}.jsonl").exists():
            draw_overlay(axes, experiment.overlay, read_jsonl(overlaid))
        for number, (label, value) in enumerate(experiment.baselines.items()):
            axes.axhline(value, color=f"C{number + 1}", linestyle="--", label=label, gid=f"baseline-{number}")
        axes.legend(loc="best", framealpha=0.85, edgecolor="none", fontsize="small")
        figure.savefig(path, metadata={"Date": None})


def title(experiment: Experiment, seeds: list[dict]) -> str:
    arguments = " ".join(word for word in experiment.arguments.split() if not word.startswith("run."))
    stopped = [line["stopped_at"] for line in seeds if "stopped_at" in line]
    note = f", stopped at {EngFormatter(places=1, sep='')(max(stopped))} samples" if stopped else ""
    return f"{arguments}: {len(seeds)} seed{'s' * (len(seeds) != 1)}{note}"


def draw_overlay(axes, overlay: Overlay, seeds: list[dict]) -> None:
    for line in seeds:
        points = line["other_points"][overlay.metric]
        x, values = zip(*[(samples / overlay.tasks, value) for samples, value in points], strict=True)
        label = overlay.label if line is seeds[0] else None
        axes.plot(x, values, "C3", linewidth=1.4, label=label, gid=f"overlay-{line['seed']}")


def draw_reference(name: str, axes, reference: Reference, directories: list[Path], samples: int) -> None:
    """Draw the mean of a published curve and its range over seeds (vertical lines), in gray."""
    paths = [directory / reference.file for directory in directories if (directory / reference.file).exists()]
    if not paths:
        print(
            f"{name}: plotted without the reference curve, because {reference.file} is in no directory of --references."
        )
        return
    points = read_reference(paths[0])
    scores = scores_by_step(points, until=samples * reference.steps_per_sample)
    x = [step / reference.steps_per_sample for step, _ in scores]
    count = len({point.seed for point in points})
    label = f"{reference.label}, {count} seed{'s' * (count != 1)}"
    means, start = [np.mean(values) for _, values in scores], first_connected(x)
    axes.plot(x, means, color="0.5", linestyle="", marker="o", markersize=3, label=label, gid="reference")
    if start < len(x):
        axes.plot(x[start:], means[start:], color="0.5", gid="reference-line")
    if count > 1:
        low, high = [min(values) for _, values in scores], [max(values) for _, values in scores]
        axes.vlines(x, low, high, color="0.5", gid="reference-range")


def plot_runs(args: argparse.Namespace) -> Figure:
    """Draw a metric of any runs. Runs with the same label are seeds of one experiment and have one color."""
    figure, axes = new_figure(args.ylabel or args.metric)
    labels = args.labels or [run.name for run in args.runs]
    colors = {label: f"C{number}" for number, label in enumerate(dict.fromkeys(labels))}
    for run, label in zip(args.runs, labels, strict=True):
        points = sorted(read_points(run, args.metric).items())
        axes.plot(*zip(*points, strict=True), color=colors[label], marker="o", markersize=3.5)
    for label, color in colors.items():
        axes.plot([], [], color=color, label=label)
    axes.legend(loc="best", frameon=False)
    return figure


def new_figure(ylabel: str):
    figure = Figure(figsize=(6.4, 3.2), layout="constrained", facecolor="white")  # readable in light and dark mode
    axes = figure.subplots()
    axes.set(xlabel="samples", ylabel=ylabel)
    axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    axes.grid(alpha=0.3)
    return figure, axes


def experiment_name(text: str) -> str:
    if text not in EXPERIMENTS:
        raise argparse.ArgumentTypeError(f"{text} is not one of {', '.join(EXPERIMENTS)}")
    return text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    training = commands.add_parser("train", help="train the missing seeds of an experiment")
    training.set_defaults(run=train)
    training.add_argument("name", type=experiment_name, metavar="NAME", help=", ".join(EXPERIMENTS))
    training.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    training.add_argument("--runs", type=Path, default=Path("runs/curves"), help="parent of the run directories")
    training.add_argument("--stop-at", type=int, help="samples of the last evaluation (default: of the experiment)")
    training.add_argument("--data", type=Path, help="data of cricket: the Cricsheet archive")
    plotting = commands.add_parser("plot", help="plot experiments, or any runs")
    plotting.set_defaults(run=plot)
    plotting.add_argument("names", nargs="*", type=experiment_name, metavar="NAME", help=", ".join(EXPERIMENTS))
    plotting.add_argument("--references", nargs="+", type=Path, default=[], help="directories of published curves")
    plotting.add_argument("--runs", nargs="+", type=Path, help="run directories to plot instead of an experiment")
    plotting.add_argument("--metric", default="return_mean", help="metric of evaluations in metrics.jsonl")
    plotting.add_argument("--labels", nargs="+")
    plotting.add_argument("--ylabel")
    plotting.add_argument("--out", type=Path, default=Path("curve.svg"))
    args = parser.parse_args()
    args.run(args)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # stop the run that was started, too
    main()
