"""The noop tier holds nothing and says so."""

import pytest

from kvcascade.configs.registry import TIERS, resolve
from kvcascade.errors import ClosedError
from kvcascade.testing import NAMESPACE, UNWRITTEN, buffer, key_for
from kvcascade.tiers import OpenContext
from kvcascade.tiers.noop import NoopSettings, NoopTier
from kvcascade.types import Capabilities, Outcome, Usage

KEYS = [key_for(1), key_for(2)]


@pytest.fixture
def tier() -> NoopTier:
    return NoopSettings().open(OpenContext(NAMESPACE, 4096))


def test_it_is_found_by_its_name() -> None:
    assert resolve(TIERS, "noop") is NoopSettings
    assert NoopSettings().name == "noop"


def test_a_write_is_refused_since_it_could_not_be_read(tier: NoopTier) -> None:
    assert tier.write(KEYS, [buffer(512), buffer(512)], victims=KEYS) == [Outcome.REFUSED] * 2
    assert tier.exists(KEYS) == [False, False]
    assert list(tier.entries()) == []
    assert tier.usage() == Usage(0, 0, None)


def test_a_read_is_a_miss_and_leaves_the_buffer_alone(tier: NoopTier) -> None:
    target = buffer(512)
    assert tier.read(KEYS[:1], [target]) == [Outcome.MISSING]
    assert set(target) == {UNWRITTEN}
    assert tier.delete(KEYS) == [Outcome.MISSING] * 2
    assert tier.read([], []) == []


def test_it_claims_nothing(tier: NoopTier) -> None:
    assert tier.capabilities == Capabilities()
    assert NoopSettings().probe(4096).chunks == 0
    assert NoopSettings().probe(4096).problems == []


def test_moving_and_upkeep_do_nothing(tier: NoopTier) -> None:
    tier.move_to("v2")
    tier.touch(KEYS)
    assert tier.maintain(1.0).vanished == ()


def test_it_is_closed_once(tier: NoopTier) -> None:
    tier.close()
    tier.close()
    for call in (lambda: tier.exists(KEYS), lambda: tier.delete(KEYS), lambda: tier.read(KEYS, [])):
        with pytest.raises(ClosedError):
            call()
