"""Faults of the storage and of what lies on it."""

import fcntl
import json
import shutil
from pathlib import Path

from chains import Case, Chain, newest_checkpoint


def files(action, step, rank, point="files.open", **more):
    return {"point": point, "action": action, "step": step, "rank": rank, **more}


def killed_in_a_save(step, rank, operation):
    name = f"rank {rank} killed in a save, at its {operation}. change of a file"
    return [
        Case(
            name,
            "resumes",
            [files("kill", step, rank, "files", skip=operation - 1)],
            says=rf"rank {rank} "
            rf"died in step {step}",
        )
    ]


def not_saved(name, fault, error):
    return Case(
        name,
        "goes on",
        [fault],
        says=rf"warning: checkpoint not saved: (?s:.)*{error}(?s:.)*tried "
        r"again after the next step",
    )


def newest(run_dir: Path) -> Path:
    return run_dir / "checkpoints" / f"step_{newest_checkpoint(run_dir):06d}"


def truncate(pattern):
    def tamper(run_dir: Path) -> None:
        path = sorted(newest(run_dir).glob(pattern))[-1]
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])

    return tamper


def flip_a_byte(run_dir: Path) -> None:
    path = sorted(newest(run_dir).glob("*.distcp"))[0]
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def delete(pattern):
    return lambda run_dir: sorted(newest(run_dir).glob(pattern))[-1].unlink()


def leave_half_a_save(run_dir: Path) -> None:
    source = newest(run_dir)
    half = source.with_name(f"step_{newest_checkpoint(run_dir) + 1:06d}.partial")
    shutil.copytree(source, half, ignore=shutil.ignore_patterns("manifest.json"))


def tear_the_last_row(run_dir: Path) -> None:
    with (run_dir / "metrics.jsonl").open("a") as rows:
        rows.write('{"step": 99, "loss/to')


def edit_manifest(**values):
    def tamper(run_dir: Path) -> None:
        path = newest(run_dir) / "manifest.json"
        shutil.copy(path, run_dir / "manifest.kept")
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return tamper


def say_other_threads(run_dir: Path) -> None:
    """As a run with OMP_NUM_THREADS=7 would have left it."""
    versions = json.loads((newest(run_dir) / "manifest.json").read_text())["versions"]
    edit_manifest(versions=versions | {"threads of a rank": "7"})(run_dir)


def put_manifest_back(run_dir: Path) -> None:
    (run_dir / "manifest.kept").rename(newest(run_dir) / "manifest.json")


def hide_manifests(run_dir: Path) -> None:
    for path in (run_dir / "checkpoints").glob("step_*/manifest.json"):
        path.write_text(path.read_text() + "}")


def show_manifests(run_dir: Path) -> None:
    for path in (run_dir / "checkpoints").glob("step_*/manifest.json"):
        path.write_text(path.read_text()[:-1])


def make_another_model(run_dir: Path) -> None:
    folder = shutil.copytree("examples/quickstart/model", run_dir / "other_model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": config["rms_norm_eps"] * 10}))


def make_another_tokenizer(run_dir: Path) -> None:
    folder = shutil.copytree("examples/quickstart/model", run_dir / "other_tokenizer")
    text = (folder / "tokenizer.json").read_text()
    vocabulary = json.loads(text)["model"]["vocab"]
    tokenizer = json.loads(text)
    tokenizer["model"]["vocab"] = vocabulary | {"1": vocabulary["2"], "2": vocabulary["1"]}
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))


_held = []


def hold_the_lock(run_dir: Path) -> None:
    _held.append((run_dir / "run.lock").open("a"))
    fcntl.flock(_held[-1], fcntl.LOCK_EX)


def let_the_lock_go(_: Path) -> None:
    _held.pop().close()


def ends(step):
    """End a launch whose other cases go on."""
    return Case(
        "killed after that", "resumes", [{"point": "update.enter", "action": "kill", "step": step, "rank": 1}]
    )


def damaged(name, tamper, step):
    return [
        Case(
            name,
            "goes on",
            tamper=tamper,
            says=r"warning: checkpoint .*step_\d+ is damaged and "
            r"passed over: .+",
        ),
        ends(step),
    ]


def refused(name, says, *overrides, tamper=None, mend=None):
    return [Case(name, "refuses", says=says, overrides=overrides, tamper=tamper, mend=mend)]


SAVES = Chain(
    "saves",
    2,
    ["checkpoint.keep_last=3"],
    [
        killed_in_a_save(2, rank=0, operation=1),
        killed_in_a_save(3, rank=1, operation=1),
        killed_in_a_save(4, rank=0, operation=4),
        killed_in_a_save(5, rank=0, operation=7),
        killed_in_a_save(6, rank=0, operation=10),
        [
            not_saved("the disk is full for one save", files("no_space", 7, 0), "No space left on device"),
            not_saved(
                "the disk is read-only for one save, on one rank",
                files("read_only", 8, 1),
                "Read-only file system",
            ),
            not_saved("an I/O error in a save, on one rank", files("io_error", 9, 1), "Input/output error"),
            Case("the disk is slow", "goes on", [files("slow", 10, 1)]),
            Case(
                "no space for the metrics, for two steps",
                "goes on",
                [
                    {"point": "append.enter", "action": "no_space", "step": step, "rank": 0, "times": None}
                    for step in (11, 12)
                ],
                says=r"warning: jsonl can't be written now: \[Errno 28\](?s:.)*jsonl can be written again",
            ),
            Case(
                "idle reward workers killed",
                "goes on",
                [{"point": "generate.enter", "action": "kill_workers", "step": 13, "rank": None}],
            ),
            ends(14),
        ],
        [
            Case(
                "no space for the export at the end",
                "resumes",
                [{"point": "export.enter", "action": "no_space", "rank": 0}],
                says="run.export_hf: .*: No space left on device; the weights are in the newest checkpoint",
            )
        ],
    ],
)

FOLDERS = Chain(
    "folders",
    2,
    ["parallel.tp=2", "checkpoint.keep_last=3"],
    [
        [ends(4)],
        damaged("a shard of the newest checkpoint is cut off", truncate("*.distcp"), 5),
        damaged("one bit of a shard is wrong", flip_a_byte, 6),
        damaged("a rank's shard is missing", delete("__1_*.distcp"), 7),
        damaged("the trainer's state is cut off", truncate("trainer_state.json"), 8),
        damaged("the manifest is cut off", truncate("manifest.json"), 9),
        [
            Case("half a save is left", "goes on", tamper=leave_half_a_save),
            Case(
                "another number of threads",
                "goes on",
                tamper=say_other_threads,
                says="warning: threads of a rank: 7 in the checkpoint, 1 in this run; its numbers may differ",
            ),
            Case("the last row of the metrics is torn", "goes on", tamper=tear_the_last_row),
            ends(10),
        ],
        refused(
            "every checkpoint is damaged",
            "no good checkpoint is left",
            tamper=hide_manifests,
            mend=show_manifests,
        ),
        refused(
            "the checkpoint is of a newer version",
            "has checkpoint format 99",
            tamper=edit_manifest(format_version=99),
            mend=put_manifest_back,
        ),
        refused(
            "the checkpoint is of an older version",
            "has checkpoint format 1, .*model.path=",
            tamper=edit_manifest(format_version=1),
            mend=put_manifest_back,
        ),
        refused("the configuration differs", r"optimizer\.lr", "optimizer.lr=1.0e-5"),
        refused(
            "another model",
            "is of another model or tokenizer: .*eps",
            "model.path=RUN_DIR/other_model",
            tamper=make_another_model,
        ),
        refused(
            "another tokenizer",
            "is of another model or tokenizer: .*tokenizer",
            "model.tokenizer=RUN_DIR/other_tokenizer",
            tamper=make_another_tokenizer,
        ),
        refused(
            "a live run is in the folder", "in use by a live run", tamper=hold_the_lock, mend=let_the_lock_go
        ),
    ],
)
