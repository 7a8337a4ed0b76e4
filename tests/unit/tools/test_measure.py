"""Benchmark measurement: report totals, benchmark ops without side effects, verdicts and plots."""

import itertools
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from helpers.tiny_recipes import ITERATION, SETTINGS, tiny
from lockstep.config import apply_overrides
from lockstep.distributed import FusedAdam, Runtime
from lockstep.registry import RECIPES, find_recipe
from lockstep.tools.bench.measure import (
    BATCH_DIVISOR,
    IterationTimer,
    contention_and_jitter,
    measure,
    saved_bytes,
    time_contention,
    time_reductions,
    verdict,
)
from lockstep.tools.bench.plots import COLORS, draw

PARTS = ["env", "inference", "learning", "reduction", "rest"]


@pytest.fixture(scope="module")
def recipe():
    return tiny(Path("nowhere"))


@pytest.fixture(scope="module")
def report(recipe):
    return measure(recipe, Runtime.single_process(recipe.run), seconds=0.1, rounds=2)


@pytest.fixture
def meter(recipe):
    return IterationTimer(recipe, Runtime.single_process(recipe.run))


def state_of(meter):
    return {name: tensor.detach().clone() for name, tensor in meter.algorithm.shared_state().items()}


def boards_of(meter):
    return [meter.task.lane_state(lane) for lane in meter.runtime.lanes.local]


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


# --------------------------------------------------------------------------------------------------------------- report


def test_measurement_starts_when_learning_has_started():
    kind = find_recipe("gym-ddpg")
    recipe = apply_overrides(kind(), dict(kind.smoke_overrides) | {"algo.learning_starts": 256})
    timer = IterationTimer(recipe, Runtime.single_process(recipe.run))
    (learning,) = (op for op in timer.ops() if op.kind == "learning")
    before = timer.algorithm.updates
    timer.iterate()
    assert before > 0
    assert timer.algorithm.updates - before == learning.calls_per_iteration


def test_measure_report_describes_the_run(report, recipe):
    assert report["recipe"] == "snake-ppo"
    assert report["processes"] == 1
    assert report["precision"] == "fp32"
    assert report["samples_per_iteration"] == ITERATION
    assert report["rounds"] >= 2
    assert report["config"]["algo"]["batch_size"] == recipe.algo.batch_size


def test_measure_split_sums_to_one(report):
    assert list(report["split"]) == PARTS
    assert all(share >= 0 for share in report["split"].values())
    assert sum(report["split"].values()) == pytest.approx(1.0)
    assert all(report["split"][part] > 0 for part in ("env", "inference", "learning"))


def test_measure_speed_and_ratio_to_bare_follow_from_seconds(report):
    seconds = report["seconds"]
    assert report["steps_per_second"] == ITERATION / seconds["wall"]
    bare = seconds["env"] + seconds["inference"] + seconds["learning"]
    assert report["ratio_to_bare"] == pytest.approx(bare / seconds["iteration"])


def test_measure_parameters_match_network(report, meter):
    assert report["parameters"] == sum(parameter.numel() for parameter in meter.algorithm.net.parameters())


def test_measure_update_time_splits_into_fixed_and_per_sample(report):
    learning, updates = report["learning"], 2
    assert learning["fixed_seconds"] >= 0
    assert learning["seconds_per_sample"] >= 0
    whole = learning["fixed_seconds"] + learning["seconds_per_sample"] * SETTINGS["algo"]["batch_size"]
    assert whole == pytest.approx(report["seconds"]["learning"] / updates)


def test_measure_with_zero_seconds_runs_the_requested_rounds(recipe):
    assert measure(recipe, Runtime.single_process(recipe.run), seconds=0.0, rounds=3)["rounds"] == 3


@pytest.mark.parametrize("name", RECIPES)
def test_measure_works_for_every_recipe(name):
    kind = find_recipe(name)
    recipe = apply_overrides(kind(), kind.smoke_overrides)
    found = measure(recipe, Runtime.single_process(recipe.run), seconds=0.0, rounds=1)
    assert found["samples_per_iteration"] == recipe.algo.samples_per_iteration(recipe.task)
    assert found["steps_per_second"] > 0
    assert "-bound" in verdict(found)


def test_iteration_timer_with_some_lanes_measures_that_share(recipe):
    meter = IterationTimer(recipe, Runtime.single_process(recipe.run, hosting=range(2)))
    works = {work.kind: work for work in meter.algorithm.benchmark_ops()}
    assert meter.task.num_envs == works["env"].samples == works["inference"].samples == 16 * 2 // 8
    assert works["learning"].samples == 64 * 2 // 8


def test_time_reductions_returns_seconds_per_byte_size(recipe):
    timed = time_reductions(Runtime.single_process(recipe.run), times=2)
    assert list(timed) == ["64", "65536", "1048576", "4194304"]
    assert all(seconds > 0 for seconds in timed.values())


# --------------------------------------------------------------------------------------------------------------- engine


def test_time_contention_returns_requested_number_of_pairs(meter):
    pairs = time_contention(meter, times=3)
    assert len(pairs) == 3
    assert all(seconds > 0 for pair in pairs for seconds in pair)


def test_contention_is_ratio_of_means_and_at_least_one():
    assert contention_and_jitter([(1.0, 9.0), (3.0, 3.0)]) == (3.0, [0.5, 1.5])
    assert contention_and_jitter([(2.0, 1.0)]) == (1.0, [1.0])


def test_benchmark_ops_match_one_iteration(meter):
    works = meter.algorithm.benchmark_ops()
    assert [(work.kind, work.samples, work.calls_per_iteration, work.batch_divisor) for work in works] == [
        ("env", 16, 8, 1),
        ("inference", 16, 8, 1),
        ("learning", 64, 2, 1),
    ]


def test_benchmark_ops_with_batch_divisor_shrink_batches(meter):
    works = meter.algorithm.benchmark_ops(BATCH_DIVISOR)
    assert [(work.kind, work.samples, work.batch_divisor) for work in works] == [
        ("inference", 16 // BATCH_DIVISOR, BATCH_DIVISOR),
        ("learning", 64 // BATCH_DIVISOR, BATCH_DIVISOR),
    ]


def test_benchmark_op_env_steps_all_environments(meter):
    env = meter.algorithm.benchmark_ops()[0]
    before = boards_of(meter)
    env.run()
    for was, now in zip(before, boards_of(meter), strict=True):
        moved = (was["planes"] != now["planes"]).flatten(1).any(1)
        assert moved.all()  # a snake moves or restarts in the middle


def test_benchmark_ops_leave_agent_and_optimizer_unchanged(meter):
    before, gradient = state_of(meter), meter.algorithm.optimizer.gradient.flat.clone()
    updates = meter.algorithm.updates
    for work in [*meter.algorithm.benchmark_ops(), *meter.algorithm.benchmark_ops(BATCH_DIVISOR)]:
        work.run()
        work.run()
    assert same(state_of(meter), before)
    assert torch.equal(meter.algorithm.optimizer.gradient.flat, gradient)
    assert meter.algorithm.updates == updates


def test_benchmark_op_learning_runs_backward_and_optimizer_step(meter, monkeypatch):
    (learning,) = (work for work in meter.algorithm.benchmark_ops() if work.kind == "learning")
    stepped, step = [], FusedAdam.step

    def watched(self):
        gradients = [parameter.grad for group in self.param_groups for parameter in group["params"]]
        stepped.append(sum(gradient.numel() for gradient in gradients if gradient.any()))
        return step(self)

    monkeypatch.setattr(FusedAdam, "step", watched)
    learning.run()
    assert stepped == [meter.parameters]


def test_training_continues_after_benchmark_ops(meter):
    for work in meter.algorithm.benchmark_ops():
        work.run()
    before, updates = state_of(meter), meter.algorithm.updates
    meter.iterate()
    after = state_of(meter)
    assert meter.algorithm.updates == updates + 2
    assert not torch.equal(after["net.policy_head.weight"], before["net.policy_head.weight"])
    assert all(tensor.isfinite().all() for tensor in after.values())


def test_benchmark_ops_do_not_change_later_training(recipe):
    def learned(disturbed):
        meter = IterationTimer(recipe, Runtime.single_process(recipe.run))
        for work in meter.algorithm.benchmark_ops() if disturbed else ():
            if work.kind != "env":  # stepping the environments changes the rollout
                work.run()
        meter.iterate()
        return state_of(meter)

    assert same(learned(disturbed=True), learned(disturbed=False))


# --------------------------------------------------------------------------------------------------------------- memory


def test_saved_bytes_counts_tensors_saved_for_backward():
    second = torch.nn.Linear(5, 2, bias=False)
    net = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Tanh(), second, torch.nn.Tanh())
    obs = torch.ones(7, 3)
    # The input and the outputs of both activations, which the following layers share.
    activations = 4 * 7 * (3 + 5 + 2)
    assert saved_bytes(lambda: net(obs).sum().backward()) == activations


def test_saved_bytes_scales_with_samples_and_counts_storage_once():
    def work(count):
        x = torch.ones(count, 4, requires_grad=True)
        return saved_bytes(lambda: (x.exp() * x.detach()).sum().backward())

    # A storage is counted once however often it is saved: x.exp() saves its result, the product its factors.
    assert work(8) == 2 * 8 * 4 * 4
    assert work(16) == 2 * work(8)


def test_saved_bytes_without_grad_is_zero():
    net = torch.nn.Linear(3, 5)
    with torch.no_grad():
        assert saved_bytes(lambda: net(torch.ones(7, 3))) == 0


# -------------------------------------------------------------------------------------------------------------- verdict


def verdict_for(processes=1, batch=64, fixed=0.001, per_sample=0.001, gain=1.0, **split):
    shares = dict.fromkeys(PARTS, 0.0) | split
    return verdict(
        {
            "split": shares,
            "processes": processes,
            "learning": {"fixed_seconds": fixed, "seconds_per_sample": per_sample},
            "bf16_gain": gain,
            "config": {"algo": {"batch_size": batch}},
        }
    )


@pytest.mark.parametrize(
    ("split", "words"),
    [
        ({"env": 0.7, "rest": 0.3}, "env-bound (70% of the time): more processes help while each has its own core"),
        ({"inference": 0.6, "learning": 0.4}, "inference-bound (60% of the time): more environments"),
        ({"reduction": 0.5, "learning": 0.3, "rest": 0.2}, "reduction-bound (50% of the time): larger batches"),
        ({"rest": 0.4, "learning": 0.35, "env": 0.25}, "overhead-bound: 40% of the time is neither"),
        ({"loading": 0.6, "learning": 0.4}, "loading-bound (60% of the time): --algo.num-workers N"),
        ({"learning": 0.8, "env": 0.2}, "learning-bound (80% of the time): more processes help until about 64"),
    ],
)
def test_verdict_names_the_largest_part(split, words):
    assert verdict_for(**split).startswith(words)


def test_verdict_learning_limit_matches_hand_calculation():
    # 2 ms fixed and 0.5 ms per sample: fixed time equals the work on 4 samples, so 128 / 4 = 32 processes.
    words = verdict_for(batch=128, fixed=0.002, per_sample=0.0005, learning=1.0)
    assert "until about 32, where an update's fixed time (2 ms) is as long as its work on 4 samples" in words


def test_verdict_learning_limit_does_not_depend_on_process_count():
    numbers = {"batch": 128, "fixed": 0.002, "per_sample": 0.0005, "learning": 1.0}
    assert verdict_for(processes=4, **numbers) == verdict_for(processes=1, **numbers)


def test_verdict_all_fixed_update_advises_larger_batches():
    assert "larger batches help more than more processes" in verdict_for(per_sample=0.0, learning=1.0)


def test_verdict_without_fixed_time_is_learning_bound():
    assert verdict_for(fixed=0.0, learning=1.0).startswith("learning-bound (100% of the time)")


def test_verdict_advises_bf16_only_if_learning_bound_and_faster():
    advice = "In bf16 the bare work of an update is 2.4 times as fast: try --run.precision bf16."
    assert verdict_for(learning=1.0, gain=2.4).endswith(advice)
    assert "bf16" not in verdict_for(learning=1.0, gain=1.2)
    assert "bf16" not in verdict_for(env=1.0, gain=2.4)


def test_measure_bf16_gain_is_one_for_bf16_run(recipe, report):
    assert report["bf16_gain"] > 0.0
    half = apply_overrides(recipe, {"run.precision": "bf16"})
    runtime = Runtime.single_process(half.run)
    assert measure(half, runtime, seconds=0.0, rounds=1)["bf16_gain"] == 1.0
    assert runtime.autocast_dtype == torch.bfloat16


def test_seconds_in_half_restores_precision(meter):
    seen = []
    meter.seconds_in_half(lambda: seen.append(meter.runtime.autocast_dtype))
    assert seen == [torch.bfloat16]
    assert meter.runtime.autocast_dtype is None


def test_measure_dataset_recipe_reports_loading_instead_of_env():
    recipe = apply_overrides(find_recipe("cricket-gnn")(), dict(find_recipe("cricket-gnn").smoke_overrides))
    report = measure(recipe, Runtime.single_process(recipe.run), seconds=0.1, rounds=2)
    assert list(report["split"]) == ["loading", "learning", "reduction", "rest"]
    assert report["split"]["loading"] > 0
    assert "loading:" in draw([report])


def test_verdict_of_measured_report_is_known(report):
    assert verdict(report).split("-bound")[0] in ("env", "inference", "learning", "reduction", "overhead")


# ----------------------------------------------------------------------------------------------------------------- plot


def plot_of(*reports):
    return ElementTree.fromstring(draw(list(reports)))


def bars_of(picture):
    """Titled rectangles row by row: (name, left, width, fill)."""
    rows = {}
    for shape in picture.iter("{http://www.w3.org/2000/svg}rect"):
        title = shape.find("{http://www.w3.org/2000/svg}title")
        if title is not None:
            bar = (title.text.split(":")[0], float(shape.get("x")), float(shape.get("width")), shape.get("fill"))
            rows.setdefault(float(shape.get("y")), []).append(bar)
    return [rows[y] for y in sorted(rows)]


def sketch(processes, wall, ratio=0.5, recipe="snake-ppo", **split):
    shares = split or {"env": 0.1, "inference": 0.2, "learning": 0.4, "reduction": 0.05, "rest": 0.25}
    return {
        "recipe": recipe,
        "processes": processes,
        "seconds": {"wall": wall},
        "ratio_to_bare": ratio,
        "split": shares,
    }


def test_draw_has_one_colored_bar_per_part_and_bare_below(report):
    for rows in (bars_of(plot_of(report)), bars_of(plot_of(sketch(1, 0.2)))):
        assert [name for name, *_ in rows[0]] == PARTS
        assert [name for name, *_ in rows[1]] == ["bare"]
        assert all(color == COLORS[name] for row in rows for name, _, _, color in row)


def test_draw_bars_are_adjacent_and_widths_sum_to_total():
    ours, bare = bars_of(plot_of(sketch(1, 0.2, ratio=0.5)))
    widths = {name: width for name, _, width, _ in ours}
    assert sum(widths.values()) == pytest.approx(520, abs=0.3)  # the longest bar takes the full width
    assert widths["learning"] == pytest.approx(0.4 * 520, abs=0.1)
    assert bare[0][2] == pytest.approx(260, abs=0.1)
    for (_, left, width, _), (_, following, _, _) in itertools.pairwise(ours):
        assert following == pytest.approx(left + width, abs=0.15)


def test_draw_uses_one_scale_for_all_reports():
    rows = bars_of(plot_of(sketch(1, 0.4), sketch(2, 0.1)))
    lengths = [sum(width for _, _, width, _ in row) for row in rows]
    assert lengths == pytest.approx([520, 260, 130, 65], abs=0.3)


def test_draw_fits_bare_bar_longer_than_run():
    rows = bars_of(plot_of(sketch(1, 0.4, ratio=2.0)))
    assert [sum(width for _, _, width, _ in row) for row in rows] == pytest.approx([260, 520], abs=0.3)


def test_draw_labels_and_escapes_recipe_name():
    texts = list(plot_of(sketch(1, 0.4, recipe="mine & <yours>"), sketch(2, 0.1)).itertext())
    assert "mine & <yours>: one iteration" in texts
    assert {"1 process", "2 processes", "400 ms", "100 ms", "200 ms", "bare engine"} <= set(texts)
    assert set(COLORS) <= set(texts)  # the legend


# -------------------------------------------------------------------------------------------------------- small shares


@pytest.mark.parametrize(
    ("name", "settings"),
    [("gym-ppo", {"algo.batch_size": 8}), ("gym-ddpg", {"algo.batch_size": 8, "task.num_envs": 8})],
)
def test_measure_with_one_env_and_one_sample_has_figures(name, settings):
    kind = find_recipe(name)
    recipe = apply_overrides(apply_overrides(kind(), kind.smoke_overrides), settings)
    found = measure(recipe, Runtime.single_process(recipe.run, hosting=range(1)), seconds=0.0, rounds=2)
    assert found["steps_per_second"] > 0
    assert found["learning"]["seconds_per_sample"] == 0.0
    assert verdict(found)
