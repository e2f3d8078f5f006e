"""Megatron models against transformers, in every family and layout that 1, 2 and 4 ranks allow."""

import pytest
from family_models import CONFIGS, runs_in
from torchrun_launch import check_case

LAYOUTS = {
    1: "tp1pp1",
    2: "tp2pp1 tp2pp1sp tp1pp2 cp2 tp1pp1 ep2 ep2allgather etp2 tp2spetp1 tp2spetp1ep2",
    4: "tp2pp2 tp2pp2sp tp1pp4 tp4pp1 tp2pp1 cp4 tp2cp2sp pp2ep2 tp2spep2 ep2etp2allgather",
}


def cases_of(ranks: int) -> list[str]:
    return [
        f"{layout}:{name}"
        for layout in LAYOUTS[ranks].split()
        for name in CONFIGS
        if runs_in(name, layout, ranks)
    ]


@pytest.mark.distributed
@pytest.mark.parametrize(("ranks", "case"), [(ranks, case) for ranks in LAYOUTS for case in cases_of(ranks)])
def test_megatron_equals_transformers_and_exports_what_it_imported(family_folders, ranks, case):
    layouts = LAYOUTS[ranks].split()
    check_case(
        case, cases_of(ranks), ranks, "hf_parity_worker.py", family_folders, *layouts, timeout_seconds=280
    )
