"""Versions agree across files, workflows pin their actions and cover all tests, and pre-commit matches CI."""

import importlib.util
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
VERSIONED = ("src/lockstep/__init__.py", "CITATION.cff", "CHANGELOG.md")


def load_script(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


find_problems = load_script("check_release").find_problems


def constraint(package):
    return re.search(rf"^{package}==(\S+)$", (ROOT / ".ci" / "constraints.txt").read_text(), re.MULTILINE)[1]


def workflow(name):
    return yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())


def commands(name):
    """Return all commands that a workflow runs, as one text."""
    return "\n".join(step["run"] for job in workflow(name)["jobs"].values() for step in job["steps"] if "run" in step)


def find_unpinned(text):
    """Return the actions of a workflow that are not pinned by a commit digest with the version as a comment."""
    used = re.findall(r"^\s*(?:- )?uses:\s*(.+)$", text, re.MULTILINE)
    return [action for action in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}\s+# v\d+\.\d+\.\d+", action)]


# ------------------------------------------------------------------------------------------------------------- versions


@pytest.fixture
def checkout(tmp_path):
    """A directory with copies of the files that contain the version: 9.8.7, of 2030-01-02."""
    for name in VERSIONED:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / VERSIONED[0]).write_text('"""Package."""\n\n__version__ = "9.8.7"\n')
    (tmp_path / VERSIONED[1]).write_text("cff-version: 1.2.0\nversion: 9.8.7\ndate-released: 2030-01-02\n")
    (tmp_path / VERSIONED[2]).write_text("## [Unreleased]\n\n## [9.8.7] - 2030-01-02\n\n## [9.8.6] - 2029-01-02\n")
    return tmp_path


def test_version_is_equal_in_package_citation_and_changelog():
    assert find_problems(ROOT) == []


def test_check_release_reports_changed_version_of_this_repository(tmp_path):
    for name in VERSIONED:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    text = (tmp_path / VERSIONED[0]).read_text()
    (tmp_path / VERSIONED[0]).write_text(re.sub(r'__version__ = ".*"', '__version__ = "9.8.7"', text))
    assert len(find_problems(tmp_path)) == 2


@pytest.mark.parametrize(
    ("name", "old", "new", "problem"),
    [
        (VERSIONED[0], "9.8.7", "9.9.0", "CITATION.cff has version 9.8.7, but the package has 9.9.0"),
        (VERSIONED[0], "9.8.7", "9.9.0", "section of CHANGELOG.md is 9.8.7, but the package has 9.9.0"),
        (VERSIONED[1], "9.8.7", "9.8.6", "CITATION.cff has version 9.8.6"),
        (VERSIONED[1], "2030-01-02", "2030-01-03", "date-released 2030-01-03, but CHANGELOG.md has 2030-01-02"),
        (VERSIONED[2], "[9.8.7]", "[9.9.0]", "section of CHANGELOG.md is 9.9.0"),
        (VERSIONED[2], "## [9.8.7] - 2030-01-02", "", "section of CHANGELOG.md is 9.8.6"),
    ],
)
def test_check_release_reports_mismatching_version_or_date(checkout, name, old, new, problem):
    assert find_problems(checkout) == []
    text = (checkout / name).read_text()
    assert old in text
    (checkout / name).write_text(text.replace(old, new))
    assert any(problem in found for found in find_problems(checkout))


def test_check_release_accepts_only_tag_of_current_version(checkout):
    assert find_problems(checkout, "v9.8.7") == []
    for tag in ("v9.8.6", "9.8.7", "v9.8.7rc1"):
        assert find_problems(checkout, tag) == [
            f"The tag is {tag}, but the package has version 9.8.7. Tag it as v9.8.7."
        ]


def test_changelog_starts_with_unreleased_and_has_dated_sections_in_order():
    text = (ROOT / "CHANGELOG.md").read_text()
    first, *sections = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert first == "[Unreleased]"
    released = [re.fullmatch(r"\[(\d+)\.(\d+)\.(\d+)\] - (\d{4}-\d\d-\d\d)", section) for section in sections]
    assert all(released), sections
    order = [(tuple(map(int, section.groups()[:3])), section[4]) for section in released]
    assert order == sorted(order, reverse=True)


def test_changelog_entries_have_at_most_two_lines_of_120_characters():
    text = (ROOT / "CHANGELOG.md").read_text()
    assert [line for line in text.splitlines() if len(line) > 120] == []
    entries = re.findall(r"^- .*(?:\n  .*)*", text, re.MULTILINE)
    assert [entry for entry in entries if entry.count("\n") > 1] == []


# ------------------------------------------------------------------------------------------------------------ workflows


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_pins_every_action_by_commit_digest(path):
    assert find_unpinned(path.read_text()) == []


def test_unpinned_actions_are_found():
    pinned = "      - uses: actions/checkout@" + "a1" * 20 + "  # v4.2.2\n"
    unpinned = ["actions/checkout@v4", "actions/checkout@" + "a1" * 19 + "  # v4.2.2", "actions/checkout@" + "a1" * 20]
    text = pinned + "".join(f"      - uses: {action}\n" for action in unpinned) + "    uses: other/workflow@main\n"
    assert find_unpinned(text) == [*unpinned, "other/workflow@main"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_has_minimal_permissions_and_timeouts(path):
    content = yaml.safe_load(path.read_text())
    assert content["permissions"] == {"contents": "read"}
    given = {name: job["permissions"] for name, job in content["jobs"].items() if "permissions" in job}
    assert given == ({"publish": {"id-token": "write"}} if path.stem == "release" else {})
    assert all("timeout-minutes" in job for job in content["jobs"].values())


def test_release_job_publishes_only_verified_artifacts():
    jobs = workflow("release")["jobs"]
    assert jobs["publish"]["needs"] == ["build", "verify"]
    assert jobs["publish"]["environment"] == "pypi"
    # The job with the permission to publish runs no code of the repository and installs no packages.
    actions = [step["uses"].partition("@")[0] for step in jobs["publish"]["steps"]]
    assert actions == ["actions/download-artifact", "pypa/gh-action-pypi-publish"]
    assert '.ci/check_release.py "$GITHUB_REF_NAME"' in commands("release")


def test_check_workflow_runs_every_test_directory():
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")}
    targets = set(re.findall(r"\btest-(\w+)", commands("check")))
    assert targets == folders | {"launchers", "hostile"}  # parts of tests/fault


def test_make_ci_runs_every_test_directory():
    shown = subprocess.run(["make", "--dry-run", "ci"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    run = set(re.findall(r"(?<!--ignore=)\btests/(\w+)", shown))
    assert run == {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")} | {"unit"}


def test_nightly_workflow_runs_tests_that_check_skips():
    assert set(re.findall(r"--deselect (\S+?)'", commands("check"))) == {
        "tests/unit/tools/test_report_browser.py",
        "tests/fault/test_slurm.py",
    }
    assert {"test-browser", "test-slurm"} <= set(re.findall(r"\btest-\w+", commands("nightly")))
    makefile = (ROOT / "Makefile").read_text()
    assert "test-browser: TESTS = tests/unit/tools/test_report_browser.py\n" in makefile
    assert "test-slurm: TESTS = tests/fault/test_slurm.py\n" in makefile


def test_unit_matrix_covers_oldest_and_newest_supported_versions():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    matrix = workflow("check")["jobs"]["unit"]["strategy"]["matrix"]
    oldest = next(re.fullmatch(r"torch>=(.+)", found)[1] for found in project["dependencies"] if "torch" in found)
    assert matrix["torch"] == [f"{oldest}.0", constraint("torch")]
    pythons = [name.rpartition(" ")[2] for name in project["classifiers"] if "Python :: 3." in name]
    assert matrix["python"] == [project["requires-python"].removeprefix(">="), pythons[-1]]


# ----------------------------------------------------------------------------------------------------------- pre-commit


def test_pre_commit_uses_ruff_version_of_ci():
    repos = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"]
    remote = {repo["repo"]: repo["rev"] for repo in repos if repo["repo"] != "local"}
    assert remote == {"https://github.com/astral-sh/ruff-pre-commit": f"v{constraint('ruff')}"}
