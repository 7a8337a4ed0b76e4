"""The commands of docs/operate/path.md run in their order, in one directory, with a stand-in for the Hub."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.hub_server import TOKEN, serve

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/operate/path.md"
SHORTER = {
    "--trials 9": "--trials 4",
    "--seeds 3": "--seeds 2",
    "run.keep_every=20000": "run.keep_every=256",
    "run.total_samples=1500000": "run.total_samples=4096",
    "USER/": "ada/",
}
"""Replacements in a command before it is run. Every `train` and `sweep` also gets --smoke."""


def blocks(language):
    found = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE.read_text(), re.M | re.S)
    return [block for name, block in found if name == language]


def commands():
    return [line for block in blocks("") for line in block.splitlines()]


def shortened(command):
    for long, short in SHORTER.items():
        command = command.replace(long, short)
    return re.sub(r"^lockstep (train|sweep) (\S+)", r"lockstep \1 \2 --smoke", command)


def test_replacements_occur_on_the_page():
    assert [long for long in SHORTER if long not in PAGE.read_text()] == []


def test_path_has_every_step_in_order():
    steps = ["sweep", "report", "fork", "train", "report", "push", "pull", "verify"]
    found = iter(command.split()[1] for command in commands())
    assert all(step in found for step in steps)


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(3600)
def test_commands_of_the_path_succeed_in_order(tmp_path):
    (space,) = blocks("yaml")
    (tmp_path / "space.yaml").write_text(space)
    with serve() as (_, address):
        environment = os.environ | {
            "HF_ENDPOINT": address,
            "HF_TOKEN": TOKEN,
            "PYTHONPATH": str(ROOT / "src"),
            "OMP_NUM_THREADS": "1",
        }
        for command in map(shortened, commands()):
            words = [sys.executable, "-m", *shlex.split(command)]
            ended = subprocess.run(words, cwd=tmp_path, env=environment, text=True, capture_output=True)
            assert ended.returncode == 0, f"{command}\n{ended.stdout[-2000:]}{ended.stderr[-2000:]}"
    assert {"search.html", "fork.html", "seeds.html"} <= {path.name for path in tmp_path.iterdir()}
