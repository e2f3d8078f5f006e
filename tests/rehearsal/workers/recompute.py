"""What each choice of `update.recompute` keeps for the backward pass, in one rank."""

import te.install

te.install.install()
import torch  # noqa: E402
from rehearse import case, run_cases  # noqa: E402
from small_models import BF16, DENSE, FP32, MOE, on  # noqa: E402


def kept(it):
    """Bytes of tensors that are no parameters and wait for the backward pass when the forward pass has ended,
    calls of the first layer's attention, and the gradients' norm.
    """
    actor, storages, calls = it.actor, {}, []
    weights = {parameter.untyped_storage().data_ptr() for *_, parameter in actor.model.named_rules()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            storages[storage._cdata] = storage  # what is computed again is emptied later
        return tensor

    chunk = actor.model.chunks[0]
    forward, waiting = chunk.forward, []

    def counted(*arguments, **options):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = forward(*arguments, **options)
        waiting.append(sum(storage.nbytes() for storage in storages.values()))
        return output

    chunk.forward = counted
    attention = chunk.decoder.layers[0].self_attention.core_attention
    attention.register_forward_pre_hook(lambda *_: calls.append(1))
    it.forward_backward()
    norm = actor.apply_gradients(0.0).grad_norm
    return {"bytes": max(waiting), "attention_calls": len(calls), "grad_norm": norm}


for spec, model, precision, use_te, choices in (
    ("local", DENSE, FP32, False, ["none", "full", "core_attn", "layernorm", "mlp"]),
    ("te dense", DENSE, BF16, True, ["none", "full", "mlp"]),
    ("te experts", MOE, BF16, True, ["none", "full", "moe_act", "layernorm"]),
):
    for choice in choices:

        def run(model=model, precision=precision, use_te=use_te, choice=choice):
            return on(kept, model, precision, use_te, recompute=[choice] if choice != "none" else [])

        run.__name__ = f"{spec} {choice}"
        case(run)

if __name__ == "__main__":
    run_cases()
