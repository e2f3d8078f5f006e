"""Reward `reward_model`: a sequence classifier scores prompt and completion, behind an endpoint or here."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from megagrpo.errors import UserError
from megagrpo.rewards.endpoint import Endpoint
from megagrpo.rewards.reward import REWARDS, check_choice
from megagrpo.types import Completion, Prompt

FORMS = ("vllm", "sglang")


@REWARDS.register("reward_model")
class RewardModel:
    """What a classifier says of prompt + completion: its raw output, of no scale of ours.

    Args:
        address: of a server with `/classify` (vLLM, SGLang); or
        path: an HF folder of `AutoModelForSequenceClassification`, which each worker loads
            (`rewards.memory_gib` must hold it).
        model: the model's name at the server.
        form: how the server is asked: `vllm` (`input`) or `sglang` (`text`).
        template: the text that is classified.
        label: which of several outputs is the score.
        concurrency: requests at a time, of one worker; with `path` the batch.
        key_variable, retries, seconds, cache: as `Endpoint` says.
    """

    scores_groups = True

    def __init__(
        self,
        address: str | None = None,
        path: str | None = None,
        model: str = "default",
        form: str = "vllm",
        template: str = "{prompt}{completion}",
        label: int = 0,
        concurrency: int = 8,
        key_variable: str | None = None,
        retries: int = 3,
        seconds: float = 60.0,
        cache: str | None = None,
    ):
        check_choice("reward_model", "form", form, FORMS)
        if (address is None) == (path is None):
            raise UserError("rewards.functions: 'reward_model': address or path: one of the two is needed")
        try:
            template.format(prompt="", completion="")
        except (KeyError, IndexError, ValueError) as error:
            raise UserError(
                f"rewards.functions: 'reward_model': template: {error}; {{prompt}} and {{completion}} are "
                "allowed"
            ) from None
        self._model, self._form, self._template = model, form, template
        self._label, self._concurrency = label, concurrency
        self._classifier = None if path is None else _load_classifier(path)
        if address is not None:
            self._endpoint = Endpoint("reward_model", address, key_variable, retries, seconds, cache)
            self._threads = ThreadPoolExecutor(concurrency, thread_name_prefix="reward_model")

    def __call__(self, prompt: Prompt, completion: Completion) -> float:
        """Return the score.

        Raises:
            ConnectionError: the server is away.
            ValueError: it answers no score.
        """
        return self.score_group([prompt], [completion])[0]

    def score_group(self, prompts: Sequence[Prompt], completions: Sequence[Completion]) -> list[float]:
        """Return the scores of several completions; raises as `__call__`."""
        texts = [
            self._template.format(prompt=prompt.text, completion=completion.text)
            for prompt, completion in zip(prompts, completions, strict=True)
        ]
        if self._classifier is None:
            return list(self._threads.map(self._ask, texts))
        outputs = self._classifier(texts, batch_size=self._concurrency)
        return [self._pick([each["score"] for each in output]) for output in outputs]

    def _ask(self, text: str) -> float:
        name = "input" if self._form == "vllm" else "text"
        answer = self._endpoint.ask("/classify", {"model": self._model, name: text})
        try:
            if self._form == "vllm":
                outputs = answer["data"][0]["probs"]
            else:
                outputs = (answer[0] if isinstance(answer, list) else answer)["embedding"]
        except (KeyError, IndexError, TypeError):
            raise ValueError(f"the reward model's answer has no score: {str(answer)[:200]}") from None
        return self._pick(outputs)

    def _pick(self, outputs: Sequence[Any]) -> float:
        if not isinstance(outputs, list) or not -len(outputs) <= self._label < len(outputs):
            raise ValueError(f"the reward model's outputs are {str(outputs)[:80]}; label is {self._label}")
        return float(outputs[self._label])


def _load_classifier(path: str) -> Any:
    """Return what maps texts to one list of raw outputs each, in the order of the labels."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer
    from transformers import pipeline as build_pipeline

    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        model = AutoModelForSequenceClassification.from_pretrained(path, local_files_only=True)
    except Exception as error:  # OSError, ValueError, KeyError, by what is broken
        raise UserError(
            f"rewards.functions: 'reward_model': path: {path}: {type(error).__name__}: "
            f"{' '.join(str(error).split())}"
        ) from error
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model.config.pad_token_id = tokenizer.pad_token_id
    order = {model.config.id2label[number]: number for number in range(model.config.num_labels)}
    pipeline: Any = build_pipeline("text-classification", model=model.eval(), tokenizer=tokenizer, top_k=None)

    def classify(texts: Sequence[str], batch_size: int) -> list[list[dict[str, Any]]]:
        outputs = pipeline(list(texts), function_to_apply="none", batch_size=batch_size)
        return [sorted(output, key=lambda each: order[each["label"]]) for output in outputs]

    return classify
