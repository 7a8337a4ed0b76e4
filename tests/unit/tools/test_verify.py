"""`lockstep verify`: equal runs are verified on other numbers of processes, and changed ones are refused by segment."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from helpers.manifests import sealed
from helpers.recorder import record
from helpers.tiny_recipes import ITERATION, tiny
from lockstep.checkpoint import format as form
from lockstep.checkpoint.chain import entry_of, hash_settings, parse_entry, read_log
from lockstep.checkpoint.lineage import lineage
from lockstep.checkpoint.machine import describe_machine
from lockstep.cli import main
from lockstep.cli.worker_spec import run_spec
from lockstep.config import apply_overrides
from lockstep.io.jsonl import CHAIN
from lockstep.launch import launcher
from lockstep.tools.verify import environment
from lockstep.tools.verify.comparison import differing_files, differing_tensors
from lockstep.tools.verify.history import read_history, split_segments
from lockstep.tools.verify.repetition import choose_segments
from lockstep.training_loop import train

ITERATIONS = 4


@pytest.fixture(scope="module")
def original(tmp_path_factory):
    """An exact run of four iterations with a save after each."""
    return train(tiny(tmp_path_factory.mktemp("verify"), reduction="exact")).path


@pytest.fixture
def run(original, tmp_path):
    return Path(shutil.copytree(original, tmp_path / "run"))


@pytest.fixture
def verify(monkeypatch, capfd):
    """Run the command and repeat segments in this process; return its exit code and what it printed."""

    def train_here(arguments, processes, environment=None):
        code = run_spec(Path(arguments[-1]))
        return f"exit code {code}" if code else ""

    monkeypatch.setattr(launcher, "launch_captured", train_here)
    monkeypatch.setenv("COLUMNS", "1000")

    def command(*words):
        capfd.readouterr()
        code = main(["verify", *map(str, words)])
        return code, " ".join("".join(capfd.readouterr()).split())

    return command


def checkpoint(run, iteration):
    (name,) = (n for n in lineage(run / "checkpoints") if n.samples == iteration * ITERATION)
    return run / "checkpoints" / str(name)


def flip_weight(directory):
    """Change the last bit of one weight."""
    path = directory / form.SHARED
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


def seal(directory):
    """Write the manifest of a checkpoint again, with the hashes of its files."""
    manifest = json.loads((directory / form.MANIFEST).read_text())
    manifest["files"] = {name: form.digest_file(directory / name) for name in manifest["files"]}
    (directory / form.MANIFEST).write_text(sealed(manifest))


def forge(run, change):
    """Apply a change to every entry of a run, and compute all hashes again."""
    settings = list(read_log(run)[1].values())
    hashes: dict[str, str] = {}
    lines = [{"samples": 0, "settings": each} for each in settings]
    for name in sorted(lineage(run / "checkpoints")):
        path = run / "checkpoints" / str(name) / form.MANIFEST
        manifest = json.loads(path.read_text())
        manifest["chain"] |= change
        manifest["chain"]["parent"] = hashes.get(manifest["chain"]["previous"], "")
        path.write_text(sealed(manifest))
        entry = entry_of(manifest)
        hashes[entry.checkpoint] = entry.hash
        lines.append({"samples": entry.samples, "entry": json.loads(json.dumps(vars(entry)))})
    (run / CHAIN).write_text("".join(json.dumps(line) + "\n" for line in lines))


# ------------------------------------------------------------------------------------------------------------ verified


def test_run_is_verified_with_its_share_and_the_seed(run, verify):
    code, told = verify(run, "--segments", 2, "--seed", 5)
    assert code == 0, told
    assert "4 segments, of which 4 can be trained again (100 % of its 512 samples)" in told
    assert "(--seed 5), on 1 process" in told
    assert told.count("bit-identical") == 2
    assert "Verified. 2 of 4 segments, 50 % of its 512 samples" in told


def test_segments_with_deleted_checkpoints_are_verified_where_the_start_is_kept(run, verify):
    for iteration in (1, 2):
        shutil.rmtree(checkpoint(run, iteration))
    code, told = verify(run, "--segments", 9)
    assert code == 0, told
    assert "4 segments, of which 2 can be trained again (50 % of its 512 samples)" in told
    assert "segment 1 (0 to 128 samples): bit-identical" in told  # from the settings; its end was deleted
    assert "segment 4 (384 to 512 samples): bit-identical" in told
    assert "the checkpoint that it starts from was deleted" in told


def test_choice_of_segments_depends_on_the_seed_and_has_no_repeats(run):
    segments = read_history(run).segments * 10
    choices = [tuple(map(id, choose_segments(list(range(40)), 3, seed))) for seed in range(20)]
    assert len(segments) == 40
    assert len(set(choices)) > 10
    assert all(len(set(chosen)) == 3 for chosen in choices)


def test_resumed_run_with_changed_settings_is_verified_in_both_parts(tmp_path, verify):
    recipe = tiny(tmp_path, reduction="exact")
    train(recipe, stop_at=2 * ITERATION)
    path = train(apply_overrides(recipe, {"algo.learning_rate": 0.01}), resume=True).path
    code, told = verify(path, "--segments", 4)
    assert code == 0, told
    assert "Changed from 256 samples: algo.learning_rate 0.00025 -> 0.01" in told
    assert told.count("bit-identical") == 4


def test_fork_is_verified_from_its_first_checkpoint_on(run, verify):
    assert main(["fork", f"{run}@{2 * ITERATION}", "run.name=fork", "algo.learning_rate=0.01"]) == 0
    code, told = verify(run.parent / "fork", "--segments", 9)
    assert code == 0, told
    assert "Forked from" in told
    assert "2 segments, of which 2 can be trained again" in told
    assert told.count("bit-identical") == 2


def test_segment_spans_a_checkpoint_with_a_pending_evaluation(run):
    history = read_history(run)
    history.entries[1] = replace(history.entries[1], complete=False)
    segments = split_segments(history, read_log(run)[1], forked=False)
    assert [(segment.first, segment.end.samples) for segment in segments] == [(0, 128), (128, 384), (384, 512)]


def test_comparison_arranges_lanes_and_replay_as_in_the_original(tmp_path):
    one, other = record(tmp_path, "one"), record(tmp_path, "other", save_every=10**9)
    (last,) = lineage(other / "checkpoints")
    entry = entry_of(form.read_manifest(one / "checkpoints" / str(last)))
    repeated = other / "checkpoints" / str(last)
    assert any(form.rows_of(name) for name in entry.files)
    assert differing_files(entry, repeated) == []
    assert differing_tensors(one / "checkpoints" / str(last), repeated) == []
    names = dict.fromkeys(entry.files, "0" * 64)
    wrong = parse_entry(vars(entry) | {"files": names})
    assert set(differing_files(wrong, repeated)) == {name for name in names if not name.endswith(".parity")}


# ------------------------------------------------------------------------------------------------------------- refused


def test_flipped_weight_is_refused_with_its_segment(run, verify):
    flip_weight(checkpoint(run, 2))
    code, told = verify(run)
    assert code == 1
    assert "segment 2 (128 to 256 samples): its end, checkpoint 000000000256-g0001, is not what was written" in told
    assert "Refused." in told


def test_flipped_weight_with_new_hashes_is_refused_with_its_segment(run, verify):
    flip_weight(checkpoint(run, 4))
    seal(checkpoint(run, 4))
    code, told = verify(run)
    assert code == 1
    assert "segment 4 (384 to 512 samples): its end" in told
    assert "was written again after it was published: shared.safetensors differ" in told


def test_flipped_weight_in_a_forged_chain_is_refused_by_its_segment(run, verify):
    flip_weight(checkpoint(run, 4))
    seal(checkpoint(run, 4))
    forge(run, {})
    code, told = verify(run, "--segments", 4)
    assert code == 1
    assert re.search(r"segment 4 \(384 to 512 samples\): shared.safetensors differ: algorithm\.\S+", told)


@pytest.fixture(scope="module")
def reseeded(tmp_path_factory):
    """A run whose second half was trained with another seed, and whose config.yaml was restored afterwards."""
    recipe = tiny(tmp_path_factory.mktemp("reseeded"), reduction="exact")
    path = train(recipe, stop_at=2 * ITERATION).path
    config = (path / "config.yaml").read_text()
    (path / "config.yaml").write_text(config.replace("seed: 0", "seed: 9"))
    train(apply_overrides(recipe, {"run.seed": 9}), resume=True)
    (path / "config.yaml").write_text(config)
    return path


def test_segment_with_another_seed_is_refused(reseeded, verify):
    code, told = verify(reseeded)
    assert code == 1
    assert "segment 3 (256 to 384 samples) has other settings, which no resume recorded: run.seed 0 -> 9" in told


def test_segment_with_another_seed_in_a_forged_chain_is_refused(reseeded, tmp_path, verify):
    run = Path(shutil.copytree(reseeded, tmp_path / "run"))
    (first,) = (s for s in read_log(run)[1].values() if s["run"]["seed"] == 0)
    forge(run, {"config": hash_settings(first)})
    code, told = verify(run, "--segments", 4)
    assert code == 1
    assert told.count("bit-identical") == 2
    assert "segment 3 (256 to 384 samples): " in told


def test_edited_config_is_refused_with_the_segment_and_setting(run, verify):
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("learning_rate: 0.00025", "learning_rate: 0.01"))
    code, told = verify(run)
    assert code == 1
    assert "config.yaml was edited after segment 4 (384 to 512 samples): algo.learning_rate 0.00025 -> 0.01" in told


def test_chain_with_a_lost_entry_starts_after_it(run):
    path = checkpoint(run, 2) / form.MANIFEST
    manifest = json.loads(path.read_text())
    manifest["chain"]["processes"] = 3
    path.write_text(sealed(manifest))
    lines = [
        line for line in (run / CHAIN).read_text().splitlines() if "000000000256" not in line.partition("parent")[0]
    ]
    (run / CHAIN).write_text("\n".join(lines) + "\n")
    history = read_history(run)
    assert not history.problems
    assert "The chain starts after 000000000256-g0001" in history.notes[0]
    assert [segment.end.samples for segment in history.segments] == [4 * ITERATION]


# ------------------------------------------------------------------------------------------------------ not possible


def test_other_torch_version_is_named_and_can_be_tried(run, verify, monkeypatch):
    monkeypatch.setattr(environment, "describe_machine", lambda device: describe_machine() | {"torch": "9.9"})
    code, told = verify(run, "--segments", 1)
    assert code == 2
    assert re.search(r"segment \d .* cannot be trained again here with the same bits: torch was \S+ and is 9.9", told)
    code, told = verify(run, "--segments", 1, "--allow-other-machine")
    assert code == 0, told
    assert "may still be equal: torch was" in told


def test_fast_reduction_needs_the_number_of_processes_of_the_segment(run):
    (segment, *_), recipe = read_history(run).segments, tiny(run)
    assert environment.check_environment(segment, recipe, 1) == ([], [])
    ((reason,), _) = environment.check_environment(segment, recipe, 2)
    assert "trained on 1, and repeated on 2" in reason
    exact = apply_overrides(recipe, {"run.reduction": "exact"})
    assert environment.check_environment(segment, exact, 2) == ([], [])


def test_segment_after_foreign_weights_is_not_repeated(original, tmp_path):
    path = train(tiny(tmp_path, "second"), init_from=str(original)).path
    first, *others = read_history(path).segments
    assert first.obstacle == "it was started with weights of another run"
    assert not any(segment.obstacle for segment in others)


# ------------------------------------------------------------------------------------------------------------- exports


def test_export_names_its_checkpoint_and_changed_weights_are_refused(run, verify, tmp_path):
    assert main(["export", str(run), "--checkpoint", str(3 * ITERATION)]) == 0
    export = run / "run.safetensors"
    code, told = verify(export)
    assert (code, "Verified." in told, "checkpoint 000000000384-g0001" in told) == (0, True, True), told
    weights = load_file(export)
    name = sorted(weights)[0]
    with form.safe_read.open_regular(export) as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    weights[name] = weights[name] + 1
    save_file(weights, export, metadata=header["__metadata__"])
    code, told = verify(export)
    assert (code, f"Weights that differ from it: {name}." in told) == (1, True), told
    shutil.rmtree(checkpoint(run, 3))
    code, told = verify(export)
    assert (code, "the weights cannot be compared" in told) == (1, True), told
    save_file(weights, export)
    code, told = verify(export)
    assert (code, "does not say which checkpoint" in told) == (2, True), told


# ------------------------------------------------------------------------------------------------- several processes


@pytest.mark.slow
@pytest.mark.distributed
def test_run_of_4_processes_is_verified_on_1_in_3_of_40_segments(tmp_path, capfd):
    settings = ["run.total_samples=5120", "run.save_every=128", "run.keep_last=100", "run.reduction=exact"]
    settings += ["task.size=4", "task.num_envs=16", "algo.rollout_steps=8", "algo.batch_size=64", "algo.epochs=1"]
    settings += ["run.eval_every=none", f"run.runs_dir={tmp_path}", "run.name=run", "run.device=cpu"]
    assert main(["train", "snake-ppo", "--procs", "4", *settings]) == 0
    capfd.readouterr()
    assert main(["verify", str(tmp_path / "run"), "--seed", "1"]) == 0
    told = capfd.readouterr().out
    assert "40 segments" in told
    assert told.count("bit-identical") == 3
