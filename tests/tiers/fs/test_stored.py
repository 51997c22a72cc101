"""What `kvcascade inspect`, `verify`, `gc`, `export` and `warm` see of a shared directory and do to it."""

import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from kvcascade.testing import NAMESPACE, StoredConformance, bytes_for, key_for
from kvcascade.tiers import OpenContext, StoredChunk, StoredNamespace
from kvcascade.tiers.envelope import Flaw
from kvcascade.tiers.fs import FsSettings
from kvcascade.tiers.fs.epochs import KEPT_NOTES, Epochs
from kvcascade.tiers.fs.layout import Access
from kvcascade.tiers.fs.tier import FsTier
from kvcascade.types import Key, Outcome


class TestFsStored(StoredConformance):
    def settings(self, path: Path) -> FsSettings:
        return FsSettings(path=str(path / "kv"))

    def raw_corrupt(self, chunk: StoredChunk) -> None:
        path = Path(chunk.place)
        raw = bytearray(path.read_bytes())
        raw[len(raw) // 2] ^= 1
        path.write_bytes(raw)


class TestExclusiveFsStored(TestFsStored):
    def settings(self, path: Path) -> FsSettings:
        return FsSettings(path=str(path / "kv"), capacity=80 << 20, exclusive=True)


# What is of the directory alone

CHUNK = 64 << 10
KEYS = [key_for(number) for number in range(8)]


@pytest.fixture
def settings(tmp_path: Path) -> FsSettings:
    return FsSettings(path=str(tmp_path / "kv"))


def opened(settings: FsSettings, keys: list[Key] = KEYS, epoch: str = "") -> FsTier:
    tier = FsTier.open(settings, OpenContext(NAMESPACE, CHUNK, epoch=epoch))
    assert tier.write(keys, [memoryview(bytes_for(key, CHUNK)) for key in keys]) == [Outcome.OK] * len(keys)
    return tier


def only(settings: FsSettings) -> StoredNamespace:
    (kept,) = settings.stored()
    return kept


def notes(settings: FsSettings) -> list[Path]:
    return list(Path(settings.path).rglob("epochs/*.json"))


def test_an_epoch_of_which_nobody_knows_what_it_is_stays(settings: FsSettings) -> None:
    tier = opened(settings)
    tier.move_to("")
    tier.close()
    for note in notes(settings):
        note.unlink()
    kept = only(settings)
    assert {chunk.epoch.words for chunk in kept.chunks()} == {"unknown"}
    assert kept.sweep(dry_run=False).chunks == 0
    assert len(list(kept.chunks())) == len(KEYS)


def test_an_engine_that_does_not_say_its_epoch_may_be_in_any(settings: FsSettings) -> None:
    tier = opened(settings)
    opened(settings, []).move_to("")
    for said in Path(settings.path).rglob("in-*"):
        said.unlink()
    kept = only(settings)
    assert not any(chunk.epoch.void for chunk in kept.chunks())
    assert kept.sweep(dry_run=False).chunks == 0
    assert tier.exists(KEYS) == [True] * len(KEYS)
    tier.close()


def test_an_engine_that_was_taken_for_dead_says_its_epoch_again(settings: FsSettings) -> None:
    tier = opened(settings)
    with opened(settings, []) as other:
        other.move_to("")
    shutil.rmtree(tier._opened.writer.folder)
    tier._opened.writer.beat()
    assert only(settings).sweep(dry_run=False).chunks == 0
    assert tier.exists(KEYS) == [True] * len(KEYS)
    tier.close()
    assert only(settings).sweep(dry_run=False).chunks == len(KEYS)


def test_notes_of_epochs_do_not_pile_up(tmp_path: Path) -> None:
    marks = tmp_path / NAMESPACE.digest.hex() / "epochs"
    epochs = Epochs(marks, NAMESPACE, Access())
    epoch = epochs.enter("")
    for _ in range(KEPT_NOTES + 40):
        epoch = epochs.move(epoch, "")
    assert len(epochs.notes()) == KEPT_NOTES
    assert epoch in epochs.notes().values()


def test_notes_that_mean_nothing_any_more_are_swept(settings: FsSettings) -> None:
    tier = opened(settings, [])
    for name in ("a", "", "b", ""):
        tier.move_to(name)
    assert len(notes(settings)) == 5
    only(settings).sweep(dry_run=False)
    (note,) = notes(settings)
    assert note.stem == tier._opened.stamp.hex(), "the epoch that it is in"
    tier.close()
    opened(settings, KEYS, "b").close()
    only(settings).sweep(dry_run=False)
    assert len(notes(settings)) == 1, "of an epoch that can be entered again"


def test_a_note_that_is_damaged_says_nothing(settings: FsSettings) -> None:
    tier = opened(settings)
    for note in notes(settings):
        note.write_text("{")
    tier.move_to("")
    tier.close()
    kept = only(settings)
    assert {(chunk.epoch.words, chunk.epoch.void) for chunk in kept.chunks()} == {("unknown", False)}


def test_a_chunk_that_is_used_meanwhile_stays(settings: FsSettings) -> None:
    """What was listed as not used for long is used before it is removed."""
    opened(settings).close()
    kept = only(settings)
    chunks = list(kept.chunks())
    os.utime(chunks[2].place)
    assert kept.remove(chunks).chunks == len(KEYS) - 1
    assert [chunk.entry.key for chunk in kept.chunks()] == [chunks[2].entry.key]


def test_a_file_of_which_nothing_can_be_read_is_listed(settings: FsSettings) -> None:
    """Under the key that its name says; a long key's name is a hash."""
    long = b"k" * 100
    opened(settings, [*KEYS[:1], long]).close()
    for path in [Path(chunk.place) for chunk in only(settings).chunks()]:
        path.write_bytes(bytes(8192))
    kept = only(settings)
    chunks = sorted(kept.chunks(), key=lambda chunk: Path(chunk.place).name)
    assert chunks[0].entry.key == KEYS[0]
    assert [reading.flaw for reading in kept.read(chunks)] == [Flaw.NO_ENVELOPE] * 2
    assert kept.remove(chunks).chunks == 2


def test_a_file_that_is_right_again_is_read_as_it_is_now(settings: FsSettings) -> None:
    opened(settings, KEYS[:1]).close()
    kept = only(settings)
    (chunk,) = kept.chunks()
    whole = Path(chunk.place).read_bytes()
    Path(chunk.place).write_bytes(bytes(100))
    (damaged,) = kept.chunks()
    Path(chunk.place).write_bytes(whole)
    (reading,) = kept.read([damaged])
    assert reading.outcome == Outcome.OK
    assert bytes(reading.payload) == bytes_for(KEYS[0], CHUNK)


def test_a_newer_format_is_neither_read_nor_removed(settings: FsSettings) -> None:
    opened(settings).close()
    described = next(Path(settings.path).rglob("namespace.json"))
    described.write_text(json.dumps({**json.loads(described.read_text()), "format": 99}))
    kept = only(settings)
    assert list(kept.chunks()) == []
    assert kept.sweep(dry_run=False) == (0, 0, 0)
    assert kept.holding().chunks == len(KEYS)


def test_links_and_folders_in_the_place_of_a_chunk_are_left_alone(settings: FsSettings, tmp_path: Path) -> None:
    opened(settings, KEYS[:3]).close()
    mine = tmp_path / "mine"
    mine.write_bytes(b"mine")
    kept = only(settings)
    one, two, _ = [Path(chunk.place) for chunk in kept.chunks()]
    listed: list[Any] = list(kept.chunks())
    one.unlink()
    one.symlink_to(mine)
    two.unlink()
    two.mkdir()
    assert len(list(kept.chunks())) == 1
    assert kept.remove(listed).chunks == 1
    assert mine.read_bytes() == b"mine"
    assert one.is_symlink()
    assert two.is_dir()
