"""Rewards see special tokens where the configuration keeps them, and never the one that ends a completion."""

from dataclasses import replace

import numpy as np
import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedTokenizerFast

from megagrpo.config.rollout_sections import RewardsConfig
from megagrpo.rewards.pool import RewardPool
from megagrpo.rewards.special_tokens import text_with_special_tokens
from megagrpo.types import Completion, Prompt

WORDS = ["a", "7", "<think>", "</think>", "<answer>", "</answer>", "<end>"]


@pytest.fixture(scope="module")
def tokenizer():
    """Return a tokenizer whose marks of reasoning are special tokens."""
    tokens = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="a"))
    tokens.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokens, eos_token="<end>", additional_special_tokens=["<think>", "</think>"]
    )


def sample(text: str, finish_reason: str = "stop") -> Completion:
    ids = np.array([WORDS.index(word) for word in text.split()])
    stripped = " ".join(word for word in text.split() if word not in ("<think>", "</think>", "<end>"))
    return Completion.sampled(0, 0, ids, np.zeros(len(ids), np.float32), finish_reason, ((0, 0),), stripped)


@pytest.mark.parametrize(
    ("text", "finish_reason", "expected"),
    [
        ("<think> a </think> 7 <end>", "stop", "<think> a </think> 7"),
        ("<think> a </think>", "length", "<think> a </think>"),
        ("<think> a </think>", "stop", "<think> a </think>"),  # ended by the string, which is a part of it
        ("7 <end>", "stop", "7"),
        ("7", "stop", "7"),
        ("<end>", "stop", ""),
    ],
)
def test_special_tokens_stay_but_the_end(tokenizer, text, finish_reason, expected):
    read = text_with_special_tokens(tokenizer, stop=["</think>"])
    assert read(sample(text, finish_reason)) == expected


def test_format_sees_what_the_configuration_keeps(tokenizer):
    completion = sample("<think> a </think> <answer> 7 </answer> <end>")
    config = RewardsConfig(functions=[{"name": "format"}])
    read_text = text_with_special_tokens(tokenizer, ())
    with RewardPool(config) as pool:
        seen = replace(completion, text=read_text(completion))
        assert pool.score([Prompt(0, "", ())], [seen])[0].value == 1.0
        assert pool.score([Prompt(0, "", ())], [completion])[0].value == 0.0
