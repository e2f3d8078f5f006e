"""Runs a configuration on this rank: builds the parts, wires the loop, and takes everything down again."""

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch

from megagrpo.algorithms.algorithm import Algorithm
from megagrpo.checkpoint.resume import check_config
from megagrpo.checkpoint.run_checkpoints import RunCheckpoints
from megagrpo.checkpoint.state import RandomStates, Stateful, StateOfNumbers, StateOfRanks
from megagrpo.config.engine_sections import EngineConfig
from megagrpo.config.load import dump_config
from megagrpo.config.model_folder import hf_folder_of
from megagrpo.config.rollout_sections import EvaluationSetConfig
from megagrpo.config.schema import Config
from megagrpo.device.device import finish_queued_work
from megagrpo.device.environment import describe_crowding
from megagrpo.device.memory import PeakMemory
from megagrpo.engines.base import Engine, asleep
from megagrpo.errors import StopRequested, UserError
from megagrpo.evaluation.evaluator import Evaluator
from megagrpo.models.hf_export import export_dtype, staging_folder, write_hf_folder
from megagrpo.parallel.groups import all_reduce_flag, destroy_groups
from megagrpo.policy.actor import Actor
from megagrpo.policy.guarded_update import GuardedUpdate, UpdateGate
from megagrpo.policy.logprob_gap import LogprobGapGate, warning_bound
from megagrpo.policy.offload import Offload
from megagrpo.policy.reference import Reference
from megagrpo.policy.schedule import learning_rate
from megagrpo.policy.update import PolicyUpdater
from megagrpo.rollout.data_identity import describe_data, describe_other_held_out
from megagrpo.rollout.generation import RolloutGenerator
from megagrpo.rollout.pipeline import RolloutPipeline
from megagrpo.session import build_session
from megagrpo.supervision.supervisor import Supervisor
from megagrpo.telemetry.activity import Activity
from megagrpo.telemetry.clock import RunClock
from megagrpo.telemetry.display import Display
from megagrpo.telemetry.model_card import write_model_card
from megagrpo.telemetry.recorder import NullRecorder, Recorder
from megagrpo.telemetry.timers import PhaseTimers
from megagrpo.telemetry.trace import StepTrace
from megagrpo.trainer import Trainer
from megagrpo.types import Prompt
from megagrpo.weights.export import WeightExporter

HeldOut = list[tuple[EvaluationSetConfig, list[Prompt]]]
"""Sets of prompts that are evaluated and never trained on."""


def run_training(
    config: Config,
    device: torch.device,
    supervisor: Supervisor | None = None,
    display: Display | None = None,
) -> None:
    """Run a configuration from start (or its newest checkpoint) to end on this rank's `device`. Collective
    over all ranks.

    Args:
        supervisor: told where the rank is; None: nobody watches.
        display: of rank 0, which shows what runs; None makes one there.
    """
    clock, run_dir = RunClock(), Path(config.run.dir)
    supervisor = supervisor or Supervisor(run_dir, config.watchdog)
    rank = int(os.environ.get("RANK", "0"))
    is_first = rank == 0
    activity = display.activity if display else Activity(config.run.steps)
    recorder = build_recorder(config, display or Display(activity)) if is_first else NullRecorder()
    if crowding := describe_crowding(int(os.environ.get("LOCAL_WORLD_SIZE", "1"))):
        recorder.note(crowding)
    trace = StepTrace(run_dir, config.telemetry.trace_step, rank, recorder.note)
    peaks = PeakMemory()
    timers = build_timers(supervisor, activity, trace, peaks)

    def stop_if_asked() -> None:
        if all_reduce_flag(supervisor.stop_reason is not None):
            raise StopRequested

    with supervisor.phase("start"):
        session = build_session(
            config,
            device,
            engine_start=partial(timers.phase, "engine_start"),
            note=recorder.note,
            building=activity.build,
            counts=activity.count,
        )
    try:
        update = build_update(config, session.updater, stop_if_asked, recorder)
        checkpoints = build_checkpoints(
            config,
            actor=session.actor,
            reference=session.reference,
            pipeline=session.pipeline,
            algorithm=session.algorithm,
            gate=update.gate,
            held_out=session.evaluation_prompts,
            tokenizer=session.tokenizer,
            exporter=session.publisher.exporter,
            recorder=recorder,
        )
        supervisor.training_begins(session.generator.give_up, before_leaving=checkpoints.keep)
        Trainer(
            num_steps=config.run.steps,
            pipeline=session.pipeline,
            update=update,
            publisher=session.publisher,
            evaluator=build_evaluator(config, session.generator, session.evaluation_prompts),
            checkpoints=checkpoints,
            recorder=recorder,
            timers=timers,
            peaks=peaks,
            supervisor=supervisor,
            stop_if_asked=stop_if_asked,
            clock=clock,
            engine_rests=partial(_rest, session.generator.engine, session.offload, config.engine),
            trace=trace.step,
            export=build_export(config, session.publisher.exporter, is_first),
            max_roll_backs=config.spikes.max_roll_backs,
        ).run()
        destroy_groups()
    except Exception as error:
        recorder.close()
        # before the engines and workers are closed: the other ranks wait for the cause
        supervisor.fail(error)
        raise
    finally:
        session.close()


def build_timers(
    supervisor: Supervisor, activity: Activity, trace: StepTrace, peaks: PeakMemory
) -> PhaseTimers:
    """Return the timers of the run's phases, which all that follows a run listens to."""
    return PhaseTimers(
        finish_queued_work,
        on_enter=[supervisor.enter, activity.enter, peaks.enter, trace.enter],
        on_leave=[trace.leave, peaks.leave, supervisor.leave, activity.leave],
    )


def build_recorder(config: Config, display: Display) -> Recorder:
    """Return what the first rank records, with the model card of an export at the end."""

    def write_card(summary: Mapping[str, Any]) -> None:
        if config.run.export_hf:
            write_model_card(Path(config.run.dir) / "hf", config, summary)

    return Recorder(
        Path(config.run.dir),
        config.run.steps,
        config.telemetry,
        dump_config(config),
        display,
        on_summary=write_card,
    )


@contextmanager
def _rest(engine: Engine, offload: Offload, section: EngineConfig) -> Iterator[None]:
    """Context of an update: the device belongs to the policy while it lasts."""
    with asleep(engine, section.sleep_while_training), offload.resident():
        yield


def build_update(
    config: Config, updater: PolicyUpdater, stop_if_asked: Callable[[], None], recorder: NullRecorder
) -> GuardedUpdate:
    """Return the run's updates behind their gate, whose warnings are recorded."""
    rollout = config.rollout
    warn_above = warning_bound(
        rollout.logprob_gap,
        is_float32=config.precision.recipe == "fp32" and not config.engine.is_quantized,
        is_narrowed=config.has_narrowed_logprobs,
    )
    logprob_gap = LogprobGapGate(rollout.logprob_gap, warn_above, recorder.note)
    return GuardedUpdate(
        updater=updater,
        gate=UpdateGate(config.spikes, logprob_gap, config.run.max_nonfinite_steps, recorder.note),
        learning_rate=partial(learning_rate, config.optimizer, total_updates=config.total_updates),
        stop_if_asked=stop_if_asked,
    )


def build_evaluator(config: Config, generator: RolloutGenerator, held_out: HeldOut) -> Evaluator:
    """Return the run's held-out evaluations."""
    every, steps = config.evaluation.every, config.run.steps
    return Evaluator(generator, held_out, config.rollout, config.run.seed, every, steps)


def build_checkpoints(
    config: Config,
    *,
    actor: Actor,
    reference: Reference | None,
    pipeline: RolloutPipeline,
    algorithm: Algorithm,
    gate: UpdateGate,
    held_out: HeldOut,
    tokenizer: Any,
    exporter: WeightExporter,
    recorder: NullRecorder,
) -> RunCheckpoints:
    """Return the run's checkpoints, which keep the parts named here beside the weights and the counters."""
    sets = {each.name: describe_data(prompts) for each, prompts in held_out}
    rank = actor.model.groups.rank

    def compare_held_out(saved: Mapping[str, Any]) -> None:
        for line in describe_other_held_out(saved, sets):
            recorder.note(line)

    parts: Mapping[str, Stateful] = {
        "rollout": pipeline,
        "algorithm": StateOfNumbers(algorithm.state_dict, algorithm.load_state_dict),
        "gate": StateOfNumbers(gate.spikes.state, gate.spikes.load_state),
        "held_out": StateOfNumbers(lambda: sets, compare_held_out),
        "random": StateOfRanks("random", RandomStates(rank), rank),
    }
    return RunCheckpoints(
        config.checkpoint,
        run=config.run,
        model=config.model,
        model_folder=config.model_folder,
        export=config.export,
        config_text=dump_config(config),
        check_config=partial(check_config, config=config),
        actor=actor,
        reference=reference.model if reference else None,
        parts=parts,
        tokenizer=tokenizer,
        tensors=exporter.tensors,
        note=recorder.note,
    )


def build_export(config: Config, exporter: WeightExporter, is_first: bool) -> Callable[[], None]:
    """Return the function that writes the weights as an HF folder, or one that does nothing; a collective
    over all ranks.

    What it needs of the model's folder beside config and tokenizer is read now. It raises a UserError on the
    first rank where the folder could not be written.
    """
    if not config.run.export_hf:
        return lambda: None
    source, target = hf_folder_of(config.model_folder), Path(config.run.dir) / "hf"
    dtype = export_dtype(config.export.dtype, source)

    def export() -> None:
        if not is_first:
            for _ in exporter.tensors():  # takes part in the collectives; the first rank writes
                pass
            return
        try:
            write_hf_folder(exporter.tensors(), source, target, dtype, config.model.tokenizer)
        except FileNotFoundError as error:
            raise UserError(
                f"run.export_hf: {error.filename} is gone: not an HF folder; "
                f"the weights alone are in {staging_folder(target)}"
            ) from error
        except OSError as error:
            raise UserError(
                f"run.export_hf: {target}: {error.strerror or error}; the weights are in the newest "
                "checkpoint, where there are checkpoints"
            ) from error

    return export
