"""Lets Megatron-core run on CPU ranks over gloo, without CUDA, Transformer Engine, Apex or Triton.

Two layers, both absent where CUDA is available:

* `install()`: once per process, before megatron.core is first imported. Gives a meaning to the `torch.cuda.*`
  calls that raise without CUDA anyway, so nothing that worked before changes; then applies `megatron_fixes`.
* `region()`: a context manager around Megatron code. Redirects `device="cuda"`, `.cuda()`, `Tensor.type()`
  names and `pin_memory` to the CPU. Other libraries in the process (transformers, the engines) are untouched
  outside it. It costs about 4 us per torch call. The mode is per thread; the CPU backward runs in the calling
  thread, and a backward that starts in a region is covered (`_cover_backward`).
"""

import contextlib
import functools
import importlib.util
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode

CPU = torch.device("cpu")
_TYPE, _CUDA, _TO = torch.Tensor.type, torch.Tensor.cuda, torch.Tensor.to
_installed = False
_regions = threading.local()  # .depth: regions that this thread is in


def _is_cuda(device: object) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return (isinstance(device, str) and device.startswith("cuda")) or type(device) is int


class CudaToCpu(TorchFunctionMode):
    """Sends every torch call that names a CUDA device to the CPU."""

    def __enter__(self) -> "CudaToCpu":
        """Start the region on this thread."""
        _regions.depth = getattr(_regions, "depth", 0) + 1
        return super().__enter__()

    def __exit__(self, *exception: Any) -> None:
        """End the region."""
        _regions.depth -= 1
        super().__exit__(*exception)

    def __torch_function__(
        self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        """Rewrite the arguments of one torch call."""
        if kwargs:
            if _is_cuda(kwargs.get("device")):
                kwargs["device"] = CPU
            if kwargs.get("pin_memory"):
                kwargs["pin_memory"] = False
        if func is _TYPE:
            # Megatron compares type names with 'torch.cuda.FloatTensor' and casts to them.
            if len(args) == 1 and not kwargs:
                return func(*args).replace("torch.", "torch.cuda.")
            if len(args) > 1 and isinstance(args[1], str):
                args = (args[0], args[1].replace("torch.cuda.", "torch."), *args[2:])
        elif func is _CUDA:
            return args[0]
        elif func is _TO and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], CPU, *args[2:])
        return func(*args, **(kwargs or {}))


class _NullStream:
    """A CUDA stream that has always finished."""

    def __init__(self, *args: Any, **kwargs: Any) -> None: ...
    def wait_stream(self, *args: Any) -> None: ...
    def wait_event(self, *args: Any) -> None: ...
    def synchronize(self) -> None: ...
    def wait(self, *args: Any) -> None: ...

    def record_event(self, *args: Any) -> "_NullStream":
        return self

    def query(self) -> bool:
        return True


def _new_noop() -> Callable:
    # One function object per name: torch._dynamo asserts that no object is registered under two torch names.
    return lambda *args, **kwargs: None


def _stub_cuda() -> None:
    cuda = torch.cuda
    cuda.current_device = lambda: CPU
    for name in ("set_device", "synchronize", "empty_cache", "ipc_collect", "reset_peak_memory_stats"):
        setattr(cuda, name, _new_noop())
    # Not torch.manual_seed: that calls torch.cuda.manual_seed_all and would recurse.
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(seed)
    cuda.get_rng_state = lambda *args, **kwargs: torch.get_rng_state()
    cuda.set_rng_state = lambda state, *args, **kwargs: torch.set_rng_state(state)
    cuda.current_stream = lambda *args, **kwargs: _NullStream()
    cuda.default_stream = lambda *args, **kwargs: _NullStream()
    cuda.Stream = _NullStream
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.nvtx.range_push = _new_noop()
    cuda.nvtx.range_pop = _new_noop()


def _cover_backward() -> None:
    """Switch the mode on around autograd's engine where the backward was started inside a region.

    A mode sees `Tensor.backward`, `torch.autograd.backward` and `torch.autograd.grad` as calls like any
    other, and torch takes it off its stack while it handles one: without this the backward runs outside.
    """
    run = torch.autograd.graph._engine_run_backward

    @functools.wraps(run)
    def run_in_region(*args: Any, **kwargs: Any) -> Any:
        with CudaToCpu() if getattr(_regions, "depth", 0) else contextlib.nullcontext():
            return run(*args, **kwargs)

    torch.autograd.graph._engine_run_backward = torch.autograd._engine_run_backward = run_in_region


def _stub_triton_module() -> None:
    """megatron-core 0.18 and later import Triton unconditionally in one module that dense models never
    call.
    """
    if importlib.util.find_spec("triton") is not None:
        return
    name = "megatron.core.transformer.moe.ops.paged_stash"
    stub = types.ModuleType(name)
    stub.GLOBAL_BLOCK_SIZE, stub.paged_stash_copy_kernel, stub.paged_stash_pop_kernel = 1024, None, None
    sys.modules.setdefault(name, stub)


@contextlib.contextmanager
def _identity_torch_compile() -> Iterator[None]:
    """megatron.core binds `torch.compile` as its jit fuser at the first import: no compiler is wanted on
    the CPU.
    """
    real = torch.compile
    torch.compile = lambda function=None, **kwargs: (
        function if function is not None else (lambda inner: inner)
    )
    try:
        yield
    finally:
        torch.compile = real


def _fix_expert_collectives() -> None:
    """Expert dispatch over gloo.

    `maybe_move_tensor_to_cpu` turns the split sizes into numpy only where they come from a GPU;
    all_to_all_single refuses tensors. `mappings` gathers unequal parts with all_gather and reduce_scatter,
    which gloo has for equal parts only.
    """
    import megatron.core.tensor_parallel.mappings as mappings
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    @functools.wraps(moe_utils.maybe_move_tensor_to_cpu)
    def to_cpu(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor

    moe_utils.maybe_move_tensor_to_cpu = token_dispatcher.maybe_move_tensor_to_cpu = to_cpu
    gather_equal, scatter_equal = mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim

    @functools.wraps(gather_equal)
    def gather(
        tensor: torch.Tensor, group: Any, sizes: Any = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if sizes is None or group.size() == 1:
            return gather_equal(tensor, group, sizes, use_global_buffer)
        padded = tensor.new_zeros(max(sizes), *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        parts = [torch.empty_like(padded) for _ in sizes]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:size] for part, size in zip(parts, sizes, strict=True)])

    @functools.wraps(scatter_equal)
    def reduce_scatter(
        tensor: torch.Tensor, group: Any, sizes: Any = None, use_global_buffer: bool = False
    ) -> torch.Tensor:
        if sizes is None or group.size() == 1:
            return scatter_equal(tensor, group, sizes, use_global_buffer)
        total = tensor.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total.split(list(sizes))[group.rank()].contiguous()

    mappings._gather_along_first_dim, mappings._reduce_scatter_along_first_dim = gather, reduce_scatter


def install() -> None:
    """Make Megatron-core importable and runnable on the CPU. Does nothing the second time.

    Raises:
        RuntimeError: megatron.core was imported before, so its jit fuser is already bound to torch.compile.
    """
    global _installed
    if _installed:
        return
    if "megatron.core" in sys.modules:
        raise RuntimeError("megagrpo.device must be set up before megatron.core is imported")
    _installed = True
    _stub_cuda()
    _cover_backward()
    _stub_triton_module()
    with _identity_torch_compile():
        import megatron.core
        import megatron.core.dist_checkpointing
        import megatron.core.models.gpt
        import megatron.core.optimizer
        import megatron.core.pipeline_parallel  # noqa: F401
    import megatron.core.tensor_parallel.random as megatron_random

    _fix_expert_collectives()
    megatron_random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: (
        torch.get_rng_state()
    )
    megatron_random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(
        state
    )


def region() -> AbstractContextManager:
    """Return the context manager to run Megatron code in."""
    return CudaToCpu()
