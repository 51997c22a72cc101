"""All errors that KVCascade raises.

    KVCascadeError
    ├── ConfigError        what the user gave (YAML, command line, environment) can't be used
    ├── ProtocolError      the caller broke the contract of a verb; a bug of the caller
    ├── ClosedError        the object was shut down before this call
    └── TierError          a storage medium did not do what was asked
        ├── TierUnavailable    the medium can't be reached or used now; trying again later may help
        └── TierRefused        the medium answered no, for this key or size; trying again will not help

A driver's own error never leaves a tier: it is mapped into `TierError` with the driver's error as its cause.
Inside the data path errors are values (`kvcascade.types.Outcome`), not exceptions.
"""

__all__ = [
    "ClosedError",
    "ConfigError",
    "KVCascadeError",
    "ProtocolError",
    "TierError",
    "TierRefused",
    "TierUnavailable",
]


class KVCascadeError(Exception):
    """The root: catches everything that KVCascade raises on purpose."""


class ConfigError(KVCascadeError, ValueError):
    """User input that can't be used.

    The text is the message for a person: all problems found, one a line, each with file, line, key, value,
    what is allowed and the nearest valid name.
    """


class ProtocolError(KVCascadeError):
    """A verb was called in a way that its contract excludes. The text says what was expected."""


class ClosedError(KVCascadeError):
    """The object was closed or shut down before this call."""


class TierError(KVCascadeError):
    """A storage medium failed. `__cause__` is the driver's own error, where there was one."""


class TierUnavailable(TierError):
    """The medium can't be reached or used now."""


class TierRefused(TierError):
    """The medium answered no; the same call will get the same answer."""
