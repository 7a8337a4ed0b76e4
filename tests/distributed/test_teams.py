"""A team on several processes: games end when they end, past selves are the same everywhere, and so is the agent."""

import hashlib

import pytest
import torch

from lockstep.config import overlay
from lockstep.protocols import Clock
from lockstep.recipes import find_recipe
from lockstep.runtime import Runtime
from lockstep.train import iterate
from processes import together

RECIPE = find_recipe("team-ddpg")
SETTING = RECIPE.smoke | {"run.lanes": 8, "run.device": "cpu", "algo.self_every": 256}


def trained(reduction, iterations=8):
    """Games that end at other times on every lane, and what came of them: episodes, levels, and a digest of all."""
    recipe = overlay(RECIPE(), SETTING | {"run.reduction": reduction, "task.gate": 0.2})
    with Runtime.start(recipe.run) as runtime:
        task = recipe.task.build(runtime.lanes, runtime.device)
        algorithm, clock = recipe.algo.build(task, runtime), Clock(budget=recipe.run.samples)
        for lane in runtime.lanes.local:  # the games of lane 7 are nearly over, those of lane 0 have just begun
            state = task.lane_state(lane)
            state["step"] += 5 * lane
            task.load_lane_state(lane, state)
        ended, levels, epsilons = [], [], []
        for _ in range(iterations):
            iterate(task, algorithm, clock, runtime, check_every=2)
            levels.append(int(task.shared_state()["level"]))
            epsilons.append(float(algorithm.epsilon))
            ended.append(clock.pending["rollout/ep_length_mean"][1])
            clock.settle_metrics()
        shared = algorithm.shared_state()
        digest = hashlib.sha256(b"".join(x.detach().numpy().tobytes() for x in shared.values())).hexdigest()
        past = torch.cat([x.flatten() for name, x in shared.items() if name.startswith("past.")]).sum().item()
        return {"ended": ended, "levels": levels, "epsilons": epsilons, "digest": digest, "past": past}


@pytest.mark.distributed
def test_games_that_end_on_one_process_stop_nobody_and_all_hold_one_agent():
    one, other = together(trained, 2, "fast")
    assert one == other
    assert set(one["ended"]) == {2.0, 4.0}  # games of one lane or two in each iteration, of 16 in all


@pytest.mark.distributed
def test_level_epsilon_past_selves_and_agent_do_not_depend_on_the_number_of_processes():
    [alone] = together(trained, 1, "exact")
    assert alone["levels"][0] == 0
    assert max(alone["levels"]) > 0  # the gate has opened
    assert len(set(alone["epsilons"])) > 2
    for processes in (2, 3):
        assert together(trained, processes, "exact") == [alone] * processes
