"""Pure balancing algorithms: layer costs in, boundaries out."""

from megatron_dynmo.balancers.partition import partition

__all__ = ["partition"]
