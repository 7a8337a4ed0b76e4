"""Stack traces of running threads."""

import sys
import threading

import pytest

from lockstep.launch.stack_traces import CodeLocation, format_stack, own_stack, thread_stacks

FOREIGN, INTERNAL = "/home/user/task.py", "/site-packages/torch/nn/modules/module.py"


def wait_in_function(started, finish):
    started.set()
    finish.wait()


@pytest.fixture
def blocked_thread():
    started, finish = threading.Event(), threading.Event()
    thread = threading.Thread(target=wait_in_function, args=(started, finish))
    thread.start()
    started.wait()
    yield thread
    finish.set()
    thread.join()


def test_thread_stacks_contain_blocked_thread_innermost_frame_first(blocked_thread):
    stack = thread_stacks()[blocked_thread.ident]
    functions = [location.function for location in stack]
    assert functions.index("wait") < functions.index("wait_in_function") < functions.index("run")
    location = stack[functions.index("wait_in_function")]
    assert location.file == __file__
    assert location.line == wait_in_function.__code__.co_firstlineno + 2


def test_thread_stacks_of_current_thread_equal_own_stack():
    found, own = thread_stacks()[threading.get_ident()], own_stack(sys._getframe())
    mine = [location.function for location in own]
    assert mine[0] == "test_thread_stacks_of_current_thread_equal_own_stack"
    assert [location.function for location in found if location.file == __file__] == mine[:1]


def test_thread_stacks_stay_valid_while_threads_run():
    stop = threading.Event()

    def recurse(depth):
        return 1 if depth == 0 or stop.is_set() else recurse(depth - 1) + 1

    def work():
        while not stop.is_set():
            recurse(20)

    thread = threading.Thread(target=work)
    thread.start()
    try:
        for _ in range(200):
            stack = thread_stacks()[thread.ident]
            assert {location.function for location in stack if location.file == __file__} <= {"work", "recurse"}
    finally:
        stop.set()
        thread.join()


def test_format_stack_removes_internal_frames_at_inner_end_only():
    stack = [CodeLocation(INTERNAL, 1, "call"), CodeLocation(FOREIGN, 2, "step"), CodeLocation(INTERNAL, 3, "run")]
    assert format_stack(stack) == [f"{INTERNAL}:3 in run", f"{FOREIGN}:2 in step"]


def test_format_stack_of_internal_frames_keeps_outermost():
    stack = [CodeLocation(INTERNAL, 1, "call"), CodeLocation(INTERNAL, 2, "run")]
    assert format_stack(stack) == [f"{INTERNAL}:2 in run"]


def test_format_stack_of_unknown_thread_is_empty():
    assert format_stack(()) == []
