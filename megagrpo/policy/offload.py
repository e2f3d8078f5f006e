"""What the update alone needs leaves the device while the engine generates (`update.offload`).

    device  | gradients | optimizer | reference |  <- update, with the engine asleep
    host    |     -     |   arena   |   arena   |  <- publish and rollout, with the engine awake

Gradients are freed: nothing reads them between two updates. The rest goes to one arena of pinned host memory
for each part, which is kept: pinning takes longer than the copy. Checkpoints read and write tensors where
they are.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from megagrpo.device.device import finish_queued_work, has_cuda
from megagrpo.policy.actor import Actor
from megagrpo.policy.reference import Reference

_ALIGNMENT = 64  # bytes: the first one of a tensor, for any dtype


class HostArena:
    """One stretch of host memory, pinned where there is a device to copy from, that tensors lie in while they
    are away.
    """

    def __init__(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    @property
    def num_bytes(self) -> int:
        """Bytes of it."""
        return self._memory.numel()

    def take_in(self, tensors: Sequence[torch.Tensor]) -> None:
        """Move the contents of tensors here; they are the same objects, on the host."""
        needed = sum(_padded(tensor.nbytes) for tensor in tensors)
        if needed > self.num_bytes:
            self._memory = torch.empty(needed, dtype=torch.uint8, pin_memory=has_cuda())
        copies, offset = [], 0
        for tensor in tensors:
            copy = self._memory[offset : offset + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            copies.append(copy.copy_(tensor.data, non_blocking=True))
            offset += _padded(tensor.nbytes)
        finish_queued_work()  # what is freed below is read until then
        for tensor, copy in zip(tensors, copies, strict=True):
            tensor.data = copy


def move_to(tensors: Sequence[torch.Tensor], device: torch.device) -> None:
    """Give tensors memory of their own on a device, wherever they were."""
    for tensor in tensors:
        tensor.data = tensor.data.to(device, non_blocking=True, copy=True)
    finish_queued_work()  # the arena is free again


class Offload:
    """The parts of this rank that leave the device.

    Attributes:
        host_bytes: of the arenas.
    """

    def __init__(self, parts: Sequence[str], actor: Actor, reference: Reference | None, device: torch.device):
        """`parts`: of `gradients`, `optimizer` and `reference`; all of them are on `device` now."""
        self._frees_gradients, self._actor, self._device = "gradients" in parts, actor, device
        self._tensors: dict[str, Callable[[], list[torch.Tensor]]] = {}
        if "optimizer" in parts:
            self._tensors["optimizer"] = lambda: optimizer_tensors(actor)
        if "reference" in parts and reference is not None:
            self._tensors["reference"] = lambda: model_tensors(reference)
        self._arenas = {name: HostArena() for name in self._tensors}
        self._is_away = False

    @property
    def host_bytes(self) -> int:
        return sum(arena.num_bytes for arena in self._arenas.values())

    @contextmanager
    def resident(self) -> Iterator[None]:
        """Have all parts on the device while the context lasts."""
        self.come_back()
        try:
            yield
        finally:
            self.leave()

    def leave(self) -> None:
        """Free the device of the parts."""
        if self._is_away:
            return
        self._is_away = True
        if self._frees_gradients:
            for chunk in self._actor.chunks:
                chunk.offload_grad_buffers(synchronize=False, empty_cache=False)
        for name, tensors in self._tensors.items():
            self._arenas[name].take_in(tensors())

    def come_back(self) -> None:
        """Bring them back."""
        if not self._is_away:
            return
        self._is_away = False
        for tensors in self._tensors.values():
            move_to(tensors(), self._device)
        if self._frees_gradients:
            for chunk in self._actor.chunks:
                chunk.restore_grad_buffers(synchronize=False)


def optimizer_tensors(actor: Actor) -> list[torch.Tensor]:
    """Return the float32 main parameters and the moments; not what shares memory with the model's weights."""
    weights = {
        parameter.untyped_storage().data_ptr() for chunk in actor.chunks for parameter in chunk.parameters()
    }
    found: dict[int, torch.Tensor] = {}
    for chained in actor.optimizer.chained_optimizers:
        inner = chained.optimizer
        for parameter in (parameter for group in inner.param_groups for parameter in group["params"]):
            for tensor in (parameter, *inner.state[parameter].values()):
                is_large = (
                    torch.is_tensor(tensor) and tensor.dim() > 0
                )  # torch's Adam counts steps in a scalar
                if is_large and tensor.untyped_storage().data_ptr() not in weights:
                    found[id(tensor)] = tensor
    return list(found.values())


def model_tensors(reference: Reference) -> list[torch.Tensor]:
    """Return the weights of a model, tied ones once."""
    return list({id(each): each for chunk in reference.model.chunks for each in chunk.parameters()}.values())


def _padded(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
