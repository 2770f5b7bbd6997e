"""A package with every shape of binding that a patch can meet. It re-exports two names."""

from toy_package.core import Clock, step

__all__ = ["Clock", "step"]
