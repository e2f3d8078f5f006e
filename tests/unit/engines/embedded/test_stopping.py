"""Tests of megagrpo.engines.completion_rules: the reference decodes the whole completion after every
token.
"""

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from megagrpo.engines.completion_rules import StopRule
from megagrpo.types import SamplingParams

TEXT = "Ünï → 🙂 code\nQuestion: a b  c\nQ: 日本語 🙂🙂 END"
MERGES = [("Q", "u"), ("Qu", "e"), ("s", "t"), ("Ġ", "a"), (":", "Ġ"), ("Ċ", "Q")]


def build_byte_tokenizer(merges):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {
        piece: index for index, piece in enumerate([*alphabet, *("".join(pair) for pair in MERGES)])
    }
    backend = Tokenizer(models.BPE(vocabulary, merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend, additional_special_tokens=["<|im_end|>"])


@pytest.fixture(scope="module")
def byte_tokenizer():
    """Byte-level BPE in which most characters beyond ASCII take two to four tokens, and a few merges join
    letters.
    """
    return build_byte_tokenizer(MERGES)


@pytest.fixture(scope="module")
def unmerged_tokenizer():
    """The same vocabulary, one token per byte: as a sampler may choose them, against the merges."""
    return build_byte_tokenizer([])


@pytest.fixture(scope="module")
def word_tokenizer():
    """Word pieces whose decoder drops the space before the first token, as SentencePiece models do."""
    vocabulary = {
        piece: index for index, piece in enumerate(["▁a", "▁b", "▁", "c", "d", "▁END", "E", "N", "D"])
    }
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="c"))
    backend.decoder = decoders.Metaspace()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def first_end(tokenizer, token_ids, end_token_ids=(), **sampling):
    rule = StopRule(tokenizer, set(end_token_ids), SamplingParams(max_new_tokens=1000, **sampling))
    tokens = np.array([token_ids])
    ends = [bool(rule.ends(tokens, np.array([length]))[0]) for length in range(1, len(token_ids) + 1)]
    return ends.index(True) + 1 if True in ends else None


def first_end_by_full_decoding(tokenizer, token_ids, stop):
    for length in range(1, len(token_ids) + 1):
        text = tokenizer.decode(token_ids[:length], skip_special_tokens=False)
        if any(string in text for string in stop):
            return length
    return None


@pytest.mark.parametrize(
    "stop", ["\nQuestion:", "🙂", "日本", "本", "\nQ", "b  c", "END", "→ 🙂", "Question: a b", "absent", "é"]
)
def test_a_stop_string_ends_with_the_token_that_completes_it_for_any_split_into_tokens(
    byte_tokenizer, unmerged_tokenizer, stop
):
    for token_ids in (byte_tokenizer(TEXT)["input_ids"], unmerged_tokenizer(TEXT)["input_ids"]):
        assert byte_tokenizer.decode(token_ids) == TEXT
        expected = first_end_by_full_decoding(byte_tokenizer, token_ids, (stop,))
        assert (expected is None) == (stop not in TEXT)
        assert first_end(byte_tokenizer, token_ids, stop=(stop,)) == expected


@pytest.mark.parametrize("stop", [" b", "a c", " END", "b E", "dd", "  "])
def test_spaces_survive_where_the_decoder_drops_the_first_one(word_tokenizer, stop):
    token_ids = [0, 2, 3, 3, 4, 1, 4, 4, 0, 0, 2, 1, 1, 6, 7, 8, 1, 5]
    assert first_end(word_tokenizer, token_ids, stop=(stop,)) == first_end_by_full_decoding(
        word_tokenizer, token_ids, (stop,)
    )


def test_the_first_of_several_strings_ends_it(byte_tokenizer):
    token_ids = byte_tokenizer(TEXT)["input_ids"]
    stop = ("END", "", "code", "日")
    assert first_end(byte_tokenizer, token_ids, stop=stop) == first_end_by_full_decoding(
        byte_tokenizer, token_ids, ("END", "code", "日")
    )


def test_a_special_token_can_be_given_as_a_string(byte_tokenizer):
    token_ids = [*byte_tokenizer("ab")["input_ids"], byte_tokenizer.convert_tokens_to_ids("<|im_end|>"), 5]
    assert first_end(byte_tokenizer, token_ids, stop=("<|im_end|>",)) == 3


def test_end_tokens_and_stop_token_ids_end_a_completion(byte_tokenizer):
    assert first_end(byte_tokenizer, [9, 4, 7, 5], end_token_ids=[7]) == 3
    assert first_end(byte_tokenizer, [9, 4, 7, 5], end_token_ids=[7], stop_token_ids=(4,)) == 2
    assert first_end(byte_tokenizer, [9, 4, 7, 5]) is None


def test_rows_of_several_lengths_are_judged_by_their_newest_token(byte_tokenizer):
    rule = StopRule(byte_tokenizer, {7}, SamplingParams(max_new_tokens=9, stop=("ab",)))
    a, b = byte_tokenizer("ab")["input_ids"]
    tokens = np.array([[7, 1, 1], [1, 7, 7], [a, b, 1], [1, a, b]])
    assert rule.ends(tokens, np.array([2, 2, 2, 3])).tolist() == [False, True, True, True]
