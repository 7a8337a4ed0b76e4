"""HTML report: curve calculations, reading of run directories, and escaping of untrusted text."""

import json
import math
import os
import re
import subprocess
import sys
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st
from markupsafe import Markup

from helpers.run_fixtures import CONFIG, line, lines, write_run
from lockstep.cli import main
from lockstep.cli.prove import RunRecord, Verification, record
from lockstep.config import ConfigError
from lockstep.fork_record import ForkRecord
from lockstep.tools.report import consistency, sections
from lockstep.tools.report.charts import Reference, _reference_curve
from lockstep.tools.report.html import text
from lockstep.tools.report.metrics_log import read_log
from lockstep.tools.report.page import write_page
from lockstep.tools.report.reference_curves import ReferencePoint
from lockstep.tools.report.run_data import differences, group, read_run, read_runs
from lockstep.tools.report.series import (
    Point,
    downsample,
    format_number,
    format_tick,
    format_ticks,
    log_ticks,
    pad_range,
    robust_range,
    round_ticks,
    seed_curve,
)
from lockstep.tools.report.svg_chart import SMALL, Curve, draw

EVIL = "<script>window.pwned=1</script>\"'><img src=x onerror=window.pwned=2>"


class Page(HTMLParser):
    """Elements of a page with their attributes and text."""

    def __init__(self, page):
        super().__init__()
        self.elements, self.texts = [], []
        self.feed(page)

    def handle_starttag(self, name, attributes):
        self.elements.append((name, dict(attributes)))

    def handle_data(self, words):
        self.texts.append(words)

    def names(self):
        return {name for name, _ in self.elements}


def page_of(*paths, **extras):
    return write_page(read_runs(paths), **extras)


@pytest.fixture
def run(tmp_path):
    return write_run(tmp_path / "run")


# --------------------------------------------------------------------------------------------------- curve calculations


def test_downsample_short_curve_is_unchanged():
    assert downsample([1, 2], [5, 7], 2) == [Point(1, 5, 5, 5), Point(2, 7, 7, 7)]


def test_downsample_long_curve_averages_neighbors_and_keeps_range():
    assert downsample([1, 2, 3, 4, 5], [0, 10, 4, 6, 9], 3) == [
        Point(1.5, 5, 0, 10),
        Point(3.5, 5, 4, 6),
        Point(5, 9, 9, 9),
    ]


@given(st.lists(st.floats(-1e50, 1e50), min_size=1, max_size=300), st.integers(1, 50))
def test_downsample_keeps_minimum_and_maximum(values, limit):
    marks = downsample(range(len(values)), values, limit)
    assert len(marks) <= limit
    assert min(mark.low for mark in marks) == min(values)
    assert max(mark.high for mark in marks) == max(values)


def test_seed_curve_interpolates_where_all_seeds_have_points():
    one = downsample([0, 10, 20], [0, 10, 20], 9)
    other = downsample([5, 15], [15, 25], 9)
    # With two seeds, the interquartile mean is their mean, and the interval is from the lower to the higher seed.
    assert seed_curve([one, other], 9) == [Point(5, 10, 5, 15), Point(10, 15, 10, 20), Point(15, 20, 15, 25)]


def test_seed_curve_of_many_seeds_drops_outliers():
    curve = seed_curve([[[0, score]] for score in (1.0, 2.0, 3.0, 4.0, 1000.0)], 9)
    assert curve[0].y == 3.0
    assert 1.0 <= curve[0].low < 3.0 < curve[0].high < 1000.0


def test_seed_curve_of_seeds_without_overlap_is_empty():
    assert seed_curve([downsample([0, 1], [0, 1], 9), downsample([2, 3], [2, 3], 9)], 9) == []
    assert seed_curve([[], downsample([2, 3], [2, 3], 9)], 9) == []


def test_seed_curve_respects_point_limit_and_keeps_both_ends():
    curve = downsample(range(100), range(100), 100)
    marks = seed_curve([curve, curve], 10)
    assert len(marks) == 10
    assert (marks[0].x, marks[-1].x) == (0, 99)


@pytest.mark.parametrize(
    ("low", "high", "count", "ticks"),
    [
        (0, 525, 6, [0, 100, 200, 300, 400, 500]),
        (-0.013, 0.006, 4, [-0.01, -0.005, 0, 0.005]),
        (0, 60_160, 4, [0, 20_000, 40_000, 60_000]),
        (13.8, 13.9, 4, [13.80, 13.85, 13.90]),
    ],
)
def test_round_ticks_are_round_numbers(low, high, count, ticks):
    assert round_ticks(low, high, count) == pytest.approx(ticks)


@given(st.floats(-1e50, 1e50), st.floats(1e-9, 1e50), st.integers(2, 6))
def test_format_ticks_are_distinct(low, room, count):
    low, high = pad_range(low, low + room)
    words = format_ticks(round_ticks(low, high, count))
    assert len(set(words)) == len(words)


def test_format_ticks_have_the_necessary_digits():
    assert format_ticks([0, 100, 200]) == ["0", "100", "200"]
    assert format_ticks([12.25, 12.5, 12.75]) == ["12.25", "12.5", "12.75"]
    assert format_ticks([1.09855, 1.0986, 1.09865]) == ["1.09855", "1.0986", "1.09865"]
    assert format_ticks([-0.0002, -0.0001, 0]) == ["-2e-4", "-1e-4", "0"]
    assert format_ticks([20_000, 40_000]) == ["20k", "40k"]


def test_log_ticks_gives_powers_of_ten():
    assert log_ticks(0.02, 30) == pytest.approx([0.01, 0.1, 1, 10, 100])
    assert log_ticks(0.002, 30) == pytest.approx([0.001, 0.1, 10, 1000])  # few enough to be readable


def test_robust_range_limits_the_effect_of_outliers():
    values = [float(n) for n in range(100)]
    assert robust_range(values) == (0, 99)
    assert robust_range([*values, -1e6]) == (
        -92,
        99,
    )  # 3 outermost of 101 values; 2 - 94, the width of the rest
    assert robust_range([5.0, 7.0, 1e9]) == (5, 1e9)  # too few values


def test_pad_range_centers_flat_line_and_includes_zero_if_near():
    assert pad_range(5, 5) == (4.5, 5.5)
    assert pad_range(0, 0) == (-1, 1)
    assert pad_range(10, 100)[0] == 0
    assert pad_range(90, 100) == (89.5, 100.5)


@pytest.mark.parametrize(
    ("value", "axis", "shown"),
    [
        (0.0, "0", "0"),
        (12_000.0, "12k", "12,000"),
        (1.5e6, "1.5M", "1,500,000"),
        (0.002, "0.002", "0.002"),
        (1e-6, "1e-6", "1.000e-06"),
        (498.5, "498.5", "498.5"),
        (-0.07594566, "-0.07595", "-0.07595"),
        (math.nan, None, "not a number"),
        (math.inf, None, "∞"),
    ],
)
def test_short_and_figure_format_numbers_for_reading(value, axis, shown):
    assert axis is None or format_tick(value) == axis
    assert format_number(value) == shown


wild = st.floats(-1e100, 1e100)


@given(st.lists(st.tuples(st.floats(0, 1e100), wild), min_size=1, max_size=30), st.booleans())
def test_draw_any_values_gives_finite_coordinates(places, log):
    places.sort()
    marks = downsample([x for x, _ in places], [y for _, y in places], 10)
    svg = draw([Curve("a", marks, "c0"), Curve("b", marks[:1], "c1", thin_lines=[marks])], "words", SMALL, log=log)
    assert not re.search(r"\b(nan|inf)", re.sub(r"<title>.*?</title>", "", svg, flags=re.S))
    for number in re.findall(r" (?:x|y|cx|cy|x1|x2|y1|y2|width)='([^']*)'", svg):
        assert -100 <= float(number) <= 600


# --------------------------------------------------------------------------------------------------------- reading runs


def test_read_log_gives_series_speed_shares_and_evaluations(run):
    log = read_log(run / "metrics.jsonl")
    assert list(log.series["eval/return_mean"].x) == [1000, 2000, 3000, 4000]
    assert list(log.series["eval/return_mean"].y) == [100, 200, 300, 400]
    # 500 samples/s in all; 5 % of the time are evaluations, which the training speed skips.
    assert (log.samples, log.seconds, log.speed) == pytest.approx((4000, 8.0, 500.0 / 0.95))
    assert log.shares == pytest.approx({"env": 0.25, "learn": 0.5, "evaluate": 0.05, "other": 0.2})
    assert (
        log.last
        == log.best
        == {"samples": 4000, "return_mean": 400, "return_std": 4, "length_mean": 20, "episodes": 32}
    )


def test_read_log_best_evaluation_ignores_nan_and_keeps_first(tmp_path):
    told = [
        line(n, eval__return_mean=value) for n, value in enumerate([float("nan"), 1.0, 5.0, 5.0, float("nan"), 2.0])
    ]
    run = read_run(write_run(tmp_path / "run", told), "run")
    assert (run.log.best["samples"], run.log.best["return_mean"]) == (2, 5.0)
    told = [line(1, eval__mae=9.0, eval__score=-9.0), line(2, eval__mae=4.0, eval__score=-4.0)]
    run = read_run(write_run(tmp_path / "other", told), "other")
    assert sections.headline(run.log.best) == ("mae", "4", "")


def test_read_log_skips_and_counts_invalid_lines_and_values(tmp_path):
    run = write_run(
        tmp_path / "run", [line(1, train__loss=1.0), line(2, train__loss=math.nan), line(3, train__loss=1e300)]
    )
    with (run / "metrics.jsonl").open("a") as file:
        file.write('[1]\n"x"\n{"samples": "4", "train/loss": 5}\n{"samples": -4, "train/loss": 5}\n')
        file.write('{"samples": 5, "train/loss": ' + "9" * 400 + "}\n{" + '"samples": 6, "train/lo')
    series = read_log(run / "metrics.jsonl").series["train/loss"]
    assert (list(series.x), list(series.y), series.skipped) == ([1], [1], 3)
    assert "3 values not drawn" in page_of(run)


def test_read_log_sorts_series_by_samples(tmp_path):
    run = write_run(tmp_path / "run", [line(3, a=30.0), line(1, a=10.0), line(2, a=20.0)])
    series = read_log(run / "metrics.jsonl").series["a"]
    assert (list(series.x), list(series.y)) == ([1, 2, 3], [10, 20, 30])


def test_group_joins_runs_that_differ_only_by_seed(tmp_path):
    other = CONFIG | {"algo": CONFIG["algo"] | {"learning_rate": 0.1}}
    paths = [write_run(tmp_path / f"s{seed}", seed=seed) for seed in (0, 1)] + [
        write_run(tmp_path / "fast", config=other)
    ]
    runs = read_runs(paths)
    assert [[run.label for run in each] for each in group(runs)] == [["s0", "s1"], ["fast"]]
    assert differences(runs) == ["algo.learning_rate", "run.seed"]
    page = page_of(*paths)
    assert "learning_rate 0.1" in page
    assert "mean of 2" in page


def test_read_runs_removes_duplicates_and_labels_same_names_by_path(tmp_path):
    one, other = write_run(tmp_path / "a" / "run"), write_run(tmp_path / "b" / "run")
    assert [run.label for run in read_runs([one, one])] == ["run"]
    assert [run.label for run in read_runs([one, other])] == [str(one), str(other)]


def test_read_run_lists_starts_of_the_lineage(tmp_path):
    claims = (
        {"parent": None, "processes": 2, "began": 1.7e9},
        {"parent": "000000000900-g0001"},  # wrote no checkpoint
        {"parent": "000000001000-g0001", "processes": 3, "began": 1.7e9 + 3600},
    )
    run = read_run(write_run(tmp_path / "run", claims=claims), "run")
    assert [(start.processes, start.samples) for start in run.starts] == [(2, 0), (3, 1000)]
    _, table = consistency.starts([run])
    assert "2023-11-14 22:13" in table.rows[0]
    assert "resumed at 1,000" in table.rows[1]


def test_read_run_with_cyclic_claims_terminates(tmp_path):
    claims = ({"parent": "000000000900-g0002"}, {"parent": "000000000900-g0001"}, {"parent": "9-g3"})
    assert [start.samples for start in read_run(write_run(tmp_path / "run", claims=claims), "run").starts] == [9]


@pytest.mark.parametrize(
    ("status", "last", "words"),
    [
        ({"processes": 2}, 2560.0, "in sync at update 2,560"),
        ({"processes": 2}, 0.0, "at the start"),
        ({"processes": 2}, None, "not in the log"),
        ({"processes": 1}, None, "nothing to compare"),
        ({"processes": 2, "state": "failed", "why": "ReplicaMismatchError: they differ"}, 64.0, "replicas differed"),
    ],
)
def test_consistency_checks_report_replica_check_result(tmp_path, status, last, words):
    told = [line(100, a=1.0) | ({} if last is None else {"sync/update": last})]
    run = read_run(write_run(tmp_path / "run", told, status=status), "run")
    assert words in str(consistency.checks([run]).rows)


@pytest.mark.parametrize(
    ("digests", "words"),
    [
        ({"digests": {"a": "1", "b": "2"}}, "1 times, of 2 tensors"),
        ({"agent": "1", "metrics": "2"}, "1 times, of the agent and its metrics"),
    ],
)
def test_consistency_checks_count_digests(run, digests, words):
    (run / "digests.jsonl").write_text(json.dumps({"samples": 1} | digests) + "\n")
    assert words in consistency.checks([read_run(run, "run")]).rows[0]


# ----------------------------------------------------------------------------------------------------------------- page


def test_page_has_all_sections_and_no_external_requests(run):
    page = page_of(run)
    found = Page(page)
    words = " ".join(found.texts)
    for part in (
        "Curves",
        "Evaluations",
        "Speed",
        "One agent",
        "Config",
        "Return of evaluations",
        "Time by phase",
    ):
        assert part in words
    assert "CartPole-v1" in words
    assert "gym-ppo" in words
    assert not found.names() & {"script", "iframe", "object", "form", "a", "base"}
    assert "default-src 'none'" in page
    links = [value for _, attributes in found.elements for key, value in attributes.items() if key in ("src", "href")]
    assert links == ["data:,"]
    assert not re.search(r"url\(|@import|https?://", page.replace("http://www.w3.org/2000/svg", ""))


def test_page_of_long_log_is_small(tmp_path):
    names = [f"train__quantity_{n}" for n in range(12)] + ["rollout__ep_return_mean", "time__global_fps"]
    told = [line(n, **{name: math.sin(n) + n for name in names}) for n in range(1, 10_001)]
    page = page_of(write_run(tmp_path / "run", told))
    assert len(page) < 400_000


def test_page_reference_is_drawn_up_to_the_last_evaluation(run, tmp_path):
    (tmp_path / "walker.csv").write_text("step,reward,seed\n0,10,1\n0,20,2\n9000,500,1\n9000,700,2\n90000,900,1\n")
    out = tmp_path / "r.html"
    words = [
        "report",
        str(run),
        "--out",
        str(out),
        "--reference",
        str(tmp_path / "walker.csv"),
        "--reference-steps-per-sample",
        "2",
    ]
    assert main(words) == 0
    told = [words for words in Page(out.read_text()).texts if "walker: " in words]
    assert told
    assert any("walker: 600 (500 to 700)" in words for words in told)
    assert not any("900" in words.partition("walker: ")[2] for words in told)


@pytest.mark.parametrize(
    ("steps", "line_from"), [((0, 9000), None), ((0, 2000, 4000, 8000), 1), ((2000, 4000, 6000, 8000), 0)]
)
def test_page_reference_shows_its_points_and_no_line_before_the_first(run, steps, line_from):
    points = [ReferencePoint(step, 100 + step / 100 + seed, str(seed)) for step in steps for seed in (0, 40)]
    page = page_of(run, reference=Reference("walker", points, 2.0))
    (drawn,) = re.findall(r"<g style='--c:var\(--muted\)'>(.*?)</g>", page, re.DOTALL)
    centers = [float(x) for x in re.findall(r"<circle cx='([\d.]+)'", drawn)]
    assert len(centers) == len(steps)
    assert drawn.count("class='range'") == len(steps)  # of its seeds
    starts = [float(x) for x in re.findall(r"class='line' d='M([\d.]+)", drawn)]
    assert starts == ([] if line_from is None else [pytest.approx(centers[line_from], abs=0.1)])


def test_page_long_reference_line_passes_through_its_own_points(run):
    points = [ReferencePoint(step, float(step % 2)) for step in range(3000)]
    curve = _reference_curve(Reference("walker", points, 1.0), 3000.0)
    assert len(curve.points) <= 240
    assert {point.y for point in curve.points} <= {0.0, 1.0}  # means of neighbors would be 0.5
    assert curve.points[-1].x == 2999


def test_page_embeds_gif_unless_too_large_invalid_or_linked(run, tmp_path):
    gif_bytes = b"GIF89a" + bytes(40)
    (run / "best.gif").write_bytes(gif_bytes)
    assert "data:image/gif;base64,R0lGODlh" in page_of(run)
    (run / "best.gif").write_bytes(gif_bytes + bytes(3_000_000))
    assert "more than the limit of 3,000,000" in page_of(run)
    (run / "best.gif").write_bytes(b"<script>")
    assert "is not a GIF" in page_of(run)
    (tmp_path / "private.gif").write_bytes(gif_bytes)
    (run / "best.gif").unlink()
    (run / "best.gif").symlink_to(tmp_path / "private.gif")
    page = page_of(run)
    assert "is a link" in page
    assert "data:image/gif" not in page


def bench(**changes):
    split = {"env": 0.1, "inference": 0.2, "learning": 0.4, "reduction": 0.05, "rest": 0.25}
    report = {"recipe": "gym-ppo", "processes": 2, "seconds": {"wall": 0.2}, "ratio_to_bare": 0.5, "split": split}
    return report | {"steps_per_second": 1000.0, "speedup": 1.0, "verdict": "learning-bound"} | changes


def test_page_shows_bench_report_of_run_directory(run):
    (run / "bench.json").write_text(json.dumps(bench()))
    page = page_of(run)
    assert "learning: 80.0 ms" in page
    assert "learning-bound" in page
    # Styles of the embedded plot must not affect the charts of the page.
    assert all(".bench text{" in style for style in re.findall(r"<style>(.*?)</style>", page, re.S)[1:])


@pytest.mark.parametrize(
    "changes",
    [{"split": {"x": 1}}, {"seconds": {"wall": 0}}, {"ratio_to_bare": math.nan}, {"split": 3}, {"processes": "2"}],
)
def test_page_skips_invalid_bench_report_with_message(run, changes):
    assert "was not written by lockstep bench" in page_of(run, bench=bench(**changes))
    assert "was not written by lockstep bench" in page_of(run, bench=[1])


def proof(*hashes, **changes):
    rows = [{"processes": str(n + 1), "event": "", "hash": value, "seconds": 1.0} for n, value in enumerate(hashes)]
    return {"recipe": "gym-ppo", "settings": ["--smoke"], "rows": rows, "verdict": "one agent"} | changes


def test_page_proof_verdict_is_computed_from_hashes(run):
    assert "One agent: 2 runs, one hash." in page_of(run, proof=proof("a" * 64, "a" * 64))
    for hashes in (("a" * 64, "b" * 64), ("a" * 64, ""), ()):
        assert "Not one agent." in page_of(run, proof=proof(*hashes))
    for other in ({}, [], {"rows": 3, "recipe": "a"}, {"rows": ["x"], "recipe": "a"}):
        assert "was not written by lockstep prove --json" in page_of(run, proof=other)


def test_page_shows_record_written_by_prove(run, tmp_path):
    rows = [
        RunRecord("1", "", "a" * 64, 1.0, run),
        RunRecord("2 → 1", "process 0 killed in mid-iteration", "a" * 64, 2.0, run),
    ]
    told = record(Verification("mine/my_recipe.py", ["--smoke", "run.total_samples=64"], tmp_path, 0, None, rows))
    (tmp_path / "proof.json").write_text(json.dumps(told))
    assert main(["report", str(run), "--proof", str(tmp_path / "proof.json"), "--out", str(tmp_path / "r.html")]) == 0
    words = " ".join(Page((tmp_path / "r.html").read_text()).texts)
    for part in (
        "One agent: 2 runs, one hash.",
        "2 → 1",
        "process 0 killed",
        "a" * 32,
        "my_recipe",
        "--smoke",
        "torch 2",
    ):
        assert part in words
    assert told["verdict"] == "one agent"
    rows[1] = RunRecord("2", "", "", 1.0, run, "it failed")
    assert record(Verification("r", [], tmp_path, 0, None, rows))["verdict"] == "not one agent"


# ------------------------------------------------------------------------------------------------------ untrusted input


def test_text_escapes_everything_except_markup():
    svg = draw([Curve('"<', [Point(0, 1, 1, 1)], "c0")], "<b>&'")
    assert "aria-label='&lt;b&gt;&amp;&#39;'" in svg
    assert "&#34;&lt;: 1</title>" in svg
    assert text("<b>") == "&lt;b&gt;"
    assert text(Markup("<b>")) == "<b>"
    assert text("a\x00b\u202ec\ud800") == "a�b�c�"
    assert text("x" * 400).endswith("x…")
    assert isinstance(text("a"), Markup)


def test_page_escapes_untrusted_text_everywhere(tmp_path):
    config = CONFIG | {
        "recipe": EVIL,
        "lockstep": EVIL,
        EVIL: EVIL,
        "task": {"id": EVIL, EVIL: [EVIL], "tasks": [EVIL]},
    }
    config["run"] = CONFIG["run"] | {
        "seed": EVIL,
        "reduction": EVIL,
        "replica_check_every": EVIL,
        "total_samples": EVIL,
    }
    names = {f"{part}/{EVIL}": 1.5 for part in ("train", "eval", "rollout", "time")}
    told = [line(n, eval__return_mean=1.0, eval__return_std=EVIL, train__loss=EVIL) | names for n in (1, 2)]
    status = {"state": EVIL, "why": EVIL, "processes": EVIL, "job": EVIL}
    claims = ({"parent": EVIL, "processes": EVIL, "began": EVIL, "host": EVIL},)
    paths = [
        write_run(tmp_path / f"{EVIL.replace('/', '')}{n}", told, config=config, status=status, claims=claims)
        for n in (0, 1)
    ]
    for path in paths:
        (path / "bench.json").write_text(json.dumps(bench(recipe=EVIL, verdict=EVIL)))
    proven = proof(EVIL, EVIL, recipe=EVIL, settings=[EVIL], date=EVIL, torch=EVIL)
    proven["rows"][0] |= {"event": EVIL, "problem": EVIL, "processes": EVIL}
    plain = Page(
        page_of(
            *[write_run(tmp_path / f"plain{n}", lines(n), seed=n) for n in (0, 1)], bench=bench(), proof=proof("a", "a")
        )
    )
    for shown in (paths, paths[:1]):
        found = Page(page_of(*shown, proof=proven))
        assert found.names() <= plain.names() | {"dl", "dt", "dd", "small", "br"}
        assert not [key for _, attributes in found.elements for key in attributes if key.startswith("on")]
        assert sum("window.pwned=1" in words for words in found.texts) > 10


def test_page_shows_any_config_value_or_says_it_is_too_long(tmp_path):
    run = write_run(tmp_path / "run")
    text = (
        "recipe: [1]\ntask: 3\nalgo: {a: 0x"
        + "f" * 9000
        + ", b: [[.nan, .inf], {c: 1}], d: 2020-01-01, e: !!binary aGk=}\n"
    )
    (run / "config.yaml").write_text(text + f"run: {{samples: 1{'0' * 500}, seed: .nan, long: {'x' * 5000}}}\n")
    page = page_of(run)
    assert "a number too long to show" in page
    assert "x" * 400 not in page
    assert "2020-01-01" in page


@pytest.mark.parametrize("name", ["metrics.jsonl", "config.yaml", "status.json", "digests.jsonl", "checkpoints"])
def test_read_run_with_symlink_in_run_directory_raises(run, tmp_path, name):
    if (run / name).exists():
        (run / name).rename(tmp_path / name)
    (run / name).symlink_to(tmp_path / name if (tmp_path / name).exists() else "/etc/hostname")
    with pytest.raises(ConfigError, match="is a link"):
        read_run(run, "run")


def test_page_of_run_with_minimal_files_is_written(tmp_path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("recipe: mine.py\n")
    (run / "metrics.jsonl").write_text('{"samples": 5, "train/loss": 2.0}\n')
    page = page_of(run)
    assert "The log has no evaluation." in page
    assert "mine" in page


# --------------------------------------------------------------------------------------------------------- command line


def test_report_prints_path_and_size(run, tmp_path, capsys):
    out = tmp_path / "out.html"
    assert main(["report", str(run), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"{out}: {out.stat().st_size / 1e3:,.0f} kB\n"


def test_report_invalid_arguments_exit_with_message(run, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    new = write_run(tmp_path / "new", told=[])
    no = tmp_path / "no"
    cases = {
        ("report", str(tmp_path / "empty")): "is not a run directory",
        ("report", str(new)): "has no metrics yet",
        ("report", str(run), "--out", str(tmp_path)): "is a directory",
        ("report", str(run), "--out", str(no / "a.html")): "cannot be written: No such file",
        ("report", str(run), "--proof", str(no)): "does not exist",
        ("report", str(run), "--bench", str(run / "config.yaml")): "is not json",
        ("report", str(run), "--gif", str(run / "config.yaml")): "is not a GIF",
        ("report", str(run), "--reference", str(no)): "cannot be read",
        (
            "report",
            str(run),
            "--reference",
            str(no),
            "--reference-steps-per-sample",
            "0",
        ): "--reference-steps-per-sample is 0",
    }
    for words, told in cases.items():
        assert main(words) == 2, words
        shown = capsys.readouterr().err
        assert told in shown
        assert "Traceback" not in shown


def test_report_does_not_import_torch_or_matplotlib(run, tmp_path):
    code = f"""
import sys
from lockstep.cli import main
from lockstep.cli.prove import Verification, RunRecord, record
code = main(["report", {str(run)!r}, "--out", {str(tmp_path / "o.html")!r}])
sys.exit(code or bool({{"torch", "matplotlib"}} & set(sys.modules)))
"""
    assert subprocess.run([sys.executable, "-c", code], env=os.environ | {"COLUMNS": "200"}).returncode == 0


def test_report_shows_parent_and_changed_settings_of_fork(tmp_path):
    claims = [{"parent": None, "began": 1.7e9}, {"parent": "000000000256-g0001", "processes": 2, "began": 1.7e9}]
    run = write_run(tmp_path / "run", claims=claims)
    (run / "checkpoints" / "000000000512-g0002").mkdir()
    changes = {"algo.note": ["<b>", EVIL]}
    (run / "fork.json").write_text(ForkRecord("/runs/base", "0" * 16, 256, "a" * 64, changes).to_json())
    page = write_page(read_runs([run]))
    assert "run: fork of base at 256 samples (/runs/base was deleted or moved): algo.note &lt;b&gt; -&gt;" in page
    assert "forked at 256" in page
    assert EVIL not in page
    (run / "fork.json").write_text("{}")
    assert "The parent of run is not shown" in write_page(read_runs([run]))


# ------------------------------------------------------------------------------------------------------- process-hours


def hours(used, lost):
    start = {"used": used, "lost": lost, "processes": 2, "generation": 3, "seconds": 1800.0, "saves": []}
    return {"state": "finished", "processes": 2, "process_hours": {"used": 0, "lost": 0, "newest_start": start}}


def test_report_has_process_hours_and_dollars(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "one", status=hours(3 * 3600.0, 1800.0))
    write_run(tmp_path / "two", seed=1, status=hours(3600.0, 0.0))
    assert main(["report", "one", "--price", "2.10"]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "0.5 of them lost to restarts" in page
    assert "$8.40" in page  # 3 hours, and 2 processes for half an hour
    assert "$1.05 of it lost, at $2.10 an hour" in page
    assert main(["report", "one", "two", "--price", "2.10"]) == 0
    assert "$12.60" in (tmp_path / "report.html").read_text()
    assert main(["report", "two"]) == 0
    page = (tmp_path / "report.html").read_text()
    assert "none lost to restarts" in page
    assert "$" not in "".join(Page(page).texts)


def test_report_price_must_be_a_price(tmp_path, capsys):
    assert main(["report", str(write_run(tmp_path / "one")), "--price", "nan"]) == 2
    assert "--price is nan" in capsys.readouterr().err
