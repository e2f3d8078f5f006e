"""No secret in what is printed and kept of an error."""

import pytest

from megagrpo.errors import UserError
from megagrpo.supervision.failure import append_failure, build_failure
from megagrpo.supervision.redaction import redact


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("http://me:pa55@host:8000/v1: refused", "http://***@host:8000/v1: refused"),
        ("'https://token@host'", "'https://***@host'"),
        ("http://host:8000/a@b", "http://host:8000/a@b"),
        ("write to me@host", "write to me@host"),
    ],
)
def test_users_and_passwords_in_addresses_are_hidden(text, expected):
    assert redact(text) == expected


def test_what_would_steer_a_terminal_is_written_out():
    text = "a\x1b]0;title\x07\x1b[2J\x9b31m\r\ud83d\n\tnaïve 中文 👍"
    assert redact(text) == "a\\x1b]0;title\\x07\\x1b[2J\\x9b31m\\r\\ud83d\n\tnaïve 中文 👍"


def test_values_of_secret_variables_are_hidden(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_abcdefgh")
    monkeypatch.setenv("JUDGE_API_KEY", "sk-12345678")
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    monkeypatch.setenv("MODEL_NAME", "a-public-name")
    text = "Bearer hf_abcdefgh, sk-12345678: false, a-public-name"
    assert redact(text) == "Bearer ***, ***: false, a-public-name"


@pytest.mark.parametrize("kind", [UserError, RuntimeError])
def test_failures_carry_no_secret(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("JUDGE_PASSWORD", "open sesame")
    try:
        raise kind("http://me:pa55@host:1 said: open sesame")
    except kind as error:
        failure = build_failure(error, 0, "rollout", 1)
    kept = append_failure(tmp_path, failure).read_text()
    for text in (failure.describe(), failure.to_json(), kept):
        assert "sesame" not in text and "pa55" not in text
