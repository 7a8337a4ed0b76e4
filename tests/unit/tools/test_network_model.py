"""All-reduce cost model: hand-calculated values and properties of every network."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lockstep.config import ConfigError
from lockstep.tools.bench.network_model import (
    NETWORKS,
    Link,
    NetworkModel,
    all_reduce,
    find_network,
    fit_link,
    hierarchical,
    ring,
    tree,
)

NEAR, FAR = Link(latency=1.0, bandwidth=2.0), Link(latency=10.0, bandwidth=1.0)
CLUSTER = NetworkModel("cluster", 3, NEAR, FAR, launch=100.0)
sizes = st.floats(1, 1e12)
processes = st.integers(1, 5000)
networks = st.sampled_from(list(NETWORKS.values()))
links = st.builds(Link, latency=st.floats(1e-6, 1e-3), bandwidth=st.floats(1e8, 1e12))


# ----------------------------------------------------------------------------------------------------------- algorithms


def test_ring_matches_hand_calculation():
    # 2 x 3 messages of 12 / 4 = 3 bytes each, at 2 bytes per second.
    assert ring(12, 4, NEAR) == 2 * 3 * 1.0 + 2 * 3 * 3 / 2


@pytest.mark.parametrize(("count", "levels"), [(2, 1), (3, 2), (4, 2), (5, 3), (8, 3), (9, 4)])
def test_tree_costs_two_latencies_per_level_and_every_byte_twice(count, levels):
    assert tree(12, count, NEAR) == 2 * levels * 1.0 + 2 * 12 / 2


def test_hierarchical_matches_hand_calculation():
    # Inside: 2 messages of 4 bytes, before and after. Across: a ring of two with a third of the bytes.
    within, across = 2 * (1.0 + 4 / 2), 2 * 10.0 + 2 * 2 / 1
    assert hierarchical(12, 2, 3, NEAR, FAR) == 2 * within + across == 36


def test_hierarchical_uses_cheaper_of_ring_and_tree_across_machines():
    small = hierarchical(3, 64, 3, NEAR, FAR)
    within = 2 * (2 * 1.0 + 2 / 3 * 3 / 2)
    assert small == within + tree(1, 64, FAR) < within + ring(1, 64, FAR)
    large = hierarchical(3e6, 64, 3, NEAR, FAR)
    within = 2 * (2 * 1.0 + 2 / 3 * 3e6 / 2)
    assert large == within + ring(1e6, 64, FAR) < within + tree(1e6, 64, FAR)


@given(sizes, links, links, st.integers(1, 500))
def test_hierarchical_with_one_process_per_machine_has_no_inner_cost(size, inside, across, machines):
    found = hierarchical(size, machines, 1, inside, across)
    assert found == min(ring(size, machines, across), tree(size, machines, across))


# ----------------------------------------------------------------------------------------------------- algorithm choice


def test_all_reduce_inside_machine_uses_cheapest_algorithm():
    assert all_reduce(12, 3, CLUSTER) == (100 + ring(12, 3, NEAR), "ring")
    wide = NetworkModel("wide", 64, NEAR, FAR, launch=0.0)
    assert all_reduce(12, 64, wide) == (tree(12, 64, NEAR), "tree")


def test_all_reduce_across_machines_uses_cheapest_algorithm():
    # A ring of six over the slow links takes 100 + 20 s, a tree 60 + 24 s.
    assert all_reduce(12, 6, CLUSTER) == (100 + 36.0, "hierarchical")


def test_all_reduce_counts_partial_machine_as_full():
    assert all_reduce(12, 4, CLUSTER) == all_reduce(12, 6, CLUSTER)
    assert all_reduce(12, 7, CLUSTER)[0] > all_reduce(12, 6, CLUSTER)[0]


@given(sizes, networks)
def test_all_reduce_with_one_process_is_free(size, network):
    assert all_reduce(size, 1, network) == (0.0, "nothing")
    assert ring(size, 1, network.across) == tree(size, 1, network.across) == 0.0


@given(sizes, sizes, st.integers(2, 5000), networks)
def test_all_reduce_time_grows_with_bytes_and_exceeds_launch(one, other, count, network):
    fewer, more = sorted((one, other))
    assert network.launch < all_reduce(fewer, count, network)[0] <= all_reduce(more, count, network)[0]


@given(sizes, processes, networks)
def test_all_reduce_is_at_most_ring_and_tree(size, count, network):
    seconds, way = all_reduce(size, count, network)
    if count == 1:
        return
    link = network.inside if count <= network.per_machine else network.across
    assert seconds - network.launch <= ring(size, count, link) * (1 + 1e-9)
    assert seconds - network.launch <= tree(size, count, link) * (1 + 1e-9)
    assert way in ("ring", "tree", "hierarchical")
    assert way != "hierarchical" or count > network.per_machine


@pytest.mark.parametrize("name", [name for name, network in NETWORKS.items() if network.per_machine > 1])
@pytest.mark.parametrize("count", [64, 512])
def test_all_reduce_of_large_gradients_is_hierarchical(name, count):
    network = NETWORKS[name]
    seconds, way = all_reduce(100e6, count, network)
    assert way == "hierarchical"
    assert seconds < ring(100e6, count, network.across) / 2


@pytest.mark.parametrize("name", NETWORKS)
def test_all_reduce_on_full_machine_is_faster_than_one_more_process(name):
    network = NETWORKS[name]
    assert all_reduce(1e6, network.per_machine, network)[0] < all_reduce(1e6, network.per_machine + 1, network)[0]


# ------------------------------------------------------------------------------------------------------- named networks


def test_find_network_returns_named_network_with_description():
    for name in NETWORKS:
        network = find_network(name)
        assert network.name == name
        assert network.describe().startswith(f"{name}: {network.per_machine} processes per machine; inside ")
    assert "across 5 us, 50 GB/s per process; 10 us to start a collective" in find_network("nvlink+ib").describe()


def test_describe_measured_network_says_measured():
    link = Link(2e-5, 1.5e9)
    words = NetworkModel("mine", 2**20, link, link, launch=0.0).describe()
    assert words == "mine: every link 20 us, 1.5 GB/s per process, as measured"


def test_network_with_shared_port_divides_bandwidth():
    assert find_network("pcie+ethernet-25g").across.bandwidth == 25e9 / 8 / 8
    assert find_network("ethernet-25g").across.bandwidth == 25e9 / 8


def test_find_network_unknown_name_raises_listing_names():
    with pytest.raises(ConfigError) as caught:
        find_network("nvlnk")
    problem, fix = str(caught.value).split("\n")
    assert problem == "there is no network 'nvlnk'."
    assert all(name in fix for name in [*NETWORKS, "here"])


# --------------------------------------------------------------------------------------------------------- fitted links


@given(links, st.integers(2, 64))
def test_fit_link_recovers_link_from_exact_ring_times(link, count):
    counts = [64, 65_536, 1_048_576, 64 * 2**20]
    found = fit_link(counts, [ring(size, count, link) for size in counts], count)
    assert found.latency == pytest.approx(link.latency, rel=1e-4)
    assert found.bandwidth == pytest.approx(link.bandwidth, rel=1e-2)


def test_fit_link_weighs_small_and_large_sizes_equally():
    # The fit uses relative errors: noise on the largest size must not distort the latency.
    link = Link(1e-5, 1e9)
    counts = [64, 640, 6_400, 64 * 2**20]
    seconds = [ring(size, 2, link) for size in counts]
    found = fit_link(counts, [*seconds[:-1], seconds[-1] * 1.2], 2)
    assert found.latency == pytest.approx(link.latency, rel=0.05)


@given(st.lists(st.floats(1e-7, 1.0), min_size=4, max_size=4), st.integers(2, 8))
def test_fit_link_result_is_always_usable(seconds, count):
    found = fit_link([64, 65_536, 1_048_576, 4_194_304], seconds, count)
    assert found.latency > 0
    assert 0 < found.bandwidth < math.inf
    assert 0 < ring(1e6, count, found) < math.inf
