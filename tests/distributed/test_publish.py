"""Publishing to engines in processes of their own, in every kind of layout, by every transport that needs
no GPU.
"""

import pytest
from torchrun_launch import run_torchrun


@pytest.mark.distributed
def test_every_engine_rank_receives_its_slices_to_the_bit_and_failures_are_shared(family_folders, tmp_path):
    layouts = ["tp2pp2", "pp4", "tp2cp2", "pp2vpp2", "tp2ep2", "etp2ep2"]
    assert "PUBLISH OK" in run_torchrun(
        4, "publish_worker.py", family_folders, tmp_path, *layouts, timeout_seconds=280
    )
