"""benchmarks/curves.py: the data files and plots of the learning curves on the documentation pages."""

import importlib.util
import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from lockstep.cli.options import parse_recipe, parse_train, resolve

pytest.importorskip("matplotlib")


def load_script():
    path = Path(__file__).parents[2] / "benchmarks" / "curves.py"
    spec = importlib.util.spec_from_file_location("curves", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def curves(tmp_path, monkeypatch):
    module = load_script()
    reference = module.Reference("reference.csv", "reference", steps_per_sample=2)
    experiment = module.Experiment("gym-ppo --smoke", "return_mean", "return", {"random": 20.0, "zero": 0.0}, reference)
    monkeypatch.setattr(module, "EXPERIMENTS", {"made-up": experiment})
    monkeypatch.setattr(module, "RESULTS", tmp_path)
    monkeypatch.setattr(module, "PICTURES", tmp_path)
    return module


def run_script(curves, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["curves.py", *map(str, arguments)])
    curves.main()


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def write_seeds(directory):
    points = [[[100, 10], [200, 400]], [[100, 40], [200, 500], [300, 500]]]
    write_lines(
        directory / "made-up.jsonl",
        [{"seed": seed, "points": curve, "stopped_at": 300} for seed, curve in enumerate(points)],
    )


def read_elements(svg):
    return {node.get("id"): node for node in ElementTree.fromstring(svg).iter() if node.get("id")}


def path_of(element):
    return next(node for node in element.iter() if node.get("d")).get("d")


def heights(element):
    """Vertical coordinates of a line in the plot."""
    numbers = path_of(element).replace("M", "").replace("L", "").split()
    return [float(number) for number in numbers[1::2]]


def test_plot_draws_seeds_mean_and_baselines_without_reference(curves, tmp_path, monkeypatch, capsys):
    write_seeds(tmp_path)
    run_script(curves, monkeypatch, "plot", "made-up")
    svg = (tmp_path / "made-up-curve.svg").read_text()
    drawn = read_elements(svg)
    assert {"seed-0", "seed-1", "mean", "baseline-0", "baseline-1"} <= drawn.keys()
    assert not {"seed-2", "baseline-2", "reference", "reference-range"} & drawn.keys()
    first, second, mean = (heights(drawn[name]) for name in ("seed-0", "seed-1", "mean"))
    assert mean == pytest.approx([(one + other) / 2 for one, other in zip(first, second[:2], strict=True)])
    texts = {node.text for node in ElementTree.fromstring(svg).iter() if node.tag.endswith("text")}
    assert {"gym-ppo --smoke: 2 seeds, stopped at 300.0 samples", "samples", "return", "random", "zero"} <= texts
    assert "without the reference curve" in capsys.readouterr().out


@pytest.mark.parametrize(("seeds", "steps"), [(1, (200, 300, 400, 600, 9000)), (3, (200, 9000))])
def test_plot_draws_reference_with_range_over_its_seeds(curves, tmp_path, monkeypatch, seeds, steps):
    write_seeds(tmp_path)
    rows = [f"{step},{step / 4 + seed},{seed}" for seed in range(seeds) for step in steps]
    (tmp_path / "reference.csv").write_text("\n".join(["step,reward,seed", *rows]))
    run_script(curves, monkeypatch, "plot", "--references", tmp_path)
    drawn = read_elements((tmp_path / "made-up-curve.svg").read_text())
    points = [node for node in drawn["reference"].iter() if node.tag.endswith("use")]
    assert len(points) == (4 if seeds == 1 else 2)  # at most one step beyond the last sample
    assert ("reference-line" in drawn) == (seeds == 1)  # not between a few points
    assert ("reference-range" in drawn) == (seeds > 1)


def test_plot_of_the_same_data_writes_the_same_bytes(curves, tmp_path, monkeypatch):
    write_seeds(tmp_path)
    written = set()
    for _ in range(2):
        run_script(curves, monkeypatch, "plot", "made-up")
        written.add((tmp_path / "made-up-curve.svg").read_bytes())
    assert len(written) == 1


@pytest.mark.distributed
def test_train_appends_one_line_per_seed_and_skips_finished_seeds(curves, tmp_path, monkeypatch):
    for _ in range(2):
        run_script(curves, monkeypatch, "train", "made-up", "--seeds", 4, "--runs", tmp_path / "runs")
    (line,) = map(json.loads, (tmp_path / "made-up.jsonl").read_text().splitlines())
    assert line["command"] == "OMP_NUM_THREADS=1 lockstep train gym-ppo --smoke run.seed=4"
    assert (line["seed"], line["metric"], [samples for samples, _ in line["points"]]) == (
        4,
        "return_mean",
        [1024, 2048],
    )
    assert line["seconds"] > 0
    assert "stopped_at" not in line


def test_train_stop_at_keeps_evaluations_until_the_first_at_that_count(curves, tmp_path, monkeypatch):
    run = tmp_path / "runs" / "made-up-0"
    run.mkdir(parents=True)
    (run / "config.yaml").write_text("")
    write_lines(run / "metrics.jsonl", [{"samples": count, "eval/return_mean": 1.0} for count in (100, 210, 300)])
    run_script(
        curves, monkeypatch, "train", "made-up", "--seeds", 0, "--stop-at", 200, "--runs", tmp_path / "runs"
    )  # starts no process: the run has come that far
    (line,) = map(json.loads, (tmp_path / "made-up.jsonl").read_text().splitlines())
    assert line["points"] == [[100, 1.0], [210, 1.0]]
    assert line["stopped_at"] == 210


@pytest.mark.parametrize("name", load_script().EXPERIMENTS)
def test_arguments_of_every_experiment_are_a_valid_training_command(name):
    experiment = load_script().EXPERIMENTS[name]
    options, rest, _ = parse_train([*experiment.arguments.split(), "run.seed=1"])
    recipe = resolve(parse_recipe(options, rest, "lockstep train"), 1)
    assert recipe.run.seed == 1
    assert recipe.run.total_samples > max(recipe.run.eval_every, experiment.stop_at or 0)


def test_plot_of_runs_has_one_color_per_label(curves, tmp_path, monkeypatch):
    runs = [tmp_path / name for name in ("one", "two", "three")]
    for run in runs:
        run.mkdir()
        write_lines(run / "metrics.jsonl", [{"samples": count, "eval/mae": count / 100} for count in (100, 200)])
    labels = ["fp32", "fp32", "bf16"]
    run_script(
        curves,
        monkeypatch,
        "plot",
        "--runs",
        *runs,
        "--metric",
        "mae",
        "--labels",
        *labels,
        "--out",
        tmp_path / "a.svg",
    )
    svg = (tmp_path / "a.svg").read_text()
    assert svg.count(">fp32<") == svg.count(">bf16<") == 1
    assert "#1f77b4" in svg
    assert "#ff7f0e" in svg
    assert "#2ca02c" not in svg


def test_plot_draws_the_model_of_several_tasks_over_samples_per_task(curves, tmp_path, monkeypatch):
    write_seeds(tmp_path)
    overlay = curves.Overlay("several", "return/one_mean", 3, "one model")
    monkeypatch.setitem(curves.EXPERIMENTS, "made-up", curves.EXPERIMENTS["made-up"]._replace(overlay=overlay))
    points = {"return/one_mean": [[300, 10], [600, 400]], "return/two_mean": [[300, 1], [600, 1]]}
    write_lines(tmp_path / "several.jsonl", [{"seed": 0, "points": [], "other_points": points}])
    run_script(curves, monkeypatch, "plot", "made-up")
    drawn = read_elements((tmp_path / "made-up-curve.svg").read_text())
    assert path_of(drawn["overlay-0"]) == path_of(drawn["seed-0"])
