"""The supervised examples: check, train, eval, report, export and prove work on the files as they are."""

import json
from pathlib import Path

import pytest

import lockstep
from lockstep.cli import main

EXAMPLES = Path(__file__).parents[2] / "examples"
METRICS = {"digits": "accuracy", "tabular": "r2", "pyg_graphs": "r2"}
"""Examples, and a metric of each."""


@pytest.fixture(scope="module", params=METRICS)
def run(request, tmp_path_factory):
    """Return the name of an example and a smoke run of it."""
    place = tmp_path_factory.mktemp(request.param)
    words = [f"run.runs_dir={place}", "run.name=run", "run.device=cpu"]
    assert main(["train", str(EXAMPLES / f"{request.param}.py"), "--smoke", *words]) == 0
    return request.param, place / "run"


def test_check_of_example_finds_no_fault(run, capsys):
    assert main(["check", str(EXAMPLES / f"{run[0]}.py")]) == 0


def test_eval_and_report_of_example_work(run, tmp_path, capsys):
    name, path = run
    capsys.readouterr()
    assert main(["eval", str(path), "--json"]) == 0
    assert METRICS[name] in json.loads(capsys.readouterr().out)
    assert main(["eval", str(path), "--plots", str(tmp_path / "plots")]) == 0
    assert list((tmp_path / "plots").glob("*.png"))
    assert main(["report", str(path), "--out", str(tmp_path / "report.html")]) == 0
    assert (tmp_path / "report.html").stat().st_size > 10_000


@pytest.mark.parametrize("format", ["safetensors", "pt2", pytest.param("onnx", marks=pytest.mark.slow)])
def test_export_of_example_equals_policy(run, format, tmp_path, capsys):
    assert main(["export", str(run[1]), "--to", format, "--out", str(tmp_path / "model")]) == 0  # it compares outputs


@pytest.mark.distributed
@pytest.mark.parametrize("name", METRICS)
def test_example_has_one_hash_on_one_and_two_processes(name):
    proof = lockstep.prove(str(EXAMPLES / f"{name}.py"), procs=(1, 2), run={"device": "cpu"})
    assert proof["verdict"] == "one agent"


@pytest.mark.parametrize("name", ["digits", "tabular"])
def test_example_has_at_most_forty_lines(name):
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 40
