"""Measures the output layer: CPU time and memory of log-prob + entropy from hidden states, forward and
forward + backward.

    python tools/bench_logprobs.py                       # the full table; an idle machine and 20 GB are
    assumed python tools/bench_logprobs.py --quick --json a.json  # small shapes, seconds

What is compared, all in float32, each with the entropy and its gradient, weight gradient in float32, hidden
gradient reduced over TP:

    gemm            the floor: the bare GEMMs of the same shape into memory that is there already (one; three)
    ours_token      linear_token_loss: gradient formed in the forward, three GEMMs; its forward column is
        scoring alone
    ours_sequence   linear_logprobs: recomputed in the backward, four GEMMs
    dense           torch.log_softmax with autograd (one rank only)
    megatron        vocab_parallel_cross_entropy and a vocab-parallel entropy of a copy of the logits, as RL
    trainers on Megatron do

Each cell (implementation, T, tp) runs in fresh processes, one thread a rank, so that CPU time is work and not
waiting. CPU seconds are summed over ranks, the least of `--repeats`; peak bytes are the largest rank's: the
kernel's high-water mark of the resident set above what inputs and weight gradient occupy (the hidden gradient
counts). Ratios are to the floor: forward to one GEMM, both to three GEMMs, `ours_sequence` to four.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

IMPLEMENTATIONS = ("gemm", "ours_token", "ours_sequence", "dense", "megatron")
TEMPERATURE = 0.9
# Whole [T, Vp] float32 copies that an implementation holds at its peak, to leave out what would not fit.
COPIES = {"gemm": 1, "dense": 5, "megatron": 5, "ours_token": 0, "ours_sequence": 0}


class Cell:
    """One process of one cell: the inputs, and what is timed.

    Args:
        spec: implementation, T, V, H, tp.
        rank: of this process.
    """

    def __init__(self, spec, rank):
        import torch
        import torch.distributed as dist

        self.spec, self.torch = spec, torch
        self.group = dist.group.WORLD if spec["tp"] > 1 else None
        generator = torch.Generator().manual_seed(0)
        rows = -(-spec["V"] // spec["tp"])
        self.hidden = torch.randn(spec["T"], spec["H"], generator=generator).requires_grad_()
        self.targets = torch.randint(spec["V"], (spec["T"],), generator=generator)
        self.weight = (
            torch.empty(rows, spec["H"])
            .normal_(std=0.05, generator=generator.manual_seed(rank + 1))
            .requires_grad_()
        )
        self.kept_bytes = 0
        if spec["implementation"].startswith("ours"):
            self.weight.main_grad = torch.zeros(self.weight.shape).add_(0)
        else:
            # Autograd makes the weight gradient within the measurement; it is no extra memory.
            self.kept_bytes = self.weight.numel() * 4
        if spec["implementation"] == "gemm":
            self.logits = torch.zeros(spec["T"], rows).add_(0)
            self.kept_bytes = 0

    def loss(self, logprobs, entropy, rows=slice(None)):
        """A token-level loss that uses both."""
        return logprobs.exp() - 0.01 * entropy

    def forward(self):
        """Scoring: log-probs and entropy, no graph."""
        with self.torch.no_grad():
            getattr(self, self.spec["implementation"])(backward=False)

    def forward_backward(self):
        """Loss and all gradients."""
        self.weight.grad = self.hidden.grad = None
        getattr(self, self.spec["implementation"])(backward=True)

    def gemm(self, backward):
        """One GEMM, or three."""
        torch, hidden, weight = self.torch, self.hidden.detach(), self.weight.detach()
        torch.mm(hidden, weight.t(), out=self.logits)
        if backward:
            if not hasattr(self, "grads"):
                self.grads = torch.zeros_like(hidden), torch.zeros_like(weight)
            torch.mm(self.logits, weight, out=self.grads[0])
            torch.mm(self.logits.t(), hidden, out=self.grads[1])

    def ours_token(self, backward):
        """Three GEMMs."""
        from megagrpo.ops.token_loss import linear_token_loss

        if not backward:
            return self.ours_sequence(False)
        options = {
            "vocab_size": self.spec["V"],
            "temperature": TEMPERATURE,
            "group": self.group,
            "compute_entropy": True,
        }
        return linear_token_loss(self.hidden, self.weight, self.targets, self.loss, **options).loss.backward()

    def ours_sequence(self, backward):
        """Four GEMMs."""
        from megagrpo.ops.logprobs import linear_logprobs

        options = {
            "vocab_size": self.spec["V"],
            "temperature": TEMPERATURE,
            "group": self.group,
            "compute_entropy": True,
        }
        result = linear_logprobs(self.hidden, self.weight, self.targets, **options)
        if backward:
            self.loss(result.logprobs, result.entropy).sum().backward()

    def dense(self, backward):
        """The definition."""
        logprobs = self.torch.log_softmax(self.hidden @ self.weight.t() / TEMPERATURE, dim=-1)
        entropy = -(logprobs.exp() * logprobs).sum(dim=-1)
        chosen = logprobs.gather(1, self.targets.unsqueeze(1)).squeeze(1)
        if backward:
            self.loss(chosen, entropy).sum().backward()

    def megatron(self, backward):
        """Megatron's cross-entropy works in place, so the entropy needs its own copy of the logits."""
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel import (
            copy_to_tensor_model_parallel_region,
            vocab_parallel_cross_entropy,
        )

        hidden = copy_to_tensor_model_parallel_region(self.hidden) if self.group is not None else self.hidden
        logits = hidden @ self.weight.t()
        logits.div_(TEMPERATURE)
        entropy = vocab_parallel_entropy(logits, parallel_state.get_tensor_model_parallel_group())
        logprobs = -vocab_parallel_cross_entropy(logits.clone(), self.targets)
        if backward:
            self.loss(logprobs, entropy).sum().backward()


def vocab_parallel_entropy(logits, group):
    """Entropy of vocab-sharded logits [T, Vp] that keeps the softmax for its gradient p (sum_k p_k z_k -
    z), as trainers have it.
    """
    import torch
    import torch.distributed as dist

    class Entropy(torch.autograd.Function):
        @staticmethod
        def forward(ctx, logits):
            maximum = logits.amax(dim=-1, keepdim=True)
            dist.all_reduce(maximum, op=dist.ReduceOp.MAX, group=group)
            softmax = (logits - maximum).exp_()
            total = softmax.sum(dim=-1, keepdim=True)
            dist.all_reduce(total, group=group)
            softmax.div_(total)
            expected = (softmax * logits).sum(dim=-1, keepdim=True)
            dist.all_reduce(expected, group=group)
            ctx.save_for_backward(logits, softmax, expected)
            return (maximum + total.log() - expected).squeeze(-1)

        @staticmethod
        def backward(ctx, grad):
            logits, softmax, expected = ctx.saved_tensors
            return (expected - logits).mul_(softmax).mul_(grad.unsqueeze(-1))

    return Entropy.apply(logits)


def resident_bytes(field):
    """A field of /proc/self/status: VmRSS (now) or VmHWM (high-water mark)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {field} in /proc/self/status")


def measure(call, repeats, baseline, kept_bytes):
    """Least CPU seconds and largest extra peak bytes of `repeats` calls."""
    seconds, peak = [], 0
    for _ in range(repeats):
        Path("/proc/self/clear_refs").write_text("5")  # resets VmHWM
        start = time.process_time()
        call()
        seconds.append(time.process_time() - start)
        peak = max(peak, resident_bytes("VmHWM") - baseline - kept_bytes)
    return min(seconds), max(0, peak)


def run_rank(spec, rank, port, repeats):
    """Body of a cell's process: prints one JSON line."""
    import torch
    import torch.distributed as dist

    needs_group = spec["tp"] > 1 or spec["implementation"] == "megatron"
    if spec["implementation"] == "megatron":
        from megagrpo.device.device import setup

        setup()
    if needs_group:
        dist.init_process_group(
            "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=spec["tp"]
        )
    if spec["implementation"] == "megatron":
        from megatron.core import parallel_state

        parallel_state.initialize_model_parallel(spec["tp"])
    torch.set_num_threads(1)
    # Loads libraries and their work buffers before the baseline is taken.
    warm_up = Cell({**spec, "T": 8, "V": 64 * spec["tp"]}, rank)
    warm_up.forward()
    warm_up.forward_backward()
    cell = Cell(spec, rank)
    baseline = resident_bytes("VmRSS")
    forward_seconds, forward_peak = measure(cell.forward, repeats, baseline, 0)
    both_seconds, both_peak = measure(cell.forward_backward, repeats, baseline, cell.kept_bytes)
    print(json.dumps([forward_seconds, both_seconds, forward_peak, both_peak]), flush=True)
    if needs_group:
        dist.destroy_process_group()


def run_cell(spec, repeats):
    """Runs a cell in fresh processes and returns its row; None in the fields of a cell that does not fit
    or does not apply.
    """
    row = spec | dict.fromkeys(
        (
            "peak_extra_bytes",
            "forward_peak_extra_bytes",
            "forward_cpu_seconds",
            "forward_backward_cpu_seconds",
        )
    )
    if (spec["implementation"] == "dense" and spec["tp"] > 1) or needed_bytes(spec) > 0.9 * available_bytes():
        return row
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    threads = {
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
        "GOMP_SPINCOUNT": "0",
        "MKL_NUM_THREADS": "1",
    }
    command = [
        sys.executable,
        __file__,
        "--repeats",
        str(repeats),
        "--cell",
        json.dumps(spec),
        "--port",
        str(port),
        "--rank",
    ]
    ranks = [
        subprocess.Popen([*command, str(rank)], env=os.environ | threads, stdout=subprocess.PIPE, text=True)
        for rank in range(spec["tp"])
    ]
    outputs = [process.communicate()[0] for process in ranks]
    if any(process.returncode for process in ranks):
        raise SystemExit(
            f"bench_logprobs: {spec} failed with exit codes {[process.returncode for process in ranks]}"
        )
    results = [json.loads(output.splitlines()[-1]) for output in outputs]
    forward, both, forward_peak, both_peak = zip(*results, strict=True)
    row.update(forward_cpu_seconds=sum(forward), forward_backward_cpu_seconds=sum(both))
    row.update(forward_peak_extra_bytes=max(forward_peak), peak_extra_bytes=max(both_peak))
    return row


def needed_bytes(spec):
    """Memory of all ranks together: weight and gradient, and the [T, V] copies of the implementation."""
    return 4 * spec["V"] * (3 * spec["H"] + COPIES[spec["implementation"]] * spec["T"]) + (1 << 30)


def available_bytes():
    """What the kernel would give out now."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("no MemAvailable in /proc/meminfo")


def print_row(row, floor):
    """One line of the table."""
    name = f"{row['implementation']:14s} {row['T']:6d} {row['V']:7d} {row['H']:5d} {row['tp']:3d}"
    if row["forward_cpu_seconds"] is None:
        print(
            f"{name}   does not fit"
            if row["implementation"] != "dense" or row["tp"] == 1
            else f"{name}   one rank only",
            flush=True,
        )
        return
    ratios = ""
    if floor["forward_cpu_seconds"] is not None:
        gemms = floor["forward_backward_cpu_seconds"]
        if row["implementation"] == "ours_sequence":
            gemms += floor["forward_cpu_seconds"]
        ratios = (
            f"{row['forward_cpu_seconds'] / floor['forward_cpu_seconds']:8.3f} "
            f"{row['forward_backward_cpu_seconds'] / gemms:8.3f}"
        )
    megabytes = [row[field] / 1e6 for field in ("forward_peak_extra_bytes", "peak_extra_bytes")]
    seconds = [row[field] for field in ("forward_cpu_seconds", "forward_backward_cpu_seconds")]
    print(
        f"{name} {seconds[0]:9.2f} {seconds[1]:9.2f} {ratios:17s} {megabytes[0]:9.0f} {megabytes[1]:9.0f}",
        flush=True,
    )


def parse_arguments():
    """The command line; `--cell`, `--rank` and `--port` are for the processes the tool starts itself."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="T = 256 and 512, V = 16,384, H = 256")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 2048, 8192], help="T")
    parser.add_argument("--vocabulary", type=int, default=151936, help="V")
    parser.add_argument("--hidden", type=int, default=1024, help="H")
    parser.add_argument("--tp", type=int, nargs="+", default=[1, 2], help="tensor-parallel sizes")
    parser.add_argument(
        "--implementations", nargs="+", default=list(IMPLEMENTATIONS), choices=IMPLEMENTATIONS
    )
    parser.add_argument(
        "--repeats", type=int, default=2, help="of each measurement; the least CPU time counts"
    )
    parser.add_argument("--json", type=Path, help="file for the rows")
    for name in ("--cell", "--rank", "--port"):
        parser.add_argument(name, help=argparse.SUPPRESS)
    return parser.parse_args()


def main():
    """Runs all cells and prints the table."""
    arguments = parse_arguments()
    if arguments.cell:
        return run_rank(json.loads(arguments.cell), int(arguments.rank), arguments.port, arguments.repeats)
    tokens, vocabulary, hidden = arguments.tokens, arguments.vocabulary, arguments.hidden
    if arguments.quick:
        tokens, vocabulary, hidden = [256, 512], 16384, 256
    print(
        "implementation      T       V     H  tp  forward s    both s  ratios to floor  forward MB   both MB"
    )
    rows = []
    for tp in arguments.tp:
        for num_tokens in tokens:
            floor = None
            for implementation in dict.fromkeys(["gemm", *arguments.implementations]):
                spec = {
                    "implementation": implementation,
                    "T": num_tokens,
                    "V": vocabulary,
                    "H": hidden,
                    "tp": tp,
                }
                row = run_cell(spec, arguments.repeats)
                floor = floor or row
                rows.append(row)
                print_row(row, floor)
                if arguments.json:
                    arguments.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
