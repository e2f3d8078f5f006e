"""Measures checkpoints: what a save costs training, in the background and not, and what a load costs, in the
same layout and in others.

    python tools/bench_checkpoint.py                         # 116 M parameters on TP2; 15 GB of disk and 8 GB
    of memory are assumed python tools/bench_checkpoint.py --quick --json a.json   # a tiny model, seconds

A random model with a filled AdamW state is saved `--repeats` times in each way into a fresh folder (`sync`;
`async`, in the background; `export`, in the background and as an HF folder too), then loaded by fresh
processes. Every number is over all ranks, the largest counts; of the repeats the median, the first one (new
files, checks of the plan) apart.

    stall       seconds that training stands still: copy, plan and commit; for a synchronous save all of it
    write       seconds until the checkpoint is complete; while training goes on, where it is in the
    background slowdown    of a fixed piece of work (matrix products and Python) on all ranks while the
    background writes peak        high-water mark of the resident set above its size before the first save or
    load, by the rank's own shard bytes load        model and optimizer; `verify` is the check of sizes and
    checksums that a resume makes before
"""

import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

FULL = {
    "hidden_size": 768,
    "intermediate_size": 2304,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "vocab_size": 32000,
}
QUICK = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 512,
}
SAVED_AS = "tp2"
LAYOUTS = {"tp2": {"tp": 2}, "pp2": {"pp": 2}, "dp2": {}, "tp1": {}}
RANKS = {"tp2": 2, "pp2": 2, "dp2": 2, "tp1": 1}


def high_water_bytes():
    """Peak of this process's resident set since `reset_high_water`."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no VmHWM in /proc/self/status")


def reset_high_water():
    """Let the peak start again at what is resident now; return that."""
    Path("/proc/self/clear_refs").write_text("5")
    return high_water_bytes()


class Rank:
    """One rank: the model, and what is measured on it."""

    def __init__(self, shape, layout, folder):
        from megagrpo.device import device as device_module

        device = device_module.setup()
        import torch
        from transformers import Qwen3Config

        from megagrpo.checkpoint.shards import ShardCollector
        from megagrpo.config.training_sections import OptimizerConfig
        from megagrpo.models.hf_config import read_hf_config
        from megagrpo.models.precision import build_precision
        from megagrpo.models.stage import build_stage_model
        from megagrpo.models.transformer_config import build_transformer_config
        from megagrpo.parallel.groups import all_gather_metadata, build_groups, destroy_groups
        from megagrpo.parallel.layout import ParallelLayout
        from megagrpo.policy.actor import Actor

        self.torch, self.gather, self.destroy_groups = torch, all_gather_metadata, destroy_groups
        self.folder = Path(folder)
        hf_folder = self.folder / f"config_{os.environ['RANK']}"
        heads = shape["num_attention_heads"]
        fields = {
            **shape,
            "num_key_value_heads": heads,
            "head_dim": shape["hidden_size"] // heads,
            "tie_word_embeddings": True,
        }
        Qwen3Config(**fields).save_pretrained(hf_folder)
        hf = read_hf_config(hf_folder)
        groups = build_groups(ParallelLayout(int(os.environ["WORLD_SIZE"]), **layout), timeout_seconds=600)
        config = build_transformer_config(hf, groups, build_precision("fp32"), sp=False)
        torch.manual_seed(groups.rank)
        self.actor = Actor(build_stage_model(hf, config, groups, device, use_te=False), OptimizerConfig())
        for chained in self.actor.optimizer.chained_optimizers:
            for state in chained.optimizer.state.values():  # zeros would be pages that were never touched
                state["exp_avg"].normal_()
                state["exp_avg_sq"].uniform_()
        self.collector = ShardCollector(self.actor)
        self.weights = torch.randn(512, 512)

    def close(self):
        """Leave in good order: threads of process groups that are still there abort the process."""
        self.torch.distributed.barrier()
        self.destroy_groups()

    def work(self):
        """A fixed piece of what training does, and its seconds."""
        started = time.perf_counter()
        total = 0
        for number in range(30):
            self.weights @ self.weights
            total += sum(range(20000 + number))
        return time.perf_counter() - started

    def saves(self, kind, repeats):
        """Save `repeats` times; return a row for the first and one for the others."""
        from megagrpo.checkpoint.commit import Contents
        from megagrpo.checkpoint.folder import Retention
        from megagrpo.checkpoint.hf_share import collect_share
        from megagrpo.checkpoint.manager import CheckpointManager
        from megagrpo.checkpoint.manifest import Manifest
        from megagrpo.weights.export import WeightExporter

        asynchronous = kind != "sync"
        exporter = WeightExporter(self.actor.model)
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

        def export():
            return collect_share(exporter.tensors(), self.collector.staging, rank, ranks)

        manager = CheckpointManager(self.folder / "saves", self.collector, Retention(1), asynchronous)
        before, measured = reset_high_water(), []
        if asynchronous:
            manager.warm_up()  # as a run does before its first step
        alone = statistics.median(self.work() for _ in range(5))
        for step in range(1, repeats + 2):
            manifest = Manifest(step, step, {}, {}, {}, {}, ())
            manager.await_removal()  # the saves of a run are many steps apart
            self.gather(None)
            started = time.perf_counter()
            saved = manager.save(Contents(manifest, {}, {}, export if kind == "export" else dict))
            slowed = []
            while saved is None:
                slowed.append(self.work())
                saved = manager.poll()
            complete = time.perf_counter() - started
            slowdown = statistics.median(slowed) / alone if slowed else 1.0
            mine = {"stall_seconds": saved.stall_seconds, "complete_seconds": complete, "slowdown": slowdown}
            measured.append(
                {name: max(each[name] for each in self.gather(mine)) for name in mine}
                | {"bytes": saved.num_bytes}
            )
        own = sum(path.stat().st_size for path in saved.path.glob(f"__{os.environ['RANK']}_*.distcp"))
        peaks = self.gather({"peak_extra_bytes": high_water_bytes() - before, "own_shard_bytes": own})
        worst = max(peaks, key=lambda each: each["peak_extra_bytes"] / each["own_shard_bytes"])
        later = {name: statistics.median(row[name] for row in measured[1:]) for name in measured[0]}
        return [
            {"operation": f"save {kind}, {when}", "layout": SAVED_AS, **row, **worst}
            for when, row in (("first", measured[0]), ("later", later))
        ]

    def load(self, name):
        """Verify and load the newest checkpoint; return a row."""
        from megagrpo.checkpoint.folder import list_complete
        from megagrpo.checkpoint.manifest import read_manifest, verify_files
        from megagrpo.checkpoint.shards import load_shards

        path = list_complete(self.folder / "saves")[-1]
        files = read_manifest(path).files
        rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        started = time.perf_counter()
        assert verify_files(path, files[rank::ranks]) == []
        verified = time.perf_counter() - started
        before = reset_high_water()
        self.torch.distributed.barrier()
        started = time.perf_counter()
        load_shards(path, self.actor)
        loaded = time.perf_counter() - started
        own = sum(record.size for record in files if record.name.endswith(".distcp")) / ranks
        mine = {
            "load_seconds": loaded,
            "verify_seconds": verified,
            "peak_extra_bytes": high_water_bytes() - before,
        }
        return [
            {"operation": "load", "layout": name, "own_shard_bytes": own}
            | {key: max(each[key] for each in self.gather(mine)) for key in mine}
        ]


def run_rank(job):
    """One job on one rank; the first rank prints the rows."""
    rank = Rank(job["shape"], LAYOUTS[job["layout"]], job["folder"])
    rows = rank.load(job["layout"]) if job["kind"] == "load" else rank.saves(job["kind"], job["repeats"])
    parameters = sum(
        rank.gather(sum(p.numel() for chunk in rank.actor.model.chunks for p in chunk.parameters()))
    )
    if int(os.environ["RANK"]) == 0:
        for row in rows:
            print("ROW", json.dumps(row | {"parameters_over_ranks": parameters}), flush=True)
    rank.close()


def launch(job, timeout_seconds):
    """Run a job on its ranks and return its rows."""
    from megagrpo.device.environment import thread_environment

    ranks = RANKS[job["layout"]]
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = str(listener.getsockname()[1])
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc-per-node",
        str(ranks),
        "--master-addr",
        "127.0.0.1",
    ]
    command += ["--master-port", port, __file__, "--job", json.dumps(job)]
    environment = {"PYTHONWARNINGS": "ignore", **os.environ, **thread_environment(ranks)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_seconds, env=environment)
    if done.returncode:
        sys.exit(done.stdout + done.stderr)
    return [
        json.loads(line.removeprefix("ROW ")) for line in done.stdout.splitlines() if line.startswith("ROW ")
    ]


def print_row(row):
    """One line of the table."""
    numbers = [
        row.get(name)
        for name in ("stall_seconds", "complete_seconds", "slowdown", "load_seconds", "verify_seconds")
    ]
    shown = " ".join(f"{number:9.2f}" if number is not None else " " * 9 for number in numbers)
    megabytes = f"{row['bytes'] / 1e6:9.1f}" if "bytes" in row else " " * 9
    print(
        f"{row['operation']:18s} {row['layout']:6s} {shown} {megabytes} "
        f"{row['peak_extra_bytes'] / row['own_shard_bytes']:9.2f}",
        flush=True,
    )


def parse_arguments():
    """The command line; `--job` is for the ranks that the tool starts itself."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a tiny model")
    parser.add_argument("--repeats", type=int, default=3, help="saves of each kind after the first one")
    parser.add_argument("--layouts", nargs="+", default=list(LAYOUTS), choices=LAYOUTS, help="to load in")
    parser.add_argument(
        "--folder",
        type=Path,
        help="where to save; a file system to be measured (default: a temporary folder)",
    )
    parser.add_argument("--json", type=Path, help="file for the rows")
    parser.add_argument("--job", help=argparse.SUPPRESS)
    return parser.parse_args()


def main():
    """Runs all jobs and prints the table."""
    arguments = parse_arguments()
    if arguments.job:
        return run_rank(json.loads(arguments.job))
    sys.path.insert(0, str(Path(__file__).parents[1]))
    folder = Path(tempfile.mkdtemp(prefix="bench_checkpoint_", dir=arguments.folder))
    rows = []
    heads = ("stall s", "write s", "slowdown", "load s", "verify s", "MB", "peak")
    print(f"{'operation':18s} {'layout':6s} {' '.join(f'{head:>9s}' for head in heads)}")
    try:
        saves = [(kind, SAVED_AS) for kind in ("sync", "async", "export")]
        for kind, layout in [*saves, *(("load", name) for name in arguments.layouts)]:
            job = {
                "kind": kind,
                "layout": layout,
                "shape": QUICK if arguments.quick else FULL,
                "folder": str(folder),
            }
            for row in launch(job | {"repeats": arguments.repeats}, timeout_seconds=1800):
                rows.append(row)
                print_row(row)
                if arguments.json:
                    arguments.json.write_text(json.dumps(rows, indent=1) + "\n")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
