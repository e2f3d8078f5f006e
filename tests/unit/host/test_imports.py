"""What an engine's process imports of ours: the wire format and the host's own modules, never the trainer."""

import json
import os
import subprocess
import sys

import pytest

from megagrpo.engines.server.command import HOST_PATH

MODULES = [
    "megagrpo.host.http_loop",
    "megagrpo.host.parent_watch",
    "megagrpo.host.sglang.gate",
    "megagrpo.host.sglang.sample_rows",
    "megagrpo.host.sglang.shims",
    "megagrpo.host.sglang.updates",
    "megagrpo.wire.counter_sampling",
    "megagrpo.wire.held_version",
    "megagrpo.wire.bucket_manifest",
    "megagrpo.wire.probe_requests",
    "megagrpo.wire.sglang_instructions",
    "megagrpo.wire.shared_files",
    "megagrpo.wire.transfer_group",
]
FOREIGN = ("megatron", "transformers", "pydantic", "typer", "rich")


@pytest.fixture(scope="module")
def imported():
    """Names of the modules that importing all of MODULES brings in, in a process like an engine's."""
    script = f"import importlib, json, sys\nfor name in {MODULES!r}: importlib.import_module(name)\n"
    run = subprocess.run(
        [sys.executable, "-P", "-c", script + "print(json.dumps(sorted(sys.modules)))"],
        env={**os.environ, "PYTHONPATH": str(HOST_PATH)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def test_an_engine_process_imports_nothing_of_the_trainer(imported):
    ours = {name for name in imported if name.split(".")[0] == "megagrpo"}
    packages = {"megagrpo", "megagrpo.host", "megagrpo.host.sglang", "megagrpo.wire"}
    assert ours <= packages | set(MODULES)


def test_an_engine_process_does_not_pay_for_the_trainers_libraries(imported):
    assert not [name for name in imported if name.split(".")[0] in FOREIGN]
