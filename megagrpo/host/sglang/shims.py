"""What SGLang 0.5.23 needs to start where there is no CUDA: three stand-ins for code that is imported but
never called there.

No model, scheduler, sampler or HTTP code is replaced. Imported before sglang, in every process of the server.
"""

import importlib.machinery
import os
import sys
import types

import torch

_kept: list[torch.library.Library] = []  # a Library takes its operators with it when it is collected


def install_cpu_shims() -> None:
    """Put the stand-ins in place; does nothing where torch has CUDA."""
    if torch.cuda.is_available():
        return
    # Without the CPU engine the rotary embedding imports kernels of vLLM; with it, names of `sgl_kernel`,
    # which has no CPU package.
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    _define_torchvision_operators()
    sys.modules.setdefault("sgl_kernel", _MissingKernels("sgl_kernel"))


def install_late_cpu_shims() -> None:
    """The one that patches a module of sglang: the buffer of routed experts is pinned for CUDA, which a
    CPU build of torch can't.
    """
    if torch.cuda.is_available():
        return
    from sglang.srt.mem_cache.pool_host import common

    common._cuda_host_register = lambda *args, **options: None


def _define_torchvision_operators() -> None:
    """Declare the operators whose fake kernels torchvision registers when it is imported.

    torchvision's published binary links CUDA libraries and doesn't load beside a CPU build of torch; the
    registration then fails for want of the operators. SGLang imports torchvision for its multimodal models
    only.
    """
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(name + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)


class _MissingKernels(types.ModuleType):
    """A module with any name in it; each is a function that says so when it is called.

    With SGLANG_USE_CPU_ENGINE eight names are imported from sgl_kernel at the top of modules; they serve
    speculative decoding and moves of the KV cache. On a CPU without AMX every layer takes its plain torch
    path.
    """

    def __init__(self, name: str):
        super().__init__(name)
        self.__spec__ = importlib.machinery.ModuleSpec(name, None)

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*args: object, **options: object) -> None:
            raise NotImplementedError(f"sgl_kernel.{name}: there is no build of sgl_kernel for this CPU")

        setattr(self, name, missing)
        return missing
