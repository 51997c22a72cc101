"""What `TierSettings.stored` must do: a pytest class that the tests of each persistent tier derive from."""

import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

import pytest

from kvcascade.errors import ConfigError
from kvcascade.tiers import OpenContext, StoredChunk, StoredNamespace, Tier, TierSettings
from kvcascade.types import Key, Namespace, Outcome

from .bytes import buffer, bytes_for, holds, key_for
from .conformance import NAMESPACE

__all__ = ["StoredConformance"]

CHUNK = 64 << 10
KEYS = [key_for(number) for number in range(8)]
OTHER = Namespace.of(model="another", tenant="")


class Opener(Protocol):
    def __call__(self, namespace: Namespace = NAMESPACE, epoch: str = "") -> Tier: ...


class StoredConformance:
    """The tests of the contract of `kvcascade.tiers.StoredNamespace`. A subclass, named `Test...`, gives settings:

        class TestMine(StoredConformance):
            def settings(self, path):
                return MineSettings(path=path / "chunks", capacity=64 << 20)

    The tests of damage are skipped unless it overrides `raw_corrupt`, which reaches around the tier.
    """

    def settings(self, path: Path) -> TierSettings:
        """Settings of a tier in the empty folder `path`, which takes 64 MiB at least."""
        raise NotImplementedError(f"{type(self).__name__} must define settings(self, path)")

    def raw_corrupt(self, chunk: StoredChunk) -> None:
        """Changes one byte in the middle of the chunk's payload."""
        pytest.skip("no raw access to damage a chunk")

    @pytest.fixture
    def given(self, tmp_path: Path) -> TierSettings:
        return self.settings(tmp_path)

    @pytest.fixture
    def opener(self, given: TierSettings) -> Iterator[Opener]:
        """Opens the tier, any number of times, and closes what the test left open."""
        with ExitStack() as stack:

            def opened(namespace: Namespace = NAMESPACE, epoch: str = "") -> Tier:
                tier = given.open(OpenContext(namespace, CHUNK, epoch=epoch))
                stack.callback(tier.close)
                return tier

            yield opened

    # -- listing

    def test_nothing_is_stored_where_nothing_is(self, given: TierSettings) -> None:
        assert given.stored() == []
        assert given.stored("0") == []

    @pytest.mark.parametrize("running", [True, False])
    def test_what_is_listed_is_what_was_written(self, given: TierSettings, opener: Opener, running: bool) -> None:
        began = time.time()
        tier = _filled(opener())
        if not running:
            tier.close()
        kept = _only(given)
        assert kept.namespace == NAMESPACE
        chunks = list(kept.chunks())
        assert sorted(chunk.entry.key for chunk in chunks) == sorted(KEYS)
        for chunk in chunks:
            assert chunk.entry.nbytes == CHUNK
            assert began - 60 <= chunk.entry.written <= time.time() + 60
            assert began - 60 <= chunk.entry.used <= time.time() + 60
            assert (chunk.epoch.weights, chunk.epoch.void) == ("", False)
        assert len({chunk.place for chunk in chunks}) == len(KEYS)
        holding = kept.holding()
        assert (holding.chunks, holding.namespace) == (len(KEYS), str(NAMESPACE))
        assert holding.place == kept.place
        assert holding.bytes >= len(KEYS) * CHUNK
        assert bool(holding.used_by) is running

    def test_each_namespace_is_listed_for_itself(self, given: TierSettings, opener: Opener) -> None:
        _filled(opener()).close()
        _filled(opener(OTHER), KEYS[:3]).close()
        found = {str(kept.namespace): len(list(kept.chunks())) for kept in given.stored()}
        assert found == {str(NAMESPACE): 8, str(OTHER): 3}

    def test_keys_are_found_by_how_they_begin(self, given: TierSettings, opener: Opener) -> None:
        long = [b"\xab" * 200, b"\xab" * 199 + b"\xac"]
        _filled(opener(), [*KEYS, *long]).close()
        kept = _only(given)
        for digits in (1, 2, 3, 72):
            prefix = KEYS[3].hex()[:digits]
            wanted = sorted(key for key in KEYS if key.hex().startswith(prefix))
            assert sorted(chunk.entry.key for chunk in kept.chunks(prefix)) == wanted
        assert [chunk.entry.key for chunk in kept.chunks(long[1].hex())] == long[1:]
        assert list(kept.chunks("ffffffffffff")) == []

    def test_a_share_is_a_part_of_it(self, given: TierSettings, opener: Opener) -> None:
        keys = [key_for(number) for number in range(400)]
        _filled(opener(), keys, 512).close()
        kept = _only(given)
        found = [chunk.entry.key for chunk in kept.chunks(share=0.5)]
        assert 100 < len(found) < 300
        assert set(found) < set(keys)
        assert len(list(kept.chunks(share=1.0))) == 400

    # -- reading

    @pytest.mark.parametrize("running", [True, False])
    def test_what_is_read_is_what_was_written(self, given: TierSettings, opener: Opener, running: bool) -> None:
        sizes = {key_for(20): 1, key_for(21): 4095, key_for(22): 4097, key_for(23): CHUNK}
        tier = opener()
        for key, nbytes in sizes.items():
            _filled(tier, [key], nbytes)
        if not running:
            tier.close()
        kept = _only(given)
        chunks = list(kept.chunks())
        for chunk, reading in zip(chunks, kept.read(chunks), strict=True):
            assert reading.outcome == Outcome.OK
            assert len(reading.payload) == sizes[chunk.entry.key]
            assert holds(reading.payload, chunk.entry.key)
        assert kept.read([]) == []

    def test_what_has_gone_since_is_missing(self, given: TierSettings, opener: Opener) -> None:
        """Not corrupt: whatever the engine has put in its place."""
        tier = _filled(opener())
        kept = _only(given)
        chunks = sorted(kept.chunks(), key=lambda chunk: chunk.entry.key)
        assert tier.delete([chunk.entry.key for chunk in chunks[:4]]) == [Outcome.OK] * 4
        _filled(tier, [key_for(number) for number in range(100, 110)])
        readings = kept.read(chunks)
        assert [reading.outcome for reading in readings[4:]] == [Outcome.OK] * 4
        for chunk, reading in zip(chunks, readings, strict=True):
            assert reading.outcome in (Outcome.OK, Outcome.MISSING)
            assert not reading.outcome.ok or holds(reading.payload, chunk.entry.key)

    def test_what_was_reset_since_is_not_corrupt(self, given: TierSettings, opener: Opener) -> None:
        tier = _filled(opener())
        kept = _only(given)
        chunks = list(kept.chunks())
        tier.move_to("")
        _filled(tier, [key_for(number) for number in range(100, 110)])
        for chunk, reading in zip(chunks, kept.read(chunks), strict=True):
            assert reading.outcome in (Outcome.OK, Outcome.MISSING)
            assert not reading.outcome.ok or holds(reading.payload, chunk.entry.key)

    def test_what_is_damaged_is_said_and_stays(self, given: TierSettings, opener: Opener) -> None:
        _filled(opener()).close()
        kept = _only(given)
        chunks = list(kept.chunks())
        self.raw_corrupt(chunks[2])
        for _ in range(2):
            readings = kept.read(chunks)
            wrong = [i for i, reading in enumerate(readings) if reading.outcome != Outcome.OK]
            assert wrong == [2]
            assert readings[2].outcome == Outcome.CORRUPT
            assert readings[2].flaw is not None
            assert readings[2].flaw.value == "payload damaged"
        assert len(list(kept.chunks())) == len(KEYS)

    # -- removing

    def test_what_is_removed_is_gone_and_the_others_stay(self, given: TierSettings, opener: Opener) -> None:
        _filled(opener()).close()
        kept = _only(given)
        doomed = [chunk for chunk in kept.chunks() if chunk.entry.key in KEYS[:3]]
        removed = kept.remove(iter(doomed))
        assert removed.chunks == 3
        assert removed.bytes >= 3 * CHUNK
        assert sorted(chunk.entry.key for chunk in _only(given).chunks()) == sorted(KEYS[3:])
        assert kept.remove(doomed).chunks == 0
        tier = opener()
        assert tier.exists(KEYS) == [False] * 3 + [True] * 5
        targets = [buffer(CHUNK) for _ in KEYS]
        assert tier.read(KEYS, targets) == [Outcome.MISSING] * 3 + [Outcome.OK] * 5
        assert all(holds(target, key) for key, target in zip(KEYS[3:], targets[3:], strict=True))

    def test_everything_can_be_removed(self, given: TierSettings, opener: Opener) -> None:
        _filled(opener()).close()
        kept = _only(given)
        assert kept.remove(kept.chunks()).chunks == len(KEYS)
        assert [chunk for one in given.stored() for chunk in one.chunks()] == []
        assert _filled(opener()).exists(KEYS) == [True] * len(KEYS)

    def test_what_was_written_anew_stays(self, given: TierSettings, opener: Opener) -> None:
        tier = _filled(opener())
        old = list(_only(given).chunks())
        tier.delete(KEYS)
        _filled(tier)
        tier.close()
        assert _only(given).remove(old).chunks == 0
        assert opener().exists(KEYS) == [True] * len(KEYS)

    def test_what_an_engine_has_to_itself_is_not_changed(self, given: TierSettings, opener: Opener) -> None:
        tier = _filled(opener())
        kept = _only(given)
        if not kept.locked_by:
            pytest.skip("engines share it")
        with pytest.raises(ConfigError, match="in use by"):
            kept.remove(kept.chunks())
        assert kept.sweep(dry_run=False) == (0, 0, 0)
        assert tier.exists(KEYS) == [True] * len(KEYS)

    # -- sweeping

    @pytest.mark.parametrize("epoch", ["", "v1"])
    def test_what_is_of_use_is_not_swept(self, given: TierSettings, opener: Opener, epoch: str) -> None:
        tier = _filled(opener(epoch=epoch))
        for running in (True, False):
            kept = _only(given)
            assert {(chunk.epoch.weights, chunk.epoch.void) for chunk in kept.chunks()} == {(epoch, False)}
            assert kept.sweep(dry_run=True).chunks == kept.sweep(dry_run=False).chunks == 0
            if running:
                assert tier.exists(KEYS) == [True] * len(KEYS)
                tier.close()
        assert opener(epoch=epoch).exists(KEYS) == [True] * len(KEYS)

    def test_what_an_ended_engine_had_to_itself_is_void(self, given: TierSettings, opener: Opener) -> None:
        """After a reset to weights without a name nobody joins it, not even after a restart."""
        tier = opener()
        tier.move_to("")
        _filled(tier)
        for kept in given.stored():
            assert all(not chunk.epoch.void and chunk.epoch.weights is None for chunk in kept.chunks())
            kept.sweep(dry_run=False)
        assert tier.exists(KEYS) == [True] * len(KEYS)
        tier.close()
        kept = _only(given)
        assert all(chunk.epoch.void for chunk in kept.chunks())
        wanted = kept.sweep(dry_run=True)
        assert wanted.chunks == len(KEYS)
        assert wanted.bytes >= len(KEYS) * CHUNK
        assert len(list(kept.chunks())) == len(KEYS)
        assert kept.sweep(dry_run=False).chunks == len(KEYS)
        assert [chunk for one in given.stored() for chunk in one.chunks()] == []
        assert opener().exists(KEYS) == [False] * len(KEYS)


def _only(settings: TierSettings) -> StoredNamespace:
    (kept,) = settings.stored()
    return kept


def _filled(tier: Tier, keys: Sequence[Key] = KEYS, nbytes: int = CHUNK) -> Tier:
    assert tier.write(keys, [memoryview(bytes_for(key, nbytes)) for key in keys]) == [Outcome.OK] * len(keys)
    return tier
