"""`lockstep bench` and `lockstep plan`: output, written files and rejected arguments."""

import json
import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

from helpers.multiprocess import command
from lockstep.cli import bench, main
from lockstep.cli.plan import ASSUMPTIONS
from lockstep.launch import launcher
from lockstep.tools.bench import busy, scaling_model
from lockstep.tools.bench.network_model import NETWORKS, ring

PROMISED = {
    "recipe",
    "lockstep",
    "torch",
    "device",
    "processes",
    "threads",
    "precision",
    "parameters",
    "samples_per_iteration",
    "rounds",
    "steps_per_second",
    "ratio_to_bare",
    "split",
    "seconds",
    "learning",
    "bf16_gain",
    "config",
    "verdict",
    "speedup",
}
PARTS = ["env", "inference", "learning", "reduction", "rest"]


@pytest.fixture(autouse=True)
def _wide_pages_one_thread_and_idle_machine(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(busy, "load_of_others", lambda: 0.0)
    monkeypatch.setattr(launcher, "threads_per_process", lambda processes: 1)


def refused(capsys, *words):
    assert main(list(words)) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("lockstep: ")
    return printed.err


# ------------------------------------------------------------------------------------------------------ bench, measured


@pytest.fixture(scope="module")
def scaled(tmp_path_factory):
    """Output of `bench --scaling 1,2` and the directory of its files."""
    directory = tmp_path_factory.mktemp("bench") / "here"
    words = ["--smoke", "--seconds", "0.2", "--scaling", "1,2", "--json", "--out", directory]
    ended = command([sys.executable, "-m", "lockstep", "bench", "snake-ppo", *words])
    assert ended.code == 0, ended.output
    # The output includes standard error, with a warning if this machine is busy.
    lines = [line for line in ended.output.splitlines() if not line.startswith("Other programs use")]
    return "\n".join(lines), directory


@pytest.mark.distributed
def test_bench_json_prints_one_object_only(scaled):
    output, _ = scaled
    found = json.loads(output)
    assert found.keys() >= PROMISED
    assert found["recipe"] == "snake-ppo"
    assert found["processes"] == 1
    assert found["steps_per_second"] > 0
    assert found["ratio_to_bare"] > 0
    assert found["config"]["algo"]["batch_size"] == 128  # the smoke setting


@pytest.mark.distributed
def test_bench_scaling_measures_each_process_count_at_same_batch(scaled):
    reports = json.loads(scaled[0])["scaling"]
    assert [report["processes"] for report in reports] == [1, 2]
    one, two = reports
    assert one["speedup"] == 1.0
    assert two["speedup"] == pytest.approx(two["steps_per_second"] / one["steps_per_second"])
    assert one["config"] == two["config"]
    assert one["samples_per_iteration"] == two["samples_per_iteration"] == 512
    for report in reports:
        assert report.keys() >= PROMISED
        assert sum(report["split"].values()) == pytest.approx(1.0)
        assert "-bound" in report["verdict"]


@pytest.mark.distributed
def test_bench_out_writes_report_and_plot(scaled):
    output, directory = scaled
    assert sorted(path.name for path in directory.iterdir()) == ["bench.json", "bench.svg"]
    assert json.loads((directory / "bench.json").read_text()) == json.loads(output)
    texts = list(ElementTree.parse(directory / "bench.svg").getroot().itertext())
    assert {"1 process", "2 processes"} <= set(texts)


# ------------------------------------------------------------------------------------------ bench, with synthetic times


def synthetic_report(processes, steps_per_second):
    return {
        "recipe": "snake-ppo",
        "processes": processes,
        "threads": 1,
        "precision": "fp32",
        "parameters": 6197,
        "steps_per_second": steps_per_second,
        "ratio_to_bare": 0.875,
        "seconds": {"wall": 512 / steps_per_second},
        "split": dict(zip(PARTS, (0.5, 0.2, 0.2, 0.05, 0.05), strict=True)),
        "learning": {"fixed_seconds": 0.001, "seconds_per_sample": 0.001},
        "bf16_gain": 1.0,
        "config": {"algo": {"batch_size": 128}},
    }


@pytest.fixture
def asked(monkeypatch):
    """Replace the measurement; return the list of requested measurements."""
    asked = []

    def measure(command, rest, recipe, processes):
        asked.append((processes, recipe.run.lanes, rest))
        return synthetic_report(processes, 1000.0 * max(processes, 1) ** 0.5)

    monkeypatch.setattr(bench, "_measure", measure)
    return asked


def test_bench_single_process_count_has_no_scaling(asked, capsys):
    assert main(["bench", "snake-ppo", "--smoke", "--procs", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [count for count, *_ in asked] == [found["processes"]] == [4]
    assert "scaling" not in found
    assert found["speedup"] == 1.0
    assert found["verdict"].startswith("env-bound (50% of the time)")


def test_bench_prints_table_with_column_per_process_count(asked, capsys):
    assert main(["bench", "snake-ppo", "--smoke", "--scaling", "1, 4"]) == 0
    printed = capsys.readouterr().out
    lines = {line.strip("│┃ ").split("│")[0].strip(): line for line in printed.splitlines()}
    assert "snake-ppo: 6,197 parameters, fp32" in printed
    assert "1,000" in lines["steps/s"]
    assert "2,000" in lines["steps/s"]
    assert "1.00x" in lines["speed-up"]
    assert "2.00x" in lines["speed-up"]
    assert lines["ratio to bare"].count("0.875") == 2
    assert lines["env"].count("50.0%") == 2
    assert "The global batch is the same for every number of processes (strong scaling)." in printed
    assert printed.rstrip().endswith("a faster GPU does not.")


def test_bench_prints_title_on_one_line_of_80_columns(asked, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["bench", "snake-ppo", "--smoke"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "snake-ppo: 6,197 parameters, fp32" in lines
    assert max(map(len, lines)) <= 80


def test_bench_warns_once_on_busy_machine(asked, capsys, monkeypatch):
    monkeypatch.setattr(busy, "load_of_others", lambda: 0.9)
    assert main(["bench", "snake-ppo", "--smoke", "--scaling", "1,2", "--json"]) == 0
    assert capsys.readouterr().err.count("Other programs use 90%") == 1


def test_bench_scaling_sets_lanes_for_largest_process_count(asked):
    assert main(["bench", "snake-ppo", "--smoke", "--scaling", "1,16", "--json"]) == 0
    assert [lanes for _, lanes, _ in asked] == [16, 16]


def test_bench_forwards_recipe_flags(asked):
    assert main(["bench", "snake-ppo", "--smoke", "--task.size", "7", "algo.epochs=1", "--json"]) == 0
    (_, _, rest), *_ = asked
    assert {"--task.size", "7", "algo.epochs=1"} <= set(rest)


def test_bench_out_creates_missing_directory(asked, tmp_path, capsys):
    deep = tmp_path / "a" / "b"
    assert main(["bench", "snake-ppo", "--smoke", "--out", str(deep)]) == 0
    assert json.loads((deep / "bench.json").read_text())["processes"] == 1
    ElementTree.parse(deep / "bench.svg")
    assert "steps/s" in capsys.readouterr().out  # the table still appears


@pytest.mark.parametrize("words", ["one,2", "1;2", "1,,2", "1,", "", "-1,2", "1.5", "0,1"])
def test_bench_invalid_scaling_list_is_rejected(asked, capsys, words):
    printed = refused(capsys, "bench", "snake-ppo", "--smoke", f"--scaling={words}")
    assert printed.startswith(f"lockstep: --scaling is {words!r}.\n")
    assert "such as --scaling 1,2,4" in printed
    assert asked == []


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["snake-pp"], "Did you mean 'snake-ppo'?"),
        (["snake-ppo", "task.sise=3"], "Did you mean 'size'?"),
        (["snake-ppo", "--preset", "huge"], "snake-ppo has no preset 'huge'."),
        (["snake-ppo", "--smoke", "--procs", "0"], "0 processes cannot host 8 lanes"),
        (["snake-ppo", "--smoke", "--scaling", "1,100"], "num_envs is 16, which 100 lanes cannot share evenly."),
    ],
)
def test_bench_invalid_arguments_are_rejected(asked, capsys, line, words):
    assert words in refused(capsys, "bench", *line)
    assert asked == []


# ----------------------------------------------------------------------------------------------------------------- plan


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """A plan as JSON, and the file with its saved measurement."""
    path = tmp_path_factory.mktemp("plan") / "measured.json"
    words = ["--smoke", "--gpus", "1", "2", "--rounds", "1", "--json", "--save", str(path)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher, "threads_per_process", lambda processes: 1)
        printed = []
        patch.setattr(sys.stdout, "write", printed.append)
        assert main(["plan", "snake-ppo", *words]) == 0
    return json.loads("".join(printed)), path


def plan(capsys, path, *words):
    """Return a plan from a saved measurement, as JSON."""
    assert main(["plan", "snake-ppo", "--smoke", "--measured", str(path), "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_plan_json_has_one_row_per_gpu_count(planned):
    found, _ = planned
    assert set(found) == {"shares", "network", "fixed_batch", "growing_batch"}
    assert found["network"]["name"] == "nvlink+ib"
    for rows in (found["fixed_batch"], found["growing_batch"]):
        assert [row["processes"] for row in rows] == [1, 2]
        assert rows[0]["efficiency"] == pytest.approx(1.0)
        assert rows[0]["waiting"] == 0.0
        assert all(0 < row["efficiency"] <= 1 + 1e-9 for row in rows)
        assert rows[0]["hours"] == pytest.approx(4096 / rows[0]["steps_per_second"] / 3600)  # smoke run samples
    assert [row["batch"] for row in found["fixed_batch"]] == [128, 128]
    assert [row["batch"] for row in found["growing_batch"]] == [128, 256]


def test_plan_from_saved_measurement_is_reproduced(planned, capsys):
    found, path = planned
    assert json.loads(path.read_text())["recipe"] == "snake-ppo"
    assert plan(capsys, path, "--gpus", "1", "2") == found


def test_plan_sorts_gpu_counts_and_explains_impossible_ones(planned, capsys):
    rows = plan(capsys, planned[1], "--gpus", "64", "1", "16")["fixed_batch"]
    assert [row["processes"] for row in rows] == [1, 16, 64]
    assert [row["impossible"] for row in rows] == ["", "", "16 environments cannot be split over 64 processes"]


def test_plan_slower_network_waits_longer(planned, capsys):
    waits = [plan(capsys, planned[1], "-n", "16", "--network", name)["fixed_batch"][0]["waiting"] for name in NETWORKS]
    assert waits[0] == min(waits) < max(waits)


def test_plan_bill_has_prices_and_the_best_interval(planned, capsys):
    prices = ["--price", "2.10", "--spot-price", "0.70", "--interruptions", "100/day"]
    prices += ["--run.total-samples", str(10**10)]
    found = plan(capsys, planned[1], "--gpus", "1", "16", "64", *prices)
    bills = {(row["processes"], row["kind"]): row for row in found["bills"]}
    assert list(bills) == [(1, "on demand"), (1, "spot"), (16, "on demand"), (16, "spot")]  # 64 are impossible
    hours = found["fixed_batch"][1]["hours"]
    assert bills[16, "on demand"]["dollars"] == pytest.approx(16 * hours * 2.10, rel=1e-3)
    spot = bills[16, "spot"]
    assert spot["interruptions"] == pytest.approx(2 * 100 * spot["hours"] / 24)  # two machines
    assert spot["hours"] > hours
    assert plan(capsys, planned[1], "--gpus", "16", *prices, "--notice")["bills"][1]["hours"] < spot["hours"]

    assert main(["plan", "snake-ppo", "--smoke", "--measured", str(planned[1]), "--gpus", "1", "16", *prices]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "snake-ppo: bill, fixed global batch" in printed
    samples = round(bills[1, "spot"]["save_interval"] * found["fixed_batch"][0]["steps_per_second"])
    assert f"Best save interval on 1 spot GPU: --run.save-every {samples}" in printed


@pytest.mark.parametrize(
    ("option", "value"),
    [("--price", "-1"), ("--spot-price", "nan"), ("--interruptions", "4"), ("--gpus-per-machine", "0")],
)
def test_plan_invalid_prices_are_refused(capsys, option, value):
    assert f"{option} is" in refused(capsys, "plan", "snake-ppo", "--smoke", option, value)


def test_plan_bill_of_a_run_that_never_ends_is_json(planned, capsys):
    words = ["--gpus", "16", "--spot-price", "1", "--interruptions", "100000/hour", "--run.total-samples", str(10**10)]
    assert plan(capsys, planned[1], *words)["bills"][0]["hours"] is None


def test_plan_text_has_tables_verdict_and_assumptions(planned, capsys):
    assert main(["plan", "snake-ppo", "--smoke", "--measured", str(planned[1]), "--gpus", "1", "2", "64"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "snake-ppo: fixed global batch" in printed
    assert "snake-ppo: global batch proportional to GPUs" in printed
    assert "Scaling at this batch size ends between" in printed or "The run scales up to" in printed
    assert "nvlink+ib: 8 processes per machine" in printed
    assert all(" ".join(line.split()) in printed for line in ASSUMPTIONS)


@pytest.mark.parametrize("network", ["nvlink+ib", "here"])
def test_plan_warns_once_on_busy_machine(planned, capsys, monkeypatch, network):
    shares = scaling_model.shares_from(json.loads(planned[1].read_text())["shares"])
    times = {"processes": 2, "seconds": {"64": 1e-5, "6400": 1e-4}}

    def launched(args, processes):
        Path(args[-1]).write_text(json.dumps(times))

    monkeypatch.setattr(scaling_model, "measure_shares", lambda *_: shares)
    monkeypatch.setattr(launcher, "launch_captured", launched)
    monkeypatch.setattr(busy, "load_of_others", lambda: 0.9)
    assert main(["plan", "snake-ppo", "--smoke", "--gpus", "1", "--json", "--network", network]) == 0
    assert capsys.readouterr().err.count("Other programs use 90%") == 1


def test_plan_tables_fit_80_columns_without_folded_cells(planned, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    settings = ["--task.num-envs", "8192", "--gpus", "1", "64", "4096"]
    assert main(["plan", "snake-ppo", "--smoke", "--measured", str(planned[1]), *settings]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    assert sum("hierarchical" in line for line in lines) >= 2
    assert any(line.startswith("4,096  524,288  ") for line in lines)


def test_plan_without_possible_gpu_count_says_why(planned, capsys):
    assert main(["plan", "snake-ppo", "--smoke", "--measured", str(planned[1]), "--gpus", "4096"]) == 0
    assert "16 environments cannot be split over 4,096 processes" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "text", ["", "no json", "[]", "{}", '{"shares": {}}', '{"shares": {"rollout_step": 1}}', '{"shares": null}']
)
def test_plan_file_without_measurement_is_rejected(tmp_path, capsys, text):
    path = tmp_path / "broken.json"
    path.write_text(text)
    printed = refused(capsys, "plan", "snake-ppo", "--smoke", "--measured", str(path))
    assert f"{path} contains no measurement" in printed
    assert "lockstep plan RECIPE --save FILE" in printed


def test_plan_measurement_with_wrong_fields_is_rejected(planned, tmp_path, capsys):
    whole = json.loads(planned[1].read_text())
    path = tmp_path / "broken.json"
    for broken in ({k: v for k, v in whole["shares"].items() if k != "updates"}, whole["shares"] | {"more": 1}):
        path.write_text(json.dumps({"shares": broken}))
        assert "contains no measurement" in refused(capsys, "plan", "snake-ppo", "--smoke", "--measured", str(path))


def test_plan_missing_file_is_rejected(tmp_path, capsys):
    missing = str(tmp_path / "missing.json")
    assert "contains no measurement" in refused(capsys, "plan", "snake-ppo", "--smoke", "--measured", missing)
    printed = refused(capsys, "plan", "snake-ppo", "--smoke", "--network", missing)
    assert "contains no all-reduce times" in printed
    assert "--time-network" in printed


def test_plan_unknown_network_is_rejected_before_measuring(capsys):
    assert "there is no network 'nvlnk'." in refused(capsys, "plan", "snake-ppo", "--smoke", "--network", "nvlnk")


def test_plan_time_network_with_one_process_is_rejected(tmp_path, capsys):
    path = tmp_path / "times.json"
    printed = refused(capsys, "plan", "snake-ppo", "--smoke", "--time-network", str(path))
    assert "--time-network needs at least 2 processes." in printed
    assert not path.exists()


@pytest.mark.parametrize("words", [["--gpus", "0"], ["--gpus=-1"], ["--rounds", "0"]])
def test_plan_invalid_numbers_are_rejected(planned, capsys, words):
    measured = [] if "--rounds" in words else ["--measured", str(planned[1])]
    refused(capsys, "plan", "snake-ppo", "--smoke", *measured, *words)


def test_plan_network_is_fitted_from_all_reduce_times(planned, tmp_path, capsys):
    link = NETWORKS["ethernet-10g"].across
    sizes = (64, 65_536, 1_048_576, 4_194_304)
    path = tmp_path / "mine.json"
    times = {"processes": 4, "seconds": {str(size): ring(size, 4, link) for size in sizes}}
    path.write_text(json.dumps(times | {"contention": 1.25, "jitter": [0.75, 1.25]}))
    found = plan(capsys, planned[1], "--gpus", "8", "--network", str(path))["network"]
    assert (found["name"], found["contention"], found["jitter"]) == ("mine", 1.25, [0.75, 1.25])
    for where in ("inside", "across"):
        assert found[where]["latency"] == pytest.approx(link.latency, rel=1e-6)
        assert found[where]["bandwidth"] == pytest.approx(link.bandwidth, rel=1e-6)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"processes": 2, "seconds": {}}',
        '{"processes": 2, "seconds": {"64": 1e-5}}',  # one size does not determine latency and bandwidth
        '{"processes": 1, "seconds": {"64": 1e-5, "6400": 1e-4}}',
        '{"processes": 2, "seconds": {"64": 0.0, "6400": 1e-4}}',
        '{"processes": 2, "seconds": {"small": 1e-5, "large": 1e-4}}',
        '{"processes": 2, "seconds": [1, 2]}',
        '{"processes": 2, "seconds": {"64": 1e-5, "6400": 1e-4}, "jitter": [1e999]}',
        '{"processes": 2, "seconds": {"64": 1e-5, "6400": 1e-4}, "jitter": 3}',
    ],
)
def test_plan_file_without_all_reduce_times_is_rejected(tmp_path, capsys, text):
    path = tmp_path / "broken.json"
    path.write_text(text)
    printed = refused(capsys, "plan", "snake-ppo", "--smoke", "--network", str(path))
    assert f"{path} contains no all-reduce times" in printed
