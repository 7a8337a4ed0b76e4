"""Digest log: which iterations have a line, and what changes it."""

import pytest
import torch

from helpers.multiprocess import together
from helpers.tiny_recipes import ITERATION, tiny
from lockstep.checkpoint.naming import generation_file
from lockstep.digest_log import digest_metrics
from lockstep.distributed.consistency import fold
from lockstep.io.jsonl import read_jsonl
from lockstep.training_loop import train


def digests_of(run):
    return (run / "digests.jsonl").read_text()


def train_and_read(directory, name, **settings):
    return digests_of(train(tiny(directory, name, save_every=None, **settings)).path)


def train_exact(directory, name):
    train(tiny(directory, name, reduction="exact", save_every=None, digest_every=1))


# ---------------------------------------------------------------------------------------------------------------- lines


@pytest.mark.parametrize(("every", "iterations"), [(1, [0, 1, 2, 3, 4]), (2 * ITERATION, [0, 2, 4]), (None, [])])
def test_digest_every_selects_iterations_with_a_line(tmp_path, every, iterations):
    run = train(tiny(tmp_path, save_every=None, digest_every=every)).path
    lines = read_jsonl(run / "digests.jsonl")
    assert [line["iteration"] for line in lines] == iterations
    assert [line["samples"] for line in lines] == [n * ITERATION for n in iterations]
    assert len({line["agent"] for line in lines}) == len(iterations)  # every iteration changes the agent


def test_equal_runs_write_equal_digests_and_another_seed_does_not(tmp_path):
    one, same, other = (train_and_read(tmp_path, f"{n}", digest_every=1, seed=n // 2) for n in range(3))
    assert one == same
    assert one != other


def test_start_that_was_superseded_writes_no_digests(tmp_path):
    recipe = tiny(tmp_path, save_every=None, digest_every=1)
    claim = generation_file(tmp_path / "run" / "checkpoints", 9)
    done = []

    def supersede():
        done.append(digests_of(tmp_path / "run"))
        claim.write_text('{"parent": null}')

    with pytest.raises(Exception, match="started again"):
        train(recipe, on_record=supersede)
    assert digests_of(tmp_path / "run") == done[0]


@pytest.mark.distributed
def test_exact_digests_are_equal_on_one_and_two_processes(tmp_path):
    train_exact(tmp_path, "one")
    together(train_exact, 2, tmp_path, "two")
    assert digests_of(tmp_path / "one") == digests_of(tmp_path / "two")


# --------------------------------------------------------------------------------------------------------- fingerprints


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bfloat16, torch.uint8, torch.bool])
def test_fold_changes_with_one_element_of_any_dtype(dtype):
    state = {"a": torch.zeros(3, 70_000, dtype=dtype), "b": torch.zeros((), dtype=torch.int64)}
    before = fold(state)
    seen = {before}
    for place in ((0, 0), (1, 65_537), (2, 69_999)):
        state["a"][place] = 1
        seen.add(fold(state))
        state["a"][place] = 0
    assert len(seen) == 4
    assert fold(state) == before


def test_fold_changes_with_one_bit_sign_of_zero_and_swapped_values():
    x = torch.tensor([1.0, 2.0, 0.0, 0.0])
    before = fold({"x": x})
    nudged = x.clone()
    nudged[0] = torch.nextafter(x[0], torch.tensor(2.0))
    negative_zeros = torch.tensor([1.0, 2.0, -0.0, -0.0])
    assert len({before, fold({"x": nudged}), fold({"x": x[[1, 0, 2, 3]]}), fold({"x": negative_zeros})}) == 4


def test_fold_ignores_strides_and_gradients_and_accepts_no_tensors():
    x = torch.randn(8, 3, generator=torch.Generator().manual_seed(0))
    strided = x.t().contiguous().t().requires_grad_()
    assert fold({"x": strided}) == fold({"x": x})
    assert fold({}) == 0


def test_digest_metrics_covers_names_sums_and_counts():
    totals = {"loss": (1.0, 2.0), "norm": (float("nan"), 1.0)}
    others = [{**totals, "loss": (1.0 + 2**-52, 2.0)}, {**totals, "loss": (1.0, 3.0)}, {"norm": (1.0, 2.0)}]
    assert len({digest_metrics(each) for each in (totals, *others)}) == 4
    assert digest_metrics(dict(reversed(totals.items()))) == digest_metrics(totals)
