"""`sglang.Engine` behind the routes that the trainer calls: SGLang's processes without its HTTP server.

What SGLang's routes do for us is done with the same methods of the tokenizer manager, so that the trainer's
side is one for both.
"""

import base64
import json
from typing import Any

import orjson

from megagrpo.host.http_loop import Handler, RefusedError, bind, serve


def run(server_args: Any) -> None:
    """Construct the engine and serve it at the host and port of its arguments, until killed."""
    import sglang

    taken = bind(server_args.host, server_args.port)
    engine = sglang.Engine(server_args=server_args)
    engine.loop.run_until_complete(serve(taken, build_routes(engine.tokenizer_manager)))


def build_routes(manager: Any) -> dict[tuple[str, str], Handler]:
    """Return the handlers of an engine's tokenizer manager: those of SGLang's routes that
    `engines/sglang.py` calls.
    """
    from sglang.srt.managers import io_struct

    async def generate(body: bytes) -> bytes:
        try:
            answer = await manager.generate_request(
                io_struct.GenerateReqInput(**orjson.loads(body)), None
            ).__anext__()
        except ValueError as error:
            raise RefusedError(str(error)) from None
        return orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_NON_STR_KEYS)

    async def abort(body: bytes) -> bytes:
        manager.abort_request(**json.loads(body))
        return b""

    async def load(body: bytes) -> bytes:
        fields = json.loads(body)
        payloads = [base64.b64decode(payload) for payload in fields.pop("serialized_named_tensors")]
        request = io_struct.UpdateWeightsFromTensorReqInput(serialized_named_tensors=payloads, **fields)
        return _told(*await manager.update_weights_from_tensor(request, None))

    async def info(body: bytes) -> bytes:
        return json.dumps({"model_path": manager.model_path}).encode()

    async def scheduler_info(body: bytes) -> bytes:
        return json.dumps({"schedulers": len(await manager.get_internal_state())}).encode()

    def update(method: str, request: Any) -> Handler:
        async def call(body: bytes) -> bytes:
            return _told(*await getattr(manager, method)(request(**json.loads(body or b"{}")), None))

        return call

    def control(method: str, request: Any, *more: None) -> Handler:
        async def call(body: bytes) -> bytes:
            await getattr(manager, method)(request(**json.loads(body)), *more)
            return b""

        return call

    routes = {
        ("GET", "/model_info"): info,
        ("GET", "/server_info"): scheduler_info,
        ("POST", "/generate"): generate,
        ("POST", "/abort_request"): abort,
        ("POST", "/update_weights_from_tensor"): load,
        ("POST", "/init_weights_update_group"): update(
            "init_weights_update_group", io_struct.InitWeightsUpdateGroupReqInput
        ),
        ("POST", "/update_weights_from_distributed"): update(
            "update_weights_from_distributed", io_struct.UpdateWeightsFromDistributedReqInput
        ),
        ("POST", "/pause_generation"): control("pause_generation", io_struct.PauseGenerationReqInput),
        ("POST", "/continue_generation"): control(
            "continue_generation", io_struct.ContinueGenerationReqInput
        ),
        ("POST", "/release_memory_occupation"): control(
            "release_memory_occupation", io_struct.ReleaseMemoryOccupationReqInput, None
        ),
        ("POST", "/resume_memory_occupation"): control(
            "resume_memory_occupation", io_struct.ResumeMemoryOccupationReqInput, None
        ),
    }
    if hasattr(io_struct, "BeginWeightUpdateReqInput"):  # SGLang 0.5.21 and later
        routes["POST", "/begin_weight_update"] = update(
            "begin_weight_update", io_struct.BeginWeightUpdateReqInput
        )
        routes["POST", "/end_weight_update"] = update("end_weight_update", io_struct.EndWeightUpdateReqInput)
    return routes


def _told(success: bool, message: str) -> bytes:
    if not success:
        raise RefusedError(message)
    return json.dumps({"success": success, "message": message}).encode()
