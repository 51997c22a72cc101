"""Real vLLM engines for tests: a tiny model made on the spot, engines in processes of their own, and stacks.

Needs an environment in which vLLM is installed.
"""

from .engine import Engine
from .model import BLOCK, LOADED, PROMPTS, full_blocks, make_model, prompt, text_of
from .nursery import Nursery
from .processes import ONE_THREAD
from .server import Completion, Server
from .stacks import (
    CONNECTOR,
    SPEC,
    TIER,
    WAYS,
    behind_host,
    beside_unreliable,
    host,
    on_disk,
    shared,
    transfer_config,
)

__all__ = [
    "BLOCK",
    "CONNECTOR",
    "LOADED",
    "ONE_THREAD",
    "PROMPTS",
    "SPEC",
    "TIER",
    "WAYS",
    "Completion",
    "Engine",
    "Nursery",
    "Server",
    "behind_host",
    "beside_unreliable",
    "full_blocks",
    "host",
    "make_model",
    "on_disk",
    "prompt",
    "shared",
    "text_of",
    "transfer_config",
]
