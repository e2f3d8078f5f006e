"""`megagrpo check-extension`: every registered part passes the suite of its registry, and a broken one of the
user's is told in one line that names file, contract and what is missing.
"""

import sys

import pytest

from megagrpo import cli
from megagrpo.algorithms.advantages import ADVANTAGES
from megagrpo.algorithms.losses import LOSSES
from megagrpo.engines import ENGINES
from megagrpo.errors import UserError
from megagrpo.evaluation.score_metrics import EVALUATION_METRICS
from megagrpo.models.families import load_all
from megagrpo.models.family import FAMILIES
from megagrpo.planning.contract_suites import SUITES
from megagrpo.planning.extensions import check_extension
from megagrpo.rewards.reward import REWARDS
from megagrpo.rollout.data_sources import DATA_SOURCES
from megagrpo.telemetry.writers import WRITERS

load_all()
REGISTRIES = [REWARDS, LOSSES, ADVANTAGES, FAMILIES, ENGINES, WRITERS, DATA_SOURCES, EVALUATION_METRICS]

OWN = """
import torch
from megagrpo.algorithms.advantages import register_estimator
from megagrpo.algorithms.losses import LossOutput, register_loss
from megagrpo.models.family import ModelFamily
from megagrpo.models.rules import ParameterRule

@register_loss("own_good_loss")
def good_loss(inputs):
    return LossOutput(-inputs.advantages * inputs.actor_logprobs)

@register_loss("own_summed_loss")
def summed_loss(inputs):
    return LossOutput((-inputs.advantages * inputs.actor_logprobs).sum())

@register_loss("own_detached_loss")
def detached_loss(inputs):
    return LossOutput(-inputs.advantages * inputs.actor_logprobs.detach())

@register_loss("own_shifted_loss")
def shifted_loss(inputs):
    return LossOutput(1.0 - inputs.advantages * inputs.actor_logprobs)

@register_loss("own_centred_loss")
def centred_loss(inputs):
    return LossOutput(-inputs.advantages * (inputs.actor_logprobs - inputs.actor_logprobs.mean()))

@register_loss("own_bare_loss")
def bare_loss(inputs):
    return -inputs.advantages * inputs.actor_logprobs

def undecorated(inputs):
    return LossOutput(inputs.actor_logprobs)

@register_estimator("own_good_estimator", group_baseline=False)
def good_estimator(inputs):
    return torch.where(inputs.valid, inputs.rewards, 0.0)

@register_estimator("own_ranked_estimator", group_baseline=False)
def ranked_estimator(inputs):
    return torch.where(inputs.valid, inputs.rewards.cumsum(0), 0.0)

class GoodFamily(ModelFamily):
    def transformer_config_fields(self, hf):
        return {}
    def parameter_rules(self, hf):
        return [ParameterRule("decoder.layers.{layer}.a", ("layers.{layer}.a",), "row", ((4, 4),))]

class FamilyOfOneLayer(GoodFamily):
    def parameter_rules(self, hf):
        return [ParameterRule("decoder.layers.{layer}.a", ("layers.a",), "diagonal", ((4, 4),))]

class HalfFamily(ModelFamily):
    def transformer_config_fields(self, hf):
        return {}

class GoodWriter:
    def __init__(self, run_dir, last_step):
        self.folder = run_dir
    def write(self, step, metrics):
        (self.folder / "steps").write_text(str(step))
    def close(self):
        pass

class WriterWithoutClose:
    def __init__(self, run_dir, last_step): ...
    def write(self, step, metrics): ...

class WriterOfOneArgument:
    def __init__(self, run_dir, last_step): ...
    def write(self, metrics): ...
    def close(self): ...

def good_rows():
    return [{"prompt": str(number)} for number in range(3)]

def random_rows():
    import random
    return [{"prompt": str(random.random())} for _ in range(3)]

def rows_of_strings():
    return ["a", "b"]

def good_metric(scores):
    return {"best": max(map(max, scores))}

def metric_without_names(scores):
    return 0.5
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The place of a file of parts; what it registers ends with the test."""
    for registry in (LOSSES, ADVANTAGES):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    (tmp_path / "own_parts.py").write_text(OWN)
    return f"{tmp_path}/own_parts.py"


def test_every_registry_has_a_suite():
    assert sorted(SUITES) == sorted(registry.kind for registry in REGISTRIES)


NEEDS_OPTIONS = {("reward", "judge"): "address", ("reward", "reward_model"): "address or path"}


@pytest.mark.parametrize(("part", "option"), NEEDS_OPTIONS.items(), ids=str)
def test_a_part_that_cannot_be_built_without_options_says_which(part, option):
    """With an address they are tried by tests/contracts/test_reward_contract.py."""
    kind, name = part
    with pytest.raises(UserError, match=rf"'{name}'.*{option}"):
        list(SUITES[kind](name))


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (registry.kind, name)
        for registry in REGISTRIES
        for name in registry.names()
        if (registry.kind, name) not in NEEDS_OPTIONS
    ],
)
def test_every_registered_part_passes_its_suite(monkeypatch, tmp_path, kind, name):
    monkeypatch.setenv("WANDB_MODE", "offline")  # its writer asks a server otherwise
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlflow")  # and so does MLflow's
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    assert list(SUITES[kind](name)) == []


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("good_loss", "loss"),
        ("good_estimator", "advantage estimator"),
        ("GoodFamily", "model family"),
        ("GoodWriter", "metrics writer"),
        ("good_rows", "data source"),
        ("good_metric", "evaluation metric"),
    ],
)
def test_a_good_part_is_told_to_meet_its_contract(own, name, kind):
    lines, is_met = check_extension(f"{own}:{name}", kind)
    assert is_met and lines == [
        f"{own}:{name}: meets the contract of {'an' if kind[0] in 'ae' else 'a'} {kind}"
    ]


@pytest.mark.parametrize(
    ("name", "kind", "says"),
    [
        ("summed_loss", "loss", "loss has shape [], not one value for each of the 6 tokens"),
        ("detached_loss", "loss", "loss has no gradient towards actor_logprobs"),
        ("shifted_loss", "loss", "zero_at_zero_advantage is declared, but"),
        ("centred_loss", "loss", "declare needs_whole_sequences=True"),
        ("bare_loss", "loss", "returned a Tensor, not a LossOutput"),
        ("undecorated", "loss", "the function is not decorated"),
        ("ranked_estimator", "advantage estimator", "advantages depend on the order of the groups"),
        ("HalfFamily", "model family", "class HalfFamily lacks parameter_rules()"),
        ("FamilyOfOneLayer", "model family", "kind 'diagonal' is not one of replicated, "),
        ("FamilyOfOneLayer", "model family", "layers.a must name the layer as {layer}"),
        ("good_rows", "model family", "it derives from no ModelFamily"),
        ("WriterWithoutClose", "metrics writer", "class WriterWithoutClose lacks close()"),
        (
            "WriterOfOneArgument",
            "metrics writer",
            "method write: it is called with (self, step, metrics) and takes (self, metrics)",
        ),
        ("random_rows", "data source", "two calls return different rows"),
        ("rows_of_strings", "data source", "a row is a str, not a mapping of columns"),
        ("good_metric", "data source", "it is called with () and takes (scores)"),
        ("metric_without_names", "evaluation metric", "must return numbers by name"),
    ],
)
def test_a_broken_part_is_told_in_one_line_with_file_contract_and_fault(own, name, kind, says):
    lines, is_met = check_extension(f"{own}:{name}", kind)
    assert not is_met
    assert all(line.startswith(f"{own}:{name}: is no {kind}: ") and "\n" not in line for line in lines)
    assert any(says in line for line in lines), lines


def test_code_that_raises_at_import_is_one_line(tmp_path):
    (tmp_path / "broken_parts.py").write_text("raise ValueError('two\\nlines')\n")
    with pytest.raises(
        UserError, match=r"^\S*broken_parts.py:x: importing \S* raised ValueError: two lines$"
    ):
        check_extension(f"{tmp_path}/broken_parts.py:x")


def test_the_command_says_what_is_met_and_leaves_with_its_code(own, monkeypatch, capsys):
    for name, options, code, says in (
        ("good_metric", [], 0, "good_metric: meets the contract of an evaluation metric\n"),
        ("bare_loss", ["--contract", "loss"], 2, "returned a Tensor, not a LossOutput"),
        ("bare_loss", ["--contract", "los"], 2, "--contract 'los': must be one of reward, loss, "),
    ):
        monkeypatch.setattr(sys, "argv", ["megagrpo", "check-extension", f"{own}:{name}", *options])
        with pytest.raises(SystemExit) as left:
            cli.main()
        told = capsys.readouterr()
        assert left.value.code == code and says in told.out + told.err
