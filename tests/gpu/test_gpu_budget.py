"""Budgets of host synchronizations for each recipe and phase. A failure names the lines."""

import pytest
from profiles import FEW, MANY, SETTINGS, STEPS, on_gpu, sum_of

ITERATION = {"gym-ppo-lstm": 5, "trading-lstm": 5}
"""Synchronizations per iteration outside rollout steps and updates, for recipes where the budget is not 4.

One each for: the reduced sums of a rollout, the check which optimizer steps were applied (per optimizer), metrics. A
recurrent network also reads where episodes started, and reduces its observation statistics.
"""


@pytest.fixture(scope="module")
def profile():
    """Profiles by recipe and setting, each computed once."""
    made = {}

    def of(name, setting):
        if (name, setting) not in made:
            made[name, setting] = on_gpu(name, SETTINGS[name][setting])
        return made[name, setting]

    return of


@pytest.mark.parametrize("name", [name for name in SETTINGS if name != "cricket-gnn"])
def test_rollout_step_synchronizes_once_for_the_actions(profile, name):
    _, syncs, lines = sum_of(profile(name, FEW), "collect/act", "collect/env")
    assert syncs <= STEPS.get(name, 1), f"a rollout step synchronizes at: {dict(lines)}"


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("snake-ppo", {"task.backend": "torch"}),
        ("sim-ppo", {"task.env_kwargs": {"max_episode_length": 2}}),
        ("sim-ppo", {"task.make": "helpers.sim_toys:make_gym"}),
        ("sim-ppo", {"task.make": "helpers.sim_toys:make_old"}),
    ],
)
def test_rollout_in_a_device_env_never_synchronizes(name, settings):
    found = on_gpu(name, SETTINGS["snake-ppo"][FEW] | settings)
    launches, syncs, lines = sum_of(found, "collect")
    assert launches > 0
    assert syncs == 0, f"a rollout synchronizes at: {dict(lines)}"
    # Besides the metrics, an iteration reads once whether an action was invalid, or a last observation missing.
    _, syncs, lines = sum_of(found, "")
    assert syncs <= 2, f"an iteration synchronizes at: {dict(lines)}"


@pytest.mark.parametrize("name", [name for name in SETTINGS if MANY in SETTINGS[name]])
def test_more_updates_do_not_add_synchronizations(profile, name):
    few, many = profile(name, FEW), profile(name, MANY)
    assert many["updates"] > few["updates"]
    more = sum_of(many, "learn")[2]
    more.subtract(sum_of(few, "learn")[2])
    waits = {line: count for line, count in more.items() if count > 0}
    assert waits == {}, f"an update synchronizes at: {waits}"


@pytest.mark.parametrize("name", SETTINGS)
def test_rest_of_an_iteration_stays_within_its_sync_budget(profile, name):
    found = profile(name, FEW)
    phases = [phase for phase in found["phases"] if phase not in ("collect/act", "collect/env")]
    _, syncs, lines = sum_of(found, *phases)
    acting = sum_of(found, "collect/act", "collect/env")[1] if "collect" in phases else 0
    assert syncs - acting <= ITERATION.get(name, 4), f"an iteration synchronizes at: {dict(lines)}"


@pytest.mark.parametrize("name", SETTINGS)
def test_metrics_synchronize_once_per_iteration(profile, name):
    _, syncs, lines = sum_of(profile(name, FEW), "")
    assert syncs <= 1, f"metrics synchronize at: {dict(lines)}"


def test_batch_of_graphs_synchronizes_at_most_twice(profile):
    found = profile("cricket-gnn", FEW)
    _, syncs, lines = sum_of(found, *found["phases"])
    assert syncs <= 2, f"a batch synchronizes at: {dict(lines)}"


@pytest.mark.parametrize(("name", "before"), [("snake-ppo", 126), ("gym-ppo", 126)])
def test_ppo_update_launches_stay_a_third_below_the_old_count(profile, name, before):
    few, many = profile(name, FEW), profile(name, MANY)
    launches = sum_of(many, "learn")[0] - sum_of(few, "learn")[0]
    assert launches / (many["updates"] - few["updates"]) <= before * 2 / 3
