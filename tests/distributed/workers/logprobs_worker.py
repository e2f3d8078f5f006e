"""Run by torchrun with four ranks: the output-layer operations at TP 1, 2 and 4 against a dense float64
single-rank reference.

Every rank builds the whole weight from one seed, keeps its rows, and compares what it got with its part of
the dense result. The first mismatch raises with the case's name, which ends the launch with a non-zero
status.
"""

import torch
import torch.distributed as dist
from reported_cases import reported_case

from megagrpo.ops import logit_tiles, tiling
from megagrpo.ops.exact_kl import linear_exact_kl
from megagrpo.ops.logprobs import linear_logprobs
from megagrpo.ops.token_loss import linear_token_loss

HIDDEN = 5
# float64, so only the order of summation differs.
TOLERANCE = {"rtol": 1e-10, "atol": 1e-11}


class CountedReductions:
    """Records the operation of every `dist.all_reduce` while active."""

    def __enter__(self):
        self.operations, self._original = [], dist.all_reduce

        def counted(tensor, op=dist.ReduceOp.SUM, **options):
            self.operations.append("max" if op == dist.ReduceOp.MAX else "sum")
            return self._original(tensor, op=op, **options)

        dist.all_reduce = counted
        return self

    def __exit__(self, *error):
        dist.all_reduce = self._original


class Case:
    """Inputs of one case: the whole weight, this rank's rows of it, and rows with targets on every shard's
    last column.
    """

    def __init__(self, group, vocab_size, padded, num_rows):
        generator = torch.Generator().manual_seed(vocab_size * 1000 + num_rows)
        tp, rank = group.size(), group.rank()
        self.group, self.vocab_size = group, vocab_size
        self.rows = slice(rank * padded // tp, (rank + 1) * padded // tp)
        self.hidden = torch.randn(num_rows, HIDDEN, dtype=torch.float64, generator=generator).requires_grad_()
        self.full_weight = torch.randn(
            padded, HIDDEN, dtype=torch.float64, generator=generator
        ).requires_grad_()
        self.weight = self.full_weight.detach()[self.rows].clone().requires_grad_()
        self.targets = torch.randint(vocab_size, (num_rows,), generator=generator)
        for i in range(min(tp, num_rows)):
            self.targets[i] = min((i + 1) * padded // tp, vocab_size) - 1
        self.coefficients = torch.randn(2, num_rows, dtype=torch.float64, generator=generator)

    def dense(self, temperature):
        temperature = torch.as_tensor(temperature, dtype=torch.float64).reshape(-1, 1)
        logprobs = torch.log_softmax(
            self.hidden @ self.full_weight[: self.vocab_size].t() / temperature, dim=-1
        )
        return logprobs.gather(1, self.targets.unsqueeze(1)).squeeze(1), -(logprobs.exp() * logprobs).sum(
            dim=1
        )

    def reference(self):
        """Hidden states and whole weight of another model."""
        return self.hidden.detach() * 0.5, self.full_weight.detach().flip(1)

    def dense_kl(self, reference_hidden, reference_weight):
        actor = torch.log_softmax(self.hidden @ self.full_weight[: self.vocab_size].t(), dim=-1)
        reference = torch.log_softmax(reference_hidden @ reference_weight[: self.vocab_size].t(), dim=-1)
        return (actor.exp() * (actor - reference)).sum(dim=1), reference.gather(
            1, self.targets.unsqueeze(1)
        ).squeeze(1)

    def compare_gradients(self, expected_loss, loss):
        expected = torch.autograd.grad(expected_loss, (self.hidden, self.full_weight))
        hidden, weight = torch.autograd.grad(loss, (self.hidden, self.weight))
        torch.testing.assert_close(hidden, expected[0], **TOLERANCE)
        torch.testing.assert_close(weight, expected[1][self.rows], **TOLERANCE)


def check_logprobs(case, temperature):
    """Values, gradients, and at most one MAX and one SUM forward, one SUM backward."""
    with CountedReductions() as forward:
        result = linear_logprobs(
            case.hidden,
            case.weight,
            case.targets,
            vocab_size=case.vocab_size,
            temperature=temperature,
            group=case.group,
            compute_entropy=True,
        )
    expected = case.dense(temperature)
    torch.testing.assert_close(result.logprobs, expected[0], **TOLERANCE)
    torch.testing.assert_close(result.entropy, expected[1], **TOLERANCE)
    with CountedReductions() as backward:
        case.compare_gradients(
            (case.coefficients * torch.stack(expected)).sum(),
            (case.coefficients * torch.stack([result.logprobs, result.entropy])).sum(),
        )
    communicates = case.group.size() > 1 and len(case.targets) > 0
    assert forward.operations == (["max", "sum"] if communicates else []), forward.operations
    assert backward.operations == (["sum"] if communicates else []), backward.operations


def check_unreduced_hidden_gradient(case):
    """With reduce_hidden_grad=False each rank keeps its shard's part, and the parts sum to the dense
    gradient.
    """
    result = linear_logprobs(
        case.hidden,
        case.weight,
        case.targets,
        vocab_size=case.vocab_size,
        group=case.group,
        reduce_hidden_grad=False,
    )
    (part,) = torch.autograd.grad(result.logprobs.sum(), case.hidden)
    dist.all_reduce(part, group=case.group)
    (expected,) = torch.autograd.grad(case.dense(1.0)[0].sum(), case.hidden)
    torch.testing.assert_close(part, expected, **TOLERANCE)


def check_token_loss(case, chunk_rows):
    """Three GEMMs: the same gradients, one MAX and two SUMs a chunk (the KL's is the second), and one SUM of
    the hidden gradient.
    """
    # The ranks' shares of the true vocabulary differ; were the chunks cut by them, the ranks would wait for
    # each other for ever.
    tiling._CPU_STASH_BYTES = 2 * chunk_rows * len(case.weight) * 8

    def loss_fn(logprobs, entropy, rows, kl):
        return case.coefficients[0, rows] * logprobs.exp() + case.coefficients[1, rows] * entropy + 0.5 * kl

    reference = case.reference()
    with CountedReductions() as counted:
        result = linear_token_loss(
            case.hidden,
            case.weight,
            case.targets,
            loss_fn,
            vocab_size=case.vocab_size,
            group=case.group,
            compute_entropy=True,
            reference=(reference[0], reference[1][case.rows]),
        )
    expected = loss_fn(*case.dense(1.0), slice(0, len(case.targets)), case.dense_kl(*reference)[0]).sum()
    torch.testing.assert_close(result.loss, expected, **TOLERANCE)
    case.compare_gradients(2 * expected, 2 * result.loss)
    chunks = -(-len(case.targets) // chunk_rows)
    expected_operations = ["max", "sum", "sum"] * chunks + ["sum"] if case.group.size() > 1 and chunks else []
    assert counted.operations == expected_operations, counted.operations


def check_exact_kl(case):
    """Divergence from another model, split alike: values, gradients, one MAX and two SUMs forward, one SUM
    backward.
    """
    reference_hidden, reference_weight = case.reference()
    with CountedReductions() as counted:
        result = linear_exact_kl(
            case.hidden,
            case.weight,
            reference_hidden,
            reference_weight[case.rows],
            case.targets,
            vocab_size=case.vocab_size,
            group=case.group,
        )
    expected, reference_logprobs = case.dense_kl(reference_hidden, reference_weight)
    torch.testing.assert_close(result.kl, expected, **TOLERANCE)
    torch.testing.assert_close(result.reference_logprobs, reference_logprobs, **TOLERANCE)
    logprobs, entropy = case.dense(1.0)
    case.compare_gradients(
        (case.coefficients[0] * expected + case.coefficients[1] * logprobs + entropy).sum(),
        (case.coefficients[0] * result.kl + case.coefficients[1] * result.logprobs + result.entropy).sum(),
    )
    communicates = case.group.size() > 1 and len(case.targets) > 0
    assert counted.operations == (["max", "sum", "sum"] if communicates else []), counted.operations


# Vocabulary, padded vocabulary, rows. 9 of 16 leaves the last of four ranks with padding alone; 37 does not
# divide.
SHAPES = [(40, 40, 7), (37, 40, 7), (9, 16, 5), (37, 40, 1), (37, 40, 0)]


def run(group):
    for vocab_size, padded, num_rows in SHAPES:
        name = f"tp={group.size()} V={vocab_size} padded={padded} T={num_rows}"
        with reported_case(name):
            for temperature in (1.0, torch.linspace(0.5, 2.0, num_rows)):
                check_logprobs(Case(group, vocab_size, padded, num_rows), temperature)
            check_unreduced_hidden_gradient(Case(group, vocab_size, padded, num_rows))
            check_exact_kl(Case(group, vocab_size, padded, num_rows))
            for chunk_rows in (3, 100):
                check_token_loss(Case(group, vocab_size, padded, num_rows), chunk_rows)


def main():
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    # Tiles that divide neither rows nor columns.
    logit_tiles.choose_tiling = lambda num_rows, device: tiling.Tiling(3, 4)
    for tp in (1, 2, 4):
        groups = [dist.new_group(list(range(first, first + tp))) for first in range(0, 4, tp)]
        run(groups[rank // tp])
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
