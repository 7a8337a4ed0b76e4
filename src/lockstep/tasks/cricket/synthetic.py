"""Synthetic T20 matches in Cricsheet's JSON form, for tests and for first runs without data."""

import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.rng import RandomStream

TEAMS, SQUAD = 8, 11
SCORES = (0, 1, 2, 3, 4, 6)
PROBABILITIES = np.array([0.36, 0.38, 0.07, 0.01, 0.12, 0.06])
SKILL = np.array([-0.35, -0.05, 0.05, 0.05, 0.2, 0.3])
"""How much more often a skilled batter makes each score."""


def write_matches(path: Path, matches: int, seed: int = 0) -> None:
    """Write a zip of synthetic matches; equal arguments give equal bytes."""
    stream = RandomStream(seed, "cricket.made_up")
    skill = stream.normal(0, TEAMS, SQUAD).numpy() * 0.5
    with zipfile.ZipFile(path, "w") as archive:
        for number in range(matches):
            match = _match(number, stream.generator(1 + number), skill)
            archive.writestr(zipfile.ZipInfo(f"{100000 + number}.json"), json.dumps(match))


def _match(number: int, rng: np.random.Generator, skill: np.ndarray) -> dict[str, Any]:
    first, second = (int(team) for team in rng.permutation(TEAMS)[:2])
    one = _innings(rng, first, second, skill, None)
    first_runs = _runs(one)
    two = _innings(rng, second, first, skill, first_runs + 1) | {"target": {"overs": 20, "runs": first_runs + 1}}
    second_runs = _runs(two)
    winner = second if second_runs > first_runs else first
    outcome = {"result": "tie"} if second_runs == first_runs else {"winner": _team(winner)}
    return {
        "meta": {"data_version": ("1.0.0", "1.1.0")[number % 2], "created": "2020-01-01", "revision": 1},
        "info": {
            "dates": [f"{2010 + number // 300}-{1 + number // 25 % 12:02d}-{1 + number % 25:02d}"],
            "overs": 20,
            "outcome": outcome,
            "teams": [_team(first), _team(second)],
            "venue": f"Ground {int(rng.integers(5))}",
        },
        "innings": [one, two],
    }


def _innings(
    rng: np.random.Generator, batting: int, bowling: int, skill: np.ndarray, target: int | None
) -> dict[str, Any]:
    """Simulate twenty overs, or until ten are out or the target is reached."""
    striker, partner, out, runs, overs = 0, 1, 0, 0, []
    for over in range(20):
        bowler = 6 + over % 5
        balls: list[dict[str, Any]] = []
        legal = 0
        while legal < 6 and out < 10 and (target is None or runs < target):
            ball: dict[str, Any] = {
                "batter": _player(batting, striker),
                "bowler": _player(bowling, bowler),
                "non_striker": _player(batting, partner),
            }
            edge = 1.0 + SKILL * (skill[batting, striker] - skill[bowling, bowler]) * (1.0 + over / 20)
            odds = np.maximum(PROBABILITIES * edge, 0.005)
            event, scored = rng.random(), int(rng.choice(SCORES, p=odds / odds.sum()))
            extras = {"wides": 1} if event > 0.96 else {"legbyes": 1} if event > 0.94 else {}
            bat = 0 if extras else scored
            total = bat + sum(extras.values())
            balls.append(ball | {"runs": {"batter": bat, "extras": total - bat, "total": total}})
            balls[-1] |= {"extras": extras} if extras else {}
            runs, legal = runs + total, legal + ("wides" not in extras)
            if event < 0.05:
                balls[-1]["wickets"] = [{"kind": "bowled", "player_out": ball["batter"]}]
                out += 1
                striker = min(out + 1, SQUAD - 1)
            elif bat % 2:
                striker, partner = partner, striker
        if balls:
            overs.append({"over": over, "deliveries": balls})
        striker, partner = partner, striker
    return {"team": _team(batting), "overs": overs}


def _runs(innings: dict[str, Any]) -> int:
    return sum(ball["runs"]["total"] for over in innings["overs"] for ball in over["deliveries"])


def _team(number: int) -> str:
    return f"Team {chr(ord('A') + number)}"


def _player(team: int, number: int) -> str:
    return f"{chr(ord('A') + team)}{number} Player"
