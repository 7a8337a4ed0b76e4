"""Collectives that make values equal on every process, and decisions that depend on them."""

import time
from dataclasses import replace

import pytest
import torch
from problems import LANES, build, by_lane, everything, hosted_here, optimizer_for, run_config, squared_error

from helpers.multiprocess import outcomes, together
from lockstep.clock import TrainState
from lockstep.config import ConfigError, apply_overrides
from lockstep.distributed import Runtime
from lockstep.distributed.consistency import ReplicaMismatchError, fingerprints
from lockstep.nn.normalization import RunningMeanStd
from lockstep.protocols import Loss
from lockstep.recipes.gym_ppo import GymPPO

pytestmark = pytest.mark.distributed


def agree_on(true_here):
    with Runtime.start(run_config()) as runtime:
        return [runtime.all_reduce_any(stop=runtime.rank == rank, never=False) for rank in true_here]


def gather_something():
    with Runtime.start(run_config()) as runtime:
        return [
            runtime.all_gather_json({"process": runtime.rank, "words": "ä" * 3**runtime.rank}),
            runtime.all_gather_json([]),
            runtime.all_gather_json(None),
        ]


def result_of_main(result, pause, timeout):
    with Runtime.start(run_config(collective_timeout=timeout)) as runtime:

        def work():
            time.sleep(pause)
            return result

        received = runtime.run_on_main(work)
        return [repr(received), runtime.run_on_main(lambda: "next")]


def error_of_main(kind):
    with Runtime.start(run_config()) as runtime:

        def work():
            raise kind("that cannot be")

        runtime.run_on_main(work)


def unserializable_result_of_main():
    with Runtime.start(run_config(collective_timeout=600.0)) as runtime:
        runtime.run_on_main(lambda: torch.zeros(3))


def wait_for_a_blocked_main():
    with Runtime.start(run_config(collective_timeout=1.0)) as runtime:
        if runtime.is_main:
            time.sleep(3)  # it sends no heartbeat
            return
        runtime.run_on_main(lambda: None)


def pool_a_table():
    """Sum rows of all magnitudes and signs, so that another summation order would change the last bits."""
    with Runtime.start(run_config()) as runtime:
        draws = torch.Generator().manual_seed(3)
        table = torch.randn(LANES, 64, generator=draws, dtype=torch.float64)
        table *= 10.0 ** torch.randint(-12, 12, table.shape, generator=draws)
        table[:, 0] = -0.0
        pooled = runtime.exact_sum(table[runtime.lanes.local.start : runtime.lanes.local.stop])
        return [value.hex() for value in pooled.tolist()]


def changes_found(odd_one, change):
    """Return the message of the replica check for each tensor that is changed on one process."""
    with Runtime.start(run_config()) as runtime:
        net = build("mlp")
        optimizer = optimizer_for(net, runtime, 0.01, torch.optim.Adam)
        batch = hosted_here(everything("mlp"), runtime)
        optimizer.step(squared_error(net), batch)
        moments = RunningMeanStd(3, runtime.device)
        moments.update(runtime.exact_sum(moments.batch_stats(by_lane(batch, runtime)["y"])))
        state = {f"net.{name}": x for name, x in net.named_parameters()}
        state |= {f"optimizer.{name}": x for name, x in optimizer.shared_state().items()}
        state["obs_moments"] = moments.sums
        runtime.check_replicas(state, "before")
        said = {}
        for name in ("net.2.weight", "optimizer.2.weight.exp_avg_sq", "optimizer.updates", "obs_moments"):
            kept = state[name].detach().clone()
            if runtime.rank == odd_one:
                CHANGES[change](state[name].detach())
            try:
                runtime.check_replicas(state, "update 7")
                said[name] = ""
            except ReplicaMismatchError as difference:
                said[name] = str(difference)
            state[name].detach().copy_(kept)
        runtime.check_replicas(state, "after")
        return said


def _flip_the_last_bit(tensor):
    words = tensor.view(-1).view({4: torch.int32, 8: torch.int64}[tensor.element_size()])
    words[-1] ^= 1


def _move_two_by_a_bit(tensor):
    """Change one value up and another down by one bit, as rounding in another order does."""
    words = tensor.view(-1).view({4: torch.int32, 8: torch.int64}[tensor.element_size()])
    if len(words) == 1:
        words += 1
    else:
        words[0] += 1
        words[-1] -= 1


def _swap_two(tensor):
    flat = tensor.view(-1)
    if len(flat) == 1:
        flat += 1
    else:
        flat[[0, 1]] = flat[[1, 0]]


CHANGES = {"bit": _flip_the_last_bit, "pair": _move_two_by_a_bit, "swap": _swap_two}


def communicate_inside_a_loss():
    with Runtime.start(run_config()) as runtime:
        net = build("mlp")
        optimizer, batch = optimizer_for(net, runtime), hosted_here(everything("mlp"), runtime)
        calls = {
            "sum": lambda: runtime.all_reduce_sum(torch.ones(1)),
            "agree": lambda: runtime.all_reduce_any(stop=True),
            "pool": lambda: runtime.exact_sum(torch.ones(len(runtime.lanes), 1)),
            "gather": lambda: runtime.all_gather_json(1),
            "from_main": lambda: runtime.run_on_main(lambda: 1),
        }
        said = {}
        for name, call in calls.items():

            def loss(part, call=call):
                call()
                return Loss(net(part["x"]).sum(), len(part["x"]))

            try:
                optimizer.step(loss, batch)
            except RuntimeError as error:
                said[name] = str(error)
        optimizer.step(squared_error(net), batch)  # the run could continue
        return said


TARGET_KL = 0.004


def stop_early(reduction):
    """Train PPO with a KL stop; return the updates per iteration and the local KLs at each stop."""
    recipe = apply_overrides(
        GymPPO(),
        {
            "task.id": "Pendulum-v1",
            "algo": {"rollout_steps": 16, "batch_size": 32, "epochs": 6, "target_kl": TARGET_KL, "learning_rate": 1e-3},
        },
    )
    with Runtime.start(run_config(reduction)) as runtime:
        task = recipe.task.build(runtime.lanes, runtime.device)
        algorithm = replace(recipe.algo).build(task, runtime)
        local, loss = [], algorithm.loss

        def listen(batch):
            result = loss(batch)
            local.append((result.metric_sums["kl"] / result.num_samples).item())
            return result

        algorithm.loss = listen
        clock, updates, last = TrainState(total_samples=10_000), [], []
        for _ in range(6):
            algorithm.collect(clock)
            algorithm.update(clock)
            clock.advance(algorithm.samples)
            updates.append(algorithm.updates)
            last.append(sum(local[-len(runtime.lanes) if runtime.exact else -1 :]))
        return {"updates": updates, "kl": last}


def test_all_reduce_any_is_true_on_all_ranks_if_true_on_one():
    expected = [{"stop": True, "never": False}] * 2 + [{"stop": False, "never": False}]
    assert together(agree_on, 3, [0, 2, 7]) == [expected] * 3
    assert together(agree_on, 1, [0, 0, 7]) == [expected]


@pytest.mark.parametrize("processes", [1, 3])
def test_all_gather_json_returns_values_of_any_length_in_rank_order(processes):
    whole = [{"process": rank, "words": "ä" * 3**rank} for rank in range(processes)]
    assert together(gather_something, processes) == [[whole, [[]] * processes, [None] * processes]] * processes


@pytest.mark.parametrize("processes", [1, 3])
def test_run_on_main_returns_the_same_value_on_all_ranks(processes):
    # JSON does not keep int keys and tuples: all ranks must get the same form, including the main process.
    assert together(result_of_main, processes, {1: (2, None)}, 0.0, 5.0) == [["{'1': [2, None]}", "next"]] * processes


def test_run_on_main_may_take_longer_than_the_collective_timeout():
    assert together(result_of_main, 3, "done", 4.0, 1.5) == [["'done'", "next"]] * 3


@pytest.mark.parametrize("kind", [ConfigError, FileNotFoundError, KeyError])
def test_run_on_main_error_is_raised_on_all_ranks(kind):
    errors = [ended.error for ended in outcomes(error_of_main, 3, kind)]
    name = {"KeyError": "RuntimeError"}.get(kind.__name__, kind.__name__)
    assert errors[0].startswith(kind.__name__)
    assert all(error.startswith(name) for error in errors[1:])
    assert all("that cannot be" in error for error in errors)


def test_run_on_main_unserializable_result_fails_on_all_ranks():
    errors = [ended.error for ended in outcomes(unserializable_result_of_main, 2)]  # long before the timeout
    assert all("not JSON serializable" in error for error in errors)


def test_run_on_main_without_heartbeat_raises_timeout_error():
    errors = [ended.error for ended in outcomes(wait_for_a_blocked_main, 2)]
    assert errors == ["", "TimeoutError: the main process sent no heartbeat for 1 s during run_on_main"]


def test_exact_sum_is_bitwise_equal_on_any_number_of_processes():
    found = [each for processes in (1, 2, 3, 4) for each in together(pool_a_table, processes)]
    assert all(each == found[0] for each in found)
    assert len(set(found[0])) == 64


@pytest.mark.parametrize("change", sorted(CHANGES))
@pytest.mark.parametrize("processes", [2, 3])
def test_check_replicas_names_the_tensor_and_process_that_differ(processes, change):
    for said in together(changes_found, processes, 1, change):
        for tensor, words in said.items():
            assert "the replicas of the agent differ between processes (update 7)" in words
            assert f"  process 1: {tensor}\n" in words  # only this one
            assert words.count("process 0:") == words.count("process 2:") == 0


def test_fingerprint_does_not_depend_on_strides():
    table = torch.arange(24, dtype=torch.float64).view(4, 6)
    strided = {"column": table[:, 2], "corner": table[3:, 5], "turned": table.t(), "one": table[1, 1]}
    assert torch.equal(fingerprints(strided), fingerprints({k: x.clone().contiguous() for k, x in strided.items()}))


def test_collective_inside_a_loss_raises_with_a_message():
    for said in together(communicate_inside_a_loss, 2):
        assert sorted(said) == ["agree", "from_main", "gather", "pool", "sum"]
        assert all("a collective was called inside iter_lanes or a loss" in words for words in said.values())


@pytest.mark.parametrize("reduction", ["fast", "exact"])
def test_kl_stop_ends_epochs_at_the_same_update_on_all_ranks(reduction):
    by_process = together(stop_early, 3, reduction)
    assert all(each["updates"] == by_process[0]["updates"] for each in by_process)
    taken = torch.tensor([0, *by_process[0]["updates"]]).diff()
    assert taken.min() < 24  # it did stop early
    locally = torch.tensor([each["kl"] for each in by_process]) > TARGET_KL
    assert (locally.any(0) & ~locally.all(0)).any()  # local KLs alone would have given different decisions
    if reduction == "exact":
        assert together(stop_early, 1, reduction)[0]["updates"] == by_process[0]["updates"]
