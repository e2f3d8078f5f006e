"""Attention over context parallel ranks on Transformer Engine's Python code, up to its exchange of keys."""

import te.install

te.install.install()
import torch  # noqa: E402
from rehearse import case, run_cases  # noqa: E402
from small_models import BF16, DENSE, on  # noqa: E402
from transformer_engine.pytorch.attention.dot_product_attention import backends  # noqa: E402


@case
def boundaries_of_sequences():
    """What FusedAttention, Hopper's choice, hands to the exchange in the place of padded boundaries."""
    seen = []

    def attend(training, query, *rest, **named):
        # key, value, boundaries of queries and keys, longest of both, padded boundaries of both
        _, _, ends, key_ends, _, _, padded, key_padded = rest[:8]
        told = {"ends": ends, "key ends": key_ends, "padded": padded, "padded keys": key_padded}
        seen.append({name: None if value is None else value.tolist() for name, value in told.items()})
        seen[-1]["tokens of a rank"] = query.shape[0]
        return torch.zeros_like(query)

    backends.attn_forward_func_with_cp = attend
    lengths = (4, 8, 12)  # 8, 12 and 16 tokens that are read: each rank has two pieces of each sequence
    on(lambda it: it.logprobs(), DENSE, BF16, True, 4, lengths, {"cp": 2})
    return seen[0]


if __name__ == "__main__":
    run_cases()
