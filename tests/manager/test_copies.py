"""Which copies of the engine are under way, by themselves."""

from collections import Counter

from kvcascade.manager.copies import Copies, Ended
from kvcascade.manager.requests import Request, RequestTable
from kvcascade.testing import key_for
from kvcascade.types import RequestContext

KEYS = [key_for(number) for number in range(4)]
A, B, C, D = KEYS


def _requests(*names: str) -> list[Request]:
    """Requests of these ids, one after the other: of one id, the earlier ones have finished."""
    table, found = RequestTable(), []
    for name in names:
        for earlier in found:
            if earlier.id == name and not earlier.finished:
                table.finish(earlier)
        found.append(table.new(RequestContext(name)))
    return found


def test_copies_end_in_any_order_and_portion() -> None:
    (request,) = _requests("r")
    copies = Copies()
    copies.begin(request, [A, B, C], [7, 8, 9])
    copies.begin(request, [D], [5])
    assert copies.end("r", [C, A]) == ([Ended(request, [C, A], [9, 7])], [])
    assert len(copies) == 2
    assert copies.end("r", [D, B, A]) == ([Ended(request, [D, B], [5, 8])], [A])
    assert copies.end("r", [B]) == ([], [B])
    assert not copies


def test_a_chunk_that_a_request_copies_twice_ends_twice() -> None:
    (request,) = _requests("r")
    copies = Copies()
    copies.begin(request, [A, B], [7, 8])
    copies.begin(request, [A, B, B], [7, 8, 8])
    assert Counter(copies) == {(A, "r"): 2, (B, "r"): 3}
    assert copies.end("r", [A, B, A]) == ([Ended(request, [A, B, A], [7, 8, 7])], [])
    assert copies.end("r", [A, B, B, B]) == ([Ended(request, [B, B], [8, 8])], [A, B])
    assert not copies


def test_of_several_requests_of_an_id_the_earliest_that_copies_the_chunk_is_meant() -> None:
    first, other, second = _requests("r", "other", "r")
    copies = Copies()
    copies.begin(second, [A, B], [1, 2])
    copies.begin(other, [A], [1])
    copies.begin(first, [B, C], [2, 3])
    assert copies.end("r", [B, C, A]) == ([Ended(second, [B, A], [2, 1]), Ended(first, [C], [3])], [])
    assert copies.end("r", [B, B]) == ([Ended(first, [B], [2])], [B])
    assert copies.end("nobody", [A]) == ([], [A])
    assert Counter(copies) == {(A, "other"): 1}


def test_nothing_is_kept_of_what_is_cleared() -> None:
    (request,) = _requests("r")
    copies = Copies()
    copies.begin(request, [A, A], [1, 1])
    copies.clear()
    assert not copies and copies.end("r", [A]) == ([], [A])
