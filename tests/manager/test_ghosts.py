"""Why chunks are not there: exactly for the last ones, and that they were here for those before."""

from hashlib import sha256

from kvcascade.manager.ghosts import Ghosts
from kvcascade.types import MissReason

KEPT = 65_536
REASONS = (MissReason.EVICTED, MissReason.REFUSED, MissReason.CORRUPT)


def key(number):
    return sha256(number.to_bytes(8, "big")).digest() + bytes(4)


def reason(number):
    return REASONS[number % len(REASONS)]


def test_the_last_ones_are_known_and_of_those_before_that_they_were_here():
    ghosts, total = Ghosts(), 3 * KEPT
    for number in range(total):
        ghosts.add(key(number), reason(number))
    assert all(ghosts.why(key(number)) is reason(number) for number in range(total - KEPT, total))
    assert all(ghosts.why(key(number)) in (reason(number), MissReason.UNKNOWN) for number in range(total - KEPT))
    assert ghosts.why(key(0)) is MissReason.UNKNOWN
    others = [ghosts.why(key(number)) for number in range(total, total + 10_000)]
    assert set(others) == {MissReason.NEVER_STORED, MissReason.UNKNOWN}
    assert others.count(MissReason.UNKNOWN) < 500


def test_the_latest_reason_counts():
    ghosts = Ghosts()
    ghosts.add_all([key(1), key(2)], MissReason.EVICTED)
    for number in range(3, 20_000):
        ghosts.add(key(number), MissReason.EVICTED)
    ghosts.add(key(1), MissReason.CORRUPT)
    assert (ghosts.why(key(1)), ghosts.why(key(2))) == (MissReason.CORRUPT, MissReason.EVICTED)
    assert ghosts.why(key(0)) is MissReason.NEVER_STORED
