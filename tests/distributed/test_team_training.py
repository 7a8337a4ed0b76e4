"""Team training on several processes: games end at different times; opponent pool and agent are equal on all ranks."""

import hashlib

import pytest
import torch

from helpers.multiprocess import together
from lockstep.clock import TrainState
from lockstep.config import apply_overrides
from lockstep.distributed import Runtime
from lockstep.registry import find_recipe
from lockstep.training_loop import iterate

RECIPE = find_recipe("team-ddpg")
SETTING = RECIPE.smoke_overrides | {"run.lanes": 8, "run.device": "cpu", "algo.snapshot_every": 256}


def trained(reduction, iterations=8, **settings):
    """Train on games that end at different times per lane; return episodes, levels, epsilons and digests."""
    recipe = apply_overrides(
        RECIPE(), SETTING | {"run.reduction": reduction, "task.promotion_win_rate": 0.2} | settings
    )
    with Runtime.start(recipe.run) as runtime:
        task = recipe.task.build(runtime.lanes, runtime.device)
        algorithm, clock = recipe.algo.build(task, runtime), TrainState(total_samples=recipe.run.total_samples)
        for lane in runtime.lanes.local:  # the games of lane 7 are nearly over, those of lane 0 have just begun
            state = task.lane_state(lane)
            state["step"] += 5 * lane
            task.load_lane_state(lane, state)
        ended, levels, epsilons = [], [], []
        for _ in range(iterations):
            iterate(task, algorithm, clock, runtime, check_every=2)
            levels.append(int(task.shared_state()["level"]))
            epsilons.append(float(algorithm.epsilon))
            ended.append(clock.metric_sums["rollout/ep_length_mean"][1])
            clock.flush_metrics()
        shared = algorithm.shared_state()
        digest = hashlib.sha256(b"".join(x.detach().numpy().tobytes() for x in shared.values())).hexdigest()
        past = torch.cat([x.flatten() for name, x in shared.items() if name.startswith("past.")]).sum().item()
        return {"ended": ended, "levels": levels, "epsilons": epsilons, "digest": digest, "past": past}


@pytest.mark.distributed
def test_games_ending_at_different_times_give_one_agent_on_all_ranks():
    one, other = together(trained, 2, "fast")
    assert one == other
    assert set(one["ended"]) == {2.0, 4.0}  # games of one lane or two in each iteration, of 16 in all


@pytest.mark.distributed
def test_level_epsilon_opponents_and_agent_are_equal_on_1_2_3_processes():
    [alone] = together(trained, 1, "exact")
    assert alone["levels"][0] == 0
    assert max(alone["levels"]) > 0  # the level was raised
    assert len(set(alone["epsilons"])) > 2
    for processes in (2, 3):
        assert together(trained, processes, "exact") == [alone] * processes


@pytest.mark.distributed
def test_pfsp_gives_one_agent_on_1_and_3_processes():
    [(alone, uniform)] = together(pfsp_and_uniform_trained, 1)
    assert alone["digest"] != uniform["digest"]
    assert together(pfsp_trained, 3) == [alone] * 3


def pfsp_trained():
    return trained("exact", 10, **{"algo.opponent_sampling": "pfsp"})


def pfsp_and_uniform_trained():
    return pfsp_trained(), trained("exact", 10)
