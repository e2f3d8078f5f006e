"""Names of the metrics that more than one part of the package reads: the trainer records them, progress,
summary and report show them.
"""

REWARD = "reward/mean"  # over all that the step sampled; over the groups that train: TRAINED_REWARD
FAILED_FRACTION = "reward/failed_fraction"  # the part of the completions that could not be scored
REWARD_STD = "reward/std"  # over the same completions as REWARD
TRAINED_REWARD = "update/reward_mean"
LOSS = "loss/total"  # mean over the step's updates
LARGEST_LOSS = "loss/total_max"  # the largest of the step's updates
GRAD_NORM = "optimizer/grad_norm"  # mean over the step's updates, before clipping
LARGEST_GRAD_NORM = "optimizer/grad_norm_max"  # the largest of the step's updates
GROUPS = "rollout/groups"  # that were sampled, dropped ones too
SIGNAL_GROUPS = "rollout/signal_groups"  # whose rewards differ
SOLVED_GROUPS = "rollout/solved_groups"  # whose rewards are all the same, and above 0
REPEATED_PROMPTS = "rollout/repeated_prompts"  # groups of a prompt that another group of the step has
LENGTH = "rollout/completion_tokens"  # mean
CUT_FRACTION = "rollout/cut_by_length_fraction"
GENERATION_SECONDS = "time/generation_seconds"
SCORING_WAIT_SECONDS = "time/scoring_wait_seconds"  # after the last completion
ENTROPY = "policy/entropy"
REFERENCE_KL = "policy/ref_kl"
CLIP_FRACTION = "policy/clip_fraction"
LEARNING_RATE = "optimizer/lr"
LOGPROB_GAP = (
    # largest |engine - actor| log-prob before a step's first update, of what the actor's own weights sampled
    "rollout/max_logprob_gap"
)
MEAN_LOGPROB_GAP = "rollout/mean_logprob_gap"  # mean over the same tokens, of all ranks
GENERATED_TOKENS = "rollout/generated_tokens"  # over all ranks
SKIPPED_UPDATES = "update/skipped_nonfinite"  # updates of the step that all ranks skipped
PADDING_FRACTION = "update/padding_fraction"  # padding / all tokens that the update computes
STEP_SECONDS = "time/step_seconds"  # wall-clock, without evaluation and checkpoint
STEP_CPU_SECONDS = "time/step_cpu_seconds"  # over the span of STEP_SECONDS, summed over all ranks
PUBLISH = "publish/"  # publish/... are the numbers of a step's publish
PUBLISH_SECONDS = "time/publish_seconds"  # wall-clock of it, waits for other ranks included
STANDARD_ERROR = "standard_error"  # below eval/SET: of its mean, over prompts
EVALUATION = "eval/"  # eval/SET is the metric of a held-out set; eval/SET/... are further numbers about it


def evaluation_set(name: str) -> str | None:
    """Return the held-out set whose metric `name` is, or None for any other metric."""
    inner = name.removeprefix(EVALUATION)
    return inner if inner != name and inner and "/" not in inner else None
