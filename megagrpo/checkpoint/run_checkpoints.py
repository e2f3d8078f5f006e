"""The checkpoints of one run, as the trainer uses them: resume at the start, save after the steps that are due."""

from pathlib import Path

from megagrpo.checkpoint.manager import CheckpointManager
from megagrpo.checkpoint.state import TrainerState
from megagrpo.config.model_folder import hf_folder_of
from megagrpo.session import Session


class RunCheckpoints:
    """Saves and restores a session and the trainer's state."""

    def __init__(self, session: Session):
        self.session, self.config = session, session.config
        folder = Path(self.config.run.dir) / "checkpoints"
        self.manager = CheckpointManager(folder, self.config.checkpoint.keep_last, hf_folder_of(self.config.model.path))

    def resume(self) -> TrainerState | None:
        """Load the newest complete checkpoint where there is one and resuming is on. Collective over all ranks."""
        complete = self.manager.complete()
        if self.config.run.resume != "auto" or not complete:
            return None
        state = self.manager.load(complete[-1], self.session.actor)
        self.session.sampler.load_state(state.prompt_position)
        if state.algorithm:
            self.session.algorithm.load_state_dict(state.algorithm)
        return state

    def is_due(self, step: int) -> bool:
        """Say whether a checkpoint is saved after `step`."""
        every = self.config.checkpoint.every
        return bool(every) and (step % every == 0 or step == self.config.run.steps)

    def capture(self, state: TrainerState) -> None:
        """Complete `state` with the position of the session's parts, at the end of a step: it may be saved in the midst of the next."""
        state.prompt_position = self.session.sampler.state()
        state.algorithm = self.session.algorithm.state_dict()

    def save(self, state: TrainerState) -> Path:
        """Save the session and `state`, and return the checkpoint's folder. Collective over all ranks.

        The weights must be those that `capture` saw: no update may have been applied since.
        """
        return self.manager.save(self.session.actor, state)
