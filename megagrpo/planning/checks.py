"""Checks across sections, against the world size and against the model: everything that can be known before a
model is built. Imports no torch: mistakes are told before it is loaded.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from megagrpo.config.algorithm_section import AlgorithmConfig
from megagrpo.config.engine_sections import EngineConfig
from megagrpo.config.expert_fields import count_experts
from megagrpo.config.hardware import Hardware, detect_hardware
from megagrpo.config.mistakes import field_places
from megagrpo.config.rollout_sections import (
    DataConfig,
    EvaluationConfig,
    RolloutConfig,
)
from megagrpo.config.run_sections import CheckpointConfig, RunConfig
from megagrpo.config.schema import Config
from megagrpo.config.training_sections import OptimizerConfig, ParallelConfig, SpikesConfig, UpdateConfig
from megagrpo.errors import ConfigError
from megagrpo.parallel.alignment import token_alignment
from megagrpo.parallel.layout import build_layout
from megagrpo.planning.engine_checks import check_engine
from megagrpo.planning.file_checks import check_files, read_hf_config
from megagrpo.planning.hardware_checks import check_deterministic, check_hardware, check_memory
from megagrpo.planning.source_checks import check_sources


def verify_config(config: Config, world_size: int, hardware: Hardware | None = None) -> dict[str, Any]:
    """Run every check; return the model's `config.json`. `hardware` as in `check_config`.

    Raises:
        ConfigError: all mistakes, one line each.
    """
    hf_config = read_hf_config(config.model)
    problems = check_config(config, world_size, hf_config, hardware)
    if problems:
        raise ConfigError(problems)
    return hf_config or {}


def check_config(
    config: Config, world_size: int, hf_config: Mapping[str, Any] | None, hardware: Hardware | None = None
) -> list[str]:
    """Return everything that is wrong between the sections, one line each; an empty list where the run can
    start.

    Args:
        config: validated section by section already.
        world_size: ranks of the run.
        hf_config: the model's `config.json`; None skips what depends on the model.
        hardware: what the machine has; None looks.
    """
    model, data, evaluation, engine = config.model, config.data, config.evaluation, config.engine
    parallel, precision, rollout, update = config.parallel, config.precision, config.rollout, config.update
    known = hf_config or {}
    alignment = token_alignment(parallel, precision.recipe)
    return [
        *check_files(model, data, evaluation, config.rewards),
        *_check_layout(parallel, update, world_size, hf_config),
        *_check_batch(parallel, rollout, update, world_size),
        *_check_lengths(data, rollout, update, engine, alignment, known),
        *_check_sampling(rollout, config.algorithm, engine, config.has_narrowed_logprobs, known),
        *_check_algorithm(config.algorithm, rollout),
        *_check_warmup(config.optimizer, config.run, update, config.total_updates),
        *check_sources(data, config.rewards),
        *_check_evaluation(evaluation),
        *_check_spikes(config.spikes, config.checkpoint),
        *_check_checkpoint(config.checkpoint, evaluation),
        *_check_allowed_changes(config.run),
        *check_engine(
            engine,
            config.weights,
            rollout,
            precision,
            data,
            config.run.collective_timeout_seconds,
            world_size,
            known,
        ),
        *check_hardware(
            precision,
            model.attention,
            update.recompute,
            engine,
            config.weights,
            known,
            hardware or detect_hardware(),
        ),
        *check_deterministic(config.run.deterministic, engine, hardware or detect_hardware()),
        *check_memory(update.offload, engine.sleep_while_training, config.algorithm.kl.coef > 0, precision),
    ]


def _check_layout(
    parallel: ParallelConfig, update: UpdateConfig, world_size: int, hf_config: Mapping[str, Any] | None
) -> Iterator[str]:
    layout = build_layout(parallel, world_size)
    problems = layout.validate(hf_config)
    if problems:
        nearest = layout.nearest_valid(hf_config)
        works = (
            f"; on {world_size} ranks these work: {' | '.join(valid.describe() for valid in nearest)}"
            if nearest
            else ""
        )
        yield from (f"parallel: {problem}" for problem in problems[:-1])
        yield f"parallel: {problems[-1]}{works}"
    has_experts = count_experts(hf_config or {}) is not None
    if has_experts and parallel.tp > 1 and not parallel.sp:
        yield (
            "parallel.sp: false: a model with experts needs sp where tp > 1: each tp rank routes its own "
            "tokens"
        )
    if hf_config and not has_experts and update.router_aux_loss_coef > 0:
        yield (
            f"update.router_aux_loss_coef: {update.router_aux_loss_coef:g}: the model has no "
            "experts; leave it out"
        )
    if parallel.sp and parallel.tp == 1:
        yield "parallel.sp: true: shards activations over tp, which is 1; it needs tp > 1"
    if parallel.overlap_param_gather and not parallel.overlap_grad_reduce:
        yield "parallel.overlap_param_gather: true: needs overlap_grad_reduce: true, whose buckets it gathers"


def _check_batch(
    parallel: ParallelConfig, rollout: RolloutConfig, update: UpdateConfig, world_size: int
) -> Iterator[str]:
    prompts, mini_batches = rollout.prompts_per_step, update.mini_batches_per_step
    if prompts % mini_batches:
        divisors = [size for size in range(1, prompts + 1) if prompts % size == 0]
        below, above = (
            [size for size in divisors if size < mini_batches],
            [size for size in divisors if size > mini_batches],
        )
        nearest = [*below[-1:], *above[:1]]
        yield (
            f"update.mini_batches_per_step: {mini_batches}: does not divide rollout.prompts_per_step = "
            f"{prompts}; "
            f"nearest that do: {', '.join(map(str, nearest))}"
        )
        return
    layout = build_layout(parallel, world_size)
    sequences = prompts // mini_batches * rollout.completions_per_prompt
    if world_size % layout.model_size == 0 and sequences < layout.dp:
        yield (
            f"rollout.prompts_per_step: {prompts}: {prompts} prompts * "
            f"{rollout.completions_per_prompt} completions / "
            f"{mini_batches} mini-batches = {sequences} sequences for dp {layout.dp}; each replica needs at "
            "least one"
        )


def _check_lengths(
    data: DataConfig,
    rollout: RolloutConfig,
    update: UpdateConfig,
    engine: EngineConfig,
    alignment: int,
    hf_config: Mapping[str, Any],
) -> Iterator[str]:
    """`alignment`: packed tokens come in multiples of it."""
    prompt, new = data.max_prompt_tokens, rollout.max_new_tokens
    longest = prompt + new
    total = f"data.max_prompt_tokens {prompt} + rollout.max_new_tokens {new} = {longest}"
    budget = update.max_tokens_per_microbatch
    aligned = budget // alignment * alignment
    if longest > aligned:
        rounded = "" if aligned == budget else f" ({aligned} in multiples of {alignment})"
        yield f"update.max_tokens_per_microbatch: {budget}{rounded}: one sequence can have {total} tokens"
    positions = hf_config.get("max_position_embeddings")
    if isinstance(positions, int) and longest > positions:
        yield (
            f"rollout.max_new_tokens: {new}: {total} tokens, but the model has {positions} positions "
            "(max_position_embeddings)"
        )
    if prompt > engine.max_prefill_tokens:
        yield (
            f"engine.max_prefill_tokens: {engine.max_prefill_tokens}: one prompt can have "
            f"data.max_prompt_tokens = {prompt}"
        )


def _check_sampling(
    rollout: RolloutConfig,
    algorithm: AlgorithmConfig,
    engine: EngineConfig,
    is_narrowed: bool,
    hf_config: Mapping[str, Any],
) -> Iterator[str]:
    """`is_narrowed`: the engine's log-probs are over fewer tokens than the actor's."""
    if is_narrowed:
        narrowing = [f"top_p {rollout.top_p:g}"] if rollout.top_p < 1 else []
        narrowing += [f"top_k {rollout.top_k}"] if rollout.top_k > 0 else []
        why = (
            f"with rollout.{' and '.join(narrowing)} vLLM's log-probs are over the tokens it kept, the "
            "actor's over all (at rollout.temperature 1 engine.server.options {logprobs_mode: raw_logprobs} "
            "has them over all)"
        )
        if algorithm.correction.enabled:
            yield (
                f"algorithm.correction: {why}, so an unchanged policy would be corrected; leave it out, or "
                "take top_p 1 and top_k 0, or another engine"
            )
        if algorithm.old_logprobs == "engine":
            yield f"algorithm.old_logprobs: engine: {why}; take actor, or top_p 1 and top_k 0"
        for name, bound in rollout.logprob_gap:
            if isinstance(bound, float):
                yield (
                    f"rollout.logprob_gap.{name}: {bound:g}: {why}; leave it out, or take top_p 1 and top_k 0"
                )
    server = getattr(engine, "server", None)
    if (
        server is not None
        and server.options.get("logprobs_mode") == "raw_logprobs"
        and rollout.temperature != 1
    ):
        yield (
            f"engine.server.options.logprobs_mode: raw_logprobs: are those of temperature 1, and "
            f"rollout.temperature is {rollout.temperature:g}; leave it out"
        )
    vocabulary = hf_config.get("vocab_size")
    if isinstance(vocabulary, int):
        beyond = [token for token in rollout.stop_token_ids if not 0 <= token < vocabulary]
        if beyond:
            yield (
                f"rollout.stop_token_ids: {', '.join(map(str, beyond))}: the model's token ids are 0 to "
                f"{vocabulary - 1}"
            )


def _check_algorithm(algorithm: AlgorithmConfig, rollout: RolloutConfig) -> Iterator[str]:
    if rollout.completions_per_prompt == 1 and algorithm.dynamic_sampling.enabled:
        yield (
            "rollout.completions_per_prompt: 1: must be at least 2; algorithm.dynamic_sampling drops groups "
            "of equal rewards, so every group"
        )
    if rollout.max_policy_age > 0 and not algorithm.correction.enabled and algorithm.old_logprobs == "actor":
        yield (
            f"rollout.off_policy: {rollout.off_policy}: completions come from older weights, and nothing "
            "corrects for it; set "
            "algorithm.correction (say, importance: token), or algorithm.old_logprobs: engine, whose ratio "
            "holds the difference"
        )


def _check_warmup(
    optimizer: OptimizerConfig, run: RunConfig, update: UpdateConfig, total_updates: int
) -> Iterator[str]:
    if optimizer.warmup_steps >= total_updates:
        yield (
            f"optimizer.warmup_steps: {optimizer.warmup_steps}: must be less than the {total_updates} "
            f"optimizer updates of the run (run.steps {run.steps} * {update.mini_batches_per_step} "
            f"mini-batches * {update.epochs_per_step} epochs)"
        )


def _check_evaluation(evaluation: EvaluationConfig) -> Iterator[str]:
    seen: set[str] = set()
    for position, held_out in enumerate(evaluation.sets):
        place = f"evaluation.sets.{position}.name: {held_out.name}"
        if held_out.name in seen:
            yield f"{place}: another set has this name"
        if not held_out.name or "/" in held_out.name:
            yield f"{place}: becomes the metric eval/NAME: it must not be empty or hold a slash"
        seen.add(held_out.name)


def _check_checkpoint(checkpoint: CheckpointConfig, evaluation: EvaluationConfig) -> Iterator[str]:
    sets = [held_out.name for held_out in evaluation.sets]
    if checkpoint.keep_best and checkpoint.best_metric not in sets:
        allowed = (
            f"one of evaluation.sets: {', '.join(sets)}"
            if sets
            else ("the name of a held-out set, and evaluation.sets has none")
        )
        yield f"checkpoint.best_metric: {checkpoint.best_metric or 'missing'}: keep_best needs {allowed}"


def _check_allowed_changes(run: RunConfig) -> Iterator[str]:
    places = set(field_places(Config))
    for name in run.allow_config_changes:
        if name not in places:
            yield (
                f"run.allow_config_changes: {name}: no section or field; written as section or section.field"
            )


def _check_spikes(spikes: SpikesConfig, checkpoint: CheckpointConfig) -> Iterator[str]:
    if spikes.action == "roll_back" and checkpoint.every == 0:
        yield "spikes.action: roll_back: needs checkpoints to go back to; set checkpoint.every"
    if (
        spikes.action != "warn"
        and spikes.loss_factor is spikes.grad_norm_factor is spikes.reward_fraction is None
    ):
        yield (
            f"spikes.action: {spikes.action}: nothing is judged; set loss_factor, grad_norm_factor or "
            "reward_fraction"
        )
