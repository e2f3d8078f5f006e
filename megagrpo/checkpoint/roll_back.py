"""What a run goes on from after a roll-back: the newest checkpoint, with the counters that never go back."""

from megagrpo.checkpoint.run_checkpoints import RunCheckpoints
from megagrpo.checkpoint.state import TrainerState
from megagrpo.errors import SharedUserError
from megagrpo.policy.spikes import RollBack


def roll_back(
    checkpoints: RunCheckpoints, state: TrainerState, cause: RollBack, max_roll_backs: int
) -> TrainerState:
    """Load the newest checkpoint and return the state to go on from. Collective over all ranks.

    Args:
        checkpoints: of the run.
        state: of the run now.
        cause: what the roll-back is for.
        max_roll_backs: how many a run may make.

    Raises:
        SharedUserError: it would be one too many, or there is no checkpoint yet.
    """
    if state.roll_backs >= max_roll_backs:
        raise SharedUserError(
            f"{cause}; {state.roll_backs} roll-backs were made already (spikes.max_roll_backs)"
        )
    restored = checkpoints.roll_back()
    if restored is None:
        raise SharedUserError(f"{cause}; there is no checkpoint to roll back to yet")
    restored.unrecorded = None  # recorded since, by the run that has resumed from there
    # a version names one set of weights, for ever
    restored.roll_backs, restored.weight_version = state.roll_backs + 1, state.weight_version + 1
    return restored
