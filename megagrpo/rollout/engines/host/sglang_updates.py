"""Weights by manifest inside SGLang: `/update_weights_from_tensor` with an instruction (sglang_instructions) in the tensors' place.

The bytes lie where the manifest says; each scheduler reads its own part of them, so nothing is pickled and nothing is copied but into
the parameters. What is wrong with a bucket is found on any rank before a weight is touched on any. SGLang lets an exception in this
endpoint end the whole server; from here none escapes.
"""

import json
from collections.abc import Iterable
from typing import Any

import torch
from manifest import BucketManifest, build_ack, checksum_of, open_tensors
from sglang_gate import set_gate
from sglang_instructions import LOAD_FORMAT, read_instruction


def install() -> None:
    """Teach SGLang's schedulers LOAD_FORMAT."""
    from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqOutput
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

    by_pickle = SchedulerWeightUpdaterManager.update_weights_from_tensor

    def update_weights_from_tensor(self: Any, request: Any) -> Any:
        if request.load_format != LOAD_FORMAT:
            return by_pickle(self, request)
        success, message = follow(self, request)
        return UpdateWeightsFromTensorReqOutput(success=success, message=message)

    SchedulerWeightUpdaterManager.update_weights_from_tensor = update_weights_from_tensor


def follow(updater: Any, request: Any) -> tuple[bool, str]:
    """Follow one instruction, on all ranks alike. Returns (whether it was done, the ranks' answers as JSON or what is wrong)."""
    try:
        instruction = read_instruction(request.serialized_named_tensors[0])
        action, operand = next(iter(instruction.items()))
    except Exception as error:
        return False, f"not an instruction: {type(error).__name__}: {error}"
    group, model = updater.tp_cpu_group, updater.tp_worker.model_runner.model
    if action == "checksums":
        return True, json.dumps(gather({name: checksum_of(parameter.cpu()) for name, parameter in model.named_parameters()}, group))
    if action == "describe":
        return True, json.dumps(gather({name: list(parameter.shape) for name, parameter in model.named_parameters()}, group))
    if action == "serve":
        set_gate(closed=False)
        return True, json.dumps(gather({"version": operand}, group))
    has_sessions = hasattr(updater, "_session")  # SGLang 0.5.21 and later
    if has_sessions and updater._session is None:
        return False, "no weight-update session is open: begin_weight_update comes first"
    if action == "load":
        success, message = load_bucket(operand, model, group)
        if (
            success and has_sessions
        ):  # as SGLang does after its own loaders: the end of the session then leaves out what follows a start from disk
            updater._session = type(updater._session)(selector=updater._session.selector, loaded_weights=True)
        return success, message
    if action == "commit":
        if not updater.flush_cache():
            return False, "keys and values of older weights are in use: requests were not retracted"
        set_gate(closed=True)
        updater.record_weight_version_after_update(request.weight_version)
        return True, json.dumps(gather({"version": operand}, group))
    return False, f"not an instruction: {action}"


def load_bucket(manifest_json: str, model: torch.nn.Module, group: Any) -> tuple[bool, str]:
    """Check one bucket, then load it. Collective over `group`, the engine's ranks on the CPU.

    Returns:
        (True, JSON list of one acknowledgement per rank), or (False, what is wrong, with the rank that found it).
    """
    rank = torch.distributed.get_rank(group)
    try:
        manifest = BucketManifest.from_json(manifest_json)
        tensors, error = list(open_tensors(manifest, rank, dict(model.named_parameters()))), None  # views of the mapped file, checked
        if manifest.layout == "sharded":
            check_parameters(model, tensors)
    except Exception as caught:  # whatever it is, the other ranks wait in the gather
        error = f"{type(caught).__name__}: {caught}"
    if failed := first_error(gather(error, group)):
        return False, f"nothing was loaded: {failed}"
    try:
        load = load_parameters if manifest.layout == "sharded" else type(model).load_weights
        load(model, tensors)
    except Exception as caught:
        error = f"{type(caught).__name__}: {caught}"
    if failed := first_error(gather(error, group)):
        return False, f"the weights are partly overwritten: {failed}"
    return True, json.dumps(gather(build_ack(manifest, rank), group))


def gather(value: Any, group: Any) -> list[Any]:
    """Return every rank's value, in the order of the ranks. Collective over `group`."""
    values = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(values, value, group=group)
    return values


def first_error(errors: Iterable[str | None]) -> str | None:
    """Return the first rank's error with its rank, or None."""
    return next((f"engine rank {rank}: {error}" for rank, error in enumerate(errors) if error is not None), None)


def check_parameters(model: torch.nn.Module, tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Raise ValueError unless every tensor is one of this rank's parameters, with its shape."""
    parameters = dict(model.named_parameters())
    for name, tensor in tensors:
        if name not in parameters:
            raise ValueError(f"weight {name!r}: the engine's model has no such parameter")
        if tensor.shape != parameters[name].shape:
            raise ValueError(f"weight {name!r}: shape {tuple(tensor.shape)}, the engine's is {tuple(parameters[name].shape)}")


@torch.no_grad()
def load_parameters(model: torch.nn.Module, tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Copy tensors into this rank's parameters as they are (layout `sharded`)."""
    parameters = dict(model.named_parameters())
    for name, tensor in tensors:
        parameters[name].copy_(tensor)
