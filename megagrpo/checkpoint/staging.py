"""Host memory that a save is copied to, so that training goes on while it is written.

The buffers are kept between saves: memory that is touched for the first time costs a page fault per page,
which takes as long as the copy itself. They hold exactly the bytes that this rank writes, a tensor that is
written under two names once.
"""

from collections.abc import Hashable

import torch


class Staging:
    """Named host tensors, made once and overwritten by every save."""

    def __init__(self) -> None:
        self._buffers: dict[Hashable, torch.Tensor] = {}
        # source of this save -> its copy
        self._copies: dict[tuple[int, tuple[int, ...], torch.dtype], torch.Tensor] = {}
        self._storages: set[int] = set()

    def start(self) -> None:
        """Forget what the last save copied; its buffers may be overwritten now."""
        self._copies.clear()
        self._storages = {buffer.untyped_storage().data_ptr() for buffer in self._buffers.values()}

    def take(self, name: Hashable, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Return the buffer `name`, uninitialised where it is new or of another shape."""
        buffer = self._buffers.get(name)
        if buffer is None or buffer.shape != shape or buffer.dtype != dtype:
            buffer = torch.empty(shape, dtype=dtype, device="cpu", pin_memory=torch.cuda.is_available())
            self._buffers[name] = buffer
            self._storages.add(buffer.untyped_storage().data_ptr())
        return buffer

    def hold(self, name: Hashable, tensor: torch.Tensor) -> torch.Tensor:
        """Return a contiguous host copy of `tensor`, with a storage of its own size; what is staged already
        is not copied again.

        Megatron's writer clones every tensor whose storage is larger than itself, which would double the
        memory of a save.
        """
        if tensor.untyped_storage().data_ptr() in self._storages and tensor.is_contiguous():
            exact = torch.from_numpy(tensor.reshape(-1).view(torch.uint8).numpy())
            return exact.view(tensor.dtype).view(tensor.shape)
        source = (tensor.data_ptr(), tuple(tensor.shape), tensor.dtype)
        if source not in self._copies:
            self._copies[source] = self.take(name, tuple(tensor.shape), tensor.dtype).copy_(
                tensor, non_blocking=True
            )
        return self._copies[source]

    @property
    def num_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(buffer.numel() * buffer.element_size() for buffer in self._buffers.values())
