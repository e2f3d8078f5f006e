"""The meaning of every recorded number: unit, reduction, what a healthy run shows, what to do otherwise.

`policy/...` is generated from the declarations of `algorithms/metrics.py`; the rest is declared here. A test
compares the rows of real runs with it.
"""

import fnmatch
from dataclasses import dataclass

from megagrpo.telemetry import names


@dataclass(frozen=True)
class Declared:
    """One metric, or a family of them: `*` stands for a name of the run's (a set, a reward, a phase)."""

    pattern: str
    unit: str
    reduction: str  # over what it is one number
    meaning: str
    healthy: str = ""
    advice: str = ""


_SAMPLED, _TRAINED, _UPDATES = "all completions of the step", "tokens that train", "updates of the step"

DECLARED = (
    Declared(
        names.REWARD,
        "reward",
        f"mean over {_SAMPLED}",
        "what is optimised, before overlong penalties and KL",
        "rises over tens of steps; noise of std / sqrt(completions)",
        "flat: look at signal groups, then at completions/",
    ),
    Declared(names.REWARD_STD, "reward", f"over {_SAMPLED}", "spread of the rewards", "above 0"),
    Declared(
        names.FAILED_FRACTION,
        "share",
        _SAMPLED,
        "completions that could not be scored",
        "0",
        "completions/ has outcome and detail; rewards.timeout_seconds",
    ),
    Declared(
        f"{names.FAILED_FRACTION}/*", "share", _SAMPLED, "of them by outcome: timeout, crash, error, memory"
    ),
    Declared("reward/*", "reward", f"mean over {_SAMPLED}", "one reward function, before its weight"),
    Declared("reward/*/*", "reward", f"mean over {_SAMPLED}", "a part of one reward function"),
    Declared(names.GROUPS, "groups", "sum", "that were sampled, dropped ones too"),
    Declared(
        names.SIGNAL_GROUPS,
        "groups",
        "sum",
        "whose rewards differ: only these teach",
        "a third of all at least",
        "harder or easier prompts, higher temperature, algorithm.dynamic_sampling",
    ),
    Declared(
        names.SOLVED_GROUPS, "groups", "sum", "whose rewards are all the same and above 0", "grows slowly"
    ),
    Declared(names.REPEATED_PROMPTS, "groups", "sum", "of a prompt that another group has too", "0"),
    Declared("source/*/groups", "groups", "sum", "of one source, where there are several"),
    Declared("source/*/pass_rate", "share", "completions of one source", "worth 1 at least"),
    Declared("source/*/completion_tokens", "tokens", "mean", "length of one source's completions"),
    Declared("data/solved_prompts", "prompts", "count", "whose newest group was all right (curriculum)"),
    Declared("data/unsolved_prompts", "prompts", "count", "whose newest group was all wrong (curriculum)"),
    Declared("rollout/dropped_groups", "groups", "sum", "without a signal, replaced by dynamic sampling"),
    Declared("rollout/refills", "rounds", "count", "extra rounds of generation", "0 to 2"),
    Declared(
        names.LENGTH,
        "tokens",
        f"mean over {_SAMPLED}",
        "length of a completion",
        "grows with the reward, not without",
        "algorithm.aggregation=token_mean, algorithm.overlong.penalty",
    ),
    Declared(
        names.CUT_FRACTION,
        "share",
        _SAMPLED,
        "completions cut at rollout.max_new_tokens",
        "below 0.1",
        "raise max_new_tokens; check that the model ends its answers",
    ),
    Declared(names.GENERATED_TOKENS, "tokens", "sum over ranks", "all that was sampled"),
    Declared(
        names.LOGPROB_GAP,
        "nats",
        "largest token",
        "|engine - actor| log-prob before the first update, of what the actor's own weights sampled",
        "1e-6 to 1e-5 in float32, below 0.5 in bf16",
        "tools/check_logprobs.py; rollout.logprob_gap",
    ),
    Declared(names.MEAN_LOGPROB_GAP, "nats", "mean over the same tokens", "the same gap", "below 1e-2"),
    Declared("rollout/policy_age_*", "publishes", "mean, max", "age of the weights that sampled", "0 or 1"),
    Declared("rollout/weight_version", "version", "smallest", "of the weights that sampled"),
    Declared("rollout/lost_replicas", "replicas", "count", "engine servers that are away", "0"),
    Declared(names.TRAINED_REWARD, "reward", "mean over groups that train", "reward of what trains"),
    Declared("update/completion_tokens", "tokens", "mean over groups that train", "length of what trains"),
    Declared("update/trained_tokens", "tokens", "sum", "completion tokens through the backward pass"),
    Declared(
        names.PADDING_FRACTION,
        "share",
        "tokens that the update computes, over all replicas",
        "padding: to aligned lengths, and in micro-batches that are there to fill a pipeline",
        "below 0.1",
        "update.max_tokens_per_microbatch, update.packing, more completions a step",
    ),
    Declared(names.SKIPPED_UPDATES, "updates", "sum", "skipped: gradient not finite", "0"),
    Declared("update/spikes", "updates", "sum over the run", "that the spike guard judged", "0"),
    Declared(
        names.LOSS,
        "loss",
        f"mean over {_UPDATES}",
        "the minimised value; near 0 by construction where a step has one update",
        "says nothing about learning: look at the reward",
    ),
    Declared(names.LARGEST_LOSS, "loss", f"largest of {_UPDATES}", "the same"),
    Declared(
        names.GRAD_NORM,
        "2-norm",
        f"mean over {_UPDATES}",
        "global gradient norm before clipping",
        "steady within a factor of 3",
        "spikes: optimizer.clip_grad, spikes.grad_norm_factor",
    ),
    Declared(names.LARGEST_GRAD_NORM, "2-norm", f"largest of {_UPDATES}", "the same"),
    Declared(names.LEARNING_RATE, "1", "last update", "learning rate"),
    Declared("time/step_seconds", "s", "wall clock", "a step without evaluation and checkpoint"),
    Declared("time/*_cpu_seconds", "CPU s", "rank 0; step: sum over ranks", "of a phase"),
    Declared("time/*_seconds", "s", "wall clock of rank 0", "of a phase, waits for other ranks included"),
    Declared(
        "memory/*_peak_bytes",
        "bytes",
        "largest of all ranks",
        "that tensors took on a GPU in a phase; none on CPUs",
        "as the table of --dry-run --gpu-memory",
        "the changes that --dry-run --gpu-memory names",
    ),
    Declared("publish/*_seconds", "s", "slowest rank", "a stage of a publish"),
    Declared("publish/*_bytes", "bytes", "sum over ranks; peak: largest", "moved by a publish"),
    Declared("publish/written_share", "share", "sum over ranks", "of the weights that was sent (delta)"),
    Declared("publish/kept_ratio", "1", "sum over ranks", "bytes sent for each byte that is kept", "1"),
    Declared("publish/buckets", "buckets", "count", "of a publish"),
    Declared("publish/full_fallbacks", "count", "run", "times that slices could not be used", "0"),
    Declared("publish/probe_gap", "nats", "largest", "|engine - trainer| on a probe of the new weights"),
    Declared(
        "eval/*",
        "reward",
        "mean over all completions of the set",
        "first reward of a held-out set",
        "rises with reward/mean; if not, the policy fits the training prompts",
    ),
    Declared(
        "eval/*/standard_error", "reward", "over prompts", "of the mean; two of them are a 95 % interval"
    ),
    Declared("eval/*/completion_tokens", "tokens", "mean", "length of its completions"),
    Declared("eval/*/failed_fraction*", "share", "completions of the set", "that could not be scored", "0"),
    Declared("eval/*/cut_by_length_fraction", "share", "completions of the set", "cut at the length limit"),
    Declared("eval/*/source/*", "reward", "over prompts", "the mean of the rows with this column `source`"),
    Declared("eval/*/*", "1", "completions of the set", "a metric of evaluation.sets.metrics: pass@k, maj@k"),
    Declared("policy/clip_fraction", "share", _TRAINED, "low + high + dual", "0 to 0.2 with several updates"),
    Declared(
        "policy/*_perplexity", "1", _TRAINED, "exp of the negative mean log-prob (rollout, old)", "equal"
    ),
    Declared(
        "policy/effective_sample_fraction",
        "share",
        _TRAINED,
        "(sum w)^2 / (n sum w^2) of the correction's weights",
        "above 0.8",
    ),
    Declared("policy/groups*", "groups", "sum", "that train: all, with equal rewards, too small"),
    Declared("policy/completions_invalid", "completions", "sum", "left out of loss and baseline"),
    Declared(
        "policy/expert_load_ratio*", "1", "largest / mean load", "how evenly experts are used", "near 1"
    ),
    Declared("policy/expert_idle_fraction", "share", "experts", "that no token went to", "0"),
    Declared("policy/router_aux_loss", "loss", f"mean over {_UPDATES}", "load balancing loss"),
)


def declarations() -> list[Declared]:
    """Return all, those of losses and diagnostics generated from their own declarations."""
    from megagrpo.algorithms.metrics import METRIC_SPECS  # with torch

    own = {entry.pattern for entry in DECLARED}
    generated = []
    for name, spec in METRIC_SPECS.items():
        pattern = f"policy/{name}"
        if name != "loss" and pattern not in own:
            generated.append(
                Declared(f"{pattern}*", "1", f"{spec.reduction} over {_TRAINED}", spec.description)
            )
    return [*DECLARED, *generated]


def find(name: str) -> Declared | None:
    """Return what declares the metric `name`: the longest pattern that fits; None where nothing does."""
    fitting = [
        entry
        for entry in declarations()
        if fnmatch.fnmatchcase(name, entry.pattern) and entry.pattern.count("/") <= name.count("/")
    ]
    return max(fitting, key=lambda entry: len(entry.pattern.replace("*", "")), default=None)


def format_metrics(words: str = "") -> str:
    """Return the dictionary as text, those whose name or meaning has `words`."""
    lines = []
    for entry in declarations():
        if words.lower() not in f"{entry.pattern} {entry.meaning}".lower():
            continue
        lines.append(f"{entry.pattern}  [{entry.unit}; {entry.reduction}]")
        lines.append(f"    {entry.meaning}")
        lines += [f"    healthy: {entry.healthy}"] if entry.healthy else []
        lines += [f"    otherwise: {entry.advice}"] if entry.advice else []
    return "\n".join(lines)
