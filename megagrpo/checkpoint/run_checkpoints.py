"""The checkpoints of one run, as the trainer uses them: resume at the start, a save after each step that
is due.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from megagrpo.checkpoint.commit import Contents
from megagrpo.checkpoint.folder import Retention, step_of
from megagrpo.checkpoint.hf_share import FOLDER, collect_share
from megagrpo.checkpoint.identity import ReferenceWeights, describe_model, describe_tokenizer
from megagrpo.checkpoint.manager import CheckpointManager, Saved, SaveError
from megagrpo.checkpoint.manifest import FileContents, Manifest
from megagrpo.checkpoint.resume import (
    CONFIG_FILE,
    Choice,
    check_identity,
    choose_checkpoint,
    compare_environments,
)
from megagrpo.checkpoint.shards import ShardCollector, load_shards
from megagrpo.checkpoint.state import STATE_FILE, Stateful, TrainerState
from megagrpo.config.model_folder import hf_folder_of
from megagrpo.config.run_sections import CheckpointConfig, ExportConfig, RunConfig
from megagrpo.config.training_sections import ModelConfig
from megagrpo.errors import UserError
from megagrpo.models.carried_tensors import carried_tensors
from megagrpo.models.hf_export import copy_hf_files, export_dtype
from megagrpo.models.stage import StageModel
from megagrpo.policy.actor import Actor
from megagrpo.telemetry import names
from megagrpo.telemetry.summary import package_versions
from megagrpo.types import Snapshot

KEEP_SECONDS = 15.0  # to finish a save after a rank has failed; launchers kill ranks after 30 s


class RunCheckpoints:
    """Saves and restores the weights, named parts of a run, and the trainer's state."""

    def __init__(
        self,
        settings: CheckpointConfig,
        *,
        run: RunConfig,
        model: ModelConfig,
        model_folder: str,
        export: ExportConfig,
        config_text: str,
        check_config: Callable[[Choice, int], list[str]],
        actor: Actor,
        reference: StageModel | None,
        parts: Mapping[str, Stateful],
        tokenizer: Any,
        tensors: Callable[[], Iterable[tuple[str, torch.Tensor]]],
        note: Callable[[str], None],
    ):
        """Read nothing yet: `resume` comes first.

        Args:
            run: its folder, length and `resume`.
            model: where the weights and the tokenizer came from.
            model_folder: the model as the run reads it.
            export: how HF folders are written.
            config_text: the whole configuration, as it is saved.
            check_config: compares the run's configuration with that of a checkpoint, which has so many
                updates behind it; returns what to tell the user, or raises UserError.
            parts: whose states are kept beside the weights.
            tensors: streams the full HF tensors, for exports. Collective.
            note: told what the user should know, line by line.
        """
        self.settings, self.run, self.model = settings, run, model
        self.actor, self.reference, self.parts = actor, reference, dict(parts)
        self.groups, self.hf_folder = actor.model.groups, hf_folder_of(model_folder)
        self._config_text, self._check_config = config_text, check_config
        exports = bool(self.settings.hf_every)
        self._export_dtype = export_dtype(export.dtype, self.hf_folder) if exports else None
        self._tensors, self._note = tensors, note
        retention = Retention(
            self.settings.keep_last,
            self.settings.keep_every,
            self.settings.keep_best,
            self.settings.best_mode,
        )
        self.manager = CheckpointManager(
            Path(run.dir) / "checkpoints",
            ShardCollector(actor, reference if self.settings.save_reference else None),
            retention,
            self.settings.asynchronous,
        )
        self._model, self._tokenizer = describe_model(actor.model.hf), describe_tokenizer(tokenizer)
        self._frozen = ReferenceWeights(model.path, settings.save_reference) if reference else None
        self._captured: dict[str, Snapshot] = {}  # the parts as they were at the end of the step
        self._saved_step: int | None = None  # the newest good checkpoint's
        self._retry, self._last_error = False, ""

    # ---- resume

    def resume(self) -> TrainerState | None:
        """Load the newest good checkpoint where there is one and resuming is on. Collective over all ranks.

        Raises:
            UserError: on all ranks: a checkpoint that may not be gone on from, or none that is good.
        """
        # what the first save would make training wait for is done now
        if self.settings.every or self.settings.hf_every:
            if self._frozen is not None:
                self._frozen.describe()
            if self.settings.asynchronous:
                self.manager.warm_up()
        if self.run.resume == "never":
            if found := self.manager.candidates():
                raise UserError(
                    f"run.resume: never: {found[0]} is there already and a new run would mix its "
                    "checkpoints with it; "
                    "choose another run.dir"
                )
            return None
        choice = choose_checkpoint(self.manager)
        return self._restore(choice) if choice else None

    def roll_back(self) -> TrainerState | None:
        """Go back to the newest good checkpoint in the middle of a run, after an unfinished save has
        ended. Collective over all ranks.
        """
        self.finish()
        choice = choose_checkpoint(self.manager)
        return self._restore(choice) if choice else None

    def _restore(self, choice: Choice) -> TrainerState:
        check_identity(choice, self._model, self._tokenizer)
        state = TrainerState.load(choice.path)
        notes = choice.notes + self._check_config(choice, state.updates)
        notes += compare_environments(choice.manifest.versions, _environment())
        is_read = self._frozen is not None and self._frozen.lie_in(choice.path, choice.manifest.reference)
        load_shards(choice.path, self.actor, self.reference if is_read else None)
        for name, part in self.parts.items():
            if name in state.parts:
                part.restore(state.parts[name], choice.path)
        for note in notes:
            self._note(note)
        self._saved_step = state.step
        self.capture()
        return state

    # ---- save

    def is_due(self, step: int) -> bool:
        """Say whether a checkpoint is saved after `step`."""
        every, hf_every = self.settings.every, self.settings.hf_every
        periodic = bool(every) and (step % every == 0 or step == self.run.steps)
        return periodic or bool(hf_every and step % hf_every == 0) or self._retry

    @property
    def is_on(self) -> bool:
        """Say whether the run saves checkpoints."""
        return self.settings.every > 0

    @property
    def how_to_go_on(self) -> str:
        """What the command that goes on from the newest checkpoint needs beside this run's."""
        return "" if self.run.resume == "auto" else "with run.resume=auto "

    def capture(self) -> None:
        """Take the states of all parts, at the end of a step: it may be saved in the midst of the next.
        Rollouts in flight are part of it. Collective over all ranks.
        """
        self._captured = {name: part.snapshot() for name, part in self.parts.items()}

    def after_step(self, state: TrainerState, metrics: Mapping[str, float]) -> None:
        """Finish an earlier save where all ranks have written it, and start one where it is due. Collective
        over all ranks.

        A save that fails is told; training goes on, older checkpoints stay, and the next step tries again.
        """
        try:
            self._done(self.manager.poll())
            if self.is_due(state.step):
                self._done(self.manager.finish())
                self._save(state, metrics)
        except SaveError as error:
            self._failed(error)

    def save_now(self, state: TrainerState) -> bool:
        """Save `state` unless it is saved already, wait until it is on disk, and say whether it is.
        Collective over all ranks.

        The weights must be those that `capture` saw: no update may have been applied since.
        """
        self.finish()
        if self._saved_step != state.step:
            try:
                self._save(state, {})
            except SaveError as error:
                self._failed(error)
            self.finish()
        return self._saved_step == state.step

    def close(self, state: TrainerState) -> None:
        """Save what is not on disk yet; a save that failed last is tried once more. Collective over all
        ranks.
        """
        self.finish()
        if self._retry:
            self.save_now(state)

    def describe_loss(self) -> str | None:
        """Say since when nothing was saved, where the last save has failed."""
        if not self._retry:
            return None
        since = "" if self._saved_step is None else f" since step {self._saved_step}"
        return f"nothing was saved{since}: {self._last_error}"

    def keep(self) -> None:
        """See CheckpointManager.keep."""
        self.manager.keep(KEEP_SECONDS)

    def finish(self) -> None:
        """Wait for a save that is being written, and for the removal of retired checkpoints. Collective
        over all ranks.
        """
        try:
            self._done(self.manager.finish())
        except SaveError as error:
            self._failed(error)
        self.manager.await_removal()

    def _save(self, state: TrainerState, metrics: Mapping[str, float]) -> None:
        manifest = Manifest(
            step=state.step,
            weight_version=state.weight_version,
            model=self._model,
            tokenizer=self._tokenizer,
            layout=asdict(self.groups.layout),
            versions=_environment(),
            files=(),
            reference=None if self._frozen is None else self._frozen.describe(),
            score=metrics.get(f"{names.EVALUATION}{self.settings.best_metric}"),
        )
        parts = {name: dict(snapshot.state) for name, snapshot in self._captured.items()}
        own_files = [snapshot.files() for snapshot in self._captured.values()]
        contents = Contents(
            manifest,
            {STATE_FILE: replace(state, parts=parts).to_json(), CONFIG_FILE: self._config_text},
            {name: contents for files in own_files for name, contents in files.items()},
            *self._exports(state.step),
        )
        self._retry = False
        self._done(self.manager.save(contents))

    def _exports(self, step: int) -> tuple[Callable[[], Mapping[str, FileContents]], Callable[[Path], None]]:
        """Return what collects this rank's part of an HF export, where one is due, and what copies the
        config and tokenizer beside it.
        """
        if not (self.settings.hf_every and step % self.settings.hf_every == 0):
            return dict, lambda folder: self._copy_hf_files(folder / "hf_files")
        staging, dtype = self.manager.collector.staging, self._export_dtype

        def collect() -> Mapping[str, FileContents]:
            tensors = chain(self._tensors(), carried_tensors(self.hf_folder))
            return collect_share(tensors, staging, self.groups.rank, self.groups.world_size, dtype=dtype)

        def copy_files(folder: Path) -> None:
            self._copy_hf_files(folder / "hf_files")
            self._copy_hf_files(folder / FOLDER, dtype)

        return collect, copy_files

    def _copy_hf_files(self, target: Path, dtype: torch.dtype | None = None) -> None:
        copy_hf_files(self.hf_folder, target, self.model.tokenizer, dtype)

    def _done(self, saved: Saved | None) -> None:
        if saved is None:
            return
        self._saved_step = step_of(saved.path)
        removed = f"; removed {', '.join(saved.removed)}" if saved.removed else ""
        self._note(
            f"checkpoint {saved.path}: {saved.num_bytes / 2**20:.1f} MiB, training stood still for "
            f"{saved.stall_seconds:.2f} s, "
            f"written in {saved.write_seconds:.2f} s{removed}"
        )

    def _failed(self, error: SaveError) -> None:
        self._retry, self._last_error = True, str(error)
        kept = self.manager.candidates()
        last = f"; the newest checkpoint is {kept[0]}" if kept else "; there is no older checkpoint"
        self._note(f"warning: checkpoint not saved: {error}{last}; tried again after the next step")


def _environment() -> dict[str, str]:
    """Return what a run's last digits depend on beside its configuration."""
    return package_versions() | {"threads of a rank": str(torch.get_num_threads())}
