"""Builds everything that a run needs, in order, from the configuration."""

import os
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch

from megagrpo.algorithms.algorithm import Algorithm
from megagrpo.checkpoint.identity import check_own_config
from megagrpo.config.model_folder import hf_folder_of, is_megatron_checkpoint, write_model_folder
from megagrpo.config.rollout_sections import EvaluationSetConfig
from megagrpo.config.schema import Config
from megagrpo.device.device import set_deterministic
from megagrpo.engines.base import Engine
from megagrpo.engines.replicas import build_rollout_engine, engine_log, owner_of_replica, replicas_of_ranks
from megagrpo.engines.server.engine import ServerEngine
from megagrpo.fleet.recovering_publisher import RecoveringPublisher
from megagrpo.fleet.replica_recovery import ReplicaRecovery
from megagrpo.models.hf_config import read_hf_config
from megagrpo.models.hf_files import check_no_unknown_tensors
from megagrpo.models.load_stage import load_stage_model
from megagrpo.models.precision import build_precision
from megagrpo.models.spec import uses_transformer_engine
from megagrpo.models.stage import StageModel
from megagrpo.models.transformer_config import build_transformer_config
from megagrpo.parallel.alignment import sequence_alignment, token_alignment
from megagrpo.parallel.groups import ParallelGroups, build_groups
from megagrpo.parallel.layout import ParallelLayout, build_layout
from megagrpo.policy.actor import Actor
from megagrpo.policy.batch import MicroBatchBuilder
from megagrpo.policy.microbatches import PackingRules
from megagrpo.policy.reference import Reference
from megagrpo.policy.update import PolicyUpdater
from megagrpo.rewards.pool import RewardPool
from megagrpo.rewards.special_tokens import text_with_special_tokens
from megagrpo.rollout.data_identity import check_same_on_ranks
from megagrpo.rollout.generation import RolloutGenerator
from megagrpo.rollout.pipeline import RolloutPipeline
from megagrpo.rollout.prompts import PromptSampler, PromptSource, load_prompts
from megagrpo.rollout.tokenisation import check_tokenizer, load_tokenizer
from megagrpo.supervision.run_lock import RunLock, hold_run_folder
from megagrpo.telemetry.activity import Counts, count_nothing
from megagrpo.types import Prompt
from megagrpo.weights.from_config import build_publisher
from megagrpo.weights.publisher import Publisher


@dataclass
class Session:
    """The parts of a run on this rank."""

    config: Config
    lock: RunLock
    tokenizer: Any
    groups: ParallelGroups
    layout: ParallelLayout
    actor: Actor
    algorithm: Algorithm
    reference: Reference | None
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
    building: Callable[[str, Path | None], None] = lambda what, log: None,
    counts: Counts = count_nothing,
) -> Session:
    """Check the inputs, then build models, engine, reward workers and data. Collective over all ranks.

    Args:
        engine_start: what all ranks are in while they wait for an engine that is started anew.
        note: told what the user should know of the data, line by line.
        building: told what is built next, and the log of another process that is waited for.
        counts: told how far the phases of a step have come.

    Raises:
        UserError: anything about the model, the data or the rewards that the user can mend; before the models
            are built where it can be known by then.
    """
    building("tokenizer and data", None)
    set_deterministic(config.run.deterministic)
    precision = build_precision(config.precision.recipe)
    use_te = uses_transformer_engine(config.model.attention, precision.params_dtype)
    if config.model.changed_fields:
        for line in write_model_folder(config.model, Path(config.model_folder)):
            note(line)
    hf_folder = hf_folder_of(config.model_folder)
    hf = read_hf_config(hf_folder)
    check_own_config(config.model_folder, hf, config.model.changed_fields)
    algorithm = Algorithm(
        config.algorithm, config.rollout.completions_per_prompt, config.rollout.max_new_tokens
    )
    tokenizer = load_tokenizer(config)
    check_tokenizer(tokenizer, hf.vocab_size)
    source, evaluation_prompts = load_prompts(config, tokenizer, hf.max_position_embeddings, note)
    sets = prompts_by_field(source, evaluation_prompts)
    building("the reward workers", None)
    rewards = RewardPool(
        config.rewards,
        {place: list(prompts[0].columns) for place, prompts in sets.items()},
        None
        if config.rewards.special_tokens == "strip"
        else text_with_special_tokens(tokenizer, config.rollout.stop),
    )
    building("the process groups", None)
    layout = build_layout(config.parallel, int(os.environ.get("WORLD_SIZE", "1")))
    groups = build_groups(layout, config.run.collective_timeout_seconds)
    check_same_on_ranks(sets)
    lock = hold_run_folder(Path(config.run.dir))

    def load_model() -> StageModel:
        transformer_config = build_transformer_config(
            hf,
            groups,
            precision,
            config.parallel.sp,
            config.update.recompute,
            moe_dispatcher=config.parallel.moe_dispatcher,
            router_aux_loss_coef=config.update.router_aux_loss_coef,
            use_te=use_te,
            deterministic_mode=config.run.deterministic,
        )
        return load_stage_model(config.model_folder, hf, transformer_config, groups, device, use_te)

    building("the actor", None)
    actor = Actor(
        load_model(),
        config.optimizer,
        config.parallel.overlap_grad_reduce,
        config.parallel.overlap_param_gather,
        counts,
    )
    if not is_megatron_checkpoint(config.model_folder):
        check_no_unknown_tensors(actor.model, config.model_folder)
    building("the reference" if algorithm.needs_reference else "the update", None)
    reference = Reference(load_model(), counts) if algorithm.needs_reference else None
    pad_token_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    rules = PackingRules(
        config.update.max_tokens_per_microbatch,
        token_alignment(config.parallel, config.precision.recipe),
        config.update.packing,
        config.update.share_prompts and not use_te,
        layout.min_microbatches,
        layout.microbatch_multiple,
        sequence_alignment(config.parallel, use_te),
    )
    builder = MicroBatchBuilder(device, rules, pad_token_id, use_te, layout.cp, groups.cp_rank)
    updater = PolicyUpdater(
        actor=actor,
        reference=reference,
        algorithm=algorithm,
        groups=groups,
        layout=layout,
        builder=builder,
        rules=rules,
        update=config.update,
        rollout=config.rollout,
        rewards=config.rewards,
        is_comparable=not config.has_narrowed_logprobs,
    )
    building(f"the rollout engine ({config.engine.name})", engine_log(config, replica=0))
    engine = build_rollout_engine(config, groups, hf_folder, tokenizer, device, precision.params_dtype)
    generator = RolloutGenerator(
        engine,
        rewards,
        groups,
        replicas_of_ranks(config, groups.world_size),
        is_embedded=engine.is_embedded,
        revive=lambda: isinstance(publisher, RecoveringPublisher) and publisher.revive(),
        counts=counts,
    )
    building("the plan of weights", None)
    publisher = _watch_replicas(
        build_publisher(config, actor, builder, engine, source.prompts, counts),
        config,
        engine,
        generator,
        engine_start,
    )
    sampler = PromptSampler(source, config.run.seed)
    return Session(
        config=config,
        lock=lock,
        tokenizer=tokenizer,
        groups=groups,
        layout=layout,
        actor=actor,
        algorithm=algorithm,
        reference=reference,
        updater=updater,
        generator=generator,
        publisher=publisher,
        pipeline=RolloutPipeline(
            rollout=config.rollout,
            algorithm=config.algorithm,
            num_steps=config.run.steps,
            seed=config.run.seed,
            generator=generator,
            sampler=sampler,
            allowed_changes=config.run.allow_config_changes,
            note=note,
        ),
        evaluation_prompts=evaluation_prompts,
    )


def _watch_replicas(
    publisher: Publisher,
    config: Config,
    engine: Engine,
    generator: RolloutGenerator,
    engine_start: Callable[[], AbstractContextManager[None]],
) -> Publisher:
    """Let engines in processes of their own be started anew where they are lost."""
    if engine.is_embedded:
        return publisher
    groups, num_replicas = generator.groups, config.engine.server.num_replicas
    owners = [owner_of_replica(replica, groups.world_size, num_replicas) for replica in range(num_replicas)]
    recovery = ReplicaRecovery(
        cast(ServerEngine, engine),
        generator.replicas,
        owners,
        groups.rank,
        is_stopping=lambda: generator.is_given_up,
        waiting=engine_start,
    )
    return RecoveringPublisher(publisher, recovery)


def prompts_by_field(
    source: PromptSource, held_out: list[tuple[EvaluationSetConfig, list[Prompt]]]
) -> dict[str, Sequence[Prompt]]:
    """Return the prompts of each data set, by the field that names the set."""
    return {"data.source": source.prompts} | {
        f"evaluation.sets.{number}.source": prompts for number, (_, prompts) in enumerate(held_out)
    }
