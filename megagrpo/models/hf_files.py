"""Reads a rank's slices of the tensors in an HF folder."""

import re
from pathlib import Path
from typing import Any

import torch

from megagrpo.errors import UserError
from megagrpo.models.carried_tensors import is_carried
from megagrpo.models.family import checkpoint_tensors
from megagrpo.models.rules import Dimensions, ParameterRule, Size, merge
from megagrpo.models.safetensors_folder import TIED_HEAD, SafetensorsFolder
from megagrpo.models.stacked_experts import StackedExpertSlice, stacked_rules
from megagrpo.models.stage import StageModel


def open_tensor(
    source: SafetensorsFolder, rule: ParameterRule, place: int, layer: int | None, expert: int | None
) -> Any:
    """Return one of the HF tensors of a rule, lazily read, stored by itself or with those of other experts.

    Raises:
        UserError: it is not there, or its shape is not the one that follows from config.json.
    """
    name = rule.hf_names(layer, expert)[place]
    stacked = rule.stacked.format(layer=layer)
    if expert is not None and name not in source.names() and stacked in source.names():
        tensor: Any = StackedExpertSlice(source.tensor_slice(stacked), rule, expert, place)
    else:
        tensor = source.tensor_slice(name)
    found, expected = list(tensor.get_shape()), rule.shapes[place]
    if found != list(expected):
        sizes = [f"{size} ({size.fields})" if isinstance(size, Size) else str(size) for size in expected]
        raise UserError(f"model.path: {name}: shape {found}, by config.json it is [{', '.join(sizes)}]")
    return tensor


def read_part(tensor: Any, rule: ParameterRule, dims: Dimensions, tp: int, tp_rank: int) -> torch.Tensor:
    """Read one (expert) tensor parallel rank's slice of an HF tensor; vocabulary rows beyond the true size
    are zeros.
    """
    shape = tensor.get_shape()
    if rule.split_dimension is None:
        return tensor[:]
    size = dims.padded_vocab_size if rule.kind == "vocab" else shape[rule.split_dimension]
    start, stop = size // tp * tp_rank, size // tp * (tp_rank + 1)
    if rule.split_dimension == 1:
        return tensor[:, start:stop]
    if rule.kind != "vocab":
        return tensor[start:stop]
    rows = tensor[min(start, shape[0]) : min(stop, shape[0])]
    return torch.cat([rows, rows.new_zeros(stop - start - rows.shape[0], shape[1])])


def load_hf_weights(model: StageModel, folder: str | Path) -> None:
    """Fill a stage model from an HF folder; each rank reads its slices only.

    Raises:
        UserError: a file or tensor is missing, truncated, unknown to the rules, of another shape, or holds
            values that are not finite.
    """
    source = SafetensorsFolder(folder)
    with torch.no_grad():
        for _, rule, layer, expert, parameter in model.named_rules():
            shards, shard = model.shard(rule)
            parts = []
            for place, name in enumerate(rule.hf_names(layer, expert)):
                part = read_part(
                    open_tensor(source, rule, place, layer, expert), rule, model.dims, shards, shard
                )
                # NaN passes through aminmax
                if part.numel() and not all(torch.isfinite(bound) for bound in torch.aminmax(part)):
                    raise UserError(f"model.path: {folder}: tensor {name} holds values that are not finite")
                parts.append(part)
            value = merge(rule, parts, model.dims, shards)
            assert value.shape == parameter.shape, f"{rule.megatron}: {value.shape}, {parameter.shape}"
            parameter.copy_(value)


def check_no_unknown_tensors(model: StageModel, folder: str | Path) -> None:
    """Refuse an HF folder that holds tensors which no rule reads: they would be dropped silently.

    Raises:
        UserError: names the first of them.
    """
    source = SafetensorsFolder(folder)
    known = {tensor.name for tensor in checkpoint_tensors(model.hf)} | stacked_rules(model.hf).keys()
    # some exports store the tied head twice
    ignored = {TIED_HEAD} if model.hf.tie_word_embeddings else set()
    unknown = {
        name
        for name in source.names() - known - ignored
        if not name.endswith("rotary_emb.inv_freq") and not is_carried(name, model.hf.raw)
    }
    if unknown:
        first = min(unknown)
        layer = re.search(r"\.layers\.(\d+)\.", first)
        says = "a field of config.json may say that it is not there"
        if layer and int(layer[1]) >= model.hf.num_layers:
            says = f"config.json says num_hidden_layers {model.hf.num_layers}"
        raise UserError(
            f"model.path: {folder}: {len(unknown)} tensors that family {model.hf.model_type!r} does not "
            f"know, first: {first} ({says})"
        )
    if ignored & source.names():
        check_tied(model, source)


def check_tied(model: StageModel, source: SafetensorsFolder) -> None:
    """Refuse a stored head that differs from the embedding, where config.json says that they are one.
    Each rank compares a part of the rows.

    Raises:
        UserError: they differ in this rank's part.
    """
    tied = next(rule for rule in model.rules.rules if rule.is_tied_copy)
    head, embedding = source.tensor_slice(TIED_HEAD), source.tensor_slice(tied.hf[0])
    rows, groups = model.hf.vocab_size, model.groups
    start, stop = (rows * place // groups.world_size for place in (groups.rank, groups.rank + 1))
    if head.get_shape() != embedding.get_shape() or not torch.equal(head[start:stop], embedding[start:stop]):
        raise UserError(
            f"model.path: {source.folder}: tie_word_embeddings: true contradicts the tensors: {TIED_HEAD} "
            f"and {tied.hf[0]} differ"
        )
