"""The head by which a layer of Megatron judges how sure its tokens are."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint


class ExitHead(torch.nn.Module):
    """A normalised hidden state times one matrix: logits of the next token's class.

    It starts at zero, as a linear classifier may, so that building it draws no random number.

    Args:
        layer: the TransformerLayer it belongs to; tells device, dtype and groups.
        num_classes: classes of the next token.

    Attributes:
        weight: [num_classes, h], a copy on every tensor-parallel rank.
    """

    def __init__(self, layer: Any, num_classes: int) -> None:
        super().__init__()
        self._layer_number = layer.layer_number
        self._tp_group = layer.pg_collection.tp
        like = next(layer.parameters())
        weight = torch.zeros(
            num_classes, layer.config.hidden_size, dtype=like.dtype, device=like.device
        )
        self.weight = torch.nn.Parameter(weight)
        # Each tensor-parallel rank sees its own part of the sequence, so Megatron adds gradients.
        self.weight.sequence_parallel = layer.config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return logits [n, num_classes] of hidden states [n, h], in their dtype."""
        normed = F.rms_norm(hidden, hidden.shape[-1:])
        return F.linear(normed, self.weight)

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[Any, ...] = (),
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Return the weight for a checkpoint, under the layer's number.

        Megatron stacks equal tensors of all layers under one name, but not all layers have a head.
        """
        sharded: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True),
            prefix,
            {},
            (),
            tp_group=self._tp_group,
            dp_cp_group=(metadata or {})["dp_cp_group"],
        )
        for tensor in sharded.values():
            tensor.key = f"{prefix}{self._layer_number}.weight"
        return sharded
