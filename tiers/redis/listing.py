"""What is on the servers, found by scanning."""

from collections.abc import Iterator

from kvcascade.errors import TierUnavailable
from kvcascade.tiers.calls import Calls
from kvcascade.tiers.envelope import HEADER_BYTES, Envelope, parse
from kvcascade.types import Entry

from .chunks import Era
from .exchange import Exchange, plain
from .settings import Location

__all__ = ["entries", "scan"]

_BATCH = 500  # keys that a server looks at in one step


def scan(exchange: Exchange, base: bytes) -> Iterator[list[bytes]]:
    """The names that begin with `base`, of all servers, in batches. What comes or goes meanwhile may be seen or
    not; a name may come twice.

    Raises:
        TierError: a server can't be asked.
    """
    for where in exchange.links.route.primaries():
        cursor = b"0"
        while True:
            cursor, names = _step(exchange, where, cursor, base)
            if names:
                yield names
            if cursor == b"0":
                break


def _step(exchange: Exchange, where: Location, cursor: bytes, base: bytes) -> tuple[bytes, list[bytes]]:
    match exchange.command_at(where, "SCAN", cursor, "MATCH", base + b"*", "COUNT", _BATCH):
        case [bytes(following), list(names)]:
            return following, [name for name in names if isinstance(name, bytes)]
    raise TierUnavailable(f"{where}: an answer to SCAN that is none")


def entries(exchange: Exchange, calls: Calls, era: Era) -> Iterator[Entry]:
    """The chunks of an era, each once. Asking counts as a use on servers that order by recency."""
    seen: set[bytes] = set()
    batches = scan(exchange, era.base)
    while True:
        with calls:
            names = next(batches, None)
            if names is None:
                return
            fresh = [name for name in dict.fromkeys(names) if name not in seen]
            seen.update(fresh)
            found = describe(exchange, fresh)
        yield from (entry for envelope, entry in found if envelope.stamp == era.stamp)


def describe(exchange: Exchange, names: list[bytes]) -> list[tuple[Envelope, Entry]]:
    """The envelopes of those that are whole chunks, as far as their length tells."""
    requests = []
    for name in names:
        requests += [plain(name, "GETRANGE", name, 0, HEADER_BYTES - 1), plain(name, "STRLEN", name)]
    answers = exchange.ask(requests)
    found = []
    for header, length in zip(answers[::2], answers[1::2], strict=True):
        envelope = parse(header) if isinstance(header, bytes) else None
        if isinstance(envelope, Envelope) and length == HEADER_BYTES + envelope.nbytes:
            entry = Entry(envelope.key, envelope.nbytes, envelope.written, envelope.written)
            found.append((envelope, entry))
    return found
