"""Makes `import transformer_engine.pytorch` work on a CPU. To be called before megatron.core is imported."""

import contextlib
import importlib
import importlib.machinery
import os
import re
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch

import te.attention
import te.gemm
import te.permutation
from megagrpo.device import device
from te.enums import ENUMS
from te.registry import KERNELS

VERSION = "2.11.0"  # what Megatron-core 0.16.1 asks for (>=2.9, <2.12); the stand-ins belong to it
FOLDER = Path(sys.prefix, "rehearsal", "transformer_engine_python")  # filled by `make test`
# Named when Transformer Engine is imported, not needed by what is rehearsed.
NAMED_ONLY = [
    *("triton", "triton.language", "triton.language.core", "triton.language.standard"),
    *("einops", "onnx", "onnx.defs", "onnxscript", "onnxscript.onnx_types"),
]
ANSWERS = {
    "get_cublasLt_version": 130000,
    "get_cudnn_version": 91400,
    "get_num_cublas_streams": 4,
    "device_supports_multicast": False,
    "ubuf_built_with_mpi": False,
    "get_stream_priority_range": (-5, 0),
}


def missing() -> str | None:
    """Return why Transformer Engine cannot be rehearsed on this machine; None where it can."""
    if (FOLDER / f"transformer_engine-{VERSION}.dist-info").is_dir():
        return None
    return f"no Python code of Transformer Engine {VERSION} in {FOLDER}: `make test` fetches it"


class Binding(types.ModuleType):
    """`transformer_engine_torch`: a kernel that has no stand-in raises NotImplementedError when called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name[0].isupper():
            value: Any = type(name, (), {})
        else:

            def value(*args: Any, **kwargs: Any) -> None:
                raise NotImplementedError(f"transformer_engine_torch.{name} is not rehearsed")

        setattr(self, name, value)
        return value


class _NamedOnly(types.ModuleType):
    __version__ = "3.0.0"
    __path__: tuple = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return MagicMock()


def _build_binding() -> Binding:
    binding = Binding("transformer_engine_torch")
    binding.__spec__ = importlib.machinery.ModuleSpec(binding.__name__, None)
    binding.FP8TensorMeta = type("FP8TensorMeta", (), {})
    for name, value in {**ENUMS, **KERNELS, **{n: _constant(v) for n, v in ANSWERS.items()}}.items():
        setattr(binding, name, value)
    # `from transformer_engine_torch import *` takes what __all__ names, and never asks __getattr__
    sources = (FOLDER / "transformer_engine" / "pytorch").rglob("*.py")
    used = {name for path in sources for name in re.findall(r"\btex\.([a-z]\w+)", path.read_text())}
    binding.__all__ = sorted(used | {name for name in vars(binding) if not name.startswith("_")})
    return binding


def _constant(value: Any) -> Callable:
    return lambda *args, **kwargs: value


def _is_called_by_te() -> bool:
    return sys._getframe(2).f_globals.get("__name__", "").startswith("transformer_engine")


def _answer_as_hopper() -> None:
    """Let Transformer Engine's own code, and nobody else's, believe in a GPU."""
    real_is_cuda, real_available = torch._C.TensorBase.is_cuda, torch.cuda.is_available
    torch.Tensor.is_cuda = property(lambda self: True if _is_called_by_te() else real_is_cuda.__get__(self))
    torch.cuda.is_available = lambda: True if _is_called_by_te() else real_available()
    properties = types.SimpleNamespace(
        major=9, minor=0, multi_processor_count=132, total_memory=80 << 30, name="rehearsal"
    )
    torch.cuda.get_device_properties = _constant(properties)
    torch.cuda.get_device_capability = _constant((9, 0))
    torch.cuda.is_current_stream_capturing = _constant(False)
    torch.cuda.device = lambda device: contextlib.nullcontext()
    torch.version.cuda = torch.version.cuda or "13.0"  # the blockwise recipe asks for 12.9 or later


@contextlib.contextmanager
def _no_coalescing(group: Any = None, device: Any = None, async_ops: bool = False) -> Iterator[Any]:
    """gloo has no coalescing (blockwise all-gathers ask for it): the collectives inside run at once."""
    yield types.SimpleNamespace(wait=lambda: None, append=lambda work: None)


def install() -> None:
    """Make Transformer Engine importable and computing, for this whole process."""
    # NVTE_PROJECT_BUILDING: `transformer_engine.common` looks for no shared library while it is imported.
    os.environ.update(NVTE_PROJECT_BUILDING="1", NVTE_FRAMEWORK="none", NVTE_TORCH_COMPILE="0")
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    importlib.import_module("torch._inductor")  # before there is a triton without its parts
    sys.path.insert(0, str(FOLDER))
    sys.modules["transformer_engine_torch"] = _build_binding()
    sys.modules.update({name: _NamedOnly(name) for name in NAMED_ONLY})
    import transformer_engine.common as common

    common.load_framework_extension = _constant(None)
    _answer_as_hopper()
    distributed = torch.distributed
    distributed._coalescing_manager = distributed.distributed_c10d._coalescing_manager = _no_coalescing
    pytorch = importlib.import_module("transformer_engine.pytorch")
    for function in te.permutation.FUNCTIONS:  # megatron.core imports them from the second
        setattr(pytorch, function.__name__, function)
        setattr(pytorch.permutation, function.__name__, function)
    os.environ.pop("NVTE_PROJECT_BUILDING")
    for name in NAMED_ONLY:  # nobody else may take them for installed
        del sys.modules[name]
    device.setup()  # before anything imports megatron.core, which looks for transformer_engine then
