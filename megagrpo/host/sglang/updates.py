"""Weights by manifest inside SGLang: `/update_weights_from_tensor` with an instruction (sglang_instructions)
in the tensors' place, and `/init_weights_update_group` and `/update_weights_from_distributed` for what comes
through a process group with the trainer's ranks.

The bytes lie where the manifest says; each scheduler reads its own part of them, so nothing is pickled and
nothing is copied but into the parameters. All ranks check a bucket before any rank touches a weight. SGLang
lets an exception in this endpoint end the whole server; from here none escapes.
"""

import json
from collections.abc import Iterable
from dataclasses import fields
from typing import Any

import torch

from megagrpo.host.sglang.gate import set_gate
from megagrpo.wire.bucket_manifest import BucketError, BucketManifest, build_ack, checksum_of, open_tensors
from megagrpo.wire.held_version import HeldVersion
from megagrpo.wire.sglang_instructions import LOAD_FORMAT, read_instruction
from megagrpo.wire.transfer_group import NAME_PREFIX, GroupAddress, TransferGroup

NO_SESSION = "no weight-update session is open: begin_weight_update comes first"


_joined: TransferGroup | None = None  # this scheduler process's membership in a group with trainer ranks
_held = HeldVersion()  # by this rank


def install() -> None:
    """Teach SGLang's schedulers LOAD_FORMAT, and the groups of our name."""
    from sglang.srt.managers import io_struct
    from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager

    by_pickle = SchedulerWeightUpdaterManager.update_weights_from_tensor
    by_broadcast = SchedulerWeightUpdaterManager.update_weights_from_distributed
    init_group = SchedulerWeightUpdaterManager.init_weights_update_group

    def update_weights_from_tensor(self: Any, request: Any) -> Any:
        if request.load_format != LOAD_FORMAT:
            return by_pickle(self, request)
        success, message = follow(self, request)
        return io_struct.UpdateWeightsFromTensorReqOutput(success=success, message=message)

    def update_weights_from_distributed(self: Any, request: Any) -> Any:
        if request.load_format != LOAD_FORMAT:
            return by_broadcast(self, request)
        success, message = follow_load(self, request.names[0])
        return io_struct.UpdateWeightsFromDistributedReqOutput(success=success, message=message)

    def init_weights_update_group(self: Any, request: Any) -> Any:
        if not request.group_name.startswith(NAME_PREFIX):
            return init_group(self, request)
        success, message = join_group(self, request)
        return io_struct.InitWeightsUpdateGroupReqOutput(success=success, message=message)

    SchedulerWeightUpdaterManager.update_weights_from_tensor = update_weights_from_tensor
    SchedulerWeightUpdaterManager.update_weights_from_distributed = update_weights_from_distributed
    SchedulerWeightUpdaterManager.init_weights_update_group = init_weights_update_group


def join_group(updater: Any, request: Any) -> tuple[bool, str]:
    """Join a group, instead of the one before, on all ranks. Returns (whether all have joined, what is
    wrong).
    """
    global _joined
    leave_group()
    group, error = updater.tp_cpu_group, None
    try:
        address = GroupAddress(**{field.name: getattr(request, field.name) for field in fields(GroupAddress)})
        device = next(updater.tp_worker.model_runner.model.parameters()).device
        _joined = TransferGroup(address, address.rank_offset + torch.distributed.get_rank(group), device)
    except Exception as caught:  # an exception here would end the server
        error = f"{type(caught).__name__}: {caught}"
    failed = first_error(gather(error, group))
    return failed is None, failed or "joined"


def leave_group() -> None:
    """Leave the group, if one was joined."""
    global _joined
    if _joined is not None:
        _joined.leave()
    _joined = None


def receive_bucket(manifest: BucketManifest) -> torch.Tensor:
    """Receive this rank's part of a bucket; after an error the group is left: the rest of it, still in
    flight, would be read as the next one.
    """
    if _joined is None:
        raise BucketError(f"bucket of version {manifest.version}: this engine rank has joined no group")
    try:
        return _joined.receive(manifest)
    except Exception:  # whatever it is: raised on, with the group left
        leave_group()
        raise


def follow(updater: Any, request: Any) -> tuple[bool, str]:
    """Follow one instruction, on all ranks alike. Returns (whether it was done, the ranks' answers as JSON
    or what is wrong).
    """
    try:
        instruction = read_instruction(request.serialized_named_tensors[0])
        action, operand = next(iter(instruction.items()))
    except Exception as error:  # an exception here would end the server
        return False, f"not an instruction: {type(error).__name__}: {error}"
    group, model = updater.tp_cpu_group, updater.tp_worker.model_runner.model
    if action == "checksums":
        return True, json.dumps(
            gather(
                {name: checksum_of(parameter.cpu()) for name, parameter in model.named_parameters()}, group
            )
        )
    if action == "describe":
        return True, json.dumps(
            gather({name: describe(parameter) for name, parameter in model.named_parameters()}, group)
        )
    if action == "serve":
        set_gate(closed=False)
        return True, json.dumps(gather({"version": operand}, group))
    if action == "load":
        return follow_load(updater, operand)
    if not has_session(updater):
        return False, NO_SESSION
    if action == "commit":
        if not updater.flush_cache():
            return False, "keys and values of older weights are in use: requests were not retracted"
        set_gate(closed=True)
        _held.commit(operand)
        updater.record_weight_version_after_update(request.weight_version)
        return True, json.dumps(gather({"version": operand}, group))
    return False, f"not an instruction: {action}"


def follow_load(updater: Any, manifest_json: str) -> tuple[bool, str]:
    """Load one bucket, on all ranks. Returns as `load_bucket` does."""
    if not has_session(updater):
        return False, NO_SESSION
    success, message = load_bucket(manifest_json, updater.tp_worker.model_runner.model, updater.tp_cpu_group)
    if success and hasattr(updater, "_session"):
        # As SGLang does after its own loaders: the end of the session then leaves out what follows a start
        # from disk.
        updater._session = type(updater._session)(selector=updater._session.selector, loaded_weights=True)
    return success, message


def has_session(updater: Any) -> bool:
    """Say whether an update session is open; SGLang before 0.5.21 has none."""
    return not hasattr(updater, "_session") or updater._session is not None


def load_bucket(manifest_json: str, model: torch.nn.Module, group: Any) -> tuple[bool, str]:
    """Check one bucket, then load it. Collective over `group`, the engine's ranks on the CPU.

    Returns:
        (True, JSON list of one acknowledgement per rank), or (False, what is wrong, with the rank that found
        it).
    """
    rank = torch.distributed.get_rank(group)
    try:
        manifest = BucketManifest.from_json(manifest_json)
        _held.check(manifest)
        memory = receive_bucket(manifest) if manifest.transport == "group" else None
        # views, checked
        tensors, error = list(open_tensors(manifest, rank, dict(model.named_parameters()), memory)), None
        if manifest.layout == "sharded":
            check_parameters(model, tensors)
    except Exception as caught:  # whatever it is, the other ranks wait in the gather
        error = f"{type(caught).__name__}: {caught}"
    if failed := first_error(gather(error, group)):
        return False, f"nothing was loaded: {failed}"
    try:
        _held.begin(manifest.version)
        load = load_parameters if manifest.layout == "sharded" else type(model).load_weights
        load(model, tensors)
    except Exception as caught:  # an exception here would end the server
        error = f"{type(caught).__name__}: {caught}"
    if failed := first_error(gather(error, group)):
        return False, f"the weights are partly overwritten: {failed}"
    return True, json.dumps(gather(build_ack(manifest, rank), group))


def describe(parameter: torch.Tensor) -> dict[str, Any]:
    """Return a parameter's dtype and shape."""
    return {"dtype": str(parameter.dtype).removeprefix("torch."), "shape": list(parameter.shape)}


def gather(value: Any, group: Any) -> list[Any]:
    """Return every rank's value (of JSON), in the order of the ranks. Collective over `group`.

    As bytes of JSON: torch's collectives of objects exchange pickles, which run what a rank puts in them.
    """
    told = torch.frombuffer(bytearray(json.dumps(value).encode()), dtype=torch.uint8)
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(torch.distributed.get_world_size(group))]
    torch.distributed.all_gather(sizes, torch.tensor([len(told)]), group=group)
    longest = max(int(size) for size in sizes)
    parts = [torch.empty(longest, dtype=torch.uint8) for _ in sizes]
    own = torch.nn.functional.pad(told, (0, longest - len(told)))
    torch.distributed.all_gather(parts, own, group=group)
    return [json.loads(bytes(part[: int(size)].tolist())) for part, size in zip(parts, sizes, strict=True)]


def first_error(errors: Iterable[str | None]) -> str | None:
    """Return the first rank's error with its rank, or None."""
    return next(
        (f"engine rank {rank}: {error}" for rank, error in enumerate(errors) if error is not None), None
    )


def check_parameters(model: torch.nn.Module, tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Raise ValueError unless every tensor is one of this rank's parameters, with its shape."""
    parameters = dict(model.named_parameters())
    for name, tensor in tensors:
        if name not in parameters:
            raise ValueError(f"weight {name!r}: the engine's model has no such parameter")
        if tensor.shape != parameters[name].shape:
            raise ValueError(
                f"weight {name!r}: shape {tuple(tensor.shape)}, the engine's is "
                f"{tuple(parameters[name].shape)}"
            )


@torch.no_grad()
def load_parameters(model: torch.nn.Module, tensors: list[tuple[str, torch.Tensor]]) -> None:
    """Copy tensors into this rank's parameters as they are (layout `sharded`)."""
    parameters = dict(model.named_parameters())
    for name, tensor in tensors:
        parameters[name].copy_(tensor)
