"""Resume without replay: everything else of a checkpoint whose replay is lost."""

from lockstep.protocols import AppendOnlyTensor, LaneState, StateDict


def without_rows(saved: StateDict, fresh: LaneState) -> StateDict:
    """The saved state of a lane, with replay as it is in a new agent.

    Args:
        saved: What the lane file of a checkpoint holds.
        fresh: The state of the same lane of an agent that was just built, under the same names.
    """
    owners = {name.partition(".")[0] for name, value in fresh.items() if isinstance(value, AppendOnlyTensor)}
    kept = {name: tensor for name, tensor in saved.items() if name.partition(".")[0] not in owners}
    empty = {name: value for name, value in fresh.items() if name.partition(".")[0] in owners}
    return kept | {name: value.all() if isinstance(value, AppendOnlyTensor) else value for name, value in empty.items()}


def warning(checkpoint: str, rows: list[int]) -> str:
    """The sentence that tells the user what was lost."""
    return (
        f"WITHOUT REPLAY: {rows[1] - rows[0]:,} rows of replay of checkpoint {checkpoint} were dropped, as "
        "--without-replay asks. The replay buffer is empty: the agent collects before it learns again, and the run "
        "differs from the uninterrupted one."
    )
