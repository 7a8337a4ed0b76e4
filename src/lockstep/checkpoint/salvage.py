"""Resume without replay, for checkpoints whose replay is damaged."""

from lockstep.protocols import AppendOnlyTensor, LaneState, StateDict


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


def warning(checkpoint: str, rows: list[int]) -> str:
    """Message for the user that states how much replay was dropped."""
    return (
        f"WITHOUT REPLAY: {rows[1] - rows[0]:,} rows of replay of checkpoint {checkpoint} were dropped because of "
        "--without-replay. The replay buffer is empty: the agent collects transitions before it learns again, and the "
        "run differs from the uninterrupted one."
    )
