"""Dynamic load balancing for Megatron-LM."""

from megatron_dynmo.version import __version__

__all__ = ["__version__"]
