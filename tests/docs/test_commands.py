"""Every command in the README and on the Quickstart and Customization pages is run, or listed with a reason.

A command is run unchanged, except for `SHORTER` and `REPLACED`. Commands that name a run are executed in a directory
where another command has trained it; the others in a separate directory. Commands that are not in `SLOW` are part of
`make ci`, including those that no table lists. `test_python_blocks.py` runs the blocks of Python.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lockstep.cli import main
from lockstep.rng import RandomStream
from lockstep.tasks.cricket.synthetic import write_matches

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    *sorted((ROOT / "docs/quickstart").glob("*.md")),
    *sorted((ROOT / "docs/customization").glob("*.md")),
]

SHORTER = {
    "runs/NAME": "runs/first",
    "FIRST_HOST": "localhost",
    "train snake-ppo --preset tiny": "train snake-ppo --smoke",
    "task=walker-run model_size=5": "task=walker-run --smoke model_size=1",
    "--preset small task=cartpole-swingup": "--smoke task=cartpole-swingup",
    "bench snake-ppo": "bench snake-ppo --smoke --seconds 1",
    "plan snake-ppo": "plan snake-ppo --smoke",
}
"""Replacements in a command before it is run. Every `train` also gets --smoke, unless it has --help."""

REPLACED = {
    "lockstep train my_recipe.py": (
        "lockstep train my_recipe.py task.num_envs=16 algo.batch_size=512 run.total_samples=2048 run.record_video=false"
    ),
}
"""Commands that are replaced entirely."""

NOT_RUN = {
    r"torchrun --nproc-per-node 2 silent.py": "below, where what it prints is looked at",
    r"pip install .*": "the network: .ci/extras installs every extra into a clean environment",
    r".* --nnodes .*": "several hosts: tests/fault/test_hosts.py has them",
    r"kill -TERM LAUNCHER": "tests/fault/test_preemption.py sends it",
    r"lockstep (sweep|fork|verify) .*|.* --seeds .*": "test_published_path.py has them, on a path of its own",
    r"lockstep bisect .*": "tests/distributed/test_bisect_commits.py runs it on runs that differ",
    r"lockstep benchmark .*": "tests/distributed/test_benchmark_suites.py runs it, with fewer steps",
    r".* run.runs_dir=s3://.*": "tests/fault/test_bucket.py has a server",
    r"sbatch .*": "tests/fault/test_slurm.py starts a SLURM",
}
"""Commands that are not run here, and the reason."""

SLOW = [
    r"lockstep doctor",  # tests/distributed/test_doctor_multiprocess.py runs it in `make ci`
    r"lockstep prove .*",
    r"lockstep audit .*",
    r"lockstep backtest .*",
    r"lockstep bench .*",
    r"lockstep export .* --to (onnx|jidi).*",
    r".* --procs 4.*",
    r"lockstep train snake-ppo --preset tiny --procs 2",
    r"lockstep train snake-ppo --smoke --procs 2",
    r"lockstep train (team-ddpg|dmc-tdmpc2|gym-tdmpc2|gym-ddpg|gym-sac|gym-ppo-lstm).*",
    r"lockstep train .* --data .*",
    # tests/contract/test_supervised_examples.py has them in `make ci`
    r"lockstep (check|train) examples/(digits|tabular|pyg_graphs).py.*",
    r"lockstep (eval|export) runs/(digits|table|graphs).*",
    r"lockstep train snake-ppo --smoke run.name=first",  # other commands need it, so that it is run
    r"lockstep train snake-ppo --autoscale",
    r"lockstep eval runs/team .*",
    r"torchrun .*(lockstep|examples/silent.py).*",
]
"""Commands that take long, or that other commands in `make ci` cover: `make test-slow` runs them."""

EXIT = {"lockstep audit examples/silent.py": 1}
"""Expected exit codes other than 0: this command demonstrates a finding."""

TRAINED = {
    "runs/first": "lockstep train snake-ppo --smoke run.name=first",
    "runs/team": "lockstep train team-ddpg --smoke run.name=team",
    "runs/cricket": "lockstep train cricket-gnn --smoke run.name=cricket",
    "runs/catch": "lockstep train examples/catch.py --smoke run.name=catch",
    "runs/table": "lockstep train examples/tabular.py --smoke run.name=table",
    "runs/graphs": "lockstep train examples/pyg_graphs.py --smoke run.name=graphs",
    "runs/digits": "lockstep train examples/digits.py --smoke run.name=digits",
}
"""Commands that train the runs which other commands name."""


def blocks(path, *kinds):
    """Return the fenced blocks of a page with these languages; a block without a language has commands."""
    return [text for kind, text in re.findall(r"^```(\S*)\n(.*?)^```", path.read_text(), re.M | re.S) if kind in kinds]


def commands(path):
    """Return the commands of a page, without comments."""
    lines = "".join(blocks(path, "", "sh")).replace("\\\n", " ").splitlines()
    return [" ".join(command.split()) for line in lines if (command := re.sub(r"(^|\s+)#.*", "", line).strip())]


def matches(patterns, command):
    return any(re.fullmatch(pattern, command) for pattern in patterns)


ALL = list(dict.fromkeys(command for page in PAGES for command in commands(page)))
EACH = [
    pytest.param(command, marks=pytest.mark.slow if matches(SLOW, command) else ())
    for command in ALL
    if not matches(NOT_RUN, command)
]


def shortened(command):
    for long, short in SHORTER.items():
        command = command.replace(long, short)
    if re.search(r"lockstep train (?!.*(--smoke|--help))", command):
        command = re.sub(r"train (\S+)", r"train \1 --smoke", command)
    return REPLACED.get(command.replace(" --smoke", ""), command)


# ------------------------------------------------------------------------------------------------------------- running


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A directory in which runs are trained on first use."""
    return furnished(tmp_path_factory.mktemp("trained"))


def furnished(place):
    """Fill a directory with the files that commands name; return it."""
    (place / "examples").symlink_to(ROOT / "examples")
    (place / "my.yaml").write_text("task: {size: 5}\n")
    moves = RandomStream(0, "prices").normal(0, 1200).numpy().cumsum() * 0.01
    close = 100 * np.exp(moves.astype(float))
    rows = [f"{86_400 * day},{price},{1.01 * price},{0.99 * price},{price}" for day, price in enumerate(close)]
    (place / "prices.csv").write_text("unix,open,high,low,close\n" + "\n".join(rows))
    for name in ("t20s.zip", "t20s_male_json.zip"):
        write_matches(place / name, 20)
    silent, recipe = blocks(ROOT / "README.md", "python")[-2:]
    (place / "silent.py").write_text(silent)
    (place / "my_recipe.py").write_text(recipe)
    return place


def surroundings():
    """Return the environment of a command: tools of this Python, and a free port for torchrun."""
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    kept = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    return kept | {"PATH": path, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src"), "PET_STANDALONE": "1"}


def run(command, place, monkeypatch, capfd):
    """Run a command, in this process if possible to save imports; return its exit code and output."""
    monkeypatch.chdir(place)
    if not command.startswith("lockstep ") or re.search(r"--procs|prove|>|audit|doctor", command):
        ended = subprocess.run(
            command, shell=True, env=surroundings(), text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        )
        return ended.returncode, ended.stdout
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    try:
        code = main(shlex.split(command)[1:])
    except SystemExit as leaving:  # help
        code = leaving.code or 0
    return code, "".join(capfd.readouterr())


@pytest.fixture
def runner(trained, tmp_path, monkeypatch, capfd):
    def go(command, beside=False):
        for name, made_by in TRAINED.items():
            if name in command and not (trained / name).exists() and command != made_by:
                code, told = run(made_by, trained, monkeypatch, capfd)
                assert code == 0, told
                beside = True
            beside = beside or name in command
        place = trained if beside else furnished(tmp_path)
        return (*run(command, place, monkeypatch, capfd), place)

    return go


@pytest.mark.parametrize("command", EACH)
def test_command_of_the_pages_succeeds_and_writes_its_files(runner, command):
    code, told, place = runner(shortened(command))
    assert code == EXIT.get(command, 0), told
    for product in re.findall(r"--(?:gif|out) (\S+)|> (\S+)", command):
        assert (place / "".join(product)).exists(), told


# ------------------------------------------------------------------------------------------------- statements on pages


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.parametrize(("call", "different"), [("module(", 2), ("", 1)])
def test_readme_bug_is_silent_and_fixed_by_calling_the_wrapper(tmp_path, call, different):
    text = next(text for text in blocks(ROOT / "README.md", "python") if "agent.module(torch" in text)
    text = text if call else text.replace("agent.module(torch", "agent(torch")
    (tmp_path / "silent.py").write_text(text)
    # One output file per process: lines may interleave in a shared pipe.
    words = ["torchrun", "--nproc-per-node", "2", "--redirects", "1", "--log-dir", "logs", "silent.py"]
    for _ in range(3):
        shutil.rmtree(tmp_path / "logs", ignore_errors=True)
        ended = subprocess.run(words, cwd=tmp_path, env=surroundings(), text=True, capture_output=True)
        if "terminate called without an active exception" not in ended.stderr:
            break  # gloo threads may use the interpreter during its shutdown (pytorch/pytorch#190489)
    assert ended.returncode == 0, ended.stderr
    printed = [path.read_text() for path in (tmp_path / "logs").rglob("stdout.log")]
    found = [line for text in printed for line in re.findall(r"gradient \[\[.*?\]\]", text)]
    assert (len(found), len(set(found))) == (2, different)


@pytest.mark.slow
def test_silent_example_diverges_by_the_amount_in_the_readme(runner):
    code, told, _ = runner("torchrun --nproc-per-node 2 examples/silent.py")
    assert (code, "apart by 0.042" in told) == (0, True), told
    assert "apart by 0.042" in (ROOT / "README.md").read_text()


def test_readme_custom_recipe_trains(runner):
    assert "`lockstep train my_recipe.py`" in (ROOT / "README.md").read_text()
    code, told, _ = runner(shortened("lockstep train my_recipe.py"))
    assert code == 0, told


# --------------------------------------------------------------------------------------------- the tables and the pages


@pytest.mark.parametrize("table", [list(NOT_RUN), SLOW, list(EXIT)])
def test_tables_list_only_commands_on_pages(table):
    assert [entry for entry in table if not any(re.fullmatch(entry, command) for command in ALL)] == []


def test_replacements_occur_on_the_pages():
    said = "\n".join([*ALL, *REPLACED])
    assert [long for long in SHORTER if long not in said] == []


@pytest.mark.parametrize("page", sorted((ROOT / "docs/customization").glob("*.md")), ids=lambda page: page.stem)
def test_customization_page_includes_one_file_that_its_commands_run(page):
    shown = re.findall(r'--8<-- "(.*?)"', page.read_text())
    assert len(shown) == 1
    assert (ROOT / shown[0]).is_file()
    assert any(shown[0] in command for command in commands(page))


BOTH = [ROOT / "README.md", ROOT / "README.zh-CN.md"]


def test_chinese_readme_has_the_same_commands_and_code():
    english, chinese = BOTH
    assert commands(chinese) == commands(english)
    assert [uncommented(code) for code in blocks(chinese, "python")] == [
        uncommented(code) for code in blocks(english, "python")
    ]


def uncommented(code):
    """Return Python code without comments and docstrings, which a translation may change."""
    return re.sub(r'\s*(#.*|""".*?""")', "", code)


def link_targets(text):
    return re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", text) + re.findall(r'src="([^"]+)"', text)


@pytest.mark.parametrize("page", sorted(ROOT.glob("*.md")), ids=lambda page: page.name)
def test_link_targets_of_top_level_pages_exist(page):
    targets = link_targets(page.read_text())
    assert [target for target in targets if "://" not in target and not (ROOT / target).exists()] == []


def test_readmes_link_to_each_other():
    for readme, other in (BOTH, BOTH[::-1]):
        assert other.name in link_targets(readme.read_text())


def test_unlisted_command_is_run():
    assert not matches([*NOT_RUN, *SLOW], "lockstep frobnicate")


def test_torchrun_is_on_the_path():
    assert shutil.which("torchrun", path=surroundings()["PATH"])
