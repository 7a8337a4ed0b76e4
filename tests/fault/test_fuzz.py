"""Fuzzing of run files (12,000 examples in `make test-slow`): bytes flipped, cut, inserted, values replaced.

With the manifest's hashes, a file is refused or read unchanged. Without them, as if it had been signed again, it is
refused with an error or is valid. Any other result is a failure, in particular a crash of the process.
"""

import contextlib
import json
import os
from dataclasses import asdict

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from helpers.claims import claim
from helpers.manifests import sealed
from lockstep.checkpoint import format as form
from lockstep.checkpoint.format import CorruptCheckpointError
from lockstep.checkpoint.format_version import UnknownFormat
from lockstep.checkpoint.lineage import CheckpointName, lineage
from lockstep.clock import TrainState
from lockstep.config import ConfigError, apply_overrides, read_yaml
from lockstep.io.jsonl import read_jsonl, truncate_after
from lockstep.lanes import Lanes
from lockstep.recipes.snake_ppo import SnakePPO
from lockstep.run_dir import to_yaml
from lockstep.tasks.snake.env import SnakeConfig
from lockstep.tools.bench.scaling_model import CostProfile, LinearCost, shares_from

EXAMPLES = int(os.environ.get("LOCKSTEP_EXAMPLES", "250"))
"""Examples per test."""
often = settings(max_examples=EXAMPLES, suppress_health_check=[HealthCheck.function_scoped_fixture], database=None)


@st.composite
def mutations(draw):
    """Draw changes to bytes: removals, insertions, perhaps truncation. Positions are fractions of the length."""
    changes = []
    for _ in range(draw(st.integers(1, 3))):
        changes.append((draw(st.floats(0, 1)), draw(st.integers(0, 8)), draw(st.binary(max_size=8))))
    return changes, draw(st.none() | st.floats(0, 1))


def mutate(content, mutation):
    changes, end = mutation
    for place, cut, put in changes:
        start = int(place * len(content))
        content = content[:start] + put + content[start + cut :]
    return content if end is None else content[: int(end * len(content))]


plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5) | st.just(10**30) | st.just("../x"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=4,
)


@st.composite
def replaced(draw, value):
    """Draw a JSON value with one part replaced, removed or renamed."""
    path, here = [], value
    while isinstance(here, dict | list) and here and draw(st.integers(0, 4)):
        key = draw(st.sampled_from(sorted(here))) if isinstance(here, dict) else draw(st.integers(0, len(here) - 1))
        path.append(key)
        here = here[key]
    copy = json.loads(json.dumps(value))
    if not path:
        return draw(plain)
    parent = copy
    for key in path[:-1]:
        parent = parent[key]
    match draw(st.integers(0, 2)):
        case 0:
            parent[path[-1]] = draw(plain)
        case 1:
            del parent[path[-1]]
        case _ if isinstance(parent, dict):
            parent[draw(st.text(max_size=8))] = parent.pop(path[-1])
    return copy


CLOCK = TrainState(
    total_samples=9,
    samples=4,
    evaluation={"return_mean": 1.0},
    best=1.0,
    metrics={"a": 1.0},
    metric_sums={"a": [1.0, 2]},
)
VALUES = {"format": form.FORMAT, "clock": asdict(CLOCK), "lanes": 2, "processes": 1}
STATE = {"lane-0000.a": torch.arange(6.0).view(2, 3), "lane-0001.a": torch.ones(2, 3, dtype=torch.int64)}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    directory = tmp_path_factory.mktemp("fuzz") / "000000000004-g0001"
    directory.mkdir()
    files = {form.SHARED: form.write_tensors(directory / form.SHARED, STATE)}
    files[form.lane_file(range(2))] = form.write_tensors(directory / form.lane_file(range(2)), STATE)
    files[form.VALUES] = form.write_json(directory / form.VALUES, VALUES)
    form.write_manifest(directory, files, False, {})
    return directory


def changed(path, content):
    """Replace the content of a file; return the previous content."""
    before = path.read_bytes()
    path.write_bytes(content)
    return before


def signed(content):
    """Return a changed manifest with a valid checksum, if it is still a JSON object."""
    try:
        values = json.loads(content)
    except ValueError:
        return content
    return sealed(values | {"checksum": ""}).encode() if isinstance(values, dict) else content


@often
@given(mutations(), st.booleans())
def test_manifest_with_mutated_bytes_is_equal_or_refused(checkpoint, mutation, sign):
    path = checkpoint / form.MANIFEST
    content = mutate(path.read_bytes(), mutation)
    before = changed(path, signed(content) if sign else content)
    try:
        assert form.verify(checkpoint)["files"] == json.loads(before)["files"]
    except (CorruptCheckpointError, UnknownFormat):
        pass
    finally:
        path.write_bytes(before)


@often
@given(st.data())
def test_manifest_with_replaced_value_is_valid_or_refused(checkpoint, data):
    path = checkpoint / form.MANIFEST
    whole = json.loads(path.read_bytes())
    before = changed(path, signed(json.dumps(data.draw(replaced(whole))).encode()))
    try:
        files = form.verify(checkpoint)["files"]
        assert files.items() <= whole["files"].items()
    except (CorruptCheckpointError, UnknownFormat):
        pass
    finally:
        path.write_bytes(before)


def try_values(checkpoint, content):
    before = changed(checkpoint / form.VALUES, content)
    try:
        found = form.read_values(checkpoint)
        clock = TrainState(**found["clock"])
        clock.record_evaluation({"return_mean": 2.0}), clock.accumulate({"a": (1.0, 1.0)}), clock.flush_metrics()
        assert clock.done == (clock.samples >= clock.total_samples)
        assert 1 <= found["lanes"] < 2**63
    except (CorruptCheckpointError, UnknownFormat):
        pass
    finally:
        (checkpoint / form.VALUES).write_bytes(before)


@often
@given(mutations(), st.sampled_from([form.SHARED, form.VALUES, form.lane_file(range(2))]))
def test_verify_refuses_any_file_with_mutated_bytes(checkpoint, mutation, name):
    path = checkpoint / name
    before = changed(path, mutate(path.read_bytes(), mutation))
    equal = path.read_bytes() == before
    try:
        form.verify(checkpoint)
        assert equal
    except CorruptCheckpointError:
        assert not equal
    finally:
        path.write_bytes(before)


@often
@given(mutations())
def test_train_state_with_mutated_bytes_is_valid_or_refused(checkpoint, mutation):
    try_values(checkpoint, mutate(json.dumps(VALUES).encode(), mutation))


@often
@given(st.data())
def test_train_state_with_replaced_value_is_valid_or_refused(checkpoint, data):
    try_values(checkpoint, json.dumps(data.draw(replaced(VALUES))).encode())


@often
@given(mutations(), st.booleans())
def test_tensor_file_with_mutated_bytes_is_valid_or_refused(checkpoint, mutation, header):
    path = checkpoint / form.SHARED
    content = path.read_bytes()
    head = 8 + int.from_bytes(content[:8], "little")
    mutated = mutate(content[8:head], mutation)
    other = content[:8] + mutated + content[head:] if header else mutate(content, mutation)
    if header and len(mutated) != head - 8:
        other = len(mutated).to_bytes(8, "little") + mutated + content[head:]
    before = changed(path, other)
    try:
        for name, tensor in form.read_shared(checkpoint).items():
            assert tensor.nbytes <= len(other)
            form.digest_tensor(name, tensor)  # every byte can be read
    except CorruptCheckpointError:
        pass
    finally:
        path.write_bytes(before)


CONFIG = to_yaml(SnakePPO())


@often
@given(mutations())
def test_config_with_mutated_bytes_is_valid_or_refused(tmp_path, mutation):
    (tmp_path / "a.yaml").write_bytes(mutate(CONFIG.encode(), mutation))
    try:
        values = read_yaml(tmp_path / "a.yaml")
        values.pop("lockstep", None), values.pop("recipe", None)
        apply_overrides(SnakePPO(), values)
    except ConfigError:
        pass


@often
@given(
    st.lists(
        st.sampled_from(
            ["a", ":", " ", "\n", "- ", "&a ", "*a", "[", "]", "{", "}", "!!int ", "? ", "1", "|", "'", "<<"]
        )
    )
)
def test_config_of_random_yaml_tokens_is_valid_or_refused(tmp_path, words):
    (tmp_path / "a.yaml").write_text("".join(words))
    with contextlib.suppress(ConfigError):
        apply_overrides(SnakePPO(), read_yaml(tmp_path / "a.yaml"))


@often
@given(mutations(), st.integers(0, 3))
def test_log_with_mutated_bytes_is_read_and_truncated(tmp_path, mutation, samples):
    path = tmp_path / "metrics.jsonl"
    lines = "".join(json.dumps({"samples": number, "loss": 0.5}) + "\n" for number in range(3))
    path.write_bytes(mutate(lines.encode(), mutation))
    read_jsonl(path)
    truncate_after(path, samples)
    assert all(line.get("samples", 0) <= samples for line in read_jsonl(path))


@often
@given(
    st.lists(
        st.binary(max_size=30) | st.sampled_from([b"{}", b"[]", b'{"parent": 3}', b'{"parent": "4-g2"}']), max_size=4
    )
)
def test_lineage_with_random_claims_lists_only_existing_checkpoints(tmp_path_factory, claims):
    directory = tmp_path_factory.mktemp("claims")
    (directory / str(CheckpointName(4, 1))).mkdir()
    claim(directory, None)
    for number, content in enumerate(claims):
        (directory / f"attempt-{number + 2:04d}.json").write_bytes(content)
    assert set(lineage(directory)) <= {CheckpointName(4, 1)}


LINE = LinearCost(0.1, 0.2)
SHARES = CostProfile(LINE, LINE, LINE, 8, 8, 8, 1, 64, [("pool", 8, 1.0)], 1, 1.0, 1.0)


@often
@given(st.data())
def test_measurement_with_replaced_value_is_valid_or_refused(data):
    values = json.loads(json.dumps(data.draw(replaced(json.loads(json.dumps(asdict(SHARES)))))))
    try:
        shares = shares_from(values)
        assert shares.rest.at(shares.num_envs) < 1e37
    except (ValueError, LookupError, TypeError):  # as `plan` catches them
        pass


BOARDS = SnakeConfig(size=4, num_envs=2).build(Lanes(1, range(1), 0), torch.device("cpu"))


@often
@given(st.data())
def test_snake_state_with_random_number_is_refused_or_playable(data):
    """Step the environment after loading, because an invalid index in a kernel would crash the process."""
    state = BOARDS.lane_state(0)
    name = data.draw(st.sampled_from(sorted(state)))
    flat = state[name].view(-1)
    kind = torch.iinfo(flat.dtype)
    number = data.draw(st.integers(-20, 20) | st.integers(kind.min, kind.max)) % (2**63)
    flat[data.draw(st.integers(0, len(flat) - 1))] = min(number, kind.max)
    with contextlib.suppress(ValueError):
        BOARDS.load_lane_state(0, state)
    for action in data.draw(st.lists(st.integers(0, 3), max_size=5)):
        BOARDS.step(torch.tensor([action, 3 - action]))
