"""The training loop. Every rank runs it; decisions are functions of metadata that all ranks hold.

prompts -> rollout -> rewards -> advantages -> update -> publish -> evaluate -> checkpoint -> record
"""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from megagrpo.checkpoint.run_checkpoints import RunCheckpoints
from megagrpo.checkpoint.state import TrainerState
from megagrpo.config.load import dump_config
from megagrpo.config.model_folder import hf_folder_of
from megagrpo.config.schema import Config
from megagrpo.device import device as device_module
from megagrpo.engines.base import asleep
from megagrpo.errors import SharedUserError, StopRequested
from megagrpo.evaluation.evaluate import evaluate_set
from megagrpo.models.hf_files import write_hf_folder
from megagrpo.parallel.groups import all_gather_metadata, all_reduce_flag, destroy_groups
from megagrpo.policy.logprob_gap import LogprobGap, LogprobGapGate, warning_bound
from megagrpo.policy.metrics import compute_update_metrics
from megagrpo.policy.schedule import learning_rate
from megagrpo.policy.spikes import RollBack
from megagrpo.policy.update import UpdateResult
from megagrpo.policy.update_gate import UpdateGate
from megagrpo.rollout.generation import RolloutFailedError
from megagrpo.rollout.metrics import compute_rollout_metrics
from megagrpo.rollout.rollouts import StepRollouts
from megagrpo.session import Session, build_session
from megagrpo.supervision.supervisor import Supervisor
from megagrpo.telemetry import names
from megagrpo.telemetry.recorder import Recorder
from megagrpo.telemetry.timers import PhaseTimers
from megagrpo.types import Prompt
from megagrpo.weights.publisher import PublishError


def run_training(config: Config, device: torch.device, supervisor: Supervisor | None = None) -> None:
    """Run a configuration from start (or its newest checkpoint) to end on this rank's `device`. Collective
    over all ranks.

    Args:
        supervisor: told where the rank is; None: nobody watches.
    """
    started = time.perf_counter()
    supervisor = supervisor or Supervisor(Path(config.run.dir), config.watchdog)
    with supervisor.phase("start"):
        session = build_session(config, device)
    try:
        Trainer(session, supervisor, started).run()
        destroy_groups()
    except Exception as error:
        # before the engines and workers are closed: the other ranks wait for the cause
        supervisor.fail(error)
        raise
    finally:
        session.close()


def build_gate(config: Config, note: Callable[[str], None]) -> UpdateGate:
    """Return the run's gate; `note` is told its warnings."""
    rollout = config.rollout
    warn_above = warning_bound(
        rollout.logprob_gap,
        is_float32=config.precision.recipe == "fp32" and config.engine.quantization == "none",
        is_narrowed=rollout.top_p < 1 or rollout.top_k > 0,
    )
    logprob_gap = LogprobGapGate(rollout.logprob_gap, warn_above, note)
    return UpdateGate(config.spikes, logprob_gap, config.run.max_nonfinite_steps, note)


class Trainer:
    """The loop and its state."""

    def __init__(self, session: Session, supervisor: Supervisor, started: float):
        self.session, self.config, self.supervisor, self.started = (
            session,
            session.config,
            supervisor,
            started,
        )
        self.run_dir = Path(self.config.run.dir)
        self.checkpoints = RunCheckpoints(session)
        self.state = TrainerState()
        self.timers = PhaseTimers(on_enter=[supervisor.enter], on_leave=[supervisor.leave])
        self.recorder: Recorder | None = None
        self.gate = build_gate(self.config, self._note)
        # the weights are those of the last finished step: no update has been applied since
        self._is_step_untouched = True
        self._prompts: Sequence[Prompt] = ()  # of the running step
        supervisor.while_stopping = session.generator.give_up
        if session.recovery is not None:
            session.recovery.waiting = partial(self.timers.phase, "engine_start")

    def run(self) -> None:
        """Train all steps that are left, then export and sum up; where a signal asks for it, save and stop
        before that.
        """
        try:
            self._start()
            while self.state.step < self.config.run.steps:
                self._stop_if_asked()
                try:
                    self._step()
                except RollBack as cause:
                    self._roll_back(cause)
            with self.timers.phase("finish"):
                self._finish()
        except StopRequested:
            self._save_and_stop()
        except (RolloutFailedError, PublishError, SharedUserError):
            self._save_before_the_end()
            raise

    def _start(self) -> None:
        with self.timers.phase("resume"):
            restored = self.checkpoints.resume()
        self.state = restored or self.state
        self.gate.spikes.load_state(self.state.spikes)
        resumed = restored.step if restored else None
        self.started -= self.state.wall_seconds  # the wall clock of a run goes on over its resumes
        is_main = self.session.groups.rank == 0
        last_step = None if resumed is None else resumed - (self.state.unrecorded is not None)
        self.recorder = (
            Recorder(self.run_dir, self.config.run.steps, self.config.telemetry, last_step, self.state.row)
            if is_main
            else None
        )
        if self.recorder:
            (self.run_dir / "config.yaml").write_text(dump_config(self.config))
            self.recorder.note(
                f"resumed after step {resumed}" if resumed is not None else f"run folder {self.run_dir}"
            )
            self.timers.on_enter.append(self.recorder.phase)
            self.checkpoints.report_to(self.recorder.note)
        with self.timers.phase("publish"):
            self._publish()  # no rollout before the engine holds the trainer's weights
        self.checkpoints.capture(self.state)
        if resumed is None or self.state.unrecorded is not None:
            self._conclude(self.state.unrecorded or {}, evaluates=True)
        self.timers.take()  # what came before the loop belongs to no step

    def _step(self) -> None:
        step = self.state.step + 1
        self.supervisor.step = step
        self.gate.start_step(step)
        step_started = time.perf_counter()
        cpu_started = time.process_time()
        with self.timers.phase("rollout"):
            rollouts, counts = self.session.pipeline.collect(step, self.state.weight_version)
        self._prompts = rollouts.prompts
        metrics = compute_rollout_metrics(rollouts, counts, self.state.weight_version)
        if counts.scores.failed:
            self._note(f"warning: step {step}: {counts.scores.describe()}")
        self._stop_if_asked()
        with (
            self.timers.phase("update"),
            asleep(self.session.generator.engine, self.config.engine.sleep_while_training),
        ):
            result = (
                self._update(rollouts)
                if self.gate.accepts_rewards(metrics.get(names.REWARD))
                else UpdateResult({})
            )
        with self.timers.phase("rollout"):
            self.session.pipeline.wait()  # the engine's weights are overwritten next
        with self.timers.phase("publish"):
            self.state.weight_version += 1
            published, failure = self._try_to_publish()
        self.state.step = step
        self.state.wall_seconds = self._wall_seconds()
        self.state.spikes = self.gate.spikes.state()
        self.checkpoints.capture(self.state)
        self._is_step_untouched = True
        metrics |= (
            compute_update_metrics(result, self.session.actor.optimizer.param_groups[0]["lr"])
            | self.gate.metrics()
        )
        metrics[names.STEP_SECONDS] = time.perf_counter() - step_started
        metrics[names.STEP_CPU_SECONDS] = sum(all_gather_metadata(time.process_time() - cpu_started))
        metrics |= self.timers.take() | published
        self._record_completions(step, rollouts)
        self._conclude(
            metrics, evaluates=failure is None and self._is_due(self.config.evaluation.every, step)
        )
        if failure is not None:
            raise failure

    def _conclude(self, metrics: dict[str, float], evaluates: bool) -> None:
        """Evaluate, record and save the last finished step, as far as each is due.

        An evaluation that is stopped or fails leaves all of this to the run that resumes.
        """
        if evaluates:
            self.state.unrecorded = metrics
            metrics = metrics | self._evaluate()
            self.state.unrecorded = None
        self.state.row = dict(metrics)
        if self.recorder:
            self.recorder.step(self.state.step, metrics)
        if self.state.step:
            # training stands still here: its seconds are in the next step's row
            with self.timers.phase("checkpoint"):
                self.checkpoints.after_step(self.state, metrics)

    # ---- the verbs

    def _try_to_publish(self) -> tuple[dict[str, float], PublishError | None]:
        """Return the publish's metrics, or what it failed with on all ranks alike: the step before it is
        trained, and kept first.
        """
        try:
            return self._publish(), None
        except PublishError as error:
            return {}, error

    def _publish(self) -> dict[str, float]:
        stats = self.session.publisher.publish(self.state.weight_version)
        for note in stats.notes if self.recorder else ():
            self.recorder.note(note)
        return stats.metrics

    def _update(self, rollouts: StepRollouts) -> UpdateResult:
        result = self.session.updater.run(
            rollouts,
            learning_rate=lambda k: learning_rate(
                self.config.optimizer, self.state.updates + k, self.config.total_updates
            ),
            before_apply=partial(self._before_apply, rollouts),
            before_pass=self._stop_if_asked,
            accepts=self.gate.accepts,
            weight_version=self.state.weight_version,
        )
        self._is_step_untouched = not any(update.applied for update in result.applied)
        self.state.nonfinite_in_a_row = self.gate.count_nonfinite(
            self.state.nonfinite_in_a_row, result.applied
        )
        self.state.updates += len(result.applied)
        return result

    def _before_apply(
        self, rollouts: StepRollouts, metrics: Mapping[str, float], gap: LogprobGap | None
    ) -> None:
        """Decide before an update is applied; the first of a step is the last point at which the step can
        be given up.
        """
        if self._is_step_untouched:
            self._stop_if_asked()
        self.gate.before_apply(metrics, gap, rollouts)
        self._is_step_untouched = False

    def _stop_if_asked(self) -> None:
        """Stop where any rank was asked to. Collective over all ranks."""
        if all_reduce_flag(self.supervisor.stop_reason is not None):
            raise StopRequested

    def _save_before_the_end(self) -> None:
        """Bring to disk what an error that all ranks met alike would otherwise lose. Collective over all
        ranks.
        """
        if self.config.checkpoint.every and self.state.step and self._is_step_untouched:
            self.checkpoints.save_now(self.state)
        else:
            self.checkpoints.finish()

    def _save_and_stop(self) -> None:
        """Save the last finished step, unless it is saved already, and say how to go on."""
        step, begun, reasons = (
            self.state.step,
            self.supervisor.step,
            all_gather_metadata(self.supervisor.stop_reason),
        )
        with self.timers.phase("checkpoint"):
            is_saved = self.checkpoints.save_now(self.state)
        if self.recorder:
            reason = next(reason for reason in reasons if reason is not None)
            self.recorder.note(
                f"stopped by {reason} after step {step} of {self.config.run.steps}, which is "
                f"{'' if is_saved else 'NOT '}saved; "
                f"{f'step {begun} was given up; ' if begun and begun > step else ''}the same command "
                f"{'' if self.config.run.resume == 'auto' else 'with run.resume=auto '}goes on from there"
            )

    def _roll_back(self, cause: RollBack) -> None:
        """Go on from the newest checkpoint with the prompts that come next; those of the offending step are
        logged and never drawn again.

        Collective over all ranks.
        """
        number, version, position = (
            self.state.roll_backs + 1,
            self.state.weight_version,
            self.session.pipeline.next_position,
        )
        if self.recorder:
            self.recorder.roll_back(self.supervisor.step, str(cause), self._prompts)
        if number > self.config.spikes.max_roll_backs:
            raise SharedUserError(
                f"{cause}; {number - 1} roll-backs were made already (spikes.max_roll_backs)"
            )
        with self.timers.phase("resume"):
            restored = self.checkpoints.roll_back()
        if restored is None:
            raise SharedUserError(f"{cause}; there is no checkpoint to roll back to yet")
        self.state = restored
        self.state.unrecorded = None  # recorded since, by the run that has resumed from there
        # a version names one set of weights, for ever
        self.state.roll_backs, self.state.weight_version = number, version + 1
        self.gate.spikes.load_state(self.state.spikes)
        self.session.pipeline.skip_to(position)
        self.checkpoints.capture(self.state)
        with self.timers.phase("publish"):
            self.session.publisher.publish(self.state.weight_version)
        self.timers.take()
        if self.recorder:
            self.recorder.rewind(self.state.step)
            self.recorder.note(
                f"warning: {cause}; rolled back to step {self.state.step}, on with the next "
                f"prompts (roll-back {number})"
            )

    def _note(self, text: str) -> None:
        if self.recorder:
            self.recorder.note(text)

    def _evaluate(self) -> dict[str, float]:
        metrics: dict[str, float] = {}
        with self.timers.phase("evaluate"):
            for evaluation, prompts in self.session.evaluation_prompts:
                metrics |= evaluate_set(
                    self.session.generator, evaluation, prompts, self.config.rollout, self.config.run.seed
                )
        self.timers.take()
        return metrics

    def _finish(self) -> None:
        self.checkpoints.close(self.state)
        if self.config.run.export_hf:
            tensors = self.session.publisher.exporter.tensors()
            if self.recorder:
                write_hf_folder(tensors, hf_folder_of(self.config.model.path), self.run_dir / "hf")
            else:
                for _ in tensors:  # takes part in the collectives; the first rank writes
                    pass
        peaks = all_gather_metadata(device_module.peak_rss_bytes())
        if self.recorder:
            self.recorder.finish(self._wall_seconds(), peaks)

    # ---- records

    def _record_completions(self, step: int, rollouts: StepRollouts) -> None:
        if self.recorder and self._is_due(self.config.telemetry.completions_every, step):
            samples = [
                (rollouts.prompts[key[0]], c, rollouts.records[key].reward)
                for key, c in rollouts.local.items()
            ]
            self.recorder.completions(step, samples)

    def _is_due(self, every: int, step: int) -> bool:
        return step == self.config.run.steps or bool(every and step % every == 0)

    def _wall_seconds(self) -> float:
        return time.perf_counter() - self.started
