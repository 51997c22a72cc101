"""A server whose answers are not those to our commands: nothing of them is taken for success, and no connection on
which one came is used again. Only what is refused is shown here; that things work is shown on real servers."""

import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import pytest

from kvcascade.errors import TierError, TierRefused, TierUnavailable
from kvcascade.testing import key_for
from kvcascade.tiers.redis.replies import Refusal, moved_to
from kvcascade.tiers.redis.settings import Location
from kvcascade.types import Outcome, OutcomeKind


class Liar:
    """Answers as a server does that holds two chunks, but for the commands in `says`."""

    def __init__(self) -> None:
        self.says: dict[bytes, bytes] = {}
        self.accepted = 0
        self._marks: dict[bytes, bytes] = {}
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._ends: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def close(self) -> None:
        for end in [self._listener, *self._ends]:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()
        for end in [self._listener, *self._ends]:
            end.close()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                self._ends.append(self._listener.accept()[0])
                self.accepted += 1
                self._threads.append(threading.Thread(target=self._serve, args=self._ends[-1:], daemon=True))
                self._threads[-1].start()

    def _serve(self, end: socket.socket) -> None:
        with suppress(OSError), end.makefile("rb") as lines:
            while line := lines.readline():
                count = int(line[1:])
                end.sendall(self._answer([lines.read(int(lines.readline()[1:]) + 2)[:-2] for _ in range(count)]))

    def _answer(self, words: list[bytes]) -> bytes:
        name = words[0].upper()
        if name in self.says:
            return self.says[name]
        if name == b"GET":
            mark = self._marks.get(words[1])
            return b"$-1\r\n" if mark is None else b"$%d\r\n%b\r\n" % (len(mark), mark)
        if name == b"SET":
            self._marks[words[1]] = words[2]
        if name in (b"EXISTS", b"UNLINK", b"TOUCH"):
            return b":1\r\n"
        return b"*0\r\n" if name == b"CONFIG" else b"+OK\r\n"


@pytest.fixture
def liar() -> Iterator[Liar]:
    made = Liar()
    yield made
    made.close()


@pytest.fixture
def deceived(liar: Liar, sharing: Callable[..., Any]) -> Any:
    return sharing(url=f"redis://127.0.0.1:{liar.port}/0", deadline="10s")


def store(shared: Any, tier: Any) -> Any:
    return shared.store(tier, shared.keys(1, 2))


def load(shared: Any, tier: Any) -> Any:
    return shared.load(tier, shared.keys(1, 2))


def exists(shared: Any, tier: Any) -> Any:
    return tier.exists(shared.keys(1, 2))


def delete(shared: Any, tier: Any) -> Any:
    return tier.delete(shared.keys(1, 2))


def list_all(shared: Any, tier: Any) -> Any:
    return list(tier.entries())


def reset(shared: Any, tier: Any) -> Any:
    return tier.move_to("v2")


def touch(shared: Any, tier: Any) -> Any:
    tier.touch(shared.keys(1, 2))
    return tier.maintain(1.0)


DEEP = b"*1\r\n" * 5000
LIES = [
    *[(store, b"SET", said) for said in (b":1\r\n", b"$5\r\nhello\r\n", b"$2\r\nOK\r\n", b"+QUEUED\r\n")],
    *[(store, b"SET", said) for said in (b"*2\r\n:1\r\n:2\r\n", b"*-1\r\n:1\r\n", b"$-7\r\n", DEEP)],
    *[(exists, b"EXISTS", said) for said in (b"$5\r\nhello\r\n", b"+OK\r\n", b"$-1\r\n", b":7\r\n", b":-1\r\n")],
    *[(exists, b"EXISTS", said) for said in (b":+1\r\n", b":1_0\r\n", b": 1\r\n", b"*1\r\n:1\r\n", DEEP)],
    *[(delete, b"UNLINK", said) for said in (b"+OK\r\n", b"$1\r\n1\r\n", b"$-1\r\n", b":9\r\n")],
    *[(load, b"GET", said) for said in (b"+OK\r\n", b":1\r\n", b"*-1\r\n", b"$-7\r\n", b"$1\r\nabcd\r\n")],
    *[(list_all, b"SCAN", said) for said in (b"+OK\r\n", b"*1\r\n$1\r\n0\r\n", b"*2\r\n:0\r\n*0\r\n", DEEP)],
    *[(touch, b"TOUCH", said) for said in (b"+OK\r\n", b"$-1\r\n")],
    *[(reset, b"EVAL", DEEP), (reset, b"GET", b"+OK\r\n")],
]


@pytest.mark.parametrize(("act", "command", "said"), LIES)
def test_an_answer_to_something_else_is_no_success(
    deceived: Any, liar: Liar, act: Any, command: bytes, said: bytes
) -> None:
    tier = deceived.engine()
    liar.says = {command: said}
    try:
        outcomes = act(deceived, tier)
    except TierError as error:
        assert isinstance(error, TierUnavailable)
        assert "that is none" in str(error)
    else:
        assert [outcome.kind for outcome in outcomes] == [OutcomeKind.FAILED] * 2
        assert "an answer that is none" in str(outcomes[0].cause)
    accepted, liar.says = liar.accepted, {}
    assert tier.exists([key_for(1)]) == [True] or act is reset
    if act is not reset and said != b"*1\r\n$1\r\n0\r\n" and said != b"*2\r\n:0\r\n*0\r\n":
        assert liar.accepted == accepted + 1, "the connection was used again"


@pytest.mark.parametrize("said", [b"*0\r\n", b"*1\r\n$5\r\nslave\r\n", b"*3\r\n:1\r\n:2\r\n:3\r\n"])
def test_a_role_that_is_none_counts_as_no_replica(deceived: Any, liar: Liar, said: bytes) -> None:
    tier = deceived.engine()
    liar.says = {b"ROLE": said}
    tier.move_to("v2")
    assert deceived.store(tier, deceived.keys(1)) == [Outcome.OK]


@pytest.mark.parametrize("said", [b"*2\r\n$1\r\na\r\n$1\r\nx\r\n", b"*2\r\n:1\r\n:2\r\n", b"*0\r\n"])
def test_a_limit_that_is_no_number_is_not_told(deceived: Any, liar: Liar, said: bytes) -> None:
    liar.says = {b"CONFIG": said}
    assert deceived.store(deceived.engine(), deceived.keys(1)) == [Outcome.OK]


@pytest.mark.parametrize("facts", [b"redis_version:unstable", b"redis_version:7\r\nmaxmemory:lots", b""])
def test_facts_that_are_none_do_not_end_a_probe(deceived: Any, liar: Liar, facts: bytes) -> None:
    liar.says = {b"INFO": b"$%d\r\n%b\r\n" % (len(facts), facts)}
    assert deceived.settings().probe(4096).problems == []


ELSEWHERE = ["1 a:b", "x", "", "1 a:99999", "1 a:0", "1 a:-1", "1 a", "1 a:\u0663", "1 a:" + "9" * 5000]


@pytest.mark.parametrize("text", ELSEWHERE)
def test_a_way_that_leads_nowhere_is_not_taken(liar: Liar, sharing: Callable[..., Any], text: str) -> None:
    assert moved_to(Refusal("MOVED", text), Location("h")) is None
    slots = b"*1\r\n*3\r\n:0\r\n:16383\r\n*3\r\n$9\r\n127.0.0.1\r\n:%d\r\n$2\r\nid\r\n" % liar.port
    liar.says = {b"CLUSTER": slots}
    spread = sharing(mode="cluster", nodes=(f"127.0.0.1:{liar.port}",))
    tier = spread.engine()
    liar.says |= {name: f"-MOVED {text}\r\n".encode() for name in (b"GET", b"EXISTS", b"SET")}
    with pytest.raises(TierUnavailable, match="the cluster does not serve this key"):
        tier.exists([key_for(1)])
    (outcome,) = spread.load(tier, spread.keys(1))
    assert outcome.kind is OutcomeKind.FAILED
    assert not isinstance(outcome.cause, TierRefused)


def test_ways_that_lead_on_and_on_end(liar: Liar, sharing: Callable[..., Any]) -> None:
    slots = b"*1\r\n*3\r\n:0\r\n:16383\r\n*3\r\n$9\r\n127.0.0.1\r\n:%d\r\n$2\r\nid\r\n" % liar.port
    liar.says = {b"CLUSTER": slots}
    tier = sharing(mode="cluster", nodes=(f"127.0.0.1:{liar.port}",)).engine()
    for word in ("MOVED", "ASK"):
        liar.says[b"EXISTS"] = f"-{word} 1 127.0.0.1:{liar.port}\r\n".encode()
        with pytest.raises(TierUnavailable, match=f"the cluster does not serve this key: {word}"):
            tier.exists([key_for(1)])


def test_where_the_cluster_sends_to() -> None:
    asked = Location("h", 1)
    assert moved_to(Refusal("MOVED", "7 a:2"), asked) == (Location("a", 2), False)
    assert moved_to(Refusal("ASK", "7 ::1:2"), asked) == (Location("::1", 2), True)
    assert moved_to(Refusal("MOVED", "7 :2"), asked) == (Location("h", 2), False)
    assert moved_to(b"OK", asked) is None
