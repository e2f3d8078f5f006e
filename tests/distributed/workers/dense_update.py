"""One step (two epochs) of every loss and aggregation in plain float64 on a transformers model: expected
values of the update matrix.

Nothing of megagrpo's numerics is used. Sequence losses are written as their papers have them (GSPO, arXiv
2507.18071: clipped sequence ratio; GMPO, arXiv 2507.20673: geometric mean of clipped ratios), with autograd
through the sequence statistic.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from dense_grpo import decay_groups, hub_names, load

GROUPS, COMPLETIONS, LIMIT, TEMPERATURE = 4, 4, 12, 0.9
CLIP = {"ppo_clip": (0.1, 0.15), "gspo": (0.02, 0.03), "gmpo": (0.05, 0.08)}
AGGREGATIONS = ("sequence_mean", "group_token_mean", "token_mean", "constant", "sequence_sum")
ALL = tuple((loss, aggregation) for loss in CLIP for aggregation in AGGREGATIONS)
# every loss, another aggregation for each
SOME = (("ppo_clip", "token_mean"), ("gspo", "sequence_mean"), ("gmpo", "group_token_mean"))
CONSTANT, KL_COEF, ENTROPY_COEF = 9, 0.05, 0.01
# Far from every gap below, so that float32 rounding decides nothing. Importance weights of a sequence are
# alike on its tokens: then the token form of the sequence losses has the papers' gradient.
BAND, REJECT, CAP = (0.25, 4.0), (0.4, 2.5), 1.3
GAPS = (0.0, 0.2, -0.2, 0.5, -0.5, 2.0)
# (first token, end) of what the policy has not sampled: in the middle, at both ends, all of it.
UNTRAINED = {(0, 1): ((4, 7),), (1, 2): ((0, 2), (5, 8)), (2, 2): ((0, 5),)}
# eps far above every gradient makes AdamW's step lr / eps * gradient: linear, so it amplifies no rounding.
BETA1, BETA2, EPS, WEIGHT_DECAY = 0.85, 0.97, 100.0, 0.004


@dataclass(frozen=True)
class Row:
    """One completion. `gaps`: what the engine's log-prob is below the actor's, of tokens that are trained."""

    group: int
    place: int
    prompt: tuple[int, ...]
    tokens: np.ndarray
    gaps: np.ndarray
    reward: float
    finish: str

    @property
    def key(self) -> tuple[int, int]:
        return self.group, self.place

    @property
    def trained(self) -> np.ndarray:
        """Whether the policy has sampled the token, bool [L]."""
        places = np.arange(len(self.tokens))
        inside = [(places >= first) & (places < end) for first, end in UNTRAINED.get(self.key, ())]
        return ~np.any([np.zeros(len(places), bool), *inside], axis=0)


def make_rows(vocab_size: int) -> list[Row]:
    """Lengths from 1 to the limit; an aborted completion, a rejected one, one whose tokens are all out of
    the band, a ragged group; tokens that the policy has not sampled.
    """
    random = np.random.default_rng(5)
    rows = []
    for group in range(GROUPS):
        prompt = tuple(int(token) for token in random.integers(0, vocab_size, 1 + 4 * group))
        for place in range(COMPLETIONS):
            if (group, place) == (3, 3):
                continue  # this one is missing
            length = int(random.integers(2, LIMIT))
            length = {(0, 0): 1, (0, 1): LIMIT, (1, 2): 8, (2, 2): 5}.get((group, place), length)
            gaps = random.choice(GAPS, length)
            if (group, place) == (1, 0):
                length, gaps = 6, np.array([2.0, -2.0] * 3)  # fully masked, though its mean ratio is 1
            if (group, place) == (1, 1):
                gaps = np.full(length, 2.0)  # rejected
            finish = "abort" if (group, place) == (2, 1) else "length" if length == LIMIT else "stop"
            reward = float(random.integers(0, 3)) + 0.25 * place
            row = Row(group, place, prompt, random.integers(0, vocab_size, length), gaps, reward, finish)
            rows.append(replace(row, gaps=gaps[row.trained]))
    return rows


def score(model: torch.nn.Module, row: Row) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probs and entropies of the completion's trained tokens, from one unpadded forward."""
    ids = torch.tensor([[*row.prompt, *row.tokens.tolist()]])
    logprobs = (model(ids).logits[0, len(row.prompt) - 1 : -1] / TEMPERATURE).log_softmax(-1)
    sampled, entropies = (
        logprobs.gather(1, torch.tensor(row.tokens)[:, None])[:, 0],
        -(logprobs.exp() * logprobs).sum(-1),
    )
    return sampled[row.trained], entropies[row.trained]


def policy_loss(loss: str, log_ratio: torch.Tensor, advantage: float) -> torch.Tensor:
    """[L] of the kept tokens of one sequence."""
    low, high = CLIP[loss]
    if loss == "gmpo":
        clipped = log_ratio.clamp(max=high) if advantage > 0 else log_ratio.clamp(min=-low)
        return (-clipped.mean().exp() * advantage).expand(len(log_ratio))
    ratio = log_ratio.exp() if loss == "ppo_clip" else log_ratio.mean().exp().expand(len(log_ratio))
    return -torch.minimum(ratio * advantage, ratio.clamp(1 - low, 1 + high) * advantage)


def learning_rate(aggregation: str) -> float:
    """Steps that bring ratios beyond the clip bounds, not far beyond; `sequence_sum` has gradients that
    are a length larger.
    """
    return 0.6 if aggregation == "sequence_sum" else 5.0


def token_weight(mode: str, lengths: dict[tuple[int, int], int], key: tuple[int, int]) -> float:
    counted = [other for other, length in lengths.items() if length]
    groups = {group for group, _ in counted}
    return (
        1
        / {
            "sequence_mean": len(counted) * lengths[key],
            "group_token_mean": len(groups) * sum(lengths[other] for other in counted if other[0] == key[0]),
            "token_mean": sum(lengths.values()),
            "constant": len(counted) * CONSTANT,
            "sequence_sum": len(counted),
        }[mode]
    )


def correct(log_ratio: dict[tuple[int, int], torch.Tensor]) -> tuple[set, dict, dict]:
    """The completions that are not rejected, the tokens [L] that train, the importance weights."""
    bounds = [np.log(bound) for bound in (*BAND, *REJECT)]
    accepted = {key for key, gap in log_ratio.items() if bounds[2] <= gap.mean() <= bounds[3]}
    in_band = {key: (gap >= bounds[0]) & (gap <= bounds[1]) for key, gap in log_ratio.items()}
    keep = {key: in_band[key] & (key in accepted) for key in log_ratio}
    return accepted, keep, {key: min(float(log_ratio[key][in_band[key]].sum().exp()), CAP) for key in keep}


def train(folder: Path, rows: list[Row], loss: str, aggregation: str) -> dict:
    """Two updates on the same rows; per update metrics, grad-norm and the gradient of every weight."""
    model = load(folder)
    optimizer = torch.optim.AdamW(
        decay_groups(model),
        lr=learning_rate(aggregation),
        betas=(BETA1, BETA2),
        eps=EPS,
        weight_decay=WEIGHT_DECAY,
    )
    valid = [row for row in rows if row.finish != "abort" and row.trained.any()]
    with torch.no_grad():
        old = {row.key: score(model, row)[0] for row in valid}
    log_ratio = {row.key: torch.tensor(row.gaps) for row in valid}  # actor before the update over engine
    accepted, keep, importance = correct(log_ratio)
    lengths = {key: int(mask.sum()) for key, mask in keep.items()}
    updates = []
    for _ in range(2):
        total, terms = (
            torch.zeros((), dtype=torch.float64),
            {"policy_loss": 0.0, "kl_loss": 0.0, "entropy_loss": 0.0},
        )
        ratios, gaps, entropies, kls = [], [], [], []
        for row in valid:
            if not lengths[row.key]:
                continue
            rewards = np.array(
                [other.reward for other in valid if other.group == row.group and other.key in accepted]
            )
            advantage = 0.0 if rewards.std() == 0 else float((row.reward - rewards.mean()) / rewards.std())
            logprobs, entropy = (values[keep[row.key]] for values in score(model, row))
            start = old[row.key][keep[row.key]]
            weight = token_weight(aggregation, lengths, row.key)
            # the reference is the model before the update
            kl = torch.exp(start - logprobs) - (start - logprobs) - 1
            parts = {
                "policy_loss": weight
                * importance[row.key]
                * policy_loss(loss, logprobs - start, advantage).sum(),
                "kl_loss": weight * KL_COEF * kl.sum(),
                "entropy_loss": -weight * ENTROPY_COEF * entropy.sum(),
            }
            total = total + sum(parts.values())
            terms = {name: terms[name] + parts[name].item() for name in terms}
            ratios.append((logprobs - start).exp().detach())
            gaps.append((logprobs - start + log_ratio[row.key][keep[row.key]]).abs().detach())
            entropies.append(entropy.detach())
            kls.append(kl.detach())
        optimizer.zero_grad()
        total.backward()
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
        gradients = hub_names({name: parameter.grad for name, parameter in model.named_parameters()})
        optimizer.step()
        ratio, gap = torch.cat(ratios), torch.cat(gaps)
        metrics = {
            "loss": total.item(),
            **terms,
            "ratio": ratio.mean(),
            "ratio_max": ratio.max(),
            "ratio_min": ratio.min(),
        }
        metrics |= {
            "actor_rollout_gap": gap.mean(),
            "actor_rollout_gap_max": gap.max(),
            "entropy": torch.cat(entropies).mean(),
        }
        metrics["ref_kl"] = torch.cat(kls).mean()
        metrics = {name: float(value) for name, value in metrics.items()}
        updates.append({"grad_norm": float(norm), "metrics": metrics, "gradients": gradients})
    return {"updates": updates, "trained_tokens": 2 * sum(lengths.values())}


def expected_results(folder: Path, algorithms: Iterable[tuple[str, str]]) -> dict:
    """Return the engine's log-probs of the rows' trained tokens, and the results of every (loss,
    aggregation) in `algorithms`.
    """
    model = load(folder)
    rows = make_rows(model.config.vocab_size)
    with torch.no_grad():
        rollout = {row.key: (score(model, row)[0].numpy() - row.gaps).astype(np.float32) for row in rows}
    results = {(loss, mode): train(folder, rows, loss, mode) for loss, mode in algorithms}
    return {"rollout_logprobs": rollout, "results": results}
