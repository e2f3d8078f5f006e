"""A configuration is written to disk as it is, so it may hold no secret."""

import pytest

from megagrpo.config.load import load_config
from megagrpo.config.secrets import find_secrets
from megagrpo.errors import ConfigError


@pytest.fixture
def run_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: {path: m}\ndata: {source: a}\nrewards: {functions: [{name: f.py:judge}]}\n")
    return path


@pytest.mark.parametrize(
    "name",
    [
        "api_key",
        "apikey",
        "judge_api_key",
        "password",
        "db_password",
        "secret",
        "token",
        "auth_token",
        "hf_token",
    ],
)
def test_text_under_the_name_of_a_secret_is_refused_without_being_shown(run_file, name):
    with pytest.raises(ConfigError) as refused:
        load_config(run_file, [f"rewards.functions.0.options.{name}=hunter2hunter2"])
    (line,) = refused.value.problems
    assert line.startswith(f"rewards.functions.0.options.{name}: looks like a secret")
    assert "rewards.environment" in line and "hunter2" not in line


@pytest.mark.parametrize("place", ["rewards.functions.0.options.url", "data.source"])
def test_a_password_in_an_address_is_refused_without_being_shown(run_file, place):
    with pytest.raises(ConfigError) as refused:
        load_config(run_file, [f"{place}=https://me:hunter2@judge.example/v1"])
    assert refused.value.problems == [
        f"{place}: holds a password in an address, and a configuration is kept in the run folder as it is"
    ]


def test_names_that_only_sound_like_secrets_pass():
    raw = {"max_tokens": "7", "eos_token": "</s>", "tokenizer": "a", "stop_token": "x", "key": "answer"}
    assert (
        list(find_secrets(raw | {"token_ids": ["1"], "url": "http://host:8000/a@b", "api_key": None})) == []
    )
