"""Findings of an audit, from records written by hand: one process a record, one fingerprint a tensor."""

import pytest

from lockstep.cli import main
from lockstep.cli.audit import part
from lockstep.tools.audit.analysis import analyze


def step(**changes):
    """A step of a script that is right; a process's own data shows in `local` and `inputs`."""
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
    """Two processes that took three such steps each."""
    times = [{"time": second} for second in range(3)]
    return [
        record(rank, *(step(**mine, **time) for time in times), **changes) for rank, mine in enumerate((one, other))
    ]


def findings(records):
    return {finding.kind: finding for finding in analyze(records).findings}


OWN = {"local": {"net.weight": 7}, "inputs": [8]}, {"local": {"net.weight": 9}, "inputs": [10]}


def test_a_script_that_is_right_has_no_finding_and_no_note():
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
def test_a_tensor_that_differs_is_named_with_its_first_step(part_of_a_step, kind, name):
    one, other = pair(*OWN)
    for late in (1, 2) if part_of_a_step != "before" else (0, 1, 2):
        other["steps"][late][part_of_a_step] = {name: 99}
    if part_of_a_step == "after":
        other["steps"][2]["before"] = {name: 99}
    found = findings([one, other])
    assert set(found) == {kind}
    assert found[kind].tensors == [name]
    assert found[kind].step == (1 if part_of_a_step == "before" else 2)


def test_a_gradient_that_only_one_process_has_differs():
    assert "gradients" in findings(pair(OWN[0], OWN[1] | {"gradients": {"net.weight": None}}))


def test_a_wrapper_that_was_never_called_is_the_cause_of_unreduced_gradients():
    wrapper = {"wrappers": [{"name": "agent", "calls": 0, "buffers": True}]}
    records = pair(OWN[0] | wrapper, OWN[1] | wrapper | {"gradients": {"net.weight": 6}})
    assert "wraps agent, but its own forward was never called" in findings(records)["gradients"].why


@pytest.mark.parametrize(("time", "why"), [(9, "no collective between"), (1, "do not make these gradients equal")])
def test_whether_anything_was_reduced_between_steps_is_told(time, why):
    call = {"group": "0", "name": "all_reduce", "sizes": [[1]], "time": time}
    records = pair(OWN[0], OWN[1] | {"gradients": {"net.weight": 6}}, collectives=[call])
    assert why in findings(records)["gradients"].why


def test_parameters_that_are_averaged_after_each_step_are_no_fault():
    verdict = analyze(pair(OWN[0], OWN[1] | {"gradients": {"net.weight": 6}, "after": {"net.weight": 6}}))
    assert verdict.findings == []
    assert "parameters are averaged, not gradients" in verdict.notes[0]


@pytest.mark.parametrize(("calls", "sends", "fault"), [(1, True, False), (0, True, True), (1, False, True)])
def test_buffers_that_a_called_wrapper_sends_out_again_are_a_note(calls, sends, fault):
    wrapper = {"wrappers": [{"name": "net", "calls": calls, "buffers": sends}]}
    verdict = analyze(pair(OWN[0] | wrapper, OWN[1] | wrapper | {"buffers": {"net.mean": 6}}))
    assert [finding.kind for finding in verdict.findings] == (["buffers"] if fault else [])
    assert len(verdict.notes) == (0 if fault else 1)


def test_optimizers_that_hold_different_parameters_are_found():
    records = pair(*OWN)
    for one in records[1]["steps"]:
        one["before"] = one["before"] | {"extra.bias": 1}
    assert findings(records)["parameters"].tensors == ["extra.bias"]


# ----------------------------------------------------------------------------------------------------------------- data


def test_the_same_gradients_from_backward_are_the_same_data():
    assert "the same gradients" in findings(pair(OWN[0], OWN[1] | {"local": OWN[0]["local"]}))["data"].what


def test_the_same_inputs_are_the_same_data_though_dropout_makes_gradients_differ():
    assert "the same inputs" in findings(pair(OWN[0], OWN[1] | {"inputs": OWN[0]["inputs"]}))["data"].what


def test_data_that_was_the_same_at_one_step_only_is_no_finding():
    records = pair(*OWN)
    records[1]["steps"][0]["inputs"] = records[0]["steps"][0]["inputs"]
    assert findings(records) == {}


def test_gradients_that_are_zero_everywhere_say_nothing_about_data():
    assert findings(pair(OWN[0] | {"local": {"a": 0}}, OWN[1] | {"local": {"a": 0}})) == {}


def test_what_was_not_seen_is_not_called_right():
    assert analyze(pair({}, {})).unseen == ["data"]


def moving(one, other):
    """Give every step its own random state, the same on both processes or not."""
    for process in (one, other):
        for number, each in enumerate(process["steps"]):
            each["random"] = {"torch": str(number)}
    return [one, other]


def test_a_seed_that_all_share_is_the_cause_of_the_same_data_and_else_a_note():
    assert "the same seed" in findings(moving(*pair(OWN[0], OWN[0])))["data"].why
    verdict = analyze(moving(*pair(*OWN)))
    assert verdict.findings == []
    assert "the global generator of torch" in verdict.notes[0]


# ---------------------------------------------------------------------------------------------------------- collectives


def test_a_process_that_leaves_the_loop_is_named_with_where_the_others_wait():
    one = record(0, step(**OWN[0]), step(**OWN[0]), how="stood", stack=["train.py:7 in main"])
    other = record(1, step(**OWN[1]), how="ended")
    found = findings([one, other])["collectives"]
    assert found.what == "process 1 left the training loop, and the others did not"
    assert found.step == 2
    assert "process 0 still stands after step 2 at train.py:7 in main" in found.why


def test_processes_that_wait_at_different_lines_are_found():
    one, other = pair(*OWN)
    one |= {"how": "stood", "stack": ["train.py:7 in main"]}
    other |= {"how": "stood", "stack": ["train.py:9 in main"]}
    assert "train.py:9" in findings([one, other])["collectives"].why
    one["collectives"], other["collectives"] = [call("barrier"), call("all_reduce")], [call("barrier")]
    assert "process 1 nothing more" in findings([one, other])["collectives"].why


def test_processes_that_work_at_different_lines_and_wait_for_nobody_are_only_slow():
    one, other = pair(*OWN, how="stood", collectives=[call("barrier")])
    one["stack"], other["stack"] = ["train.py:7 in main"], ["numba.py:9 in compile"]
    verdict = analyze([one, other])
    assert verdict.findings == []
    assert "process 1 still stands after step 3 at numba.py:9 in compile" in verdict.notes[0]
    assert "give more --step-timeout" in verdict.notes[0]


def test_a_script_that_ends_early_everywhere_is_a_note():
    verdict = analyze(pair(*OWN, how="ended"))
    assert verdict.findings == []
    assert "Only 3 steps were seen" in verdict.notes[0]


def call(name, sizes=((1,),), group="0"):
    return {"group": group, "name": name, "sizes": [list(size) for size in sizes], "time": 0}


@pytest.mark.parametrize(
    ("one", "other", "told"),
    [
        ([call("all_reduce")], [call("barrier")], "number 1 of group 0"),
        ([call("barrier"), call("all_reduce")], [call("barrier")], "process 1 nothing more"),
        ([call("all_reduce", [(2,)])], [call("all_reduce", [(3,)])], "[[3]]"),
        ([call("all_gather", [(2,)])], [call("all_gather", [(3,)])], ""),  # parts of unequal size may be gathered
        ([call("barrier", group="3")], [], ""),  # a group of which the second is no member
    ],
)
def test_collectives_that_only_some_processes_call_are_found(one, other, told):
    records = pair(*OWN)
    records[0]["collectives"], records[1]["collectives"] = one, other
    found = findings(records)
    assert ("collectives" in found) == bool(told)
    if told:
        assert told in found["collectives"].what


# ------------------------------------------------------------------------------------------------------------- the verb


@pytest.mark.parametrize(("allowed", "code"), [((), 1), (("buffers",), 1), (("data",), 0)])
def test_a_finding_that_is_meant_to_be_does_not_fail_the_audit(monkeypatch, capsys, allowed, code):
    monkeypatch.setattr("lockstep.tools.audit.launcher.run", lambda *_: pair(OWN[0], OWN[0]))
    words = [word for kind in allowed for word in ("--ignore", kind)]
    assert main(["audit", *words, __file__]) == code
    told = capsys.readouterr().out
    assert "the same data on every process" in told
    assert ("Not one model. 1 finding." in told) == (code == 1)


def test_a_script_that_steps_no_optimizer_cannot_be_audited(monkeypatch, capsys):
    monkeypatch.setattr("lockstep.tools.audit.launcher.run", lambda *_: [record(0), record(1)])
    assert main(["audit", __file__]) == 2
    assert "took no step of a torch optimizer" in capsys.readouterr().err


def test_words_after_the_script_are_its_own():
    own, script = part(["-n", "3", "--steps", "2", "-m", "train", "--steps", "9", "-n"])
    assert own == ["train", "-n", "3", "--steps", "2", "-m"]
    assert script == ["--steps", "9", "-n"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nowhere.py"], "there is no script nowhere.py"),
        (["--procs", "1", __file__], "An audit compares processes"),
        (["--ignore", "drift", __file__], "'drift' is no kind of finding"),
    ],
)
def test_what_cannot_be_audited_is_said_in_words(capsys, words, told):
    assert main(["audit", *words]) == 2
    assert told in capsys.readouterr().err
