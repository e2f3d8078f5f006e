"""What a checkpoint holds is what its format version says, and no other version is gone on from."""

import json
import re
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load

from megagrpo.checkpoint.manifest import FORMAT_VERSION, OLDEST_RESUMABLE, Manifest
from megagrpo.checkpoint.resume import choose_checkpoint
from megagrpo.checkpoint.state import RandomStates, TrainerState
from megagrpo.errors import UserError
from megagrpo.rollout.in_flight import ScoredCompletions, pack_share
from megagrpo.types import Completion, Reward

# Where this fails because something is saved that was not, or no longer is: raise FORMAT_VERSION (and
# OLDEST_RESUMABLE, unless the older one can be read as well), then write down here what it stands for.
FORMAT = 4
MANIFEST = "step weight_version model tokenizer layout versions files reference score format_version"
STATE = "step updates weight_version nonfinite_in_a_row wall_seconds roll_backs row unrecorded parts"
RANDOM = {"python", "numpy", "torch"}
IN_FLIGHT_TENSORS = {"token_ids", "logprobs"}
IN_FLIGHT = "key prompt_id index spans finish_reason text reward"
SPAN = "length is_sampled weight_version is_trained"


def test_what_is_saved_is_what_the_format_version_stands_for():
    assert FORMAT_VERSION == FORMAT
    assert [field.name for field in fields(Manifest)] == MANIFEST.split()
    assert [field.name for field in fields(TrainerState)] == STATE.split()
    assert json.loads(RandomStates(0).state()).keys() - {"cuda"} == RANDOM
    completion = Completion.sampled(1, 0, np.arange(2), np.zeros(2, np.float32), "stop", ((0, 3),), "text")
    data = pack_share(ScoredCompletions({(0, 0): completion}, {(0, 0): Reward(1.0, {})}))
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    assert load(data).keys() == IN_FLIGHT_TENSORS
    (described,) = json.loads(header["__metadata__"]["completions"])
    assert list(described) == IN_FLIGHT.split()
    assert list(described["spans"][0]) == SPAN.split()


class OneCheckpoint:
    """A manager whose folder has one whole checkpoint, of a format version."""

    def __init__(self, format_version):
        self.manifest = Manifest(3, 3, {}, {}, {}, {"megagrpo": "0.0.9"}, (), format_version=format_version)

    def candidates(self):
        return [Path("checkpoints/step_000003")]

    def examine(self, path):
        return self.manifest, []


@pytest.mark.parametrize(
    ("version", "way_out"),
    [
        (OLDEST_RESUMABLE - 1, "go on with the version that wrote it, or take its weights for a new run: "),
        (FORMAT_VERSION + 1, "go on with the version that wrote it"),
    ],
    ids=["older", "newer"],
)
def test_a_checkpoint_of_another_format_is_one_line_with_a_way_out(version, way_out):
    message = rf"^checkpoints/step_000003: has checkpoint format {version}, written by megagrpo 0.0.9; "
    with pytest.raises(UserError, match=message + rf".*{re.escape(way_out)}"):
        choose_checkpoint(OneCheckpoint(version))
    assert choose_checkpoint(OneCheckpoint(FORMAT_VERSION)).manifest.step == 3
