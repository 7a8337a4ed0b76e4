"""Job files validated by the programs that read them, in a separate environment."""

import subprocess
import venv

import pytest

from lockstep.cli import main

pytestmark = pytest.mark.slow

READERS = {
    # The schema drops unknown fields, so every field must survive a round trip.
    "k8s": """
import sys, yaml
from kubeflow_trainer_api import models

def kept(given, read):
    if isinstance(given, dict):
        return all(key in read and kept(given[key], read[key]) for key in given)
    if isinstance(given, list):
        return len(given) == len(read) and all(map(kept, given, read))
    return given == read

given = yaml.safe_load(open(sys.argv[1]))
assert kept(given, models.TrainerV1alpha1TrainJob.from_dict(given).to_dict())
""",
    "sky": """
import sys, sky
task = sky.Task.from_yaml(sys.argv[1])
assert task.num_nodes == 2
""",
}


@pytest.fixture(scope="module")
def readers(tmp_path_factory):
    """Python of an environment with the libraries of the readers."""
    place = tmp_path_factory.mktemp("readers")
    venv.create(place, with_pip=True)
    python = place / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "kubeflow_trainer_api", "skypilot", "pyyaml"], check=True)
    return python


@pytest.mark.parametrize("to", list(READERS))
def test_jobfile_output_is_accepted_by_its_reader(capsys, tmp_path, readers, to):
    assert main(["jobfile", to, "--nodes", "2", "--", "train", "snake-ppo", "--preset", "large"]) == 0
    path = tmp_path / "job.yaml"
    path.write_text(capsys.readouterr().out)
    ended = subprocess.run([readers, "-c", READERS[to], path], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    broken = path.read_text().replace("num_nodes", "nodes").replace("numNodes", "nodes")
    path.write_text(broken)
    assert subprocess.run([readers, "-c", READERS[to], path], capture_output=True).returncode != 0
