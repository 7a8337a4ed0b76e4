"""Cricket: delivery features are read correctly and inputs never contain later deliveries."""

import copy
import json
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from helpers.multiprocess import together
from lockstep.config import ConfigError
from lockstep.pytree import named_leaves
from lockstep.rng import RandomStream
from lockstep.tasks.cricket import cricsheet
from lockstep.tasks.cricket.cricsheet import BALL, FEATURES, mark_of, open_archive
from lockstep.tasks.cricket.dataset import SPLITS, CricketConfig
from lockstep.tasks.cricket.synthetic import write_matches

REAL = Path("/work/shared/data/cricsheet-t20s-male-json.zip")


def delivery(bat=0, batter="A", partner="B", bowler="Z", out=False, **extras):
    total = bat + sum(extras.values())
    ball = {"batter": batter, "non_striker": partner, "bowler": bowler}
    ball["runs"] = {"batter": bat, "extras": total - bat, "total": total}
    ball |= {"extras": extras} if extras else {}
    return ball | ({"wickets": [{"kind": "bowled", "player_out": batter}]} if out else {})


def match(first, second, winner="Two", version="1.1.0", date="2020-01-02", **outcome):
    """Build a match from the overs of its two innings."""
    return {
        "meta": {"data_version": version},
        "info": {"dates": [date], "teams": ["One", "Two"], "venue": "V", "outcome": {"winner": winner} | outcome},
        "innings": [
            {"team": team, "overs": [{"over": number, "deliveries": balls} for number, balls in overs.items()]}
            for team, overs in (("One", first), ("Two", second))
        ],
    }


def archive_of(path, *matches):
    path.mkdir()
    for number, data in enumerate(matches):
        (path / f"{number}.json").write_text(json.dumps(data))
    return open_archive(path, path.parent / "cache")


def feature(archive, name):
    return archive.features[:, FEATURES.index(name)].tolist()


def column(archive, name):
    return archive.balls[:, BALL.index(name)].tolist()


def build(**settings):
    return CricketConfig(**settings).build(None, None)


# --------------------------------------------------------------------------------------------------- feature extraction


def test_features_of_delivery_exclude_its_own_outcome(tmp_path):
    balls = [delivery(4), delivery(0, out=True), delivery(1, batter="C"), delivery(6, batter="B", partner="C")]
    found = archive_of(tmp_path / "data", match({0: balls}, {0: [delivery(6)] * 2}))
    assert feature(found, "runs")[:4] == [0, 4, 4, 5]
    assert feature(found, "wickets")[:4] == [0, 0, 1, 1]
    assert feature(found, "striker_runs")[:4] == [0, 4, 0, 0]
    assert feature(found, "bowler_wickets")[:4] == [0, 0, 1, 1]
    assert feature(found, "stand_balls")[:4] == [0, 1, 0, 1]
    assert column(found, "batter")[:4] == [0, 0, 2, 1]  # batting slots in order of appearance
    assert column(found, "batters")[:4] == [2, 2, 3, 3]


def test_legal_ball_count_excludes_wides_and_no_balls(tmp_path):
    balls = [delivery(wides=1), delivery(1, noballs=1), delivery(legbyes=2), delivery()]
    found = archive_of(tmp_path / "data", match({0: balls}, {0: [delivery()]}))
    assert feature(found, "legal")[:4] == [0, 0, 0, 1]
    assert column(found, "illegal")[:4] == [1, 1, 0, 0]
    assert feature(found, "bowler_runs")[:4] == [0, 1, 3, 3]  # leg byes do not count against the bowler


def test_score_target_is_runs_from_delivery_to_mark(tmp_path):
    overs = {number: [delivery(1)] * 6 for number in range(20)}
    found = archive_of(tmp_path / "data", match(overs, {0: [delivery()]}))
    ahead = found.ahead[:120].reshape(20, 6)
    assert [mark_of(over) for over in (0, 4, 5, 14, 15, 19)] == [5, 5, 10, 19, 20, 20]
    assert ahead[0].tolist() == [30, 29, 28, 27, 26, 25]
    assert (ahead[7, 0], ahead[14, 0], ahead[15, 0], ahead[19, 5]) == (30, 30, 30, 1)


def test_needed_runs_are_set_in_second_innings_only(tmp_path):
    found = archive_of(tmp_path / "data", match({0: [delivery(6)] * 6}, {0: [delivery(4), delivery(4)]}))
    assert feature(found, "needed") == [0] * 6 + [37, 33]
    assert found.matches.tolist() == [[20200102, 1]]


@pytest.mark.parametrize("outcome", [{"method": "D/L"}, {"winner": "One"}])
def test_match_result_marks_lost_and_shortened_chases(tmp_path, outcome):
    data = match({0: [delivery(6)]}, {0: [delivery(4)]}, **outcome)
    assert archive_of(tmp_path / "data", data).matches[0, 1] == (-1 if "method" in outcome else 0)


def test_archive_skips_super_overs_and_reads_both_data_versions(tmp_path):
    one, two = (match({0: [delivery(1)]}, {0: [delivery(2)]}, version=v) for v in ("1.0.0", "1.1.0"))
    one["innings"].append({"team": "One", "super_over": True, "overs": [{"over": 0, "deliveries": [delivery(6)]}]})
    found = archive_of(tmp_path / "data", one, two)
    assert len(found.balls) == 4
    assert len(found.innings) == 4


@pytest.mark.parametrize("text", ["{", "[]", '{"meta": {"data_version": "0.9"}}', "{}"])
def test_open_archive_invalid_match_error_names_match(tmp_path, text):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "17.json").write_text(text)
    with pytest.raises(ConfigError, match="match 17"):
        open_archive(tmp_path / "data", tmp_path / "cache")


def test_open_archive_bad_zip_or_missing_file_raises(tmp_path):
    (tmp_path / "x.zip").write_text("no zip")
    with pytest.raises(ConfigError, match="not a readable zip"):
        open_archive(tmp_path / "x.zip", tmp_path / "cache")
    with pytest.raises(ConfigError, match=r"cricsheet\.org"):
        open_archive(tmp_path / "nothing.zip", tmp_path / "cache")


# -------------------------------------------------------------------------------------------------------------- leakage


def shuffled_future(data, innings, place, seed):
    """Copy a match; change all deliveries from `place` on and the result of the match.

    The batters and the bowler of the delivery at `place` are known before it and stay unchanged.
    """
    data = copy.deepcopy(data)
    balls = [ball for over in data["innings"][innings]["overs"] for ball in over["deliveries"]]
    order = RandomStream(seed, "test.future").permutation(0, len(balls) - place).numpy() + place
    future = [copy.deepcopy(balls[int(number)]) for number in order]
    known = {name: balls[place][name] for name in ("batter", "non_striker", "bowler")}
    for ball, other in zip(balls[place:], future, strict=True):
        ball.clear()
        ball.update(other | {"runs": {"batter": 6, "extras": 0, "total": 6}, "batter": f"New {seed}"})
    balls[place].update(known)
    data["info"]["outcome"] = {"winner": data["info"]["teams"][seed % 2]}
    return data


@pytest.mark.parametrize("innings", [0, 1])
def test_inputs_do_not_change_when_future_deliveries_change(tmp_path, innings):
    write_matches(tmp_path / "made-up.zip", 20)
    with zipfile.ZipFile(tmp_path / "made-up.zip") as file:
        matches = {name: json.loads(file.read(name)) for name in file.namelist()}
    common = {"target": "score", "min_name_count": 10**6, "cache_dir": str(tmp_path / "cache")}
    plain = build(data=str(tmp_path / "made-up.zip"), **common)
    # Use a match of the test split, which does not affect vocabularies and scalers.
    chosen = int(plain.matches["test"][0])
    name = sorted(matches)[chosen]  # synthetic matches are numbered by date
    count = sum(len(over["deliveries"]) for over in matches[name]["innings"][innings]["overs"])
    for place in (1, count // 3, count * 4 // 5):
        changed = {**matches, name: shuffled_future(matches[name], innings, place, place)}
        with zipfile.ZipFile(tmp_path / f"{place}.zip", "w") as file:
            for each, data in changed.items():
                file.writestr(each, json.dumps(data))
        other = build(data=str(tmp_path / f"{place}.zip"), **common)
        first = plain.archive.innings[(plain.archive.innings[:, 2] == chosen), 0][innings]
        rows = [int(np.flatnonzero(task.examples["test"] == first + place)[0]) for task in (plain, other)]
        before, after = (task.read("test", np.array([row])) for task, row in zip((plain, other), rows, strict=True))
        assert before["target"] != after["target"]  # the future has changed
        old, new = named_leaves(before["inputs"]), named_leaves(after["inputs"])
        assert old.keys() == new.keys()
        assert [key for key in old if not torch.equal(old[key], new[key])] == []


def test_inputs_contain_all_previous_deliveries(tmp_path):
    task = build(num_synthetic_matches=20, cache_dir=str(tmp_path))
    here = task.read("test", np.array([50, 51]))["inputs"]["nodes"]["ball"]
    assert here["count"].tolist() == [51, 52]
    assert not torch.equal(here["x"][0], here["x"][1])


@pytest.mark.parametrize("split", ["random", "time"])
@pytest.mark.parametrize("predict", ["score", "win"])
def test_splits_share_no_match(tmp_path, split, predict):
    task = build(num_synthetic_matches=60, split=split, target=predict, cache_dir=str(tmp_path))
    of = {name: set(task.archive.innings[task.archive.innings_of[task.examples[name]], 2]) for name in SPLITS}
    assert not of["train"] & of["validation"]
    assert not of["train"] & of["test"]
    assert not of["validation"] & of["test"]
    assert sum(map(len, of.values())) == (60 if predict == "score" else (task.archive.matches[:, 1] >= 0).sum())
    if split == "time":
        assert max(of["train"]) < min(of["validation"]) <= max(of["validation"]) < min(of["test"])


def test_vocabulary_and_scalers_come_from_training_split_only(tmp_path):
    task = build(num_synthetic_matches=40, split="time", min_name_count=1, cache_dir=str(tmp_path))
    known = task._names["player"]
    trained = np.isin(task.archive.innings[:, 2], task.matches["train"])
    seen = set(np.unique(task.archive.players[trained])) - {0}
    assert {number for number, mine in enumerate(known) if mine} == seen
    features = task.read("train", np.arange(task.count("train")))["inputs"]["nodes"]["now"]["x"][:, 0]
    torch.testing.assert_close(features.mean(0), torch.zeros(len(FEATURES)), atol=1e-4, rtol=0)


def test_train_stride_leaves_validation_and_test_unchanged(tmp_path):
    whole, thin = (build(num_synthetic_matches=20, train_stride=n, cache_dir=str(tmp_path)) for n in (1, 5))
    assert thin.count("train") == pytest.approx(whole.count("train") / 5, rel=0.05)
    assert [thin.count(split) for split in SPLITS[1:]] == [whole.count(split) for split in SPLITS[1:]]


# -------------------------------------------------------------------------------------------------------------- cache


def made_once(cache):
    """Build the dataset on one of several processes; return how often this process read the matches."""
    read, count = cricsheet._read, []
    cricsheet._read = lambda *arguments: count.append(1) or read(*arguments)
    build(num_synthetic_matches=20, cache_dir=cache)
    return len(count)


@pytest.mark.distributed
def test_concurrent_builds_read_matches_once(tmp_path):
    assert sum(together(made_once, 3, str(tmp_path))) == 1
    assert not list(tmp_path.glob(".cricket-*/"))  # no partial files are left


def test_load_shared_state_of_other_data_raises(tmp_path):
    one, other = (
        build(num_synthetic_matches=20, cache_dir=str(tmp_path)),
        build(num_synthetic_matches=21, cache_dir=str(tmp_path)),
    )
    one.load_shared_state(one.shared_state())
    with pytest.raises(ConfigError, match="not the data that this run was started with"):
        one.load_shared_state(other.shared_state())


def test_synthetic_matches_are_deterministic(tmp_path):
    for name in ("a.zip", "b.zip"):
        write_matches(tmp_path / name, 3)
    assert (tmp_path / "a.zip").read_bytes() == (tmp_path / "b.zip").read_bytes()


# ---------------------------------------------------------------------------------------------------------- real data


@pytest.mark.slow
@pytest.mark.skipif(not REAL.exists(), reason="the Cricsheet archive is not available")
def test_real_archive_has_expected_counts(tmp_path):
    task = build(data=str(REAL), cache_dir=str(tmp_path))
    assert len(task.archive.matches) == 3046
    assert len(task.archive.balls) == 686_973
    assert (task.archive.matches[:, 1] >= 0).sum() == 2836
    assert {split: len(matches) for split, matches in task.matches.items()} == {
        "train": 2437,
        "validation": 304,
        "test": 305,
    }
