"""Reports of failed processes."""

from lockstep.launch.failures import crash_stack

MAIN = """Thread 0x1 (most recent call first):
  File "/home/me/env.py", line 3 in step
  File "/home/me/train.py", line 5 in main
  File "/home/me/train.py", line 9 in <module>"""
THREAD = """Current thread 0x2 (most recent call first):
  File "/usr/lib/python3/threading.py", line 7 in run"""
INTERNAL = """Current thread 0x2 (most recent call first):
  File "/site-packages/lockstep/distributed/watchdog.py", line 4 in _sample"""
NATIVE = "Current thread 0x2 (most recent call first):\n  <no Python frame>"


def stack_of(tmp_path, *threads):
    (tmp_path / "crash").write_text(
        "\n\n".join(["Fatal Python error: Segmentation fault", *threads, "Extension modules: numpy"])
    )
    return crash_stack(tmp_path / "crash")


def test_crash_stack_is_that_of_the_thread_that_crashed(tmp_path):
    assert stack_of(tmp_path, THREAD, MAIN) == ['File "/usr/lib/python3/threading.py", line 7 in run']


def test_crash_stack_of_internal_thread_is_kept(tmp_path):
    (line,) = stack_of(tmp_path, INTERNAL, MAIN)
    assert "watchdog.py" in line


def test_crash_stack_is_that_of_the_main_thread_if_a_native_thread_crashed(tmp_path):
    assert len(stack_of(tmp_path, MAIN)) == len(stack_of(tmp_path, NATIVE, MAIN)) == 3
