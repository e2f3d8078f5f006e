"""Fixtures that several suites share: tiny HF folders, made on the fly."""

import string

import pytest
from hypothesis import settings

# A busy machine is slow, not wrong: no example has a time limit of its own.
settings.register_profile("without_deadlines", deadline=None)
settings.load_profile("without_deadlines")

CHARACTERS = string.digits + string.ascii_lowercase + " +-=>,.:?\n"
SPECIAL_TOKENS = ["<pad>", "<bos>", "<eos>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}{% if add_generation_prompt "
    "%}assistant: {% endif %}"
)
SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}


def build_character_tokenizer():
    """Return a fast tokenizer with one token per character, 49 in all: ids 0 to 2 are <pad>, <bos>, <eos>."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {token: index for index, token in enumerate(SPECIAL_TOKENS + list(CHARACTERS))}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>", eos_token="<eos>"
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def build_tiny_model(family: str = "qwen3", **overrides):
    """Return a random two-layer HF causal LM of `family` (llama, qwen2, qwen3, qwen3_moe), float32;
    overrides go to its config.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = SHAPE | {"vocab_size": len(SPECIAL_TOKENS) + len(CHARACTERS), "tie_word_embeddings": False}
    # wide: far from uniform outputs
    fields |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2}
    if family.startswith("qwen3"):
        fields |= {"head_dim": 16}
    if family == "qwen3_moe":
        fields |= {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "norm_topk_prob": True,
        }
    config = AutoConfig.for_model(family, **(fields | overrides))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1234)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for parameter in model.parameters():
            if parameter.ndim == 1:  # norms start at 1 and biases at 0, which would hide a mix-up of them
                parameter.data += 0.1 * torch.randn_like(parameter)
    return model


@pytest.fixture(scope="session")
def tiny_hf_folder(tmp_path_factory):
    """A function (family="qwen3", **config overrides) -> Path of an HF folder with a tiny random model and
    a character tokenizer.
    """
    made = {}

    def make(family: str = "qwen3", **overrides):
        key = (family, tuple(sorted(overrides.items())))
        if key not in made:
            folder = tmp_path_factory.mktemp(f"{family}_{len(made)}")
            build_tiny_model(family, **overrides).save_pretrained(folder)
            build_character_tokenizer().save_pretrained(folder)
            made[key] = folder
        return made[key]

    return make


@pytest.fixture(scope="session")
def character_tokenizer():
    """The character tokenizer of `tiny_hf_folder`."""
    return build_character_tokenizer()


@pytest.fixture(scope="session")
def tiny_model():
    """A function (family="qwen3", **config overrides) -> the model in that family's `tiny_hf_folder`, with
    plain attention.
    """
    return build_tiny_model


@pytest.fixture(scope="module")
def one_rank():
    """A process group of one rank, for the tests of one file: what comes after it finds none."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()
