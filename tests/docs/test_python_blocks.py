"""Every Python block in the README and on the Quickstart, Customization and Migration pages is executed.

The blocks of a page share one namespace and are executed in order, in a temporary directory, with smoke settings. A
block with `if __name__ == "__main__":` is a script and runs in a separate process. A comment in front of a block,
`<!-- not executed: REASON -->`, excludes code of other libraries; `NOT_EXECUTED` lists these blocks.
"""

import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass

import pytest
from test_commands import ROOT, blocks, surroundings

import lockstep
from lockstep import api

PAGES = [
    ROOT / "README.md",
    *sorted(page for name in ("quickstart", "customization", "guides") for page in (ROOT / "docs" / name).glob("*.md")),
]

NOT_EXECUTED = {("docs/guides/from-sb3.md", "Stable-Baselines3"): 1}
"""Number of excluded blocks by page and reason."""

TESTED_ELSEWHERE = ("init_process_group",)
"""Code in blocks that other tests run: test_commands.py starts the silent bug of the README with torchrun."""

MAX_SAMPLES = 4096
BLOCK = re.compile(r"(?:<!-- not executed: ([^>]*?) -->\n+)?^```python\n(.*?)^```", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """A block of Python on a page."""

    page: str
    code: str
    excluded: str
    """Reason why it is not executed. Empty: it is executed."""

    @property
    def is_script(self):
        return 'if __name__ == "__main__":' in self.code


def find_blocks(page):
    """Return the blocks of a page. A block that includes a file (`--8<--`) has the code of that file."""
    name = str(page.relative_to(ROOT))
    return [Block(name, with_files(code), reason or "") for reason, code in BLOCK.findall(page.read_text())]


def with_files(code):
    return re.sub(r'--8<-- "(.*?)"', lambda found: (ROOT / found[1]).read_text(), code)


ALL = [block for page in PAGES for block in find_blocks(page)]
SCRIPTS = [
    pytest.param(block, marks=pytest.mark.slow if "lockstep.prove" in block.code else (), id=block.page)
    for block in ALL
    if block.is_script
]
TEXTS = {
    page: [
        block
        for block in ALL
        if block.page == page
        and not block.excluded
        and not block.is_script
        and not any(part in block.code for part in TESTED_ELSEWHERE)
    ]
    for page in dict.fromkeys(block.page for block in ALL)
}


@pytest.fixture
def smoke(monkeypatch, tmp_path):
    """Make `lockstep.train` use smoke settings, in a temporary directory."""

    def train(recipe, **settings):
        run = settings.pop("run", {})
        if isinstance(run, dict):
            total = min(run.get("total_samples", MAX_SAMPLES), MAX_SAMPLES)
            run = run | {"total_samples": total, "record_video": False}
        assert isinstance(run, dict) or run.total_samples <= MAX_SAMPLES
        return real(recipe, **settings | {"smoke": True, "run": run})

    real = api.train
    monkeypatch.setattr(api, "train", train)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def execute(page):
    """Execute the blocks of a page and return their names."""
    names = {"__name__": "__main__"}
    for block in TEXTS[page]:
        exec(compile(block.code, block.page, "exec"), names)
    return names


@pytest.mark.parametrize("page", [page for page in TEXTS if not page.startswith("docs/customization")])
def test_blocks_of_a_page_execute(smoke, page):
    if "runs/first" in "".join(block.code for block in TEXTS[page]):
        lockstep.train("snake-ppo", run={"name": "first"})  # a command of the page trains it
    names = execute(page)
    if page == "README.md":
        assert len(names["action"]) == names["policy"].recipe.task.num_envs


@pytest.mark.distributed
@pytest.mark.parametrize("block", SCRIPTS)
def test_script_of_a_page_runs(tmp_path, block):
    assert "smoke=True" in block.code or "lockstep.prove" in block.code
    (tmp_path / "script.py").write_text(f"import lockstep\n\n{block.code}")
    ended = subprocess.run(
        [sys.executable, "script.py"], cwd=tmp_path, env=surroundings(), text=True, capture_output=True
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_task_page_defines_a_valid_task_that_trains(smoke, capsys):
    names = execute("docs/customization/task.md")
    assert capsys.readouterr().out == ""  # check_env found no fault
    names["Catch"].is_valid_state = names["is_valid_state"]
    catch = lockstep.make(names["Catch"].Config(), num_envs=8)
    catch.load_lane_state(0, catch.lane_state(0))
    with pytest.raises(ValueError, match="not in a valid state"):
        catch.load_lane_state(0, {"state": catch.lane_state(0)["state"] + 100})
    assert lockstep.train(names["WideCatch"]).status == "finished"


def test_supervised_page_defines_a_recipe_and_a_loss_that_train(smoke):
    names = execute("docs/customization/supervised.md")
    assert lockstep.train(names["DigitsCNN"]).status == "finished"
    digits = names["DigitsCNN"](task=names["Line"].Config(), algo=lockstep.SupervisedConfig(batch_size=64))
    errors = [entry["mae"] for entry in lockstep.train(digits, run={"eval_every": 1024}).evaluations]
    assert errors[-1] < errors[0]


def test_algorithm_page_logs_metrics_by_name(smoke):
    names = execute("docs/customization/algorithm.md")
    names["A2C"].update = names["update"]
    entry = next(entry for entry in lockstep.train(names["SnakeA2C"]).metrics if "train/loss" in entry)
    assert entry["train/learning_rate"] == pytest.approx(1e-3)
    assert 0.0 < entry["train/positive_advantages"] < 1.0


def test_network_page_defines_a_recipe_that_trains(smoke):
    names = execute("docs/customization/network.md")
    assert lockstep.train(names["ResidualSnake"]).status == "finished"


def test_excluded_blocks_match_the_list():
    found = Counter((block.page, block.excluded) for block in ALL if block.excluded)
    assert found == NOT_EXECUTED


def test_every_block_is_executed_listed_or_tested_elsewhere():
    executed = [block for blocks in TEXTS.values() for block in blocks] + [part.values[0] for part in SCRIPTS]
    rest = [block for block in ALL if block not in executed and not block.excluded]
    assert [part for block in rest for part in TESTED_ELSEWHERE if part in block.code] == [*TESTED_ELSEWHERE]
    assert sum(len(blocks(page, "python")) for page in PAGES) == len(ALL)


def test_finder_reads_the_reason_in_front_of_a_block():
    text = "<!-- not executed: SB3 -->\n```python\na\n```\n\n```python\nb\n```\n"
    assert BLOCK.findall(text) == [("SB3", "a\n"), ("", "b\n")]
