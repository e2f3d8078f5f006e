"""Worker: a family that is written here alone is imported, exported, published in both layouts, quantised and
checkpointed. Its modules have names of their own, and its engine fuses differently from the others': values
above keys above queries, up above gate.

Arguments: scratch folder, then layouts such as tp2. What must arrive is computed from the file's tensors.
"""

import json
import os
import re
import sys
from pathlib import Path

from megagrpo.device import device as device_module

DEVICE = device_module.setup()

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from receiving_engine import publisher_of  # noqa: E402
from reported_cases import reported_case  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from megagrpo.models.decoder_rules import ModelSizes  # noqa: E402
from megagrpo.models.family import FAMILIES, ModelFamily, checkpoint_tensors  # noqa: E402
from megagrpo.models.hf_config import read_hf_config  # noqa: E402
from megagrpo.models.hf_export import write_hf_folder  # noqa: E402
from megagrpo.models.hf_files import check_no_unknown_tensors  # noqa: E402
from megagrpo.models.load_stage import load_stage_model  # noqa: E402
from megagrpo.models.megatron_files import load_megatron_model, save_megatron_model  # noqa: E402
from megagrpo.models.precision import build_precision  # noqa: E402
from megagrpo.models.quantization import quantization_config, quantized_shapes  # noqa: E402
from megagrpo.models.rules import ParameterRule  # noqa: E402
from megagrpo.models.stage import build_stage_model  # noqa: E402
from megagrpo.models.transformer_config import build_transformer_config  # noqa: E402
from megagrpo.parallel.groups import build_groups, destroy_groups  # noqa: E402
from megagrpo.parallel.layout import ParallelLayout  # noqa: E402
from megagrpo.weights.export import WeightExporter  # noqa: E402
from megagrpo.weights.plan.targets import EngineGrid  # noqa: E402

HIDDEN, HEAD, HEADS, GROUPS, FFN, VOCAB, LAYERS = 64, 16, 8, 4, 96, 77, 2


class _Toy(ModelFamily):
    def transformer_config_fields(self, hf):
        return {}

    def parameter_rules(self, hf):
        sizes, block, target = ModelSizes(hf), "net.blocks.{layer}.", "decoder.layers.{layer}."

        def norm(megatron, name, section="layer"):
            return ParameterRule(megatron, (name,), "replicated", ((sizes.hidden,),), section)

        return [
            ParameterRule(
                "embedding.word_embeddings.weight",
                ("net.tokens",),
                "vocab",
                ((sizes.vocab, sizes.hidden),),
                "embedding",
            ),
            norm(f"{target}input_layernorm.weight", f"{block}before_mixer"),
            ParameterRule(
                f"{target}self_attention.linear_qkv.weight",
                tuple(f"{block}mixer.{name}" for name in ("ask", "match", "tell")),
                "qkv",
                tuple((rows, sizes.hidden) for rows in (sizes.queries, sizes.keys, sizes.keys)),
                engine=f"{block}mixer.all",
                engine_order=(2, 1, 0),
                is_quantized=True,
            ),
            ParameterRule(
                f"{target}self_attention.linear_proj.weight",
                (f"{block}mixer.back",),
                "row",
                ((sizes.hidden, sizes.queries),),
            ),
            norm(f"{target}pre_mlp_layernorm.weight", f"{block}before_wide"),
            ParameterRule(
                f"{target}mlp.linear_fc1.weight",
                (f"{block}wide.gate", f"{block}wide.up"),
                "gate_up",
                ((sizes.ffn, sizes.hidden),) * 2,
                engine=f"{block}wide.up_gate",
                engine_order=(1, 0),
                is_quantized=True,
            ),
            ParameterRule(
                f"{target}mlp.linear_fc2.weight", (f"{block}wide.down",), "row", ((sizes.hidden, sizes.ffn),)
            ),
            norm("decoder.final_layernorm.weight", "net.last", "head"),
            ParameterRule(
                "output_layer.weight", ("net.logits",), "vocab", ((sizes.vocab, sizes.hidden),), "head"
            ),
        ]


FAMILIES.register("toy")(_Toy())
SHAPES = {"net.tokens": (VOCAB, HIDDEN), "net.logits": (VOCAB, HIDDEN), "net.last": (HIDDEN,)}
for layer in range(LAYERS):
    p = f"net.blocks.{layer}."
    SHAPES |= {f"{p}before_mixer": (HIDDEN,), f"{p}before_wide": (HIDDEN,)}
    SHAPES |= {f"{p}mixer.ask": (HEADS * HEAD, HIDDEN), f"{p}mixer.back": (HIDDEN, HEADS * HEAD)}
    SHAPES |= {f"{p}mixer.{name}": (GROUPS * HEAD, HIDDEN) for name in ("match", "tell")}
    SHAPES |= {f"{p}wide.{name}": (FFN, HIDDEN) for name in ("gate", "up")}
    SHAPES[f"{p}wide.down"] = (HIDDEN, FFN)
QUANTIZED = r".*(ask|match|tell|gate|up)"


def write_folder(folder: Path) -> None:
    folder.mkdir()
    config = {
        "model_type": "toy", "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": FFN,
        "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": GROUPS,
        "head_dim": HEAD, "max_position_embeddings": 64,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(0)
    save_file(
        {name: torch.randn(shape) for name, shape in SHAPES.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )


def kept_by(tensors: dict[str, torch.Tensor], tp: int, rank: int) -> dict[str, torch.Tensor]:
    """What an engine rank keeps, as the head of this file says."""

    def rows(name):
        return tensors[name].chunk(tp)[rank]

    kept = {"net.last": tensors["net.last"]}
    for name in ("net.tokens", "net.logits"):
        padding = torch.zeros(-VOCAB % 64, HIDDEN)
        kept[name] = torch.cat([tensors[name], padding]).chunk(tp)[rank]
    for layer in range(LAYERS):
        p = f"net.blocks.{layer}."
        kept |= {name: tensors[name] for name in (f"{p}before_mixer", f"{p}before_wide")}
        kept[f"{p}mixer.all"] = torch.cat([rows(f"{p}mixer.{name}") for name in ("tell", "match", "ask")])
        kept[f"{p}wide.up_gate"] = torch.cat([rows(f"{p}wide.{name}") for name in ("up", "gate")])
        for name in (f"{p}mixer.back", f"{p}wide.down"):
            kept[name] = tensors[name].chunk(tp, dim=1)[rank]
    return kept


def same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: str) -> None:
    assert found.keys() == expected.keys(), f"{what}: {found.keys() ^ expected.keys()}"
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), f"{what}: {name}"


def check_exports(model, folder: Path, target: Path) -> None:
    exported = {name: tensor.clone() for name, tensor in WeightExporter(model, 10_000).tensors()}
    same(exported, load_file(folder / "model.safetensors"), "export")
    if dist.get_rank() == 0:
        write_hf_folder(exported.items(), folder, target)
        same(load_file(target / "model.safetensors"), exported, "written")


def check_publishes(model, tensors: dict[str, torch.Tensor], scratch: Path) -> None:
    for grid in (
        EngineGrid(1, 2, 1, "sharded"),
        EngineGrid(dist.get_world_size(), 1, 1, "sharded"),
        EngineGrid(1, 2),
    ):
        publisher = publisher_of(model, grid, "shared_memory", torch.float32, scratch)
        publisher.publish(1)
        for rank, received in enumerate(publisher.engine.received if publisher.engine.is_owner else []):
            expected = tensors if grid.layout == "full" else kept_by(tensors, grid.tp, rank)
            same(received, expected, f"{grid}")


def check_quantized(model, tensors: dict[str, torch.Tensor], hf, scratch: Path) -> None:
    publisher = publisher_of(model, EngineGrid(1, 1), "shared_memory", torch.bfloat16, scratch, quantize=True)
    publisher.publish(1)
    if publisher.engine.is_owner:
        (received,) = publisher.engine.received
        assert {name: tuple(tensor.shape) for name, tensor in received.items()} == quantized_shapes(
            checkpoint_tensors(hf)
        )
        for name, tensor in tensors.items():
            if not re.fullmatch(QUANTIZED, name):
                assert torch.equal(received[name], tensor.bfloat16()), name
                continue
            scales = received[f"{name}_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
            value = received[name].float() * scales[: tensor.shape[0], : tensor.shape[1]]
            # e4m3 has three bits behind the point: half a step is 1 / 16 of the value, and of subnormal
            # numbers 2^-10 of the scale
            assert torch.all((value - tensor).abs() <= tensor.abs() / 16 + scales.max() / 1024), name
    left_out = quantization_config(checkpoint_tensors(hf))["modules_to_not_convert"]
    assert "net.logits" in left_out and "net.blocks.0.mixer.ask" not in left_out


def check_checkpoint(model, build, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    if dist.get_rank() == 0:
        folder.mkdir()
    dist.barrier()
    save_megatron_model(model, folder)
    dist.barrier()
    again = build()
    load_megatron_model(again, folder)
    same({name: tensor.clone() for name, tensor in WeightExporter(again).tensors()}, tensors, "checkpoint")


def main() -> None:
    scratch, layouts = Path(sys.argv[1]), sys.argv[2:]
    folder = scratch / "toy"
    if os.environ["RANK"] == "0":
        write_folder(folder)
    for layout in layouts:
        sizes = {name: int(size) for name, size in re.findall(r"(tp|pp)(\d+)", layout)}
        groups = build_groups(ParallelLayout(int(os.environ["WORLD_SIZE"]), **sizes), timeout_seconds=60)
        dist.barrier()
        hf, tensors = read_hf_config(folder), load_file(folder / "model.safetensors")
        config = build_transformer_config(hf, groups, build_precision("fp32"), sp=False)
        model = load_stage_model(str(folder), hf, config, groups, DEVICE, use_te=False)
        check_no_unknown_tensors(model, folder)
        with reported_case(f"{layout}: exports"):
            check_exports(model, folder, scratch / f"exported_{layout}")
        with reported_case(f"{layout}: publishes"):
            check_publishes(model, tensors, scratch)
        with reported_case(f"{layout}: quantises"):
            check_quantized(model, tensors, hf, scratch)
        with reported_case(f"{layout}: checkpoints"):
            check_checkpoint(
                model,
                lambda hf=hf, config=config, groups=groups: build_stage_model(
                    hf, config, groups, DEVICE, use_te=False
                ),
                tensors,
                scratch / f"checkpoint_{layout}",
            )
        destroy_groups()


if __name__ == "__main__":
    main()
