"""Team snakes keeps its books and its promise: the same games whoever hosts them, whoever acts for the others."""

import numpy as np
import pytest
import torch
from gymnasium.spaces import MultiDiscrete

from lockstep.config import ConfigError
from lockstep.pytree import named_leaves
from lockstep.tasks.env_checker import check_env
from lockstep.tasks.team_snakes.env import TeamSnakesConfig
from lockstep.tasks.team_snakes.kernel import SCRIPTED
from lockstep.tasks.team_snakes.opponents import CAUTIOUS, EVADER, GREEDY, RANDOM
from lockstep.tasks.team_snakes.rules import DOWN, LEFT, RIGHT, SNAKES, START_LENGTH, TEAM, UP
from team_games import arrange, build, put, random_actions, winding

OURS_ON_BOTH_SIDES = pytest.mark.parametrize("number", [0, 1], ids=["lower numbers", "higher numbers"])


def record(env, actions):
    """Everything a learner sees along some steps, what is told of a game's end only where it is."""
    seen = []
    for action in actions:
        step = env.step(action)
        ended = step.terminated | step.truncated
        told = {"reward": step.reward, "agents": step.agent_reward, **named_leaves(step.obs, "obs")}
        told |= {"terminated": step.terminated, "truncated": step.truncated}
        ends = named_leaves(step.final_obs, "final") | step.episode_info
        told |= {name: x * ended.view(-1, *[1] * (x.ndim - 1)) for name, x in ends.items()}
        seen.append({name: x.clone() for name, x in told.items()})
    return {name: torch.stack([step[name] for step in seen]) for name in seen[0]}  # [T, B, ...]


def assert_same(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name in ours:
        assert torch.equal(ours[name], theirs[name]), name


# --------------------------------------------------------------------------------------------------------- the contract


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
def test_the_task_keeps_the_contract(config):
    assert check_env(config, steps=230) == []


def test_a_team_is_one_more_axis():
    env = build(4, control_both_teams=False)
    assert env.action_space == MultiDiscrete([4, 4, 4])
    assert env.observations()["seen"].shape[:2] == env.observations()["legal"].shape[:2] == (4, TEAM)
    step = env.step(random_actions(1, 4)[0])
    assert step.reward.shape == (4,)
    assert step.agent_reward.shape == (4, TEAM)
    assert set(step.episode_info) == {"score", "conceded", "won", "drawn", "level"}


def test_with_both_the_algorithm_sees_and_acts_for_all_six_ours_first():
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
def test_one_snake_of_the_other_team_may_be_acted_for_and_the_rest_left_to_the_script(number):
    others = TEAM - number * TEAM
    snakes = {others: [(2, 5), (2, 4), (2, 3)], others + 1: [(1, 9), (1, 8), (1, 7)]}
    env = put(build(1, control_both_teams=True, opponent_level=GREEDY), arrange(snakes, beans=[(3, 9)], number=number))
    ours = env.observations()["legal"][0, :TEAM].argmax(-1)
    env.step(torch.tensor([[*ours.tolist(), UP, SCRIPTED, SCRIPTED]]))
    headings = env.lane_state(0)["heading"][0]
    assert headings[others] == UP
    assert headings[others + 1] == DOWN  # to its bean


# ---------------------------------------------------------------------------------------------------------- the rewards


@OURS_ON_BOTH_SIDES
def test_the_reward_is_the_margin_and_each_agent_earns_its_own(number):
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


def test_the_return_of_every_snake_is_its_length_less_three_at_any_time():
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
    """What snake 0, of our team, learns from for one step."""
    env = put(build(1, opponent_level=RANDOM, **settings), arrange({0: body}, beans=[bean]))
    return env.step(torch.tensor([[action, RIGHT, RIGHT]])).agent_reward[0].tolist()


def test_a_step_nearer_to_a_bean_gains_and_a_step_away_loses():
    body = [(2, 5), (2, 4), (2, 3)]
    assert shaped(RIGHT, body, (2, 9), approach_reward=0.5)[0] == 0.5
    assert shaped(UP, body, (2, 9), approach_reward=0.5)[0] == -0.5
    assert shaped(RIGHT, body, (2, 6), approach_reward=0.5)[0] == 1.5
    assert shaped(RIGHT, body, (2, 9))[0] == 0
    assert shaped(LEFT, [(2, 1), (2, 2), (2, 3)], (2, 18), approach_reward=0.5)[0] == 0.5  # the short way round


def test_circling_gains_nothing():
    ring = [(1, 1), (1, 2), (2, 2), (2, 1)]
    env = put(build(1, opponent_level=RANDOM, approach_reward=0.5), arrange({0: ring}, headings={0: LEFT}))
    gained = [float(env.step(torch.tensor([[a, UP, UP]])).agent_reward[0, 0]) for a in (DOWN, RIGHT, UP, LEFT) * 2]
    assert sum(gained) == 0
    assert any(gained)


def test_a_death_costs_its_length_and_what_is_set_on_top():
    own = [(2, 4), (3, 4), (3, 5), (2, 5), (1, 5)]
    assert shaped(RIGHT, own, (9, 9), death_penalty=-0.5, approach_reward=0.5)[0] == -2.5
    assert shaped(RIGHT, own, (9, 9))[0] == -2


def test_rewards_are_shared_within_the_team_and_weighed_against_the_other():
    body = [(2, 5), (2, 4), (2, 3)]
    assert shaped(RIGHT, body, (2, 6), team_reward_fraction=1.0) == pytest.approx([1 / 3] * 3)
    assert shaped(RIGHT, body, (2, 6), team_reward_fraction=0.5) == pytest.approx([1 / 2 + 1 / 6, 1 / 6, 1 / 6])
    env = put(build(1, opponent_level=GREEDY, opponent_reward_weight=0.5), arrange({3: body}, beans=[(2, 6)]))
    assert env.step(torch.tensor([[RIGHT] * 3])).agent_reward[0].tolist() == pytest.approx([-1 / 6] * 3)


# ---------------------------------------------------------------------------------------------------------- the end


def test_two_hundred_steps_cut_a_game_off_and_its_last_board_is_the_final_observation():
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


def test_a_game_without_room_is_over_for_good_and_the_next_one_begins():
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
        assert not step.final_obs["seen"][0, TEAM].any()  # the one that found no place
        assert env.observation_space["seen"].contains(step.final_obs["seen"][0].numpy())
        assert env.lane_state(0)["length"].tolist() == [[START_LENGTH] * SNAKES]


def test_sides_alternate_from_game_to_game_and_between_neighbours():
    env = build(4, max_episode_steps=1)
    sides = []
    for _ in range(3):
        places = env.lane_state(0)
        sides.append(((places["place"] + places["episode"]) % 2).tolist())
        ours = env.lane_state(0)["heading"].view(4, 2, TEAM)[torch.arange(4), torch.tensor(sides[-1])]
        assert torch.equal(env.observations()["legal"].argmin(-1), ours ^ 1)  # what we see is of that side
        env.step(random_actions(1, 4)[0])
    assert sides == [[0, 1, 0, 1], [1, 0, 1, 0], [0, 1, 0, 1]]


# ---------------------------------------------------------------------------------------------------------- the level


def test_seen_ahead_a_game_is_the_same_game():
    board, ahead = (
        build(8, opponent_level=CAUTIOUS, max_episode_steps=90),
        build(8, opponent_level=CAUTIOUS, max_episode_steps=90, observation="egocentric"),
    )
    for time in range(100):
        if time % 7:
            actions = board.scripted_actions(GREEDY), ahead.scripted_actions(GREEDY)
        else:  # straight on is the board's heading, and up for who sees ahead
            state = board.lane_state(0)
            first = (state["place"] + state["episode"]) % 2 * TEAM
            headings = state["heading"].gather(1, first.view(-1, 1) + torch.arange(TEAM))
            actions = headings, torch.full((8, TEAM), UP)
        one, other = board.step(actions[0]), ahead.step(actions[1])
        assert torch.equal(one.reward, other.reward)
        assert torch.equal(board.lane_state(0)["owner"], ahead.lane_state(0)["owner"])
        assert (other.obs["legal"] == torch.tensor([1, 0, 1, 1], dtype=torch.uint8)).all()


# ---------------------------------------------------------------------------------------------------------- the promise


def test_games_play_the_same_however_they_are_cut_into_lanes_and_hosted():
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
def test_a_lane_saved_in_mid_game_goes_on_identically_on_another_process(level):
    actions = random_actions(240, 16)
    whole = build(16, lanes=8, opponent_level=level)
    record(whole, actions[:150])
    saved = {lane: whole.lane_state(lane) for lane in range(8)}
    expected = record(whole, actions[150:])  # the clones must not follow the games
    for local in (range(3), range(3, 8)):
        part = build(16, lanes=8, local=local, opponent_level=level)
        record(part, random_actions(20, part.num_envs, seed=1))  # something else to be overwritten
        for lane in local:
            part.load_lane_state(lane, saved[lane])
        mine = slice(2 * local.start, 2 * local.stop)
        assert_same(record(part, actions[150:, mine]), {name: seen[:, mine] for name, seen in expected.items()})


def test_a_lane_saved_and_loaded_is_the_same_lane_and_shows_the_same():
    env, other = build(16, lanes=8), build(16, lanes=8, seed=1)
    record(env, random_actions(50, 16))
    for lane in range(8):
        other.load_lane_state(lane, env.lane_state(lane))
        assert_same(env.lane_state(lane), other.lane_state(lane))
    assert_same(env.observations(), other.observations())


def test_reset_begins_the_first_games_again():
    env, actions = build(8), random_actions(60, 8)
    first = record(env, actions)
    env.reset()
    assert_same(first, record(env, actions))


@pytest.mark.parametrize("shape", [(4,), (4, 6), (3, 3)])
def test_actions_of_another_shape_are_refused_in_words(shape):
    with pytest.raises(ValueError, match=r"Give each of the 3 snakes of the 4 games 0 \(up\)"):
        build(4).step(torch.zeros(shape, dtype=torch.int64))


@pytest.mark.parametrize("wrong", [-1, 4])
def test_actions_that_are_none_leave_every_game_as_it_was(wrong):
    env, undisturbed = build(4), build(4)
    with pytest.raises(ValueError, match="Give each of the 3 snakes"):
        env.step(torch.tensor([[0, 0, 0]] * 3 + [[0, 0, wrong]]))
    assert_same(env.lane_state(0), undisturbed.lane_state(0))
    with pytest.raises(ValueError, match="4 leaves one of the other team"):
        build(1, control_both_teams=True).step(
            torch.tensor([[4, 0, 0, 0, 0, 0]])
        )  # ours is nobody's but the algorithm's


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
def test_games_that_no_game_can_come_to_are_refused_and_leave_the_lane_as_it_was(name, number):
    env = build(4)
    env.step(env.scripted_actions(GREEDY))
    before, spoilt = env.lane_state(0), env.lane_state(0)
    spoilt[name].view(-1)[-1] = number
    if name == "body":
        spoilt[name][-1] = number
    with pytest.raises(ValueError, match="lane 0: the saved games hold what no game can come to"):
        env.load_lane_state(0, spoilt)
    assert_same(env.lane_state(0), before)


def test_the_state_of_other_settings_is_refused():
    with pytest.raises(ValueError, match="Resume a run with the configuration it was started with"):
        build(8).load_lane_state(0, build(4).lane_state(0))


# --------------------------------------------------------------------------------------------------------- the settings


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
def test_impossible_settings_are_refused(wrong):
    with pytest.raises(ConfigError):
        TeamSnakesConfig(**wrong)


def test_games_that_lanes_cannot_share_are_refused():
    with pytest.raises(ConfigError, match="num_envs is 10, which 8 lanes cannot share evenly"):
        build(10, lanes=8)


# --------------------------------------------------------------------------------------------------------- the pictures


@OURS_ON_BOTH_SIDES
def test_text_shows_the_board_with_ours_as_letters_of_the_beginning(number):
    ours = number * TEAM
    games = arrange({ours: [(0, 1), (0, 0), (0, 19), (1, 19)]}, beans=[(2, 2)], number=number)
    rows = put(build(1), games).render_text(0).splitlines()
    assert rows[1] == "| a A . . . . . . . . . . . . . . . . . a |"
    assert rows[2].endswith(" a |")
    assert rows[3].startswith("| . . * .")
    assert rows[-1] == "step 0  we 1  they 0"
    assert "X" in "".join(rows)


def test_a_frame_shows_the_teams_in_colours_of_their_own_over_seams_too():
    games = arrange({0: [(0, 1), (0, 0), (0, 19)], 3: [(2, 5), (2, 4), (2, 3)]}, beans=[(3, 9)])
    frame = put(build(1), games).render(0)
    assert frame.dtype == np.uint8
    assert frame.shape == (10 * 24 + 24, 20 * 24 + 24, 3)

    def colour(row, column):
        return frame[12 + int(24 * row) + 12, 12 + int(24 * column) + 12].astype(int)

    for column in (0, 1, 19, 19.49, -0.49):  # at the seam it reaches the edge on both sides
        assert colour(0, column).argmax() == 1, column
    assert colour(2, 4).argmax() == 0
    bean, floor = colour(3, 9), colour(3, 3)
    assert bean[0] > 200
    assert bean[2] < 120
    assert floor.max() < 60
