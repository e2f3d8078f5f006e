"""Worker: every family's Megatron model equals transformers' on the log-probs of packed trees, and exports
what it imported.

Arguments: folder with one HF model per sub-folder, then layouts such as tp2pp2sp. Runs the models that
`family_models` has for each of them, all in one launch.
"""

import functools
import os
import re
import sys
from pathlib import Path

from megagrpo.device import device as device_module

DEVICE = device_module.setup()
sys.path.append(str(Path(__file__).parents[1]))

import numpy as np  # noqa: E402
import torch  # noqa: E402
from family_models import runs_in  # noqa: E402
from reported_cases import reported_case  # noqa: E402
from safetensors.torch import load_file  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from megagrpo.config.training_sections import ParallelConfig  # noqa: E402
from megagrpo.models.hf_config import read_hf_config  # noqa: E402
from megagrpo.models.load_stage import load_stage_model  # noqa: E402
from megagrpo.models.precision import build_precision  # noqa: E402
from megagrpo.models.transformer_config import build_transformer_config  # noqa: E402
from megagrpo.parallel.alignment import token_alignment  # noqa: E402
from megagrpo.parallel.groups import ParallelGroups, build_groups, destroy_groups  # noqa: E402
from megagrpo.parallel.layout import ParallelLayout  # noqa: E402
from megagrpo.policy.batch import MicroBatchBuilder, TrainSample  # noqa: E402
from megagrpo.policy.forward import compute_logprobs  # noqa: E402
from megagrpo.policy.microbatches import PackingRules, SampleSize, plan_microbatches  # noqa: E402
from megagrpo.weights.export import WeightExporter  # noqa: E402

TEMPERATURE = 0.7
TOLERANCE = 2e-6  # float32 log-probs over a small vocabulary: rounding of differently blocked GEMMs


@functools.cache
def make_samples(vocab_size: int) -> tuple[TrainSample, ...]:
    """Ragged groups: shared prompts, a completion of one token, a long tree beyond the dense-attention
    limit.
    """
    random = np.random.default_rng(0)
    samples = []
    for group, (prompt, lengths) in enumerate(
        [(7, (3, 1, 5)), (1, (4,)), (12, (2, 9)), (30, (90, 120, 150)), (5, (1,))]
    ):
        prompt_ids = tuple(int(i) for i in random.integers(0, vocab_size, prompt))
        for index, length in enumerate(lengths):
            tokens = random.integers(0, vocab_size, length)
            samples.append(TrainSample((group, index), prompt_ids, tokens, np.zeros(length, np.float32)))
    return tuple(samples)


@functools.cache
def dense_logprobs(folder: Path, vocab_size: int) -> dict[tuple[int, int], torch.Tensor]:
    """The same log-probs from transformers, one padded-free sequence at a time."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    result = {}
    with torch.no_grad():
        for sample in make_samples(vocab_size):
            ids = torch.tensor([[*sample.prompt_ids, *sample.token_ids.tolist()]])
            logits = model(ids).logits[0, len(sample.prompt_ids) - 1 : -1].double() / TEMPERATURE
            result[sample.key] = logits.log_softmax(-1).gather(1, torch.tensor(sample.token_ids)[:, None])[
                :, 0
            ]
    return result


def check(folder: Path, layout: str, sizes: dict[str, int], groups: ParallelGroups) -> None:
    hf = read_hf_config(folder)
    # experts are dispatched from tokens split over tp
    sp = "sp" in layout or (groups.tp.size() > 1 and hf.num_experts is not None)
    alignment = token_alignment(ParallelConfig(**sizes, sp=sp), "fp32")
    dispatcher = "allgather" if "allgather" in layout else "alltoall"
    config = build_transformer_config(hf, groups, build_precision("fp32"), sp, moe_dispatcher=dispatcher)
    model = load_stage_model(str(folder), hf, config, groups, DEVICE, use_te=False)
    samples = make_samples(hf.vocab_size)
    expected = dense_logprobs(folder, hf.vocab_size)
    for packing, share in ((True, True), (True, False), (False, False)):
        sizes = [SampleSize(s.key[0], len(s.prompt_ids), len(s.token_ids)) for s in samples]
        rules = PackingRules(420, alignment, packing=packing, share_prompts=share)
        plan = plan_microbatches(sizes, groups.dp.size(), rules, hf.hidden_size)[groups.dp_rank]
        builder = MicroBatchBuilder(DEVICE, rules, 0, False, groups.cp.size(), groups.cp_rank)
        batches = [builder.build(micro, samples.__getitem__) for micro in plan]
        assert all(batch.tokens.shape[1] * groups.cp.size() <= rules.max_tokens for batch in batches)
        for batch, logprobs in zip(
            batches, compute_logprobs(model, model.chunks, batches, TEMPERATURE), strict=groups.is_last_stage
        ):
            for sequence, key in enumerate(batch.keys):
                rows = (batch.sequence_ids == sequence).nonzero()[:, 0]
                gaps = (logprobs[rows].double().cpu() - expected[key][batch.positions[rows].cpu()]).abs()
                assert bool((gaps <= TOLERANCE).all()), (
                    f"{folder.name} {layout} packing={packing} share={share} sample {key}: gap "
                    f"{gaps.max():.2e}"
                )
    stored = load_file(folder / "model.safetensors")
    weights = {row.parameter.untyped_storage().data_ptr() for row in model.named_rules()}
    exported, copied = {}, set()
    for name, tensor in WeightExporter(model, bucket_bytes=40_000).tensors():
        exported[name] = tensor.clone()
        copied |= set() if tensor.untyped_storage().data_ptr() in weights else {name}
    # nothing is gathered: only query, key and value lie otherwise
    if layout == "tp1pp1" and groups.world_size == groups.dp.size():
        assert all(re.search(r"\.[qkv]_proj\.", name) for name in copied), (
            f"{folder.name}: copied for nothing: {sorted(copied)}"
        )
    assert exported.keys() == stored.keys(), exported.keys() ^ stored.keys()
    for name, tensor in stored.items():
        assert torch.equal(exported[name].cpu(), tensor), (
            f"{folder.name} {layout}: {name} changed between import and export"
        )


def main() -> None:
    models, *layouts = sys.argv[1:]
    for layout in layouts:
        sizes = {name: int(size) for name, size in re.findall(r"(etp|ep|tp|cp|pp)(\d+)", layout)}
        groups = build_groups(ParallelLayout(int(os.environ["WORLD_SIZE"]), **sizes), timeout_seconds=120)
        for folder in sorted(Path(models).iterdir()):
            if runs_in(folder.name, layout, groups.world_size):
                with reported_case(f"{layout}:{folder.name}"):
                    check(folder, layout, sizes, groups)
        destroy_groups()


if __name__ == "__main__":
    main()
