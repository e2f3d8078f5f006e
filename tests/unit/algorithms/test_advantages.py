"""Advantage estimators against plain-python references, ragged groups, and refused inputs."""

import itertools
import math
import statistics

import pytest
import torch

from megagrpo.algorithms.advantages import ADVANTAGES, PenaltySums, compute_advantages
from megagrpo.config.algorithm_section import AlgorithmConfig
from megagrpo.errors import UserError

REWARDS = torch.tensor(
    [[0.1, 0.9, 0.4, 0.4], [1.0, 0.0, 0.0, 7.0], [2.0, 2.5, -1.0, 0.0]], dtype=torch.float64
)
VALID = torch.tensor([[True, True, True, True], [True, True, True, False], [True, False, True, True]])
LENGTHS = torch.tensor([[3, 9, 1, 4], [5, 5, 2, 8], [10, 1, 20, 6]])
EXACT_STD = {"advantage_std_floor": "max", "advantage_std_epsilon": 0.0}
GROUP_BASELINES = [name for name in ADVANTAGES.names() if ADVANTAGES.get(name).group_baseline]


def valid_rows(values=REWARDS):
    return [
        [float(x) for x, ok in zip(row, mask, strict=True) if ok]
        for row, mask in zip(values, VALID, strict=True)
    ]


def run(name, rewards=REWARDS, valid=VALID, **options):
    config = AlgorithmConfig(advantages=name, **{**EXACT_STD, **options.pop("config", {})})
    return compute_advantages(rewards, valid, config, **options)


def assert_rows(advantages, expected):
    """Compare the valid entries row by row; the others must be exactly 0."""
    for row, mask, want in zip(advantages, VALID, expected, strict=True):
        assert row[mask].tolist() == pytest.approx(want, rel=1e-12, abs=1e-12)
        assert row[~mask].eq(0).all()


@pytest.mark.parametrize(("kind", "std"), [("population", statistics.pstdev), ("sample", statistics.stdev)])
def test_grpo_standardises_the_valid_members_of_each_group(kind, std):
    advantages = run("grpo", config={"advantage_std": kind}).advantages
    assert_rows(advantages, [[(r - statistics.mean(row)) / std(row) for r in row] for row in valid_rows()])


def test_std_floor_is_added_or_taken_as_the_larger():
    row = valid_rows()[0]
    added = run("grpo", config={"advantage_std_floor": "add", "advantage_std_epsilon": 0.5}).advantages[0]
    assert added.tolist() == pytest.approx(
        [(r - statistics.mean(row)) / (statistics.pstdev(row) + 0.5) for r in row]
    )
    larger = run("grpo", config={"advantage_std_floor": "max", "advantage_std_epsilon": 0.5}).advantages[0]
    assert larger.tolist() == pytest.approx([(r - statistics.mean(row)) / 0.5 for r in row])


def test_dr_grpo_centres_without_scaling():
    assert_rows(run("dr_grpo").advantages, [[r - statistics.mean(row) for r in row] for row in valid_rows()])


def test_rloo_compares_with_the_mean_of_the_others():
    expected = [
        [r - statistics.mean(row[:i] + row[i + 1 :]) for i, r in enumerate(row)] for row in valid_rows()
    ]
    assert_rows(run("rloo").advantages, expected)


def test_opo_weighs_its_baseline_by_length():
    expected = []
    for row, lengths in zip(valid_rows(), valid_rows(LENGTHS), strict=True):
        baseline = sum(n * r for n, r in zip(lengths, row, strict=True)) / sum(lengths)
        expected.append([r - baseline for r in row])
    assert_rows(run("opo", lengths=LENGTHS).advantages, expected)


def token_rewards(baseline, kl):
    """A_t of every token of every valid completion as REINFORCE++ (arXiv 2501.03262) has it: the reward, less
    the group's mean in the variant with a baseline, less the KL of the token and of all behind it.
    """
    rows = {}
    for group, (row, mask) in enumerate(zip(REWARDS.tolist(), VALID.tolist(), strict=True)):
        mean = statistics.mean(r for r, ok in zip(row, mask, strict=True) if ok) if baseline else 0.0
        for place, (reward, ok) in enumerate(zip(row, mask, strict=True)):
            tokens = kl[group, place]
            if ok:
                rows[group, place] = [reward - mean - sum(tokens[t:]) for t in range(len(tokens))]
    return rows


def sums_of(kl, power):
    """[N, G]: the sum over a completion's tokens of (KL to go) ** power."""
    sums = torch.zeros_like(REWARDS)
    for key, tokens in kl.items():
        sums[key] = sum(sum(tokens[t:]) ** power for t in range(len(tokens)))
    return sums


@pytest.mark.parametrize(("kind", "std"), [("population", statistics.pstdev), ("sample", statistics.stdev)])
@pytest.mark.parametrize("name", ["reinforce_pp", "reinforce_pp_baseline"])
@pytest.mark.parametrize("size", [0.0, 0.05])
def test_reinforce_pp_standardises_over_all_tokens_of_the_batch(name, kind, std, size):
    generator = torch.Generator().manual_seed(3)
    kl = {
        (group, place): (size * torch.randn(int(LENGTHS[group, place]), generator=generator))
        .double()
        .tolist()
        for group in range(3)
        for place in range(4)
    }
    expected = token_rewards(name == "reinforce_pp_baseline", kl)
    tokens = [value for row in expected.values() for value in row]
    penalties = PenaltySums(sums_of(kl, 1), sums_of(kl, 2)) if size else None
    result = run(name, lengths=LENGTHS, penalties=penalties, config={"advantage_std": kind})
    for key, row in expected.items():
        to_go = [sum(kl[key][t:]) for t in range(len(row))]
        got = [float(result.advantages[key]) - result.penalty_scale * k for k in to_go]
        want = [(value - statistics.mean(tokens)) / std(tokens) for value in row]
        assert got == pytest.approx(want, rel=1e-12, abs=1e-12)
    assert result.advantages[~VALID].eq(0).all()


def test_reinforce_pp_takes_one_completion_per_prompt():
    rewards, lengths = torch.tensor([[1.0], [3.0]]), torch.tensor([[7], [7]])
    valid = torch.ones(2, 1, dtype=torch.bool)
    advantages = run("reinforce_pp", rewards, valid, lengths=lengths).advantages
    assert advantages.flatten().tolist() == [-1.0, 1.0]


def test_kl_tells_completions_of_equal_rewards_apart():
    """Without it such a group is no signal; with it the one that went further from the reference loses."""
    rewards, valid = torch.ones(1, 2), torch.ones(1, 2, dtype=torch.bool)
    lengths = torch.tensor([[1, 1]])
    kl = torch.tensor([[0.1, 0.3]]).double()
    for name in ("reinforce_pp", "reinforce_pp_baseline"):
        assert run(name, rewards, valid, lengths=lengths).advantages.tolist() == [[0.0, 0.0]]
        result = run(name, rewards, valid, lengths=lengths, penalties=PenaltySums(kl, kl.square()))
        tokens = result.advantages - result.penalty_scale * kl
        assert tokens.flatten().tolist() == pytest.approx([1.0, -1.0])


def test_gdpo_standardises_each_reward_before_adding_them():
    parts = torch.stack([REWARDS, LENGTHS.double() / 10], dim=2)
    weights = torch.tensor([1.0, 0.5])
    totals = []
    for row, lengths in zip(valid_rows(), valid_rows(LENGTHS.double() / 10), strict=True):
        columns = [[(x - statistics.mean(c)) / statistics.pstdev(c) for x in c] for c in (row, lengths)]
        totals.append([a + 0.5 * b for a, b in zip(*columns, strict=True)])
    std = statistics.pstdev([x for row in totals for x in row])
    advantages = run("gdpo", reward_parts=parts, part_weights=weights).advantages
    assert_rows(advantages, [[x / std for x in row] for row in totals])


def test_gdpo_keeps_apart_what_the_sum_of_rewards_merges():
    """Two rewards that cancel give equal sums, which is degenerate for grpo and a signal for gdpo."""
    parts = torch.tensor([[[1.0, 0.0], [0.0, 1.0]]])
    valid = torch.ones(1, 2, dtype=torch.bool)
    assert run("grpo", parts.sum(2), valid).advantages.tolist() == [[0.0, 0.0]]
    weighted = run("gdpo", parts.sum(2), valid, reward_parts=parts, part_weights=torch.tensor([2.0, 1.0]))
    assert weighted.advantages.tolist() == [[1.0, -1.0]]
    assert weighted.counters["groups_equal_rewards"] == 0


@pytest.mark.parametrize(("n", "c", "k"), [(6, 2, 3), (5, 1, 2), (4, 3, 2), (8, 4, 4)])
def test_pass_at_k_is_the_mean_over_all_subsets(n, c, k):
    """The closed form equals the enumeration it stands for: standardised success, averaged over the
    k-subsets that hold i.
    """
    success = [1.0] * c + [0.0] * (n - c)
    subsets = list(itertools.combinations(range(n), k))
    outcome = {s: max(success[i] for i in s) for s in subsets}
    mean, std = statistics.mean(outcome.values()), statistics.pstdev(outcome.values())
    expected = [0.0] * n
    if std > 0:
        expected = [statistics.mean((outcome[s] - mean) / std for s in subsets if i in s) for i in range(n)]
    rewards = torch.tensor([success])
    result = run(
        "pass_at_k",
        rewards,
        torch.ones_like(rewards, dtype=torch.bool),
        config={"advantage_options": {"k": k}},
    )
    assert result.advantages[0].tolist() == pytest.approx(expected, abs=1e-12)


def test_pass_at_k_of_a_group_with_fewer_members_than_k_is_zero():
    valid = torch.tensor([[True, True, False, False]])
    assert run("pass_at_k", torch.tensor([[1.0, 0.0, 1.0, 0.0]]), valid).advantages.eq(0).all()


@pytest.mark.parametrize("name", GROUP_BASELINES)
@pytest.mark.parametrize(
    ("rewards", "valid", "counter"),
    [
        ([1.0, 1.0, 1.0, 1.0], [True] * 4, "groups_equal_rewards"),
        ([0.0, 0.0, 0.0, 0.0], [True] * 4, "groups_equal_rewards"),
        ([0.1 + 0.2, 0.3, 0.3, 0.3], [True] * 4, "groups_equal_rewards"),  # a rounding error is no signal
        ([1.0, 1.0, 0.0, 9.0], [True, True, False, False], "groups_equal_rewards"),
        ([5.0, 1.0, 2.0, 3.0], [True, False, False, False], "groups_too_small"),
        ([5.0, 1.0, 2.0, 3.0], [False] * 4, "groups_too_small"),
    ],
)
@pytest.mark.parametrize("floor", ["add", "max"])
def test_group_without_a_difference_gets_exactly_zero_and_is_counted(name, rewards, valid, counter, floor):
    rewards = torch.tensor([rewards], dtype=torch.float64)
    result = run(
        name,
        rewards,
        torch.tensor([valid]),
        config={"advantage_std_floor": floor, "advantage_std_epsilon": 1e-30},
        lengths=torch.tensor([[1, 2, 3, 4]]),
        reward_parts=rewards[:, :, None],
    )
    assert result.advantages.eq(0).all()
    assert result.counters[counter] == 1
    assert result.counters["completions_invalid"] == valid.count(False)


@pytest.mark.parametrize("name", ADVANTAGES.names())
def test_rounding_of_a_float32_reward_model_is_no_signal_in_float64(name):
    """Scores of one value computed in two orders in float32 differ in the last digit; they arrive as Python
    numbers, so in float64.
    """
    orders = list(itertools.permutations([0.1, 0.1, 0.7]))[:3]
    summed = [float((row[0] + row[1]) + row[2]) for row in torch.tensor(orders)]
    assert len(set(summed)) > 1
    rewards = torch.tensor([summed, summed], dtype=torch.float64)
    result = run(
        name,
        rewards,
        torch.ones(2, 3, dtype=torch.bool),
        lengths=torch.tensor([[1, 2, 3], [2, 5, 1]]),
        reward_parts=rewards[:, :, None],
        config={"advantage_options": {"k": 2} if name == "pass_at_k" else {}},
    )
    assert result.advantages.eq(0).all() and result.counters["groups_equal_rewards"] == 2


def test_gdpo_of_parts_that_cancel_is_zero():
    """r and 1 - r standardise to opposite numbers, whose sum is rounding: a division by its standard
    deviation would make advantages of size 1 of it.
    """
    first = torch.tensor([[0.1, 0.7, 0.3, 0.35], [0.2, 0.9, 0.4, 0.15]], dtype=torch.float64)
    parts = torch.stack([first, 0.7 - first], dim=2)
    valid = torch.ones(2, 4, dtype=torch.bool)
    for weights in ([1.0, 1.0], [3.3, 3.3]):
        result = run("gdpo", parts.sum(2), valid, reward_parts=parts, part_weights=torch.tensor(weights))
        assert result.advantages.eq(0).all(), weights


def test_small_but_real_differences_are_a_signal():
    rewards = torch.tensor([[1.0, 1.0 + 1e-5]], dtype=torch.float64)
    advantages = run("grpo", rewards, torch.ones(1, 2, dtype=torch.bool)).advantages
    assert advantages[0].tolist() == pytest.approx([-1.0, 1.0], rel=1e-6)


def test_nan_of_an_invalid_completion_is_ignored():
    spoiled = torch.where(VALID, REWARDS, math.nan)
    parts = torch.stack([spoiled, spoiled], dim=2)
    for name in ADVANTAGES.names():
        clean = run(name, lengths=LENGTHS, reward_parts=torch.stack([REWARDS, REWARDS], dim=2)).advantages
        assert torch.equal(run(name, spoiled, lengths=LENGTHS, reward_parts=parts).advantages, clean), name


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rewards": REWARDS.clone().index_fill(1, torch.tensor([2]), math.nan)}, r"rewards\[0, 2\]: nan"),
        (
            {"rewards": torch.tensor([[1.0, math.inf]]), "valid": torch.ones(1, 2, dtype=torch.bool)},
            r"rewards\[0, "
            r"1\]: inf",
        ),
        ({"valid": VALID[:2]}, r"valid: shape \[2, 4\], but rewards has \[3, 4\]"),
        ({"valid": VALID.long()}, "valid: torch.int64; must be bool"),
        ({"rewards": REWARDS[0]}, r"rewards: shape \[4\]"),
        ({"rewards": REWARDS.long()}, "rewards: torch.int64"),
        ({"name": "opo"}, "needs the completions' lengths"),
        ({"name": "opo", "lengths": LENGTHS[:, :3]}, r"lengths: shape \[3, 3\]"),
        ({"name": "gdpo"}, "reward_parts"),
        (
            {"name": "gdpo", "reward_parts": REWARDS[:, :, None], "part_weights": torch.ones(2)},
            "part_weights: 2 weights for 1 rewards",
        ),
        (
            {"name": "rloo", "rewards": torch.ones(3, 1), "valid": torch.ones(3, 1, dtype=torch.bool)},
            "completions_per_prompt is 1",
        ),
        ({"name": "gpro"}, "did you mean grpo"),
    ],
)
def test_bad_input_is_refused_with_its_place(change, message):
    with pytest.raises(UserError, match=message):
        run(**{"name": "grpo", **change})
