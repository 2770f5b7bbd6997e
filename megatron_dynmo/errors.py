"""Every exception class of the package.

A user mistake is a ValueError too, so that callers who know nothing of this package can catch it.
"""


class DynMoError(Exception):
    """Base of every error raised on purpose by megatron_dynmo."""


class ConfigError(DynMoError, ValueError):
    """A flag, file or combination of features that cannot work; says what to change."""


class LayoutError(DynMoError, ValueError):
    """A pipeline layout that is not legal; says the count found and the count wanted."""


class BalanceError(DynMoError, ValueError):
    """No split satisfies the constraints; names the stage and the bytes."""


class PatchError(DynMoError):
    """Megatron does not look as a patch expects; lists every problem found."""


class PatchConflict(PatchError):
    """Somebody else changed a patched symbol; nothing was changed by us."""


class MigrationError(DynMoError):
    """A move failed; says which layer, which ranks, and what state each rank is in."""


class ConservationError(MigrationError):
    """A layer is owned by no rank or by two; training must not go on."""


class TransportError(MigrationError):
    """A transfer failed or timed out; says the peer, the tensor and the bytes."""


class PeerGaveUp(TransportError):
    """The other side of a transfer called it off; the cause is there, and the link is in order."""


class PeerLost(TransportError):
    """A link to another rank failed or timed out; nothing more can be said over it."""
