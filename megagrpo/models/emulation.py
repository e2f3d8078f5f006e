"""`precision.emulate`: every linear layer of a stage computes with float8 operands, on any device."""

import torch
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)

from megagrpo.models.stage import StageModel
from megagrpo.ops.emulated_linear import Float8Operands, emulated_linear


class _EmulatedColumns(ColumnParallelLinear):
    operands: Float8Operands

    def _forward_impl(
        self, input, weight, bias, allreduce_dgrad, sequence_parallel, tp_group, **unused
    ) -> torch.Tensor:
        if sequence_parallel:
            input = gather_from_sequence_parallel_region(input, group=tp_group)
        elif allreduce_dgrad:
            input = copy_to_tensor_model_parallel_region(input, group=tp_group)
        output = emulated_linear(input, weight, self.operands)
        return output if bias is None else output + bias


class _EmulatedRows(RowParallelLinear):
    operands: Float8Operands

    def _forward_impl(self, input, weight, **unused) -> torch.Tensor:
        return emulated_linear(input, weight, self.operands)


_EMULATED: dict[type, type] = {ColumnParallelLinear: _EmulatedColumns, RowParallelLinear: _EmulatedRows}


def emulate_float8(model: StageModel, recipe: str) -> StageModel:
    """Let the linear layers of the decoder, experts included, compute as `recipe` does; return the model.

    The embedding, the output layer, norms, routers and attention itself stay as they are, as in the recipe on
    a GPU. Parameters, their names and what is sent between ranks stay too. A tensor parallel rank scales
    its own part, as there.
    """
    for chunk in model.chunks:
        for module in chunk.decoder.modules():
            if type(module) in _EMULATED:
                module.__class__ = _EMULATED[type(module)]
                module.operands = Float8Operands(recipe)
    return model
