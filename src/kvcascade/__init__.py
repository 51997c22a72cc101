"""KVCascade: a multi-tier KV-cache backend for LLM engines.

The names that a user needs: `load_stack` reads a stack's YAML file, `build` makes the stack's
`SecondaryTierManager` of it. Both are resolved on first use, so that importing the package stays cheap.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvcascade.configs import load_stack
    from kvcascade.manager import SecondaryTierManager
    from kvcascade.stack import build

__version__ = "0.1.0"
__all__ = ["SecondaryTierManager", "__version__", "build", "load_stack"]

_HOMES = {
    "load_stack": "kvcascade.configs",
    "SecondaryTierManager": "kvcascade.manager",
    "build": "kvcascade.stack",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'kvcascade' has no attribute {name!r}")
