"""Context parallel attention of Transformer Engine: what it is told of packed sequences."""

import itertools

import pytest

pytestmark = [pytest.mark.usefixtures("transformer_engine"), pytest.mark.distributed]


def test_fused_attention_takes_the_boundaries_of_sequences_for_the_padded_ones_that_it_is_not_given(
    results_of,
):
    """The exchange of keys asserts that padded boundaries are there, and a micro-batch gives none."""
    told = results_of("te_context.py", ranks=2)["boundaries_of_sequences"]
    assert "error" not in told, told
    ends = told["ends"]
    assert sorted(stop - start for start, stop in itertools.pairwise(ends)) == [8, 12, 16]
    assert told == {
        "ends": ends,
        "key ends": ends,
        "padded": ends,
        "padded keys": ends,
        "tokens of a rank": 18,
    }
