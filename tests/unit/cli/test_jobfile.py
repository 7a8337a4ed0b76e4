"""Job files for SLURM, Kubernetes and SkyPilot: content, quoting and validation; Dockerfile."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from lockstep.cli import main
from lockstep.cli.jobfile import JobFile, render

ROOT = Path(__file__).parents[3]
TRAIN = ["train", "gym-ppo", "--smoke"]


def printed(capsys, *words):
    assert main(["jobfile", *words]) == 0
    return capsys.readouterr().out


def test_slurm_example_equals_rendered_job_file():
    """tests/fault/test_slurm.py runs the example on a cluster; the output differs only in its arguments."""
    about = (
        "#   sbatch examples/slurm/train.sbatch snake-ppo --preset large\n"
        "#   sbatch --nodes=4 --gpus-per-node=4 --partition=spot examples/slurm/train.sbatch snake-ppo\n#\n"
        "# Options before the script name are for SLURM and override those below. "
        "Arguments after it are for `lockstep train`."
    )
    text = render(JobFile(to="slurm", nodes=2), ["WORDS"], about)
    assert text.replace("train WORDS", 'train "$@"') == (ROOT / "examples" / "slurm" / "train.sbatch").read_text()


def test_slurm_script_is_valid_bash_and_quotes_arguments(capsys, tmp_path):
    text = printed(capsys, "slurm", "--nodes", "2", "--gpus", "4", "--", *TRAIN, "run.runs_dir=/shared/my runs")
    assert "#SBATCH --nodes=2\n" in text
    assert "lockstep train gym-ppo --smoke 'run.runs_dir=/shared/my runs' \\" in text
    (tmp_path / "job").write_text(text)
    subprocess.run(["bash", "-n", tmp_path / "job"], check=True)


def test_trainjob_has_requested_nodes_gpus_and_command(capsys):
    job = yaml.safe_load(printed(capsys, "k8s", "--nodes", "2", "--gpus", "4", "--name", "snakes", "--", *TRAIN))
    trainer = job["spec"]["trainer"]
    assert (job["kind"], job["metadata"]["name"]) == ("TrainJob", "snakes")
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 4)
    assert trainer["resourcesPerNode"]["limits"] == {"nvidia.com/gpu": "4"}
    words = shlex.split(trainer["command"][-1])
    assert words[:5] == ["exec", "lockstep", "train", "gym-ppo", "--smoke"]
    assert words[words.index("--procs") + 1] == "4"
    assert words[words.index("--rdzv-id") + 1] == "snakes"


def test_sky_task_has_requested_nodes_gpus_and_command(capsys):
    task = yaml.safe_load(printed(capsys, "sky", "--nodes", "2", "--gpus", "4", "--storage", "mine", "--", *TRAIN))
    assert (task["num_nodes"], task["resources"]["accelerators"]) == (2, "H100:4")
    assert task["volumes"] == {"/runs": "mine"}
    assert "exec lockstep train gym-ppo --smoke \\" in task["run"]


@pytest.mark.parametrize("to", ["slurm", "k8s", "sky"])
def test_job_file_has_no_unfilled_placeholders(capsys, to):
    assert not re.search("@[A-Z]+@", printed(capsys, to, "--", *TRAIN))


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["slurm"], "Use: lockstep jobfile slurm -- train snake-ppo"),
        (["slurm", "--", "resume", "runs/a"], "has no `-- train ...`"),
        (["k8s", "--", "train", "gym-pp"], "Did you mean 'gym-ppo'?"),
        (["k8s", "--", *TRAIN, "task.num_emvs=8"], "Did you mean 'num_envs'?"),
        (["k8s", "--", *TRAIN, "--procs", "4"], "--procs is set by the job file"),
        (["k8s", "--", *TRAIN, "run.name=mine"], "run.name=mine is set by the job file"),
        (["sky", "--", *TRAIN, "run.runs_dir=elsewhere"], "run.runs_dir=elsewhere is set by the job file"),
        (["sky", "--nodes", "100", "--", *TRAIN], "num_envs is 8, which 800 lanes cannot share"),
        (["sky", "--nodes", "0", "--", *TRAIN], "must be at least 1"),
        (["sky", "--name", "My Job", "--", *TRAIN], "--name is 'My Job'"),
        (["k8s", "--image", "a b", "--", *TRAIN], "--image is 'a b'"),
        (["k8s", "--", *TRAIN, "run.tag=a\nkind: Pod"], "contains a line break"),
    ],
)
def test_jobfile_rejects_arguments_that_would_fail_on_cluster(capsys, words, told):
    assert main(["jobfile", *words]) == 2
    ended = capsys.readouterr()
    assert told in ended.err
    assert ended.out == ""


# ----------------------------------------------------------------------------------------------------------- Dockerfile


def test_docker_image_runs_as_unprivileged_user_with_egl():
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    assert re.fullmatch(r"FROM nvidia/cuda:[\d.]+-runtime-ubuntu[\d.]+", next(x for x in lines if x.startswith("FROM")))
    assert [line for line in lines if line.startswith("USER")] == ["USER lockstep"]
    assert any("libegl1" in line for line in lines)
    assert any("MUJOCO_GL=egl" in line for line in lines)


def test_docker_copy_sources_exist_and_are_not_ignored():
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for line in (ROOT / "Dockerfile").read_text().splitlines():
        if line.startswith("COPY"):
            *sources, _ = [word for word in line.split()[1:] if not word.startswith("--")]
            assert all((ROOT / source).exists() for source in sources), line
            assert set(sources) <= sent, line
