"""A configuration of a run whose files are there."""

import json

import pytest
from checked_runs import MODEL


@pytest.fixture
def run_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL))
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / "model" / name).touch()
    (tmp_path / "train.jsonl").write_text('{"prompt": "1", "answer": "1"}\n' * 32)
    path = tmp_path / "run.yaml"
    path.write_text(
        "model: {path: model}\ndata: {source: train.jsonl}\nrewards: {functions: [{name: exact}]}\n"
    )
    return path
