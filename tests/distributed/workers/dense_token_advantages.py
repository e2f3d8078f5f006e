"""Two updates of REINFORCE++ with KL to go in plain float64 on a transformers model: expected values.

arXiv 2501.03262: A_t = r (less the group's mean in the variant with a baseline) - beta * the KL of token t
and of all behind it, standardised over all tokens of the batch that train. Nothing of megagrpo's numerics is
used.
"""

from pathlib import Path

import dense_update as dense
import numpy as np
import torch
from dense_grpo import decay_groups, hub_names, load

ESTIMATORS = ("reinforce_pp", "reinforce_pp_baseline")
KL_COEF = 0.3  # so large that the KL changes the sign of many advantages
LOSS, AGGREGATION = "ppo_clip", "token_mean"


def write_reference(model_folder: Path, folder: Path) -> Path:
    """Save a model beside the actor's, some tenths of a nat away from it."""
    model = load(model_folder)
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    model.float().save_pretrained(folder)
    return folder


def token_advantages(
    estimator: str, valid: list[dense.Row], accepted: set, keep: dict, kl: dict
) -> dict[tuple[int, int], torch.Tensor]:
    """[L] of each accepted completion."""
    found = {}
    for row in (row for row in valid if row.key in accepted):
        rewards = [other.reward for other in valid if other.group == row.group and other.key in accepted]
        baseline = np.mean(rewards) if estimator == "reinforce_pp_baseline" else 0.0
        to_go = torch.stack([kl[row.key][t:].sum() for t in range(len(kl[row.key]))])
        found[row.key] = row.reward - baseline - KL_COEF * to_go
    tokens = torch.cat([values[keep[key]] for key, values in found.items()])
    return {key: (values - tokens.mean()) / tokens.std(correction=0) for key, values in found.items()}


def train(folder: Path, reference_folder: Path, rows: list[dense.Row], estimator: str) -> dict:
    """Two updates on the same rows; per update grad-norm, loss and the gradient of every weight."""
    model, reference = load(folder), load(reference_folder)
    optimizer = torch.optim.AdamW(
        decay_groups(model),
        lr=dense.learning_rate(AGGREGATION),
        betas=(dense.BETA1, dense.BETA2),
        eps=dense.EPS,
        weight_decay=dense.WEIGHT_DECAY,
    )
    valid = [row for row in rows if row.finish != "abort" and row.trained.any()]
    with torch.no_grad():
        old = {row.key: dense.score(model, row)[0] for row in valid}
        kl = {row.key: old[row.key] - dense.score(reference, row)[0] for row in valid}
    accepted, keep, importance = dense.correct({row.key: torch.tensor(row.gaps) for row in valid})
    lengths = {key: int(mask.sum()) for key, mask in keep.items()}
    advantages = token_advantages(estimator, valid, accepted, keep, kl)
    updates = []
    for _ in range(2):
        policy = entropy_sum = torch.zeros((), dtype=torch.float64)
        for row in (row for row in valid if lengths[row.key]):
            mask = keep[row.key]
            logprobs, entropy = (values[mask] for values in dense.score(model, row))
            losses = dense.policy_loss(LOSS, logprobs - old[row.key][mask], advantages[row.key][mask])
            weight = dense.token_weight(AGGREGATION, lengths, row.key)
            policy = policy + weight * importance[row.key] * losses.sum()
            entropy_sum = entropy_sum - weight * dense.ENTROPY_COEF * entropy.sum()
        optimizer.zero_grad()
        (policy + entropy_sum).backward()
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in model.parameters()])
        gradients = hub_names({name: parameter.grad for name, parameter in model.named_parameters()})
        optimizer.step()
        metrics = {
            "loss": (policy + entropy_sum).item(),
            "policy_loss": policy.item(),
            "entropy_loss": entropy_sum.item(),
        }
        updates.append({"grad_norm": float(norm), "metrics": metrics, "gradients": gradients})
    # the metric is of all tokens that were computed, those that a correction masks too
    ref_kl = float(torch.cat(list(kl.values())).mean())
    return {"updates": updates, "trained_tokens": 2 * sum(lengths.values()), "ref_kl": ref_kl}


def expected_results(folder: Path, reference_folder: Path) -> dict:
    """Return the engine's log-probs and the results of every estimator."""
    model = load(folder)
    rows = dense.make_rows(model.config.vocab_size)
    with torch.no_grad():
        rollout = {
            row.key: (dense.score(model, row)[0].numpy() - row.gaps).astype(np.float32) for row in rows
        }
    results = {name: train(folder, reference_folder, rows, name) for name in ESTIMATORS}
    return {"rollout_logprobs": rollout, "results": results}
