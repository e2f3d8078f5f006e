"""Mistakes of a new user that were told late, or not at all: each is one true line before the launch."""

import json
import re
import sys
from pathlib import Path

import pytest

from megagrpo import cli
from megagrpo.models import families
from megagrpo.supervision import exit_codes

MODEL = {
    "model_type": "llama",
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 32,
    "max_position_embeddings": 1024,
    "vocab_size": 64,
}
FAMILIES = ", ".join(
    sorted(
        name
        for path in Path(families.__file__).parent.glob("*.py")
        for name in re.findall(r'^FAMILIES\.register\("(\w+)"\)', path.read_text(), re.MULTILINE)
    )
)
ROW = {"question": "1 + 1", "answer": "2"}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(MODEL))
    for name in ("model.safetensors", "tokenizer.json"):
        (tmp_path / "model" / name).touch()
    (tmp_path / "train.jsonl").write_text(f"{json.dumps(ROW)}\n" * 4)
    (tmp_path / "run.yaml").write_text(
        "model: {path: model}\ndata: {source: train.jsonl, prompt_field: question}\n"
        "rollout: {prompts_per_step: 4}\nrewards: {functions: [{name: exact_match}]}\n"
    )
    return tmp_path


@pytest.fixture
def tell(folder, monkeypatch, capsys):
    """Run `megagrpo run` with overrides; return its exit code, what it said and whether it launched."""

    def call(*overrides):
        launched = []
        monkeypatch.setattr(sys, "argv", ["megagrpo", "run", "run.yaml", *overrides])
        monkeypatch.setattr(
            cli.Launch, "run", lambda _, *launch, **options: launched.append(launch) or exit_codes.DONE
        )
        monkeypatch.setattr("megagrpo.device.environment.set_thread_environment", lambda ranks: None)
        with pytest.raises(SystemExit) as left:
            cli.main()
        return left.value.code, capsys.readouterr().err.splitlines(), bool(launched)

    return call


def write(path, text):
    path.write_text(text)


def only_bin(folder):
    (folder / "model" / "model.safetensors").rename(folder / "model" / "pytorch_model.bin")


def model_of(**fields):
    return lambda folder: write(folder / "model" / "config.json", json.dumps({**MODEL, **fields}))


def rows(name, text):
    return lambda folder: write(folder / name, text)


NOTHING = lambda folder: None  # noqa: E731
MISTAKES = {
    "a hub data set": (
        NOTHING,
        ["data.source=openai/gsm8k"],
        "data.source: openai/gsm8k: no such file; names of the Hugging Face hub are not read: download "
        "the data "
        "set, or return its rows from FILE.py:function",
    ),
    "a hub model": (
        NOTHING,
        ["model.path=Qwen/Qwen3-8B"],
        "model.path: Qwen/Qwen3-8B: no such folder; a name of the Hugging Face hub is not read: hf download "
        "Qwen/Qwen3-8B --local-dir models/Qwen3-8B, then model.path=models/Qwen3-8B",
    ),
    "a Parquet file by the name of another": (
        lambda folder: (folder / "rows.jsonl").write_bytes(b"PAR1\xff\xfe\x00PAR1"),
        ["data.source=rows.jsonl"],
        "data.source: rows.jsonl: after line 0: not UTF-8 text: it is a Parquet file; name it .parquet",
    ),
    "a JSON array in a file of lines": (
        rows("rows.jsonl", '[\n{"question": "a"}\n]\n'),
        ["data.source=rows.jsonl"],
        "data.source: rows.jsonl: line 1: not valid JSON: Expecting value at column 1; an array over several "
        "lines is read from a file that ends in .json",
    ),
    "an ending that nothing reads": (
        rows("rows.xlsx", "x"),
        ["data.source=rows.xlsx"],
        "data.source: rows.xlsx: nothing reads .xlsx files, only .csv, .json, .jsonl, .parquet; anything "
        "else is "
        "read by a FILE.py:function that returns rows",
    ),
    "a missing gold column": (
        rows("train.jsonl", '{"question": "a", "solution": "b"}\n' * 4),
        [],
        "data.source: train.jsonl: no column 'answer', which reward exact_match compares with "
        "(rewards.functions.0.options.column); its columns: question, solution",
    ),
    "a gold column of nearly that name": (
        rows("train.jsonl", '{"question": "a", "answers": "b"}\n' * 4),
        [],
        "data.source: train.jsonl: no column 'answer', which reward exact_match compares with "
        "(rewards.functions.0.options.column); did you mean answers?; its columns: question, answers",
    ),
    "a missing prompt column": (
        NOTHING,
        ["data.prompt_field=prompt"],
        "data.source: train.jsonl: no column 'prompt' (data.prompt_field); its columns: question, answer",
    ),
    "a missing gold column of a held-out set": (
        rows("held.jsonl", '{"question": "a"}\n'),
        ["evaluation.sets=[{name: held, source: held.jsonl}]"],
        "evaluation.sets.0.source: held.jsonl: no column 'answer', which reward exact_match compares with "
        "(rewards.functions.0.options.column); its columns: question",
    ),
    "one row, two prompts a step": (
        rows("train.jsonl", '{"question": "a", "answer": "b"}\n'),
        ["rollout.prompts_per_step=2"],
        "rollout.prompts_per_step: 2: train.jsonl has 1 rows, so a step would hold a prompt twice; take "
        "fewer, or "
        "add rows",
    ),
    "rows nested too deep": (
        rows("train.jsonl", '{"question": ' + "[" * 100_000 + "\n"),
        [],
        "data.source: train.jsonl: line 1: nested too deep",
    ),
    "half of a character": (
        rows("train.jsonl", '{"question": "\\ud83d", "answer": "b"}\n'),
        [],
        "data.source: train.jsonl: line 1: holds half of a character (a lone surrogate): '\\ud83d'",
    ),
    "a data function that is not there": (
        rows("rows.py", "def train(): return []\n"),
        ["data.source='rows.py:trian'"],
        "data.source: rows.py:trian: rows.py has no 'trian'; did you mean train?",
    ),
    "weights in a pickle": (
        only_bin,
        [],
        "model.path: model: its weights are in pytorch_model.bin, a pickle, and safetensors are read; "
        "save it "
        "again: AutoModelForCausalLM.from_pretrained(FOLDER).save_pretrained(NEW_FOLDER)",
    ),
    "no weights": (
        lambda folder: (folder / "model" / "model.safetensors").unlink(),
        [],
        "model.path: model: no weights (*.safetensors) in it",
    ),
    "no tokenizer": (
        lambda folder: (folder / "model" / "tokenizer.json").unlink(),
        [],
        "model.path: model: no tokenizer in it (none of tokenizer.json, tokenizer.model, "
        "tokenizer_config.json, "
        "vocab.json, vocab.txt)",
    ),
    "an unknown family": (
        model_of(model_type="gemma2"),
        [],
        "model.path: model/config.json: model_type 'gemma2' is no architecture of this version; supported: "
        f"{FAMILIES}; model.family names one of yours, FILE.py:CLASS",
    ),
    "a vision model": (
        model_of(model_type="qwen2_vl", vision_config={}),
        [],
        "model.path: model/config.json: model_type 'qwen2_vl' is a model that sees images: they are not "
        f"supported; supported: {FAMILIES}; model.family names one of yours, FILE.py:CLASS",
    ),
    "TRL's name": (
        NOTHING,
        ["num_generations=8"],
        "num_generations: not a field; here it is rollout.completions_per_prompt",
    ),
    "an override written as an option": (
        NOTHING,
        ["--rollout.temperature=1"],
        "--rollout.temperature=1: write rollout.temperature=1, without dashes",
    ),
    "an override written as an option and its value": (
        NOTHING,
        ["--rollout.temperature", "-1"],
        "--rollout.temperature: write rollout.temperature=-1, without dashes",
    ),
    "an override written as a flag": (
        NOTHING,
        ["--parallel.sp", "rollout.temperature=1"],
        "--parallel.sp: write parallel.sp=true, without dashes",
    ),
    "a writer that is unknown": (
        NOTHING,
        ["telemetry.writers=[jsonl, neptune]"],
        "telemetry.writers: no metrics writer is called 'neptune'; there are jsonl, mlflow, tensorboard, "
        "wandb, and your own as FILE.py:NAME",
    ),
    "a metric that is misspelt": (
        rows("held.jsonl", '{"question": "a", "answer": "b"}\n'),
        ["evaluation.sets=[{name: held, source: held.jsonl, metrics: [pass_at_n]}]"],
        "evaluation.sets.0.metrics: no evaluation metric is called 'pass_at_n'; did you mean pass_at_k?; "
        "there "
        "are maj_at_k, pass_at_k, and your own as FILE.py:NAME",
    ),
    "a reward function that is not there": (
        rows("mine.py", "def score(prompts, completions): return []\n"),
        ["rewards.functions.0.name='mine.py:scores'"],
        "rewards.functions.0.name: mine.py:scores: mine.py has no 'scores'; did you mean score?",
    ),
    "a reward file that does not import": (
        rows("broken.py", "import no_such_package_here\n"),
        ["rewards.functions.0.name='broken.py:score'"],
        "rewards.functions.0.name: broken.py:score: importing {folder}/broken.py raised "
        "ModuleNotFoundError: No "
        "module named 'no_such_package_here'",
    ),
}


@pytest.mark.parametrize("dry_run", [False, True], ids=["run", "dry_run"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_before_the_launch(folder, tell, mistake, dry_run):
    prepare, overrides, line = MISTAKES[mistake]
    prepare(folder)
    code, said, launched = tell(*overrides, *(["--dry-run"] if dry_run else []))
    assert (code, launched) == (2, False)
    assert said == [line.format(folder=folder) if "{folder}" in line else line]


def test_without_a_mistake_it_is_launched(tell):
    assert tell() == (0, [], True)


def test_a_json_array_and_a_csv_file_are_read(folder, tell):
    write(folder / "rows.json", json.dumps([ROW] * 4, indent=1))
    write(folder / "rows.csv", "question,answer\n" + '"1, and 1",2\n' * 4)
    assert tell("data.source=rows.json") == (0, [], True)
    assert tell("data.source=rows.csv") == (0, [], True)
