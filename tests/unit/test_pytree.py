"""Pytrees: mapping, flattening and in-place loading keep names, values and strides."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.pytree import first_leaf, load_into, named_leaves, tree_map

names = st.text("abcxyz", min_size=1, max_size=3)
tensors = st.integers(-9, 9).map(lambda value: torch.full((2, 3), float(value)))
trees = st.recursive(tensors, lambda branch: st.dictionaries(names, branch, min_size=1, max_size=3), max_leaves=6)


def test_named_leaves_returns_dotted_names_in_tree_order():
    tree = {"b": torch.zeros(1), "a": {"y": torch.ones(1), "x": torch.full((1,), 2.0)}}
    assert list(named_leaves(tree)) == ["b", "a.y", "a.x"]
    assert list(named_leaves(tree, "obs")) == ["obs.b", "obs.a.y", "obs.a.x"]
    assert list(named_leaves(torch.zeros(1), "obs")) == ["obs"]
    assert list(named_leaves(torch.zeros(1))) == [""]


@given(trees)
def test_tree_map_visits_every_leaf_and_keeps_names(tree):
    doubled = named_leaves(tree_map(lambda x: x * 2, tree))
    assert list(doubled) == list(named_leaves(tree))
    for name, leaf in named_leaves(tree).items():
        assert torch.equal(doubled[name], leaf * 2)


@given(trees)
def test_tree_map_of_several_trees_pairs_matching_leaves(tree):
    larger = tree_map(lambda x: x + 1, tree)
    assert all((leaf == 1).all() for leaf in named_leaves(tree_map(torch.sub, larger, tree)).values())


def test_tree_map_and_named_leaves_of_empty_tree_are_empty():
    assert tree_map(lambda x: x + 1, {}) == {}
    assert named_leaves({}) == {}


@given(trees)
def test_first_leaf_is_one_of_the_leaves(tree):
    assert any(first_leaf(tree) is leaf for leaf in named_leaves(tree).values())


def test_load_into_keeps_storage_and_strides():
    live = {"weight": torch.zeros(2, 3, 4, 4).contiguous(memory_format=torch.channels_last)}
    before = live["weight"].data_ptr(), live["weight"].stride()
    saved = {"weight": torch.arange(96.0).view(2, 3, 4, 4)}
    load_into(live, saved, "the agent")
    assert torch.equal(live["weight"], saved["weight"])
    assert (live["weight"].data_ptr(), live["weight"].stride()) == before


def test_load_into_copies_into_parameters_that_require_grad():
    parameter = torch.nn.Parameter(torch.zeros(2))
    load_into({"p": parameter}, {"p": torch.ones(2)}, "the agent")
    assert parameter.tolist() == [1, 1]
    assert parameter.requires_grad


@pytest.mark.parametrize(
    ("saved", "words"),
    [
        ({"a": torch.zeros(2)}, r"missing \['b'\], unexpected nothing"),
        ({"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(2)}, r"missing nothing, unexpected \['c'\]"),
        (
            {"a": torch.zeros(2), "b": torch.zeros(3)},
            r"b was saved as torch.float32 \(3,\) and is torch.float32 \(2,\)",
        ),
        ({"a": torch.zeros(2), "b": torch.zeros(2).double()}, r"b was saved as torch.float64 \(2,\)"),
    ],
)
def test_load_into_mismatched_state_error_names_the_difference(saved, words):
    with pytest.raises(ValueError, match=words) as caught:
        load_into({"a": torch.zeros(2), "b": torch.zeros(2)}, saved, "the agent")
    assert "the agent" in str(caught.value)
    assert "Resume a run with the configuration it was started with." in str(caught.value)
