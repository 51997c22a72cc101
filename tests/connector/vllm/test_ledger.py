"""What is known of copies that vLLM does not report."""

import pytest

from kvcascade.connector.vllm.ledger import CopyLedger
from kvcascade.tiers.host import HostPool

A, B, C = b"a", b"b", b"c"


@pytest.fixture
def pool():
    with HostPool(4, 10, ranks=2) as pool:
        yield pool


@pytest.fixture
def ledger(pool):
    return CopyLedger(pool.marks, pool.slots)


def end(pool, slots, failed=(), ranks=(0, 1)):
    for rank in ranks:
        pool.marks.end(rank, slots, failed)


def test_a_copy_that_failed_on_one_rank_is_told(pool, ledger):
    ledger.grant("r", [A, B], [2, 3], store=True)
    end(pool, [2, 3], ranks=[0])
    end(pool, [2, 3], failed=[3], ranks=[1])
    assert ledger.close("r", [A, B], store=True) == [B]


def test_a_failure_is_of_its_copy_only(pool, ledger):
    ledger.grant("r", [A], [2], store=True)
    end(pool, [2], failed=[2])
    assert ledger.close("r", [A], store=True) == [A]
    ledger.grant("s", [B], [2], store=True)
    end(pool, [2])
    assert ledger.close("s", [B], store=True) == []


def test_after_a_reset_each_copy_ends_when_all_ranks_have_ended_it(pool, ledger):
    ledger.grant("r", [A], [0], store=True)
    ledger.grant("r", [B], [1], store=False)
    ledger.grant("s", [B], [1], store=False)
    ledger.void()
    assert ledger.awaited and ledger.take_ended() == []
    end(pool, [0, 1], ranks=[0])
    assert ledger.take_ended() == []
    end(pool, [0, 1], ranks=[1])
    assert [(copy.req_id, copy.key, copy.store) for copy in ledger.take_ended()] == [
        ("r", A, True),
        ("r", B, False),
    ]
    end(pool, [1])
    assert [copy.req_id for copy in ledger.take_ended()] == ["s"]
    assert not ledger.awaited


def test_what_a_reset_has_voided_can_not_be_closed(pool, ledger):
    ledger.grant("r", [A], [0], store=True)
    ledger.void()
    end(pool, [0], failed=[0])
    assert ledger.close("r", [A], store=True) == []
    assert [copy.key for copy in ledger.take_ended()] == [A]
