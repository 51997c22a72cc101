"""What a server answers, and what its errors mean."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

from kvcascade.errors import TierError, TierRefused, TierUnavailable
from kvcascade.tiers.envelope import Flaw

from .settings import Location

__all__ = [
    "Refusal",
    "Reply",
    "Status",
    "Stored",
    "anything",
    "error_of",
    "expected",
    "is_done",
    "is_too_large",
    "moved_to",
    "shown",
]


class Refusal(NamedTuple):
    """An error that a server answers with: `-CODE text`."""

    code: str
    text: str

    @classmethod
    def parse(cls, line: bytes) -> "Refusal":
        code, _, text = line.decode(errors="replace").partition(" ")
        return cls(code, text)


class Stored(NamedTuple):
    """A value that was received."""

    in_place: bool
    """Whether it was as long as was expected, and is in the buffers; else it was skipped."""
    flaw: Flaw | None = None
    """What keeps it from being the chunk that was asked for."""

    @property
    def right(self) -> bool:
        return self.in_place and self.flaw is None


class Status(bytes):
    """A word where there is no value: `+OK`."""


Reply: TypeAlias = bytes | int | list[Any] | Refusal | Stored | None

_NEVER = {
    "NOPERM": "the user may not do this",
    "NOAUTH": "a password is required",
    "WRONGPASS": "wrong username or password",
}
_NOT_NOW = {
    "LOADING": "it is still loading its data",
    "READONLY": "it is a read-only replica",
    "MASTERDOWN": "it is a replica that has lost its primary",
    "CLUSTERDOWN": "the cluster does not serve all slots",
    "TRYAGAIN": "the cluster is moving these keys",
    "MISCONF": "it takes no writes, because it can't save them to its disk",
    "NOREPLICAS": "it takes no writes, because too few replicas are connected",
    "OOM": "it is full (maxmemory) and evicts nothing",
    "BUSY": "it is running a script",
}
_QUOTED = ", with args beginning with"
_TOO_LARGE = "Protocol error: invalid bulk length"


def shown(text: str) -> str:
    """What a server says, without the words of ours that it repeats: one may be a password."""
    return text.partition(_QUOTED)[0]


def error_of(refusal: Refusal, where: Location) -> TierError:
    """The error in our terms, in words."""
    said = shown(f"{refusal.code} {refusal.text}".strip())
    if words := _NEVER.get(refusal.code):
        return TierRefused(f"{where}: {words} ({said})")
    if words := _NOT_NOW.get(refusal.code):
        return TierUnavailable(f"{where}: {words} ({said})")
    if refusal.text.startswith("unknown command"):
        return TierRefused(f"{where}: it has no such command, or hides it ({said})")
    if refusal.code == "MOVED":
        return TierRefused(f"{where}: a node of a Redis Cluster ({said}); see the tier's mode")
    return TierUnavailable(f"{where}: {said}")


def is_too_large(reply: Reply | TierError) -> bool:
    """Whether the value was above the server's `proto-max-bulk-len`. The server then closes the connection."""
    return isinstance(reply, Refusal) and _TOO_LARGE in f"{reply.text}"


def moved_to(reply: Reply | TierError, asked: Location) -> tuple[Location, bool] | None:
    """Where a node of a cluster sends us, and whether for this one time only (ASK)."""
    if not isinstance(reply, Refusal) or reply.code not in ("MOVED", "ASK"):
        return None
    host, _, port = reply.text.split(" ")[-1].rpartition(":")
    if not port.isascii() or not port.isdecimal() or not 0 < int(port[:9]) < 1 << 16:
        return None
    return Location(host or asked.host, int(port)), reply.code == "ASK"


# What each command is answered with, where it is not refused


def is_done(reply: Reply) -> bool:
    """Whether it was done, or was not to be done (None)."""
    return reply is None or (type(reply) is Status and reply == b"OK")


def anything(reply: Reply) -> bool:
    """For answers that are looked at elsewhere."""
    return True


def _is_flag(reply: Reply) -> bool:
    return type(reply) is int and reply in (0, 1)


def _is_number(reply: Reply) -> bool:
    return type(reply) is int and reply >= 0


def _is_value(reply: Reply) -> bool:
    return reply is None or type(reply) is bytes


def _is_list(reply: Reply) -> bool:
    return isinstance(reply, list)


_EXPECTED: dict[bytes | str | int, Callable[[Reply], bool]] = {
    "SET": is_done,
    "GET": _is_value,
    "EXISTS": _is_flag,
    "UNLINK": _is_flag,
    "TOUCH": _is_flag,
    "PEXPIRE": _is_flag,
    "STRLEN": _is_number,
    "WAIT": _is_number,
    "GETRANGE": _is_value,
    "INFO": _is_value,
    "SCAN": _is_list,
    "CONFIG": _is_list,
    "ROLE": _is_list,
}


def expected(word: bytes | str | int) -> Callable[[Reply], bool]:
    """Tells the answers that a command (for one key) can have from those that are no answer to it."""
    return _EXPECTED.get(word, anything)
