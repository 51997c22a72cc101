"""Requests to whichever servers hold their keys, pipelined, each with its own answer."""

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from kvcascade.errors import TierError, TierRefused, TierUnavailable

from .links import Links
from .replies import Refusal, Reply, anything, error_of, expected, is_done, moved_to
from .settings import Location
from .wire import Part, Wire, command

__all__ = ["LARGEST", "Answer", "Exchange", "Request", "plain"]

Answer: TypeAlias = Reply | TierError
"""What a server answered; a `TierError` where it could not be asked, or did not answer."""

LARGEST = 512 << 20
"""Bytes of a value that a server takes unless it was told otherwise."""

_WINDOW = 32 << 20  # bytes that may be on their way, in the server's memory at worst
_AT_ONCE = 1000  # requests on their way
_GROUP = 256 << 10  # bytes that are handed to the system in one call; more would wait for their checksums
_HOPS = 5  # times that a cluster may send a request elsewhere
_ASKING = command("ASKING")
_NOTHING = TierUnavailable("not asked")  # stands where there is no answer yet


class Request(NamedTuple):
    """One command for the server that holds `name`."""

    name: bytes
    parts: Callable[[], Sequence[Part]]
    """Makes what is sent, when it is about to be sent; once more where it has to be sent elsewhere."""
    receive: Callable[[Wire], Reply] = Wire.reply
    weight: int = 0
    """Bytes of payload that it brings or fetches."""
    expects: Callable[[Reply], bool] = anything
    """Whether a reply that is no error can be the answer; after another one the connection is not trusted."""


class _Way(NamedTuple):
    """Where a request goes next."""

    where: Location
    replica: bool = False
    asking: bool = False


def plain(name: bytes, *words: bytes | str | int) -> Request:
    """A command without payload."""
    sent = command(*words)
    return Request(name, lambda: [sent], expects=expected(words[0]))


class Exchange:
    """Asks the servers of a tier. Thread-safe; every call ends within `deadline` seconds, or a little later."""

    def __init__(self, links: Links, deadline: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.links = links
        self._deadline = deadline
        self._clock = clock

    def ask(self, requests: Sequence[Request], *, replicas: bool = False) -> list[Answer]:
        """One answer for each request. `replicas`: those that have one are put to a replica, within half of the
        time, so that a primary can still be asked."""
        end = self._clock() + self._deadline * (0.5 if replicas else 1.0)
        answers: list[Answer] = [_NOTHING] * len(requests)
        ways = self._ways(requests, answers, replicas)
        for _ in range(_HOPS):
            for way, places in ways.items():
                self._ask_one(way, requests, places, answers, end)
            if not self.links.clustered:
                break
            ways = _moved(ways, answers)
            if not ways:
                break
            self.links.route.mistrust()
        if self.links.clustered:
            _end_moves(answers)
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
        answers: list[Answer] = [_NOTHING] * len(requests)
        end = self._clock() + self._deadline
        self._ask_one(_Way(where), requests, range(len(requests)), answers, end)
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
        match answer:
            case [_, bytes(limit)] if limit.isdigit():
                return int(limit)
        return LARGEST

    def _ways(
        self, requests: Sequence[Request], answers: list[Answer], replicas: bool
    ) -> Mapping[_Way, Sequence[int]]:
        """Where each request goes; the answer of those that go nowhere is why."""
        route = self.links.route
        if route.only is not None:
            return {_Way(route.only): range(len(requests))}
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
        self, way: _Way, requests: Sequence[Request], places: Sequence[int], answers: list[Answer], end: float
    ) -> None:
        """Puts these requests to one server."""
        try:
            with self.links.pool(way.where, replica=way.replica).lease(end) as wire:
                demoted = False
                for window in _windows(requests, places):
                    demoted |= _through(wire, requests, window, way.asking, answers)
                if demoted:
                    self.links.route.mistrust()
                    wire.close()  # the address may stand for another server by now
        except TierError as error:
            self.links.route.mistrust()
            for place in places:
                if answers[place] is _NOTHING or moved_to(answers[place], way.where):
                    answers[place] = error


def _moved(ways: Mapping[_Way, Sequence[int]], answers: list[Answer]) -> dict[_Way, list[int]]:
    """Where a cluster wants to have requests instead."""
    moved: dict[_Way, list[int]] = defaultdict(list)
    for way, places in ways.items():
        for place in places:
            if found := moved_to(answers[place], way.where):
                moved[_Way(found[0], asking=found[1])].append(place)
    return moved


def _end_moves(answers: list[Answer]) -> None:
    """A cluster that goes on to send a request elsewhere, or nowhere, does not serve it now."""
    for place, answer in enumerate(answers):
        if isinstance(answer, Refusal) and answer.code in ("MOVED", "ASK"):
            answers[place] = TierUnavailable(f"the cluster does not serve this key: {answer.code} {answer.text}")


def _windows(requests: Sequence[Request], places: Sequence[int]) -> list[Sequence[int]]:
    """What may be on its way at a time."""
    if len(places) == 1:
        return [places]
    windows: list[Sequence[int]] = []
    start = weight = 0
    for count, place in enumerate(places):
        weight += requests[place].weight
        if count > start and (weight > _WINDOW or count - start >= _AT_ONCE):
            windows.append(places[start:count])
            start, weight = count, requests[place].weight
    windows.append(places[start:])
    return windows


def _through(
    wire: Wire, requests: Sequence[Request], window: Sequence[int], asking: bool, answers: list[Answer]
) -> bool:
    """Sends a window, and notes its answers as they come. Where sending fails the server may have said why.
    Whether the server says that it is no primary any more."""
    lost: TierUnavailable | None = None
    demoted = False
    try:
        _send(wire, requests, window, asking)
    except TierUnavailable as error:
        lost = error
    try:
        for place in window:
            if asking:
                _receive(wire, Wire.reply, is_done)
            answers[place] = answer = _receive(wire, requests[place].receive, requests[place].expects)
            if isinstance(answer, Refusal) and answer.code == "READONLY":
                demoted = True
    except TierUnavailable as error:
        raise lost or error from error
    if lost:
        wire.close()
    return demoted


def _receive(wire: Wire, receive: Callable[[Wire], Reply], expects: Callable[[Reply], bool]) -> Reply:
    answer = receive(wire)
    if not isinstance(answer, Refusal) and not expects(answer):
        raise wire.unexpected(answer)
    return answer


def _send(wire: Wire, requests: Sequence[Request], window: Sequence[int], asking: bool) -> None:
    parts: list[Part] = []
    nbytes = 0
    for place in window:
        if asking:
            parts.append(_ASKING)
        made = requests[place].parts()
        parts += made
        nbytes += sum(map(len, made))
        if nbytes >= _GROUP:
            wire.send(parts)
            parts, nbytes = [], 0
    if parts:
        wire.send(parts)
