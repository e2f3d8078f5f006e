"""Rollout engines by name. Each is imported when it is first built: none pulls in the others' packages."""

from dataclasses import dataclass
from importlib import import_module
from typing import Any

from megagrpo.engines.base import ENGINES, Engine


@dataclass(frozen=True)
class _Factory:
    """An engine that is imported when it is built."""

    module: str
    attribute: str
    is_embedded: bool

    def __call__(self, *arguments: Any, **options: Any) -> Engine:
        return getattr(import_module(self.module), self.attribute)(*arguments, **options)


_START = "megagrpo.engines.server.start"
ENGINES.register("sglang")(_Factory(_START, "start_sglang", is_embedded=False))
ENGINES.register("vllm")(_Factory(_START, "start_vllm", is_embedded=False))
ENGINES.register("transformers")(
    _Factory("megagrpo.engines.embedded.transformers_engine", "TransformersEngine", is_embedded=True)
)
