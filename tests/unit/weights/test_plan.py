"""Carrying out every rank's plan on labelled models gives each engine rank what it keeps, every element
once, from a rank that has it.
"""

from collections import defaultdict
from itertools import pairwise

import labelled_models
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from labelled_models import MODELS, deeper, held_by, hf_tensors, kept_by, parameter_rules

from megagrpo.parallel.layout import ParallelLayout
from megagrpo.weights.plan.boxes import cut, intersect, numel, shift, slices, whole
from megagrpo.weights.plan.publish_plan import PublishPlan
from megagrpo.weights.plan.sources import build_sources
from megagrpo.weights.plan.targets import EngineGrid

PADDED = {1: 112, 2: 112, 4: 112, 8: 112}  # of 101 rows: the next multiple of 16 and tp


def build_plan(hf, layout, grid, bucket_bytes=2000, itemsize=4):
    sources = build_sources(parameter_rules(hf), hf, layout, PADDED[layout.tp])
    return PublishPlan(sources, layout, grid, hf.head_dim, itemsize, bucket_bytes)


def read(held, transfer, source, layout, hf):
    """What a sender reads for a transfer, from the slices that it holds; a box that it does not hold fails
    here.
    """
    parts = []
    experts = range(*transfer.box[0]) if source.is_expert else [None]
    for expert in experts:
        name = source.name if expert is None else source.name.format(expert=expert)
        tensor, box = held[name], transfer.box if expert is None else transfer.box[1:]
        dimension = None if source.split is None else source.split - source.is_expert
        begin = [0] * tensor.ndim
        if dimension is not None:
            shards = layout.expert_tp if source.is_expert else layout.tp
            shard = (
                transfer.sender % layout.expert_tp
                if source.is_expert
                else layout.coordinates(transfer.sender).tp
            )
            begin[dimension] = source.split_size // shards * shard
        local = shift(box, tuple(begin), -1)
        assert intersect(local, whole(tensor.shape)) == local, (
            f"{transfer} reads beyond what rank {transfer.sender} holds"
        )
        parts.append(tensor[slices(local)])
    return parts[0] if transfer.box and not source.is_expert else np.stack(parts)


def carry_out(hf, layout, grid, plan):
    """Return each (replica, destination)'s parameters by name, -2 where nothing arrived, and the elements
    that each rank sent.
    """
    tensors = hf_tensors(hf)
    arrived = {
        (replica, destination): [np.full(target.grid, -2) for target in targets]
        for replica in range(grid.replicas)
        for destination, targets in enumerate(plan.targets)
    }
    sent = np.zeros(layout.world_size, int)
    for rank in range(layout.world_size):
        held = held_by(hf, tensors, layout, rank, PADDED[layout.tp])
        for bucket in plan.buckets:
            for transfer in plan.sends(bucket, rank):
                assert transfer.sender == rank and bucket.first <= transfer.target < bucket.last
                view = arrived[transfer.replica, transfer.destination][transfer.target][
                    slices(transfer.place)
                ]
                assert (view == -2).all(), f"{transfer} arrives twice"
                view[...] = read(held, transfer, plan.sources[transfer.source], layout, hf)
                sent[rank] += transfer.numel
    named = {
        place: {
            target.name: array.reshape(target.shape)
            for target, array in zip(plan.targets[place[1]], arrays, strict=True)
        }
        for place, arrays in arrived.items()
    }
    return tensors, named, sent


def check(hf, layout, grid, bucket_bytes=2000):
    plan = build_plan(hf, layout, grid, bucket_bytes)
    tensors, arrived, sent = carry_out(hf, layout, grid, plan)
    for (_, destination), parameters in arrived.items():
        expected = tensors if grid.layout == "full" else kept_by(hf, tensors, grid.tp, grid.ep, destination)
        assert parameters.keys() == expected.keys()
        for name, array in expected.items():
            assert np.array_equal(parameters[name], array), f"{name} of rank {destination}"
    return plan, sent


LAYOUTS = {
    "one rank": ParallelLayout(1),
    "tp2": ParallelLayout(2, tp=2),
    "pp2 vpp2": ParallelLayout(2, pp=2, vpp=2),
    "tp2 pp2 dp2": ParallelLayout(8, tp=2, pp=2),
    "uneven stages": ParallelLayout(4, pp=4, layers_first_stage=1, layers_last_stage=1, tp=1),
    "written layout": ParallelLayout(4, tp=2, pp=2, pipeline_layout="Ettt|tL"),
    "tp4 cp2": ParallelLayout(8, tp=4, cp=2),
    "dp3": ParallelLayout(3),
}
GRIDS = {
    "full": EngineGrid(2),
    "sharded tp1": EngineGrid(1, 1, 1, "sharded"),
    "sharded tp2 x 3": EngineGrid(3, 2, 1, "sharded"),
    "sharded tp4": EngineGrid(1, 4, 1, "sharded"),
    "sharded tp8, key-value heads shared": EngineGrid(2, 8, 1, "sharded"),
}


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("family", ["llama", "llama_tied", "qwen2", "qwen3"])
def test_every_engine_rank_gets_what_it_keeps_exactly_once(family, layout, grid):
    check(MODELS[family], layout, grid)


@pytest.mark.parametrize(
    "layout",
    [
        ParallelLayout(4, ep=4),
        ParallelLayout(8, tp=2, ep=2, pp=2),
        ParallelLayout(8, tp=2, ep=4, etp=1),
        ParallelLayout(8, cp=2, ep=2, etp=2),
        ParallelLayout(4, tp=4, etp=2, ep=2),
    ],
    ids=lambda layout: layout.describe(),
)
@pytest.mark.parametrize(
    "grid",
    [grid for grid in GRIDS.values() if 12 % grid.tp == 0]
    + [EngineGrid(2, 4, 4, "sharded"), EngineGrid(1, 4, 2, "sharded")],
    ids=str,
)
@pytest.mark.parametrize("family", [name for name, hf in MODELS.items() if hf.num_experts])
def test_experts_reach_the_engine_ranks_that_share_them_out(family, layout, grid):
    check(MODELS[family], layout, grid)


@settings(max_examples=40, deadline=None)
@given(
    tp=st.sampled_from([1, 2, 4]), pp=st.sampled_from([1, 2, 4]), cp=st.sampled_from([1, 2]),
    dp=st.integers(1, 3),
    replicas=st.integers(1, 5), engine_tp=st.sampled_from([1, 2, 4, 8]), sharded=st.booleans(),
    bucket_bytes=st.sampled_from([1, 700, 10**6]),
)  # fmt: skip
def test_any_grid_reaches_any_engine_grid(tp, pp, cp, dp, replicas, engine_tp, sharded, bucket_bytes):
    layout = ParallelLayout(tp * pp * cp * dp, tp=tp, pp=pp, cp=cp)
    check(
        MODELS["qwen2"],
        layout,
        EngineGrid(replicas, engine_tp, 1, "sharded" if sharded else "full"),
        bucket_bytes,
    )


@pytest.mark.parametrize("replicas", [1, 2, 3, 5, 8])
def test_ranks_that_hold_the_same_slices_send_nearly_the_same(replicas):
    # Rows are the finest cut. Rows of 8 elements and vectors of 2 to 8 are coarser here than in any real
    # model, the bound holds anyway.
    layout, hf = ParallelLayout(16, tp=2, pp=2), deeper(MODELS["qwen3"], 16)
    _, sent = check(hf, layout, EngineGrid(replicas, 2, 1, "sharded"), 10**5)
    for place in [(tp, pp) for tp in range(2) for pp in range(2)]:
        group = [sent[layout.rank_of(tp=place[0], pp=place[1], dp=dp)] for dp in range(layout.dp)]
        assert max(group) <= 1.10 * np.mean(group), (place, group)


@pytest.mark.parametrize(
    "grid", [GRIDS["full"], GRIDS["sharded tp2 x 3"], EngineGrid(3, 4, 4, "sharded")], ids=str
)
def test_a_receiver_expects_what_the_senders_send_and_in_their_order(grid):
    layout = ParallelLayout(8, tp=2, ep=2, pp=2)
    plan = build_plan(MODELS["qwen3_moe"], layout, grid)
    for bucket in plan.buckets:
        by_place = defaultdict(list)
        for rank in range(layout.world_size):
            for transfer in plan.sends(bucket, rank):
                by_place[transfer.replica, transfer.destination].append(transfer)
        for replica in range(grid.replicas):
            for destination in range(grid.destinations):
                assert plan.receives(bucket, replica, destination) == by_place[replica, destination]


@pytest.mark.parametrize("layout", ["full", "sharded"])
def test_buckets_keep_to_their_size_and_never_cut_a_fused_parameter(layout):
    limit = 3000
    plan = build_plan(MODELS["qwen3_moe"], ParallelLayout(2, pp=2), EngineGrid(1, 2, 1, layout), limit)
    assert len(plan.buckets) > 3
    assert [bucket.first for bucket in plan.buckets[1:]] == [bucket.last for bucket in plan.buckets[:-1]]
    for targets in plan.targets:
        for bucket in plan.buckets:
            units = {target.unit for target in targets[bucket.first : bucket.last]}
            outside = {target.unit for target in [*targets[: bucket.first], *targets[bucket.last :]]}
            assert not units & outside
            assert sum(target.numel for target in targets[bucket.first : bucket.last]) * 4 <= bucket.nbytes
            assert bucket.nbytes <= limit or len(units) == 1


def test_the_hash_tells_plans_apart_and_equal_inputs_have_equal_plans():
    def digest(**changes):
        settings = {
            "layout": ParallelLayout(4, tp=2),
            "grid": EngineGrid(1, 2, 1, "sharded"),
            "bucket_bytes": 2000,
        } | changes
        return build_plan(MODELS["llama"], **settings).hash

    assert digest() == digest()
    others = [
        digest(layout=ParallelLayout(4, pp=2)),
        digest(grid=EngineGrid(2, 2, 1, "sharded")),
        digest(bucket_bytes=4000),
    ]
    assert len({digest(), *others}) == 4


def test_parts_of_a_box_are_a_partition_of_it():
    box = ((3, 5), (10, 110), (0, 7))
    edges = [0, 1, 17, 450, 451, 999, 1000]
    parts = [part for part in (cut(box, a, b, 1000) for a, b in pairwise(edges)) if part]
    assert sum(map(numel, parts)) == numel(box)
    assert all(intersect(a, b) is None for a in parts for b in parts if a is not b)


def test_labels_are_all_different():
    labels = np.concatenate(
        [tensor.ravel() for tensor in labelled_models.hf_tensors(MODELS["qwen3_moe"]).values()]
    )
    assert len(np.unique(labels)) == len(labels)
