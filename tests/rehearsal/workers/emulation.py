"""Models whose linear layers emulate float8, in one rank, beside the same in float32."""

import torch
from rehearse import case, run_cases
from small_models import DENSE, FP32, MOE, on

from megagrpo.models import emulation
from megagrpo.ops.emulated_linear import RECIPES
from megagrpo.ops.float8 import E4M3, quantize_blocks

MODELS = {"dense": DENSE, "experts": MOE}


def emulated(it, recipe):
    model = it.actor.model
    emulation.emulate_float8(model, recipe)
    linears = [
        (name, module)
        for name, module in model.chunks[0].named_modules()
        if isinstance(module, emulation.ColumnParallelLinear | emulation.RowParallelLinear)
    ]
    left = [name for name, module in linears if not hasattr(module, "operands")]
    return {"left": left, "changed": len(linears) - len(left), **it.update()}


for kind in MODELS:
    for recipe in ("fp32", *RECIPES):

        def run(kind=kind, recipe=recipe):
            if recipe == "fp32":
                return on(lambda it: it.update(), MODELS[kind], FP32, False, 32)
            return on(lambda it: emulated(it, recipe), MODELS[kind], FP32, False, 32)

        run.__name__ = f"{kind} {recipe}"
        case(run)


@case
def communication():
    """What a column-parallel linear asks of its group, and what it computes of what comes back."""
    linear = emulation._EmulatedColumns.__new__(emulation._EmulatedColumns)
    torch.nn.Module.__init__(linear)
    linear.operands = emulation.Float8Operands("fp8_blockwise")
    inputs, weight = torch.randn(4, 1, 256), torch.randn(128, 256)
    asked = []
    for name in ("gather_from_sequence_parallel_region", "copy_to_tensor_model_parallel_region"):
        setattr(
            emulation, name, lambda values, group, name=name: (asked.append((name, group)), 2 * values)[1]
        )
    expected = quantize_blocks(2 * inputs[:, 0], (1, 128), E4M3).dequantize()
    expected = expected @ quantize_blocks(weight, (128, 128), E4M3).dequantize().t() + 1.0
    close = []
    for sequence_parallel, allreduce in ((True, False), (False, True)):
        output = linear._forward_impl(
            input=inputs,
            weight=weight,
            bias=torch.ones(128),
            allreduce_dgrad=allreduce,
            sequence_parallel=sequence_parallel,
            tp_group="tp",
        )
        close.append(torch.allclose(output[:, 0], expected, atol=1e-4))
    return {"asked": asked, "close": close}


if __name__ == "__main__":
    run_cases()
