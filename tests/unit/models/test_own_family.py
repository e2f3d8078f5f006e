"""Model families of the user's, by the place of their code."""

import json
import sys
from pathlib import Path

import pytest

from megagrpo.checkpoint.convert_command import _read_model
from megagrpo.config.load import load_config
from megagrpo.errors import ConfigError, UserError
from megagrpo.models.family import FAMILIES, checkpoint_tensors
from megagrpo.models.hf_config import read_hf_config
from megagrpo.planning.components import verify_components

OWN = '''
from dataclasses import replace

from megagrpo.models.decoder_rules import shared_rules
from megagrpo.models.family import ModelFamily

class Renamed(ModelFamily):
    """Llama's tensors, but for the name of the last norm."""

    def transformer_config_fields(self, hf):
        return {"qk_layernorm": False}

    def parameter_rules(self, hf):
        return [
            replace(rule, hf=("model.last_norm.weight",)) if "final_layernorm" in rule.megatron else rule
            for rule in shared_rules(hf)
        ]

class Half(ModelFamily):
    def parameter_rules(self, hf):
        return []
'''


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The file with the families, beside a model of a type that no registered family has."""
    (tmp_path / "families_of_mine.py").write_text(OWN)
    (tmp_path / "model").mkdir()
    raw = json.loads(Path("examples/quickstart/model/config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps(raw | {"model_type": "of_mine"}))
    yield tmp_path / "families_of_mine.py"
    FAMILIES._entries.pop("of_mine", None)
    sys.modules.pop("families_of_mine", None)


def config_of(own, name):
    return load_config(
        "examples/quickstart/quickstart.yaml",
        [f"model.path={own.parent}/model", f"model.family={own}:{name}"],
    )


def test_a_type_without_a_family_is_refused(own):
    with pytest.raises(UserError, match="no model family is called 'of_mine'"):
        read_hf_config(own.parent / "model")


def test_a_family_of_the_users_is_that_of_the_models_type(own):
    hf = read_hf_config(own.parent / "model", f"{own}:Renamed")
    assert hf.model_type == "of_mine"
    assert "model.last_norm.weight" in {tensor.name for tensor in checkpoint_tensors(hf)}
    assert FAMILIES.get("of_mine").transformer_config_fields(hf) == {"qk_layernorm": False}


def test_a_registered_family_may_be_taken_for_another_type(own):
    assert read_hf_config(own.parent / "model", "llama").model_type == "of_mine"
    assert FAMILIES.get("of_mine") is FAMILIES.get("llama")


def test_a_run_takes_its_family_before_the_launch(own):
    verify_components(config_of(own, "Renamed"))
    assert type(FAMILIES.get("of_mine")).__name__ == "Renamed"


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("Half", "class Half lacks transformer_config_fields()"),
        ("Renamd", "has no 'Renamd'; did you mean Renamed?"),
    ],
)
def test_what_is_no_family_is_one_line_that_names_the_field(own, name, says):
    with pytest.raises(ConfigError) as caught:
        verify_components(config_of(own, name))
    (line,) = caught.value.problems
    assert line.startswith("model.family: ") and says in line and "\n" not in line


def test_conversions_take_a_family():
    assert _read_model("folder", ["model.family=mine.py:Mine"]).family == "mine.py:Mine"
