"""A field written by another trainer's or an older version's name is told by ours, and nothing misleads."""

import pytest

from megagrpo.config.load import load_config
from megagrpo.config.messages import field_places
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
        ("parallel.tpp=2", "parallel.tpp: not a field; did you mean tp?"),
    ],
)
def test_a_foreign_or_old_name_is_translated(run_file, override, line):
    with pytest.raises(ConfigError) as caught:
        load_config(run_file, [override])
    assert line in caught.value.problems
