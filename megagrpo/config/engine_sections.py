"""The `engine:` and `weights:` sections: what is asked for depends on `engine.name` and
`weights.transport.kind`.

Each kind has a section of its own, so a field of another kind is unknown there.
"""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag, TypeAdapter, field_validator

from megagrpo.config.section import NonNegativeInt, PositiveFloat, PositiveInt, Section
from megagrpo.registry import is_code_place, suggestion

FP8_BLOCK = 128  # rows and columns of a block of a quantised weight

_OWN = "FILE.py:NAME"  # the tag of engines of the users


class ServerConfig(Section):
    """Servers of a rollout engine, in processes of their own."""

    python: str | None = Field(
        None,
        description="Python of the engine's environment; null: this one, else "
        ".engines/NAME of `make engines`",
    )
    replicas: PositiveInt = Field(1, description="servers that are started; they share the prompts")
    tensor_parallel: PositiveInt = Field(1, description="tensor parallel size of one replica")
    addresses: tuple[str, ...] = Field(
        (), description="servers that run already, as http://HOST:PORT: one replica each, none is started"
    )
    start_timeout_seconds: PositiveFloat = Field(
        540.0, description="a server that does not serve by then is an error"
    )
    request_timeout_seconds: PositiveFloat = Field(
        300.0,
        description="longest silence of a server that has requests; 12 times it while it gives signs of life",
    )
    max_restarts: NonNegativeInt = Field(
        3,
        description="times that a lost server is started anew, or taken back where it was not started here, "
        "over the whole run",
    )
    max_model_len: PositiveInt | None = Field(
        None, description="context of the server; null: data.max_prompt_tokens + rollout.max_new_tokens"
    )
    kv_cache_bytes: PositiveInt | None = Field(
        None, description="key/value cache of a replica; null: 1 GiB on CPUs, the engine's own on GPUs"
    )
    gpu_memory_fraction: Annotated[float, Field(gt=0, le=1)] = Field(
        0.85, description="of the GPU memory that the trainer's models leave free, what the server takes"
    )
    sleep_keeps_weights: bool = Field(
        False,
        description="under engine.sleep_while_training: keep the weights in host memory, for the changes of "
        "weights.delta; else they are dropped, and every publish brings all of them",
    )
    quantization: Literal["none", "fp8_block"] = Field(
        "none",
        description="the server's model; fp8_block: linear layers and experts in float8, one scale "
        "for 128 x 128 weights",
    )
    options: dict[str, Any] = Field(
        default_factory=dict, description="further server arguments: block_size: 32 becomes --block-size 32"
    )

    @property
    def num_replicas(self) -> int:
        """Servers of the run."""
        return len(self.addresses) or self.replicas


class SglangServerConfig(ServerConfig):
    """Servers of SGLang."""

    offline: bool = Field(
        False, description="the process holds sglang.Engine behind a small loop of ours, not SGLang's server"
    )


class _Engine(Section):
    """What every engine has."""

    max_batch_completions: PositiveInt = Field(256, description="completions decoded at once by one replica")
    max_prefill_tokens: PositiveInt = Field(
        8192, description="prompt tokens of one prefill batch, padding included"
    )
    sleep_while_training: bool = Field(
        False, description="give accelerator memory back during updates; for engines on the actor's devices"
    )

    @property
    def is_quantized(self) -> bool:
        """Whether servers hold the model in fewer bits than the trainer."""
        server = getattr(self, "server", None)
        return server is not None and server.quantization != "none"

    def narrows_logprobs(self, temperature: float, top_k: int, top_p: float) -> bool:
        """Whether log-probs of the engine are over the tokens that top_k and top_p keep; the actor's are over
        all, so the two cannot be compared.
        """
        return False

    @property
    def given_addresses(self) -> tuple[str, ...]:
        """Servers that run already; none of an engine in the ranks."""
        server = getattr(self, "server", None)
        return () if server is None else server.addresses


class TransformersConfig(_Engine):
    """The engine in the ranks."""

    name: Literal["transformers"] = "transformers"


class VllmConfig(_Engine):
    """vLLM."""

    name: Literal["vllm"] = "vllm"
    server: ServerConfig = ServerConfig()

    def narrows_logprobs(self, temperature: float, top_k: int, top_p: float) -> bool:
        """As `_Engine`: vLLM tells log-probs after temperature and filters (our choice), or before both."""
        before = self.server.options.get("logprobs_mode") == "raw_logprobs" and temperature == 1
        return (top_k > 0 or top_p < 1) and not before


class SglangConfig(_Engine):
    """SGLang."""

    name: Literal["sglang"] = "sglang"
    server: SglangServerConfig = SglangServerConfig()


class OwnEngineConfig(_Engine):
    """An engine of the user's, in the ranks or in servers as its class says."""

    name: str = Field(description="transformers, vllm, sglang, or FILE.py:NAME")
    server: ServerConfig = ServerConfig()

    @field_validator("name")
    @classmethod
    def _check_name(cls, name: str) -> str:
        if not is_code_place(name):
            known = [tag for tag in ENGINE_SECTIONS if tag != _OWN]
            raise ValueError(
                f"no engine is called {name!r}{suggestion(name, known)}; there are {', '.join(known)}, and "
                "your own as FILE.py:NAME"
            )
        return name


ENGINE_SECTIONS: dict[str, type[_Engine]] = {
    "transformers": TransformersConfig,
    "vllm": VllmConfig,
    "sglang": SglangConfig,
    _OWN: OwnEngineConfig,
}


def _kind_of_engine(value: Any) -> str:
    """Return the section that a raw or a validated `engine:` has; no name is transformers."""
    name = value.get("name", "transformers") if isinstance(value, Mapping) else getattr(value, "name", _OWN)
    return name if isinstance(name, str) and name in ENGINE_SECTIONS else _OWN


EngineConfig = Annotated[
    Annotated[TransformersConfig, Tag("transformers")]
    | Annotated[VllmConfig, Tag("vllm")]
    | Annotated[SglangConfig, Tag("sglang")]
    | Annotated[OwnEngineConfig, Tag(_OWN)],
    Discriminator(_kind_of_engine),
]

ServerEngineConfig = VllmConfig | SglangConfig | OwnEngineConfig


def build_engine_config(name: str = "transformers", **fields: Any) -> Any:
    """Return the `engine:` section of an engine, for programs that read no file.

    Args:
        name: the engine.
        fields: those of its section; `server` as a mapping or a section.

    Example:
        >>> build_engine_config("vllm", server={"replicas": 2}).server.num_replicas
        2
    """
    return TypeAdapter(EngineConfig).validate_python({"name": name, **fields})


class TransportConfig(Section):
    """How weights reach engine processes."""

    # disk has a section of its own; it is named here for the message about a kind that is none
    kind: Literal["auto", "shared_memory", "group", "ipc", "disk"] = Field(
        "auto",
        description="auto: ipc where engines are on the GPUs of their ranks; else shared_memory on one host, "
        "else group: straight to the engines' ranks",
    )


class DiskTransportConfig(Section):
    """Weights by files."""

    kind: Literal["disk"] = "disk"
    folder: str | None = Field(None, description="a folder that engines reach too; null: DIR/weights")


def _kind_of_transport(value: Any) -> str:
    kind = value.get("kind") if isinstance(value, Mapping) else getattr(value, "kind", None)
    return "disk" if kind == "disk" else "memory"


class WeightsConfig(Section):
    """How new weights reach the engines. From `layout` on: of engines in processes of their own only
    (vllm, sglang).
    """

    bucket_bytes: PositiveInt = Field(
        64 * 2**20,
        description="weights on their way at once; at most two of these are in memory, for each rank of an "
        "engine",
    )
    layout: Literal["auto", "full", "sharded"] = Field(
        "auto",
        description="full: whole tensors, cut by the engine's loader; sharded: each engine rank gets its "
        "slices alone; auto: sharded "
        "once a comparison with the loader's result, bit for bit, has passed, else full",
    )
    transport: Annotated[
        Annotated[TransportConfig, Tag("memory")] | Annotated[DiskTransportConfig, Tag("disk")],
        Discriminator(_kind_of_transport),
    ] = TransportConfig()
    delta: bool = Field(
        False,
        description="send only what changed since the engines' version, bitwise: blocks, or whole tensors "
        "under layout full",
    )
    probe_tokens: NonNegativeInt = Field(
        8,
        description="log-probs of this many tokens, sampled for each of four prompts, are compared with the "
        "trainer's before published weights serve; 0: none are",
    )
    probe_max_gap: PositiveFloat | None = Field(
        None,
        description="largest mean |engine - trainer| log-prob of a replica's tokens; null: 0.001 with "
        "precision fp32, else 0.25",
    )
