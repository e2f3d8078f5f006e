"""A judge and a reward model behind an endpoint: what they are asked, how often, and what failures cost."""

import json
import sqlite3
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from megagrpo.config.rollout_sections import RewardConfig
from megagrpo.errors import UserError
from megagrpo.rewards.build import build_scorer, takes_groups
from megagrpo.rewards.endpoint import Endpoint
from megagrpo.rewards.messages import RewardSpec
from megagrpo.types import Completion, Prompt

sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))

from echo_endpoint import echo_endpoint

JUDGE = {"model": "judge-7b", "retries": 0}


@pytest.fixture
def endpoint():
    with echo_endpoint() as endpoint:
        yield endpoint


def completion(text, index=0):
    return Completion.sampled(3, index, np.array([1]), np.zeros(1, np.float32), "stop", ((0, 0),), text)


def score(name, options, *texts, **columns):
    prompt = Prompt(3, "What is 1 + 1?", (1,), columns)
    completions = [completion(text, index) for index, text in enumerate(texts)]
    scores = build_scorer(RewardSpec(name, options))([prompt] * len(texts), completions)
    return [each.value for each in scores]


def test_the_judge_is_asked_with_question_answer_and_columns_and_its_rating_is_scaled(endpoint):
    options = {
        **JUDGE,
        "address": f"{endpoint.address}/v1",
        "template": "{prompt} | {completion} | {answer} | [[4]]",
        "system": "Be strict.",
        "max_tokens": 33,
    }
    assert score("judge", options, "<think>hm</think>two", answer="2") == [pytest.approx(3 / 9)]
    ((path, body, _),) = endpoint.asked
    assert path == "/v1/chat/completions"
    assert body == {
        "model": "judge-7b",
        "messages": [
            {"role": "system", "content": "Be strict."},
            {"role": "user", "content": "What is 1 + 1? | two | 2 | [[4]]"},
        ],
        "temperature": 0,
        "max_tokens": 33,
    }


def test_reasoning_is_judged_too_where_it_is_asked_for(endpoint):
    options = {**JUDGE, "address": endpoint.address, "template": "{completion}[[10]]", "reasoning": ""}
    score("judge", options, "<think>hm</think>two")
    assert endpoint.asked[0][1]["messages"][0]["content"].startswith("<think>hm")


def test_a_group_is_judged_at_the_same_time(endpoint):
    """All requests are held until four are there."""
    endpoint.wait.clear()
    options = {**JUDGE, "address": endpoint.address, "template": "{completion}", "concurrency": 4}
    found = []
    asking = threading.Thread(
        target=lambda: found.extend(score("judge", options, *(f"{n} [[10]]" for n in range(8))))
    )
    asking.start()
    deadline = time.monotonic() + 30
    while endpoint.busy < 4 and time.monotonic() < deadline:
        time.sleep(0.01)
    endpoint.wait.set()
    asking.join(30)
    assert endpoint.most_busy == 4 and found == [1.0] * 8
    assert takes_groups("judge") and takes_groups("reward_model") and not takes_groups("math")


def test_what_was_asked_before_is_not_asked_again(endpoint, tmp_path):
    options = {**JUDGE, "address": endpoint.address, "template": "{completion}"}
    assert score("judge", options, "[[10]]") == score("judge", options, "[[10]]") == [1.0]
    assert len(endpoint.asked) == 2  # each worker has a memory of its own
    kept = {**options, "cache": str(tmp_path / "judged.sqlite")}
    assert score("judge", kept, "[[10]]") == [1.0]
    with sqlite3.connect(tmp_path / "judged.sqlite") as database:
        assert database.execute("SELECT count(*) FROM answers").fetchone() == (1,)
    asked = len(endpoint.asked)
    assert score("judge", kept, "[[10]]") == [1.0] and len(endpoint.asked) == asked
    assert score("judge", {**kept, "model": "other"}, "[[10]]") == [1.0] and len(endpoint.asked) == asked + 1


def ask(endpoint, retries, pauses):
    asking = Endpoint("judge", endpoint.address, None, retries, 5.0, None, sleep=pauses.append)
    return asking.ask("/classify", {"input": "good"})


def test_a_busy_endpoint_is_asked_again_with_growing_pauses(endpoint):
    endpoint.fail = [429, 503, 500]
    pauses = []
    assert ask(endpoint, 3, pauses)["data"][0]["probs"] == [1.0]
    assert pauses == [0.5, 1.0, 2.0]
    endpoint.fail = [503, 503]
    with pytest.raises(ConnectionError, match=r"/classify: HTTP 503, 2 times"):
        ask(endpoint, 1, [])


def test_a_refusal_is_not_repeated_and_tells_what_was_said(endpoint):
    endpoint.fail = [404]
    with pytest.raises(ValueError, match=r"/classify: HTTP 404: come again"):
        ask(endpoint, 3, [])
    assert len(endpoint.asked) == 1


def test_an_endpoint_that_is_down_costs_its_completions_and_not_the_run(open_pool):
    options = {"address": "http://127.0.0.1:9", "model": "m", "retries": 0}
    pool = open_pool(RewardConfig(name="judge", options=options), network=True)
    prompts = [Prompt(3, "question", (1,))] * 2
    rewards = pool.score(prompts, [completion("a"), completion("b", 1)])
    assert [reward.outcome for reward in rewards] == ["unreachable"] * 2
    assert all(reward.value == -5.0 and "127.0.0.1:9" in reward.detail for reward in rewards)


def test_one_reply_without_a_verdict_costs_that_completion_alone(open_pool, endpoint):
    options = {**JUDGE, "address": endpoint.address, "template": "{completion}"}
    pool = open_pool(RewardConfig(name="judge", options=options), network=True)
    texts = ["[[10]]", "no verdict", "[[1]]"]
    completions = [completion(text, index) for index, text in enumerate(texts)]
    rewards = pool.score([Prompt(3, "question", (1,))] * 3, completions)
    assert [reward.value for reward in rewards] == [1.0, -5.0, 0.0]
    assert rewards[1].outcome == "error" and "no verdict" in rewards[1].detail


def test_the_network_is_needed_and_the_error_says_which_field(open_pool, endpoint):
    options = {**JUDGE, "address": endpoint.address, "template": "{completion}"}
    pool = open_pool(RewardConfig(name="judge", options=options))
    with pytest.raises(UserError, match=r"rewards\.network"):
        pool.score([Prompt(3, "question", (1,))], [completion("[[10]]")])


def test_a_key_comes_from_the_environment_alone(endpoint, monkeypatch):
    options = {**JUDGE, "address": endpoint.address, "template": "[[5]]", "key_variable": "JUDGE_KEY"}
    with pytest.raises(UserError, match=r"JUDGE_KEY is not in the environment .*rewards.environment"):
        score("judge", options, "a")
    monkeypatch.setenv("JUDGE_KEY", "of-mine")
    score("judge", options, "a")
    assert endpoint.asked[0][2] == "Bearer of-mine"


@pytest.mark.parametrize(
    ("name", "options", "problem"),
    [
        ("judge", {"address": "127.0.0.1:80", "model": "m"}, "address is '127.0.0.1:80'"),
        ("judge", {"address": "http://a", "model": "m", "verdict": "[0-9]"}, "it needs a group"),
        ("judge", {"address": "http://a", "model": "m", "verdict": "("}, "template or verdict"),
        ("judge", {"address": "http://a", "model": "m", "template": "{"}, "template or verdict"),
        ("judge", {"address": "http://a", "model": "m", "low": 3.0, "high": 3.0}, "low must be below high"),
        ("reward_model", {}, "address or path: one of the two"),
        ("reward_model", {"address": "http://a", "path": "b"}, "address or path: one of the two"),
        ("reward_model", {"address": "http://a", "form": "tgi"}, "form is 'tgi'; allowed: vllm, sglang"),
        ("reward_model", {"address": "http://a", "template": "{answer}"}, "template: 'answer'"),
        ("reward_model", {"path": "nowhere"}, "path: nowhere: "),
    ],
)
def test_options_that_cannot_be_are_refused_at_the_start(name, options, problem):
    with pytest.raises(UserError, match=problem):
        build_scorer(RewardSpec(name, options))


def test_a_column_that_the_template_names_and_the_row_lacks_ends_the_run(endpoint):
    options = {**JUDGE, "address": endpoint.address, "template": "{gold}"}
    with pytest.raises(UserError, match="reward 'judge': prompt 3 has no column 'gold'"):
        score("judge", options, "a", answer="2")


def test_a_classifier_behind_an_endpoint_is_asked_in_its_servers_form(endpoint):
    vllm = {"address": endpoint.address, "model": "rm", "template": "{prompt}\n{completion}"}
    assert score("reward_model", vllm, "good", "bad") == [1.0, 0.0]
    bodies = sorted((body for _, body, _ in endpoint.asked), key=json.dumps)
    assert bodies[1] == {"model": "rm", "input": "What is 1 + 1?\ngood"}
    sglang = {"address": endpoint.address, "form": "sglang", "template": '[{{"embedding": [{completion}]}}]'}
    assert score("reward_model", sglang, "0.25", "-3") == [0.25, -3.0]
    assert "text" in endpoint.asked[-1][1]


def test_a_local_classifier_scores_as_transformers_alone_does(tmp_path, character_tokenizer):
    """Raw outputs, also for texts of other lengths in the same batch."""
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        num_labels=2,
        pad_token_id=0,
        initializer_range=0.2,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_config(config).eval()
    model.save_pretrained(tmp_path)
    character_tokenizer.save_pretrained(tmp_path)
    texts = ["yes", "a longer answer", "no"]
    wanted = []
    for text in texts:
        ids = character_tokenizer(f"What is 1 + 1?{text}", return_tensors="pt")["input_ids"]
        with torch.no_grad():
            wanted.append(model(ids).logits[0].tolist())
    for label in (0, 1, -1):
        found = score("reward_model", {"path": str(tmp_path), "label": label, "concurrency": 2}, *texts)
        assert found == pytest.approx([each[label] for each in wanted], abs=1e-5)
