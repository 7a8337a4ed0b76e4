"""Audit findings from constructed records: one record per process, one fingerprint per tensor."""

import pytest

from lockstep.cli import main
from lockstep.cli.audit import split_arguments
from lockstep.tools.audit.analysis import analyze


def step(**changes):
    """A step of a correct script. Process-local data shows in `local` and `inputs`."""
    return {
        "time": 0,
        "gradients": {"net.weight": 1},
        "local": {},
        "before": {"net.weight": 2},
        "after": {"net.weight": 3},
        "state": {"net.weight.exp_avg": 4},
        "buffers": {"net.mean": 5},
        "inputs": [],
        "random": {"torch": "a"},
        "wrappers": [],
        "sharded": [],
    } | changes


def record(process, *steps, how="reached", **changes):
    return {
        "process": process,
        "steps": list(steps),
        "how": how,
        "error": "",
        "stack": [],
        "collectives": [],
    } | changes


def pair(one, other, **changes):
    """Records of two processes with three such steps each."""
    times = [{"time": second} for second in range(3)]
    return [
        record(rank, *(step(**mine, **time) for time in times), **changes) for rank, mine in enumerate((one, other))
    ]


def findings(records):
    return {finding.kind: finding for finding in analyze(records).findings}


OWN = {"local": {"net.weight": 7}, "inputs": [8]}, {"local": {"net.weight": 9}, "inputs": [10]}


def test_analyze_correct_script_has_no_findings_or_notes():
    verdict = analyze(pair(*OWN))
    assert verdict.findings == verdict.notes == verdict.unseen == []
    assert verdict.steps == 3


@pytest.mark.parametrize(
    ("part_of_a_step", "kind", "name"),
    [
        ("gradients", "gradients", "net.weight"),
        ("after", "parameters", "net.weight"),
        ("before", "parameters", "net.weight"),
        ("state", "state", "net.weight.exp_avg"),
        ("buffers", "buffers", "net.mean"),
    ],
)
def test_analyze_differing_tensor_is_reported_with_its_first_step(part_of_a_step, kind, name):
    one, other = pair(*OWN)
    for late in (1, 2) if part_of_a_step != "before" else (0, 1, 2):
        other["steps"][late][part_of_a_step] = {name: 99}
    if part_of_a_step == "after":
        other["steps"][2]["before"] = {name: 99}
    found = findings([one, other])
    assert set(found) == {kind}
    assert found[kind].tensors == [name]
    assert found[kind].step == (1 if part_of_a_step == "before" else 2)


def test_analyze_gradient_missing_on_one_process_is_a_finding():
    assert "gradients" in findings(pair(OWN[0], OWN[1] | {"gradients": {"net.weight": None}}))


def test_analyze_unreduced_gradients_name_uncalled_ddp_wrapper():
    wrapper = {"wrappers": [{"name": "agent", "calls": 0, "buffers": True}]}
    records = pair(OWN[0] | wrapper, OWN[1] | wrapper | {"gradients": {"net.weight": 6}})
    assert "wraps agent, but its own forward was never called" in findings(records)["gradients"].why


@pytest.mark.parametrize(("time", "why"), [(9, "no collective between"), (1, "do not make these gradients equal")])
def test_analyze_gradient_finding_says_if_collectives_ran_between_steps(time, why):
    call = {"group": "0", "name": "all_reduce", "sizes": [[1]], "time": time}
    records = pair(OWN[0], OWN[1] | {"gradients": {"net.weight": 6}}, collectives=[call])
    assert why in findings(records)["gradients"].why


def test_analyze_parameter_averaging_is_a_note():
    verdict = analyze(pair(OWN[0], OWN[1] | {"gradients": {"net.weight": 6}, "after": {"net.weight": 6}}))
    assert verdict.findings == []
    assert "parameters are averaged, not gradients" in verdict.notes[0]


@pytest.mark.parametrize(("calls", "sends", "fault"), [(1, True, False), (0, True, True), (1, False, True)])
def test_analyze_buffers_broadcast_by_called_wrapper_are_a_note(calls, sends, fault):
    wrapper = {"wrappers": [{"name": "net", "calls": calls, "buffers": sends}]}
    verdict = analyze(pair(OWN[0] | wrapper, OWN[1] | wrapper | {"buffers": {"net.mean": 6}}))
    assert [finding.kind for finding in verdict.findings] == (["buffers"] if fault else [])
    assert len(verdict.notes) == (0 if fault else 1)


def test_analyze_optimizers_with_different_parameters_are_a_finding():
    records = pair(*OWN)
    for one in records[1]["steps"]:
        one["before"] = one["before"] | {"extra.bias": 1}
    assert findings(records)["parameters"].tensors == ["extra.bias"]


# ----------------------------------------------------------------------------------------------------------------- data


def test_analyze_identical_local_gradients_are_a_data_finding():
    assert "bit-identical gradients" in findings(pair(OWN[0], OWN[1] | {"local": OWN[0]["local"]}))["data"].what


def test_analyze_identical_inputs_are_a_data_finding_despite_dropout():
    assert "the same inputs" in findings(pair(OWN[0], OWN[1] | {"inputs": OWN[0]["inputs"]}))["data"].what


def test_analyze_identical_data_at_one_step_only_is_no_finding():
    records = pair(*OWN)
    records[1]["steps"][0]["inputs"] = records[0]["steps"][0]["inputs"]
    assert findings(records) == {}


def test_analyze_all_zero_local_gradients_are_no_data_finding():
    assert findings(pair(OWN[0] | {"local": {"a": 0}}, OWN[1] | {"local": {"a": 0}})) == {}


def test_analyze_missing_data_records_are_reported_as_unseen():
    assert analyze(pair({}, {})).unseen == ["data"]


def moving(one, other):
    """Give every step its own random state, the same on both processes."""
    for process in (one, other):
        for number, each in enumerate(process["steps"]):
            each["random"] = {"torch": str(number)}
    return [one, other]


def test_analyze_shared_seed_explains_identical_data_or_is_a_note():
    assert "the same seed" in findings(moving(*pair(OWN[0], OWN[0])))["data"].why
    verdict = analyze(moving(*pair(*OWN)))
    assert verdict.findings == []
    assert "the global generator of torch" in verdict.notes[0]


# ---------------------------------------------------------------------------------------------------------- collectives


def test_analyze_process_leaving_loop_is_reported_with_blocked_location():
    one = record(0, step(**OWN[0]), step(**OWN[0]), how="stood", stack=["train.py:7 in main"])
    other = record(1, step(**OWN[1]), how="ended")
    found = findings([one, other])["collectives"]
    assert found.what == "process 1 left the training loop, but the other processes did not"
    assert found.step == 2
    assert "process 0 is blocked or busy after step 2 at train.py:7 in main" in found.why


def test_analyze_processes_blocked_at_different_lines_are_a_finding():
    one, other = pair(*OWN)
    one |= {"how": "stood", "stack": ["train.py:7 in main"]}
    other |= {"how": "stood", "stack": ["train.py:9 in main"]}
    assert "train.py:9" in findings([one, other])["collectives"].why
    one["collectives"], other["collectives"] = [call("barrier"), call("all_reduce")], [call("barrier")]
    assert "none on process 1" in findings([one, other])["collectives"].why


def test_analyze_busy_processes_without_pending_collective_are_a_note():
    one, other = pair(*OWN, how="stood", collectives=[call("barrier")])
    one["stack"], other["stack"] = ["train.py:7 in main"], ["numba.py:9 in compile"]
    verdict = analyze([one, other])
    assert verdict.findings == []
    assert "process 1 is blocked or busy after step 3 at numba.py:9 in compile" in verdict.notes[0]
    assert "Increase --step-timeout" in verdict.notes[0]


def test_analyze_early_end_on_all_processes_is_a_note():
    verdict = analyze(pair(*OWN, how="ended"))
    assert verdict.findings == []
    assert "Only 3 steps were recorded" in verdict.notes[0]


def call(name, sizes=((1,),), group="0"):
    return {"group": group, "name": name, "sizes": [list(size) for size in sizes], "time": 0}


@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        ([call("all_reduce")], [call("barrier")], "collective 1 of group 0"),
        ([call("barrier"), call("all_reduce")], [call("barrier")], "none on process 1"),
        ([call("all_reduce", [(2,)])], [call("all_reduce", [(3,)])], "[[3]]"),
        ([call("all_gather", [(2,)])], [call("all_gather", [(3,)])], ""),  # parts of unequal size can be gathered
        ([call("barrier", group="3")], [], ""),  # the second process is not a member of this group
    ],
)
def test_analyze_mismatched_collectives_are_a_finding(one, other, told):
    records = pair(*OWN)
    records[0]["collectives"], records[1]["collectives"] = one, other
    found = findings(records)
    assert ("collectives" in found) == bool(told)
    if told:
        assert told in found["collectives"].what


# --------------------------------------------------------------------------------------------------------- command line


@pytest.mark.parametrize(("allowed", "code"), [((), 1), (("buffers",), 1), (("data",), 0)])
def test_audit_ignored_finding_does_not_fail(monkeypatch, capsys, allowed, code):
    monkeypatch.setattr("lockstep.tools.audit.launcher.run", lambda *_: pair(OWN[0], OWN[0]))
    words = [word for kind in allowed for word in ("--ignore", kind)]
    assert main(["audit", *words, __file__]) == code
    told = capsys.readouterr().out
    assert "the same data on every process" in told
    assert ("Not one model. 1 finding." in told) == (code == 1)


def test_audit_script_without_optimizer_step_exits_with_error(monkeypatch, capsys):
    monkeypatch.setattr("lockstep.tools.audit.launcher.run", lambda *_: [record(0), record(1)])
    assert main(["audit", __file__]) == 2
    assert "never stepped a torch optimizer" in capsys.readouterr().err


def test_part_leaves_words_after_script_to_the_script():
    own, script = split_arguments(["-n", "3", "--steps", "2", "-m", "train", "--steps", "9", "-n"])
    assert own == ["train", "-n", "3", "--steps", "2", "-m"]
    assert script == ["--steps", "9", "-n"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nowhere.py"], "there is no script nowhere.py"),
        (["--procs", "1", __file__], "Use at least 2 processes"),
        (["--ignore", "drift", __file__], "'drift' is not a kind of finding"),
    ],
)
def test_audit_invalid_arguments_exit_with_error(capsys, words, told):
    assert main(["audit", *words]) == 2
    assert told in capsys.readouterr().err
