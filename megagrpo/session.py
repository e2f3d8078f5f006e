"""Builds everything that a run needs, in order, from the configuration."""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from megagrpo.algorithms.algorithm import Algorithm
from megagrpo.checkpoint.identity import check_own_files
from megagrpo.config.model_folder import is_megatron_checkpoint
from megagrpo.config.rollout_sections import EvaluationSetConfig
from megagrpo.config.schema import Config
from megagrpo.device.device import set_deterministic
from megagrpo.engines.replicas import build_rollout_engine, engine_log, owner_of_replica, replicas_of_ranks
from megagrpo.engines.server.engine import ServerEngine
from megagrpo.fleet.recovering_publisher import RecoveringPublisher
from megagrpo.fleet.replica_recovery import ReplicaRecovery
from megagrpo.models.emulation import emulate_float8
from megagrpo.models.hf_files import check_no_unknown_tensors
from megagrpo.models.load_stage import load_stage_model
from megagrpo.models.stage import StageModel
from megagrpo.models.transformer_config import build_transformer_config
from megagrpo.parallel.alignment import sequence_alignment, token_alignment
from megagrpo.parallel.groups import ParallelGroups, build_groups
from megagrpo.parallel.layout import ParallelLayout, build_layout
from megagrpo.policy.actor import Actor
from megagrpo.policy.batch import MicroBatchBuilder
from megagrpo.policy.microbatches import PackingRules
from megagrpo.policy.offload import Offload
from megagrpo.policy.reference import Reference
from megagrpo.policy.update import PolicyUpdater
from megagrpo.rewards.pool import RewardPool
from megagrpo.rewards.special_tokens import text_with_special_tokens
from megagrpo.rollout.data_identity import check_same_on_ranks
from megagrpo.rollout.generation import RolloutGenerator
from megagrpo.rollout.pipeline import RolloutPipeline
from megagrpo.rollout.prompts import PromptSampler
from megagrpo.run_inputs import RunInputs, read_inputs
from megagrpo.supervision.run_lock import RunLock, hold_run_folder
from megagrpo.telemetry.activity import Counts, count_nothing
from megagrpo.types import Prompt
from megagrpo.weights.from_config import build_publisher
from megagrpo.weights.publisher import Publisher

Building = Callable[[str, Path | None], None]
"""Called with what is built next, and the log of another process that is awaited."""


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
    building: Building = lambda what, log: None,
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
    rewards = RewardPool(
        config.rewards, {place: list(prompts[0].columns) for place, prompts in inputs.prompts.items()}
    )
    building("the process groups", None)
    layout = build_layout(config.parallel, int(os.environ.get("WORLD_SIZE", "1")))
    groups = build_groups(layout, config.run.collective_timeout_seconds)
    check_same_on_ranks(inputs.prompts)
    lock = hold_run_folder(Path(config.run.dir))
    actor, reference = _build_models(config, inputs, groups, device, building, counts)
    updater, builder = _build_updater(config, inputs, layout, actor, reference, device)
    offload = Offload(config.update.offload, actor, reference, device)
    offload.leave()  # the engine takes its memory from what is free
    generator, publisher = _build_engine(
        config, inputs, actor, builder, rewards, engine_start, building, counts, note
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
        updater=updater,
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

    def load_model() -> StageModel:
        transformer_config = build_transformer_config(
            inputs.hf,
            groups,
            inputs.precision,
            config.parallel.sp,
            config.update.recompute,
            moe_dispatcher=config.parallel.moe_dispatcher,
            router_aux_loss_coef=config.update.router_aux_loss_coef,
            use_te=inputs.use_te,
            deterministic_mode=config.run.deterministic,
        )
        model = load_stage_model(
            config.model_folder, inputs.hf, transformer_config, groups, device, inputs.use_te
        )
        return emulate_float8(model, config.precision.recipe) if config.precision.emulate else model

    building("the actor", None)
    check_own_files(config.model.path)
    actor = Actor(
        load_model(),
        config.optimizer,
        config.parallel.overlap_grad_reduce,
        config.parallel.overlap_param_gather,
        counts,
        gradients_in_float32=config.precision.gradients == "fp32",
    )
    if not is_megatron_checkpoint(config.model_folder):
        check_no_unknown_tensors(actor.model, config.model_folder)
    building("the reference" if inputs.algorithm.needs_reference else "the update", None)
    return actor, Reference(load_model(), counts) if inputs.algorithm.needs_reference else None


def _build_updater(
    config: Config,
    inputs: RunInputs,
    layout: ParallelLayout,
    actor: Actor,
    reference: Reference | None,
    device: torch.device,
) -> tuple[PolicyUpdater, MicroBatchBuilder]:
    groups, tokenizer, use_te = actor.model.groups, inputs.tokenizer, inputs.use_te
    rules = PackingRules(
        config.update.max_tokens_per_microbatch,
        token_alignment(config.parallel, config.precision.recipe),
        config.update.packing,
        config.update.share_prompts and not use_te,
        layout.min_microbatches,
        layout.microbatch_multiple,
        sequence_alignment(config.parallel, use_te),
    )
    pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    builder = MicroBatchBuilder(device, rules, pad_token_id, use_te, layout.cp, groups.cp_rank)
    updater = PolicyUpdater(
        actor=actor,
        reference=reference,
        algorithm=inputs.algorithm,
        groups=groups,
        layout=layout,
        builder=builder,
        rules=rules,
        update=config.update,
        rollout=config.rollout,
        rewards=config.rewards,
        is_comparable=not config.has_narrowed_logprobs,
    )
    return updater, builder


def _build_engine(
    config: Config,
    inputs: RunInputs,
    actor: Actor,
    builder: MicroBatchBuilder,
    rewards: RewardPool,
    engine_start: Callable[[], AbstractContextManager[None]],
    building: Building,
    counts: Counts,
    note: Callable[[str], None],
) -> tuple[RolloutGenerator, Publisher]:
    """Return the generator, and the publisher of weights to its engine. Collective over all ranks."""
    groups, run_dir = actor.model.groups, Path(config.run.dir)
    building(f"the rollout engine ({config.engine.name})", engine_log(config.engine, run_dir, replica=0))
    engine = build_rollout_engine(
        config.engine,
        run_dir,
        config.longest_sequence_tokens,
        groups,
        inputs.hf_folder,
        inputs.tokenizer,
        builder.device,
        inputs.precision.params_dtype,
    )
    is_stripped = config.rewards.special_tokens == "strip"
    generator = RolloutGenerator(
        engine,
        rewards,
        groups,
        replicas_of_ranks(config.engine, groups.world_size),
        is_embedded=engine.is_embedded,
        revive=lambda: isinstance(publisher, RecoveringPublisher) and publisher.revive(),
        counts=counts,
        note=note,
        read_text=None if is_stripped else text_with_special_tokens(inputs.tokenizer, config.rollout.stop),
    )
    building("the plan of weights", None)
    publisher = build_publisher(
        config.weights,
        config.engine,
        actor,
        builder,
        engine,
        inputs.source.prompts,
        run_dir=run_dir,
        timeout_seconds=config.run.collective_timeout_seconds,
        recipe=config.precision.recipe,
        max_new_tokens=config.rollout.max_new_tokens,
        counts=counts,
    )
    if not engine.is_embedded:
        publisher = _watch_replicas(publisher, config.engine.server.num_replicas, generator, engine_start)
    return generator, publisher


def _watch_replicas(
    publisher: Publisher,
    num_replicas: int,
    generator: RolloutGenerator,
    engine_start: Callable[[], AbstractContextManager[None]],
) -> Publisher:
    """Wrap the publisher so that lost replicas are restarted."""
    groups = generator.groups
    owners = [owner_of_replica(replica, groups.world_size, num_replicas) for replica in range(num_replicas)]
    recovery = ReplicaRecovery(
        cast(ServerEngine, generator.engine),
        generator.replicas,
        owners,
        groups.rank,
        is_stopping=lambda: generator.is_given_up,
        waiting=engine_start,
    )
    return RecoveringPublisher(publisher, recovery)
