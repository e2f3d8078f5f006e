"""Changes alone, by any transport and after any history of versions."""

from pathlib import Path

from megagrpo.device import device as device_module

DEVICE = device_module.setup()

import torch  # noqa: E402
from receiving_engine import check_received, publisher_of  # noqa: E402

from megagrpo.models.hf_config import read_hf_config  # noqa: E402
from megagrpo.models.load_stage import load_stage_model  # noqa: E402
from megagrpo.models.precision import build_precision  # noqa: E402
from megagrpo.models.transformer_config import build_transformer_config  # noqa: E402
from megagrpo.weights.plan.targets import EngineGrid  # noqa: E402
from megagrpo.weights.publisher import PublishError  # noqa: E402

DELTAS = (
    ("shared_memory", EngineGrid(2, 2, 1, "sharded"), torch.float32),
    ("shared_memory", EngineGrid(1, 4, 1, "sharded"), torch.bfloat16),
    ("disk", EngineGrid(2, 1, 1, "sharded"), torch.bfloat16),
    ("group", EngineGrid(1, 2, 1, "sharded"), torch.float32),
    ("shared_memory", EngineGrid(1, 2), torch.float32),
    ("disk", EngineGrid(2, 1), torch.float32),
    ("group", EngineGrid(1, 2), torch.bfloat16),
)


def change(parameters: list[torch.nn.Parameter], version: int) -> None:
    """Change a few elements, the same on ranks that hold the same; the second change is to -0.0, which
    equals 0.0.
    """
    parameter = parameters[version % len(parameters)].data.view(-1)
    parameter[version::4096] = {2: 0.0, 3: -0.0}.get(version, parameter[version::4096] * 1.5)
    if version == 3:
        parameters[2 % len(parameters)].data.view(-1)[2::4096] = -0.0


def check_delta(folder: Path, groups, scratch: Path, deltas=DELTAS) -> None:
    """After any history of versions an engine that is sent changes holds the model's weights to the bit,
    by any transport.
    """
    hf = read_hf_config(folder)
    sp = groups.tp.size() > 1 and hf.num_experts is not None
    config = build_transformer_config(hf, groups, build_precision("fp32"), sp)
    model = load_stage_model(str(folder), hf, config, groups, DEVICE, use_te=False)
    publishers = [
        publisher_of(model, grid, transport, dtype, scratch, delta=True) for transport, grid, dtype in deltas
    ]
    shares: list[list[float]] = [[] for _ in deltas]
    for version in range(1, 9):
        if version > 1:
            change(list(model.chunks[0].parameters()), version)
        full = {name: tensor.clone() for name, tensor in publishers[0].exporter.tensors()}
        for (transport, grid, dtype), publisher, found in zip(deltas, publishers, shares, strict=True):
            what = f"{folder.name} delta {transport} {grid} {dtype} version {version}"
            if version == 6 and publisher.replica == grid.replicas - 1:
                publisher.engine.weight_version = 3  # this one missed versions
            # a publish that fails half-way: engines are stale, the next one sends everything
            if version == 7:
                publisher.engine.fault = (2, "checksum") if publisher.replica == 0 else None
                try:
                    publisher.publish(version)
                except PublishError:
                    publisher.engine.fault = None
                else:
                    raise AssertionError(f"{what}: a wrong checksum passed")
                continue
            found.append(publisher.publish(version).metrics["publish/written_share"])
            check_received(publisher, full, dtype, what, bits=True)
    sent_all, versions = [1, 6, 8], [1, 2, 3, 4, 5, 6, 8]
    for (transport, grid, _), found in zip(deltas, shares, strict=True):
        what = f"{transport} {grid}: {found}"
        # whole tensors are sent under `full`, some of them large
        limit = 0.2 if grid.layout == "sharded" else 0.7
        assert all(
            (share == 1.0) == (version in sent_all) for share, version in zip(found, versions, strict=True)
        ), what
        assert all(
            share < limit for share, version in zip(found, versions, strict=True) if version not in sent_all
        ), what
    for publisher in publishers:
        publisher.close()
