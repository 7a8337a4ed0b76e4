"""`lockstep push` and `pull` with a stand-in server over HTTP: runs survive, hostile repositories are refused."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from helpers.hub_server import TOKEN, serve
from helpers.tiny_recipes import ITERATION, checkpoints_of, hash_of, tiny
from lockstep.checkpoint import format as form
from lockstep.cli import main
from lockstep.cli.worker_spec import run_spec
from lockstep.fork_record import run_id
from lockstep.launch import launcher
from lockstep.tools.hub.files import is_published_name
from lockstep.training_loop import train

REPO = "ada/snake"


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """An exact run of four iterations with two evaluations and two kept checkpoints."""
    settings = {"keep_last": 2, "eval_every": 2 * ITERATION, "eval_episodes": 8, "reduction": "exact"}
    return train(tiny(tmp_path_factory.mktemp("hub"), "snake", **settings)).path


@pytest.fixture
def hub(monkeypatch, tmp_path):
    with serve() as (hub, address):
        monkeypatch.setenv("HF_ENDPOINT", address)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        monkeypatch.setenv("COLUMNS", "1000")
        monkeypatch.chdir(tmp_path)
        yield hub


@pytest.fixture
def lockstep(capfd):
    """Run a command; return its exit code and its whole output, without line breaks."""

    def command(*words):
        capfd.readouterr()
        code = main([str(word) for word in words])
        out, err = capfd.readouterr()
        assert TOKEN not in out + err
        return code, " ".join((out + err).split())

    return command


@pytest.fixture
def published(original, hub, lockstep):
    code, told = lockstep("push", original, REPO, "--all-checkpoints")
    assert code == 0, told
    return hub


def replace(hub, name, content):
    """Commit a file as an attacker would."""
    hub.commit(REPO, hub.files(REPO) | {name: content})


# --------------------------------------------------------------------------------------------------------- round trip


def test_pulled_run_equals_the_pushed_one_and_can_be_used(original, published, lockstep, monkeypatch):
    code, told = lockstep("pull", REPO)
    assert code == 0, told
    run = Path("runs/snake")
    assert checkpoints_of(run) == checkpoints_of(original)
    assert hash_of(run) == hash_of(original)
    assert run_id(run) == run_id(original)
    assert not list(Path("runs").glob(".*"))
    monkeypatch.setattr(launcher, "launch_captured", lambda words, *_: "" if run_spec(Path(words[-1])) == 0 else "!")
    for words in (
        ("verify", run, "--segments", 9),
        ("eval", run, "--episodes", 8),
        ("fork", f"{run}@{3 * ITERATION}", "run.name=fork"),
        ("resume", run, "--total-samples", 5 * ITERATION),
        ("push", run, "ada/again"),
    ):
        code, told = lockstep(*words)
        assert code == 0, told
    assert hash_of(Path("runs/fork")) == hash_of(original)


def test_published_files_are_known_and_have_no_paths_or_host_names(original, published):
    files = published.files(REPO)
    assert all(map(is_published_name, files))
    assert {"README.md", "report.html", "config.yaml", "chain.jsonl", "metrics.jsonl"} <= files.keys()
    claims = [json.loads(content) for name, content in files.items() if "attempt-" in name]
    assert claims
    assert all(claim.keys() <= {"parent", "processes", "began", "run_id"} for claim in claims)
    text = b"".join(content for name, content in files.items() if not name.endswith((".safetensors", ".html")))
    assert str(original.parent).encode() not in text


def test_card_has_metadata_results_and_the_chain(published):
    card = published.files(REPO)["README.md"].decode()
    _, header, body = card.split("---\n", 2)
    values = yaml.safe_load(header)
    assert values["library_name"] == "lockstep"
    (result,) = values["model-index"][0]["results"]
    assert result["metrics"][0]["type"] == "return"
    last = published.files(REPO)["chain.jsonl"].decode().splitlines()[-1]
    assert json.loads(last)["entry"]["parent"] not in body  # the newest entry, not its parent
    assert "lockstep pull ada/snake" in body
    assert "| run.seed | 0 |" in body


def test_second_push_uploads_only_new_large_files_and_removes_old_ones(original, published, lockstep, tmp_path):
    before = len(published.uploaded)
    copy = Path(shutil.copytree(original, tmp_path / "copy"))
    oldest = min((copy / "checkpoints").glob("0*"))
    shutil.rmtree(oldest)
    code, told = lockstep("push", copy, REPO, "--all-checkpoints")
    assert code == 0, told
    assert len(published.uploaded) == before
    assert not any(oldest.name in name for name in published.files(REPO))


def test_proof_record_is_published(original, hub, lockstep, tmp_path):
    (tmp_path / "p.json").write_text('{"recipe": "snake-ppo", "verdict": "one agent", "rows": []}')
    code, told = lockstep("push", original, REPO, "--proof", tmp_path / "p.json", "--private")
    assert code == 0, told
    assert json.loads(hub.files(REPO)["proof.json"])["verdict"] == "one agent"
    assert b"one agent" in hub.files(REPO)["README.md"]
    assert REPO in hub.private


# ------------------------------------------------------------------------------------------------------ interruptions


def test_interrupted_push_changes_nothing_and_continues(original, hub, lockstep):
    hub.refuse_uploads_after = 1
    code, told = lockstep("push", original, REPO)
    assert (code, "the push to ada/snake failed" in told) == (2, True), told
    assert hub.files(REPO).keys() == {".gitattributes"}
    hub.refuse_uploads_after = None
    assert lockstep("push", original, REPO)[0] == 0
    assert len(hub.uploaded) == len(set(hub.uploaded))


def test_interrupted_pull_leaves_no_run_and_continues(original, published, lockstep):
    path = next(name for name in published.files(REPO) if name.endswith("shared.safetensors"))
    published.cut_after[path] = 100
    code, told = lockstep("pull", REPO)
    assert code == 2, told
    assert not Path("runs/snake").exists()
    first = [name for name, _ in published.served]
    published.served.clear()
    assert lockstep("pull", REPO)[0] == 0
    assert (path, 100) in published.served
    assert not {name for name, _ in published.served} & (set(first) - {path})
    assert hash_of(Path("runs/snake")) == hash_of(original)


@pytest.mark.slow
def test_killed_pull_leaves_no_run_and_continues(original, published, lockstep):
    path = next(name for name in published.files(REPO) if name.endswith("shared.safetensors"))
    published.stall_after[path] = 100
    pull = subprocess.Popen([sys.executable, "-m", "lockstep", "pull", REPO])
    try:
        assert published.stalled.wait(600)
    finally:
        pull.kill()
        pull.wait()
        published.released.set()
    assert not Path("runs/snake").exists()
    assert lockstep("pull", REPO)[0] == 0
    assert hash_of(Path("runs/snake")) == hash_of(original)
    assert not list(Path("runs").glob(".*"))


# ------------------------------------------------------------------------------------------------------------ refused


@pytest.mark.parametrize(
    "name",
    [
        "../evil.json",
        "checkpoints/../../evil.json",
        "/etc/evil.json",
        "model.pkl",
        "pytorch_model.bin",
        "recipe.py",
        "checkpoints/000000000128-g0001/evil.pt",
        "checkpoints/000000000128-g0001/../../../shared.safetensors",
        "config.yaml\n",
    ],
)
def test_repository_with_another_file_is_refused_before_downloading(published, lockstep, name):
    replace(published, name, b"x")
    code, told = lockstep("pull", REPO)
    assert (code, "`lockstep push` does not write. Nothing was downloaded." in told) == (2, True), told
    assert published.served == []
    assert not Path("runs").exists()


def test_giant_files_are_refused_before_downloading(published, lockstep):
    published.listed["metrics.jsonl"] = {"size": 2**40}
    code, told = lockstep("pull", REPO)
    assert (code, "metrics.jsonl of ada/snake has 1,099,511,627,776 bytes, more than" in told) == (2, True), told
    published.listed.clear()
    code, told = lockstep("pull", REPO, "--max-gb", "0.000001")
    assert (code, "Raise the limit" in told or "raise the limit" in told) == (2, True), told
    assert published.served == []


def test_file_longer_than_listed_is_cut_off(published, lockstep):
    published.appended["metrics.jsonl"] = b"x" * 2**20
    code, told = lockstep("pull", REPO)
    assert (code, "metrics.jsonl of ada/snake is larger than" in told) == (2, True), told


def test_file_with_another_hash_is_refused(published, lockstep):
    published.listed["metrics.jsonl"] = {"oid": "0" * 40}
    code, told = lockstep("pull", REPO)
    assert (code, "differs from the hash that the Hub lists" in told) == (2, True), told
    assert not Path("runs/snake").exists()


@pytest.mark.parametrize(
    ("before", "after", "said"),
    [
        ("recipe: snake-ppo", "recipe: /tmp/evil.py", "'/tmp/evil.py', which is not part of Lockstep"),
        ("size: 4", "id: 'evil_package:Env-v0'", "may not run code"),
        ("size: 4", "submissions: [/tmp/evil.py]", "name '/tmp/evil.py', and a download may not run code"),
    ],
)
def test_settings_that_name_code_are_refused(published, lockstep, before, after, said):
    replace(published, "config.yaml", published.files(REPO)["config.yaml"].decode().replace(before, after).encode())
    code, told = lockstep("pull", REPO)
    assert (code, said in told) == (2, True), told
    assert not list(Path("runs").iterdir())


def test_damaged_checkpoint_is_refused(published, lockstep):
    name = next(name for name in published.files(REPO) if name.endswith(form.SHARED))
    replace(published, name, published.files(REPO)[name][:-1] + b"?")
    code, told = lockstep("pull", REPO)
    assert (code, "is not what was written" in told) == (2, True), told
    assert not list(Path("runs").iterdir())


def test_existing_run_is_not_overwritten(published, lockstep):
    Path("runs/snake").mkdir(parents=True)
    Path("runs/snake/config.yaml").write_text("")
    code, told = lockstep("pull", REPO)
    assert (code, "already contains a run" in told) == (2, True), told


def test_push_to_a_repository_with_other_files_is_refused(original, published, lockstep):
    replace(published, "pytorch_model.bin", b"x")
    code, told = lockstep("push", original, REPO)
    assert (code, "contains 'pytorch_model.bin'" in told) == (2, True), told


def test_missing_repository_and_missing_token_say_what_to_do(original, hub, lockstep, monkeypatch):
    code, told = lockstep("pull", "ada/none")
    assert (code, "Check the name" in told) == (2, True), told
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    code, told = lockstep("push", original, REPO)
    assert (code, "hf auth login" in told) == (2, True), told


@pytest.mark.parametrize("name", ["snake", "ada/../x", "ada/sn ake", "https://huggingface.co/ada/snake"])
def test_invalid_repository_name_is_refused(original, hub, lockstep, name):
    code, told = lockstep("push", original, name)
    assert (code, "is not the name of a repository" in told) == (2, True), told
    assert hub.requests == []


def test_run_with_a_broken_chain_is_not_published(original, hub, lockstep, tmp_path):
    copy = Path(shutil.copytree(original, tmp_path / "copy"))
    config = copy / "config.yaml"
    config.write_text(config.read_text().replace("learning_rate: 0.00025", "learning_rate: 0.5"))
    code, told = lockstep("push", copy, REPO)
    assert (code, "the chain of" in told, "algo.learning_rate" in told) == (2, True, True), told
    assert hub.requests == []
