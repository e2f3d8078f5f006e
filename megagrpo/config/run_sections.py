"""The sections of the run as a whole: its folder, what it keeps and writes, who watches it."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from megagrpo.config.section import FREE, NonNegativeInt, PositiveFloat, PositiveInt, Section

ExportDtype = Literal["source", "float32", "bfloat16"]


class RunConfig(Section):
    """The run as a whole."""

    dir: Annotated[str, FREE] = Field(
        "runs/run", description="run folder: config, metrics, checkpoints, exports"
    )
    steps: Annotated[PositiveInt, FREE] = Field(100, description="outer steps: rollout, update, publish")
    seed: NonNegativeInt = Field(0, description="seed of prompt order and sampling")
    resume: Annotated[Literal["auto", "never"], FREE] = Field(
        "auto", description="auto: go on from the newest good checkpoint of the run folder"
    )
    export_hf: Annotated[bool, FREE] = Field(
        True, description="write the final weights as an HF folder, DIR/hf"
    )
    allow_config_changes: Annotated[tuple[str, ...], FREE] = Field(
        (),
        description="sections or fields, as optimizer.lr, that may differ from the checkpoint's when a "
        "run goes on from it; data.source: its prompts too, whose first epoch then begins",
    )
    deterministic: Annotated[bool, FREE] = Field(
        False, description="two runs are equal to the bit on GPUs too, slower; on the CPU they always are"
    )
    max_nonfinite_steps: Annotated[PositiveInt, FREE] = Field(
        3, description="stop after this many skipped (non-finite) updates in a row"
    )
    collective_timeout_seconds: Annotated[PositiveInt, FREE] = Field(
        600, description="a collective that waits longer than this ends the run"
    )


class CheckpointConfig(Section):
    """Distributed checkpoints."""

    every: NonNegativeInt = Field(0, description="steps between checkpoints; 0 = none")
    asynchronous: bool = Field(
        True, description="write in the background from a copy in host memory; false: training waits"
    )
    keep_last: PositiveInt = Field(
        2, description="the newest ones; the very newest complete one always stays"
    )
    keep_every: NonNegativeInt = Field(
        0, description="checkpoints of steps that are a multiple of it stay for ever; 0 = none"
    )
    keep_best: NonNegativeInt = Field(
        0, description="how many of those with the best value of best_metric stay"
    )
    best_metric: str | None = Field(
        None, description="held-out set, NAME of evaluation.sets, evaluated at the checkpoint's step"
    )
    best_mode: Literal["max", "min"] = Field("max", description="which value of best_metric is best")
    hf_every: NonNegativeInt = Field(
        0, description="steps between HF exports of the same weights, CHECKPOINT/hf; 0 = none"
    )
    save_reference: bool = Field(
        False, description="write the reference weights too; otherwise they are named by source and checksum"
    )


class ExportConfig(Section):
    """HF folders of the trained weights: DIR/hf, and those in checkpoints."""

    dtype: Annotated[ExportDtype, FREE] = Field(
        "source", description="of the tensors and in config.json; source: what the model's config.json names"
    )


class TelemetryConfig(Section):
    """What is written during the run."""

    writers: tuple[str, ...] = Field(
        ("jsonl", "tensorboard"), description="registered metrics writers, or FILE.py:NAME"
    )
    completions_every: NonNegativeInt = Field(
        10, description="steps between samples in DIR/completions, beside the first and the last; 0 = none"
    )
    completions_count: PositiveInt = Field(
        32, description="completions written each time, rounded up to whole groups"
    )
    trace_step: NonNegativeInt = Field(
        0, description="step that torch's profiler traces on every rank, into DIR/trace; 0 = none"
    )

    @model_validator(mode="after")
    def _check(self) -> "TelemetryConfig":
        if "jsonl" not in self.writers:
            raise ValueError("writers: jsonl must be one of them; summary and report read metrics.jsonl")
        if len(set(self.writers)) < len(self.writers):
            raise ValueError("writers: one of them is named twice")
        return self


class WatchdogConfig(Section):
    """A phase that takes longer than its budget ends the run, with the Python stacks of all ranks in
    DIR/stacks.
    """

    factor: PositiveFloat = Field(
        20.0, description="budget of a phase: this many times the median of its recent durations, ..."
    )
    floor_seconds: PositiveFloat = Field(300.0, description="... at least this, ...")
    limit_seconds: PositiveFloat = Field(
        7200.0, description="... at most this, which is also the budget of a phase's first run"
    )
