"""Requests to whichever servers hold their keys, pipelined, each with its own answer."""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeAlias

from kvcascade.errors import TierError, TierRefused, TierUnavailable

from .links import Links
from .replies import Refusal, Reply, error_of, moved_to
from .settings import Location
from .wire import Part, Wire, command

__all__ = ["LARGEST", "Answer", "Exchange", "Request", "plain"]

Answer: TypeAlias = Reply | TierError
"""What a server answered; a `TierError` where it could not be asked, or did not answer."""

LARGEST = 512 << 20
"""Bytes of a value that a server takes unless it was told otherwise."""

_WINDOW = 32 << 20  # bytes that may be on their way, in the server's memory at worst
_AT_ONCE = 1000  # requests on their way
_GROUP = 4 << 20  # bytes that are handed to the system in one call
_HOPS = 5  # times that a cluster may send a request elsewhere


class Request(NamedTuple):
    """One command for the server that holds `name`."""

    name: bytes
    parts: Callable[[], Sequence[Part]]
    """Makes what is sent, when it is about to be sent; once more where it has to be sent elsewhere."""
    receive: Callable[[Wire], Reply] = Wire.reply
    weight: int = 0
    """Bytes of payload that it brings or fetches."""


class _Way(NamedTuple):
    """Where a request goes next."""

    where: Location
    replica: bool = False
    asking: bool = False


def plain(name: bytes, *words: bytes | str | int) -> Request:
    """A command without payload."""
    sent = command(*words)
    return Request(name, lambda: [sent])


class Exchange:
    """Asks the servers of a tier. Thread-safe; every call ends within `deadline` seconds, or a little later."""

    def __init__(self, links: Links, deadline: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.links = links
        self._deadline = deadline
        self._clock = clock

    def ask(self, requests: Sequence[Request], *, replicas: bool = False) -> list[Answer]:
        """One answer for each request. `replicas`: those that have one are put to a replica."""
        end = self._clock() + self._deadline
        answers: list[Answer] = [None] * len(requests)
        ways = self._ways(requests, answers, replicas)
        for _ in range(_HOPS):
            moved: dict[_Way, list[int]] = defaultdict(list)
            for way, places in ways.items():
                for place in self._ask_one(way, requests, places, answers, end):
                    if found := moved_to(answers[place], way.where):
                        moved[_Way(found[0], asking=found[1])].append(place)
            if not moved or not self.links.clustered:
                break
            self.links.route.mistrust()
            ways = moved
        return answers

    def command(self, name: bytes, *words: bytes | str | int) -> Reply:
        """The answer to one command.

        Raises:
            TierError: there is none, or the server says no.
        """
        return self.checked(name, self.ask([plain(name, *words)])[0])

    def checked(self, name: bytes, answer: Answer) -> Reply:
        """The answer, where it is none of the errors.

        Raises:
            TierError: it is one.
        """
        if isinstance(answer, Refusal):
            answer = error_of(answer, self.links.route.primary(name))
        if isinstance(answer, TierError):
            raise answer
        return answer

    def ask_at(self, where: Location, requests: Sequence[Request]) -> list[Answer]:
        """One answer of this one server for each request."""
        answers: list[Answer] = [None] * len(requests)
        end = self._clock() + self._deadline
        self._ask_one(_Way(where), requests, list(range(len(requests))), answers, end)
        return answers

    def command_at(self, where: Location, *words: bytes | str | int) -> Reply:
        """The answer of this one server.

        Raises:
            TierError: there is none, or it says no.
        """
        (answer,) = self.ask_at(where, [plain(b"", *words)])
        if isinstance(answer, Refusal):
            raise error_of(answer, where)
        if isinstance(answer, TierError):
            raise answer
        return answer

    def largest(self, where: Location) -> int:
        """Bytes of the largest value that a server takes, as far as it says.

        Raises:
            TierUnavailable: it can't be asked.
        """
        try:
            answer = self.command_at(where, "CONFIG", "GET", "proto-max-bulk-len")
        except TierRefused:
            return LARGEST
        return int(answer[1]) if isinstance(answer, list) and len(answer) == 2 else LARGEST

    def _ways(self, requests: Sequence[Request], answers: list[Answer], replicas: bool) -> dict[_Way, list[int]]:
        route = self.links.route
        ways: dict[_Way, list[int]] = defaultdict(list)
        for place, request in enumerate(requests):
            try:
                replica = route.replica(request.name) if replicas else None
                way = _Way(replica, replica=True) if replica else _Way(route.primary(request.name))
            except TierError as error:
                answers[place] = error
            else:
                ways[way].append(place)
        return ways

    def _ask_one(
        self, way: _Way, requests: Sequence[Request], places: list[int], answers: list[Answer], end: float
    ) -> list[int]:
        """Puts these requests to one server; the places of those that it answered."""
        done = 0
        demoted = False
        try:
            with self.links.pool(way.where, replica=way.replica).lease(end) as wire:
                for window in _windows(requests, places):
                    for place, answer in _through(wire, requests, window, way.asking):
                        answers[place] = answer
                        done += 1
                        demoted |= isinstance(answer, Refusal) and answer.code == "READONLY"
                if demoted:
                    self.links.route.mistrust()
                    wire.close()  # the address may stand for another server by now
        except TierError as error:
            for place in places[done:]:
                answers[place] = error
            self.links.route.mistrust()
        return places[:done]


def _windows(requests: Sequence[Request], places: list[int]) -> Iterator[list[int]]:
    """What may be on its way at a time."""
    window: list[int] = []
    weight = 0
    for place in places:
        if window and (weight + requests[place].weight > _WINDOW or len(window) >= _AT_ONCE):
            yield window
            window, weight = [], 0
        window.append(place)
        weight += requests[place].weight
    if window:
        yield window


def _through(
    wire: Wire, requests: Sequence[Request], window: list[int], asking: bool
) -> Iterator[tuple[int, Reply]]:
    """Sends a window, and yields its answers as they come. Where sending fails the server may have said why."""
    lost: TierUnavailable | None = None
    try:
        _send(wire, requests, window, asking)
    except TierUnavailable as error:
        lost = error
    for place in window:
        try:
            if asking:
                wire.reply()
            answer = requests[place].receive(wire)
        except TierUnavailable as error:
            raise lost or error from error
        yield place, answer
    if lost:
        wire.close()


def _send(wire: Wire, requests: Sequence[Request], window: list[int], asking: bool) -> None:
    parts: list[Part] = []
    weight = 0
    for place in window:
        if asking:
            parts.append(command("ASKING"))
        parts += requests[place].parts()
        weight += requests[place].weight
        if weight >= _GROUP:
            wire.send(parts)
            parts, weight = [], 0
    if parts:
        wire.send(parts)
