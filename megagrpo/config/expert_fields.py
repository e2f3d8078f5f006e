"""What a model's config.json says of experts, in the spellings of all families. Imports no torch."""

from collections.abc import Mapping
from typing import Any

# transformers 5 writes the first, older versions the others
NUM_EXPERTS_FIELDS = ("num_local_experts", "num_experts", "n_routed_experts")


def count_experts(raw: Mapping[str, Any]) -> int | None:
    """Return the experts of each layer; None: the model is dense."""
    return next((raw[name] for name in NUM_EXPERTS_FIELDS if raw.get(name) is not None), None)


def latent_columns(raw: Mapping[str, Any]) -> int | None:
    """Return the columns of the keys' and values' latent, with the rotated ones; None: there is none."""
    if raw.get("kv_lora_rank") is None:
        return None
    return raw["kv_lora_rank"] + raw.get("qk_rope_head_dim", 0)


def routing_problems(raw: Mapping[str, Any]) -> list[str]:
    """Return what is missing of the routing, and routing that has no gradient, one line each."""
    problems = [] if "num_experts_per_tok" in raw else ["num_experts_per_tok: missing"]
    experts, chosen = count_experts(raw), raw.get("num_experts_per_tok", 1)
    field = next((name for name in NUM_EXPERTS_FIELDS if raw.get(name) is not None), "num_experts")
    if experts is None:
        problems.append("num_experts: missing")
    elif not 1 <= chosen <= experts:
        problems.append(f"num_experts_per_tok: {chosen}: must be 1 to {field} = {experts}")
    if chosen == 1 and raw.get("norm_topk_prob", False):
        problems.append(
            "norm_topk_prob: True: with num_experts_per_tok 1 every weight is 1 and the "
            "router has no gradient"
        )
    return problems
