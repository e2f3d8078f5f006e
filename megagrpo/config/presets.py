"""Named sets of defaults for the `algorithm:` section. No torch here: presets are applied while the
configuration is read.

A preset fills what the user leaves out and overrides nothing; `--dry-run` shows the resolved values. Sources
and differences:

- `grpo` DeepSeekMath (arXiv 2402.03300): group-standardised advantages, clip 0.2, mean per completion, k3
  loss with coefficient 0.04.
- `dapo` DAPO (arXiv 2503.14476): clip 0.2 / 0.28, all tokens of a group alike, dynamic sampling, soft
  overlong punishment, no KL. The paper expects 16384 tokens and adds a buffer of 4096, so its limit (our
  `rollout.max_new_tokens`) is 20480 and the buffer a fifth of it, which is our default. Its filter of cut
  completions (`overlong.mask`) stays off, since the paper's final recipe shapes the reward instead.
- `dr_grpo` Dr. GRPO (arXiv 2503.20783): no division by the standard deviation, constant denominator
  (`rollout.max_new_tokens`), no KL.
- `rloo` Back to Basics (arXiv 2402.14740): leave-one-out baseline, plain policy gradient of whole
  completions, k1 KL in the reward. The paper tunes the coefficient per task; 0.01 is ours.
- `gspo` GSPO (arXiv 2507.18071, Section 5.1): sequence ratio clipped at 3e-4 / 4e-4, no KL.
- `cispo` MiniMax-M1 (arXiv 2506.13585, Section 3.1): detached weight without a lower bound, all tokens of a
  group alike, no KL. The paper does not publish its upper bound; 5 (clip_high 4) is one of those that ScaleRL
  (arXiv 2510.13786) tries.
- `reinforce_pp` REINFORCE++ (arXiv 2501.03262): advantages standardised over all tokens, clip 0.2, all
  tokens alike, k1 KL in the reward. The coefficient 0.01 is ours.
"""

from collections.abc import Mapping
from typing import Any

from megagrpo.config.rollout_sections import RolloutConfig
from megagrpo.errors import UserError
from megagrpo.registry import suggestion

NO_KL = {"coef": 0.0}

PRESETS: dict[str, dict[str, Any]] = {
    "grpo": {
        "advantages": "grpo",
        "loss": "ppo_clip",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "aggregation": "sequence_mean",
        "kl": {"coef": 0.04, "estimator": "k3", "placement": "loss"},
    },
    "dapo": {
        "advantages": "grpo",
        "loss": "ppo_clip",
        "clip_low": 0.2,
        "clip_high": 0.28,
        "aggregation": "group_token_mean",
        "kl": NO_KL,
        "dynamic_sampling": {"enabled": True},
        "overlong": {"penalty": 1.0},
    },
    "dr_grpo": {
        "advantages": "dr_grpo",
        "loss": "ppo_clip",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "aggregation": "constant",
        "kl": NO_KL,
    },
    "rloo": {
        "advantages": "rloo",
        "loss": "policy_gradient",
        "aggregation": "sequence_sum",
        "kl": {"coef": 0.01, "estimator": "k1", "placement": "reward"},
    },
    "gspo": {
        "advantages": "grpo",
        "loss": "gspo",
        "clip_low": 3e-4,
        "clip_high": 4e-4,
        "aggregation": "sequence_mean",
        "kl": NO_KL,
    },
    "cispo": {
        "advantages": "grpo",
        "loss": "cispo",
        "clip_low": 1.0,
        "clip_high": 4.0,
        "aggregation": "group_token_mean",
        "kl": NO_KL,
    },
    "reinforce_pp": {
        "advantages": "reinforce_pp",
        "loss": "ppo_clip",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "aggregation": "token_mean",
        "kl": {"coef": 0.01, "estimator": "k1", "placement": "reward"},
    },
}


def apply_preset(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Fill a raw configuration (nested plain dicts, all sections) with the defaults of the preset that it
    names.

    Args:
        raw: the merged user configuration before validation; left untouched.

    Returns:
        A new dict; equal to `raw` where it names no preset. Every value that the user gave is kept.

    Raises:
        UserError: an unknown preset; the nearest one is named.
    """
    algorithm = raw.get("algorithm")
    name = algorithm.get("preset") if isinstance(algorithm, Mapping) else None
    if name is None:
        return dict(raw)
    if name not in PRESETS:
        known = ", ".join(sorted(PRESETS))
        raise UserError(
            f"algorithm.preset: {name!r} is not a "
            f"preset{suggestion(str(name), sorted(PRESETS))}; known: {known}"
        )
    return _fill(raw, {"algorithm": _with_derived_values(name, raw)})


def _with_derived_values(name: str, raw: Mapping[str, Any]) -> dict[str, Any]:
    preset = PRESETS[name]
    rollout = raw.get("rollout")
    limit = rollout.get("max_new_tokens") if isinstance(rollout, Mapping) else None
    if not isinstance(limit, int) or limit < 1:  # missing, or a mistake that validation reports
        limit = RolloutConfig.model_fields["max_new_tokens"].default
    if name == "dr_grpo":
        return _fill({"aggregation_constant": limit}, preset)
    return preset


def _fill(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """Return a deep copy of `values` with what only `defaults` has; nested mappings are filled alike."""
    filled = {key: _fill(value, {}) if isinstance(value, Mapping) else value for key, value in values.items()}
    for key, default in defaults.items():
        if isinstance(default, Mapping):
            given = values.get(key, {})
            if isinstance(given, Mapping):
                filled[key] = _fill(given, default)
        else:
            filled.setdefault(key, default)
    return filled
