"""Rules that families with experts share: the router and the experts' gated MLPs."""

from dataclasses import dataclass

from megagrpo.models.decoder_rules import ModelSizes
from megagrpo.models.family import HFConfig
from megagrpo.models.rules import ParameterRule, Size


@dataclass(frozen=True)
class ExpertNames:
    """What an HF folder calls the parts of a layer's mixture of experts."""

    block: str = "mlp"
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"


def expert_rules(
    hf: HFConfig, ffn: Size, names: ExpertNames = ExpertNames(), layers: range | None = None
) -> list[ParameterRule]:
    """Return the rules of a router and of its experts.

    Args:
        ffn: columns of an expert.
        layers: that are mixtures of experts; None: all.
    """
    sizes = ModelSizes(hf)
    layer, target = f"model.layers.{{layer}}.{names.block}.", "decoder.layers.{layer}.mlp."
    expert, local = f"{layer}experts.{{expert}}.", f"{target}experts.local_experts.{{expert}}."
    router = ParameterRule(
        f"{target}router.weight",
        (f"{layer}gate.weight",),
        "replicated",
        ((sizes.experts, sizes.hidden),),
        layers=layers,
    )
    fc1 = ParameterRule(
        f"{local}linear_fc1.weight",
        (f"{expert}{names.gate}.weight", f"{expert}{names.up}.weight"),
        "gate_up",
        ((ffn, sizes.hidden),) * 2,
        engine=f"{layer}experts.w13_weight",
        is_quantized=True,
        num_experts=sizes.experts,
        stacked=f"{layer}experts.gate_up_proj",
        layers=layers,
    )
    fc2 = ParameterRule(
        f"{local}linear_fc2.weight",
        (f"{expert}{names.down}.weight",),
        "row",
        ((sizes.hidden, ffn),),
        engine=f"{layer}experts.w2_weight",
        is_quantized=True,
        num_experts=sizes.experts,
        stacked=f"{layer}experts.down_proj",
        layers=layers,
    )
    return [router, fc1, fc2]
