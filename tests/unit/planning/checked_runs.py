"""A small model, machines with and without a GPU, and what the checks say of a run there."""

from megagrpo.config.hardware import Hardware
from megagrpo.config.load import load_config
from megagrpo.planning.checks import check_config

MODEL = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 1024,
    "vocab_size": 100,
}


NO_GPU = Hardware(torch_cuda=None, nvidia_device=False, transformer_engine=False)


FULL_GPU = Hardware(torch_cuda="13.0", nvidia_device=True, transformer_engine=True)


def problems_of(run_file, *overrides, world_size=1, model=MODEL, hardware=NO_GPU):
    return check_config(load_config(run_file, list(overrides)), world_size, model, hardware)
