"""Team snakes: rewards, episode ends, and results that do not depend on lane placement or the acting policy."""

import numpy as np
import pytest
import torch
from gymnasium.spaces import MultiDiscrete

from helpers.team_games import arrange, build, put, random_actions, winding
from lockstep.config import ConfigError
from lockstep.pytree import named_leaves
from lockstep.tasks.env_checker import check_env
from lockstep.tasks.team_snakes.env import TeamSnakesConfig
from lockstep.tasks.team_snakes.kernel import SCRIPTED
from lockstep.tasks.team_snakes.opponents import CAUTIOUS, EVADER, GREEDY, RANDOM
from lockstep.tasks.team_snakes.rules import DOWN, LEFT, RIGHT, SNAKES, START_LENGTH, TEAM, UP

OURS_ON_BOTH_SIDES = pytest.mark.parametrize("number", [0, 1], ids=["lower numbers", "higher numbers"])


def record(env, actions):
    """Record all step outputs; mask the final observation and episode info where no game ended."""
    seen = []
    for action in actions:
        step = env.step(action)
        ended = step.terminated | step.truncated
        recorded = {"reward": step.reward, "agents": step.agent_reward, **named_leaves(step.obs, "obs")}
        recorded |= {"terminated": step.terminated, "truncated": step.truncated}
        ends = named_leaves(step.final_obs, "final") | step.episode_info
        recorded |= {name: x * ended.view(-1, *[1] * (x.ndim - 1)) for name, x in ends.items()}
        seen.append({name: x.clone() for name, x in recorded.items()})
    return {name: torch.stack([step[name] for step in seen]) for name in seen[0]}  # [T, B, ...]


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


# -------------------------------------------------------------------------------------------------------- task contract


@pytest.mark.parametrize(
    "config",
    [
        TeamSnakesConfig(),
        TeamSnakesConfig(observation="egocentric", level_schedule="gate", max_episode_steps=50),
        TeamSnakesConfig(
            observation="grid", grid_shape=(7, 9), control_both_teams=True, opponent_level=EVADER, max_episode_steps=70
        ),
        TeamSnakesConfig(
            approach_reward=0.1,
            death_penalty=-0.5,
            team_reward_fraction=0.5,
            opponent_reward_weight=0.3,
            opponent_level=RANDOM,
            level_schedule="linear",
            toroidal_distance=True,
        ),
    ],
    ids=["features", "egocentric", "grid, both", "shaped"],
)
def test_check_env_finds_no_faults(config):
    assert check_env(config, steps=230) == []


def test_team_is_an_extra_axis_of_obs_actions_and_agent_reward():
    env = build(4, control_both_teams=False)
    assert env.action_space == MultiDiscrete([4, 4, 4])
    assert env.observations()["seen"].shape[:2] == env.observations()["legal"].shape[:2] == (4, TEAM)
    step = env.step(random_actions(1, 4)[0])
    assert step.reward.shape == (4,)
    assert step.agent_reward.shape == (4, TEAM)
    assert set(step.episode_info) == {"score", "conceded", "won", "drawn", "level"}


def test_control_both_teams_exposes_six_snakes_own_team_first():
    one, all_six = build(4, control_both_teams=False), build(4, control_both_teams=True)
    assert all_six.action_space == MultiDiscrete([4, 4, 4, 5, 5, 5])
    for actions in random_actions(30, 4):
        for part in ("seen", "legal"):
            assert torch.equal(all_six.observations()[part][:, :TEAM], one.observations()[part])
        theirs = torch.full((4, TEAM), SCRIPTED)
        scripted, left_to_the_script = one.step(actions), all_six.step(torch.cat([actions, theirs], dim=1))
        assert torch.equal(scripted.reward, left_to_the_script.reward)
        assert torch.equal(scripted.agent_reward, left_to_the_script.agent_reward[:, :TEAM])


@OURS_ON_BOTH_SIDES
def test_control_both_teams_mixes_given_and_scripted_actions(number):
    others = TEAM - number * TEAM
    snakes = {others: [(2, 5), (2, 4), (2, 3)], others + 1: [(1, 9), (1, 8), (1, 7)]}
    env = put(build(1, control_both_teams=True, opponent_level=GREEDY), arrange(snakes, beans=[(3, 9)], number=number))
    ours = env.observations()["legal"][0, :TEAM].argmax(-1)
    env.step(torch.tensor([[*ours.tolist(), UP, SCRIPTED, SCRIPTED]]))
    headings = env.lane_state(0)["heading"][0]
    assert headings[others] == UP
    assert headings[others + 1] == DOWN  # towards its bean


# -------------------------------------------------------------------------------------------------------------- rewards


@OURS_ON_BOTH_SIDES
def test_reward_is_score_margin_and_agent_reward_is_per_snake(number):
    ours, theirs = number * TEAM, TEAM - number * TEAM
    snakes = {ours + 1: [(2, 5), (2, 4), (2, 3)], theirs: [(1, 5), (1, 4), (1, 3)]}
    games = arrange(snakes, beans=[(2, 6), (1, 6)], number=number)
    env = put(build(1, control_both_teams=True, opponent_level=GREEDY), games)
    step = env.step(torch.tensor([[RIGHT] * TEAM + [SCRIPTED] * TEAM]))
    assert step.agent_reward.tolist() == [[0, 1, 0, 1, 0, 0]]
    assert step.reward.tolist() == [0]
    alone = put(
        build(1, opponent_level=RANDOM), arrange({ours: [(2, 5), (2, 4), (2, 3)]}, beans=[(2, 6)], number=number)
    )
    assert alone.step(torch.tensor([[RIGHT] * TEAM])).reward.tolist() == [1]


def test_agent_return_equals_length_minus_three_at_every_step():
    env = build(100, control_both_teams=True, opponent_level=CAUTIOUS)
    returns, margin = torch.zeros(100, SNAKES), torch.zeros(100)
    ours, scripted = random_actions(200, 100), torch.full((100, TEAM), SCRIPTED)
    for time in range(200):
        state = env.lane_state(0)
        sides = ((state["place"] + state["episode"]) % 2).tolist()
        lengths = torch.stack([row.roll(-TEAM * side) for row, side in zip(state["length"], sides, strict=True)])
        assert torch.equal(lengths - START_LENGTH, returns.long())
        step = env.step(torch.cat([env.scripted_actions(CAUTIOUS) if time % 5 else ours[time], scripted], dim=1))
        returns, margin = returns + step.agent_reward, margin + step.reward
    assert step.truncated.all()
    assert torch.equal(step.episode_info["score"], returns[:, :TEAM].sum(1))
    assert torch.equal(step.episode_info["conceded"], returns[:, TEAM:].sum(1))
    assert torch.equal(margin, step.episode_info["score"] - step.episode_info["conceded"])
    assert torch.equal(step.episode_info["won"].bool(), margin > 0)
    assert torch.equal(step.episode_info["drawn"].bool(), margin == 0)


def shaped(action, body, bean, **settings):
    """Agent rewards of our team for one step, snake 0 taking `action`."""
    env = put(build(1, opponent_level=RANDOM, **settings), arrange({0: body}, beans=[bean]))
    return env.step(torch.tensor([[action, RIGHT, RIGHT]])).agent_reward[0].tolist()


def test_approach_reward_is_positive_towards_bean_and_negative_away():
    body = [(2, 5), (2, 4), (2, 3)]
    assert shaped(RIGHT, body, (2, 9), approach_reward=0.5)[0] == 0.5
    assert shaped(UP, body, (2, 9), approach_reward=0.5)[0] == -0.5
    assert shaped(RIGHT, body, (2, 6), approach_reward=0.5)[0] == 1.5
    assert shaped(RIGHT, body, (2, 9))[0] == 0
    assert shaped(LEFT, [(2, 1), (2, 2), (2, 3)], (2, 18), approach_reward=0.5)[0] == 0.5  # shortest way around


def test_approach_reward_sums_to_zero_on_a_cycle():
    ring = [(1, 1), (1, 2), (2, 2), (2, 1)]
    env = put(build(1, opponent_level=RANDOM, approach_reward=0.5), arrange({0: ring}, headings={0: LEFT}))
    gained = [float(env.step(torch.tensor([[a, UP, UP]])).agent_reward[0, 0]) for a in (DOWN, RIGHT, UP, LEFT) * 2]
    assert sum(gained) == 0
    assert any(gained)


def test_death_costs_grown_length_plus_death_penalty():
    own = [(2, 4), (3, 4), (3, 5), (2, 5), (1, 5)]
    assert shaped(RIGHT, own, (9, 9), death_penalty=-0.5, approach_reward=0.5)[0] == -2.5
    assert shaped(RIGHT, own, (9, 9))[0] == -2


def test_team_reward_fraction_and_opponent_weight_mix_rewards():
    body = [(2, 5), (2, 4), (2, 3)]
    assert shaped(RIGHT, body, (2, 6), team_reward_fraction=1.0) == pytest.approx([1 / 3] * 3)
    assert shaped(RIGHT, body, (2, 6), team_reward_fraction=0.5) == pytest.approx([1 / 2 + 1 / 6, 1 / 6, 1 / 6])
    env = put(build(1, opponent_level=GREEDY, opponent_reward_weight=0.5), arrange({3: body}, beans=[(2, 6)]))
    assert env.step(torch.tensor([[RIGHT] * 3])).agent_reward[0].tolist() == pytest.approx([-1 / 6] * 3)


# ---------------------------------------------------------------------------------------------------------- episode end


def test_max_episode_steps_truncates_with_final_observation():
    env = build(4)
    for _ in range(199):
        step = env.step(env.scripted_actions(GREEDY))
        assert not (step.terminated | step.truncated).any()
        assert step.any_truncated is False
    before = {name: x.clone() for name, x in env.observations().items()}
    step = env.step(env.scripted_actions(GREEDY))
    assert step.truncated.all()
    assert not step.terminated.any()
    assert step.any_truncated is True
    assert not torch.equal(step.final_obs["seen"], before["seen"])
    assert not torch.equal(step.final_obs["seen"], step.obs["seen"])
    assert env.lane_state(0)["step"].tolist() == [0] * 4
    assert env.lane_state(0)["episode"].tolist() == [1] * 4


def test_game_without_room_terminates_and_next_game_starts():
    starts = {5: 4, 4: 7, 3: 10, 2: 14, 1: 17}
    snakes = {snake: winding(3, first) for snake, first in starts.items()} | {0: winding(178, 20)}
    for view in ("features", "grid"):
        env = put(
            build(1, control_both_teams=True, observation=view), arrange(snakes, [*winding(4, 0), *winding(1, 13)])
        )
        step = env.step(torch.tensor([[LEFT, DOWN, RIGHT, DOWN, RIGHT, RIGHT]]))
        assert step.terminated.tolist() == [True]
        assert step.truncated.tolist() == [False]
        assert step.episode_info["score"].tolist() == [175]
        assert step.episode_info["conceded"].tolist() == [0]
        assert step.episode_info["won"].tolist() == [1]
        assert not step.final_obs["seen"][0, TEAM].any()  # the snake that could not respawn
        assert env.observation_space["seen"].contains(step.final_obs["seen"][0].numpy())
        assert env.lane_state(0)["length"].tolist() == [[START_LENGTH] * SNAKES]


def test_sides_alternate_between_games_and_neighboring_envs():
    env = build(4, max_episode_steps=1)
    sides = []
    for _ in range(3):
        places = env.lane_state(0)
        sides.append(((places["place"] + places["episode"]) % 2).tolist())
        ours = env.lane_state(0)["heading"].view(4, 2, TEAM)[torch.arange(4), torch.tensor(sides[-1])]
        assert torch.equal(env.observations()["legal"].argmin(-1), ours ^ 1)  # observations are of that side
        env.step(random_actions(1, 4)[0])
    assert sides == [[0, 1, 0, 1], [1, 0, 1, 0], [0, 1, 0, 1]]


# ------------------------------------------------------------------------------------------------------ egocentric view


def test_egocentric_view_plays_the_same_game_as_board_view():
    board, ahead = (
        build(8, opponent_level=CAUTIOUS, max_episode_steps=90),
        build(8, opponent_level=CAUTIOUS, max_episode_steps=90, observation="egocentric"),
    )
    for time in range(100):
        if time % 7:
            actions = board.scripted_actions(GREEDY), ahead.scripted_actions(GREEDY)
        else:  # straight ahead is the heading on the board, and UP in egocentric coordinates
            state = board.lane_state(0)
            first = (state["place"] + state["episode"]) % 2 * TEAM
            headings = state["heading"].gather(1, first.view(-1, 1) + torch.arange(TEAM))
            actions = headings, torch.full((8, TEAM), UP)
        one, other = board.step(actions[0]), ahead.step(actions[1])
        assert torch.equal(one.reward, other.reward)
        assert torch.equal(board.lane_state(0)["owner"], ahead.lane_state(0)["owner"])
        assert (other.obs["legal"] == torch.tensor([1, 0, 1, 1], dtype=torch.uint8)).all()


# ---------------------------------------------------------------------------------------------------- lane independence


def test_step_results_do_not_depend_on_lane_count_or_placement():
    actions = random_actions(220, 16)
    everywhere = record(build(16, lanes=8), actions)
    assert everywhere["truncated"].any()
    assert_same(everywhere, record(build(16, lanes=1), actions))
    hosted = []
    for local in (range(3), range(3, 6), range(6, 8)):
        mine = slice(2 * local.start, 2 * local.stop)
        hosted.append(record(build(16, lanes=8, local=local), actions[:, mine]))
    assert_same(everywhere, {name: torch.cat([part[name] for part in hosted], dim=1) for name in everywhere})


@pytest.mark.parametrize("level", [RANDOM, GREEDY, CAUTIOUS, EVADER])
def test_lane_state_mid_game_resumes_identically_on_other_process(level):
    actions = random_actions(240, 16)
    whole = build(16, lanes=8, opponent_level=level)
    record(whole, actions[:150])
    saved = {lane: whole.lane_state(lane) for lane in range(8)}
    expected = record(whole, actions[150:])  # saved states must not alias the games
    for local in (range(3), range(3, 8)):
        part = build(16, lanes=8, local=local, opponent_level=level)
        record(part, random_actions(20, part.num_envs, seed=1))  # different state that loading must overwrite
        for lane in local:
            part.load_lane_state(lane, saved[lane])
        mine = slice(2 * local.start, 2 * local.stop)
        assert_same(record(part, actions[150:, mine]), {name: seen[:, mine] for name, seen in expected.items()})


def test_lane_state_save_load_round_trip_keeps_observations():
    env, other = build(16, lanes=8), build(16, lanes=8, seed=1)
    record(env, random_actions(50, 16))
    for lane in range(8):
        other.load_lane_state(lane, env.lane_state(lane))
        assert_same(env.lane_state(lane), other.lane_state(lane))
    assert_same(env.observations(), other.observations())


def test_reset_replays_first_games():
    env, actions = build(8), random_actions(60, 8)
    first = record(env, actions)
    env.reset()
    assert_same(first, record(env, actions))


@pytest.mark.parametrize("shape", [(4,), (4, 6), (3, 3)])
def test_step_wrong_action_shape_raises(shape):
    with pytest.raises(ValueError, match=r"Give each of the 3 snakes of the 4 games 0 \(up\)"):
        build(4).step(torch.zeros(shape, dtype=torch.int64))


@pytest.mark.parametrize("wrong", [-1, 4])
def test_step_invalid_actions_leave_state_unchanged(wrong):
    env, undisturbed = build(4), build(4)
    with pytest.raises(ValueError, match="Give each of the 3 snakes"):
        env.step(torch.tensor([[0, 0, 0]] * 3 + [[0, 0, wrong]]))
    assert_same(env.lane_state(0), undisturbed.lane_state(0))
    with pytest.raises(ValueError, match="with 4 the script moves a snake of the other team"):
        build(1, control_both_teams=True).step(
            torch.tensor([[4, 0, 0, 0, 0, 0]])
        )  # only the algorithm acts for our team


@pytest.mark.parametrize(
    ("name", "number"),
    [
        ("length", 2),
        ("length", 10**9),
        ("length", -1),
        ("front", 256),
        ("front", -1),
        ("heading", 4),
        ("beans", 200),
        ("beans", -1),
        ("served", 4),
        ("step", 200),
        ("step", -1),
        ("body", 200),
        ("owner", 7),
        ("episode", -1),
        ("place", -2),
    ],
)
def test_load_lane_state_invalid_state_raises_and_changes_nothing(name, number):
    env = build(4)
    env.step(env.scripted_actions(GREEDY))
    before, corrupted = env.lane_state(0), env.lane_state(0)
    corrupted[name].view(-1)[-1] = number
    if name == "body":
        corrupted[name][-1] = number
    with pytest.raises(ValueError, match="lane 0: the saved environments are not in a valid state"):
        env.load_lane_state(0, corrupted)
    assert_same(env.lane_state(0), before)


def test_load_lane_state_of_other_num_envs_raises():
    with pytest.raises(ValueError, match="Resume a run with the configuration it was started with"):
        build(8).load_lane_state(0, build(4).lane_state(0))


# ------------------------------------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_episode_steps": 0},
        {"opponent_level": 6},
        {"opponent_level": -1},
        {"grid_shape": (11, 20)},
        {"grid_shape": (0, 5)},
        {"evade_after_samples": -1},
        {"approach_reward": -0.1},
        {"death_penalty": 0.1},
        {"team_reward_fraction": 1.1},
        {"opponent_reward_weight": -1.0},
    ],
)
def test_config_invalid_settings_raise(wrong):
    with pytest.raises(ConfigError):
        TeamSnakesConfig(**wrong)


def test_num_envs_not_divisible_by_lanes_raises():
    with pytest.raises(ConfigError, match="num_envs is 10, which 8 lanes cannot share evenly"):
        build(10, lanes=8)


# ------------------------------------------------------------------------------------------------------------ rendering


@OURS_ON_BOTH_SIDES
def test_render_text_shows_board_with_own_team_as_first_letters(number):
    ours = number * TEAM
    games = arrange({ours: [(0, 1), (0, 0), (0, 19), (1, 19)]}, beans=[(2, 2)], number=number)
    env = put(build(1), games)
    rows = env.render_text(0).splitlines()
    assert rows[1] == "| a A . . . . . . . . . . . . . . . . . a |"
    assert rows[2].endswith(" a |")
    assert rows[3].startswith("| . . * .")
    assert env.render_score(0) == "score 1 : 0"
    assert env.render_title(0) == "trained team (green, ABC) against level 2 (orange, XYZ)"
    assert "X" in "".join(rows)


def test_render_uses_distinct_team_colors_across_the_seam():
    games = arrange({0: [(0, 1), (0, 0), (0, 19)], 3: [(2, 5), (2, 4), (2, 3)]}, beans=[(3, 9)])
    frame = put(build(1), games).render(0)
    assert frame.dtype == np.uint8
    assert frame.shape == (10 * 24 + 24, 20 * 24 + 24, 3)

    def color(row, column):
        return frame[12 + int(24 * row) + 12, 12 + int(24 * column) + 12].astype(int)

    for column in (0, 1, 19, 19.49, -0.49):  # at the seam the body reaches the edge on both sides
        assert color(0, column).argmax() == 1, column
    assert color(2, 4).argmax() == 0
    bean, floor = color(3, 9), color(3, 3)
    assert bean[0] > 200
    assert bean[2] < 120
    assert floor.max() < 60
