"""What one bucket of published weights holds and where it lies: the only thing that trainer and engine
process both know.

This file runs inside engine processes too, in their own Python environments: it imports torch and the
standard library, nothing of ours. A manifest travels as JSON; the bytes lie in a file of shared memory or on
disk, in memory that is opened by a handle (CUDA IPC), or in what came through a process group, at the offsets
that it names. All are read in one way, without a copy: a tensor is a view that lives as long as the sender
leaves the memory alone, that is until the bucket is acknowledged. What must last longer is copied.
"""

import base64
import json
import mmap
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

# location {"path": file}; the offsets count from the file's first byte
MAPPED_TRANSPORTS = ("shared_memory", "disk")
LAYOUTS = ("full", "sharded")


class BucketError(ValueError):
    """A bucket that is not what its manifest says; names the tensor and both values."""


@dataclass(frozen=True)
class Patch:
    """Blocks of a tensor that changed: element k of a block is number start + row * stride + block *
    length + k of the flat tensor.
    """

    start: int
    stride: int
    rows: int
    blocks: int  # in each row
    length: int  # elements of a block
    # one bit for each block, row by row, the first one highest; hexadecimal, padded to whole bytes
    changed: str

    def mask(self) -> torch.Tensor:
        """Return which blocks changed: bool [rows, blocks]."""
        packed = torch.tensor(list(bytes.fromhex(self.changed)), dtype=torch.uint8)
        bits = packed[:, None].bitwise_right_shift(torch.arange(7, -1, -1, dtype=torch.uint8)) & 1
        return bits.reshape(-1)[: self.rows * self.blocks].bool().reshape(self.rows, self.blocks)


@dataclass(frozen=True)
class TensorEntry:
    """One tensor of a bucket, or what changed of it."""

    name: str  # HF name under `full`, the engine's parameter name under `sharded`
    dtype: str  # a torch dtype without its prefix: float32, bfloat16, float8_e4m3fn
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the bucket
    nbytes: int
    checksum: str  # `checksum_of` the tensor; with patches, of the bytes sent
    rank: int | None = None  # the engine rank that it is for; None: every rank of the engine
    # None: all is sent; else blocks, patch by patch, to lay over what the rank has. Where there are no
    # patches nothing is loaded.
    patches: tuple[Patch, ...] | None = None

    @property
    def torch_dtype(self) -> torch.dtype:
        """The dtype; raises BucketError where torch has none of that name."""
        dtype = getattr(torch, self.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise BucketError(f"weight {self.name!r}: {self.dtype!r} is not a torch dtype")
        return dtype


@dataclass(frozen=True)
class BucketManifest:
    """One bucket of one weight version."""

    version: int
    transport: str
    location: dict[str, Any]  # where the bytes are, as the transport says; JSON only
    layout: str
    tensors: tuple[TensorEntry, ...]
    base: int | None = None  # the engine holds this version, and keeps what is not sent; None: all is sent

    def to_json(self) -> str:
        """Return the manifest as one line of JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "BucketManifest":
        """Read `to_json`'s output.

        Raises:
            BucketError: not JSON, a field is missing or unknown, or the layout is none.
        """
        try:
            fields = json.loads(text)
            entries = [_read_entry_fields(entry) for entry in fields.pop("tensors")]
            manifest = cls(**fields, tensors=tuple(entries))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise BucketError(f"bucket manifest: not readable: {type(error).__name__}: {error}") from None
        if manifest.layout not in LAYOUTS:
            raise BucketError(f"bucket manifest: layout {manifest.layout!r} is none of {', '.join(LAYOUTS)}")
        return manifest

    def entries_for(self, rank: int) -> list[TensorEntry]:
        """Return the tensors that engine rank `rank` loads."""
        return [entry for entry in self.tensors if entry.rank in (None, rank)]


def _read_entry_fields(fields: dict[str, Any]) -> TensorEntry:
    patches = fields.get("patches")
    read = None if patches is None else tuple(Patch(**patch) for patch in patches)
    return TensorEntry(**{**fields, "shape": tuple(fields["shape"]), "patches": read})


def checksum_of(tensor: torch.Tensor) -> str:
    """Return the CRC-32 of a tensor's bytes in row-major order, as eight hexadecimal digits. Made on the
    CPU.
    """
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return f"{zlib.crc32(flat.numpy().data):08x}"


def check_tensor(entry: TensorEntry, tensor: torch.Tensor, shape: tuple[int, ...] | None = None) -> None:
    """Refuse a received tensor (of another shape than the entry's, where one is given) that is not its
    entry's, or not finite.

    Raises:
        BucketError: shape, dtype or checksum differ (both values are named), or a value is NaN or infinite.
    """
    shape = entry.shape if shape is None else shape
    if tuple(tensor.shape) != shape or tensor.dtype != entry.torch_dtype:
        received, announced = f"{tensor.dtype} {list(tensor.shape)}", f"torch.{entry.dtype} {list(shape)}"
        raise BucketError(f"weight {entry.name!r}: {received} received, the manifest says {announced}")
    found = checksum_of(tensor)
    if found != entry.checksum:
        raise BucketError(f"weight {entry.name!r}: checksum {found}, the sender's is {entry.checksum}")
    if not is_finite(tensor):
        raise BucketError(f"weight {entry.name!r}: holds values that are not finite")


def is_finite(tensor: torch.Tensor) -> bool:
    """Say whether a tensor has no NaN and no infinity."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    if tensor.dtype == torch.float8_e4m3fn:  # has no infinity, and NaN in one pattern of either sign
        return not bool(((tensor.reshape(-1).view(torch.uint8) & 0x7F) == 0x7F).any())
    return all(bool(torch.isfinite(bound)) for bound in torch.aminmax(tensor))  # NaN passes through aminmax


def open_tensors(
    manifest: BucketManifest,
    rank: int = 0,
    current: Mapping[str, torch.Tensor] | None = None,
    memory: torch.Tensor | None = None,
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, tensor) of what engine rank `rank` loads from a bucket; every one is checked before it is
    handed out.

    Args:
        current: the rank's tensors of the version before, which patches are laid over (in copies).
        memory: the bucket's, where this process received it (transfer_group); None: it is opened.

    Raises:
        BucketError: the transport is none that is opened here, the file is missing or too short, or
            `check_tensor` refuses a tensor.
    """
    memory = open_memory(manifest) if memory is None else memory
    for entry in manifest.entries_for(rank):
        if entry.patches is None:
            yield entry.name, read_entry(entry, memory, prod(entry.shape), entry.shape)
        elif not entry.patches:
            continue
        elif current is None or entry.name not in current:
            raise BucketError(
                f"weight {entry.name!r}: its changes were sent, but engine rank {rank} has "
                "no older version of it"
            )
        else:
            yield entry.name, apply_patches(entry, memory, current[entry.name])


def open_memory(manifest: BucketManifest) -> torch.Tensor:
    """Return a bucket's memory, uint8 [bytes]: a file that is mapped, or memory of another process that its
    handle opens.

    Raises:
        BucketError: the transport is none that is read here, or the file or the memory is not there.
    """
    try:
        if manifest.transport in MAPPED_TRANSPORTS:
            with open(manifest.location["path"], "rb") as file:
                # A private view: writes would not reach the file.
                return torch.frombuffer(
                    mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY), dtype=torch.uint8
                )
        if manifest.transport == "ipc":
            return _open_cuda_memory(manifest.location)
    except (OSError, KeyError, ValueError, RuntimeError) as error:
        where = manifest.location.get("path", manifest.transport)
        raise BucketError(
            f"bucket of version {manifest.version}: {where}: {type(error).__name__}: {error}"
        ) from None
    raise BucketError(
        f"bucket manifest: transport {manifest.transport!r} is none of {', '.join(MAPPED_TRANSPORTS)}, ipc"
    )


IPC_FIELDS = (
    "storage_handle", "storage_size_bytes", "storage_offset_bytes", "ref_counter_handle",
    "ref_counter_offset", "event_handle",
    "event_sync_required",
)  # fmt: skip


def _open_cuda_memory(location: dict[str, Any]) -> torch.Tensor:
    """Open the CUDA memory of a process on the same machine: uint8 [nbytes]. Nothing of a location is
    executed.

    Args:
        location: "nbytes", "tensor_offset", "device" (the GPU's UUID: its number differs between processes)
            and IPC_FIELDS, byte strings in base64: what torch knows of a CUDA tensor that it shares.
    """
    devices = [
        str(torch.cuda.get_device_properties(number).uuid) for number in range(torch.cuda.device_count())
    ]
    if location["device"] not in devices:
        raise ValueError(
            f"GPU {location['device']} is not visible here ({', '.join(devices) or 'no GPU is'})"
        )
    handle = {name: location[name] for name in IPC_FIELDS}
    handle |= {name: base64.b64decode(handle[name]) for name in IPC_FIELDS if name.endswith("_handle")}
    return rebuild_cuda_tensor(
        tensor_cls=torch.Tensor,
        tensor_size=(location["nbytes"],),
        tensor_stride=(1,),
        tensor_offset=location["tensor_offset"],
        storage_cls=torch.UntypedStorage,
        dtype=torch.uint8,
        storage_device=devices.index(location["device"]),
        requires_grad=False,
        **handle,
    )


def apply_patches(entry: TensorEntry, memory: torch.Tensor, current: torch.Tensor) -> torch.Tensor:
    """Return a copy of `current` with the blocks that changed.

    Raises:
        BucketError: shape or dtype is another, a patch goes beyond the tensor, or `read_entry` refuses the
            blocks.
    """
    if tuple(current.shape) != entry.shape or current.dtype != entry.torch_dtype:
        have = f"{current.dtype} {list(current.shape)}"
        raise BucketError(
            f"weight {entry.name!r}: changes of torch.{entry.dtype} {list(entry.shape)}, "
            f"the engine rank has {have}"
        )
    tensor = current.detach().clone(memory_format=torch.contiguous_format)
    patches = entry.patches or ()
    masks = [patch.mask() for patch in patches]
    counts = [int(mask.sum()) * patch.length for mask, patch in zip(masks, patches, strict=True)]
    sent = read_entry(entry, memory, sum(counts), (sum(counts),))
    for patch, mask, blocks in zip(patches, masks, sent.split(counts), strict=True):
        end = patch.start + (patch.rows - 1) * patch.stride + patch.blocks * patch.length
        if patch.start < 0 or end > tensor.numel():
            raise BucketError(f"weight {entry.name!r}: a patch ends at element {end} of {tensor.numel()}")
        size, stride = (patch.rows, patch.blocks, patch.length), (patch.stride, patch.length, 1)
        tensor.view(-1).as_strided(size, stride, patch.start)[mask.to(tensor.device)] = blocks.view(
            -1, patch.length
        ).to(tensor.device)
    return tensor


def read_entry(entry: TensorEntry, memory: torch.Tensor, count: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Return `count` elements of a bucket's memory (bytes) as a view of a shape, checked."""
    size = entry.torch_dtype.itemsize
    if count * size != entry.nbytes or not 0 <= entry.offset <= len(memory) - entry.nbytes:
        raise BucketError(
            f"weight {entry.name!r}: {list(shape)} {entry.dtype} is {count * size} bytes, "
            f"the manifest says {entry.nbytes} at {entry.offset} of a bucket of {len(memory)}"
        )
    if not count:
        return torch.empty(shape, dtype=entry.torch_dtype)
    part = memory[entry.offset : entry.offset + entry.nbytes]
    if entry.offset % size:  # files of mixed dtypes have no gaps
        part = part.clone()
    tensor = part.view(entry.torch_dtype).view(shape)
    check_tensor(entry, tensor, shape)
    return tensor


def build_ack(manifest: BucketManifest, rank: int = 0) -> dict[str, Any]:
    """Return what engine rank `rank` answers when it has loaded, and so checked, all its tensors of a
    bucket.

    Copies on an accelerator have only been queued by then. They are waited for: after the answer the trainer
        may overwrite the bucket's memory.
    """
    if torch.accelerator.is_available():
        torch.accelerator.synchronize()
    entries = manifest.entries_for(rank)
    return {
        "rank": rank,
        "version": manifest.version,
        "tensors": {entry.name: entry.checksum for entry in entries},
        "bytes": sum(entry.nbytes for entry in entries),
    }
