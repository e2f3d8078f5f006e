"""The probe of a new version: right log-probs pass, a replica that is wrong is named."""

import re
from pathlib import Path

from megagrpo.device import device as device_module

DEVICE = device_module.setup()

import numpy as np  # noqa: E402
import torch  # noqa: E402
from transformers import AutoModelForCausalLM  # noqa: E402

from megagrpo.config.training_sections import OptimizerConfig, ParallelConfig  # noqa: E402
from megagrpo.models.hf_config import read_hf_config  # noqa: E402
from megagrpo.models.load_stage import load_stage_model  # noqa: E402
from megagrpo.models.precision import build_precision  # noqa: E402
from megagrpo.models.transformer_config import build_transformer_config  # noqa: E402
from megagrpo.parallel.alignment import token_alignment  # noqa: E402
from megagrpo.policy.actor import Actor  # noqa: E402
from megagrpo.policy.batch import MicroBatchBuilder  # noqa: E402
from megagrpo.policy.microbatches import PackingRules  # noqa: E402
from megagrpo.types import Completion, Prompt  # noqa: E402
from megagrpo.weights.probe import LogprobProbe  # noqa: E402
from megagrpo.weights.publisher import PublishError  # noqa: E402


class SamplingEngine:
    """Returns fixed tokens with their dense log-probs by transformers, and can be wrong about one of them."""

    def __init__(self, folder: Path, replica: int):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.replica, self.error = replica, 0.0
        self.asked, self.wrong_until = 0, 10**9

    def sample_probe(self, prompt, sampling):
        self.asked += 1
        tokens = np.arange(sampling.max_new_tokens) * 7 + self.replica
        ids = torch.tensor([[*prompt.token_ids, *tokens.tolist()]])
        with torch.no_grad():
            logprobs = self.model(ids).logits[0, len(prompt.token_ids) - 1 : -1].double().log_softmax(-1)
        values = logprobs[torch.arange(len(tokens)), torch.tensor(tokens)].float().numpy()
        if self.asked <= self.wrong_until:
            values[2] += self.error
        return Completion.sampled(prompt.id, 0, tokens, values, "length", ((0, 1),), "")


def check_probe(folder: Path, layout: str, groups, sizes: dict[str, int]) -> None:
    """Right log-probs pass in every layout; a replica that is wrong twice is named on every rank."""
    hf = read_hf_config(folder)
    sp = groups.tp.size() > 1 and hf.num_experts is not None
    config = build_transformer_config(hf, groups, build_precision("fp32"), sp)
    actor = Actor(load_stage_model(str(folder), hf, config, groups, DEVICE, use_te=False), OptimizerConfig())
    rules = PackingRules(
        512,
        token_alignment(ParallelConfig(**sizes, sp=sp), "fp32"),
        True,
        True,
        groups.layout.min_microbatches,
    )
    builder = MicroBatchBuilder(DEVICE, rules, 0, False, groups.cp.size(), groups.cp_rank)
    replica, is_owner = groups.rank // 2, groups.rank % 2 == 0
    engine = SamplingEngine(folder, replica)
    prompts = [Prompt(number, "", tuple(range(3 + number, 9 + 2 * number))) for number in (3, 8)]
    probe = LogprobProbe(actor, builder, engine, replica, is_owner, prompts, 6, 1e-3)
    found = probe(5, [0, 1])
    assert found["publish/probe_gap"] <= found["publish/probe_gap_max"] < 2e-5, f"{layout}: {found}"
    assert found["publish/probe_retries"] == 0
    # One of 6 tokens of each completion is off: a mean of a sixth. 0.005 / 6 passes, its maximum would not.
    engine.error = 0.005 if replica == 1 else 0.0
    found = probe(6, [0, 1])
    assert abs(found["publish/probe_gap_max"] - 0.005) < 2e-5 and found["publish/probe_retries"] == 0
    assert abs(found["publish/probe_gap"] - 0.005 / 6) < 2e-5, f"{layout}: {found}"
    engine.error, engine.wrong_until = (0.06 if replica == 1 else 0.0), engine.asked + len(prompts)
    found = probe(7, [0, 1])  # right when it is asked again
    assert found["publish/probe_retries"] == 1 and abs(found["publish/probe_gap"] - 0.01) < 2e-5
    engine.wrong_until = 10**9
    for error, pattern in ((0.06, r"1\.00\de-02"), (float("nan"), "nan")):
        engine.error = error if replica == 1 else 0.0
        try:
            probe(8, [0, 1])
        except PublishError as failure:
            expected = (
                rf"weight version 8: probe: replica 1: the mean gap {pattern} is above .*, twice; "
                r"largest: token 15 at position 2 of prompt [38]:"
            )
            assert re.search(expected, str(failure)), str(failure)
        else:
            raise AssertionError(f"{layout}: an error of {error} passed the probe")
