"""State of an algorithm and a task: copies to be written while training continues, and a restore without replay."""

from lockstep.base import Algorithm, VecEnv
from lockstep.checkpoint import format as form
from lockstep.protocols import AppendOnlyTensor, LaneState, StateDict


def snapshot_shared(algorithm: Algorithm, task: VecEnv) -> StateDict:
    """Shared state, copied to host memory."""
    return form.add_prefix(algorithm=algorithm.shared_state(), task=task.shared_state())


def snapshot_lanes(algorithm: Algorithm, task: VecEnv, lanes: range) -> StateDict:
    """State of some lanes, copied to host memory."""
    state, append_only = split_lane_state(algorithm, task, lanes)
    return state | {name: rows.all() for name, rows in append_only.items()}


def split_lane_state(algorithm: Algorithm, task: VecEnv, lanes: range) -> tuple[StateDict, dict[str, AppendOnlyTensor]]:
    """State of some lanes copied to host memory, and separately the append-only tensors, not copied yet."""
    state: StateDict = {}
    append_only: dict[str, AppendOnlyTensor] = {}
    for lane in lanes:
        prefix, owned = form.lane_prefix(lane), algorithm.lane_state(lane)
        append_only |= {
            f"{prefix}algorithm.{name}": value for name, value in owned.items() if isinstance(value, AppendOnlyTensor)
        }
        fixed = {name: value for name, value in owned.items() if not isinstance(value, AppendOnlyTensor)}
        copied = form.add_prefix(algorithm=fixed, task=task.lane_state(lane))
        state |= {prefix + name: tensor for name, tensor in copied.items()}
    return state, append_only


def without_rows(saved: StateDict, fresh: LaneState) -> StateDict:
    """Return the saved state of a lane with the empty replay of a new agent.

    Args:
        saved: State from the lane file of a checkpoint.
        fresh: State of the same lane of a newly built agent, under the same names.
    """
    owners = {name.partition(".")[0] for name, value in fresh.items() if isinstance(value, AppendOnlyTensor)}
    kept = {name: tensor for name, tensor in saved.items() if name.partition(".")[0] not in owners}
    empty = {name: value for name, value in fresh.items() if name.partition(".")[0] in owners}
    return kept | {name: value.all() if isinstance(value, AppendOnlyTensor) else value for name, value in empty.items()}
