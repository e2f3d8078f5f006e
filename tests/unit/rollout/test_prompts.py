"""Tests of megagrpo.rollout.prompts."""

import json

import pytest

from megagrpo.config.load import load_config
from megagrpo.config.rollout_sections import DataConfig
from megagrpo.errors import UserError
from megagrpo.rollout.prompts import PromptSampler, PromptSource, load_prompts


@pytest.fixture
def load(tmp_path, character_tokenizer):
    """A function (rows or text, **data fields) -> PromptSource over a JSONL file."""

    def load(rows, max_new_tokens=4, context_tokens=None, **fields):
        path = tmp_path / "rows.jsonl"
        path.write_text(rows if isinstance(rows, str) else "".join(json.dumps(row) + "\n" for row in rows))
        return PromptSource(
            DataConfig(source=str(path), **fields), character_tokenizer, max_new_tokens, context_tokens
        )

    return load


def rows(*prompts):
    return [{"prompt": prompt, "answer": index} for index, prompt in enumerate(prompts)]


def ids(prompts):
    return [prompt.id for prompt in prompts]


def test_rows_become_prompts_with_their_other_columns(load, character_tokenizer):
    source = load(rows("1+2=", "3+4="))
    assert ids(source.prompts) == [0, 1]
    assert source[1].text == "3+4=" and dict(source[1].columns) == {"answer": 1}
    assert character_tokenizer.decode(source[1].token_ids) == "3+4="


def test_blank_lines_and_a_byte_order_mark_are_no_rows(load):
    assert ids(load('\ufeff{"prompt": "a"}\n\n  \n{"prompt": "b"}\n').prompts) == [0, 1]


def test_the_limit_takes_the_first_rows_and_reads_no_further(load):
    assert ids(load('{"prompt": "a"}\n{"prompt": "b"}\nnot json\n', limit=2).prompts) == [0, 1]


def test_repeated_prompts_are_counted_and_stay(load):
    source = load(rows("a", "b", "a", "a"))
    assert ids(source.prompts) == [0, 1, 2, 3]
    (note,) = source.notes()
    assert "rows.jsonl: 2 of 4 prompts are the same as one before" in note
    assert load(rows("a", "b")).notes() == []


def test_rows_may_come_from_a_function(tmp_path, character_tokenizer):
    path = tmp_path / "rows_of_mine.py"
    path.write_text(
        "def train():\n    for n in range(3):\n        yield {'prompt': f'{n}+1=', 'answer': n + 1}\n"
    )
    source = PromptSource(DataConfig(source=f"{path}:train"), character_tokenizer, max_new_tokens=4)
    assert [prompt.columns["answer"] for prompt in source.prompts] == [1, 2, 3]


def test_overlong_prompts_can_be_dropped_and_are_counted(load):
    source = load(rows("1", "123456", "2"), max_prompt_tokens=3, overlong_prompts="drop")
    assert ids(source.prompts) == [0, 2] and source.dropped == 1
    assert source.notes() == [
        f"warning: data.source: {source.config.source}: 1 of 3 rows are dropped: over "
        "data.max_prompt_tokens=3, the longest has 6 tokens (data.overlong_prompts=drop)"
    ]


def test_a_held_out_set_tells_its_own_dropped_rows_and_may_not_lose_all(tmp_path, character_tokenizer):
    (tmp_path / "train.jsonl").write_text('{"prompt": "1"}\n')
    (tmp_path / "held.jsonl").write_text('{"prompt": "1"}\n{"prompt": "1234567"}\n{"prompt": "12345"}\n')
    config = load_config(
        "examples/quickstart/quickstart.yaml",
        [
            f"data={{source: {tmp_path}/train.jsonl, max_prompt_tokens: 4, overlong_prompts: drop}}",
            f"evaluation.sets=[{{name: held, source: {tmp_path}/held.jsonl}}]",
        ],
    )
    told = []
    load_prompts(config.data, config.evaluation.sets, 8, character_tokenizer, None, told.append)
    assert told[:-1] == [
        f"warning: evaluation.sets.0.source: {tmp_path}/held.jsonl: 2 of 3 rows are dropped: over "
        "data.max_prompt_tokens=4, the longest has 7 tokens (data.overlong_prompts=drop)"
    ]
    (tmp_path / "held.jsonl").write_text('{"prompt": "12345"}\n')
    with pytest.raises(UserError, match=r"evaluation\.sets\.0\.source: .*: no prompts: all 1 rows are over"):
        load_prompts(config.data, config.evaluation.sets, 8, character_tokenizer, None, told.append)


@pytest.mark.parametrize(
    ("text", "fields", "message"),
    [
        ("", {}, r"rows.jsonl: no prompts"),
        ('{"prompt": "a"}\n{"prompt": \n', {}, r"rows.jsonl: line 2: not valid JSON"),
        ('{"prompt": "a"}\n[1]\n', {}, r"row 1: is a list, not an object"),
        (
            '{"prompt": "a"}\n{"question": "b", "answer": 1}\n',
            {},
            r"row 1: no column 'prompt' \(data.prompt_field\); it has question, answer",
        ),
        (
            '{"promt": "b", "answer": 1}\n',
            {},
            r"row 0: no column 'prompt' \(data.prompt_field\); did you mean promt\?; it has promt, answer",
        ),
        ('{"prompt": 3}\n', {}, r"row 0: column 'prompt' is a int, not a string"),
        (
            '{"prompt": [{"role": "user", "content": "a"}]}\n',
            {},
            r"row 0: .* is a list, "
            r".*data.chat_template=true",
        ),
        ('{"prompt": ""}\n', {}, r"row 0: the prompt has no tokens"),
        (
            '{"prompt": "a"}\n{"prompt": "12345"}\n',
            {"max_prompt_tokens": 4},
            r"row 1: the prompt has 5 tokens, data.max_prompt_tokens is 4",
        ),
        (
            '{"prompt": "12345"}\n',
            {"max_prompt_tokens": 4, "overlong_prompts": "drop"},
            r"no prompts: all 1 "
            r"rows are over",
        ),
        (
            '{"prompt": "a"}\n{"prompt": "12345"}\n',
            {"context_tokens": 8},
            r"row 1: 5 prompt tokens \+ 4 new "
            r"tokens = 9, .* context is 8",
        ),
        (
            '{"prompt": [{"role": "user"}, 4]}\n',
            {"chat_template": True},
            r"row 0: .* neither a string nor a "
            r"list of messages",
        ),
    ],
)
def test_a_row_that_cannot_be_used_is_named_in_one_line(load, text, fields, message):
    with pytest.raises(UserError, match=message) as caught:
        load(text, **fields)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("    return 3\n", "returned a int, not an iterable"),
        ("    yield {'prompt': 'a'}\n    raise ValueError('two\\nlines')\n", "ValueError: two lines"),
    ],
)
def test_a_function_that_fails_is_named_in_one_line(tmp_path, character_tokenizer, body, message):
    path = tmp_path / "failing_rows.py"
    path.write_text("def train():\n" + body)
    with pytest.raises(UserError, match=message):
        PromptSource(DataConfig(source=f"{path}:train"), character_tokenizer, max_new_tokens=4)


def test_a_missing_file_and_a_binary_file_are_named(tmp_path, character_tokenizer):
    with pytest.raises(UserError, match=r"nowhere\.jsonl: no such file"):
        PromptSource(DataConfig(source="nowhere.jsonl"), character_tokenizer, max_new_tokens=4)
    binary = tmp_path / "rows.jsonl"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="not UTF-8"):
        PromptSource(DataConfig(source=str(binary)), character_tokenizer, max_new_tokens=4)


def test_every_prompt_comes_once_an_epoch_in_a_new_order(load):
    sampler = PromptSampler(load(rows(*"abcdefghij")), seed=1)
    epochs = [ids(sampler.next(10)) for _ in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert sampler.epoch == 3


def test_the_order_does_not_depend_on_how_many_are_drawn_at_once(load):
    source = load(rows(*"abcdefg"))
    whole, pieces = PromptSampler(source, seed=4), PromptSampler(source, seed=4)
    assert ids(whole.next(20)) == [i for count in (3, 1, 9, 7) for i in ids(pieces.next(count))]


def test_a_sampler_resumes_from_one_integer(load):
    source = load(rows(*"abcdefg"))
    first = PromptSampler(source, seed=4)
    first.next(11)
    resumed = PromptSampler(source, seed=4)
    resumed.load_state(json.loads(json.dumps(first.state())))
    assert ids(resumed.next(9)) == ids(first.next(9))
    with pytest.raises(ValueError, match="negative"):
        resumed.load_state(-1)


def test_without_shuffling_rows_come_in_order(load):
    assert ids(PromptSampler(load(rows(*"abc"), shuffle=False), seed=9).next(7)) == [0, 1, 2, 0, 1, 2, 0]
