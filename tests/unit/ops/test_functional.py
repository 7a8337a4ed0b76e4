"""Numeric functions: manual examples, slow references and properties."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import tensor

from lockstep.ops.functional import PPOLoss, compute_gae, moments, ppo_loss, schedule
from lockstep.ops.two_hot import (
    discount_from_episode_length,
    percentile_range,
    symexp,
    symlog,
    two_hot,
    two_hot_inverse,
    two_hot_loss,
)

KINDS = ["constant", "linear", "cosine"]
parts = st.floats(0, 1)


def advantages_of(rewards, values, following, terminated, truncated, discount, trace):
    """Return GAE advantages of one environment from lists."""
    ended = [a or b for a, b in zip(terminated, truncated, strict=True)]
    columns = (tensor(column) for column in (rewards, values, following, terminated, ended))
    return compute_gae(*columns, discount, trace).tolist()


def reference_advantages(rewards, values, following, terminated, ended, discount, trace):
    """Compute GAE by its definition: the decayed sum of later TD errors of the same episode."""
    result = []
    for start in range(len(rewards)):
        total, weight = 0.0, 1.0
        for t in range(start, len(rewards)):
            future = 0.0 if terminated[t] else following[t]
            total += weight * (rewards[t] + discount * future - values[t])
            if ended[t]:
                break
            weight *= discount * trace
        result.append(total)
    return result


# ----------------------------------------------------------------------------------------------------------- advantages


def test_gae_of_running_episode_matches_manual_example():
    # deltas: 1 + 0.5*4 - 2 = 1;  2 + 0.5*6 - 4 = 1;  4 + 0.5*8 - 6 = 2.  decay 0.5*0.5 = 0.25
    worked = [1 + 0.25 * (1 + 0.25 * 2), 1 + 0.25 * 2, 2]
    assert advantages_of([1.0, 2, 4], [2.0, 4, 6], [4.0, 6, 8], [False] * 3, [False] * 3, 0.5, 0.5) == worked


def test_gae_terminated_step_has_no_bootstrap_value():
    # deltas: 1 + 0.5*4 - 2 = 1;  2 - 4 = -2 (terminated);  4 + 0.5*8 - 6 = 2
    worked = [1 + 0.25 * -2, -2, 2]
    assert advantages_of([1.0, 2, 4], [2.0, 4, 6], [4.0, 6, 8], [False, True, False], [False] * 3, 0.5, 0.5) == worked


def test_gae_truncated_step_bootstraps_from_final_observation():
    # The episode was truncated where its value was 10, not 6: 2 + 0.5*10 - 4 = 3
    worked = [1 + 0.25 * 3, 3, 2]
    assert advantages_of([1.0, 2, 4], [2.0, 4, 6], [4.0, 10, 8], [False] * 3, [False, True, False], 0.5, 0.5) == worked


def test_gae_with_zero_lambda_is_td_error():
    assert advantages_of([1.0, 2], [3.0, 4], [4.0, 5], [False] * 2, [False] * 2, 0.5, 0.0) == [0.0, 0.5]


def test_gae_with_lambda_and_gamma_one_is_return_minus_value():
    following = [7.0, 9.0, 100.0]
    assert advantages_of([1.0, 2, 4], [5.0, 7, 9], following, [False, False, True], [False] * 3, 1.0, 1.0) == [
        2,
        -1,
        -5,
    ]


@given(st.integers(1, 9), st.integers(1, 3), st.integers(0, 2**32), parts, parts)
def test_gae_matches_definition(steps, envs, seed, discount, trace):
    draw = torch.Generator().manual_seed(seed)
    rewards, values, following = torch.randn(3, steps, envs, generator=draw, dtype=torch.float64)
    terminated, truncated = torch.rand(2, steps, envs, generator=draw) < 0.25
    ended = terminated | truncated
    found = compute_gae(rewards, values, following, terminated, ended, discount, trace)
    for env in range(envs):
        columns = (x[:, env].tolist() for x in (rewards, values, following, terminated, ended))
        wanted = tensor(reference_advantages(*columns, discount, trace), dtype=torch.float64)
        torch.testing.assert_close(found[:, env], wanted, rtol=1e-5, atol=1e-5)  # the decay is float32


# ------------------------------------------------------------------------------------------------------------ schedules


@pytest.mark.parametrize(
    ("kind", "progress", "value"),
    [
        ("constant", 0.0, 8.0),
        ("constant", 1.0, 8.0),
        ("linear", 0.0, 8.0),
        ("linear", 0.25, 6.0),
        ("linear", 1.0, 0.0),
        ("cosine", 0.0, 8.0),
        ("cosine", 0.5, 4.0),
        ("cosine", 1.0, 0.0),
        ("cosine", 1 / 3, 6.0),
    ],
)
def test_schedule_matches_manual_values(kind, progress, value):
    assert schedule(kind, 8.0, progress) == pytest.approx(value)


@pytest.mark.parametrize("kind", KINDS)
def test_schedule_warmup_is_linear_and_rest_is_rescaled(kind):
    assert schedule(kind, 8.0, 0.0, warmup=0.2) == 0.0
    assert schedule(kind, 8.0, 0.05, warmup=0.2) == pytest.approx(2.0)
    assert schedule(kind, 8.0, 0.2, warmup=0.2) == pytest.approx(8.0)
    assert schedule(kind, 8.0, 0.6, warmup=0.2) == pytest.approx(schedule(kind, 8.0, 0.5))


@given(st.sampled_from(KINDS), parts, parts, st.floats(0, 1))
def test_schedule_stays_between_zero_and_peak(kind, progress, warmup, peak):
    assert 0.0 <= schedule(kind, peak, progress, warmup) <= peak * (1 + 1e-12)


@given(st.sampled_from(KINDS), parts, parts)
def test_schedule_without_warmup_never_increases(kind, one, other):
    early, late = sorted((one, other))
    assert schedule(kind, 1.0, early) >= schedule(kind, 1.0, late)


# --------------------------------------------------------------------------------------------------------------- losses


def loss_of(log_ratio=0.0, advantage=0.0, value=0.0, old=0.0, target=0.0, clip=0.2, value_clip=None, dtype=None):
    """Return the loss of one sample with this log ratio and value change."""
    sample = (tensor([number], dtype=dtype) for number in (log_ratio, 0.0, value, 0.0, advantage, old, target))
    return ppo_loss(*sample, clip=clip, value_clip=value_clip, value_weight=1.0, entropy_weight=0.0)


def divergence_of(log_ratio, dtype=None):
    return loss_of(log_ratio, dtype=dtype).kl


def textbook_loss(log_prob, entropy, values, old_log_prob, advantages, old_values, returns, clip, value_clip, weights):
    """The PPO loss as in the paper, differentiated by autograd."""
    ratio = (log_prob - old_log_prob).exp()
    policy = -torch.minimum(ratio * advantages, ratio.clamp(1 - clip, 1 + clip) * advantages)
    error = (values - returns).square()
    if value_clip is not None:
        near = old_values + (values - old_values).clamp(-value_clip, value_clip)
        error = torch.maximum(error, (near - returns).square())
    kl, clipped = ratio - 1 - ratio.log(), ((ratio - 1).abs() > clip).to(ratio)
    sums = [x.sum() for x in (policy, error / 2, entropy, kl, clipped)]
    return PPOLoss(sums[0] + weights[0] * sums[1] - weights[1] * sums[2], *sums)


def random_samples(seed, count, clip, value_clip, dtype=torch.float32):
    """Return inputs of `ppo_loss` without samples near a kink, where the gradient is not unique."""
    draw = torch.Generator().manual_seed(seed)
    samples = torch.randn(7, count, generator=draw, dtype=dtype)
    samples[0] = samples[3] + 0.5 * samples[0]  # ratios inside the clip range and on both sides of it
    log_prob, _, values, old_log_prob, advantages, old_values, returns = samples
    clear = (((log_prob - old_log_prob).expm1().abs() - clip).abs() > 1e-3) & (advantages.abs() > 1e-3)
    if value_clip is not None:
        move = values - old_values
        near = old_values + move.clamp(-value_clip, value_clip)
        within = move.abs() < value_clip
        apart = ((values - returns).square() - (near - returns).square()).abs() > 1e-3
        clear &= ((move.abs() - value_clip).abs() > 1e-3) & (within | apart)
    return [x[clear] for x in samples]


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss"),
    [
        (1.0, 2.0, -2.0),
        (1.1, 2.0, -2.2),  # within the clip
        (1.5, 2.0, -2.4),  # the gain of a good action is clipped at 1.2
        (0.5, 2.0, -1.0),  # making it less likely is not clipped
        (0.5, -2.0, 1.6),  # the gain of avoiding a bad action is clipped at 0.8
        (1.5, -2.0, 3.0),  # making it more likely is not clipped
    ],
)
def test_policy_loss_is_pessimistic_beyond_clip(ratio, advantage, loss):
    torch.testing.assert_close(loss_of(math.log(ratio), advantage).policy, tensor(loss))


@pytest.mark.parametrize(("ratio", "advantage", "moves"), [(1.5, 1.0, False), (0.5, -1.0, False), (0.5, 1.0, True)])
def test_policy_loss_has_no_gradient_where_clipped(ratio, advantage, moves):
    log_prob, zero = tensor([math.log(ratio)], requires_grad=True), torch.zeros(1)
    data = (log_prob, zero, zero, zero, tensor([advantage]), zero, zero)
    ppo_loss(*data, clip=0.2, value_clip=None, value_weight=1.0, entropy_weight=0.0).total.backward()
    assert bool(log_prob.grad.abs() > 0) == moves
    torch.testing.assert_close(log_prob.grad, tensor([-advantage * ratio * moves]))


def test_kl_estimate_matches_manual_values():
    found = torch.stack([divergence_of(log_ratio) for log_ratio in (0.0, math.log(2.0), -math.log(2.0))])
    torch.testing.assert_close(found, tensor([0.0, 1 - math.log(2.0), math.log(2.0) - 0.5]))


@given(st.floats(-5, 5))
def test_kl_estimate_is_nonnegative_up_to_rounding(log_ratio):
    assert divergence_of(log_ratio, torch.float64) >= -abs(log_ratio) * 1e-15


@given(st.floats(1e-4, 1.0), st.sampled_from([-1, 1]))
def test_kl_estimate_of_small_log_ratio_is_accurate_in_float32(size, sign):
    single = divergence_of(size * sign, torch.float32)
    double = divergence_of(single.new_tensor(size * sign).item(), torch.float64)
    torch.testing.assert_close(single.double(), double, rtol=5e-3, atol=0)


def test_kl_estimate_is_unbiased():
    old, new = tensor([0.2, 0.3, 0.5]), tensor([0.4, 0.4, 0.2])
    exact = (old * (old / new).log()).sum()
    found = torch.stack([divergence_of(log_ratio) for log_ratio in (new / old).log().tolist()])
    torch.testing.assert_close((old * found).sum(), exact)


@pytest.mark.parametrize(
    ("value", "old", "target", "clip", "loss"),
    [
        (3.0, 0.0, 1.0, None, 2.0),
        (3.0, 0.0, 1.0, 5.0, 2.0),  # a move within the clip
        (3.0, 0.0, 3.0, 1.0, 2.0),  # a move of 3 is clipped to 1: (1 - 3)^2 / 2, although the value equals the target
        (3.0, 0.0, 0.5, 1.0, 3.125),  # the unclipped error is larger: (3 - 0.5)^2 / 2
        (-3.0, 0.0, -3.0, 1.0, 2.0),
    ],
)
def test_value_loss_is_pessimistic_beyond_clip(value, old, target, clip, loss):
    assert loss_of(value=value, old=old, target=target, value_clip=clip).value.item() == loss


@pytest.mark.parametrize(("ratio", "counted"), [(1.0, 0), (1.19, 0), (1.21, 1), (0.81, 0), (0.79, 1)])
@pytest.mark.parametrize("advantage", [-1.0, 1.0])
def test_clipped_count_is_independent_of_direction_and_advantage(ratio, counted, advantage):
    assert loss_of(math.log(ratio), advantage).clipped.item() == counted


@given(st.integers(0, 2**32), st.integers(1, 300), st.floats(0.05, 0.5), st.none() | st.floats(0.05, 2.0))
def test_ppo_loss_and_gradient_match_autograd_of_reference(seed, count, clip, value_clip):
    samples, weights = random_samples(seed, count, clip, value_clip), (0.7, 0.03)

    def differentiate(loss):
        moving = [x.clone().requires_grad_() for x in samples[:3]]
        found = loss(*moving, *samples[3:])
        (found.total * 3.0).backward()  # with a loss scale
        return found, [x.grad for x in moving]

    ours, by_ours = differentiate(
        lambda *x: ppo_loss(*x, clip=clip, value_clip=value_clip, value_weight=weights[0], entropy_weight=weights[1])
    )
    theirs, by_theirs = differentiate(lambda *x: textbook_loss(*x, clip, value_clip, weights))
    for name in PPOLoss._fields:
        torch.testing.assert_close(getattr(ours, name), getattr(theirs, name), rtol=1e-4, atol=1e-3)
    for gradient, wanted in zip(by_ours, by_theirs, strict=True):
        torch.testing.assert_close(gradient, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("value_clip", [None, 0.2, 1.0])
def test_ppo_loss_passes_gradcheck(value_clip):
    samples = random_samples(0, 60, 0.2, value_clip, torch.float64)
    assert len(samples[0]) > 40

    def total(*moving):
        settings = {"clip": 0.2, "value_clip": value_clip, "value_weight": 0.7, "entropy_weight": 0.03}
        return ppo_loss(*moving, *samples[3:], **settings).total

    assert torch.autograd.gradcheck(total, [x.clone().requires_grad_() for x in samples[:3]])


def test_value_gradient_within_clip_is_robust_to_rounding():
    # Old value plus move can differ from the new value by rounding, so that the clipped error is slightly larger.
    draw = torch.Generator().manual_seed(0)
    values, old, returns = torch.randn(3, 1000, generator=draw)
    assert (old + (values - old) != values).any()
    values.requires_grad_()
    zero = torch.zeros(1000)
    data = (zero, zero, values, zero, zero, old, returns)
    ppo_loss(*data, clip=0.2, value_clip=100.0, value_weight=1.0, entropy_weight=0.0).total.backward()
    torch.testing.assert_close(values.grad, values.detach() - returns)


def test_ppo_loss_only_total_requires_grad():
    moving = [torch.zeros(4, requires_grad=True) for _ in range(3)]
    data = [torch.ones(4) for _ in range(4)]
    loss = ppo_loss(*moving, *data, clip=0.2, value_clip=None, value_weight=1.0, entropy_weight=0.0)
    assert [name for name in PPOLoss._fields if getattr(loss, name).requires_grad] == ["total"]


# -------------------------------------------------------------------------------------------------------------- moments


def test_moments_match_manual_values():
    mean, variance = moments(tensor([9.0]), tensor([33.0]), tensor(3.0))  # of 1, 4, 4
    assert (mean.tolist(), variance.tolist()) == ([3.0], [2.0])


def test_moments_of_zero_samples_are_zero():
    mean, variance = moments(torch.zeros(2), torch.zeros(2), tensor(0.0))
    assert (mean.tolist(), variance.tolist()) == ([0.0, 0.0], [0.0, 0.0])


@given(st.floats(-1e6, 1e6), st.integers(1, 1000))
def test_moments_variance_of_constant_is_nonnegative(value, count):
    same = torch.full((count,), value, dtype=torch.float64)
    mean, variance = moments(same.sum(), same.square().sum(), tensor(float(count)))
    assert variance >= 0
    assert mean.item() == pytest.approx(value)


# --------------------------------------------------------------------------------------------------------- world models


def test_two_hot_splits_value_between_adjacent_bins():
    # Bins at -2, -1, 0, 1, 2 in symlog space; symlog(e^1.25 - 1) = 1.25 is a quarter of the way from 1 to 2.
    values = torch.tensor([math.exp(1.25) - 1, 0.0, -(math.e - 1), 1e9, -1e9])
    assert two_hot(values, 5, 2.0).tolist() == [
        pytest.approx([0, 0, 0, 0.75, 0.25], abs=1e-6),
        [0, 0, 1, 0, 0],
        pytest.approx([0, 1, 0, 0, 0], abs=1e-6),
        [0, 0, 0, 0, 1],
        [1, 0, 0, 0, 0],
    ]


@given(st.lists(st.floats(-2e4, 2e4, width=32), min_size=1, max_size=20))
def test_two_hot_inverse_recovers_value(values):
    x = torch.tensor(values)
    logits = two_hot(x, 101, 10.0).clamp(min=1e-30).log()
    torch.testing.assert_close(two_hot_inverse(logits, 10.0), x, rtol=1e-4, atol=1e-4)


def test_two_hot_loss_is_cross_entropy_to_adjacent_bins():
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    log_prob = logits.log_softmax(-1)[0]
    value = torch.tensor([math.exp(0.25) - 1])  # a quarter of the way from the middle bin of -1, 0, 1
    expected = -(0.75 * log_prob[1] + 0.25 * log_prob[2])
    torch.testing.assert_close(two_hot_loss(logits, value, 1.0), expected[None])


@pytest.mark.parametrize(("length", "discount"), [(500, 0.99), (100, 0.95), (1000, 0.995), (5000, 0.995), (5, 0.95)])
def test_discount_from_episode_length_matches_reference_values(length, discount):
    assert discount_from_episode_length(length) == pytest.approx(discount)


def test_percentile_range_interpolates_and_is_at_least_one():
    values = torch.arange(101.0)[torch.randperm(101, generator=torch.Generator().manual_seed(0))]
    assert percentile_range(values).item() == pytest.approx(90.0)
    assert percentile_range(torch.tensor([0.0, 10.0])).item() == pytest.approx(9.0)  # linear interpolation
    assert percentile_range(torch.full((9,), 3.0)).item() == 1.0


@given(st.floats(-1e6, 1e6, width=32))
def test_symexp_inverts_symlog(value):
    x = torch.tensor(value, dtype=torch.float64)
    assert symexp(symlog(x)).item() == pytest.approx(value, rel=1e-9, abs=1e-9)
