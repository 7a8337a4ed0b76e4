"""Philox draws: identical bits in all implementations and correct distributions.

Statistical limits are four to five standard deviations for fixed keys, so the results are deterministic.
"""

import logging
import math
import os
import subprocess
import sys
from importlib.util import find_spec
from itertools import pairwise, permutations
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.ops.philox import cpu, draws, tensor_ops
from lockstep.ops.philox.draws import Philox
from lockstep.tasks.kernels import random_below

KINDS = [
    ("uniform", 0),
    ("event", round(0.01 * 2**32)),
    ("event", 2**32),
    ("event", 0),
    ("normal", 0),
    ("gumbel", 0),
    ("integers", 1000),
    ("integers", 2**32),
    ("orders", 0),
]
each_kind = pytest.mark.parametrize(("kind", "bound"), KINDS)
KEYS = [0, 1, 2**64 - 1, 0xA4093822299F31D0, 5, 2**32, 77]
CPU = {"device": "cpu"}
COUNT = 1_000_000


def as_tensor(keys):
    return torch.from_numpy(np.array(keys, np.uint64).view(np.int64))


def on_cpu(kind, bound, keys, counter, count):
    return cpu.draw(kind, np.array(keys, np.uint64), counter, count, bound)


def bits(x):
    return x.view(torch.int32) if x.dtype == torch.float32 else x


def assert_same_bits(made, expected):
    assert made.dtype == expected.dtype
    assert made.is_contiguous()
    assert torch.equal(bits(made), bits(expected))


def words(count, key=9, counter=2):
    """Return the words of a draw as integers."""
    wide = on_cpu("integers", 2**32, [key], counter, -(-count // 2))[0]  # their upper words
    low = (on_cpu("orders", 0, [key], counter, -(-count // 2))[0] << 1) & 0xFFFFFFFE
    lowest = on_cpu("normal", 0, [key], counter, count)[0] > 0  # the sign is bit 0
    mixed = torch.stack([low, wide], dim=1).flatten()[:count]
    return torch.where(torch.arange(count) % 2 == 0, mixed | lowest, mixed)


# ------------------------------------------------------------------------------------------------- implementations

# Known answers of Random123: counter, key and result as 32-bit words, the lowest first.
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_rounds_match_known_answers_of_philox_4x32_10(counter, key, answer):
    counters, keys, answers = ([int(word, 16) for word in text.split()] for text in (counter, key, answer))
    assert [int(word) for word in cpu.rounds(*(np.uint64(word) for word in keys + counters))] == answers
    made = tensor_ops.rounds(as_tensor([keys[1] << 32 | keys[0]]), *(torch.tensor([word]) for word in counters))
    assert [int(word) for word in made] == answers


def test_words_of_a_draw_are_consecutive_counter_blocks():
    key, counter = 0x299F31D0A4093822, 0x0370734413198A2E
    low, high = key & 0xFFFFFFFF, key >> 32
    expected = [
        int(word)
        for block in range(3)
        for word in cpu.rounds(*(np.uint64(x) for x in (low, high, block, 0, counter & 0xFFFFFFFF, counter >> 32)))
    ]
    assert words(12, key, counter).tolist() == expected


@each_kind
def test_tensor_ops_are_bit_identical_to_cpu_kernels(kind, bound):
    count = -(-COUNT // len(KEYS))
    assert_same_bits(tensor_ops.draw(kind, as_tensor(KEYS), 3, count, bound), on_cpu(kind, bound, KEYS, 3, count))


@each_kind
@pytest.mark.parametrize("count", [0, 1, 2, 3, 4, 5, 6, 7, 9, 4093])
def test_draws_of_any_length_and_counter_are_bit_identical(kind, bound, count):
    for counter in (0, 2**31 + 5, 2**32, 2**63, 2**64 - 1):
        expected = on_cpu(kind, bound, KEYS, counter, count)
        assert_same_bits(tensor_ops.draw(kind, as_tensor(KEYS), counter, count, bound), expected)
        in_memory = torch.tensor(np.uint64(counter).astype(np.int64))
        assert_same_bits(tensor_ops.draw(kind, as_tensor(KEYS), in_memory, count, bound), expected)


def test_integers_at_matches_random_below_of_compiled_tasks():
    luck = np.random.default_rng(0)
    keys, major, minor = luck.integers(-(2**63), 2**63, size=(3, 500))
    bound = luck.integers(1, 2**32, size=500, endpoint=True)
    bound[:3] = 1, 2, 2**32
    rows = zip(bound, keys, major, minor, strict=True)
    expected = [int(random_below(*row)) for row in rows]
    assert draws.integers_at(*(torch.from_numpy(x) for x in (keys, major, minor, bound))).tolist() == expected


def run_triton(task, tmp_path, **variables):
    script = Path(__file__).parents[2] / "helpers" / "philox_in_triton.py"
    environment = os.environ | {"TRITON_CACHE_DIR": str(tmp_path)} | variables
    done = subprocess.run([sys.executable, script, task], env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [line.split() for line in done.stdout.splitlines()]


needs_triton = pytest.mark.skipif(
    find_spec("triton") is None, reason="needs triton, which the extra `dev` has on Linux"
)


@needs_triton
def test_interpreted_triton_kernel_is_bit_identical_to_cpu_kernels(tmp_path):
    lines = run_triton("interpreted", tmp_path, TRITON_INTERPRET="1")
    assert {kind for kind, *_ in lines} == {"integers_at", *(kind for kind, _ in KINDS)}
    assert [line for line in lines if line[-1] != "same"] == []


@needs_triton
def test_compiled_triton_kernel_rounds_every_operation(tmp_path):
    """A GPU gives the bits of the interpreter if no operations are fused and each is rounded to nearest."""
    operations = {kind: set(rest) for kind, *rest in run_triton("compiled", tmp_path)}
    assert operations.keys() == {"integers_at", *(kind for kind, _ in KINDS)}
    assert operations["normal"] == {"add.rn.f32", "div.rn.f32", "mul.rn.f32", "sub.rn.f32"}
    assert operations["gumbel"] == {"add.rn.f32", "mul.rn.f32", "sub.rn.f32"}
    assert operations["uniform"] == {"mul.rn.f32"}
    assert not operations["event"] | operations["integers"] | operations["orders"] | operations["integers_at"]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 1000, 2**10, 2**10 + 1, 100_000])
def test_order_sorts_keys_and_resolves_ties_by_position(count):
    keys = on_cpu("orders", 0, [3, 4], 1, count)
    expected = keys.argsort(dim=-1, stable=True)  # all keys differ in their upper 46 bits
    assert torch.equal(cpu.order(keys), expected)
    assert torch.equal(tensor_ops.order(keys), expected)
    few = (keys[:, :3000] >> 60 << 60).contiguous()  # eight keys
    expected = few.argsort(dim=-1, stable=True)
    assert torch.equal(cpu.order(few), expected)
    assert torch.equal(tensor_ops.order(few), expected)


# --------------------------------------------------------------------------------------------------- shapes and devices


def draw_each(philox, counter, *shape, device="cpu"):
    return {
        "uniform": philox.uniform(counter, *shape, device=device),
        "normal": philox.normal(counter, *shape, device=device),
        "gumbel": philox.gumbel(counter, *shape, device=device),
        "event": philox.bernoulli_sparse(counter, 0.3, *shape, device=device),
        "integers": philox.integers(counter, 10, *shape, device=device),
        "permutation": philox.permutation(counter, *shape, device=device),
    }


@given(st.integers(0, 2**64 - 1), st.integers(1, 40), st.integers(1, 40))
def test_draw_element_is_independent_of_draw_length(counter, one, other):
    for kind, bound in KINDS:
        short, long = sorted((one, other))
        assert torch.equal(on_cpu(kind, bound, [5], counter, short), on_cpu(kind, bound, [5], counter, long)[:, :short])


def test_lane_draws_are_independent_of_other_lanes():
    together = draw_each(Philox(KEYS), 4, 3, 5)
    for lane, key in enumerate(KEYS):
        for name, alone in draw_each(Philox([key]), 4, 3, 5).items():
            assert torch.equal(together[name][lane], alone[0]), name


def test_draws_have_requested_shape_and_dtype():
    dtypes = {"event": torch.bool, "integers": torch.int64, "permutation": torch.int64}
    for name, made in draw_each(Philox(KEYS), 4, 3, 5).items():
        assert made.shape == (len(KEYS), 3, 5)
        assert made.dtype == dtypes.get(name, torch.float32)


class HostInputs(TorchDispatchMode):
    """Counts the operations that read a tensor on the host."""

    count = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.count += any(isinstance(x, torch.Tensor) and x.device.type == "cpu" for x in args)
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("in_memory", [False, True])
def test_device_draws_copy_keys_once_and_never_synchronize(in_memory):
    """A meta tensor has no values: an operation that needs one on the host fails."""
    philox, counter = Philox(KEYS), torch.zeros((), dtype=torch.int64, device="meta") if in_memory else 3
    for first in (True, False):
        with HostInputs() as inputs:
            made = draw_each(philox, counter, 3, 5, device="meta")
        assert (inputs.count > 0) is first  # only the first draw copies the keys
    assert all(x.device.type == "meta" and x.shape == (len(KEYS), 3, 5) for x in made.values())


@pytest.mark.skipif(torch.version.cuda is not None, reason="a CUDA build of torch")
def test_implementation_without_cuda_build_is_tensor_ops(caplog):
    assert draws._implementation.__wrapped__(torch.device("cuda", 0)) is tensor_ops
    assert draws._implementation.__wrapped__(torch.device("meta")) is tensor_ops
    assert not caplog.records


def test_triton_failure_falls_back_to_tensor_ops_with_warning(monkeypatch, caplog):
    monkeypatch.setattr(torch.version, "cuda", "99")  # no such device exists, so the trial fails
    with caplog.at_level(logging.WARNING, "lockstep"):
        assert draws._implementation.__wrapped__(torch.device("cuda", 0)) is tensor_ops
    assert "Triton does not work on cuda:0" in caplog.text


def test_triton_and_numba_are_not_imported_before_a_draw():
    code = "import sys, lockstep.launch.launcher; sys.exit(bool({'triton', 'numba'} & sys.modules.keys()))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("high", [0, -1, 2**32 + 1])
def test_integers_with_invalid_bound_is_rejected(high):
    with pytest.raises(ValueError, match="Use a number from 1 to"):
        Philox([1]).integers(0, high, 3, **CPU)


@pytest.mark.parametrize("probability", [-0.1, 1.1, math.nan])
def test_event_with_invalid_probability_is_rejected(probability):
    with pytest.raises(ValueError, match="Use a number from 0 to 1"):
        Philox([1]).bernoulli_sparse(0, probability, 3, **CPU)


# -------------------------------------------------------------------------------------------------------- distributions


def kolmogorov_smirnov(sample, cdf):
    """Return the largest distance between empirical and given CDF times sqrt(n); above 2.2 with probability 1e-4."""
    ordered = cdf(sample.double().sort().values)
    grid = torch.arange(len(ordered) + 1, dtype=torch.float64) / len(ordered)
    return max((grid[1:] - ordered).max().item(), (ordered - grid[:-1]).max().item()) * math.sqrt(len(ordered))


def correlation(one, other):
    """Return the correlation times sqrt(n), which is standard normal for independent samples."""
    stacked = torch.stack([one.double().flatten(), other.double().flatten()])
    return torch.corrcoef(stacked)[0, 1].item() * math.sqrt(stacked.shape[1])


DISTRIBUTIONS = {
    "uniform": lambda x: x,
    "normal": torch.special.ndtr,
    "gumbel": lambda x: torch.exp(-torch.exp(-x)),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_float_draws_match_their_distribution(name):
    sample = getattr(Philox([11]), name)(0, COUNT, **CPU)[0]
    assert kolmogorov_smirnov(sample, DISTRIBUTIONS[name]) < 2.2
    assert kolmogorov_smirnov(sample * 1.01 + 0.002, DISTRIBUTIONS[name]) > 2.2  # the test detects a change of 1 %


def test_normal_moments_match_standard_normal():
    normal = Philox([12]).normal(1, COUNT, **CPU)[0].double()
    for power, moment, variance in ((1, 0, 1), (2, 1, 2), (3, 0, 15), (4, 3, 96), (6, 15, 10170)):
        assert normal.pow(power).mean().item() == pytest.approx(moment, abs=4 * math.sqrt(variance / COUNT))


def test_normal_tail_probabilities_match_standard_normal():
    normal = Philox(range(20)).normal(2, COUNT, **CPU)
    for limit in (1, 2, 3, 4, 4.5, 5):
        for beyond in ((normal > limit).sum().item(), (normal < -limit).sum().item()):
            expected = 0.5 * math.erfc(limit / math.sqrt(2)) * normal.numel()
            assert beyond == pytest.approx(expected, abs=4 * math.sqrt(expected) + 1), limit
    assert 5.2 < normal.max() < 6.3


def test_normals_are_quantiles_of_their_words():
    luck = np.random.default_rng(0)
    places = {0, 1, 2, 3, 5, 2**31 - 1, 2**31 - 2, 2**30, *(1 << k for k in range(31))}
    places |= {int(place) for place in luck.integers(2**31, size=2000)}
    for place in places:
        z = float(cpu._as_normal(np.uint32(2 * place + 1)))
        assert float(cpu._as_normal(np.uint32(2 * place))) == -z
        tail = (place + 0.5) / 2**31
        if tail > 0.5:  # compare the more accurate part
            assert math.erf(z / math.sqrt(2)) == pytest.approx(1 - tail, rel=1e-6)
        else:
            assert math.erfc(z / math.sqrt(2)) == pytest.approx(tail, rel=5e-7 * (1 + z * z))


def test_gumbels_are_quantiles_of_their_words():
    luck = np.random.default_rng(0)
    places = [0, 1, 2, 2**31 - 1, 2**31 - 2, *(1 << k for k in range(31)), *luck.integers(2**31, size=2000).tolist()]
    for place in places:
        expected = -math.log(-math.log1p(-(place + 0.5) / 2**31))
        assert float(cpu._as_gumbel(np.uint32(2 * place))) == pytest.approx(expected, rel=1e-6, abs=2e-7)


def test_uniforms_are_multiples_of_two_to_the_minus_24():
    uniform = Philox([13]).uniform(0, COUNT, **CPU)[0]
    assert torch.equal((uniform * 2**24).round(), uniform * 2**24)
    assert 0 <= uniform.min() < 1e-5
    assert 1 - 1e-5 < uniform.max() < 1
    assert cpu.draw("uniform", np.array([0], np.uint64), 0, 1, 0).item() == (0x6627E8D5 >> 8) / 2**24


@pytest.mark.parametrize("high", [2, 3, 37, 1000])
def test_integers_are_uniform(high):
    counts = Philox([14]).integers(3, high, COUNT, **CPU)[0].bincount(minlength=high).double()
    assert len(counts) == high
    expected = COUNT / high
    chi_squared = ((counts - expected) ** 2 / expected).sum().item()
    assert abs(chi_squared - (high - 1)) < 4.5 * math.sqrt(2 * (high - 1)) + 5


def test_integers_are_upper_part_of_exact_product():
    made = words(2000).tolist()
    for high in (1, 2, 141, 2**32 - 5, 2**32):
        expected = [(two << 32 | one) * high >> 64 for one, two in zip(made[::2], made[1::2], strict=True)]
        assert on_cpu("integers", high, [9], 2, 1000)[0].tolist() == expected


@pytest.mark.parametrize("probability", [0.0, 1e-5, 0.01, 0.5, 0.999, 1.0])
def test_event_frequency_matches_probability(probability):
    events = Philox(range(4)).bernoulli_sparse(0, probability, COUNT, **CPU)
    deviation = math.sqrt(probability * (1 - probability) * events.numel())
    assert abs(events.sum().item() - probability * events.numel()) <= 4 * deviation


def test_lanes_counters_and_neighbors_are_uncorrelated():
    philox = Philox([0, 1, 2, 2**32, 2**63])
    for name in ("uniform", "normal", "gumbel"):
        drawn = [getattr(philox, name)(counter, COUNT // 10, **CPU) for counter in (0, 1, 2**32)]
        pairs = [(x[lane], x[other]) for x in drawn[:1] for lane in range(5) for other in range(lane)]
        pairs += list(pairwise(drawn))
        pairs += [(drawn[0][:, step:], drawn[0][:, :-step]) for step in (1, 2, 3, 4, 5, 8)]
        assert all(abs(correlation(one, other)) < 4.2 for one, other in pairs)
        assert abs(correlation(drawn[0], drawn[0] + drawn[1])) > 100  # the measure detects a correlation


def test_adjacent_events_are_uncorrelated():
    events = Philox([21]).bernoulli_sparse(0, 0.1, COUNT, **CPU)[0]
    for step in (1, 2, 3, 4):
        assert abs(correlation(events[step:], events[:-step])) < 4.2


@pytest.mark.parametrize("length", [2, 3, 4])
def test_permutations_are_uniform(length):
    rows = Philox([31]).permutation(0, COUNT // 10, length, **CPU)[0]
    codes = (rows * length ** torch.arange(length)).sum(1)
    counts = torch.tensor(
        [
            (codes == sum(x * length**place for place, x in enumerate(order))).sum().item()
            for order in permutations(range(length))
        ],
        dtype=torch.float64,
    )
    assert counts.sum() == COUNT // 10  # every row is a permutation
    expected = COUNT / 10 / len(counts)
    assert ((counts - expected) ** 2 / expected).sum().item() < len(counts) - 1 + 5 * math.sqrt(2 * len(counts))


def test_long_permutations_are_complete_and_uncorrelated_with_index():
    rows = Philox(range(20)).permutation(7, 10_000, **CPU)
    assert torch.equal(rows.sort(dim=1).values, torch.arange(10_000).expand(20, -1))
    fixed = (rows == torch.arange(10_000)).sum().item()
    assert fixed == pytest.approx(20, abs=4.5 * math.sqrt(20))  # one per permutation, on average
    assert abs(correlation(rows, torch.arange(10_000).expand(20, -1))) < 4.2
