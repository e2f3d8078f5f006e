"""What is planted in a checkpoint does not run, in any file that is a pickle or was one."""

import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as torch_checkpoint

from megagrpo.checkpoint.state import RandomStates, StateOfRanks
from megagrpo.errors import UserError
from megagrpo.models.restricted_pickles import reading_checkpoint

sys.path.insert(0, str(Path(__file__).parents[2]))

from planted_pickles import plant_in_carried, plant_in_metadata, plant_in_shard


def save(folder):
    state = {"weight": torch.arange(6.0), "object": "of a save"}
    torch_checkpoint.save(state, checkpoint_id=folder, no_dist=True)


def load(folder):
    state = {"weight": torch.zeros(6), "object": ""}
    torch_checkpoint.load(state, checkpoint_id=folder, no_dist=True)
    return state


def test_what_a_save_writes_is_read(tmp_path):
    save(tmp_path / "saved")
    with reading_checkpoint(tmp_path / "saved"):
        state = load(tmp_path / "saved")
    assert state["weight"].tolist() == [0, 1, 2, 3, 4, 5] and state["object"] == "of a save"


@pytest.mark.parametrize("plant", [plant_in_metadata, plant_in_shard])
def test_a_planted_pickle_is_refused_by_name_and_does_not_run(tmp_path, plant):
    folder, trace = tmp_path / "saved", tmp_path / "ran"
    save(folder)
    plant(folder, trace)
    with pytest.raises(UserError, match=r"saved: not read: .*mkdir") as told, reading_checkpoint(folder):
        load(folder)
    assert not trace.exists() and "\n" not in str(told.value)


@pytest.mark.parametrize("plant", [plant_in_metadata, plant_in_shard])
def test_the_payload_would_have_run(tmp_path, plant):
    """Without the guard, so that the test before this one is known to be able to fail."""
    folder, trace = tmp_path / "saved", tmp_path / "ran"
    save(folder)
    plant(folder, trace)
    try:
        load(folder)
    except BaseException as error:
        assert not isinstance(error, KeyboardInterrupt)
    assert trace.exists()


@pytest.mark.parametrize("forged", ["planted", b"", b"{}", b'{"python": 1}', b"[" * 10**5])
def test_carried_state_that_no_save_wrote_is_refused_in_a_line(tmp_path, forged):
    part = StateOfRanks("random", RandomStates(0), 0)
    path = tmp_path / "carried" / "random.00000"
    path.parent.mkdir()
    path.write_bytes(forged if isinstance(forged, bytes) else b"")
    if forged == "planted":
        plant_in_carried(tmp_path, tmp_path / "ran")
    with pytest.raises(UserError, match=r"carried/random\.\*: not what a save writes") as told:
        part.restore({}, tmp_path)
    assert not (tmp_path / "ran").exists() and "\n" not in str(told.value)


def test_random_generators_go_on_where_they_were(tmp_path):
    part = StateOfRanks("random", RandomStates(0), 0)
    random.gauss(0, 1)  # leaves half a pair behind
    np.random.standard_normal()
    for name, contents in part.snapshot().files().items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(contents)

    def draw():
        return random.gauss(0, 1), random.random(), np.random.standard_normal(3).tolist(), torch.rand(3)

    *expected, tensor = draw()
    part.restore({}, tmp_path)
    *found, again = draw()
    assert found == expected and torch.equal(tensor, again)
