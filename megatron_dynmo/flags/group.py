"""A group of flags that belong to one part of the package."""

from __future__ import annotations

from typing import ClassVar


class FlagGroup:
    """Base of the frozen dataclasses that `DynMoConfig` inherits its fields from.

    The config asks each group by its class, `Group.is_on(config)`; `self.is_on()` in a method would
    ask the first group of all.

    Attributes:
        kind: package of `megatron_dynmo.dynamics` that these flags turn on; None where the flags
            are no dynamic's.
    """

    kind: ClassVar[str | None] = None

    def is_on(self) -> bool:
        """Whether the flags ask for the dynamic."""
        return False

    def check(self) -> None:
        """Refuse values that do not fit together.

        `self` may be the whole config, in which `is_on` is that of another group: ask for it by
        class, as in `SparseAttentionFlags.is_on(self)`.

        Raises:
            ConfigError: Names the flags, the values and what to change.
        """
