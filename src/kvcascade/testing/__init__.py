"""What tests of a tier or of a whole stack are made of; for this project and for authors of tiers.

    class TestMine(TierConformance):
        def open(self, path, context, capacity):
            return MineSettings(path=path, capacity=capacity).open(context)

`TierConformance`, `TierStateMachine` and `no_leaks` need pytest and hypothesis (`pip install 'kvcascade[dev]'`);
the rest does not. All is resolved on first use.
"""

import sys
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .bytes import UNWRITTEN, buffer, bytes_for, fill, holds, key_for
    from .conformance import NAMESPACE, TierConformance
    from .driver import Driver, ManualClock
    from .epochs import EpochConformance, SharedPlace
    from .guard import GuardTier, IOViolation, forbid_io
    from .leaks import no_leaks
    from .stack_machine import StackStateMachine
    from .state_machine import TierStateMachine
    from .stored import StoredConformance
    from .wrappers import Call, FaultTier, GateTier, LatencyTier, TierWrapper

__all__ = [
    "NAMESPACE",
    "UNWRITTEN",
    "Call",
    "Driver",
    "EpochConformance",
    "FaultTier",
    "GateTier",
    "GuardTier",
    "IOViolation",
    "LatencyTier",
    "ManualClock",
    "SharedPlace",
    "StackStateMachine",
    "StoredConformance",
    "TierConformance",
    "TierStateMachine",
    "TierWrapper",
    "buffer",
    "bytes_for",
    "fill",
    "forbid_io",
    "holds",
    "key_for",
    "no_leaks",
]

_HOMES = {
    "NAMESPACE": "conformance",
    "UNWRITTEN": "bytes",
    "Call": "wrappers",
    "Driver": "driver",
    "EpochConformance": "epochs",
    "FaultTier": "wrappers",
    "GateTier": "wrappers",
    "GuardTier": "guard",
    "IOViolation": "guard",
    "LatencyTier": "wrappers",
    "ManualClock": "driver",
    "SharedPlace": "epochs",
    "StackStateMachine": "stack_machine",
    "StoredConformance": "stored",
    "TierConformance": "conformance",
    "TierStateMachine": "state_machine",
    "TierWrapper": "wrappers",
    "buffer": "bytes",
    "bytes_for": "bytes",
    "fill": "bytes",
    "forbid_io": "guard",
    "holds": "bytes",
    "key_for": "bytes",
    "no_leaks": "leaks",
}
_OF_PYTEST = {"conformance", "epochs", "leaks", "stack_machine", "state_machine"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(_load(_HOMES[name]), name)


def _load(home: str) -> Any:
    module = f"{__name__}.{home}"
    if home not in _OF_PYTEST:
        return import_module(module)
    try:
        pytest = import_module("pytest")
        import_module("hypothesis")
    except ImportError as error:
        raise ImportError(f"{module} needs pytest and hypothesis: pip install 'kvcascade[dev]'") from error
    if module not in sys.modules:
        pytest.register_assert_rewrite(module)  # so that a failed assert shows its values
    return import_module(module)
