"""What `kvcascade inspect`, `verify`, `gc`, `export` and `warm` see of a disk and do to it."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvcascade.testing import StoredConformance, buffer, bytes_for, holds, key_for
from kvcascade.tiers import OpenContext, StoredChunk
from kvcascade.tiers.disk import DiskSettings
from kvcascade.tiers.disk.plan import QUARANTINED
from kvcascade.tiers.disk.tier import DiskTier
from kvcascade.tiers.envelope import Flaw
from kvcascade.types import Namespace, Outcome

CAPACITY = 80 << 20


def damage(chunk: StoredChunk) -> None:
    """Changes one bit in the middle of the payload."""
    path = Path(chunk.place.partition(" slot ")[0])
    slot_bytes = int(path.stem.rpartition("-")[2])
    with path.open("r+b", buffering=0) as file:
        file.seek(chunk.token.slot.place * slot_bytes + slot_bytes // 2)
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))


class TestDiskStored(StoredConformance):
    def settings(self, path: Path) -> DiskSettings:
        return DiskSettings(path=str(path / "kv"), capacity=CAPACITY)

    def raw_corrupt(self, chunk: StoredChunk) -> None:
        damage(chunk)


# What is of the disk alone

CHUNK = 64 << 10
NAMESPACE = Namespace.of(model="m")
KEYS = [key_for(number) for number in range(12)]


def settings(path: Path, **more: Any) -> DiskSettings:
    return DiskSettings(path=str(path / "kv"), capacity=CAPACITY, **more)


def filled(path: Path, sizes: Sequence[int] = (CHUNK,), **more: Any) -> None:
    with settings(path, **more).open(OpenContext(NAMESPACE, CHUNK)) as tier:
        for nbytes in sizes:
            keys = [key + nbytes.to_bytes(4, "big") for key in KEYS]
            assert tier.write(keys, [memoryview(bytes_for(key, nbytes)) for key in keys]) == [Outcome.OK] * 12


def lose_trust(path: Path, torn: bool) -> None:
    """As a power cut leaves it."""
    session = next(path.rglob("session.json"))
    session.write_text(json.dumps({"boot": "another boot", "clean": False, "durability": "none"}))
    if torn:
        next(path.rglob("index.lmdb")).write_bytes(b"torn")


@pytest.mark.parametrize("torn", [True, False])
def test_where_the_index_is_not_trusted_the_envelopes_tell(tmp_path: Path, torn: bool) -> None:
    filled(tmp_path)
    lose_trust(tmp_path, torn)
    (kept,) = settings(tmp_path).stored()
    chunks = list(kept.chunks())
    assert len(chunks) == kept.holding().chunks == 12
    assert all(
        reading.outcome.ok and holds(reading.payload, chunk.entry.key)
        for chunk, reading in zip(chunks, kept.read(chunks), strict=True)
    )
    damage(chunks[3])
    assert kept.read(chunks)[3].flaw is Flaw.PAYLOAD_DAMAGED


def test_an_index_that_is_damaged_is_not_trusted(tmp_path: Path) -> None:
    filled(tmp_path)
    next(tmp_path.rglob("index.lmdb")).write_bytes(bytes(8192))
    (kept,) = settings(tmp_path).stored()
    assert len(list(kept.chunks())) == 12


@pytest.mark.parametrize("when", ["before", "after"])
def test_what_was_removed_is_not_found_again_after_a_power_cut(tmp_path: Path, when: str) -> None:
    filled(tmp_path)
    if when == "before":
        lose_trust(tmp_path, torn=True)
    (kept,) = settings(tmp_path).stored()
    doomed = list(kept.chunks())[:5]
    assert kept.remove(doomed).chunks == 5
    if when == "after":
        lose_trust(tmp_path, torn=True)
    gone = {chunk.entry.key for chunk in doomed}
    with settings(tmp_path).open(OpenContext(NAMESPACE, CHUNK)) as tier:
        while isinstance(tier, DiskTier) and tier._scan is not None:
            tier.maintain(1.0)
        left = {entry.key for entry in tier.entries()}
        assert len(left) == 7
        assert not gone & left


def test_extents_in_which_nothing_is_left_are_given_back(tmp_path: Path) -> None:
    filled(tmp_path, sizes=[CHUNK, 4 * 4096])
    (kept,) = settings(tmp_path).stored()
    assert len(list(tmp_path.rglob("*.slab"))) > 1
    before = kept.holding().bytes
    kept.remove(chunk for chunk in kept.chunks() if chunk.entry.nbytes == CHUNK)
    assert kept.holding().bytes <= before - 12 * CHUNK
    with settings(tmp_path).open(OpenContext(NAMESPACE, CHUNK)) as tier:
        entries = list(tier.entries())
        targets = [buffer(entry.nbytes) for entry in entries]
        assert tier.read([entry.key for entry in entries], targets) == [Outcome.OK] * 12
        assert all(holds(target, entry.key) for target, entry in zip(targets, entries, strict=True))
    filled(tmp_path)


def test_the_quarantine_stays_small(tmp_path: Path) -> None:
    filled(tmp_path, on_corrupt="quarantine")
    (kept,) = settings(tmp_path, on_corrupt="quarantine").stored()
    chunks = list(kept.chunks())
    for chunk in chunks[:10]:
        damage(chunk)
    assert kept.remove(chunks[:10], quarantine=True).chunks == 10
    assert len(list(tmp_path.rglob("*.chunk"))) == QUARANTINED
    with settings(tmp_path, on_corrupt="quarantine").open(OpenContext(NAMESPACE, CHUNK)):
        assert len(list(tmp_path.rglob("*.chunk"))) == QUARANTINED


def test_each_engine_has_its_own(tmp_path: Path) -> None:
    for engine_id in ("a", "b/c"):
        with settings(tmp_path).open(OpenContext(NAMESPACE, CHUNK, engine_id=engine_id)) as tier:
            tier.write(KEYS[:1], [memoryview(bytes_for(KEYS[0], CHUNK))])
    assert len(settings(tmp_path).stored()) == 2
    (one,) = settings(tmp_path).stored("b/c")
    assert "engine-b%2Fc" in one.place
    assert settings(tmp_path).stored("c") == []


@pytest.mark.parametrize("version", [0, 99])
def test_another_format_is_neither_read_nor_removed(tmp_path: Path, version: int) -> None:
    filled(tmp_path)
    described = next(tmp_path.rglob("namespace.json"))
    described.write_text(json.dumps({**json.loads(described.read_text()), "format": version}))
    (kept,) = settings(tmp_path).stored()
    assert list(kept.chunks()) == []
    if version == 99:
        assert kept.sweep(dry_run=False) == (0, 0, 0)
        assert list(tmp_path.rglob("*.slab"))


def test_what_a_killed_engine_was_about_to_finish_goes(tmp_path: Path) -> None:
    filled(tmp_path)
    (kept,) = settings(tmp_path).stored()
    for name in ("epoch.json.tmp", "index.lmdb.compact"):
        Path(kept.place, name).write_bytes(bytes(10_000))
    Path(kept.place, "mine.tmp").write_text("mine")
    assert kept.sweep(dry_run=True).others == kept.sweep(dry_run=False).others == 2
    assert kept.sweep(dry_run=True) == (0, 0, 0)
    assert Path(kept.place, "mine.tmp").exists()
    assert len(list(kept.chunks())) == 12
