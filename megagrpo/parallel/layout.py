"""The rank grid as pure arithmetic: which rank holds which shard. Imports no torch.

Order of the axes, fastest first: tp, cp, dp, pp (Megatron-core's default `tp-cp-ep-dp-pp` without an expert
axis). Experts have a grid of their own over the same ranks: etp, ep, expert dp, pp.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from megagrpo.config.expert_fields import count_experts, latent_columns
from megagrpo.config.training_sections import ParallelConfig
from megagrpo.parallel.stages import check_pipeline_layout, check_split, expand_pipeline_layout, split_layers


@dataclass(frozen=True)
class Coordinates:
    """Where a rank stands on each axis."""

    tp: int
    cp: int
    dp: int
    pp: int
    ep: int


@dataclass(frozen=True)
class ParallelLayout:
    """Sizes of the parallel axes of a run.

    Any sizes can be constructed; `validate` says what is wrong with them.

    Example:
        >>> layout = ParallelLayout(world_size=8, tp=2, pp=2)
        >>> layout.dp, layout.coordinates(5)
        (2, Coordinates(tp=1, cp=0, dp=0, pp=1, ep=0))
    """

    world_size: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1
    etp: int | None = None  # ranks that split one expert; None: tp
    vpp: int | None = None  # model chunks per pipeline stage; None: no interleaving
    layers_first_stage: int | None = None  # None: as many as the other stages
    layers_last_stage: int | None = None
    pipeline_layout: str | None = None  # every chunk written out, see stages.py

    @property
    def expert_tp(self) -> int:
        """Expert tensor parallel size."""
        return self.tp if self.etp is None else self.etp

    @property
    def model_size(self) -> int:
        """Ranks of one replica: tp * cp * pp."""
        return self.tp * self.cp * self.pp

    @property
    def dp(self) -> int:
        """Replicas. Raises ValueError where the world does not divide."""
        if self.world_size % self.model_size:
            raise ValueError(
                f"{self.world_size} ranks are not a multiple of tp * cp * pp = {self.model_size}"
            )
        return self.world_size // self.model_size

    @property
    def min_microbatches(self) -> int:
        """Micro-batches that a rank should have per update, where there are enough sequences: 1, or 2 per
        pipeline stage.

        A pipeline of p stages is busy m / (m + p - 1) of the time with m micro-batches: 80 % for p = 2 and m
        = 4. More of them would make the matrix products thin.
        """
        return 1 if self.pp == 1 else 2 * self.pp

    @property
    def microbatch_multiple(self) -> int:
        """What the number of micro-batches must be a multiple of: the interleaved schedule runs them in
        rounds of pp.
        """
        return 1 if self.vpp is None else self.pp

    def chunk_layers(self, num_layers: int) -> list[int]:
        """Return the layers of each of the pp * vpp model chunks, in the model's order; chunk k is on
        stage k % pp.
        """
        if self.pipeline_layout is not None:
            return [chunk.count("t") for chunk in expand_pipeline_layout(self.pipeline_layout)]
        return split_layers(
            num_layers, self.pp, self.vpp or 1, self.layers_first_stage, self.layers_last_stage
        )

    def coordinates(self, rank: int) -> Coordinates:
        """Return where `rank` stands. Raises ValueError for a rank outside the world."""
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank} is not in 0 .. {self.world_size - 1}")
        stage_size = self.tp * self.cp * self.dp
        within, pp = rank % stage_size, rank // stage_size
        return Coordinates(
            tp=within % self.tp,
            cp=within // self.tp % self.cp,
            dp=within // (self.tp * self.cp),
            pp=pp,
            ep=within // self.expert_tp % self.ep,
        )

    def rank_of(self, *, tp: int = 0, cp: int = 0, dp: int = 0, pp: int = 0) -> int:
        """Return the rank at these coordinates. Raises ValueError for an index outside its axis."""
        for name, index, size in (
            ("tp", tp, self.tp),
            ("cp", cp, self.cp),
            ("dp", dp, self.dp),
            ("pp", pp, self.pp),
        ):
            if not 0 <= index < size:
                raise ValueError(f"{name} index {index} is not in 0 .. {size - 1}")
        return tp + self.tp * (cp + self.cp * (dp + self.dp * pp))

    def ranks_of_replica(self, dp: int) -> list[int]:
        """Return the ranks that hold replica `dp`, stage by stage."""
        return [
            self.rank_of(tp=tp, cp=cp, dp=dp, pp=pp)
            for pp in range(self.pp)
            for cp in range(self.cp)
            for tp in range(self.tp)
        ]

    def validate(self, hf_config: Mapping[str, Any] | None = None) -> list[str]:
        """Return what does not divide, one line each with the arithmetic; an empty list where the layout
        works.

        Args:
            hf_config: the model's `config.json`; without it only the world size is checked.
        """
        problems = []
        if self.world_size % self.model_size:
            factors = " * ".join(
                f"{name} {size}"
                for name, size in (("tp", self.tp), ("cp", self.cp), ("pp", self.pp))
                if size > 1
            )
            problems.append(
                f"{self.world_size} ranks are not a multiple of {factors or 'tp * pp'} = {self.model_size}"
            )
        elif self.etp is None and self.cp * self.dp % self.ep:
            problems.append(
                f"ep {self.ep} does not divide cp * dp = {self.cp} * {self.dp} = {self.cp * self.dp}"
            )
        elif (stage := self.tp * self.cp * self.dp) % (self.expert_tp * self.ep):
            problems.append(
                f"etp {self.etp} * ep {self.ep} = {self.expert_tp * self.ep} does not divide the ranks of a "
                "stage, "
                f"tp * cp * dp = {self.tp} * {self.cp} * {self.dp} = {stage}"
            )
        return problems + self._validate_model(hf_config or {})

    def _validate_model(self, hf_config: Mapping[str, Any]) -> list[str]:
        experts, ffn = count_experts(hf_config), hf_config.get("intermediate_size")
        ffn_tp, ffn_axis = self.tp, "tp"
        if experts is not None:
            ffn = hf_config.get("moe_intermediate_size", ffn)
            ffn_tp, ffn_axis = self.expert_tp, "tp" if self.etp is None else "etp"
        dividends = [
            (hf_config.get("num_attention_heads"), "attention heads", self.tp, f"tp {self.tp}"),
            (hf_config.get("num_key_value_heads"), "key-value heads", self.tp, f"tp {self.tp}"),
            (ffn, "feed-forward columns", ffn_tp, f"{ffn_axis} {ffn_tp}"),
            (experts, "experts", self.ep, f"ep {self.ep}"),
            (hf_config.get("q_lora_rank"), "latent query columns", self.tp, f"tp {self.tp}"),
            (latent_columns(hf_config), "latent key and value columns", self.tp, f"tp {self.tp}"),
        ]
        problems = [
            f"{count} {what} are not a multiple of {divisor}: {count} / {size} = {count / size:g}"
            for count, what, size, divisor in dividends
            if isinstance(count, int) and count % size
        ]
        problems += self._validate_stages(hf_config.get("num_hidden_layers"))
        if hf_config and experts is None:
            given = [("ep", self.ep > 1), ("etp", self.etp is not None)]
            problems += [
                f"{axis} {getattr(self, axis)}: the model has no experts" for axis, is_set in given if is_set
            ]
        if self.vpp is not None and self.pp == 1:
            problems.append(f"vpp {self.vpp} needs pp > 1")
        return problems

    def _validate_stages(self, num_layers: object) -> list[str]:
        layers = num_layers if isinstance(num_layers, int) else None
        if self.pipeline_layout is None:
            if layers is None:
                return []
            return list(
                check_split(layers, self.pp, self.vpp, self.layers_first_stage, self.layers_last_stage)
            )
        problems = list(check_pipeline_layout(self.pipeline_layout, layers, self.pp, self.vpp))
        if self.layers_first_stage is not None or self.layers_last_stage is not None:
            problems.append(
                "pipeline_layout says how many layers each stage has; leave layers_first_stage "
                "and layers_last_stage out"
            )
        return problems

    def nearest_valid(
        self, hf_config: Mapping[str, Any] | None = None, count: int = 3
    ) -> list["ParallelLayout"]:
        """Return up to `count` layouts of the same world that work, nearest first (fewest doublings of tp
        and pp away).
        """
        sizes = [size for size in range(1, self.world_size + 1) if self.world_size % size == 0]
        even = replace(self, layers_first_stage=None, layers_last_stage=None, pipeline_layout=None)
        candidates = [
            replace(even, tp=tp, pp=pp, vpp=self.vpp if pp > 1 else None) for tp in sizes for pp in sizes
        ]
        valid = [layout for layout in candidates if not layout.validate(hf_config)]
        return sorted(valid, key=self._distance)[:count]

    def _distance(self, other: "ParallelLayout") -> tuple[float, int, int]:
        doublings = abs(math.log2(other.tp / self.tp)) + abs(math.log2(other.pp / self.pp))
        return (round(doublings, 6), abs(other.model_size - self.model_size), other.pp)

    def describe(self) -> str:
        """Return the sizes that are not 1, e.g. `tp 2, pp 2, dp 1`; dp is always named."""
        named = [
            ("tp", self.tp),
            ("pp", self.pp),
            ("vpp", self.vpp),
            ("cp", self.cp),
            ("ep", self.ep),
            ("etp", self.etp),
        ]
        return ", ".join(
            [f"{name} {size}" for name, size in named if size not in (None, 1)] + [f"dp {self.dp}"]
        )

    def grid(self) -> str:
        """Return the grid as text: one line per replica, stages separated by bars, ranks of one stage in
        tp (then cp) order.
        """
        width = len(str(self.world_size - 1))
        lines = []
        for dp in range(self.dp):
            stages = [
                " ".join(
                    f"{self.rank_of(tp=tp, cp=cp, dp=dp, pp=pp):>{width}}"
                    for cp in range(self.cp)
                    for tp in range(self.tp)
                )
                for pp in range(self.pp)
            ]
            lines.append(f"replica {dp}: " + " | ".join(stages))
        return "\n".join(lines)


def build_layout(parallel: ParallelConfig, world_size: int) -> ParallelLayout:
    """Return the layout of `parallel:` on `world_size` ranks; `validate` says whether it divides."""
    sizes = parallel.model_dump(include={field.name for field in fields(ParallelLayout)})
    return ParallelLayout(world_size=world_size, **sizes)
