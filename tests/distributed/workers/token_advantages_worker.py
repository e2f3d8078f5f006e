"""Worker: REINFORCE++ with KL to go in several layouts, against the dense result.

Arguments: model folder, reference folder, file with the dense results, then layouts.
"""

import os
import re
import sys
from pathlib import Path

import update_matrix_worker as matrix  # isort: skip  it sets the device up, before torch is imported

import dense_token_advantages as dense_tokens
import torch
from reported_cases import reported_case

from megagrpo.config.schema import Config, ParallelConfig
from megagrpo.parallel.groups import build_groups, destroy_groups
from megagrpo.parallel.layout import ParallelLayout


def make_config(folder: Path, estimator: str) -> Config:
    values = matrix.make_config(folder, dense_tokens.LOSS, dense_tokens.AGGREGATION).model_dump()
    values["algorithm"]["advantages"] = estimator
    values["algorithm"]["kl"] |= {"coef": dense_tokens.KL_COEF, "estimator": "k1", "placement": "reward"}
    return Config.model_validate(values)


def main() -> None:
    folder, reference = Path(sys.argv[1]), Path(sys.argv[2])
    expected = torch.load(sys.argv[3], weights_only=False)
    for layout_name in sys.argv[4:]:
        sizes = {name: int(size) for name, size in re.findall(r"(tp|cp|vpp|pp)(\d+)", layout_name)}
        parallel = ParallelConfig(**sizes, sp="sp" in layout_name)
        groups = build_groups(ParallelLayout(int(os.environ["WORLD_SIZE"]), **sizes), timeout_seconds=120)
        for estimator, want in expected["results"].items():
            name = f"{layout_name}:{estimator} {dense_tokens.AGGREGATION}"
            with reported_case(name):
                result, metrics, gradients = matrix.run_case(
                    folder,
                    make_config(folder, estimator),
                    groups,
                    parallel,
                    expected["rollout_logprobs"],
                    reference,
                )
                matrix.check(name, want, result, metrics, gradients)
                assert matrix.close(result.metrics["ref_kl"], want["ref_kl"], dense_tokens.AGGREGATION), name
        destroy_groups()


if __name__ == "__main__":
    main()
