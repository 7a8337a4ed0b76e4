"""League: matches between teams, ratings from their results, and the ladder plot."""

import json
import math
from itertools import combinations
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.submissions import UP, write_chaser
from lockstep.apps.league.matches import Player, play_match, script, submission, trained
from lockstep.apps.league.ratings import MatchRecord, elo, elo_intervals, wilson
from lockstep.apps.league.table import draw
from lockstep.cli import main
from lockstep.config import ConfigError
from lockstep.inference import load
from lockstep.tasks.team_snakes.opponents import CAUTIOUS, GREEDY, RANDOM


def record(wins, losses, draws=0):
    return MatchRecord(wins, draws, losses, 0.0, 0.0)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A barely trained run with an opponent pool, so that its task controls both teams."""
    directory = tmp_path_factory.mktemp("ladder")
    assert main(["train", "team-ddpg", "--smoke", "--run.runs-dir", str(directory)]) == 0
    return next(directory.iterdir())


# -------------------------------------------------------------------------------------------------------------- ratings


def test_wilson_interval_matches_hand_calculation():
    low, high = wilson(8, 10, z=2.0)  # (0.8 + 0.2 +- 2 sqrt(0.016 + 0.01)) / 1.4
    assert low == pytest.approx((1.0 - 2 * math.sqrt(0.026)) / 1.4)
    assert high == pytest.approx((1.0 + 2 * math.sqrt(0.026)) / 1.4)
    assert wilson(0, 10)[0] == 0
    assert wilson(10, 10)[1] == 1
    assert 0 < wilson(0, 10)[1] < 0.3


@given(st.integers(1, 500), st.data())
def test_wilson_interval_contains_rate_and_shrinks_with_trials(trials, data):
    successes = data.draw(st.integers(0, trials))
    low, high = wilson(successes, trials)
    assert 0 <= low <= successes / trials <= high <= 1
    more_low, more_high = wilson(10 * successes, 10 * trials)
    assert more_high - more_low < high - low


def test_elo_of_two_players_is_400_points_per_factor_of_ten():
    # With the virtual draw added to every pair, 10 to 1 becomes 10.5 to 1.5: a factor of 7.
    ratings = elo(["a", "b"], {("a", "b"): record(10, 1)})
    assert ratings == pytest.approx({"a": 400 * math.log10(7), "b": 0.0})
    assert elo(["a", "b"], {("a", "b"): record(5, 5, draws=20)}) == pytest.approx({"a": 0.0, "b": 0.0})


def test_elo_recovers_ratings_from_expected_results():
    truth = {"a": 500.0, "b": 300.0, "c": 120.0, "d": 0.0}
    games, records = 10**7, {}
    for one, other in (("a", "b"), ("a", "c"), ("b", "c"), ("d", "c"), ("d", "a")):  # b and d never play
        expected = 1 / (1 + 10 ** ((truth[other] - truth[one]) / 400))
        wins = round(games * expected)
        records[one, other] = record(wins, games - wins)
    assert elo(list(truth), records) == pytest.approx(truth, abs=0.01)


def test_elo_of_undefeated_player_is_finite():
    ratings = elo(["a", "b"], {("a", "b"): record(200, 0)})
    assert 1000 < ratings["a"] < 1100  # 401 to 1


def test_elo_interval_of_two_players_matches_the_analytic_variance():
    # Each rating is half of the difference away from the mean. The log odds have the variance 1 / (n p (1 - p)).
    records = {("a", "b"): record(6000, 4000)}
    half = 1.96 * 400 / math.log(10) / math.sqrt(10_000 * 0.6 * 0.4) / 2
    rating, (low, high) = elo(["a", "b"], records)["a"], elo_intervals(["a", "b"], records, resamples=20_000)["a"]
    assert (rating - low, high - rating) == pytest.approx((half, half), rel=0.05)
    # With half of the games drawn, the score of a game varies less: 0.35 + 0.5 / 4 - 0.6**2 = 0.115, not 0.24.
    drawn_low, drawn_high = elo_intervals(["a", "b"], {("a", "b"): record(3500, 1500, draws=5000)}, resamples=20_000)[
        "a"
    ]
    assert (drawn_high - drawn_low) / (high - low) == pytest.approx(math.sqrt(0.115 / 0.24), rel=0.05)


def test_elo_intervals_contain_the_true_ratings_in_95_percent_of_leagues():
    truth, generator, hits = {"a": 350.0, "b": 100.0, "c": 0.0}, np.random.default_rng(0), []
    for _ in range(200):
        records = {}
        for one, other in combinations(truth, 2):
            wins = int(generator.binomial(60, 1 / (1 + 10 ** ((truth[other] - truth[one]) / 400))))
            records[one, other] = record(wins, 60 - wins)
        shift = sum(elo(list(truth), records).values()) / 3 - 150  # the mean rating is the fixed point
        intervals = elo_intervals(list(truth), records, resamples=200)
        hits += [low <= truth[name] + shift <= high for name, (low, high) in intervals.items()]
    assert 0.92 < sum(hits) / len(hits) < 0.98


def test_elo_intervals_of_undefeated_player_are_wide_and_repeatable():
    names, records = ["a", "b"], {("a", "b"): record(200, 0)}
    intervals = elo_intervals(names, records, seed=3)
    for name, rating in elo(names, records).items():
        low, high = intervals[name]
        assert low + 100 < rating < high - 100
    assert elo_intervals(names, records, seed=3) == intervals != elo_intervals(names, records, seed=4)


# -------------------------------------------------------------------------------------------------------------- matches


def test_match_record_reversed_swaps_wins_and_losses():
    assert record(3, 1, draws=2).reversed() == record(1, 3, draws=2)
    assert record(3, 1, draws=4).win_rate == 3 / 8


def test_play_match_between_scripts_is_won_by_the_better():
    result = play_match(script(GREEDY), script(RANDOM), 40, seed=1)
    assert result.games == 40
    assert result.wins >= 36
    assert result.scored > 10 > result.conceded
    back = play_match(script(RANDOM), script(GREEDY), 40, seed=1)
    assert back.losses >= 36
    assert play_match(script(GREEDY), script(RANDOM), 40, seed=1) == result


def test_play_match_of_trained_team_against_script_and_itself(run):
    team, other = trained("one", load(run)), Player("other", load(run))
    lost = play_match(team, script(CAUTIOUS), 20, seed=1)
    assert lost.losses >= 18
    assert play_match(script(CAUTIOUS), team, 20, seed=1) == lost.reversed()
    drawn = play_match(team, other, 40, seed=1)
    assert drawn.games == 40
    assert abs(drawn.scored - drawn.conceded) < 2  # equal policies score equally


@pytest.mark.distributed
def test_play_match_with_submissions_is_repeatable_and_ranked(run, tmp_path):
    chaser = submission("chaser", write_chaser(tmp_path / "chaser"), timeout=30.0)
    (tmp_path / "up.py").write_text(UP)
    up, team = submission("up", tmp_path / "up.py", timeout=30.0), trained("team", load(run))
    result = play_match(chaser, up, 4, seed=1)
    assert result.wins >= 3
    assert result.games == 4
    assert play_match(up, chaser, 4, seed=1).losses >= 3
    assert play_match(script(CAUTIOUS), chaser, 4, seed=1).wins == 4
    against_team = play_match(team, chaser, 4, seed=1)
    assert against_team.games == 4
    assert play_match(team, chaser, 4, seed=1) == against_team


def test_trained_recipe_without_team_snakes_raises(run):
    loaded = load(run)
    loaded.recipe = type("Other", (), {"task": object()})()
    with pytest.raises(ConfigError, match="does not play team snakes"):
        trained("snake", loaded)


# ------------------------------------------------------------------------------------------------ command line and plot


def test_eval_opponents_prints_table_and_writes_ladder_plot(run, tmp_path, capsys):
    words = ["eval", str(run), "--opponents", "random", "4", f"{run}@512", "--games", "10", "--plots", str(tmp_path)]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert f"{run.name}@512" in "".join(line[1:].split(" ")[0] for line in out.splitlines())  # may be folded
    assert all(name in out for name in ("random", "level 4", "95 % CI", "score", "Elo"))
    picture = ElementTree.parse(tmp_path / "league.svg")
    texts = [node.text for node in picture.iter() if node.tag.endswith("text")]
    assert {run.name, f"{run.name}@512", "random", "level 4"} <= set(texts)
    assert sum(node.get("class") == "interval" for node in picture.iter()) == 4
    assert max(map(len, out.splitlines())) <= 80


def test_eval_opponents_json_has_matches_and_elo(run, capsys):
    assert main(["eval", str(run), "--opponents", "all", "--games", "4", "--json"]) == 0
    result_json = json.loads(capsys.readouterr().out)
    assert set(result_json["matches"]) == {"random", "level 1", "level 2", "level 3", "level 4", "evader"}
    assert set(result_json["elo"]) == {run.name, *result_json["matches"]}
    assert min(result_json["elo"].values()) == 0
    assert result_json["elo_intervals"].keys() == result_json["elo"].keys()
    assert all(low < result_json["elo"][name] < high for name, (low, high) in result_json["elo_intervals"].items())
    match = result_json["matches"]["level 2"]
    assert match["wins"] + match["draws"] + match["losses"] == 4
    assert match["interval"] == list(wilson(match["wins"], 4))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--opponents", "5"], "there is no opponent '5'"),
        (["--opponents", "none.py"], "there is no file"),
        (["--opponents", "all", "--games", "7"], "games is 7"),
        (["--opponents", "2", "all"], "occurs twice"),
    ],
)
def test_eval_opponents_invalid_arguments_exit_with_message(run, words, said, capsys):
    assert main(["eval", str(run), *words]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.distributed
def test_eval_opponents_with_submission_prints_its_rating(run, tmp_path, capsys):
    file = write_chaser(tmp_path / "chaser")
    assert main(["eval", str(run), "--opponents", "random", str(file), "--games", "2", "--json"]) == 0
    result_json = json.loads(capsys.readouterr().out)
    assert set(result_json["elo"]) == {run.name, "random", "chaser/submission.py"}
    assert result_json["matches"]["chaser/submission.py"]["losses"] == 2


def test_eval_opponents_slow_submission_exits_with_message(run, tmp_path, capsys):
    (tmp_path / "slow.py").write_text("import time\n" + UP.replace("return", "time.sleep(60); return"))
    words = ["--opponents", str(tmp_path / "slow.py"), "--games", "2", "--submission-timeout", "0.3"]
    assert main(["eval", str(run), *words]) == 2
    error = " ".join(capsys.readouterr().err.split())
    assert "slow.py, game 0 of environment 0, step 0, gave no response within 0.3 s" in error


def test_ladder_plot_escapes_names():
    svg = draw("<a&b>", {"<a&b>": 100.0, "c": 0.0}, {"<a&b>": (20.0, 180.0), "c": (-80.0, 80.0)}, {"c": record(3, 1)})
    assert "&lt;a&amp;b&gt;" in svg
    ElementTree.fromstring(svg)


def test_ladder_plot_draws_intervals_on_the_scale_of_the_ratings():
    svg = draw("a", {"a": 100.0, "b": 0.0}, {"a": (20.0, 180.0), "b": (-80.0, 80.0)}, {"b": record(3, 1)})
    nodes = [node for node in ElementTree.fromstring(svg).iter() if node.get("class") == "interval" or node.get("rx")]
    bar, first, _, second = [[float(node.get(name, 0)) for name in ("x", "width", "x1", "x2")] for node in nodes]
    zero, point = bar[0], bar[1] / 100
    assert first[2:] == pytest.approx([zero + 20 * point, zero + 180 * point], abs=0.2)
    assert second[2:] == pytest.approx([zero - 80 * point, zero + 80 * point], abs=0.2)
