"""What a run reads, and checks, before its ranks meet: the model's configuration, the algorithm, tokenizer
and prompts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megagrpo.algorithms.algorithm import Algorithm
from megagrpo.checkpoint.identity import check_own_config
from megagrpo.config.model_folder import hf_folder_of, write_model_folder
from megagrpo.config.rollout_sections import EvaluationSetConfig
from megagrpo.config.schema import Config
from megagrpo.models.family import HFConfig
from megagrpo.models.hf_config import read_hf_config
from megagrpo.models.precision import Precision, build_precision
from megagrpo.models.spec import uses_transformer_engine
from megagrpo.rollout.prompts import PromptSource, load_prompts, prompts_by_field
from megagrpo.rollout.tokenisation import check_tokenizer, load_tokenizer
from megagrpo.types import Prompt


@dataclass(frozen=True)
class RunInputs:
    """What a run is made of, on every rank alike."""

    hf_folder: Path
    hf: HFConfig
    precision: Precision
    use_te: bool
    algorithm: Algorithm
    tokenizer: Any
    source: PromptSource
    evaluation_prompts: list[tuple[EvaluationSetConfig, list[Prompt]]]

    @property
    def prompts(self) -> dict[str, Sequence[Prompt]]:
        """The prompts of each data set, by the field that names the set."""
        return prompts_by_field(self.source, self.evaluation_prompts)


def read_inputs(config: Config, note: Callable[[str], None]) -> RunInputs:
    """Read and check all that a run starts from.

    Args:
        note: told what the user should know of the data, line by line.

    Raises:
        UserError: anything about the model, the tokenizer or the data that the user can mend.
    """
    precision = build_precision(config.precision.recipe, config.precision.emulate)
    if config.model.changed_fields:
        for line in write_model_folder(config.model, Path(config.model_folder)):
            note(line)
    hf_folder = hf_folder_of(config.model_folder)
    hf = read_hf_config(hf_folder, config.model.family)
    use_te = uses_transformer_engine(config.model.attention, precision.params_dtype, hf.has_latent_attention)
    check_own_config(config.model_folder, hf, config.model.changed_fields)
    algorithm = Algorithm(
        config.algorithm, config.rollout.completions_per_prompt, config.rollout.max_new_tokens
    )
    tokenizer = load_tokenizer(config.model)
    check_tokenizer(tokenizer, hf.vocab_size)
    source, evaluation_prompts = load_prompts(
        config.data,
        config.evaluation.sets,
        config.rollout.max_new_tokens,
        tokenizer,
        hf.max_position_embeddings,
        note,
    )
    return RunInputs(hf_folder, hf, precision, use_te, algorithm, tokenizer, source, evaluation_prompts)
