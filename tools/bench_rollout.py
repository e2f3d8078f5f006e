"""Speed of the embedded rollout engine against transformers.generate, on the same prompts and sampling in the
same run.

    python tools/bench_rollout.py                       # a random model of SmolLM2-135M's shape, 8 prompts x
    4 completions x 128 tokens python tools/bench_rollout.py --model HF_FOLDER --prompts 16 --completions 8
    --tokens 256 --json rows.json

Both sides sample exactly `--tokens` tokens for every completion (end tokens are off), in turns; the table
shows medians. Random weights cost the same time as trained ones.
"""

import argparse
import ctypes
import json
import os
import resource
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

SMOLLM2_135M = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rope_theta": 100000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def parse_arguments() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", help="HF folder; default: a random model of SmolLM2-135M's shape")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--completions", type=int, default=4, help="completions per prompt")
    parser.add_argument("--tokens", type=int, default=128, help="tokens per completion")
    parser.add_argument(
        "--prompt-tokens",
        type=int,
        default=32,
        help="tokens of the longest prompt; the shortest has half as many",
    )
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("--top-p", type=float, default=1.0)
    parser.add_argument("--top-k", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--json", help="write the rows of the table to this file")
    return parser.parse_args()


def make_random_folder(folder: Path) -> None:
    """Write an HF folder with random weights of SmolLM2-135M's shape and a tokenizer that is never asked
    anything of weight.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SMOLLM2_135M)).save_pretrained(folder)
    backend = Tokenizer(
        models.WordLevel(
            {f"t{index} ": index for index in range(SMOLLM2_135M["vocab_size"])}, unk_token="t0 "
        )
    )
    backend.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(folder)


class PeakMemory:
    """Peak resident bytes above those at the start (CPU), or peak allocated bytes above them (CUDA), while
    the block runs.
    """

    def __init__(self, device: str):
        self._cuda = device.startswith("cuda")
        self.extra_bytes = 0

    def __enter__(self):
        import torch

        if self._cuda:
            torch.cuda.reset_peak_memory_stats()
            self._start = torch.cuda.memory_allocated()
            return self
        # what earlier calls freed goes back to the system, or it would hide this one's peak
        ctypes.CDLL(None).malloc_trim(0)
        self._start = self._resident()
        self._ended = threading.Event()
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self._sampler.start()
        return self

    def __exit__(self, *_):
        import torch

        if self._cuda:
            self.extra_bytes = torch.cuda.max_memory_allocated() - self._start
            return
        self._ended.set()
        self._sampler.join()

    def _sample(self) -> None:
        while not self._ended.wait(0.01):
            self.extra_bytes = max(self.extra_bytes, self._resident() - self._start)

    @staticmethod
    def _resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def build_ours(arguments: argparse.Namespace, folder: str, prompts: list[list[int]]) -> Callable[[], int]:
    """Return a function that generates with the embedded engine and returns the number of tokens."""
    import torch

    from megagrpo.config.engine_sections import build_engine_config
    from megagrpo.engines import ENGINES
    from megagrpo.types import Prompt, SamplingParams

    engine = ENGINES.get("transformers")(
        folder,
        build_engine_config(),
        device=arguments.device,
        dtype=getattr(torch, arguments.dtype),
        load_weights=True,
    )
    engine._end_token_ids = set()  # a benchmark wants every completion at full length
    requests = [Prompt(index, "", tuple(token_ids)) for index, token_ids in enumerate(prompts)]

    def generate() -> int:
        sampling = SamplingParams(
            arguments.tokens, temperature=arguments.temperature, top_p=arguments.top_p, top_k=arguments.top_k
        )
        groups = engine.generate(requests, sampling, range(arguments.completions))
        return sum(len(completion.token_ids) for group in groups for completion in group)

    return generate


def build_theirs(arguments: argparse.Namespace, folder: str, prompts: list[list[int]]) -> Callable[[], int]:
    """Return a function that generates with transformers.generate (left padding, default cache) and
    returns the number of tokens.
    """
    import torch
    from transformers import AutoModelForCausalLM

    model = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, arguments.dtype))
        .to(arguments.device)
        .eval()
    )
    model.generation_config.eos_token_id = None
    width = max(map(len, prompts))
    padded = torch.tensor(
        [[0] * (width - len(prompt)) + prompt for prompt in prompts], device=arguments.device
    )
    mask = torch.tensor(
        [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts], device=arguments.device
    )
    padded, mask = (part.repeat_interleave(arguments.completions, dim=0) for part in (padded, mask))

    def generate() -> int:
        output = model.generate(
            padded,
            attention_mask=mask,
            max_new_tokens=arguments.tokens,
            do_sample=True,
            temperature=arguments.temperature,
            top_p=arguments.top_p,
            top_k=arguments.top_k,
            pad_token_id=0,
        )
        return output[:, width:].numel()

    return generate


def measure(arguments: argparse.Namespace, generators: dict[str, Callable[[], int]]) -> list[dict]:
    """Run the generators in turns and return one row of medians for each."""
    samples: dict[str, list[tuple[float, float, int]]] = {name: [] for name in generators}
    for generate in generators.values():  # first calls allocate and tune
        generate()
    for _ in range(arguments.repeats):
        for name, generate in generators.items():
            with PeakMemory(arguments.device) as memory:
                wall, cpu = time.perf_counter(), time.process_time()
                tokens = generate()
                wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
            samples[name].append((tokens / wall, tokens / cpu, memory.extra_bytes))
    columns = ("tokens_per_second", "tokens_per_cpu_second", "peak_extra_bytes")
    return [
        {
            "implementation": name,
            **dict(zip(columns, map(statistics.median, zip(*rows, strict=True)), strict=True)),
        }
        for name, rows in samples.items()
    ]


def print_table(arguments: argparse.Namespace, rows: list[dict]) -> None:
    """Print the rows, each with its ratio to transformers.generate."""
    base = next(row for row in rows if row["implementation"] == "transformers.generate")
    print(
        f"{arguments.prompts} prompts x {arguments.completions} completions x {arguments.tokens} tokens, "
        f"{arguments.dtype}, "
        f"{arguments.device}, {arguments.threads} threads, medians of {arguments.repeats}"
    )
    print(
        f"{'implementation':<24}{'tokens/s':>10}{'ratio':>8}"
        f"{'tokens/CPU-s':>14}{'ratio':>8}{'peak extra MB':>15}"
    )
    for row in rows:
        wall, cpu = row["tokens_per_second"], row["tokens_per_cpu_second"]
        ratios = (wall / base["tokens_per_second"], cpu / base["tokens_per_cpu_second"])
        print(
            f"{row['implementation']:<24}{wall:>10.1f}{ratios[0]:>8.2f}{cpu:>14.1f}{ratios[1]:>8.2f}"
            f"{row['peak_extra_bytes'] / 1e6:>15.1f}"
        )


def main() -> None:
    """Measure, print, and write the rows."""
    arguments = parse_arguments()
    # before torch is imported
    os.environ.update(OMP_NUM_THREADS=str(arguments.threads), OMP_WAIT_POLICY="PASSIVE", GOMP_SPINCOUNT="0")
    import torch
    from transformers import AutoConfig
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.set_num_threads(arguments.threads)
    with tempfile.TemporaryDirectory() as scratch:
        if arguments.model is None:
            make_random_folder(Path(scratch))
        folder = arguments.model or scratch
        vocabulary = AutoConfig.from_pretrained(folder).vocab_size
        generator = torch.Generator().manual_seed(1)
        lengths = (
            torch.linspace(arguments.prompt_tokens / 2, arguments.prompt_tokens, arguments.prompts)
            .round()
            .int()
            .tolist()
        )
        prompts = [
            torch.randint(1, vocabulary, (length,), generator=generator).tolist() for length in lengths
        ]
        generators = {
            "transformers.generate": build_theirs(arguments, folder, prompts),
            "megagrpo": build_ours(arguments, folder, prompts),
        }
        rows = measure(arguments, generators)
    print_table(arguments, rows)
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(rows, indent=2) + "\n")


if __name__ == "__main__":
    main()
