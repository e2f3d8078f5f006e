"""Starts the server of an engine, or turns to one that runs, and returns the engine."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from megagrpo.config.engine_sections import ServerEngineConfig
from megagrpo.engines.server.command import ServerCommand
from megagrpo.engines.server.engine import ServerEngine
from megagrpo.engines.server.engine_server import EngineServer
from megagrpo.engines.server.protocol import ServerProtocol
from megagrpo.engines.server.served_model import ServedModel
from megagrpo.engines.server.sglang_command import sglang_command
from megagrpo.engines.server.sglang_protocol import SglangProtocol
from megagrpo.engines.server.vllm_command import vllm_command
from megagrpo.engines.server.vllm_protocol import VllmProtocol
from megagrpo.errors import UserError


def start_vllm(*arguments: Any, **options: Any) -> ServerEngine:
    """Return engine `vllm`; see start_server_engine."""
    return start_server_engine(vllm_command, VllmProtocol, *arguments, **options)


def start_sglang(*arguments: Any, **options: Any) -> ServerEngine:
    """Return engine `sglang`; see start_server_engine."""
    return start_server_engine(sglang_command, SglangProtocol, *arguments, **options)


def start_server_engine(
    command_of: Callable[[ServedModel], ServerCommand],
    protocol: type[ServerProtocol],
    model_folder: str | Path,
    config: ServerEngineConfig,
    tokenizer: Any = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    load_weights: bool = False,
    *,
    address: str | None = None,
    is_owner: bool = True,
    log_file: str | Path | None = None,
) -> ServerEngine:
    """Start a server for `model_folder` (an HF folder) and wait for it, or turn to the one at `address`.

    Args:
        command_of: how the server of a model is started.
        config: the `engine:` section.
        tokenizer: the folder's own if None; decodes completions and searches stop strings.
        device: what the server computes on, as its type says.
        load_weights: the server reads the folder's weights and serves them as version 0; one that is there
            already is taken to serve what it holds, whatever it calls that.
        address: None: the one in `config.server.addresses`, or a server is started.
        is_owner: whether this process publishes to the server.
        log_file: of a server that is started; None: a temporary file.

    Raises:
        UserError: the engine is not installed, its server does not start or is not there, or the folder
            can't be read.
    """
    address = address or _only(config.server.addresses)
    model = ServedModel.read(model_folder, config, tokenizer, device, dtype, load_weights)
    server = EngineServer(command_of(model), config, address, log_file)
    return ServerEngine(protocol(model, server), server, is_owner)


def _only(addresses: Sequence[str]) -> str | None:
    if len(addresses) > 1:
        raise UserError(f"engine.server.addresses: names {len(addresses)} servers, one engine is one of them")
    return addresses[0] if addresses else None
