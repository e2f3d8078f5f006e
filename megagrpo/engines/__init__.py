"""Rollout engines by name. Each is imported when it is first asked for: none pulls in the others'
packages.
"""

from megagrpo.engines.base import ENGINES, Engine


@ENGINES.register("sglang")
def _sglang(*args, **options) -> Engine:
    from megagrpo.engines.server.sglang import SglangEngine

    return SglangEngine(*args, **options)


@ENGINES.register("vllm")
def _vllm(*args, **options) -> Engine:
    from megagrpo.engines.server.vllm import VllmEngine

    return VllmEngine(*args, **options)


@ENGINES.register("transformers")
def _transformers(*args, **options) -> Engine:
    from megagrpo.engines.embedded.transformers import TransformersEngine

    return TransformersEngine(*args, **options)
