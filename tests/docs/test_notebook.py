"""The example notebook runs from top to bottom, and is stored with its output."""

from pathlib import Path

import pytest

nbformat = pytest.importorskip("nbformat", reason="the extra `dev` is not installed: nbclient and ipykernel")
nbclient = pytest.importorskip("nbclient", reason="the extra `dev` is not installed: nbclient and ipykernel")
pytest.importorskip("ipykernel", reason="the extra `dev` is not installed: nbclient and ipykernel")

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples/train.ipynb"


def code_cells(notebook):
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def printed(notebook):
    """Return what the code printed, without the console output of training."""
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    return "".join(output.text for output in outputs if output.output_type == "stream" and output.name == "stdout")


@pytest.fixture
def kernel_environment(monkeypatch, tmp_path):
    """Give the kernel this checkout, one thread, and directories of its own."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    for name in ("JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR", "IPYTHONDIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))


@pytest.mark.timeout(300)
def test_notebook_executes_and_trains(kernel_environment, tmp_path):
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbclient.NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(tmp_path)}}).execute()
    text = printed(notebook)
    assert "finished, 4 checkpoints" in text
    assert "finished 6144" in text
    assert (tmp_path / "runs").is_dir()


def test_stored_notebook_is_valid_and_has_output_without_errors():
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    nbformat.validate(notebook)
    cells = code_cells(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert [output for cell in cells for output in cell.outputs if output.output_type == "error"] == []
    assert "samples  return" in printed(notebook)
