"""Publishing to engines in processes of their own, in every kind of layout, by every transport that needs
no GPU.
"""

import pytest
from torchrun_launch import check_case

LAYOUTS = ["tp2pp2", "pp4", "tp2cp2", "pp2vpp2", "tp2ep2", "etp2ep2"]
DENSE = ["llama_tied_llama3_rope", "qwen2", "qwen3"]


def cases_of(layout: str) -> list[str]:
    """Which models a layout publishes, which of them quantised too, and which are probed."""
    models = ["qwen3_moe"] if "ep" in layout else [*DENSE, "qwen3_moe"]
    cases = [f"{layout}:{name}" for name in models]
    both = [name for name in ("qwen2", "qwen3_moe") if name in models]
    cases += [f"{layout}:{name} quantised" for name in both]
    return cases + [f"{layout}:{name} probed" for name in both if "vpp" not in layout]


CASES = ["faults are shared", "a process group", "changes alone", "changes alone, of experts"]
CASES += [case for layout in LAYOUTS for case in cases_of(layout)]


@pytest.fixture(scope="module")
def scratch(tmp_path_factory):
    return tmp_path_factory.mktemp("publish")


@pytest.mark.distributed
@pytest.mark.parametrize("case", CASES)
def test_every_engine_rank_receives_its_slices_to_the_bit(family_folders, scratch, case):
    check_case(case, CASES, 4, "publish_worker.py", family_folders, scratch, *LAYOUTS, timeout_seconds=280)
