"""Builds everything that a run needs, in order, from the configuration."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megagrpo.algorithms.algorithm import Algorithm
from megagrpo.checkpoint.identity import check_own_files
from megagrpo.config.model_folder import is_megatron_checkpoint
from megagrpo.config.rollout_sections import EvaluationSetConfig
from megagrpo.config.schema import Config
from megagrpo.device.device import set_deterministic
from megagrpo.models.hf_files import check_no_unknown_tensors
from megagrpo.parallel.groups import ParallelGroups, build_groups
from megagrpo.parallel.layout import ParallelLayout, build_layout
from megagrpo.policy.actor import Actor
from megagrpo.policy.batch import MicroBatchBuilder
from megagrpo.policy.offload import Offload
from megagrpo.policy.reference import Reference
from megagrpo.policy.update import PolicyUpdater
from megagrpo.rollout.data_identity import check_same_on_ranks
from megagrpo.rollout.generation import RolloutGenerator
from megagrpo.rollout.pipeline import RolloutPipeline
from megagrpo.rollout.prompts import PromptSampler
from megagrpo.run_inputs import RunInputs, read_inputs
from megagrpo.serving import (
    Building,
    build_batches,
    build_generator,
    build_nothing,
    build_rewards,
    connect_weights,
    load_model,
)
from megagrpo.supervision.run_lock import RunLock, hold_run_folder
from megagrpo.telemetry.activity import Counts, count_nothing
from megagrpo.types import Prompt
from megagrpo.weights.publisher import Publisher


@dataclass
class Session:
    """The parts of a run on this rank."""

    lock: RunLock
    tokenizer: Any
    groups: ParallelGroups
    layout: ParallelLayout
    actor: Actor
    algorithm: Algorithm
    reference: Reference | None
    offload: Offload
    updater: PolicyUpdater
    generator: RolloutGenerator
    publisher: Publisher
    pipeline: RolloutPipeline
    evaluation_prompts: list[tuple[EvaluationSetConfig, list[Prompt]]]

    def close(self) -> None:
        """Stop what this rank started."""
        self.generator.rewards.close()  # first: what is in flight then ends at its next score
        self.pipeline.close()
        self.publisher.close()
        self.generator.engine.close()
        self.actor.close()
        self.lock.release()


def build_session(
    config: Config,
    device: torch.device,
    engine_start: Callable[[], AbstractContextManager[None]] = nullcontext,
    note: Callable[[str], None] = lambda line: None,
    building: Building = build_nothing,
    counts: Counts = count_nothing,
) -> Session:
    """Check the inputs, then build models, engine, reward workers and data. Collective over all ranks.

    Args:
        engine_start: context of all ranks while they wait for an engine that restarts.
        note: told what the user should know of the data and of engines that fail, line by line.
        building: told what is built next, and the log of another process that is waited for.
        counts: told how far the phases of a step have come.

    Raises:
        UserError: anything about the model, the data or the rewards that the user can mend; before the models
            are built where it can be known by then.
    """
    building("tokenizer and data", None)
    set_deterministic(config.run.deterministic)
    inputs = read_inputs(config, note)
    building("the reward workers", None)
    rewards = build_rewards(config, inputs)
    building("the process groups", None)
    layout = build_layout(config.parallel, int(os.environ.get("WORLD_SIZE", "1")))
    groups = build_groups(layout, config.run.collective_timeout_seconds)
    check_same_on_ranks(inputs.prompts)
    lock = hold_run_folder(Path(config.run.dir))
    actor, reference = _build_models(config, inputs, groups, device, building, counts)
    offload = Offload(config.update.offload, actor, reference, device)
    offload.leave()  # the engine takes its memory from what is free
    builder = build_batches(config, inputs, layout, groups.cp_rank, device)
    generator = build_generator(
        config, inputs, groups, rewards, device, building=building, counts=counts, note=note
    )
    publisher = connect_weights(
        config, inputs, actor, builder, generator, engine_start=engine_start, building=building, counts=counts
    )
    return Session(
        lock=lock,
        tokenizer=inputs.tokenizer,
        groups=groups,
        layout=layout,
        actor=actor,
        algorithm=inputs.algorithm,
        reference=reference,
        offload=offload,
        updater=_build_updater(config, inputs, layout, actor, reference, builder),
        generator=generator,
        publisher=publisher,
        pipeline=RolloutPipeline(
            rollout=config.rollout,
            algorithm=config.algorithm,
            num_steps=config.run.steps,
            seed=config.run.seed,
            generator=generator,
            sampler=PromptSampler(inputs.source, config.run.seed),
            allowed_changes=config.run.allow_config_changes,
            note=note,
        ),
        evaluation_prompts=inputs.evaluation_prompts,
    )


def _build_models(
    config: Config,
    inputs: RunInputs,
    groups: ParallelGroups,
    device: torch.device,
    building: Building,
    counts: Counts,
) -> tuple[Actor, Reference | None]:
    """Collective over all ranks."""
    building("the actor", None)
    check_own_files(config.model.path)
    actor = Actor(
        load_model(config, inputs, groups, device),
        config.optimizer,
        config.parallel.overlap_grad_reduce,
        config.parallel.overlap_param_gather,
        counts,
        gradients_in_float32=config.precision.gradients == "fp32",
    )
    if not is_megatron_checkpoint(config.model_folder):
        check_no_unknown_tensors(actor.model, config.model_folder)
    building("the reference" if inputs.algorithm.needs_reference else "the update", None)
    if not inputs.algorithm.needs_reference:
        return actor, None
    return actor, Reference(load_model(config, inputs, groups, device), counts)


def _build_updater(
    config: Config,
    inputs: RunInputs,
    layout: ParallelLayout,
    actor: Actor,
    reference: Reference | None,
    builder: MicroBatchBuilder,
) -> PolicyUpdater:
    return PolicyUpdater(
        actor=actor,
        reference=reference,
        algorithm=inputs.algorithm,
        groups=actor.model.groups,
        layout=layout,
        builder=builder,
        rules=builder.rules,
        update=config.update,
        rollout=config.rollout,
        rewards=config.rewards,
        is_comparable=not config.has_narrowed_logprobs,
    )
