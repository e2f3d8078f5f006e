"""What this machine and this environment have. Packages are looked up, never imported."""

import importlib.util
import os
from collections.abc import Sequence
from pathlib import Path

from megagrpo.config.hardware import Hardware, detect_hardware
from megagrpo.planning.machine import look_at_machine
from megagrpo.telemetry.summary import package_versions

_ENGINES = ("transformers", "vllm", "sglang")
_OPTIONAL = {
    "tensorboard": "TensorBoard files (telemetry.writers)",
    "transformer_engine": "FP8 recipes and model.attention te (pip install 'megagrpo[te]')",
}


def format_doctor(hardware: Hardware | None = None) -> str:
    """Return the findings as text, a line each.

    Args:
        hardware: None looks.
    """
    hardware = hardware or detect_hardware()
    rows = [("package " + name, version) for name, version in package_versions().items()]
    rows += _hardware_rows(hardware)
    rows += [(f"engine {name}", _engine_place(name)) for name in _ENGINES]
    rows += [
        (f"optional {name}", f"missing: needed for {use}")
        for name, use in _OPTIONAL.items()
        if not is_installed(name)
    ]
    if is_wrong_apex():
        rows.append(("apex", "this is PyPI's web toolkit, not NVIDIA Apex: pip uninstall apex"))
    machine = look_at_machine()
    rows += machine.rows()
    width = max(len(name) for name, _ in rows)
    engines = [name for name in _ENGINES if _is_there(name)]
    problems = [*machine.problems(), *_gpu_problems(hardware)]
    lines = [f"{name:<{width}}  {text}" for name, text in rows]
    return "\n".join([*lines, "", *verdict(hardware, engines, problems)])


def verdict(hardware: Hardware, engines: Sequence[str], problems: Sequence[str]) -> list[str]:
    """Return what this machine is ready for, and what stands in the way of more, a line each."""
    on_gpus = hardware.nvidia_device and hardware.torch_cuda is not None
    what = "GPU ranks over NCCL" if on_gpus else "CPU ranks over gloo"
    fp8 = "" if hardware.missing_for_transformer_engine() else "; FP8"
    lines = [f"ready for: {what}; engines {', '.join(engines)}{fp8}"]
    return [*lines, *(f"in the way: {problem}" for problem in problems)]


def _gpu_problems(hardware: Hardware) -> list[str]:
    if hardware.nvidia_device and hardware.torch_cuda is None:
        return ["there are GPUs, but torch is a CPU build: install one for CUDA (make install CONSTRAINTS=)"]
    return []


def is_installed(module: str) -> bool:
    """Return whether the top-level `module` could be imported; it is not."""
    return importlib.util.find_spec(module) is not None


def _is_there(name: str) -> bool:
    return is_installed(name) or (Path(".engines") / name / "bin" / "python").is_file()


def _engine_place(name: str) -> str:
    if is_installed(name):
        return "found"
    own = Path(".engines") / name  # where `make engines` puts it
    return (
        f"found in {own}"
        if (own / "bin" / "python").is_file()
        else ("neither in this environment nor in .engines (make engines)")
    )


def is_wrong_apex() -> bool:
    """Return whether the installed `apex` is the unrelated package by that name: NVIDIA's has
    apex/optimizers.
    """
    spec = importlib.util.find_spec("apex")
    folders = spec.submodule_search_locations if spec is not None else None
    return spec is not None and not any((Path(folder) / "optimizers").is_dir() for folder in folders or [])


def available_memory_bytes(meminfo: Path = Path("/proc/meminfo")) -> int | None:
    """Return the memory that new processes can take without swapping (Linux's MemAvailable), None where it
    is not told.
    """
    try:
        lines = meminfo.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    kibibytes = [int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    return kibibytes[0] * 1024 if kibibytes else None


def _hardware_rows(hardware: Hardware) -> list[tuple[str, str]]:
    memory = available_memory_bytes()
    missing = hardware.missing_for_transformer_engine()
    return [
        ("cores", f"{len(os.sched_getaffinity(0))} usable of {os.cpu_count()}"),
        ("free memory", "unknown" if memory is None else f"{memory / 2**30:.1f} GiB"),
        ("torch build", "CPU" if hardware.torch_cuda is None else f"CUDA {hardware.torch_cuda}"),
        ("NVIDIA device", "found" if hardware.nvidia_device else "none: ranks run on CPU over gloo"),
        (
            "Transformer Engine",
            f"cannot be used; missing: {' and '.join(missing)}" if missing else "can be used",
        ),
    ]
