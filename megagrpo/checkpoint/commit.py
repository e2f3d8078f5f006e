"""Makes a checkpoint of what all ranks have written: metadata, manifest, rename, retention. On the first
rank, in a thread.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from megagrpo.checkpoint import folder as names
from megagrpo.checkpoint.manifest import (
    FileContents,
    Manifest,
    ManifestError,
    read_manifest,
    record_file,
    write_file,
    write_manifest,
)
from megagrpo.checkpoint.writer import ShardWriter, yield_to_training
from megagrpo.parallel.background import BackgroundWork


@dataclass(frozen=True)
class Contents:
    """What a checkpoint holds beside the shards."""

    manifest: Manifest  # without files
    texts: Mapping[str, str]  # written by the first rank
    own_files: Mapping[str, bytes]  # what this rank writes beside its shards
    # returns further files of this rank; on all ranks, while training waits
    collect: Callable[[], Mapping[str, FileContents]] = dict
    # puts further files into the folder; on the first rank, in the background
    copy_files: Callable[[Path], None] = lambda _: None


class Commit:
    """The commit of one save, under way from its creation on."""

    def __init__(self, folder: Path, writer: ShardWriter, contents: Contents, retention: names.Retention):
        """Begin to commit, in a thread.

        Args:
            folder: of the checkpoints.
            writer: of the first rank; all ranks have written.
        """
        self.folder, self.writer, self.contents, self.retention = folder, writer, contents, retention
        self._work = BackgroundWork(self._run, "commit")

    @property
    def is_done(self) -> bool:
        """Say whether it has ended, in whatever way."""
        return self._work.wait(seconds=0.0)

    def wait(self, seconds: float) -> None:
        """Wait until it has ended, at most `seconds`."""
        self._work.wait(seconds)

    def outcome(self) -> tuple[int, list[str]]:
        """Wait; return the bytes of all files and the names of the checkpoints that were retired, or raise
        the error.
        """
        outcome = self._work.outcome()
        if isinstance(outcome, BaseException):  # raised where all ranks hear of it
            raise outcome
        return outcome

    def _run(self) -> tuple[int, list[str]]:
        yield_to_training()
        return self._publish(), retire(self.folder, self.retention)

    def _publish(self) -> int:
        partial = self.writer.folder
        records = self.writer.commit()
        records += [write_file(partial, name, text.encode()) for name, text in self.contents.texts.items()]
        self.contents.copy_files(partial)
        known = {record.name for record in records}
        files = (path for path in sorted(partial.rglob("*")) if path.is_file())
        others = [str(path.relative_to(partial)) for path in files]
        records += [record_file(partial, name) for name in others if name not in known]
        write_manifest(partial, replace(self.contents.manifest, files=records))
        names.publish(self.folder, self.contents.manifest.step)
        return sum(record.size for record in records)


def retire(folder: Path, retention: names.Retention) -> list[str]:
    """Rename the checkpoints that retention drops, and return their names; they are removed later. First
    rank.
    """
    complete = {names.step_of(path): path for path in names.list_complete(folder)}
    scores: dict[int, float] = {}
    for step, path in complete.items() if retention.keep_best else ():
        try:
            score = read_manifest(path).score
        except ManifestError:
            continue  # damaged since: it has no score, and a resume will name it
        if score is not None:
            scores[step] = score
    gone = names.removable(list(complete), scores, retention)
    for step in gone:
        names.retire(complete[step])
    return [complete[step].name for step in gone]
