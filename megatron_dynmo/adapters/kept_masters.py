"""The fp32 master copies that exist are taken over by a new optimizer, which makes none.

An optimizer for fp16 or bf16 parameters makes its masters as `param.clone().float()`. While it is
built anew after a move, every layer that stays would have its master twice, so the memory of a move
would grow with the model; and what was made would only be overwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megatron_dynmo.adapters.optimizer import MAIN, ParamState


class KeptMasters(TorchFunctionMode):
    """Inside of it, the clone of a 16-bit parameter, cast to fp32, is the master it had.

    Args:
        states: parameters with what was captured of them; masters are handed over.
    """

    def __init__(self, states: Iterable[tuple[torch.nn.Parameter, ParamState]]) -> None:
        super().__init__()
        self._masters: dict[tuple[int, int], torch.Tensor] = {}
        for param, state in states:
            master = state.tensors.get(MAIN)
            if master is None:
                continue
            start, end = state.shard or (0, param.numel())
            # A shard is cut from its parameter, which it then begins inside of.
            where = param.data_ptr() + start * param.element_size()
            self._masters[where, end - start] = master

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.Tensor.clone and self._master_of(args[0]) is not None:
            return args[0].detach()
        if func is torch.Tensor.float and (master := self._master_of(args[0])) is not None:
            return master.detach().view(args[0].shape)
        return func(*args, **(kwargs or {}))

    def _master_of(self, tensor: torch.Tensor) -> torch.Tensor | None:
        if tensor.dtype not in (torch.float16, torch.bfloat16) or not tensor.numel():
            return None
        return self._masters.get((tensor.data_ptr(), tensor.numel()))
