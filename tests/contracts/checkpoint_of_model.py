"""The checkpoint of a transformers model, as a publish sends it: experts one by one, tied tensors once."""

import re

import torch


def checkpoint_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return every parameter under its name on the hub; transformers 5 stacks the experts of a layer."""
    tensors = {}
    for name, parameter in model.named_parameters():
        stacked = re.fullmatch(r"(.*\.experts)\.(gate_up|down)_proj", name)
        if stacked is None:
            tensors[name] = parameter.detach()
            continue
        projections = ("gate", "up") if stacked[2] == "gate_up" else ("down",)
        for expert, rows in enumerate(parameter.detach()):
            parts = rows.chunk(len(projections))
            tensors |= {
                f"{stacked[1]}.{expert}.{projection}_proj.weight": part
                for projection, part in zip(projections, parts, strict=True)
            }
    return tensors
