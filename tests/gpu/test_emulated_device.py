"""The emulated device: the GPU behavior that the other tests rely on."""

import os
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import emulated_cuda
from helpers.multiprocess import command, outcomes, together


def on_gpus(function, gpus, *arguments, processes=1, **settings):
    """Run a function in one or several processes with emulated GPUs; return its value or values."""
    values = together(function, processes, *arguments, environment={"EMULATED_GPUS": str(gpus), **settings})
    return values[0] if processes == 1 else values


def raised(function):
    """Return the message of the RuntimeError that a call raises, or an empty string."""
    try:
        function()
    except RuntimeError as error:
        return str(error)
    return ""


# -- tensors -----------------------------------------------------------------------------------------------------------


def placement():
    here = torch.ones(2, device="cuda:1")
    return {
        "device": str(here.device),
        "available": torch.cuda.is_available(),
        "count": torch.cuda.device_count(),
        "with host": raised(lambda: here + torch.ones(2)),
        "with peer": raised(lambda: here + torch.ones(2, device="cuda:0")),
        "scalar of the host": (here + torch.tensor(2.0)).tolist(),
        "copy from peer": (here + torch.ones(2, device="cuda:0").to("cuda:1")).tolist(),
        "numpy": raised_any(lambda: here.numpy()),
        "missing device": raised(lambda: torch.ones(1, device="cuda:2")),
    }


def raised_any(function):
    try:
        function()
    except Exception as error:
        return type(error).__name__
    return ""


def test_tensors_of_different_devices_do_not_mix():
    found = on_gpus(placement, 2)
    assert found["device"] == "cuda:1"
    assert found["available"] is True
    assert found["count"] == 2
    assert "two devices, cuda:1 and cpu" in found["with host"]
    assert "two devices, cuda:1 and cuda:0" in found["with peer"]
    assert found["scalar of the host"] == [3.0, 3.0]
    assert found["copy from peer"] == [2.0, 2.0]
    assert found["numpy"] == "TypeError"
    assert "invalid device ordinal" in found["missing device"]


def test_cuda_is_unavailable_with_zero_emulated_gpus():
    assert on_gpus(torch.cuda.is_available, 0) is False


def visible():
    return [torch.cuda.get_device_properties(i).pci_bus_id for i in range(torch.cuda.device_count())]


@pytest.mark.parametrize(("chosen", "found"), [("2,0", [2, 0]), ("", []), ("1,9,2", [1])])
def test_cuda_visible_devices_selects_devices(chosen, found):
    assert on_gpus(visible, 4, CUDA_VISIBLE_DEVICES=chosen) == found


def trained(device):
    """Train a network with every kind of layer in use here for a few steps; return its parameters."""
    torch.manual_seed(0)
    layers = [
        torch.nn.Conv2d(1, 4, 3),
        torch.nn.ReLU(),
        torch.nn.Flatten(),
        torch.nn.LayerNorm(64),
        torch.nn.Linear(64, 8),
    ]
    net, cells = torch.nn.Sequential(*layers), [torch.nn.LSTM(8, 8), torch.nn.GRU(8, 8)]
    x, net = torch.randn(5, 1, 6, 6).to(device), net.to(device)
    cells = [cell.to(device) for cell in cells]
    parameters = [p for part in (net, *cells) for p in part.parameters()]
    adam = torch.optim.Adam(parameters, fused=True)
    for _ in range(3):
        with torch.autocast(device, dtype=torch.bfloat16, enabled=False):
            y = net(x).unsqueeze(0)
        for cell in cells:
            y = cell(y)[0]
        adam.zero_grad()
        y.square().mean().backward()
        adam.step()
    return [p.detach().cpu().flatten().tolist() for p in parameters]


def test_training_on_the_device_matches_the_cpu():
    for ours, theirs in zip(on_gpus(trained, 1, "cuda"), trained("cpu"), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)


# -- asynchrony --------------------------------------------------------------------------------------------------------


def queued():
    """Queue work on a stream; return whether it is done before and after synchronization, and its milliseconds."""
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    torch.cuda._sleep(200_000_000)
    last.record()
    before = last.query()
    last.synchronize()
    return before, last.query(), first.elapsed_time(last)


def test_launches_return_before_the_work_is_done():
    before, after, milliseconds = on_gpus(queued, 1)
    assert (before, after) == (False, True)
    assert milliseconds >= 200


def two_streams(ordered):
    """Read on one stream what another one writes, with or without waiting for its event."""
    tensor, side = torch.zeros(1, device="cuda"), torch.cuda.Stream()
    torch.cuda.synchronize()
    torch.cuda._sleep(100_000_000)
    tensor.fill_(1.0)
    written = torch.cuda.Event()
    written.record()
    with torch.cuda.stream(side):
        if ordered:
            side.wait_event(written)
        seen = tensor.clone()
        side.synchronize()
        return seen.item()


def test_streams_are_ordered_only_by_events():
    assert on_gpus(two_streams, 1, True) == 1.0
    assert on_gpus(two_streams, 1, False) == 0.0


def read_too_early():
    on_device, on_host = torch.arange(3, device="cuda"), torch.zeros(3, dtype=torch.int64, pin_memory=True)
    on_host.copy_(on_device, non_blocking=True)
    early = on_host.tolist()
    torch.cuda.synchronize()
    return early, on_host.tolist()


def test_copy_to_pinned_memory_is_incomplete_before_synchronization():
    early, late = on_gpus(read_too_early, 1)
    assert early != [0, 1, 2]
    assert late == [0, 1, 2]


def overwritten(wait):
    on_host = torch.ones(3, pin_memory=True)
    on_device = on_host.to("cuda", non_blocking=True)
    if wait:
        torch.cuda.synchronize()
    on_host.fill_(2.0)
    return raised(torch.cuda.synchronize), on_device.tolist() if wait else []


def test_pinned_memory_overwritten_in_flight_is_reported():
    error, _ = on_gpus(overwritten, 1, False)
    assert "pinned memory was overwritten while a copy" in error
    assert on_gpus(overwritten, 1, True) == ["", [1.0, 1.0, 1.0]]


def freed_in_flight():
    """Free pinned buffers during their copies, so that their memory may be reused immediately."""
    kept = []
    for _ in range(20):
        kept.append(torch.ones(64, pin_memory=True).to("cuda", non_blocking=True))
        torch.full((64,), 2.0, pin_memory=True)
    torch.cuda.synchronize()
    return [tensor.sum().item() for tensor in kept]


def test_pinned_memory_freed_in_flight_is_not_reported():
    assert on_gpus(freed_in_flight, 1) == [64.0] * 20


def bad_index():
    rows = torch.tensor([7]).to("cuda")
    taken = torch.zeros(3, device="cuda").index_select(0, rows)
    return taken.shape[0], raised(torch.cuda.synchronize), raised(lambda: torch.zeros(1, device="cuda").item())


def test_failed_kernel_raises_at_every_later_synchronization():
    count, first, second = on_gpus(bad_index, 1)
    assert count == 1
    assert first.startswith("CUDA error:")
    assert second == first


# -- counters ----------------------------------------------------------------------------------------------------------


def counted():
    x, mask = torch.randn(8).to("cuda"), torch.ones(8, dtype=torch.bool, device="cuda")
    host, pinned = torch.ones(8), torch.ones(8, pin_memory=True)
    cases = {
        "elementwise": lambda: x * 2 + 1,
        "matrix": lambda: torch.outer(x, x) @ x,
        "foreach": lambda: torch._foreach_add_([x, x.clone()], 1.0),
        "item": lambda: x.sum().item(),
        "bool": lambda: bool(x[0] > 0),
        "mask": lambda: x[mask],
        "where": lambda: torch.where(mask, x, 0.0),
        "nonzero": lambda: mask.nonzero(),
        "equal": lambda: torch.equal(x, x),
        "from the host": lambda: host.to("cuda"),
        "as_tensor": lambda: torch.as_tensor(3, device="cuda"),
        "pageable": lambda: host.to("cuda", non_blocking=True),
        "pinned": lambda: pinned.to("cuda", non_blocking=True),
        "to the host": lambda: x.cpu(),
        "full": lambda: torch.full((), 3.0, device="cuda"),
    }
    found = {}
    for name, case in cases.items():
        with emulated_cuda.counting() as count:
            case()
        found[name] = count.launches, count.syncs
    return found


def test_launches_and_synchronizations_are_counted():
    found = {name: tuple(pair) for name, pair in on_gpus(counted, 1).items()}
    synchronizing = {
        "item",
        "bool",
        "mask",
        "nonzero",
        "equal",
        "from the host",
        "as_tensor",
        "pageable",
        "to the host",
    }
    assert {name for name, (_, syncs) in found.items() if syncs} == synchronizing
    assert found["elementwise"] == (2, 0)
    assert found["foreach"][0] == 2  # one launch is the copy


def strict(mode):
    torch.cuda.set_sync_debug_mode(mode)
    x = torch.ones(2, device="cuda")
    return raised(lambda: x.sum().item()), raised(torch.cuda.synchronize)


def test_sync_debug_mode_raises_on_hidden_synchronization_only():
    assert "called a synchronizing CUDA operation" in on_gpus(strict, 1, "error")[0]
    assert on_gpus(strict, 1, "error")[1] == ""
    assert on_gpus(strict, 1, "default") == ["", ""]


# -- memory and processes ----------------------------------------------------------------------------------------------


def filled():
    kept = torch.zeros(2**20, dtype=torch.uint8, device="cuda")
    try:
        torch.zeros(2**22, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        return str(error), torch.cuda.memory_allocated(), kept.numel()


def test_memory_of_a_device_is_limited():
    error, allocated, kept = on_gpus(filled, 1, EMULATED_GPU_MEMORY=str(2**22))
    assert "CUDA out of memory. Tried to allocate 4 MiB" in error
    assert allocated == kept == 2**20


def forked():
    torch.zeros(1, device="cuda")
    child = os.fork()
    if not child:
        os._exit(0 if "forked subprocess" in raised(lambda: torch.zeros(1, device="cuda")) else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_forked_process_cannot_use_the_device():
    assert on_gpus(forked, 1) == 0


def touched():
    before = os.listdir(os.environ["EMULATED_CUDA_CONTEXTS"])
    torch.cuda.device_count()
    looked = os.listdir(os.environ["EMULATED_CUDA_CONTEXTS"])
    torch.zeros(1, device="cuda:1")
    return before, looked, os.listdir(os.environ["EMULATED_CUDA_CONTEXTS"]), os.getpid()


def test_contexts_are_listed_by_process_and_device(tmp_path):
    before, looked, after, pid = on_gpus(touched, 2, EMULATED_CUDA_CONTEXTS=str(tmp_path))
    assert before == looked == []
    assert f"{pid}.1" in after


CONVOLUTIONS = """
import torch
net = torch.nn.Sequential(*(torch.nn.Conv2d(32, 32, 3, padding=1) for _ in range(20))).cuda()
for _ in range(10):
    net(torch.ones(64, 32, 16, 16, device="cuda")).square().sum().backward()
"""


def test_process_may_exit_with_work_in_the_queue():
    ended = command([sys.executable, "-c", CONVOLUTIONS], environment=emulated_cuda.environment(1))
    assert ended.code == 0, ended.output


# -- graphs ------------------------------------------------------------------------------------------------------------


def captured(body):
    """Return the error of capturing a function that gets a tensor on the device."""
    x, graph = torch.ones(4, device="cuda"), torch.cuda.CUDAGraph()

    def capture():
        with torch.cuda.graph(graph):
            body(x)

    return raised(capture)


def forbidden():
    pinned, outside = torch.ones(4, pin_memory=True), torch.cuda.Event()
    outside.record()
    side = torch.cuda.Stream()

    def unjoined(x):
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            x.add_(1.0)

    def joined(x):
        unjoined(x)
        torch.cuda.current_stream().wait_stream(side)

    return {
        "nothing": captured(lambda x: x * 2),
        "pinned": captured(lambda x: x.copy_(pinned, non_blocking=True)),
        "item": captured(lambda x: x.sum().item()),
        "synchronize": captured(lambda x: torch.cuda.synchronize()),
        "pageable": captured(lambda x: x.copy_(torch.zeros(4), non_blocking=True)),
        "scalar": captured(lambda x: torch.as_tensor(1.0, device="cuda")),
        "outside": captured(lambda x: torch.cuda.current_stream().wait_event(outside)),
        "unjoined": captured(unjoined),
        "joined": captured(joined),
    }


def test_capture_raises_on_operations_that_cuda_forbids():
    found = on_gpus(forbidden, 1)
    allowed = {"nothing", "pinned", "joined"}
    assert {name for name, error in found.items() if not error} == allowed
    assert "unjoined work" in found["unjoined"]
    assert "(item)" in found["item"]


def replayed():
    x, graph = torch.ones(2, device="cuda"), torch.cuda.CUDAGraph()
    net = torch.nn.Linear(2, 1, bias=False).to("cuda")
    torch.nn.init.ones_(net.weight)
    with torch.cuda.graph(graph):
        net(x).sum().backward()
    at_capture = net.weight.grad.sum().item() if net.weight.grad is not None else None
    sums = []
    for value in (1.0, 2.0):
        x.fill_(value)
        with emulated_cuda.counting() as count:
            graph.replay()
        sums.append(net.weight.grad.sum().item())
    del x
    return at_capture == 2.0, sums, count.launches, raised(graph.replay)


def test_replay_runs_the_captured_kernels_on_new_contents():
    ran_at_capture, sums, launches, error = on_gpus(replayed, 1)
    assert ran_at_capture is False
    assert sums == [2.0, 4.0]
    assert launches == 1
    assert "was freed after capture" in error


# -- collectives -------------------------------------------------------------------------------------------------------


def joined(timeout=60.0):
    from datetime import timedelta

    rank = int(os.environ["RANK"])
    torch.cuda.set_device(rank)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl", timeout=timedelta(seconds=timeout), device_id=torch.device("cuda", rank)
    )
    return rank


def reduced():
    rank = joined()
    tensor = torch.full((3,), rank + 1.0, device="cuda")
    dist.all_reduce(tensor)
    gathered = [torch.zeros(1, device="cuda") for _ in range(2)]
    dist.all_gather(gathered, torch.full((1,), float(rank), device="cuda"))
    dist.broadcast(tensor, src=1)
    dist.barrier()
    refused = raised(lambda: dist.all_reduce(torch.ones(4, 2, device="cuda").t()))
    return tensor.tolist(), [x.item() for x in gathered], refused, dist.is_nccl_available()


def test_collectives_reduce_over_processes():
    for sums, gathered, refused, available in on_gpus(reduced, 2, processes=2):
        assert sums == [3.0] * 3
        assert gathered == [0.0, 1.0]
        assert "contiguous" in refused
        assert available is True


def waits_not(directory):
    """Process 1 joins only after process 0 has returned from `wait()`."""
    rank, mark = joined(), Path(directory) / "returned"
    tensor = torch.ones(1, device="cuda")
    while rank == 1 and not mark.exists():
        time.sleep(0.01)
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    done = work.is_completed() if rank == 0 else None
    mark.touch()
    return done, tensor.item()


def test_wait_returns_before_the_collective_is_done(tmp_path):
    assert on_gpus(waits_not, 2, str(tmp_path), processes=2) == [[False, 2.0], [None, 2.0]]


def mismatched(kind):
    rank = joined(timeout=3.0)
    if kind == "size":
        dist.all_reduce(torch.ones(1 + rank, device="cuda"))
    elif rank:
        dist.broadcast(torch.ones(1, device="cuda"), src=0)
    else:
        dist.all_reduce(torch.ones(1, device="cuda"))
    torch.cuda.synchronize()


@pytest.mark.parametrize("kind", ["size", "order"])
def test_mismatched_collectives_hang_until_the_watchdog_aborts(kind):
    ended = outcomes(mismatched, 2, kind, environment={"EMULATED_GPUS": "2"})
    assert {outcome.error for outcome in ended} == {"ended by SIGABRT"}
    assert all("Watchdog caught collective operation timeout" in outcome.output for outcome in ended)


def captured_collective():
    rank = joined()
    tensor, graph = torch.full((2,), rank + 1.0, device="cuda"), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        dist.all_reduce(tensor)
        doubled = tensor * 2
    graph.replay()
    once = doubled.tolist()
    graph.replay()
    return once, doubled.tolist()


def test_collectives_can_be_captured():
    assert on_gpus(captured_collective, 2, processes=2) == [[[6.0, 6.0], [12.0, 12.0]]] * 2


# -- the command line --------------------------------------------------------------------------------------------------


def test_python_process_has_the_devices_of_its_environment():
    text = "import torch; print(torch.ones(2, device='cuda:1').sum().item(), torch.cuda.device_count())"
    done = command([sys.executable, "-c", text], environment=emulated_cuda.environment(2))
    assert (done.code, done.output.strip()) == (0, "2.0 2")
