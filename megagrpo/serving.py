"""Builds what samples and scores: a model's stage, the engine with the rewards' workers, and what brings
weights to it. A run trains with it; `megagrpo evaluate` and `megagrpo sample` do not train.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import cast

import torch

from megagrpo.config.schema import Config
from megagrpo.engines.replicas import build_rollout_engine, engine_log, owner_of_replica, replicas_of_ranks
from megagrpo.engines.server.engine import ServerEngine
from megagrpo.fleet.recovering_publisher import RecoveringPublisher
from megagrpo.fleet.replica_recovery import ReplicaRecovery
from megagrpo.models.emulation import emulate_float8
from megagrpo.models.load_stage import load_stage_model
from megagrpo.models.stage import StageModel
from megagrpo.models.transformer_config import build_transformer_config
from megagrpo.parallel.alignment import sequence_alignment, token_alignment
from megagrpo.parallel.groups import ParallelGroups
from megagrpo.parallel.layout import ParallelLayout
from megagrpo.policy.actor import Actor
from megagrpo.policy.batch import MicroBatchBuilder
from megagrpo.policy.microbatches import PackingRules
from megagrpo.policy.reference import Reference
from megagrpo.rewards.pool import RewardPool
from megagrpo.rewards.special_tokens import text_with_special_tokens
from megagrpo.rollout.generation import RolloutGenerator
from megagrpo.run_inputs import RunInputs
from megagrpo.telemetry.activity import Counts, count_nothing
from megagrpo.weights.from_config import build_publisher
from megagrpo.weights.publisher import Publisher

Building = Callable[[str, Path | None], None]
"""Called with what is built next, and the log of another process that is awaited."""


def build_nothing(what: str, log: Path | None) -> None:
    """Take what is built next, for nobody to read."""


def build_rewards(config: Config, inputs: RunInputs) -> RewardPool:
    """Start the workers of all rewards; UserError where one lacks a column that it reads."""
    return RewardPool(config.rewards, inputs.prompts)


def load_model(config: Config, inputs: RunInputs, groups: ParallelGroups, device: torch.device) -> StageModel:
    """Build this rank's stage and read its weights. Collective over all ranks."""
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


def build_batches(
    config: Config, inputs: RunInputs, layout: ParallelLayout, cp_rank: int, device: torch.device
) -> MicroBatchBuilder:
    """Return what packs sequences for the model; its `rules` say how."""
    rules = PackingRules(
        config.update.max_tokens_per_microbatch,
        token_alignment(config.parallel, config.precision.recipe),
        config.update.packing,
        config.update.share_prompts and not inputs.use_te,
        layout.min_microbatches,
        layout.microbatch_multiple,
        sequence_alignment(config.parallel, inputs.use_te),
    )
    pad_token_id = inputs.tokenizer.pad_token_id
    return MicroBatchBuilder(
        device, rules, 0 if pad_token_id is None else pad_token_id, inputs.use_te, layout.cp, cp_rank
    )


def build_generator(
    config: Config,
    inputs: RunInputs,
    groups: ParallelGroups,
    rewards: RewardPool,
    device: torch.device,
    *,
    building: Building = build_nothing,
    counts: Counts = count_nothing,
    note: Callable[[str], None] = lambda line: None,
    load_weights: bool = False,
) -> RolloutGenerator:
    """Return the engine and the rewards of all ranks as one. Collective over all ranks.

    Args:
        load_weights: the engine serves the weights of the model's folder, or what a server at a given address
            holds, from the start; otherwise it is empty until the first publish.
    """
    run_dir = Path(config.run.dir)
    building(f"the rollout engine ({config.engine.name})", engine_log(config.engine, run_dir, replica=0))
    engine = build_rollout_engine(
        config.engine,
        run_dir,
        config.longest_sequence_tokens,
        groups,
        inputs.hf_folder,
        inputs.tokenizer,
        device,
        inputs.precision.params_dtype,
        load_weights,
    )
    is_stripped = config.rewards.special_tokens == "strip"
    return RolloutGenerator(
        engine,
        rewards,
        groups,
        replicas_of_ranks(config.engine, groups.world_size),
        is_embedded=engine.is_embedded,
        counts=counts,
        note=note,
        read_text=None if is_stripped else text_with_special_tokens(inputs.tokenizer, config.rollout.stop),
    )


def connect_weights(
    config: Config,
    inputs: RunInputs,
    model: Actor | Reference,
    builder: MicroBatchBuilder,
    generator: RolloutGenerator,
    *,
    engine_start: Callable[[], AbstractContextManager[None]] = nullcontext,
    building: Building = build_nothing,
    counts: Counts = count_nothing,
) -> Publisher:
    """Return what brings the model's weights to the engines; where these are processes of their own, lost
    ones are started anew. Collective over all ranks.

    Args:
        engine_start: what all ranks are in while they wait for an engine that is started anew.
    """
    building("the plan of weights", None)
    publisher = build_publisher(
        config.weights,
        config.engine,
        model,
        builder,
        generator.engine,
        inputs.source.prompts,
        run_dir=Path(config.run.dir),
        timeout_seconds=config.run.collective_timeout_seconds,
        recipe=config.precision.recipe,
        max_new_tokens=config.rollout.max_new_tokens,
        counts=counts,
    )
    if generator.engine.is_embedded:
        return publisher
    groups, num_replicas = generator.groups, config.engine.server.num_replicas
    owners = [owner_of_replica(replica, groups.world_size, num_replicas) for replica in range(num_replicas)]
    recovery = ReplicaRecovery(
        cast(ServerEngine, generator.engine),
        generator.replicas,
        owners,
        groups.rank,
        is_stopping=lambda: generator.is_given_up,
        waiting=engine_start,
    )
    recovering = RecoveringPublisher(publisher, recovery)
    generator.revive = recovering.revive
    return recovering
