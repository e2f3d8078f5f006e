"""A plain float64 GRPO on a transformers model: the expected values of the invariance tests. Nothing of
megagrpo's numerics is used.

Follows DeepSeekMath (arXiv 2402.03300), Eq. 3 and 4: clipped ratio against the old policy, k3 towards the
reference, mean over the tokens of a completion, then mean over the completions of the mini-batch; AdamW with
global-norm clipping.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM, Trainer

STEPS, GROUPS, COMPLETIONS = 3, 4, 4
MINI_BATCHES, EPOCHS = 2, 2
CLIP_LOW, CLIP_HIGH, KL_COEF, TEMPERATURE = 0.2, 0.28, 0.05, 0.8
# Nothing at its default, which a run that ignores the option would take too. eps: with 1e-8 AdamW turns the
# float32 rounding of a gradient of 1e-8 into a full step, in any implementation.
LR, BETA1, BETA2, EPS, CLIP_GRAD = 1e-3, 0.85, 0.97, 1e-5, 0.7
# Twelve updates take 6e-4 of a decayed weight, sixty times the tolerance.
WEIGHT_DECAY = 0.05


@dataclass(frozen=True)
class Row:
    """One completion of the made-up rollouts."""

    group: int
    place: int
    prompt: tuple[int, ...]
    tokens: np.ndarray
    reward: float


def make_rollouts(step: int, vocab_size: int) -> list[Row]:
    """Ragged groups: prompts and completions from one token up, one group whose rewards are all equal."""
    random = np.random.default_rng(100 + step)
    rows = []
    for group in range(GROUPS):
        prompt = tuple(int(token) for token in random.integers(0, vocab_size, 1 + 5 * group))
        for place in range(COMPLETIONS):
            tokens = random.integers(
                0, vocab_size, 1 if (group, place) == (1, 2) else int(random.integers(2, 14))
            )
            rows.append(
                Row(
                    group,
                    place,
                    prompt,
                    tokens,
                    1.0 if group == 3 else float(random.integers(0, 2)) + 0.25 * place,
                )
            )
    return rows


def load(folder: Path) -> torch.nn.Module:
    """The model in float64; its experts, where it has some, one by one: the grouped product has no
    float64.
    """
    config = AutoConfig.from_pretrained(folder)
    options = {"experts_implementation": "eager"} if getattr(config, "num_local_experts", 0) else {}
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64, **options)


def completion_logprobs(model: torch.nn.Module, row: Row) -> torch.Tensor:
    """log p(token) of each completion token, [L], from one unpadded forward."""
    return forward(model, row)[0]


def forward(
    model: torch.nn.Module, row: Row, **options: bool
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...] | None]:
    """Return completion_logprobs and, with `output_router_logits=True`, the router logits [tokens, E] of
    each layer.
    """
    ids = torch.tensor([[*row.prompt, *row.tokens.tolist()]])
    output = model(ids, **options)
    logits = output.logits[0, len(row.prompt) - 1 : -1] / TEMPERATURE
    return logits.log_softmax(-1).gather(1, torch.tensor(row.tokens)[:, None])[:, 0], getattr(
        output, "router_logits", None
    )


def balance_loss(router_logits: tuple[torch.Tensor, ...], top_k: int) -> tuple[torch.Tensor, torch.Tensor]:
    """DeepSeek-V3 (arXiv 2412.19437), Eq. 17 to 20, of one sequence, summed over layers; and its tokens per
    expert, [layers, E].

    The last token predicts nothing and is no input of the trained model.
    """
    total, counts = torch.zeros((), dtype=torch.float64), []
    for logits in router_logits:
        scores = logits[:-1].double().softmax(-1)
        tokens, experts = scores.shape
        count = torch.nn.functional.one_hot(scores.topk(top_k).indices, experts).sum((0, 1)).double()
        total = total + (count * experts / (top_k * tokens) * scores.mean(0)).sum()
        counts.append(count)
    return total, torch.stack(counts)


def decay_groups(model: torch.nn.Module) -> list[dict]:
    """Parameter groups as the Trainer of transformers makes them: norm weights and biases are not decayed."""
    decayed = set(Trainer.get_decay_parameter_names(None, model))
    named = list(model.named_parameters())
    return [
        {"params": [parameter for name, parameter in named if name in decayed]},
        {"params": [parameter for name, parameter in named if name not in decayed], "weight_decay": 0.0},
    ]


def train_dense(folder: Path, balance_coefficient: float = 0.0) -> dict:
    """Run all steps; return per update (loss, grad_norm), per step the expert loads [layers, E], and the
    final state dict, float64.
    """
    model, reference = load(folder), load(folder)
    optimizer = torch.optim.AdamW(
        decay_groups(model), lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=WEIGHT_DECAY
    )
    updates, loads = [], []
    experts = getattr(model.config, "num_experts", 0)
    for step in range(STEPS):
        rows = make_rollouts(step, model.config.vocab_size)
        with torch.no_grad():
            old = [completion_logprobs(model, row) for row in rows]
            ref = [completion_logprobs(reference, row) for row in rows]
        loads.append(0)
        for _ in range(EPOCHS):
            for mini_batch in np.array_split(np.arange(GROUPS), MINI_BATCHES):
                members = [i for i, row in enumerate(rows) if row.group in mini_batch]
                loss = balance = torch.zeros((), dtype=torch.float64)
                for i in members:
                    rewards = np.array([row.reward for row in rows if row.group == rows[i].group])
                    advantage = (
                        0.0 if rewards.std() == 0 else (rows[i].reward - rewards.mean()) / rewards.std()
                    )
                    actor, router_logits = forward(
                        model, rows[i], **({"output_router_logits": True} if experts else {})
                    )
                    if experts:
                        sequence_balance, counts = balance_loss(
                            router_logits, model.config.num_experts_per_tok
                        )
                        balance, loads[-1] = balance + sequence_balance / len(members), loads[-1] + counts
                    ratio = torch.exp(actor - old[i])
                    surrogate = torch.minimum(
                        ratio * advantage, ratio.clamp(1 - CLIP_LOW, 1 + CLIP_HIGH) * advantage
                    )
                    u = ref[i] - actor
                    loss = loss - (surrogate - KL_COEF * (torch.exp(u) - u - 1)).mean() / len(members)
                optimizer.zero_grad()
                (loss + balance_coefficient * balance).backward()
                grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD)
                optimizer.step()
                updates.append((loss.item(), grad_norm.item()))
    return {
        "updates": updates,
        "loads": loads,
        "balance_coefficient": balance_coefficient,
        "weights": hub_names(model.state_dict()),
    }


def hub_names(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return copies of the tensors under the names of checkpoints, where the experts that transformers
    fuses stand one by one.
    """
    tensors = {}
    for name, tensor in state.items():
        if not name.endswith((".experts.gate_up_proj", ".experts.down_proj")):
            tensors[name] = tensor.clone()
            continue
        prefix, kind = name.rsplit(".", 1)
        for expert, weight in enumerate(tensor):
            parts = (
                {"down_proj": weight}
                if kind == "down_proj"
                else dict(zip(("gate_proj", "up_proj"), weight.chunk(2), strict=True))
            )
            tensors |= {f"{prefix}.{expert}.{part}.weight": value.clone() for part, value in parts.items()}
    return tensors
