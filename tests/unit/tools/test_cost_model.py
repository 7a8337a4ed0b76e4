"""Cost model of `lockstep plan`: equal to a simulation of single interruptions, and its interval is the best."""

import math
import random

import pytest

from lockstep.tools.bench.cost_model import DAY, Interruptions, bill, parse_interruptions


def simulate(what, work, interval, seed, interruptions=math.inf):
    """Train `work` seconds event by event; return the time and the number of interruptions.

    An independent simulation: it draws the time of each interruption and keeps what the last save kept.
    """
    draw = random.Random(seed)
    now, kept, count = 0.0, 0.0, 0
    next_interruption = draw.expovariate(what.rate)
    while kept < work and count < interruptions:
        ready = now  # the run is loaded and trains
        target = min(interval, work - kept) + what.save_seconds
        if next_interruption >= ready + target:
            now, kept = ready + target, kept + target - what.save_seconds
            continue
        now, count = next_interruption, count + 1
        next_interruption = now + draw.expovariate(what.rate)
        while next_interruption < now + what.restart_seconds:  # the new machine is interrupted while it starts
            now, count = next_interruption, count + 1
            next_interruption = now + draw.expovariate(what.rate)
        now += what.restart_seconds
    return now, count, kept


@pytest.mark.parametrize(
    ("per_day", "save", "restart", "interval"), [(4, 5, 120, 1200), (24, 20, 300, 900), (200, 2, 60, 60)]
)
def test_hours_are_those_of_a_campaign_of_200_interruptions(per_day, save, restart, interval):
    what = Interruptions(per_day, save, restart)
    work = 200 / per_day * DAY * 0.7
    work -= work % interval
    times = [simulate(what, work, interval, seed) for seed in range(5)]
    assert min(count for _, count, _ in times) > 120
    for seconds, _, _ in times:
        assert what.expected_seconds(work, interval) == pytest.approx(seconds, rel=0.1)
    mean = sum(seconds for seconds, _, _ in times) / len(times)
    overhead = what.expected_seconds(work, interval) - work
    assert overhead == pytest.approx(mean - work, rel=0.1)


@pytest.mark.parametrize("per_day", [1, 4, 100])
@pytest.mark.parametrize("save", [0.5, 10.0])
def test_no_other_interval_is_cheaper(per_day, save):
    what, work = Interruptions(per_day, save, 120), 30 * DAY
    best = what.best_interval(work)
    cost = what.expected_seconds(work, best)
    for factor in (0.3, 0.7, 0.9, 1.1, 1.5, 3.0):
        assert what.expected_seconds(work, best * factor) >= cost * (1 - 1e-4)  # segments are whole
    assert best == pytest.approx(math.sqrt(2 * save / what.rate), rel=0.2)  # Young's approximation, for rare failures


def test_without_interruptions_only_saves_cost():
    what = Interruptions(0, 5, 120)
    assert what.best_interval(1000) == 1000
    assert what.expected_seconds(1000, 100) == 1050


def test_notice_costs_restarts_but_no_training():
    with_notice, without = Interruptions(24, 5, 120, notice=True), Interruptions(24, 5, 120)
    work = 10 * DAY
    assert work < with_notice.expected_seconds(work, work) < without.expected_seconds(work, without.best_interval(work))


def test_run_that_never_ends_costs_infinitely_much():
    assert Interruptions(1e6, 5, 120).expected_seconds(DAY, DAY) == math.inf
    assert Interruptions(1e6, 5, 120, notice=True).expected_seconds(DAY, DAY) == math.inf


def test_bill_multiplies_price_and_processes():
    row = bill("on demand", 8, 10.0, 2.0, Interruptions(0, 0, 0))
    assert (row.hours, row.dollars, row.interruptions) == (10.0, 160.0, 0.0)


@pytest.mark.parametrize(("text", "per_day"), [("4/day", 4), ("1/hour", 24), ("0.5/week", 0.5 / 7), ("0/day", 0)])
def test_rates_are_parsed(text, per_day):
    assert parse_interruptions(text) == pytest.approx(per_day)


@pytest.mark.parametrize("text", ["4", "4/month", "-1/day", "inf/day", "x/day", "/day"])
def test_other_rates_are_refused(text):
    with pytest.raises(ValueError, match=r"."):
        parse_interruptions(text)
