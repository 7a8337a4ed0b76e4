"""Compiled CPU kernels match the reference formulas in values, gradients and non-finite inputs."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import tensor

from lockstep.nn.distributions import Categorical
from lockstep.ops import cpu_kernels
from lockstep.ops.functional import PPOLoss, compute_gae, ppo_loss

seeds = st.integers(0, 2**32)
BAD = [math.nan, math.inf, -math.inf]
LAYOUTS = {
    "dense": lambda x: x.contiguous(),
    "a column of a table": lambda x: torch.stack([x, torch.full_like(x, 7), x], dim=-1)[..., 2],
    "every other row": lambda x: x.repeat_interleave(2, dim=0)[::2],
}
"""The same values in different memory layouts."""
layouts = pytest.mark.parametrize("layout", LAYOUTS)
SETTINGS = {"clip": 0.2, "value_weight": 0.7, "entropy_weight": 0.03}
INPUTS = ["log_prob", "entropy", "values", "old_log_prob", "advantages", "old_values", "returns"]


def plain(function, *arguments, **settings):
    """Call `function` with the compiled kernels disabled."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_kernels, "is_supported", lambda *_: False)
        return function(*arguments, **settings)


def differentiated(function, outputs, *rest):
    """Return log probability, entropy and the gradient of a fixed weighted sum of both."""
    outputs = outputs.detach().requires_grad_()
    found = function(outputs, *rest)
    draw = torch.Generator().manual_seed(0)
    sum((part * torch.randn(part.shape, generator=draw)).sum() for part in found).backward()
    return [part.detach() for part in found], outputs.grad


def draw_samples(seed, count):
    """Return float64 inputs of the PPO loss on grids that avoid its kinks with clips of 0.2 and 0.25."""
    draw = torch.Generator().manual_seed(seed)

    def pick(numbers):
        return tensor(numbers, dtype=torch.float64)[torch.randint(len(numbers), (count,), generator=draw)]

    tenths = [step / 10 for step in range(-15, 16)]
    samples = {name: pick(tenths) for name in INPUTS}
    samples["log_prob"] = samples["old_log_prob"] + pick([-0.9, -0.5, -0.1, 0.0, 0.05, 0.15, 0.5, 0.9])
    return samples


def loss_of(samples, value_clip):
    """Return the loss and the gradient of three times its total, as with a loss scale."""
    moving = [samples[name].detach().requires_grad_() for name in INPUTS[:3]]
    loss = ppo_loss(*moving, *(samples[name] for name in INPUTS[3:]), value_clip=value_clip, **SETTINGS)
    (3.0 * loss.total).backward()
    return loss, [x.grad for x in moving]


def test_is_supported_only_for_float32_on_cpu():
    single = torch.zeros(2)
    assert cpu_kernels.is_supported(single, single)
    assert not cpu_kernels.is_supported(single, single.double())
    assert not cpu_kernels.is_supported(single.bfloat16())
    assert not cpu_kernels.is_supported(single, torch.zeros(2, device="meta"))


# ---------------------------------------------------------------------------------------------------------- categorical


def test_categorical_values_and_gradients_match_manual_example():
    outputs = tensor([[0.5, 0.25, 0.25]]).log().requires_grad_()
    log_prob, entropy = cpu_kernels.CategoricalCPU.apply(outputs, tensor([1]))
    torch.testing.assert_close(log_prob, tensor([-2 * math.log(2)]))
    torch.testing.assert_close(entropy, tensor([1.5 * math.log(2)]))
    (by_log_prob,) = torch.autograd.grad(log_prob.sum(), outputs, retain_graph=True)
    torch.testing.assert_close(by_log_prob, tensor([[-0.5, 0.75, -0.25]]))  # [k = a] - p
    (by_entropy,) = torch.autograd.grad(entropy.sum(), outputs)
    # -p (log p + H), with log p of -1, -2, -2 and H of 1.5 times log 2
    torch.testing.assert_close(by_entropy, tensor([[-0.25, 0.125, 0.125]]) * math.log(2))


def draw_choices(seed, count, choices, some_ruled_out):
    """Return logits and actions; choices may be masked, but each sample keeps at least one."""
    draw = torch.Generator().manual_seed(seed)
    outputs = torch.randn(count, choices, generator=draw) * 4
    left, ruled_out = (
        torch.randint(choices, (count, 1), generator=draw),
        torch.rand(count, choices, generator=draw) < 0.5,
    )
    if some_ruled_out:
        outputs[ruled_out.scatter(1, left, False)] = -math.inf
    return outputs, torch.randint(choices, (count,), generator=draw)


def judge_in_double_precision(outputs, action):
    logs = outputs.double().log_softmax(-1)
    spread = logs.exp() * logs.masked_fill(logs == -math.inf, 0.0)
    return logs.gather(-1, action.unsqueeze(-1)).squeeze(-1), -spread.sum(-1)


@given(seeds, st.integers(0, 9), st.integers(1, 6), st.booleans())
def test_categorical_matches_float64_reference(seed, count, choices, some_ruled_out):
    outputs, action = draw_choices(seed, count, choices, some_ruled_out)
    found, by_found = differentiated(cpu_kernels.CategoricalCPU.apply, outputs, action)
    wanted, by_wanted = differentiated(judge_in_double_precision, outputs, action)
    torch.testing.assert_close(found, [x.float() for x in wanted], atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(by_found, by_wanted, atol=1e-5, rtol=1e-4)


@given(seeds, st.integers(0, 9), st.integers(1, 6), st.booleans())
def test_categorical_matches_torch_fallback(seed, count, choices, some_ruled_out):
    outputs, action = draw_choices(seed, count, choices, some_ruled_out)
    found, by_found = differentiated(cpu_kernels.CategoricalCPU.apply, outputs, action)
    wanted, by_wanted = plain(differentiated, Categorical(choices).log_prob_and_entropy, outputs, action)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(by_found, by_wanted, atol=1e-5, rtol=1e-4)


@layouts
def test_categorical_result_is_independent_of_memory_layout(layout):
    draw = torch.Generator().manual_seed(0)
    outputs, action = torch.randn(6, 5, generator=draw), torch.randint(5, (6,), generator=draw)
    place = LAYOUTS[layout]
    found = differentiated(cpu_kernels.CategoricalCPU.apply, place(outputs), place(action))
    torch.testing.assert_close(found, differentiated(cpu_kernels.CategoricalCPU.apply, outputs, action), atol=0, rtol=0)


def test_categorical_accepts_expanded_logits_and_gradients():
    row, action = tensor([0.3, -1.0, 2.0], requires_grad=True), tensor([0, 2, 2, 1])
    log_prob, entropy = cpu_kernels.CategoricalCPU.apply(row.expand(4, 3), action)
    (log_prob.sum() + 2 * entropy.sum()).backward()  # the gradient of a sum is an expanded scalar
    again = row.detach().double().requires_grad_()
    theirs = torch.distributions.Categorical(logits=again.expand(4, 3))
    (theirs.log_prob(action).sum() + 2 * theirs.entropy().sum()).backward()
    torch.testing.assert_close(row.grad.double(), again.grad, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("used", [0, 1])
def test_categorical_gradient_with_one_unused_output_matches(used):
    outputs, action = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)), tensor([0, 1, 2, 0])
    ours, theirs = (outputs.clone().requires_grad_() for _ in range(2))
    cpu_kernels.CategoricalCPU.apply(ours, action)[used].sum().backward()
    plain(Categorical(3).log_prob_and_entropy, theirs, action)[used].sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 1])
def test_categorical_nonfinite_logit_gives_nonfinite_row(bad, place):
    outputs = torch.zeros(3, 2)
    outputs[1, place] = bad
    outputs.requires_grad_()
    found = cpu_kernels.CategoricalCPU.apply(outputs, torch.zeros(3, dtype=torch.int64))
    for part in found:
        assert part.isfinite().tolist() == [True, False, True]
        (gradient,) = torch.autograd.grad(part.sum(), outputs, retain_graph=True)
        assert gradient.isfinite().all(1).tolist() == [True, False, True]


def test_categorical_fully_masked_row_is_nonfinite():
    for part in cpu_kernels.CategoricalCPU.apply(torch.full((1, 3), -math.inf), tensor([0])):
        assert not part.isfinite().any()


# ------------------------------------------------------------------------------------------------------------- PPO loss


@given(seeds, st.integers(0, 40), st.sampled_from([None, 0.25]))
def test_ppo_loss_matches_float64_reference(seed, count, value_clip):
    samples = draw_samples(seed, count)
    wanted, by_wanted = loss_of(samples, value_clip)
    found, by_found = loss_of({name: x.float() for name, x in samples.items()}, value_clip)
    for name in PPOLoss._fields:
        ours, theirs = (getattr(loss, name).double() for loss in (found, wanted))
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-5, msg=lambda text, name=name: f"{name}: {text}")
    for ours, theirs in zip(by_found, by_wanted, strict=True):
        torch.testing.assert_close(ours.double(), theirs, atol=1e-5, rtol=1e-5)


@layouts
@pytest.mark.parametrize("value_clip", [None, 0.25])
def test_ppo_loss_is_independent_of_memory_layout(layout, value_clip):
    samples = {name: x.float() for name, x in draw_samples(0, 12).items()}
    found, by_found = loss_of({name: LAYOUTS[layout](x) for name, x in samples.items()}, value_clip)
    wanted, by_wanted = loss_of(samples, value_clip)
    assert found == wanted
    torch.testing.assert_close(by_found, by_wanted, atol=0, rtol=0)


def test_ppo_loss_accepts_expanded_inputs():
    samples = {name: x.float() for name, x in draw_samples(0, 12).items()}
    samples |= {name: tensor(0.3).expand(12) for name in ("entropy", "old_values", "returns")}
    found, by_found = loss_of(samples, 0.25)
    wanted, by_wanted = loss_of({name: x.double() for name, x in samples.items()}, 0.25)
    torch.testing.assert_close(found.total.double(), wanted.total, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close([x.double() for x in by_found], by_wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("value_clip", [None, 0.25])
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("name", INPUTS)
def test_ppo_loss_nonfinite_input_matches_reference(name, bad, value_clip):
    samples = draw_samples(1, 12)
    samples["advantages"][4] = 1.0
    samples[name][4] = bad
    wanted, _ = loss_of(samples, value_clip)
    found, by_found = loss_of({name: x.float() for name, x in samples.items()}, value_clip)
    for part in PPOLoss._fields:
        ours, theirs = (getattr(loss, part).double() for loss in (found, wanted))
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-5, equal_nan=True)
    if not found.total.isfinite():  # the other samples keep finite gradients
        assert all(gradient[torch.arange(12) != 4].isfinite().all() for gradient in by_found)


def test_ppo_loss_of_zero_samples_is_zero():
    moving = [torch.zeros(0, requires_grad=True) for _ in range(3)]
    data = tuple(torch.zeros(0) for _ in range(4))
    total, sums = cpu_kernels.PPOLossCPU.apply(*moving, data, (0.2, None, 0.5, 0.01))
    total.backward()
    assert total.item() == 0.0
    assert sums.tolist() == [0.0] * 5
    assert [x.grad.shape for x in moving] == [(0,)] * 3


# ----------------------------------------------------------------------------------------------------------- advantages


def test_reverse_cumsum_matches_manual_example():
    deltas, decay = tensor([[1.0, 8.0], [2.0, 4.0], [4.0, 2.0]]), tensor([[0.5, 0.0], [0.25, 1.0], [9.0, 9.0]])
    # from the end, where decay is unused: 4, 2 + 0.25 x 4 = 3, 1 + 0.5 x 3 = 2.5; and 2, 4 + 2 = 6, 8
    assert cpu_kernels.discounted_reverse_cumsum(deltas, decay).tolist() == [[2.5, 8.0], [3.0, 6.0], [4.0, 2.0]]


@given(seeds, st.integers(1, 9), st.integers(0, 4), st.floats(0, 1), st.floats(0, 1))
def test_gae_matches_float64_reference(seed, steps, envs, discount, trace):
    draw = torch.Generator().manual_seed(seed)
    rewards, values, following = torch.randn(3, steps, envs, generator=draw)
    terminated, truncated = torch.rand(2, steps, envs, generator=draw) < 0.25
    rest = (terminated, terminated | truncated, discount, trace)
    found = compute_gae(rewards, values, following, *rest)
    wanted = compute_gae(*(x.double() for x in (rewards, values, following)), *rest)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("layout", [*LAYOUTS, "time last", "one for all"])
def test_reverse_cumsum_is_independent_of_memory_layout(layout):
    more = {"time last": lambda x: x.t().contiguous().t(), "one for all": lambda x: x[:, :1].expand_as(x)}
    deltas, decay = (
        (LAYOUTS | more)[layout](x) for x in torch.rand(2, 5, 3, generator=torch.Generator().manual_seed(0))
    )
    wanted = cpu_kernels.discounted_reverse_cumsum(
        deltas.clone(memory_format=torch.contiguous_format), decay.contiguous()
    )
    assert torch.equal(cpu_kernels.discounted_reverse_cumsum(deltas, decay), wanted)


@pytest.mark.parametrize("bad", BAD)
def test_reverse_cumsum_nonfinite_delta_affects_only_earlier_steps(bad):
    deltas, decay = torch.ones(4, 3), torch.full((4, 3), 0.5)
    deltas[2, 1] = bad
    finite = cpu_kernels.discounted_reverse_cumsum(deltas, decay).isfinite()
    assert finite[:, 1].tolist() == [False, False, False, True]
    assert finite[:, [0, 2]].all()
