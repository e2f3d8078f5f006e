"""Models and grids of `bench_publish.py --simulate`, and what is computed of a plan: time, memory, coverage,
bytes and link loads.

The DeepSeek-V3-like model is a list of shapes: its 61 layers with latent attention, 256 experts and a shared
one, without the multi-token prediction layer; projections are split as Megatron-core splits them, the
router's bias is left out. No family of megagrpo trains it. The other two follow the rules of their families.
"""

import time
import tracemalloc
from dataclasses import dataclass
from math import prod

import numpy as np

from megagrpo.parallel.layout import ParallelLayout
from megagrpo.weights.plan.boxes import origin, sizes
from megagrpo.weights.plan.publish_plan import PublishPlan
from megagrpo.weights.plan.sources import SourceTensor, build_sources, holders_of
from megagrpo.weights.plan.targets import EngineGrid


@dataclass(frozen=True)
class Case:
    """A model on a trainer's grid and an engine grid."""

    model: str
    layout: ParallelLayout
    grid: EngineGrid
    head_dim: int
    sources: list[SourceTensor]


@dataclass(frozen=True)
class Links:
    """What a rank can send and receive at once; every rank has a network card of its own, as in GPU
    clusters.
    """

    gigabytes_per_second: float


def deepseek_v3_like() -> Case:
    """671 B parameters from TP8 PP16 EP64 on 2,048 ranks to 64 engines of 32 ranks, attention TP32 and
    experts EP32.
    """
    layout = ParallelLayout(2048, tp=8, pp=16, ep=64, etp=1, layers_first_stage=3, layers_last_stage=2)
    h, heads, vocab = 7168, 128, 129280
    sources = [SourceTensor("model.embed_tokens.weight", "embedding", "vocab", (vocab, h), 0, 0, vocab)]
    stage_of = [stage for stage, count in enumerate(layout.chunk_layers(61)) for _ in range(count)]
    for layer, stage in enumerate(stage_of):
        p = f"model.layers.{layer}."

        def add(unit, kind, names, shapes, split, is_expert=False, p=p, stage=stage):
            for place, (name, shape) in enumerate(zip(names, shapes, strict=True)):
                size = 0 if split is None else shape[split]
                place_in_model = (f"{p}{name}.weight", f"{p}{unit}", kind, shape, stage, split, size)
                sources.append(SourceTensor(*place_in_model, is_expert, engine=f"{p}{unit}", place=place))

        for norm, size in (
            ("input_layernorm", h),
            ("post_attention_layernorm", h),
            ("self_attn.q_a_layernorm", 1536),
        ):
            add(norm, "replicated", [norm], [(size,)], None)
        add("kv_a_layernorm", "replicated", ["self_attn.kv_a_layernorm"], [(512,)], None)
        down = ["self_attn.q_a_proj", "self_attn.kv_a_proj_with_mqa"]
        add("qkv_a", "replicated", down, [(1536, h), (576, h)], None)
        add("q_b", "column", ["self_attn.q_b_proj"], [(heads * 192, 1536)], 0)
        add("kv_b", "column", ["self_attn.kv_b_proj"], [(heads * 256, 512)], 0)
        add("o", "row", ["self_attn.o_proj"], [(h, heads * 128)], 1)
        dense, ffn = ("mlp.", 18432) if layer < 3 else ("mlp.shared_experts.", 2048)
        add("fc1", "gate_up", [f"{dense}gate_proj", f"{dense}up_proj"], [(ffn, h)] * 2, 0)
        add("fc2", "row", [f"{dense}down_proj"], [(h, ffn)], 1)
        if layer >= 3:
            add("router", "replicated", ["mlp.gate"], [(256, h)], None)
            add(
                "w13",
                "gate_up",
                ["mlp.experts.{expert}.gate_proj", "mlp.experts.{expert}.up_proj"],
                [(256, 2048, h)] * 2,
                1,
                True,
            )
            add("w2", "row", ["mlp.experts.{expert}.down_proj"], [(256, h, 2048)], 2, True)
    sources.append(SourceTensor("model.norm.weight", "norm", "replicated", (h,), 15, None))
    sources.append(SourceTensor("lm_head.weight", "head", "vocab", (vocab, h), 15, 0, vocab))
    return Case("DeepSeek-V3-like 671B", layout, EngineGrid(64, 32, 32, "sharded"), 192, sources)


def family_case(
    model: str, model_type: str, layout: ParallelLayout, grid: EngineGrid, **fields: object
) -> Case:
    """Return a case of one of our families, by its parameter rules."""
    from megagrpo.models import families
    from megagrpo.models.family import FAMILIES, HFConfig

    families.load_all()
    rest = {
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "max_position_embeddings": 4096,
        "rope_theta": 1e6,
        "rope_type": "default",
    }
    hf = HFConfig(model_type=model_type, **{**rest, "rope_parameters": {}, "raw": {}, **fields})
    rules = FAMILIES.get(model_type).parameter_rules(hf)
    return Case(model, layout, grid, hf.head_dim, build_sources(rules, hf, layout, hf.vocab_size))


def build_cases() -> list[Case]:
    """Return the three cases, largest first."""
    qwen = family_case(
        "Qwen3-235B", "qwen3_moe", ParallelLayout(256, tp=4, pp=8, ep=32, etp=1, layers_first_stage=11,
        layers_last_stage=11),
        EngineGrid(16, 8, 8, "sharded"), vocab_size=151936, hidden_size=4096, ffn_hidden_size=12288,
        num_layers=94,
        num_attention_heads=64, num_query_groups=4, head_dim=128, num_experts=128,
        raw={"moe_intermediate_size": 1536},
    )  # fmt: skip
    llama = family_case(
        "Llama-70B", "llama", ParallelLayout(64, tp=8, pp=4), EngineGrid(8, 8, 1, "sharded"),
        vocab_size=128256, hidden_size=8192,
        ffn_hidden_size=28672, num_layers=80, num_attention_heads=64, num_query_groups=8, head_dim=128,
    )  # fmt: skip
    return [deepseek_v3_like(), qwen, llama]


def simulate(case: Case, links: Links, itemsize: int, bucket_bytes: int) -> dict[str, object]:
    """Return one row of the table."""
    build = lambda: PublishPlan(case.sources, case.layout, case.grid, case.head_dim, itemsize, bucket_bytes)  # noqa: E731
    views = lambda plan: (  # noqa: E731
        [plan.sends(bucket, case.layout.world_size // 2) for bucket in plan.buckets],
        [
            plan.receives(bucket, case.grid.replicas // 2, case.grid.destinations // 2)
            for bucket in plan.buckets
        ],
    )
    started = time.perf_counter()
    plan = build()
    views(plan)
    plan_seconds = time.perf_counter() - started
    tracemalloc.start()  # slows Python down: not during the timing
    kept = (again := build()), views(again)
    plan_peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    del kept, again
    once, received, sent = check_coverage(plan)
    kept_elements = sum(
        sum(prod(sizes(part.box)) for target in targets for part in target.parts) for targets in plan.targets
    )
    needed_bytes = kept_elements * case.grid.replicas * itemsize
    total_bytes = sum(prod(source.shape) for source in case.sources) * itemsize
    busiest = max(int(sent.max()), received_busiest := max(received)) * itemsize
    rate = links.gigabytes_per_second * 1e9
    return {
        "model": case.model,
        "parameters": total_bytes // itemsize,
        "trainer": f"{case.layout.world_size} ranks, {case.layout.describe()}",
        "engines": f"{case.grid.replicas} x tp {case.grid.tp}"
        + (f" ep {case.grid.ep}" if case.grid.ep > 1 else ""),
        "buckets": len(plan.buckets),
        "largest_bucket_bytes": max(bucket.nbytes for bucket in plan.buckets),
        "plan_seconds": plan_seconds,
        "plan_peak_bytes": plan_peak_bytes,
        "bytes_ratio": sum(received) * case.grid.replicas * itemsize / needed_bytes,
        "elements_covered_once": once,
        "sender_imbalance": sender_imbalance(case, sent),
        "busiest_sender_bytes": int(sent.max()) * itemsize,
        "busiest_receiver_bytes": received_busiest * itemsize,
        "busiest_link_bytes": busiest,
        "link_seconds": busiest / rate,
        # Every engine rank takes in every tensor whole, in a pipelined broadcast that is as fast as one link.
        "broadcast_receiver_bytes": total_bytes,
        "broadcast_seconds": total_bytes / rate,
        "speedup": total_bytes / busiest,
    }


def check_coverage(plan: PublishPlan) -> tuple[bool, list[int], np.ndarray]:
    """Carry every rank's plan out on boxes: (each kept element arrives exactly once, elements received by
    destination, sent by rank).

    A parameter's boxes are disjoint and as large together as what is kept of it; replicas are told apart.
    """
    sent = np.zeros(plan.trainer.world_size, np.int64)
    received = [0] * plan.grid.destinations
    once = True
    for bucket in plan.buckets:
        ranks = {
            holders.rank(index)
            for source in plan.sources_of(bucket)
            for holders, _ in holders_of(source, plan.trainer)
            for index in range(holders.count)
        }
        arrived: dict[tuple[int, int, int], list] = {}
        for rank in sorted(ranks):
            for transfer in plan.sends(bucket, rank):
                arrived.setdefault((transfer.replica, transfer.destination, transfer.target), []).append(
                    transfer.place
                )
                sent[rank] += transfer.numel
                if transfer.replica == 0:
                    received[transfer.destination] += transfer.numel
        for replica in range(plan.grid.replicas):
            for destination, targets in enumerate(plan.targets):
                for position in range(bucket.first, bucket.last):
                    kept = sum(prod(sizes(part.box)) for part in targets[position].parts)
                    boxes = arrived.get((replica, destination, position), [])
                    once = once and sum(prod(sizes(box)) for box in boxes) == kept and are_disjoint(boxes)
    return once, received, sent


def are_disjoint(boxes: list) -> bool:
    """Say whether no two boxes share an index."""
    if len(boxes) < 2:
        return True
    low = np.array([origin(box) for box in boxes])
    high = low + np.array([sizes(box) for box in boxes])
    overlap = np.all((low[:, None] < high[None]) & (low[None] < high[:, None]), axis=-1)
    return int(overlap.sum()) == len(boxes)  # each with itself alone


def sender_imbalance(case: Case, sent: np.ndarray) -> float:
    """Return the largest ratio of a rank's bytes to the mean of the ranks that hold exactly the same
    slices.
    """
    layout = case.layout
    stage = layout.tp * layout.cp * layout.dp
    stride = (
        layout.tp
        if not any(source.is_expert for source in case.sources)
        else np.lcm(layout.tp, layout.expert_tp * layout.ep)
    )
    alike = sent.reshape(layout.pp, stage // stride, stride)
    return float((alike.max(1) / alike.mean(1)).max())
