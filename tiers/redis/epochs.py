"""Which epoch an engine is in, where the others that share the server may be in others.

An engine starts in the epoch of the weights that it names, "" where it names none. Engines that start with the
same name share that epoch. A reset moves one engine and leaves the others where they are: to weights with a name,
into the epoch of that name; without one, into a private epoch, which no engine ever joins. The epoch that it
leaves is void from then on, and so is the unnamed one: nobody who starts, or is reset, enters them any more, so
that an engine that restarts without knowing of the reset finds nothing of before.

On the server: each name has one key, the mark, whose value is random and is a part of the names of the epoch's
chunks. To make an epoch void is to put another random value in its place. That is done by one atomic step, which
does nothing where another engine has been faster, so that two engines that leave the same epoch for its successor
meet there.

A server can lose keys: it evicts them, is flushed, fails over. A mark that is lost is never put back, though
engines that run still know it, for it might have been void: it is made anew, and the chunks of before are out of
reach. So that a replica that takes over knows the mark, all connected ones confirm it before a move counts.
"""

import hashlib
import secrets
from dataclasses import dataclass

from kvcascade.errors import TierRefused, TierUnavailable
from kvcascade.types import Namespace

from .chunks import Names
from .exchange import Exchange, plain
from .listing import scan

__all__ = ["Epoch", "Epochs"]

_REPLACE = """
if ARGV[1] == '' or redis.call('GET', KEYS[1]) == ARGV[1] then
    redis.call('SET', KEYS[1], ARGV[2])
end
return redis.call('GET', KEYS[1])
"""


@dataclass(frozen=True, slots=True)
class Epoch:
    """An epoch of one namespace."""

    name: str
    """Of the weights, "" for none."""
    mark: str
    """Stamped on every chunk: chunks of another mark are of another epoch. Random, then the name."""
    private: bool = False
    """Nobody else knows the mark."""

    @classmethod
    def of(cls, name: str, value: object) -> "Epoch":
        """The epoch that a name's key on the server says."""
        if not isinstance(value, bytes):
            raise TierUnavailable("the mark of the epoch was lost as soon as it was written")
        return cls(name, value.decode(errors="replace"))


def _fresh(name: str) -> str:
    return f"{secrets.token_hex(16)} {name}"


class Epochs:
    """The epochs of one namespace, on the server. Every call does I/O, and raises `TierError` where that fails."""

    def __init__(self, namespace: Namespace, names: Names, exchange: Exchange, patience: float) -> None:
        """`patience`: seconds for which replicas are waited for."""
        self._namespace = namespace
        self._names = names
        self._exchange = exchange
        self._patience = patience

    def enter(self, name: str) -> Epoch:
        """The epoch of weights `name` in which an engine may start now. Writes only where nobody ever did."""
        mark = self._mark(name)
        value = self._exchange.command(mark, "GET", mark)
        if value is None:
            self._exchange.command(mark, "SET", mark, _fresh(name), "NX")
            value = self._exchange.command(mark, "GET", mark)
        return Epoch.of(name, value)

    def move(self, old: Epoch, name: str) -> Epoch:
        """Makes `old` and the unnamed epoch void; then enters that of weights `name`, a private one for ""."""
        self._exchange.links.route.mistrust()  # a server that was replaced must not be the one that hears of it
        if old.name:
            self._replace(old.name, old.mark)
        self._replace("", "")
        return self.enter(name) if name else Epoch("", _fresh(""), private=True)

    def is_over(self, epoch: Epoch) -> bool:
        """Whether nobody who starts enters it any more. Being asked keeps a mark from being evicted."""
        mark = self._mark(epoch.name)
        return epoch.private or self._exchange.command(mark, "GET", mark) != epoch.mark.encode()

    def current(self) -> dict[bytes, Epoch]:
        """The epochs that engines may enter now, by the stamp of their chunks; of all names."""
        found: dict[bytes, Epoch] = {}
        for names in scan(self._exchange, self._names.mark(b"")):
            for name, value in zip(
                names, self._exchange.ask([plain(name, "GET", name) for name in names]), strict=True
            ):
                self._exchange.checked(name, value)
                if isinstance(value, bytes):
                    epoch = Epoch.of(value.decode(errors="replace").partition(" ")[2], value)
                    found[self._namespace.stamp(epoch.mark)] = epoch
        return found

    def _replace(self, name: str, old: str) -> None:
        """Makes sure that the mark is another one than `old`; "" for any."""
        mark = self._mark(name)
        self._exchange.command(mark, "EVAL", _REPLACE, 1, mark, old, _fresh(name))
        self._confirm(mark)

    def _confirm(self, mark: bytes) -> None:
        """Waits until the replicas have what was just written."""
        replicas = self._replicas(mark)
        if not replicas:
            return
        pause = max(1, round(self._patience * 500))
        read, wait = plain(mark, "GET", mark), plain(mark, "WAIT", replicas, pause)  # waits for its own connection
        confirmed = self._exchange.checked(mark, self._exchange.ask([read, wait])[1])
        if not isinstance(confirmed, int) or confirmed < replicas:
            raise TierUnavailable(f"the mark of the epoch: {confirmed!r} of {replicas} replicas have confirmed it")

    def _replicas(self, mark: bytes) -> int:
        """How many are connected; 0 also where the user may not know."""
        try:
            role = self._exchange.command(mark, "ROLE")
        except TierRefused:
            return 0
        match role:
            case [_, _, list(replicas), *_]:
                return len(replicas)
        return 0

    def _mark(self, name: str) -> bytes:
        return self._names.mark(hashlib.sha256(name.encode()).hexdigest()[:32].encode())
