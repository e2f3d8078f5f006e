"""What a run goes on from, and what it refuses: damaged checkpoints, other models, formats,
configurations, a live run's folder.
"""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from megagrpo.checkpoint.manifest import FORMAT_VERSION

pytestmark = [pytest.mark.end_to_end, pytest.mark.timeout(900)]

MODEL = Path("examples/quickstart/model")
RUN = [
    "run.steps=4",
    "checkpoint.every=2",
    "checkpoint.hf_every=2",
    "checkpoint.keep_best=1",
    "checkpoint.best_metric=sampled",
    "evaluation.every=2",
    "telemetry.writers=[jsonl]",
    "algorithm.kl.coef=0.1",
]
HOLDER = (
    "import sys, time; from pathlib import Path; from megagrpo.supervision.run_lock import RunLock; lock = "
    "RunLock(Path(sys.argv[1])); "
)
HOLDER += "lock.acquire(); print('held', flush=True); time.sleep(600)"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A function: name -> copy of the quickstart's model folder."""
    root = tmp_path_factory.mktemp("models")
    return lambda name: shutil.copytree(MODEL, root / name)


@pytest.fixture(scope="module")
def whole(run_all, model):
    """The uninterrupted run, and one that also saves its reference."""
    runs = {"whole": [*RUN, f"model.path={model('of_whole')}"]}
    runs["saved_reference"] = [
        *RUN,
        f"model.path={model('of_saved_reference')}",
        "checkpoint.save_reference=true",
    ]
    return run_all(2, runs)


def flip_byte(path):
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def edit_json(path, **values):
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def other_weights(folder):
    path = folder / "model.safetensors"
    save_file(
        {name: tensor + 0.01 for name, tensor in load_file(path).items()}, path, metadata={"format": "pt"}
    )
    return folder


def other_tokenizer(folder):
    path = folder / "tokenizer.json"
    text = json.loads(path.read_text())
    vocabulary = text["model"]["vocab"]
    vocabulary["1"], vocabulary["2"] = vocabulary["2"], vocabulary["1"]
    path.write_text(json.dumps(text))
    return folder


def other_model(folder):
    edit_json(folder / "config.json", rms_norm_eps=1e-4)
    return folder


DAMAGES = {  # name -> what is done to the newest checkpoint, and what is told
    "flipped": (lambda path: flip_byte(path / "__1_0.distcp"), "__1_0.distcp: checksum"),
    "truncated": (
        lambda path: (path / "__0_0.distcp").write_bytes(b"short"),
        "__0_0.distcp: 5 bytes, the manifest says",
    ),
    "missing_shard": (lambda path: (path / "__1_0.distcp").unlink(), "__1_0.distcp: missing"),
    "missing_marker": (
        lambda path: (path / "manifest.json").unlink(),
        "no manifest.json: the save was not finished",
    ),
}


@pytest.fixture(scope="module")
def outcomes(whole, model, tmp_path_factory):
    """All cases in one launch: the folder of their runs, and the message of each that was refused."""
    from small_runs import QUICKSTART, SMALL
    from torchrun_launch import run_torchrun

    root = tmp_path_factory.mktemp("resumed")
    jobs = {}

    def case(name, *overrides, source="whole", keep_newest=True):
        folder = shutil.copytree(whole[source], root / name, symlinks=True)
        if not keep_newest:
            shutil.rmtree(folder / "checkpoints" / "step_000004")
        jobs[name] = [
            QUICKSTART,
            [*SMALL, *RUN, f"model.path={model(name)}", f"run.dir={folder}", *overrides],
        ]
        return folder / "checkpoints"

    for name, (damage, _) in DAMAGES.items():
        damage(case(name) / "step_000004")
    folder = case("all_damaged")
    flip_byte(folder / "step_000004" / ".metadata")
    (folder / "step_000002" / "manifest.json").write_text("{")
    edit_json(case("newer") / "step_000004" / "manifest.json", format_version=99)
    case("other_seed", "run.seed=5")
    case("seed_allowed", "run.seed=5", "run.allow_config_changes=[run.seed]", keep_newest=False)
    case("other_lr", "optimizer.lr=1e-5", "run.allow_config_changes=[optimizer.lr]", keep_newest=False)
    case("never", "run.resume=never")
    case("same", keep_newest=False)
    training_rows = "examples/quickstart/task.py:train_rows"
    case("other_held_out", f"evaluation.sets.0.source={training_rows}", keep_newest=False)
    case("in_use")
    for name, change in (
        ("other_model", other_model),
        ("other_tokenizer", other_tokenizer),
        ("other_reference", other_weights),
    ):
        case(name)
        change(Path(dict(each.split("=", 1) for each in jobs[name][1])["model.path"]))
    case("saved_reference", "checkpoint.save_reference=true", source="saved_reference", keep_newest=False)
    other_weights(Path(dict(each.split("=", 1) for each in jobs["saved_reference"][1])["model.path"]))
    jobs["other_generators"] = [
        QUICKSTART,
        [*SMALL, *RUN, f"model.path={model('generators')}", f"run.dir={root / 'other_generators'}"],
    ]
    export = whole["whole"] / "checkpoints" / "step_000002" / "hf"
    jobs["from_export"] = [
        QUICKSTART,
        [*SMALL, *RUN, f"model.path={export}", f"run.dir={root / 'from_export'}", "run.steps=1"],
    ]

    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(root / "in_use")], stdout=subprocess.PIPE, text=True
    )
    try:
        assert holder.stdout.readline() == "held\n"
        output = run_torchrun(2, "resumed_runs_worker.py", json.dumps(jobs), timeout_seconds=500)
    finally:
        holder.kill()
        holder.wait(timeout=30)
    refused = {}
    for line in output.splitlines():
        if line.startswith("OUTCOME "):
            refused |= json.loads(line.removeprefix("OUTCOME "))
    return root, refused, holder.pid


def log_of(outcomes, name):
    assert name not in outcomes[1], outcomes[1]
    return (outcomes[0] / name / "log.txt").read_text()


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_checkpoint_is_named_and_the_one_before_taken(outcomes, whole, rows_of, name):
    log = log_of(outcomes, name)
    assert (
        "step_000004 is damaged and passed over" in log
        and DAMAGES[name][1] in log
        and ("resumed after step 2") in log
    )
    assert (outcomes[0] / name / "checkpoints" / "step_000004.bad").is_dir()
    assert rows_of(outcomes[0] / name) == rows_of(whole["whole"])


@pytest.mark.parametrize(
    ("name", "parts"),
    [
        (
            "all_damaged",
            (
                "step_000004 is damaged",
                ".metadata: checksum",
                "step_000002 is damaged",
                "no good checkpoint is left",
            ),
        ),
        ("newer", ("has checkpoint format 99", f"goes on from format {FORMAT_VERSION}")),
        (
            "other_seed",
            ("run.seed: 0 in the checkpoint, 5 in this run", "run.allow_config_changes=[run.seed]"),
        ),
        ("other_model", ("model config rms_norm_eps: the checkpoint has 1e-06, this run 0.0001",)),
        ("other_tokenizer", ("tokenizer sha256: the checkpoint has",)),
        ("other_reference", ("the reference weights were those of", "model.safetensors: checksum")),
        ("never", ("run.resume: never", "step_000004 is there already")),
        ("in_use", ("in use by a live run (process {holder} on", "this is process")),
    ],
)
def test_what_does_not_belong_together_is_refused_with_both_sides(outcomes, name, parts):
    _, refused, holder = outcomes
    for part in parts:
        assert part.format(holder=holder) in refused[name]


def test_an_allowed_change_goes_on_and_is_told(outcomes, whole, rows_of):
    assert (
        "changed: run.seed: 0 in the checkpoint, 5 in this run (allowed by run.allow_config_changes)"
        in log_of(outcomes, "seed_allowed")
    )
    rows, expected = rows_of(outcomes[0] / "seed_allowed"), rows_of(whole["whole"])
    assert rows[:3] == expected[:3] and rows[3]["optimizer/grad_norm"] != expected[3]["optimizer/grad_norm"]


def test_a_held_out_set_with_other_rows_is_told(outcomes):
    log = log_of(outcomes, "other_held_out")
    assert "evaluation set sampled: 32 prompts in the checkpoint, 32 in this run, not the same" in log
    assert "evaluation set greedy" not in log


def test_a_changed_learning_rate_is_told_and_used(outcomes, whole, rows_of):
    """The optimizer state is the checkpoint's; the schedule is this run's: the third step's rollout is the
    same, its update is not.
    """
    assert "the learning-rate schedule differs from update 3 on: 1e-05 instead of 0.0003" in log_of(
        outcomes, "other_lr"
    )
    rows, expected = rows_of(outcomes[0] / "other_lr"), rows_of(whole["whole"])
    assert [row["optimizer/lr"] for row in rows[1:]] == [3e-4, 3e-4, 1e-5, 1e-5]
    assert rows[3]["optimizer/grad_norm"] == expected[3]["optimizer/grad_norm"]
    assert rows[4]["policy/ref_kl"] != expected[4]["policy/ref_kl"]


def test_another_folder_with_the_same_weights_is_the_same_model(outcomes, whole, rows_of):
    log_of(outcomes, "same")
    assert rows_of(outcomes[0] / "same") == rows_of(whole["whole"])


def test_nothing_of_a_run_draws_from_the_random_generators(outcomes, whole, rows_of):
    """A whole run with Python's, NumPy's and torch's generators in another place, another one on each
    rank: equal to the bit.
    """
    log_of(outcomes, "other_generators")
    assert rows_of(outcomes[0] / "other_generators") == rows_of(whole["whole"])


def test_a_saved_reference_needs_its_source_no_more(outcomes, whole, rows_of):
    """The weights at model.path are others now; the KL to the reference shows which ones were used."""
    log_of(outcomes, "saved_reference")
    assert (
        rows_of(outcomes[0] / "saved_reference")
        == rows_of(whole["saved_reference"])
        == rows_of(whole["whole"])
    )


def test_an_export_is_of_the_same_weights_and_starts_a_run(outcomes, whole, rows_of):
    """Evaluations draw from a stream of their own: the same weights give the same values, before step 1
    here and after step 2 there.
    """
    log_of(outcomes, "from_export")
    first, expected = rows_of(outcomes[0] / "from_export")[0], rows_of(whole["whole"])[2]
    assert (
        first["eval/sampled"] == expected["eval/sampled"] and first["eval/greedy"] == expected["eval/greedy"]
    )
    final = load_file(whole["whole"] / "hf" / "model.safetensors")
    exported = load_file(whole["whole"] / "checkpoints" / "step_000004" / "hf" / "model.safetensors")
    assert final.keys() == exported.keys() and all(torch.equal(final[name], exported[name]) for name in final)


def test_a_checkpoint_knows_its_score_and_what_wrote_it(whole, rows_of):
    for step in (2, 4):
        manifest = json.loads(
            (whole["whole"] / "checkpoints" / f"step_{step:06d}" / "manifest.json").read_text()
        )
        assert manifest["score"] == rows_of(whole["whole"])[step]["eval/sampled"]
        assert (
            manifest["layout"]["tp"] == 2
            and {"megagrpo", "torch", "megatron-core"} <= manifest["versions"].keys()
        )
        assert manifest["weight_version"] == step
