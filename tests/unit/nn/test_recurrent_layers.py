"""Recurrent layers: split and padded sequences equal single steps; no state crosses an episode boundary."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lockstep.config import ConfigError
from lockstep.nn.recurrent import Recurrent, RecurrentConfig, pad_segments, split_at_resets
from lockstep.rng import RandomStream, seeded_init

FEATURES, UNITS = 3, 5
each_kind = pytest.mark.parametrize("kind", ["lstm", "gru"])


def build(kind):
    with seeded_init(RandomStream(0, "init")):
        return Recurrent(RecurrentConfig(kind=kind, hidden_size=UNITS), FEATURES)


def drawn(*shape):
    return RandomStream(1, "test").normal(0, *shape)


def stepped(memory, features, state, starts):
    """Run sequences [R, S, D] one step at a time; reset the state where an episode starts."""
    outputs = []
    for step in range(starts.shape[1]):
        state = {name: torch.where(starts[:, step, None], 0.0, part) for name, part in state.items()}
        output, state = memory.step(features[:, step], state)
        outputs.append(output)
    return torch.stack(outputs, dim=1), state


def packed(memory, features, state, starts):
    """Run the same sequences as torch packed sequences, one per episode segment."""
    pieces, begun = [], {name: [] for name in state}
    for row in range(len(starts)):
        borders = [0, *(s for s in range(1, starts.shape[1]) if starts[row, s]), starts.shape[1]]
        for first, last in itertools.pairwise(borders):
            fresh = first > 0 or bool(starts[row, 0])
            pieces.append(features[row, first:last])
            for name, part in state.items():
                begun[name].append(torch.zeros(UNITS) if fresh else part[row])
    rows = torch.nn.utils.rnn.pack_sequence(pieces, enforce_sorted=False)
    state = tuple(torch.stack(parts).unsqueeze(0) for parts in begun.values())
    outputs, _ = memory.layer(rows, state if len(state) > 1 else state[0])
    outputs, lengths = torch.nn.utils.rnn.pad_packed_sequence(outputs, batch_first=True)
    flat = torch.cat([output[:length] for output, length in zip(outputs, lengths, strict=True)])
    return flat.view(*starts.shape, UNITS)


@each_kind
@given(st.data())
def test_sequences_packed_and_single_steps_agree(kind, data):
    rows, steps = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 7))
    starts = torch.tensor(data.draw(st.lists(st.booleans(), min_size=rows * steps, max_size=rows * steps)))
    starts, memory = starts.view(rows, steps), build(kind)
    features, weight = drawn(rows, steps, FEATURES), drawn(rows, steps, UNITS)
    state = {name: drawn(rows, UNITS) for name in memory.names}

    def forward():
        return memory(features.flatten(0, 1), state, split_at_resets(starts)).view(rows, steps, UNITS)

    ways = [
        forward,
        lambda: stepped(memory, features, state, starts)[0],
        lambda: packed(memory, features, state, starts),
    ]
    outputs, gradients = [], []
    for way in ways:
        memory.zero_grad()
        outputs.append(way())
        (outputs[-1] * weight).sum(-1).mean().backward()  # mean over samples, as in losses
        gradients.append([p.grad.clone() for p in memory.parameters()])
    for output, gradient in zip(outputs[1:], gradients[1:], strict=True):
        torch.testing.assert_close(output, outputs[0], atol=1e-6, rtol=1e-6)
        for mine, theirs in zip(gradient, gradients[0], strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-6, rtol=1e-6)


@each_kind
def test_state_and_gradient_do_not_cross_episode_boundary(kind):
    memory, starts = build(kind), torch.zeros(2, 6, dtype=torch.bool)
    starts[0, 3] = starts[1, 0] = True
    features = drawn(2, 6, FEATURES).requires_grad_()
    state = {name: drawn(2, UNITS).requires_grad_() for name in memory.names}
    outputs = memory(features.flatten(0, 1), state, split_at_resets(starts)).view(2, 6, UNITS)
    (outputs[0, 3:].sum() + outputs[1].sum()).backward()
    assert not features.grad[0, :3].any()
    assert features.grad[0, 3:].all()
    assert all(not part.grad.any() for part in state.values())
    # NaN does not cross the boundary either.
    with_nan = features.detach().clone()
    with_nan[0, :3] = torch.nan
    state = {name: torch.full_like(part, torch.nan) for name, part in state.items()}
    after = memory(with_nan.flatten(0, 1), state, split_at_resets(starts)).view(2, 6, UNITS)
    assert torch.equal(after[0, 3:], outputs[0, 3:])
    assert torch.equal(after[1], outputs[1])


@each_kind
def test_segment_padding_does_not_affect_output(kind, monkeypatch):
    memory, starts = build(kind), torch.zeros(3, 8, dtype=torch.bool)
    starts[0, 2] = starts[1, 5] = starts[2, 7] = True
    features, state = drawn(24, FEATURES), memory.initial(3)
    outputs = memory(features, state, split_at_resets(starts))

    def pad_with_nan(samples, pieces):
        padded = torch.full((pieces.longest * pieces.total, samples.shape[1]), torch.nan)
        return padded.index_copy(0, pieces.rows, samples).view(pieces.longest, pieces.total, -1)

    pieces = split_at_resets(starts)
    assert pad_with_nan(features, pieces).isnan().any()  # padding exists
    assert pad_segments(features, pieces).isfinite().all()
    monkeypatch.setattr("lockstep.nn.recurrent.pad_segments", pad_with_nan)
    assert torch.equal(memory(features, state, pieces), outputs)


def test_split_at_resets_starts_new_segment_at_each_episode():
    starts = torch.tensor([[0, 0, 1, 0], [1, 0, 0, 0], [0, 0, 0, 0]]).bool()
    pieces = split_at_resets(starts)
    assert (pieces.total, pieces.longest) == (4, 4)
    assert pieces.sequence.tolist() == [0, 0, 1, 2]
    assert pieces.continues.tolist() == [True, False, False, True]
    laid = pad_segments(torch.arange(1.0, 13.0).unsqueeze(1), pieces).squeeze(2)
    assert laid.t().tolist() == [[1, 2, 0, 0], [3, 4, 0, 0], [5, 6, 7, 8], [9, 10, 11, 12]]


@each_kind
def test_recurrent_state_is_float32_under_autocast(kind):
    memory = build(kind)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, state = memory.step(drawn(2, FEATURES).bfloat16(), memory.initial(2))
        outputs = memory(drawn(6, FEATURES).bfloat16(), state, split_at_resets(torch.zeros(2, 3, dtype=torch.bool)))
    assert {x.dtype for x in (output, outputs, *state.values())} == {torch.float32}


@each_kind
def test_initial_recurrent_state_decays_over_timescale(kind):
    with seeded_init(RandomStream(0, "init")):
        memory = Recurrent(RecurrentConfig(kind=kind, hidden_size=UNITS, init_timescale=32), FEATURES)
    for weight in memory.layer.all_weights[0][:2]:
        weight.data.zero_()  # no input: the state decays
    state = {name: torch.ones(1, UNITS) for name in memory.names}
    for _ in range(32):
        _, state = memory.step(torch.zeros(1, FEATURES), state)
    kept = state["cell" if kind == "lstm" else "hidden"]
    torch.testing.assert_close(kept, torch.full((1, UNITS), (32 / 33) ** 32))


@pytest.mark.parametrize("settings", [{"hidden_size": 0}, {"init_timescale": 0}])
def test_invalid_recurrent_settings_are_rejected(settings):
    with pytest.raises(ConfigError, match=" is 0"):
        RecurrentConfig(kind="lstm", **settings)
