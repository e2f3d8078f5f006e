"""The training loop. Every rank runs it; decisions are functions of metadata that all ranks hold.

prompts -> rollout -> rewards -> advantages -> update -> publish -> evaluate -> checkpoint -> record
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial

from megagrpo.checkpoint.roll_back import roll_back
from megagrpo.checkpoint.run_checkpoints import RunCheckpoints
from megagrpo.checkpoint.state import TrainerState
from megagrpo.device import device
from megagrpo.device.memory import PeakMemory
from megagrpo.errors import SharedUserError, StopRequested
from megagrpo.evaluation.evaluator import Evaluator
from megagrpo.evaluation.results import describe_results
from megagrpo.parallel.groups import all_gather_metadata
from megagrpo.policy.guarded_update import GuardedUpdate
from megagrpo.policy.spikes import RollBack
from megagrpo.rollout.generation import RolloutFailedError
from megagrpo.rollout.pipeline import RolloutPipeline
from megagrpo.rollout.rollout_metrics import compute_rollout_metrics
from megagrpo.supervision.supervisor import Supervisor
from megagrpo.telemetry import names
from megagrpo.telemetry.clock import RunClock
from megagrpo.telemetry.recorder import NullRecorder
from megagrpo.telemetry.timers import PhaseTimers
from megagrpo.types import Prompt
from megagrpo.weights.publisher import Publisher, PublishError


@dataclass(kw_only=True, eq=False)
class Trainer:
    """The loop and its state."""

    num_steps: int
    pipeline: RolloutPipeline
    update: GuardedUpdate
    publisher: Publisher
    evaluator: Evaluator
    checkpoints: RunCheckpoints
    recorder: NullRecorder
    timers: PhaseTimers
    peaks: PeakMemory
    supervisor: Supervisor
    stop_if_asked: Callable[[], None]  # raises StopRequested where any rank was asked to; collective
    clock: RunClock
    engine_rests: Callable[[], AbstractContextManager[None]]  # entered while the policy is updated
    trace: Callable[[int], AbstractContextManager[None]]  # entered for each step, with its number
    export: Callable[[], None]  # writes the final weights; collective over all ranks
    max_roll_backs: int  # the run ends at one more
    state: TrainerState = field(init=False, default_factory=TrainerState)
    _prompts: Sequence[Prompt] = field(init=False, default=())  # the running step's

    def run(self) -> None:
        """Train all steps that are left, then export and sum up; where a signal asks for it, save and stop
        before that. What ends the run on all ranks alike loses nothing that is trained.

        Raises:
            SharedUserError: also of a run that came to its end and could not save it.
        """
        try:
            self._start()
            while self.state.step < self.num_steps:
                self.stop_if_asked()
                try:
                    with self.trace(self.state.step + 1):
                        self._step()
                except RollBack as cause:
                    self._roll_back(cause)
            with self.timers.phase("finish"):
                self._finish()
        except StopRequested:
            self._save_and_stop()
        except (RolloutFailedError, PublishError, SharedUserError):
            if self.checkpoints.is_on and self.state.step and self.update.is_step_untouched:
                self.checkpoints.save_now(self.state)
            else:
                self.checkpoints.finish()
            raise
        if (loss := self.checkpoints.describe_loss()) is not None:
            raise SharedUserError(loss)

    def _start(self) -> None:
        with self.timers.phase("resume"):
            restored = self.checkpoints.resume()
        self.state = restored or self.state
        self.clock.go_on_from(self.state.wall_seconds)
        is_recorded = self.state.unrecorded is None
        self.recorder.open(None if restored is None else restored.step - (not is_recorded), self.state.row)
        if restored is not None:
            self.recorder.note(f"resumed after step {restored.step}")
        with self.timers.phase("publish"):
            self._publish()  # no rollout before the engine holds the trainer's weights
        self.checkpoints.capture()
        if restored is None or not is_recorded:
            self._conclude(self.state.unrecorded or {}, evaluates=True)
        self.timers.take()  # what came before the loop belongs to no step

    def _step(self) -> None:
        step = self.state.step + 1
        self.supervisor.step = step
        self.clock.start_step()
        with self.timers.phase("rollout"):
            rollouts, counts = self.pipeline.collect(step, self.state.weight_version)
        self._prompts = rollouts.prompts
        metrics = compute_rollout_metrics(rollouts, counts, self.state.weight_version)
        if counts.scores.failed:
            self.recorder.warn_once("scores", f"step {step}: {counts.scores.describe()}")
        self.stop_if_asked()
        with self.timers.phase("update"), self.engine_rests():
            updated, self.state.nonfinite_in_a_row = self.update.run(
                step,
                rollouts,
                metrics.get(names.REWARD),
                updates=self.state.updates,
                nonfinite_in_a_row=self.state.nonfinite_in_a_row,
                weight_version=self.state.weight_version,
            )
        self.state.updates += self.update.updates_per_step
        with self.timers.phase("rollout"):
            self.pipeline.wait()  # the engine's weights are overwritten next
        with self.timers.phase("publish"):
            self.state.weight_version += 1
            failure = None
            try:
                published = self._publish()
            except PublishError as error:  # on all ranks alike; the step is trained, and kept first
                published, failure = {}, error
        self.state.step, self.state.wall_seconds = step, self.clock.run_seconds()
        self.checkpoints.capture()
        self.update.is_step_untouched = True
        metrics |= updated | self.clock.step_metrics() | self.timers.take() | published
        metrics |= self._take_peaks()
        self.recorder.completions(step, rollouts.samples)
        self._conclude(metrics, evaluates=failure is None and self.evaluator.is_due(step))
        if failure is not None:
            raise failure

    def _conclude(self, metrics: dict[str, float], evaluates: bool) -> None:
        """Evaluate, record and save the last finished step, each where it is due. After an evaluation that is
        stopped or fails, the resumed run does all of this.
        """
        if metrics:
            self.recorder.show(self.state.step, metrics)
        if evaluates:
            self.state.unrecorded = metrics
            with self.timers.phase("evaluate"):
                keep = partial(self.recorder.held_out, self.state.step)
                outcomes = self.evaluator.run(keep)
            for outcome in outcomes:
                metrics = metrics | outcome.metrics()
            if outcomes:
                self.recorder.evaluation(
                    self.state.step, partial(describe_results, outcomes, step=self.state.step)
                )
            self.timers.take()
            self.state.unrecorded = None
        self.state.row = dict(metrics)
        self.recorder.step(self.state.step, metrics)
        if self.state.step:
            # training stands still here: its seconds are in the next step's row
            with self.timers.phase("checkpoint"):
                self.checkpoints.after_step(self.state, metrics)

    def _take_peaks(self) -> dict[str, float]:
        """Return the largest peak of any rank in each phase. Collective over all ranks, on GPUs."""
        own = self.peaks.take()
        if not own:
            return {}
        gathered = all_gather_metadata(own)
        return {f"memory/{phase}_peak_bytes": max(rank.get(phase, 0) for rank in gathered) for phase in own}

    def _publish(self) -> dict[str, float]:
        stats = self.publisher.publish(self.state.weight_version)
        for note in stats.notes:
            self.recorder.note(note)
        return stats.metrics

    def _save_and_stop(self) -> None:
        """Save the last finished step, unless it is saved already, and say how to go on."""
        step, begun = self.state.step, self.supervisor.step
        reasons = all_gather_metadata(self.supervisor.stop_reason)
        with self.timers.phase("checkpoint"):
            is_saved = self.checkpoints.save_now(self.state)
        self.recorder.note(
            f"stopped by {next(reason for reason in reasons if reason is not None)} after step {step} of "
            f"{self.num_steps}, which is {'' if is_saved else 'NOT '}saved; "
            f"{f'step {begun} was given up; ' if begun and begun > step else ''}the same command "
            f"{self.checkpoints.how_to_go_on}goes on from there"
        )

    def _roll_back(self, cause: RollBack) -> None:
        """Go on from the newest checkpoint with the prompts that come next; those of the offending step are
        logged and never drawn again. Collective over all ranks.
        """
        position = self.pipeline.next_position
        self.recorder.roll_back(self.supervisor.step, str(cause), self._prompts)
        with self.timers.phase("resume"):
            self.state = roll_back(self.checkpoints, self.state, cause, self.max_roll_backs)
        self.pipeline.skip_to(position)
        self.checkpoints.capture()
        with self.timers.phase("publish"):
            self._publish()
        self.timers.take()
        self.recorder.rewind(self.state.step)
        self.recorder.note(
            f"warning: {cause}; rolled back to step {self.state.step}, on with the next prompts "
            f"(roll-back {self.state.roll_backs})"
        )

    def _finish(self) -> None:
        self.checkpoints.close(self.state)
        self.export()
        peaks = all_gather_metadata((device.peak_rss_bytes(), self.peaks.largest_bytes))
        rss, on_devices = zip(*peaks, strict=True)
        self.recorder.finish(self.clock.run_seconds(), rss, on_devices, self.checkpoints.describe_loss())
