"""What `engine.sleep_while_training` asks of servers, as far as it can be seen without a GPU.

On a CPU real servers take all of the calls, stop decoding and drop their caches, but have no memory to give
back.
"""

import json
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx2 as httpx
import pytest
import torch
from engine_contract import SERVER_NAMES, params, publish, tokens

from megagrpo.config.engine_sections import build_engine_config
from megagrpo.engines.server.command import HOST_PATH, find_python
from megagrpo.engines.server.http_client import EngineClient
from megagrpo.engines.server.sglang_command import sglang_command
from megagrpo.engines.server.vllm_command import vllm_command

VLLM = [name for name in SERVER_NAMES if name.values[0] == "vllm"]
KEEPS = build_engine_config("vllm", server={"sleep_keeps_weights": True})  # of any server: they share fields
COMMANDS = {"vllm": vllm_command, "sglang": sglang_command}
PARSE = {
    "vllm": """
import json, sys
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
options = make_arg_parser(FlexibleArgumentParser()).parse_args(json.loads(sys.argv[1]))
print(options.enable_sleep_mode)
""",
    "sglang": f"""
import argparse, json, sys
sys.path.insert(0, {str(HOST_PATH)!r})
from megagrpo.host.sglang import shims
shims.install_cpu_shims()
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
print(parser.parse_args(json.loads(sys.argv[1])).enable_memory_saver)
""",
}


@pytest.mark.parametrize("build_engine", SERVER_NAMES, indirect=True)
def test_kept_weights_serve_after_sleep(build_engine, prompts, model):
    engine = build_engine(KEEPS)
    publish(engine, model, version=1)
    before = tokens(engine.generate(prompts, params(), range(2)))
    engine.sleep()
    engine.wake()
    assert engine.weight_version == 1
    assert tokens(engine.generate(prompts, params(), range(2))) == before


@pytest.mark.parametrize("build_engine", VLLM, indirect=True)
def test_a_vllm_server_sleeps_and_wakes(build_engine, prompts, model):
    engine = build_engine(KEEPS)
    publish(engine, model, version=1)
    before = tokens(engine.generate(prompts, params(), range(2)))
    for asleep, move in ((True, engine.sleep), (False, engine.wake)):
        move()
        assert httpx.get(f"{engine.address}/is_sleeping").json() == {"is_sleeping": asleep}
    assert tokens(engine.generate(prompts, params(), range(2))) == before


@pytest.mark.parametrize("build_engine", SERVER_NAMES, indirect=True)
def test_a_server_gives_signs_of_life_while_it_generates(build_engine, prompts, model):
    """From its workers or scheduler, which have no time for it where they hang."""
    engine = build_engine()
    publish(engine, model, version=1)
    command = COMMANDS[engine.protocol.model.config.name](engine.protocol.model)
    client, answers = EngineClient(engine.address, 60.0, lambda: None), []
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(engine.generate, prompts, params(max_new_tokens=60), range(16))
        while not answers or not running.done():
            client.call_all(
                [command.sign_of_life], lambda _, answer: answers.append(answer), 1, lambda: False, []
            )
        assert all(running.result()) and all(answers)


@pytest.mark.parametrize("build_engine", SERVER_NAMES, indirect=True)
def test_a_gpu_server_is_started_with_options_that_it_knows(build_engine, monkeypatch):
    """Sleep must be allowed at the start. The installed server's own parser reads the command that a GPU
    server would get.
    """
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (70 << 30, 80 << 30))
    engine = build_engine()
    model = replace(engine.protocol.model, device=torch.device("cuda"))
    name = model.config.name
    command = COMMANDS[name](model)
    python, _, _, _, *options = command.words(find_python(None, command.package), 1)
    arguments = [option for option in options if option != "--end-with-parent"]
    ran = subprocess.run(
        [python, "-c", PARSE[name], json.dumps(arguments)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr[-3000:]
    assert ran.stdout.split()[-1] == "True"
