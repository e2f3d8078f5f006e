"""How the layers are cut into pipeline chunks: even, with other first and last stages, or written out. Pure
arithmetic.

A stage holds `vpp` chunks under interleaving, one otherwise; chunk k of the model is on stage k % pp. The
written form is Megatron's: E embedding, t layer, L loss, | between chunks, `t*3` and `(tt|)*2` repeat.

    pp 2, vpp 2:   Et|tt|t|tL    stage 0: Et and t, stage 1: tt and tL
"""

import re
from collections.abc import Iterator


def expand_pipeline_layout(text: str) -> list[str]:
    """Return the chunks of a written layout, repetitions unrolled: `Et|(t|)*2tL` gives Et, t, t, tL."""
    text = text.replace(",", "").replace(" ", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(pattern, lambda found: found.group(1) * int(found.group(2)), text)
    return text.split("|")


def split_layers(num_layers: int, pp: int, vpp: int, first: int | None, last: int | None) -> list[int]:
    """Return the layers of each chunk in the model's order; the sizes have passed `check_split`."""
    middle = pp - (first is not None) - (last is not None)
    each = (num_layers - (first or 0) - (last or 0)) // middle if middle else 0
    stages = [each] * pp
    if first is not None:
        stages[0] = first
    if last is not None:
        stages[-1] = last
    return [layers // vpp for layers in stages] * vpp


def check_split(
    num_layers: int, pp: int, vpp: int | None, first: int | None, last: int | None
) -> Iterator[str]:
    """Yield what does not divide in a split by numbers, with the arithmetic."""
    ends = [
        (name, layers)
        for name, layers in (("layers_first_stage", first), ("layers_last_stage", last))
        if layers is not None
    ]
    if ends and pp == 1:
        yield f"{' and '.join(f'{name} {layers}' for name, layers in ends)} needs pp > 1"
        return
    chunks, middle, rest = vpp or 1, pp - len(ends), num_layers - sum(layers for _, layers in ends)
    if not ends:
        sizes = f"pp {pp}" if vpp is None else f"pp {pp} * vpp {vpp} = {pp * vpp}"
        if num_layers % (pp * chunks):
            yield (
                f"{num_layers} layers are not a multiple of {sizes}: {num_layers} / {pp * chunks} = "
                f"{num_layers / (pp * chunks):g}"
            )
        return
    taken = " - ".join(f"{layers} ({name})" for name, layers in ends)
    if middle == 0 and rest:
        yield f"{num_layers} layers - {taken} = {rest}, but no stage is left for them"
    elif rest < middle * chunks:
        yield (
            f"{num_layers} layers - {taken} = {rest}, too few for {middle} middle stages of at least {chunks}"
        )
    elif middle and rest % (middle * chunks):
        each = f"{middle} middle stages" if vpp is None else f"{middle} middle stages * vpp {vpp}"
        share = f"{rest} / {middle * chunks} = {rest / (middle * chunks):g}"
        yield f"{num_layers} layers - {taken} = {rest} are not a multiple of {each}: {share}"
    yield from (
        f"{name} {layers} is not a multiple of vpp {vpp}: {layers} / {vpp} = {layers / chunks:g}"
        for name, layers in ends
        if layers % chunks
    )


def check_pipeline_layout(text: str, num_layers: int | None, pp: int, vpp: int | None) -> Iterator[str]:
    """Yield what is wrong with a written layout, with the arithmetic."""
    chunks = expand_pipeline_layout(text)
    flat = "".join(chunks)
    unknown = sorted(set(flat) - set("EtL"))
    if unknown:
        yield (
            f"pipeline_layout {text!r}: {', '.join(map(repr, unknown))} is not a layer; E is the "
            "embedding, t a layer, L the loss, | cuts"
        )
        return
    if flat.count("E") != 1 or flat.count("L") != 1 or not flat.startswith("E") or not flat.endswith("L"):
        yield f"pipeline_layout {text!r}: must begin with its only E and end with its only L"
    sizes = f"pp {pp}" if vpp is None else f"pp {pp} * vpp {vpp} = {pp * vpp}"
    if len(chunks) != pp * (vpp or 1):
        yield f"pipeline_layout {text!r}: has {len(chunks)} chunks, {sizes}"
    if num_layers is not None and flat.count("t") != num_layers:
        yield f"pipeline_layout {text!r}: has {flat.count('t')} layers, the model {num_layers}"
