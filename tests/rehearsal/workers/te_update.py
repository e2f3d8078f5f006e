"""Updates on Transformer Engine's layers, in one rank."""

import te.install

te.install.install()
from rehearse import case, run_cases  # noqa: E402
from small_models import BF16, DENSE, FP32, MOE, on  # noqa: E402

from megagrpo.checkpoint.shards import ShardCollector  # noqa: E402


@case
def fp32_local():
    return on(lambda it: it.update(), DENSE, FP32, use_te=False)


@case
def fp32_te():
    return on(lambda it: it.update(), DENSE, FP32, use_te=True)


@case
def bf16_local():
    return on(lambda it: it.update(), DENSE, BF16, use_te=False)


@case
def bf16_te():
    return on(lambda it: it.update(), DENSE, BF16, use_te=True)


@case
def moe_local():
    return on(lambda it: it.update(), MOE, FP32, use_te=False)


@case
def moe_te():
    return on(lambda it: it.update(), MOE, FP32, use_te=True)


@case
def checkpoint_before_the_first_update():
    def collect(it):
        collector = ShardCollector(it.actor)
        collector.collect()
        state = next(iter(it.actor.optimizer.chained_optimizers)).optimizer.state
        return sorted(next(iter(state.values())))

    return on(collect, DENSE, BF16, use_te=True)


@case
def optimizer():
    return on(
        lambda it: type(it.actor.optimizer.chained_optimizers[0].optimizer).__module__, DENSE, BF16, True
    )


@case
def grouped_experts():
    """The names by which the rules know the weights of a grouped linear, and that they are grouped."""

    def act(it):
        names = [row[0] for row in it.actor.model.named_rules() if "layers.1.mlp.experts" in row[0]]
        experts = type(it.actor.model.chunks[0].decoder.layers[1].mlp.experts).__name__
        return {"experts": experts, "names": sorted(name.split("experts.", 1)[1] for name in names)}

    return on(act, MOE, BF16, use_te=True)


@case
def weight_gradients_in_float32():
    """Where the gradient of a decoder weight is after two micro-batches that share it."""

    def act(it):
        it.forward_backward()
        rows = [row for row in it.actor.model.named_rules() if "linear_qkv.weight" in row[0]]
        weight = rows[0][-1]
        exact = weight.main_grad == weight.main_grad.bfloat16().float()
        return {"dtype": str(weight.main_grad.dtype), "bfloat16_values": float(exact.float().mean())}

    return on(act, DENSE, BF16, use_te=True)


if __name__ == "__main__":
    run_cases()
