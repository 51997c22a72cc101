"""What is on the servers, found by scanning."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvcascade.errors import TierError, TierUnavailable
from kvcascade.tiers.calls import Calls
from kvcascade.tiers.envelope import HEADER_BYTES, Envelope, parse
from kvcascade.types import Entry

from .chunks import Era
from .exchange import Exchange, plain
from .settings import Location

__all__ = ["Listed", "entries", "look", "scan"]

_BATCH = 500  # keys that a server looks at in one step


def scan(exchange: Exchange, base: bytes) -> Iterator[list[bytes]]:
    """The names that begin with `base`, of all servers, in batches, each once. What comes or goes meanwhile may be
    seen or not. `base` may hold ? for any character.

    Raises:
        TierError: a server can't be asked.
    """
    seen: set[bytes] = set()
    for where in exchange.links.route.primaries():
        cursor = b"0"
        while True:
            cursor, names = _step(exchange, where, cursor, base)
            if fresh := [name for name in dict.fromkeys(names) if name not in seen]:
                seen.update(fresh)
                yield fresh
            if cursor == b"0":
                break


def _step(exchange: Exchange, where: Location, cursor: bytes, base: bytes) -> tuple[bytes, list[bytes]]:
    match exchange.command_at(where, "SCAN", cursor, "MATCH", base + b"*", "COUNT", _BATCH):
        case [bytes(following), list(names)]:
            return following, [name for name in names if isinstance(name, bytes)]
    raise TierUnavailable(f"{where}: an answer to SCAN that is none")


class Listed(NamedTuple):
    """What a listing has seen of a value."""

    name: bytes
    header: bytes
    """How it begins; as long as an envelope, where it is long enough."""
    length: int

    @property
    def envelope(self) -> Envelope | None:
        """Where there is one."""
        envelope = parse(self.header)
        return envelope if isinstance(envelope, Envelope) else None


def look(exchange: Exchange, names: Sequence[bytes]) -> list[Listed]:
    """What is under these names; what has gone meanwhile, or is no value, is left out. It counts as a use on
    servers that evict by recency.

    Raises:
        TierError: a server can't be asked.
    """
    requests = []
    for name in names:
        requests += [plain(name, "GETRANGE", name, 0, HEADER_BYTES - 1), plain(name, "STRLEN", name)]
    answers = exchange.ask(requests)
    found = []
    for name, header, length in zip(names, answers[::2], answers[1::2], strict=True):
        for answer in (header, length):
            if isinstance(answer, TierError):
                raise answer
        if isinstance(header, bytes) and isinstance(length, int) and length:
            found.append(Listed(name, header, length))
    return found


def entries(exchange: Exchange, calls: Calls, era: Era) -> Iterator[Entry]:
    """The whole chunks of an era, each once, as far as their length tells."""
    batches = scan(exchange, era.base)
    while True:
        with calls:
            names = next(batches, None)
            if names is None:
                return
            found = look(exchange, names)
        for one in found:
            envelope = one.envelope
            if envelope and envelope.stamp == era.stamp and one.length == HEADER_BYTES + envelope.nbytes:
                yield Entry(envelope.key, envelope.nbytes, envelope.written, envelope.written)
