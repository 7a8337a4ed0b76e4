"""Non-finite values in a rollout: value_range detects all of them, locate_nonfinite reports where they are."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.data.nonfinite import locate_nonfinite, value_range


@given(
    st.sampled_from([math.nan, math.inf, -math.inf]),
    st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    st.integers(0, 10**6),
)
def test_value_range_of_tree_with_one_nonfinite_value_is_nonfinite(value, dtype, place):
    x = torch.zeros(7, 5, 9, dtype=dtype)
    tree = {"picture": torch.full((7, 5), 255, dtype=torch.uint8), "body": {"joints": x}}
    assert value_range(tree) == 0.0
    x.view(-1)[place % x.numel()] = value
    assert not value_range(tree).isfinite()


def test_value_range_of_integers_is_zero():
    assert value_range(torch.full((3,), 255, dtype=torch.uint8)) == 0.0


def test_locate_nonfinite_reports_lane_environment_step_and_index():
    body, reward = torch.zeros(4, 6, 2, 3), torch.zeros(4, 6)  # lanes 2 and 3, of three environments each
    body[3, 4, 1, 0], reward[1, 2] = -math.inf, math.nan
    assert locate_nonfinite({"observation": {"body": body}, "reward": reward}, range(2, 4)) == [
        "lane 2, environment 2 of the lane, step 1 of the rollout: reward is nan",
        "lane 3, environment 1 of the lane, step 3 of the rollout: observation.body[1, 0] is -inf",
    ]


def test_locate_nonfinite_reports_first_step_per_env_and_truncates():
    reward = torch.zeros(9, 12)
    for env in range(12):
        reward[env % 9 :, env] = math.nan
    found = locate_nonfinite({"reward": reward}, range(4))
    assert [words.partition(":")[0] for words in found[:4]] == [
        "lane 0, environment 0 of the lane, step 0 of the rollout",
        "lane 3, environment 0 of the lane, step 0 of the rollout",
        "lane 0, environment 1 of the lane, step 1 of the rollout",
        "lane 3, environment 1 of the lane, step 1 of the rollout",
    ]
    assert found[4:] == ["lanes 0 to 3: 8 more places"]


def test_locate_nonfinite_of_finite_values_is_empty():
    assert (
        locate_nonfinite({"reward": torch.zeros(2, 4), "observation": torch.ones(2, 4, 3, dtype=torch.uint8)}, range(4))
        == []
    )


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_value_range_with_nonfinite_among_large_values_is_nonfinite(value):
    assert not value_range(torch.tensor([3e38, value, 3e38, -3e38])).isfinite()
