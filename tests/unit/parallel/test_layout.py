"""The grid is Megatron-core's; what does not divide is told with its arithmetic."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megagrpo.parallel.layout import Coordinates, ParallelLayout

QWEN3 = {
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_hidden_layers": 28,
    "intermediate_size": 3072,
}
SMOLLM2 = {
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "num_hidden_layers": 30,
    "intermediate_size": 1536,
}

sizes = st.sampled_from([1, 2, 3, 4])
layouts = st.builds(
    lambda tp, cp, dp, pp: ParallelLayout(world_size=tp * cp * dp * pp, tp=tp, cp=cp, pp=pp),
    sizes,
    sizes,
    sizes,
    sizes,
)


def megatron_groups(world_size, ordered_sizes, position):
    """Groups of the axis at `position` of a grid whose first axis is the fastest, by the definition in
    Megatron-core's RankGenerator.
    """
    stride = 1
    for size in ordered_sizes[:position]:
        stride *= size
    size = ordered_sizes[position]
    return {
        tuple(base + stride * index for index in range(size))
        for base in range(world_size)
        if base // stride % size == 0
    }


@given(layouts)
def test_rank_of_inverts_coordinates(layout):
    for rank in range(layout.world_size):
        at = layout.coordinates(rank)
        assert layout.rank_of(tp=at.tp, cp=at.cp, dp=at.dp, pp=at.pp) == rank


@given(layouts)
def test_groups_follow_the_order_tp_cp_dp_pp(layout):
    ordered = [layout.tp, layout.cp, layout.dp, layout.pp]
    for position, axis in enumerate(("tp", "cp", "dp", "pp")):
        for group in megatron_groups(layout.world_size, ordered, position):
            assert [getattr(layout.coordinates(rank), axis) for rank in group] == list(
                range(ordered[position])
            )


def test_sixteen_ranks_of_megatrons_documented_example():
    # The docstring of megatron.core.parallel_state.initialize_model_parallel: 16 GPUs, tp 2, pp 4.
    layout = ParallelLayout(world_size=16, tp=2, pp=4)
    assert [layout.rank_of(dp=dp) for dp in range(2)] == [0, 2]
    assert [layout.rank_of(dp=dp, tp=1, pp=3) for dp in range(2)] == [13, 15]
    assert [layout.rank_of(tp=tp, pp=1) for tp in range(2)] == [4, 5]
    assert [layout.rank_of(pp=pp) for pp in range(4)] == [0, 4, 8, 12]


def test_expert_ranks_come_right_after_tp():
    layout = ParallelLayout(world_size=8, tp=2, ep=2)
    assert [layout.coordinates(rank).ep for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    assert layout.coordinates(3) == Coordinates(tp=1, cp=0, dp=1, pp=0, ep=1)


def test_split_experts_take_the_fastest_axis_of_the_expert_grid():
    layout = ParallelLayout(world_size=8, tp=1, ep=2, etp=2)
    assert [layout.coordinates(rank).ep for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]


@given(layouts)
def test_replicas_share_the_ranks_out(layout):
    ranks = [rank for dp in range(layout.dp) for rank in layout.ranks_of_replica(dp)]
    assert sorted(ranks) == list(range(layout.world_size))


@pytest.mark.parametrize(
    ("layout", "model", "lines"),
    [
        (ParallelLayout(world_size=6, tp=2, pp=2), None, ["6 ranks are not a multiple of tp 2 * pp 2 = 4"]),
        (
            ParallelLayout(world_size=2, tp=2),
            SMOLLM2,
            [
                "9 attention heads are not a multiple of tp 2: 9 / 2 = 4.5",
                "3 key-value heads are not a multiple of tp 2: 3 / 2 = 1.5",
            ],
        ),
        (ParallelLayout(world_size=8, pp=8), QWEN3, ["28 layers are not a multiple of pp 8: 28 / 8 = 3.5"]),
        (
            ParallelLayout(world_size=4, pp=4, vpp=2),
            QWEN3,
            ["28 layers are not a multiple of pp 4 * vpp 2 = 8: 28 / 8 = 3.5"],
        ),
        (ParallelLayout(world_size=2, vpp=2), QWEN3, ["vpp 2 needs pp > 1"]),
        (
            ParallelLayout(world_size=4, ep=3),
            {"num_experts": 8},
            [
                "ep 3 does not divide cp * dp = 1 * 4 = 4",
                "8 experts are not a multiple of ep 3: 8 / 3 = 2.66667",
            ],
        ),
        (
            ParallelLayout(world_size=4, pp=4, layers_first_stage=5),
            QWEN3,
            [
                "28 layers - 5 (layers_first_stage) = 23 are not a multiple of 3 middle stages: 23 / 3 = "
                "7.66667"
            ],
        ),
        (
            ParallelLayout(world_size=2, pp=2, layers_first_stage=13, layers_last_stage=14),
            QWEN3,
            [
                "28 layers - 13 (layers_first_stage) - 14 (layers_last_stage) = 1, but no stage is left for "
                "them"
            ],
        ),
        (
            ParallelLayout(world_size=4, pp=4, vpp=2, layers_first_stage=5, layers_last_stage=7),
            QWEN3,
            [
                "layers_first_stage 5 is not a multiple of vpp 2: 5 / 2 = 2.5",
                "layers_last_stage 7 is not a multiple of vpp 2: 7 / 2 = 3.5",
            ],
        ),
        (ParallelLayout(world_size=1, layers_last_stage=3), QWEN3, ["layers_last_stage 3 needs pp > 1"]),
        (
            ParallelLayout(world_size=2, pp=2, vpp=2, pipeline_layout="Et*20|tttL"),
            QWEN3,
            [
                "pipeline_layout 'Et*20|tttL': has 2 chunks, pp 2 * vpp 2 = 4",
                "pipeline_layout 'Et*20|tttL': has 23 layers, the model 28",
            ],
        ),
        (
            ParallelLayout(world_size=2, pp=2, pipeline_layout="ttE|xL", layers_first_stage=3),
            QWEN3,
            [
                "pipeline_layout 'ttE|xL': 'x' is not a layer; E is the embedding, t a layer, L the loss, | "
                "cuts",
                "pipeline_layout says how many layers each stage has; leave layers_first_stage and "
                "layers_last_stage out",
            ],
        ),
        (
            ParallelLayout(world_size=2, pp=2, pipeline_layout="(t|)*1t*27EL"),
            QWEN3,
            ["pipeline_layout '(t|)*1t*27EL': must begin with its only E and end with its only L"],
        ),
        (ParallelLayout(world_size=4, pp=4, vpp=2, layers_first_stage=6, layers_last_stage=6), QWEN3, []),
        (ParallelLayout(world_size=2, pp=2, vpp=2, pipeline_layout="Et*10|(t*9|)*2L"), QWEN3, []),
        (ParallelLayout(world_size=4, tp=2, pp=2), QWEN3, []),
        (
            ParallelLayout(world_size=4, tp=2, ep=4, etp=2),
            None,
            ["etp 2 * ep 4 = 8 does not divide the ranks of a stage, tp * cp * dp = 2 * 1 * 2 = 4"],
        ),
        (
            ParallelLayout(world_size=4, tp=2, ep=4, etp=1),
            {"num_local_experts": 8, "moe_intermediate_size": 3},
            [],
        ),
        (
            ParallelLayout(world_size=2, tp=2),
            {"num_local_experts": 8, "moe_intermediate_size": 3, "intermediate_size": 8},
            ["3 feed-forward columns are not a multiple of tp 2: 3 / 2 = 1.5"],
        ),
        (
            ParallelLayout(world_size=2, ep=2, etp=1),
            QWEN3,
            ["ep 2: the model has no experts", "etp 1: the model has no experts"],
        ),
    ],
)
def test_validation_carries_the_arithmetic(layout, model, lines):
    assert layout.validate(model) == lines


def test_nearest_layouts_keep_the_world_and_fit_the_model():
    nearest = ParallelLayout(world_size=6, tp=2, pp=2).nearest_valid(SMOLLM2)
    assert all(not layout.validate(SMOLLM2) for layout in nearest)
    assert [(layout.tp, layout.pp) for layout in nearest] == [(3, 2), (1, 2), (3, 1)]


def test_the_grid_shows_replicas_and_stages():
    assert ParallelLayout(world_size=8, tp=2, pp=2).grid() == "replica 0: 0 1 | 4 5\nreplica 1: 2 3 | 6 7"
    assert ParallelLayout(world_size=8, tp=2, pp=2).describe() == "tp 2, pp 2, dp 2"


@pytest.mark.parametrize(
    "call",
    [lambda grid: grid.coordinates(4), lambda grid: grid.rank_of(tp=2), lambda grid: grid.rank_of(dp=-1)],
)
def test_indices_outside_the_grid_are_refused(call):
    with pytest.raises(ValueError, match=r"not in 0 \.\. "):
        call(ParallelLayout(world_size=4, tp=2))


@pytest.mark.parametrize(
    ("layout", "layers", "chunks"),
    [
        (ParallelLayout(world_size=4, pp=4), 8, [2, 2, 2, 2]),
        (ParallelLayout(world_size=2, pp=2, vpp=2), 8, [2, 2, 2, 2]),
        (ParallelLayout(world_size=4, pp=4, layers_first_stage=1, layers_last_stage=3), 8, [1, 2, 2, 3]),
        # stages of 6 and 2 layers, in turns
        (ParallelLayout(world_size=2, pp=2, vpp=2, layers_last_stage=2), 8, [3, 1, 3, 1]),
        (ParallelLayout(world_size=2, pp=2, vpp=2, pipeline_layout="E|(tt|)*2t*4L"), 8, [0, 2, 2, 4]),
    ],
)
def test_layers_are_cut_into_chunks_in_the_models_order(layout, layers, chunks):
    assert layout.validate({"num_hidden_layers": layers}) == []
    assert layout.chunk_layers(layers) == chunks


@given(st.integers(1, 4), st.integers(1, 4), st.integers(1, 3))
def test_even_chunks_hold_all_layers(pp, vpp, each):
    layout = ParallelLayout(world_size=pp, pp=pp, vpp=vpp if pp > 1 else None)
    layers = pp * vpp * each
    assert sum(layout.chunk_layers(layers)) == layers
