"""Every recipe in configs/ fits the GPUs that its first lines name, by the table of the dry run: the buffers
of a model that is built without memory, and what a GPU holds beside them in each phase.

Estimates in it: 3 GB for CUDA, NCCL and workspaces, 2 GB for an engine's own activations, and the activations
of the update, counted from the layers' inputs. Not in it: fragmentation.
"""

import functools
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from model_configs import MODELS, PARAMETERS

from megagrpo.config.hardware import ELSEWHERE
from megagrpo.config.load import dump_config, load_config
from megagrpo.planning.checks import check_config
from megagrpo.planning.memory_phases import find_worst, plan_phases
from megagrpo.planning.memory_table import describe_memory, measure_trainer, memory_settings

GPU = 80e9
RECIPES = [path.name for path in sorted(Path("configs").glob("*.yaml")) if path.name != "gpu_base.yaml"]


def gpus_of(text):
    """Of the command in a recipe's first lines."""
    found = re.search(r"torchrun (?:--nnodes (\d+) )?--nproc-per-node (\d+)", text)
    return int(found[1] or 1) * int(found[2])


@pytest.fixture(scope="module")
def measured(tmp_path_factory):
    """A function: recipe -> (configuration, model's config.json, what its ranks hold)."""

    @functools.cache
    def measure(name):
        path = Path("configs", name)
        config, folder = load_config(path, []), tmp_path_factory.mktemp("model")
        hf = MODELS[Path(config.model.path).name]
        (folder / "config.json").write_text(json.dumps(hf))
        return config, hf, measure_trainer(dump_config(config), gpus_of(path.read_text()), str(folder))

    return measure


@pytest.mark.parametrize("name", RECIPES)
def test_all_ranks_together_hold_the_published_number_of_parameters(measured, name):
    config, _, held = measured(name)
    published = PARAMETERS[Path(config.model.path).name]
    assert sum(each.stages * each.whole_parameters for each in held) == published


@pytest.mark.parametrize("name", RECIPES)
def test_every_phase_fits(measured, name):
    config, hf, held = measured(name)
    settings = memory_settings(config, hf, GPU)
    assert find_worst(plan_phases(settings, held)).total <= GPU, "\n".join(describe_memory(settings, held))


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_passes_every_check_that_needs_its_model(name):
    path = Path("configs", name)
    config = load_config(path, [])
    hf = MODELS[Path(config.model.path).name]
    problems = check_config(config, gpus_of(path.read_text()), hf, ELSEWHERE)
    missing = ("no such folder", "no such file", "no config.json")  # models and data that a user brings
    assert [line for line in problems if not any(text in line for text in missing)] == []
    assert len(path.read_text().splitlines()) < 60


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_has_servers_as_engines_that_use_every_gpu_of_their_pool(name):
    path = Path("configs", name)
    engine = load_config(path, []).engine
    assert engine.name in ("vllm", "sglang")
    if not engine.given_addresses:
        assert engine.server.replicas * engine.server.tensor_parallel == gpus_of(path.read_text())


def test_what_fits_no_gpu_of_half_the_size_is_told_what_to_change_first(measured):
    config, hf, held = measured("qwen3_8b_gsm8k_grpo.yaml")
    lines = describe_memory(memory_settings(config, hf, GPU / 2), held)
    changes = [line.split("change: ")[1] for line in lines if "change: " in line]
    assert any(line.startswith("does not fit: update needs") for line in lines)
    assert changes[0].startswith("update.offload: [gradients, optimizer, reference]")


def test_the_changes_that_are_told_make_a_run_fit(measured):
    """The recipe without what makes it fit: the changes lead back to one that does."""
    config, hf, held = measured("qwen3_235b_a22b_grpo.yaml")
    wide = config.model_copy(
        update={
            "update": config.update.model_copy(update={"offload": (), "recompute": ()}),
            "engine": config.engine.model_copy(update={"sleep_while_training": False}),
        }
    )
    lines = describe_memory(memory_settings(wide, hf, GPU), held)
    changes = [line.split("change: ")[1].split("  (")[0] for line in lines if "change: " in line]
    assert changes == [
        "engine.sleep_while_training: true",
        "update.offload: [gradients, optimizer]",
        "update.recompute: full",
    ]
    assert not any("still needs" in line for line in lines)


def test_the_command_prints_the_table_of_a_model_on_gpus_that_are_not_here():
    command = "run examples/quickstart/quickstart.yaml --dry-run --gpus 2 --gpu-memory 80GB"
    ran = subprocess.run(
        [sys.executable, "-m", "megagrpo", *command.split()],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    table = ran.stdout.partition("Memory of a GPU of 80 GB")[2]
    assert re.search(r"update +0\.0 +0\.0 +0\.0 ", table) and "fits: " in table
