"""Parameters that were replaced by smaller ones made of some of their values.

Tier: torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Replacement:
    """One parameter in place of another.

    Attributes:
        old: what the optimizer knows; no module holds it any more.
        new: what its module holds now.
        cut: takes a tensor of the old parameter's shape and gives what belongs to the new one, in
            its shape, as a new tensor. Moments and master copies are cut by it too.
    """

    old: torch.nn.Parameter
    new: torch.nn.Parameter
    cut: Callable[[torch.Tensor], torch.Tensor]

    @classmethod
    def of(
        cls,
        old: torch.nn.Parameter,
        cut: Callable[[torch.Tensor], torch.Tensor],
    ) -> Replacement:
        """Cut a parameter; the new one has the attributes that Megatron put on the old one."""
        return cls(old, like(old, cut(old.detach())), cut)


def like(old: torch.nn.Parameter, data: torch.Tensor) -> torch.nn.Parameter:
    """Make a parameter with the attributes that Megatron and this package have put on another.

    Args:
        old: the other one.
        data: the new one's values, which it takes over.
    """
    new = torch.nn.Parameter(data, requires_grad=old.requires_grad)
    for name, value in vars(old).items():
        if not name.startswith(_MADE_ANEW):
            setattr(new, name, value)
    return new


# What the gradient wrapper and the optimizer put on parameters of theirs.
_MADE_ANEW = ("main_grad", "main_param", "grad_added_to_main_grad")
