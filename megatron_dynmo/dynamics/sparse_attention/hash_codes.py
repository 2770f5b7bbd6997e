"""Which bucket a token falls into: locality-sensitive hashing of queries and keys.

A code depends on one token's own vector and on random directions, on nothing else: no other token,
no micro-batch, no rank. So hashing cannot leak the future, and any layout, tensor parallel split or
recomputation of a layer finds the same buckets.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Hashing:
    """How a layer hashes now.

    Attributes:
        buckets: 1 for Megatron's own, dense attention.
        rounds: see `--dynmo-sparse-attention-rounds`.
        is_shared: whether queries take the codes of the keys.
        seed: of the run.
        iteration: 1-based.
    """

    buckets: int
    rounds: int
    is_shared: bool
    seed: int
    iteration: int


def rotations(
    seed: int,
    layer_number: int,
    iteration: int,
    num_groups: int,
    num_rounds: int,
    head_dim: int,
    num_buckets: int,
) -> Tensor:
    """Draw the random directions by which one layer hashes in one iteration.

    Args:
        seed: of the run.
        layer_number: 1-based global number.
        iteration: in which the layer hashes.
        num_groups: key heads of the whole layer, over all tensor parallel ranks.
        num_rounds: independent hashes per token.
        head_dim: length of a query or key.
        num_buckets: at least 1.

    Returns:
        `[num_rounds, num_groups, head_dim, ceil(num_buckets / 2)]`, float32, on the CPU; a function
        of the arguments alone, so a rank takes the slice of its own heads.
    """
    words = f"{seed}/{layer_number}/{iteration}".encode()
    digest = hashlib.blake2b(words, digest_size=8).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
    shape = (num_rounds, num_groups, head_dim, -(-num_buckets // 2))
    return torch.randn(shape, generator=generator)


def hash_codes(vectors: Tensor, directions: Tensor, num_buckets: int) -> Tensor:
    """Hash every vector to the direction, or its opposite, that it points to most.

    Args:
        vectors: `[groups, tokens, head_dim]`, any floating dtype and device; only read.
        directions: `[num_rounds, groups, head_dim, ceil(num_buckets / 2)]`, as `rotations` draws.
        num_buckets: codes are below it.

    Returns:
        `[num_rounds, groups, tokens]`, int64, without gradient. The length of a vector is of no
        account.

    Source: cross-polytope hashing as in Reformer (arXiv 2001.04451, section 2).
    """
    with torch.no_grad():
        seen = torch.matmul(vectors.float(), directions.to(vectors.device))
        return torch.cat((seen, -seen), dim=-1)[..., :num_buckets].argmax(dim=-1)
