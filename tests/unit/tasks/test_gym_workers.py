"""Gymnasium environments in worker processes: results identical to in-process envs, and clean shutdown."""

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import gymnasium
import numpy as np
import psutil
import pytest
import torch

from helpers.gym_toys import Memory
from lockstep.checkpoint.format import hash_checkpoint
from lockstep.checkpoint.lineage import find
from lockstep.config import ConfigError, apply_overrides
from lockstep.io.jsonl import CHECKPOINTS
from lockstep.lanes import Lanes
from lockstep.pytree import named_leaves
from lockstep.recipes.gym_ppo import GymPPO
from lockstep.rng import RandomStream
from lockstep.tasks.gym.env import GymConfig
from lockstep.tasks.gym.spaces import sample_action
from lockstep.tasks.gym.worker_pool import WorkerError
from lockstep.training_loop import train

pytestmark = pytest.mark.skipif(os.name != "posix", reason="workers need Linux or macOS")

HOUSE = "helpers.gym_toys:LockstepHouse-v0"
TROUBLE = "helpers.gym_toys:LockstepTrouble-v0"


@pytest.fixture
def build():
    """Build environments on seven lanes and close them at teardown."""
    with contextlib.ExitStack() as stack:

        def make(id, workers, lanes=range(7), **settings):
            envs = construct(id, workers, lanes, **settings)
            stack.callback(envs.close)
            return envs

        yield make


@pytest.fixture(scope="module", params=["CartPole-v1", "Pendulum-v1", HOUSE])
def env_sets(request):
    """Fourteen environments each: in-process, and on one, two and three workers (three split unevenly)."""
    env_sets = [construct(request.param, workers, num_envs=14) for workers in range(4)]
    yield env_sets
    for envs in env_sets:
        envs.close()


def construct(id, workers, lanes=range(7), **settings):
    config = GymConfig(id=id, num_workers=workers, **{"num_envs": 7, **settings})
    return config.build(Lanes(7, lanes, 5), torch.device("cpu"))


def actions(envs, time):
    return sample_action(envs.action_space, RandomStream(1, "actions"), time, envs.num_envs)


def bits(tree):
    return {name: (leaf.dtype, leaf.shape, leaf.numpy().tobytes()) for name, leaf in named_leaves(tree).items()}


def play(envs, times):
    """Play a few steps; return all defined step outputs and the number of ended episodes."""
    course, ends = [], 0
    for now in times:
        step = envs.step(actions(envs, now))
        ended = step.terminated | step.truncated
        final = {name: leaf[ended] for name, leaf in named_leaves(step.final_obs, "final_obs").items()}
        outcome = {"reward": step.reward, "terminated": step.terminated, "truncated": step.truncated}
        course.append(bits(named_leaves(step.obs, "obs") | outcome | final))
        ends += int(ended.sum())
    return course, ends


def save(envs):
    return {lane: envs.lane_state(lane) for lane in range(7)}


def load(envs, saved):
    for lane, state in saved.items():
        envs.load_lane_state(lane, state)


def same_states(one, other):
    return one.keys() == other.keys() and all(bits(one[lane]) == bits(other[lane]) for lane in one)


@pytest.fixture
def workers():
    """List the workers started since the test began, including zombies."""
    before = psutil.Process().children()
    return lambda: [child for child in psutil.Process().children() if child not in before]


# Identical results


def test_worker_count_does_not_change_steps_or_lane_states(env_sets):
    first = [bits(envs.reset()) for envs in env_sets]
    assert first == [first[0]] * 4
    for times in (range(210), range(210, 300)):
        (course, ends), *others = [play(envs, times) for envs in env_sets]
        assert ends > 0 or times.start
        assert others == [(course, ends)] * 3
        states = [save(envs) for envs in env_sets]
        assert all(same_states(states[0], other) for other in states[1:])
    assert len({envs.render_text(3) for envs in env_sets}) == 1


def test_lane_state_resumes_with_different_worker_count(env_sets):
    whole = env_sets[0]
    whole.reset()
    play(whole, range(33))
    start = saved = save(whole)
    whole_course = play(whole, range(33, 133))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for envs in (
            env_sets[3],
            env_sets[0],
            env_sets[2],
            env_sets[1],
        ):  # each loads the state saved by the previous one
            envs.reset()
            play(envs, range(50, 60))  # different state, so that anything loading does not overwrite shows up
            load(envs, saved)
            saved = save(envs)
            assert same_states(saved, start)
            assert play(envs, range(33, 133)) == whole_course


def test_failed_restore_starts_next_episode_with_same_warning_in_workers(build):
    here, there = (build("CartPole-v1", workers, num_envs=14, max_replay_steps=15) for workers in (0, 2))
    here.reset()
    play(here, range(25))
    saved, messages = save(here), []
    for envs in (here, there):
        load(envs, saved)
        with pytest.warns(UserWarning, match=r"of the 14 environments of this process could not be restored") as notes:
            envs.observations()
        messages += [str(note.message) for note in notes]
    assert messages == [messages[0]] * 2
    assert same_states(save(here), save(there))
    assert play(here, range(25, 60)) == play(there, range(25, 60))


def test_subset_of_lanes_in_workers_matches_all_lanes(build):
    whole, part = build("CartPole-v1", 0), build("CartPole-v1", 2, lanes=range(2, 7))
    assert torch.equal(whole.reset()[2:], part.reset())
    for now in range(60):
        action = actions(whole, now)
        assert torch.equal(whole.step(action).obs[2:], part.step(action[2:]).obs)


@pytest.mark.parametrize("count", [0, 1])
def test_step_action_kept_by_env_is_not_overwritten(build, count):
    envs = build("helpers.gym_toys:LockstepMemory-v0", count)
    envs.reset()
    given = [actions(envs, now) for now in range(5)]
    seen = [envs.step(action).obs.clone() for action in given]
    assert all(torch.equal(obs, action) for obs, action in zip(seen[1:], given, strict=False))


def test_rendering_in_workers_matches_in_process_rendering(build):
    pytest.importorskip("pygame")
    here, there = build("FrozenLake-v1", 0), build("FrozenLake-v1", 2)
    for envs in (here, there):
        envs.reset()
        play(envs, range(3))
    assert "HFFG" in there.render_text(0)
    assert [there.render_text(env) for env in range(7)] == [here.render_text(env) for env in range(7)]
    assert np.array_equal(here.render(4), there.render(4))


@pytest.mark.distributed
def test_train_and_resume_with_any_worker_count_gives_same_checkpoint(tmp_path, workers):
    run = {"runs_dir": str(tmp_path), "total_samples": 512, "eval_every": 512, "eval_episodes": 4, "save_every": 128}
    run |= {"record_video": False}
    recipe = apply_overrides(GymPPO(), {"algo": {"rollout_steps": 16, "batch_size": 64, "epochs": 1}, "run": run})

    def end(name, count, **how):
        path = train(apply_overrides(recipe, {"run.name": name, "task.num_workers": count}), **how).path / CHECKPOINTS
        return hash_checkpoint(path / str(find(path)[0]))

    expected = end("in place", 0)
    assert end("workers", 3) == expected
    assert end("workers", 0, resume=True, at=256) == expected
    assert end("workers", 2, resume=True, at=256) == expected
    gc.collect()
    assert not workers()


# Settings


def test_config_negative_num_workers_raises():
    with pytest.raises(ConfigError, match="workers is -1"):
        GymConfig(num_workers=-1)


def test_worker_count_is_capped_by_envs_and_zero_for_single_env(build, workers):
    build("CartPole-v1", 9, lanes=range(2))
    assert len(workers()) == 2
    build("CartPole-v1", 9, lanes=range(1))
    assert len(workers()) == 2


def test_id_not_registered_in_workers_raises_with_fix(build, workers):
    gymnasium.register("LockstepLocal-v0", Memory)
    with pytest.raises(ConfigError, match="not in its workers") as error:
        build("LockstepLocal-v0", 1)
    assert "my_module:Name-v0, or use --task.num-workers 0" in str(error.value)
    assert not workers()


def test_failed_render_in_worker_leaves_envs_usable(build):
    envs = build("helpers.gym_toys:LockstepBlind-v0", 1)
    envs.reset()
    with pytest.raises(ConfigError, match=r"needs a package to render images.*\npip install eyes"):
        envs.render(1)
    play(envs, range(3))


# Failures


@pytest.mark.parametrize(
    ("kind", "end", "words"),
    [
        ("error", "ended with exit code 1", "ZeroDivisionError: the moon is full"),
        ("exit", "ended with exit code 7", "farewell"),
        ("crash", "was killed by SIGSEGV", "gym_toys.py"),
    ],
)
def test_worker_failure_error_names_envs_exit_status_and_last_output(build, workers, kind, end, words):
    envs = build(TROUBLE, 2, lanes=range(2, 7), env_kwargs={"kind": kind})
    envs.reset()
    play(envs, range(2))
    with pytest.raises(WorkerError) as error:
        play(envs, range(1))
    assert f"Worker 0 of 2, with the environments 2, 4, 6 of {TROUBLE}, {end}. Its last output:" in str(error.value)
    assert words in str(error.value)
    assert not workers()
    with pytest.raises(WorkerError, match="have ended"):
        play(envs, range(1))


def test_worker_killed_between_steps_raises_naming_worker(build, workers):
    envs = build("CartPole-v1", 2)
    envs.reset()
    workers()[1].kill()
    with pytest.raises(WorkerError, match=r"Worker 1 of 2, with the environments 1, 3, 5 of CartPole-v1, .*SIGKILL\.$"):
        play(envs, range(2))
    assert not workers()


@pytest.mark.parametrize("how", ["close", "forget"])
def test_workers_exit_on_close_or_garbage_collection(workers, how):
    envs = construct("CartPole-v1", 1)
    envs.reset()
    assert len(workers()) == 1
    if how == "close":
        envs.close()
        envs.close()
    else:
        del envs
        gc.collect()
    assert not workers()  # includes zombies, which would still be listed


def test_workers_survive_exit_of_thread_that_started_them(build):
    made = []
    thread = threading.Thread(target=lambda: made.append(build("CartPole-v1", 1)))
    thread.start()
    thread.join()
    made[0].reset()
    play(made[0], range(3))


def test_shared_memory_is_anonymous(build):
    maps = Path("/proc/self/maps")
    if not maps.exists():
        pytest.skip("no list of mappings here")
    before = maps.read_text().count("/memfd:lockstep (deleted)")
    build("CartPole-v1", 1)
    assert maps.read_text().count("/memfd:lockstep (deleted)") == before + 1


SCRIPT = """
import psutil, torch
from lockstep.lanes import Lanes
from lockstep.tasks.gym.env import GymConfig

config = GymConfig(id="helpers.gym_toys:LockstepTrouble-v0", num_workers=2, env_kwargs={"kind": "KIND"})
envs = config.build(Lanes(8, range(8), 0), torch.device("cpu"))
envs.reset()
print(*(child.pid for child in psutil.Process().children()), flush=True)
for _ in range(3):
    envs.step(torch.zeros(8, dtype=torch.int64))
input()
"""


@contextlib.contextmanager
def parent(kind):
    """Start a process with two workers; yield the process and its workers."""
    script = SCRIPT.replace("KIND", kind)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", script], env=environment, text=True, **pipes) as process:
        try:
            workers = [psutil.Process(int(pid)) for pid in process.stdout.readline().split()]
            assert len(workers) == 2
            time.sleep(0.5)  # until the process waits for input
            yield process, workers
        finally:
            process.kill()


@pytest.mark.parametrize("kind", ["hang", "none"])
@pytest.mark.distributed
def test_workers_exit_when_parent_is_killed_even_during_step(kind):
    if kind == "hang" and sys.platform != "linux":
        pytest.skip("only Linux ends a process that does not listen")
    with parent(kind) as (process, workers):
        process.kill()
        _, alive = psutil.wait_procs(workers, timeout=30)
        assert not alive


@pytest.mark.distributed
def test_sigint_to_parent_ends_hanging_step_and_workers_ignore_sigint():
    with parent("hang") as (process, workers):
        for worker in workers:
            worker.send_signal(signal.SIGINT)  # a terminal sends SIGINT to the whole process group
        time.sleep(0.2)
        assert all(worker.is_running() for worker in workers)
        process.send_signal(signal.SIGINT)
        _, alive = psutil.wait_procs(workers, timeout=30)
        assert not alive
        assert "KeyboardInterrupt" in process.communicate(timeout=10)[1]
