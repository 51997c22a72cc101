"""Real servers for tests, and a proxy that spoils what passes between them and a client.

Success is only ever shown on real servers; faults are made by the proxy, by signals and by the servers' own means.
"""

from .base import ServerFailed, ServerProcess, free_port, wait_until
from .proxy import Proxy

__all__ = ["Proxy", "ServerFailed", "ServerProcess", "free_port", "wait_until"]
