"""Building a model without memory: shapes, names and bytes of what would be there."""

from typing import Any

import torch

_FACTORIES = {
    torch.empty,
    torch.zeros,
    torch.ones,
    torch.full,
    torch.rand,
    torch.randn,
    torch.tensor,
}


class ToMeta(torch.overrides.TorchFunctionMode):
    """Every factory makes a meta tensor, whatever device is named, and a move keeps it one."""

    def __torch_function__(self, func: Any, kinds: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in _FACTORIES:
            kwargs |= {"device": "meta"}
            kwargs.pop("pin_memory", None)
        if func is torch.Tensor.to and args[0].is_meta:
            asked = (*args[1:], *kwargs.values())
            dtype = next((each for each in asked if isinstance(each, torch.dtype)), args[0].dtype)
            return args[0].to(dtype)
        if func is torch.Tensor.type and len(args) == 1:  # Megatron sorts parameters by this name
            return func(*args, **kwargs).replace("torch.meta.", "torch.")
        return args[0] if func is torch.Tensor.cuda else func(*args, **kwargs)
