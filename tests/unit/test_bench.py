"""`lockstep bench` and `lockstep plan`: what they print, what they leave behind, and what they refuse in words."""

import json
import sys
from xml.etree import ElementTree

import pytest

from lockstep.cli import bench, main
from lockstep.cli.plan import ASSUMPTIONS
from lockstep.launch import launcher
from lockstep.tools.bench.network_model import NETWORKS, ring
from processes import command

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
def _wide_pages_and_one_thread(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(launcher, "threads_per_process", lambda processes: 1)


def refused(capsys, *words):
    assert main(list(words)) == 2
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith("lockstep: ")
    return told.err


# ------------------------------------------------------------------------------------------------------ bench, for real


@pytest.fixture(scope="module")
def scaled(tmp_path_factory):
    """What `bench --scaling 1,2` printed, and the directory it left its files in."""
    directory = tmp_path_factory.mktemp("bench") / "here"
    words = ["--smoke", "--seconds", "0.2", "--scaling", "1,2", "--json", "--out", directory]
    ended = command([sys.executable, "-m", "lockstep", "bench", "snake-ppo", *words])
    assert ended.code == 0, ended.output
    return ended.output, directory


@pytest.mark.distributed
def test_bench_prints_one_object_and_nothing_else(scaled):
    output, _ = scaled
    found = json.loads(output)
    assert found.keys() >= PROMISED
    assert found["recipe"] == "snake-ppo"
    assert found["processes"] == 1
    assert found["steps_per_second"] > 0
    assert found["ratio_to_bare"] > 0
    assert found["config"]["algo"]["batch_size"] == 128  # the smoke setting


@pytest.mark.distributed
def test_bench_measures_every_number_of_processes_at_the_same_global_batch(scaled):
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
def test_bench_leaves_its_report_and_a_picture_where_it_is_told_to(scaled):
    output, directory = scaled
    assert sorted(path.name for path in directory.iterdir()) == ["bench.json", "bench.svg"]
    assert json.loads((directory / "bench.json").read_text()) == json.loads(output)
    texts = list(ElementTree.parse(directory / "bench.svg").getroot().itertext())
    assert {"1 process", "2 processes"} <= set(texts)


# -------------------------------------------------------------------------------------------- bench, with made-up times


def made_up(processes, steps_per_second):
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
    """The numbers of processes that were asked for; nobody measures."""
    asked = []

    def measure(command, rest, recipe, processes):
        asked.append((processes, recipe.run.lanes, rest))
        return made_up(processes, 1000.0 * max(processes, 1) ** 0.5)

    monkeypatch.setattr(bench, "_measure", measure)
    return asked


def test_one_number_of_processes_has_no_scaling_to_tell(asked, capsys):
    assert main(["bench", "snake-ppo", "--smoke", "--procs", "4", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [count for count, *_ in asked] == [found["processes"]] == [4]
    assert "scaling" not in found
    assert found["speedup"] == 1.0
    assert found["verdict"].startswith("env-bound (50% of the time)")


def test_bench_prints_a_table_with_a_column_for_each_number_of_processes(asked, capsys):
    assert main(["bench", "snake-ppo", "--smoke", "--scaling", "1, 4"]) == 0
    told = capsys.readouterr().out
    lines = {line.strip("│┃ ").split("│")[0].strip(): line for line in told.splitlines()}
    assert "snake-ppo: 6,197 parameters, fp32" in told
    assert "1,000" in lines["steps/s"]
    assert "2,000" in lines["steps/s"]
    assert "1.00x" in lines["speed-up"]
    assert "2.00x" in lines["speed-up"]
    assert lines["ratio to bare"].count("0.875") == 2
    assert lines["env"].count("50.0%") == 2
    assert "The global batch is the same for every number of processes (strong scaling)." in told
    assert told.rstrip().endswith("a faster GPU does not.")


def test_lanes_are_settled_for_the_largest_number_of_processes(asked):
    assert main(["bench", "snake-ppo", "--smoke", "--scaling", "1,16", "--json"]) == 0
    assert [lanes for _, lanes, _ in asked] == [16, 16]


def test_a_recipes_own_flags_may_follow(asked):
    assert main(["bench", "snake-ppo", "--smoke", "--task.size", "7", "algo.epochs=1", "--json"]) == 0
    (_, _, rest), *_ = asked
    assert {"--task.size", "7", "algo.epochs=1"} <= set(rest)


def test_a_directory_that_is_not_there_yet_is_made(asked, tmp_path, capsys):
    deep = tmp_path / "a" / "b"
    assert main(["bench", "snake-ppo", "--smoke", "--out", str(deep)]) == 0
    assert json.loads((deep / "bench.json").read_text())["processes"] == 1
    ElementTree.parse(deep / "bench.svg")
    assert "steps/s" in capsys.readouterr().out  # the table is printed all the same


@pytest.mark.parametrize("words", ["one,2", "1;2", "1,,2", "1,", "", "-1,2", "1.5", "0,1"])
def test_numbers_of_processes_that_are_none_are_refused_in_words(asked, capsys, words):
    told = refused(capsys, "bench", "snake-ppo", "--smoke", f"--scaling={words}")
    assert told.startswith(f"lockstep: --scaling is {words!r}.\n")
    assert "such as --scaling 1,2,4" in told
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
def test_what_cannot_be_measured_is_refused_in_words(asked, capsys, line, words):
    assert words in refused(capsys, "bench", *line)
    assert asked == []


# ----------------------------------------------------------------------------------------------------------------- plan


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    """A plan as JSON, and the file its measurement was saved in."""
    path = tmp_path_factory.mktemp("plan") / "measured.json"
    words = ["--smoke", "--gpus", "1", "2", "--rounds", "1", "--json", "--save", str(path)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher, "threads_per_process", lambda processes: 1)
        told = []
        patch.setattr(sys.stdout, "write", told.append)
        assert main(["plan", "snake-ppo", *words]) == 0
    return json.loads("".join(told)), path


def plan(capsys, path, *words):
    """A plan from a saved measurement, as JSON."""
    assert main(["plan", "snake-ppo", "--smoke", "--measured", str(path), "--json", *words]) == 0
    return json.loads(capsys.readouterr().out)


def test_plan_prints_one_object_with_a_row_for_each_number_of_gpus(planned):
    found, _ = planned
    assert set(found) == {"shares", "network", "fixed_batch", "growing_batch"}
    assert found["network"]["name"] == "nvlink+ib"
    for rows in (found["fixed_batch"], found["growing_batch"]):
        assert [row["processes"] for row in rows] == [1, 2]
        assert rows[0]["efficiency"] == pytest.approx(1.0)
        assert rows[0]["waiting"] == 0.0
        assert all(0 < row["efficiency"] <= 1 + 1e-9 for row in rows)
        assert rows[0]["hours"] == pytest.approx(4096 / rows[0]["steps_per_second"] / 3600)  # smoke's samples
    assert [row["batch"] for row in found["fixed_batch"]] == [128, 128]
    assert [row["batch"] for row in found["growing_batch"]] == [128, 256]


def test_a_saved_measurement_gives_the_same_plan_again(planned, capsys):
    found, path = planned
    assert json.loads(path.read_text())["recipe"] == "snake-ppo"
    assert plan(capsys, path, "--gpus", "1", "2") == found


def test_gpus_come_in_order_and_those_that_cannot_share_the_run_say_why(planned, capsys):
    rows = plan(capsys, planned[1], "--gpus", "64", "1", "16")["fixed_batch"]
    assert [row["processes"] for row in rows] == [1, 16, 64]
    assert [row["impossible"] for row in rows] == ["", "", "16 environments cannot be shared by 64"]


def test_a_slower_network_is_waited_for_longer(planned, capsys):
    waits = [plan(capsys, planned[1], "-n", "16", "--network", name)["fixed_batch"][0]["waiting"] for name in NETWORKS]
    assert waits[0] == min(waits) < max(waits)


def test_a_plan_for_people_has_two_tables_a_verdict_and_every_assumption(planned, capsys):
    assert main(["plan", "snake-ppo", "--smoke", "--measured", str(planned[1]), "--gpus", "1", "2", "64"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "snake-ppo: the same global batch" in told
    assert "snake-ppo: a batch that grows with the GPUs" in told
    assert "It stops paying between" in told or "It pays up to" in told
    assert "nvlink+ib: 8 processes a machine" in told
    assert all(" ".join(line.split()) in told for line in ASSUMPTIONS)


def test_a_plan_in_which_nothing_is_possible_says_so(planned, capsys):
    assert main(["plan", "snake-ppo", "--smoke", "--measured", str(planned[1]), "--gpus", "4096"]) == 0
    assert "16 environments cannot be shared by 4,096" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    "text", ["", "no json", "[]", "{}", '{"shares": {}}', '{"shares": {"rollout_step": 1}}', '{"shares": null}']
)
def test_a_file_without_a_measurement_is_refused_in_words(tmp_path, capsys, text):
    path = tmp_path / "broken.json"
    path.write_text(text)
    told = refused(capsys, "plan", "snake-ppo", "--smoke", "--measured", str(path))
    assert f"{path} holds no measurement" in told
    assert "lockstep plan RECIPE --save FILE" in told


def test_a_measurement_with_a_part_missing_or_too_many_is_refused_in_words(planned, tmp_path, capsys):
    whole = json.loads(planned[1].read_text())
    path = tmp_path / "broken.json"
    for broken in ({k: v for k, v in whole["shares"].items() if k != "updates"}, whole["shares"] | {"more": 1}):
        path.write_text(json.dumps({"shares": broken}))
        assert "holds no measurement" in refused(capsys, "plan", "snake-ppo", "--smoke", "--measured", str(path))


def test_a_file_that_is_not_there_is_refused_in_words(tmp_path, capsys):
    missing = str(tmp_path / "missing.json")
    assert "holds no measurement" in refused(capsys, "plan", "snake-ppo", "--smoke", "--measured", missing)
    told = refused(capsys, "plan", "snake-ppo", "--smoke", "--network", missing)
    assert "holds no times of reductions" in told
    assert "--time-network" in told


def test_an_unknown_network_is_refused_before_anything_is_measured(capsys):
    assert "there is no network 'nvlnk'." in refused(capsys, "plan", "snake-ppo", "--smoke", "--network", "nvlnk")


def test_one_process_has_no_network_to_time(tmp_path, capsys):
    path = tmp_path / "times.json"
    told = refused(capsys, "plan", "snake-ppo", "--smoke", "--time-network", str(path))
    assert "one process has no network to time." in told
    assert not path.exists()


@pytest.mark.parametrize("words", [["--gpus", "0"], ["--gpus=-1"], ["--rounds", "0"]])
def test_numbers_that_mean_nothing_are_refused_in_words(planned, capsys, words):
    measured = [] if "--rounds" in words else ["--measured", str(planned[1])]
    refused(capsys, "plan", "snake-ppo", "--smoke", *measured, *words)


def test_times_of_reductions_make_a_network(planned, tmp_path, capsys):
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
        '{"processes": 2, "seconds": {"64": 1e-5}}',  # one size says nothing of latency and bandwidth both
        '{"processes": 1, "seconds": {"64": 1e-5, "6400": 1e-4}}',
        '{"processes": 2, "seconds": {"64": 0.0, "6400": 1e-4}}',
        '{"processes": 2, "seconds": {"small": 1e-5, "large": 1e-4}}',
        '{"processes": 2, "seconds": [1, 2]}',
        '{"processes": 2, "seconds": {"64": 1e-5, "6400": 1e-4}, "jitter": [1e999]}',
        '{"processes": 2, "seconds": {"64": 1e-5, "6400": 1e-4}, "jitter": 3}',
    ],
)
def test_a_file_without_times_is_refused_in_words(tmp_path, capsys, text):
    path = tmp_path / "broken.json"
    path.write_text(text)
    told = refused(capsys, "plan", "snake-ppo", "--smoke", "--network", str(path))
    assert f"{path} holds no times of reductions" in told
