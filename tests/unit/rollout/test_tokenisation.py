"""Tests of megagrpo.rollout.tokenisation: what a tokenizer or a template does to a prompt without being
asked.
"""

import copy
import json
import time

import pytest
from tokenizers import processors

from megagrpo.config.load import load_config
from megagrpo.config.rollout_sections import DataConfig
from megagrpo.errors import UserError
from megagrpo.rollout import tokenisation
from megagrpo.rollout.prompts import PromptSource, load_prompts
from megagrpo.rollout.tokenisation import check_tokenizer

# as ChatML: every message is closed, and the assistant's turn is opened where that is asked for
CHATML = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}</>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


@pytest.fixture
def load(tmp_path):
    """A function (rows, tokenizer, **data fields) -> PromptSource."""

    def load(rows, tokenizer, **fields):
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return PromptSource(DataConfig(source=str(path), **fields), tokenizer, max_new_tokens=4)

    return load


@pytest.fixture
def character_tokenizer(character_tokenizer):
    """A tokenizer of this test's own, which it may change."""
    return copy.deepcopy(character_tokenizer)


def adds(tokenizer, single):
    """Let the tokenizer add special tokens as `single` says, `$A` being the text."""
    special = [("<bos>", 1), ("<eos>", 2)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=single, special_tokens=special
    )
    return tokenizer


def rows(*prompts):
    return [{"prompt": prompt} for prompt in prompts]


def decoded(source, tokenizer):
    return [tokenizer.decode(prompt.token_ids) for prompt in source.prompts]


def test_an_end_token_that_the_tokenizer_adds_is_left_out_and_told(load, character_tokenizer):
    tokenizer = adds(character_tokenizer, "<bos> $A <eos>")
    assert tokenizer.decode(tokenizer("1+2=")["input_ids"]) == "<bos>1+2=<eos>"  # the trap is there
    source = load(rows("1+2=", "3+4="), tokenizer)
    assert decoded(source, tokenizer) == ["<bos>1+2=", "<bos>3+4="]
    (note,) = source.notes()
    assert note.startswith(f"warning: data.source: {source.config.source}: the tokenizer ends prompts with ")
    assert "end token <eos>" in note and "left out of 2 prompts" in note


def test_text_that_begins_with_the_begin_token_has_one(load, character_tokenizer):
    tokenizer = adds(character_tokenizer, "<bos> $A")
    assert tokenizer("<bos>1")["input_ids"][:2] == [1, 1]  # the trap is there
    source = load(rows("<bos>1", "2"), tokenizer)
    assert decoded(source, tokenizer) == ["<bos>1", "<bos>2"]
    (note,) = source.notes()
    assert "the text begins with <bos>" in note and "left out of 1 prompts" in note


def test_a_template_that_writes_the_begin_token_gets_none_from_the_tokenizer(load, character_tokenizer):
    tokenizer = adds(character_tokenizer, "<bos> $A <eos>")
    tokenizer.chat_template = "<bos>{{ messages[0]['content'] }}="
    source = load(rows("1+2", "<bos>3"), tokenizer, chat_template=True)
    assert decoded(source, tokenizer) == ["<bos>1+2=", "<bos>3="]


def test_an_untouched_prompt_needs_no_note(load, character_tokenizer):
    source = load(rows("1", "<eos>2", ""), adds(character_tokenizer, "<bos> $A"))
    assert decoded(source, character_tokenizer) == ["<bos>1", "<bos><eos>2", "<bos>"]
    assert source.notes() == []


@pytest.mark.parametrize("added", ["$A", "<bos> $A <eos>"])
def test_a_text_that_ends_with_the_end_token_is_refused(load, character_tokenizer, added):
    with pytest.raises(UserError, match=r"row 1: the prompt ends with the end token <eos>.*take it out"):
        load(rows("1", "2<eos>"), adds(character_tokenizer, added))


def test_a_template_that_leaves_the_last_turn_closed_is_refused(load, character_tokenizer):
    character_tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}<eos>{% endfor %}"
    with pytest.raises(UserError, match=r"row 0: .* end token <eos>.*must open the assistant's turn"):
        load(rows("1"), character_tokenizer, chat_template=True)


def test_a_begun_answer_is_gone_on_with(load, character_tokenizer):
    character_tokenizer.chat_template = CHATML.replace("<", "-").replace(">", "=").replace("/", ".")
    question = {"role": "user", "content": "2+2"}
    begun = [question, {"role": "assistant", "content": "let me think:\n"}]
    source = load([{"prompt": [question]}, {"prompt": begun}], character_tokenizer, chat_template=True)
    opened = "-user=2+2-.=\n-assistant="
    assert [prompt.text for prompt in source.prompts] == [opened, f"{opened}let me think:\n"]
    assert decoded(source, character_tokenizer) == [prompt.text for prompt in source.prompts]


def test_a_template_that_loops_for_ever_ends_in_one_line(load, character_tokenizer, monkeypatch):
    monkeypatch.setattr(tokenisation, "TEMPLATE_SECONDS", 0.3)
    for_ever = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
    character_tokenizer.chat_template = for_ever
    began = time.monotonic()
    with pytest.raises(UserError) as caught:
        load(rows("1"), character_tokenizer, chat_template=True)
    assert time.monotonic() - began < 30
    assert str(caught.value).endswith(
        "row 0: the chat template took more than 0.3 s for the messages of one row"
    )


def test_a_template_is_kept_in_its_sandbox(load, character_tokenizer, tmp_path):
    reach = "{{ ''.__class__.__mro__[1].__subclasses__() }}"
    character_tokenizer.chat_template = reach
    with pytest.raises(UserError, match=r"row 0: the chat template refuses the messages: .*unsafe"):
        load(rows("1"), character_tokenizer, chat_template=True)


def test_the_first_prompt_is_told_as_the_engine_gets_it(tmp_path, character_tokenizer):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+\\n2", "answer": "3"}\n')
    config = load_config(
        "examples/quickstart/quickstart.yaml",
        [f"data={{source: {tmp_path}/rows.jsonl}}", "evaluation.sets=[]"],
    )
    told = []
    load_prompts(
        config.data, config.evaluation.sets, 8, adds(character_tokenizer, "<bos> $A <eos>"), None, told.append
    )
    assert told[-1] == 'first of 1 prompts: "<bos>1+\\n2" (5 tokens)'
    assert len(told) == 2 and "<eos>" in told[0]


def test_notes_and_errors_name_the_held_out_set(tmp_path, character_tokenizer):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1", "answer": "3"}\n')
    config = load_config(
        "examples/quickstart/quickstart.yaml",
        [
            f"data={{source: {tmp_path}/rows.jsonl}}",
            f"evaluation.sets=[{{name: held, source: {tmp_path}/rows.jsonl}}]",
        ],
    )
    told = []
    load_prompts(
        config.data, config.evaluation.sets, 8, adds(character_tokenizer, "$A <eos>"), None, told.append
    )
    assert [line.split(f": {tmp_path}")[0] for line in told[:2]] == [
        "warning: data.source",
        "warning: evaluation.sets.0.source",
    ]


def test_a_chat_template_renders_strings_and_messages_alike(load, character_tokenizer):
    messages = [{"role": "user", "content": "1+2"}]
    source = load([{"prompt": "1+2"}, {"prompt": messages}], character_tokenizer, chat_template=True)
    expected = character_tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
    assert [list(prompt.token_ids) for prompt in source.prompts] == [expected, expected]


def test_a_chat_template_that_refuses_or_is_missing_is_named(load, character_tokenizer, monkeypatch):
    monkeypatch.setattr(character_tokenizer, "chat_template", "{{ raise_exception('only users may speak') }}")
    with pytest.raises(
        UserError, match="row 0: the chat template refuses the messages: only users may speak"
    ):
        load(rows("a"), character_tokenizer, chat_template=True)
    monkeypatch.setattr(character_tokenizer, "chat_template", None)
    with pytest.raises(UserError, match="has no chat template"):
        load(rows("a"), character_tokenizer, chat_template=True)


def test_a_tokenizer_larger_than_the_model_is_refused(character_tokenizer):
    check_tokenizer(character_tokenizer, vocab_size=len(character_tokenizer))
    with pytest.raises(UserError, match="token ids up to 48, the model's vocab_size is 48"):
        check_tokenizer(character_tokenizer, vocab_size=len(character_tokenizer) - 1)
