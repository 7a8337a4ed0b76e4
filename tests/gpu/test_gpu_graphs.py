"""Updates, acting and planning as CUDA graphs, captured on the emulated device."""

import pytest
import torch
from profiles import FEW, MANY, SETTINGS, on_gpu, sum_of
from test_gpu_recipes import UPDATES, parse

import emulated_cuda
from helpers.multiprocess import together
from lockstep.clock import TrainState
from lockstep.config import RunConfig
from lockstep.distributed import Runtime
from lockstep.ops.compilation import MAX_SIGNATURES, WARM_UPS
from lockstep.training_loop import iterate

RECORDED = ["snake-ppo", "gym-ppo", "gym-ddpg", "gym-sac", "team-ddpg", "dmc-tdmpc2"]
NOTES = {
    "gym-ppo-lstm": "run.compile does not apply to these updates: sequences are split",
    "trading-lstm": "run.compile does not apply to these updates: sequences are split",
    "cricket-gnn": "run.compile does not apply to these updates: batches of examples",
}
"""Messages of recipes whose updates are not captured."""
GRAPHS = {"run.compile": "graphs"}


def weights(words):
    """Return an agent's weights after some updates in fast mode, and the pending log messages."""
    recipe = parse(*words)
    with Runtime.start(recipe.run) as runtime:
        task = recipe.task.build(runtime.lanes, runtime.device)
        algorithm, clock = recipe.algo.build(task, runtime), TrainState(total_samples=10**9)
        while algorithm.updates < UPDATES:
            iterate(task, algorithm, clock, runtime, 1)
        state = algorithm.model_state_dict()
        task.close()
        return torch.cat([x.detach().double().flatten().cpu() for x in state.values()]).tolist(), list(
            runtime.pending_messages
        )


def both(words):
    return weights(words), weights([*words, "run.compile=graphs"])


def check(name, plain, recorded):
    assert plain[1] == []
    assert [note.startswith(NOTES.get(name, "none")) for note in recorded[1]] == [True] * (name in NOTES), recorded[1]
    assert recorded[0] == plain[0]  # the same kernels, so the same bits


@pytest.mark.parametrize(
    "name",
    [
        # The updates of gym-sac and trading-lstm are built as those of gym-ddpg and gym-ppo-lstm.
        pytest.param(name, marks=[pytest.mark.slow] * (name in ("gym-sac", "trading-lstm")))
        for name in [*RECORDED, *NOTES]
    ],
)
def test_graph_training_is_bitwise_equal_to_eager(name):
    words = [name, "run.device=cuda"]
    check(name, *together(both, 1, words, environment={"EMULATED_GPUS": "1"})[0])


@pytest.mark.parametrize("name", ["gym-ppo", *(pytest.param(x, marks=pytest.mark.slow) for x in RECORDED)])
def test_graph_training_on_two_gpus_is_bitwise_equal_to_eager(name):
    words, environment = [name, "run.device=cuda"], {"EMULATED_GPUS": "2"}
    plain = together(weights, 2, words, environment=environment)
    recorded = together(weights, 2, [*words, "run.compile=graphs"], environment=environment)
    assert recorded[0] == recorded[1]
    check(name, plain[0], recorded[0])


@pytest.mark.parametrize("name", ["gym-ppo", *(pytest.param(x, marks=pytest.mark.slow) for x in RECORDED)])
def test_graph_update_needs_a_third_of_the_launches_and_no_more_syncs(name):
    few, many = (on_gpu(name, SETTINGS[name][size] | GRAPHS) for size in (FEW, MANY))
    updates = many["updates"] - few["updates"]
    launches = (sum_of(many, "learn")[0] - sum_of(few, "learn")[0]) / updates
    plain = [on_gpu(name, SETTINGS[name][size]) for size in (FEW, MANY)]
    as_written = (sum_of(plain[1], "learn")[0] - sum_of(plain[0], "learn")[0]) / updates
    assert launches < as_written / 3
    assert sum_of(many, "learn")[1] == sum_of(plain[1], "learn")[1]  # no more synchronizations


# -- one function ------------------------------------------------------------------------------------------------------


def call(function, *inputs):
    """Call a captured function with some inputs; return its results, the launches per call, and the messages."""
    runtime = Runtime.single_process(RunConfig(compile="graphs"), "cuda:0")
    recorded = runtime.compilation(function, "adding")
    results, launches = [], []
    for x in [x.to("cuda") for x in inputs]:
        with emulated_cuda.counting() as count:
            result = recorded({"x": x})
        launches.append(count.launches)
        results.append(result["y"].tolist())
    return results, launches, runtime.pending_messages


def recorded_calls():
    total = torch.zeros(2, device="cuda")

    def add(part):
        return {"y": total.add_(part["x"] * 2 + 1).clone()}

    return call(add, *(torch.full((2,), float(n)) for n in range(6)))


def test_captured_function_runs_once_per_call_with_new_inputs():
    results, launches, notes = on_one_gpu(recorded_calls)
    assert results == [[n * n + n + n + 1.0] * 2 for n in range(6)]  # the sum of 2 k + 1 for k up to n
    assert notes == []
    assert launches[WARM_UPS + 1 :] == [2, 2]  # the input copy and the graph
    assert launches[0] > 2


def waiting_function():
    def wait(part):
        return {"y": part["x"] + part["x"].sum().item()}

    return call(wait, *(torch.full((2,), float(n)) for n in range(6)))


def test_function_that_synchronizes_runs_eagerly_and_is_named():
    results, _, notes = on_one_gpu(waiting_function)
    assert results == [[3.0 * n] * 2 for n in range(6)]
    assert len(notes) == 1
    assert notes[0].startswith("run.compile: adding cannot be captured as a CUDA graph, runs eagerly: ")


def many_shapes():
    def double(part):
        return {"y": part["x"] * 2}

    sizes = [size for size in range(1, MAX_SIGNATURES + 2) for _ in range(WARM_UPS + 2)]
    return call(double, *(torch.ones(size) for size in sizes))


def test_function_with_too_many_input_shapes_runs_eagerly():
    results, _, notes = on_one_gpu(many_shapes)
    assert all(value == 2.0 for result in results for value in result)
    assert notes == [
        "run.compile: adding cannot be captured as a CUDA graph, runs eagerly: its inputs have more than "
        f"{MAX_SIGNATURES} different shapes."
    ]


def on_one_gpu(function):
    return together(function, 1, environment={"EMULATED_GPUS": "1"})[0]


def test_compile_graphs_on_cpu_runs_eagerly_with_a_message():
    runtime = Runtime.single_process(RunConfig(compile="graphs"))
    assert runtime.compilation(len, "length") is len
    assert runtime.pending_messages == ["run.compile is graphs, which needs CUDA: on cpu, functions run eagerly."]
