"""A field written by another trainer's or an older version's name is told by ours, and nothing misleads."""

import pytest

from megagrpo.config.load import dump_config, load_config
from megagrpo.config.mistakes import field_paths, field_places
from megagrpo.config.near_names import MOVED, PEERS
from megagrpo.config.schema import Config
from megagrpo.errors import ConfigError


@pytest.fixture
def run_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: {path: m}\ndata: {source: a}\nrewards: {functions: [{name: exact_match}]}\n")
    return path


def test_every_name_that_is_named_exists():
    places = set(field_places(Config))
    assert {place.split(" ")[0] for place in (*PEERS.values(), *MOVED.values())} <= places


def test_no_field_of_ours_is_translated_where_it_stands():
    assert not [place for place in field_places(Config) if place in MOVED]


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("num_generations=8", "num_generations: not a field; here it is rollout.completions_per_prompt"),
        ("rollout.n=8", "rollout.n: not a field; here it is rollout.completions_per_prompt"),
        (
            "data.train_batch_size=8",
            "data.train_batch_size: not a field; here it is rollout.prompts_per_step",
        ),
        (
            "algorithm.adv_estimator=gae",
            "algorithm.adv_estimator: not a field; here it is algorithm.advantages",
        ),
        ("eps_clip=0.2", "eps_clip: not a field; here it is algorithm.clip_low"),
        ("num_prompts_per_step=4", "num_prompts_per_step: not a field; here it is rollout.prompts_per_step"),
        ("init_kl_coef=0.1", "init_kl_coef: not a field; here it is algorithm.kl.coef"),
        (
            "parallel.fsdp=2",
            "parallel.fsdp: not a field; weights are sharded by tp, pp, cp and ep, and optimizer states over "
            "dp by themselves",
        ),
        ("optimizer.name=muon", "optimizer.name: not a field; AdamW is the one optimizer"),
        ("model.lora.rank=8", "model.lora: not a field; all weights are trained, there are no adapters"),
        ("telemetry.tensorboard=true", "telemetry.tensorboard: not a field; it is telemetry.writers now"),
        (
            "rollout.max_logprob_gap=1e-4",
            "rollout.max_logprob_gap: not a field; it is rollout.logprob_gap.stop_above now",
        ),
        ("engine.replicas=2", "engine.replicas: not a field; it is engine.server.replicas now"),
        (
            "engine.server.replicas=2",
            "engine.server: not a field; it is one of engine.name vllm, engine.name sglang, engine.name "
            "FILE.py:NAME",
        ),
        (
            "engine={name: vllm, server: {offline: true}}",
            "engine.server.offline: not a field; it is one of engine.name sglang",
        ),
        (
            "engine={name: sglang, server: {replica: 2}}",
            "engine.server.replica: not a field; did you mean replicas?",
        ),
        (
            "engine.name=vlm",
            "engine.name: no engine is called 'vlm'; did you mean vllm?; there are transformers, "
            "vllm, sglang, and "
            "your own as FILE.py:NAME",
        ),
        (
            "engine=vllm",
            'engine: "vllm": must be a section with some of the fields max_batch_completions, '
            "max_prefill_tokens, sleep_while_training, name, server; say engine: {name: vllm}",
        ),
        (
            "weights.transport=group",
            'weights.transport: "group": must be a section with some of the fields kind; say '
            "weights.transport: {kind: group}",
        ),
        (
            "weights.transport={kind: group, folder: x}",
            "weights.transport.folder: not a field; it is one of weights.transport.kind disk",
        ),
        ("weights.folder=x", "weights.folder: not a field; it is weights.transport.folder (kind: disk) now"),
        (
            "weights.transport.kind=grup",
            'weights.transport.kind: "grup": must be one of auto, shared_memory, group, ipc, disk; did you '
            "mean group?",
        ),
        ("parallel.tpp=2", "parallel.tpp: not a field; did you mean tp?"),
    ],
)
def test_a_foreign_or_old_name_is_translated(run_file, override, line):
    with pytest.raises(ConfigError) as caught:
        load_config(run_file, [override])
    assert line in caught.value.problems


@pytest.mark.parametrize(
    "overrides",
    [
        ["engine.name=vllm", "engine.server.replicas=2"],
        ["engine.name=sglang", "engine.server.offline=true"],
        ["engine.name='mine.py:Engine'", "engine.server.python=python3"],
        ["weights.transport.kind=disk", "weights.transport.folder=shared"],
        ["engine=null"],
    ],
)
def test_each_kind_of_section_reloads_as_it_was(run_file, tmp_path, overrides):
    config = load_config(run_file, overrides)
    (tmp_path / "resolved.yaml").write_text(dump_config(config))
    assert load_config(tmp_path / "resolved.yaml") == config


def test_there_are_no_more_fields_than_can_be_overlooked():
    assert len(list(field_paths(Config))) <= 170
