"""What lies in the folder of one namespace, seen from outside the engines that share it."""

import contextlib
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from random import random
from typing import NamedTuple

from kvcascade.errors import ConfigError, TierRefused
from kvcascade.tiers.described import NAMESPACE_NAME
from kvcascade.tiers.envelope import FORMAT, HEADER_BYTES, Envelope, Flaw, flaw_of, parse
from kvcascade.tiers.files import mapped
from kvcascade.tiers.raw import read_raw
from kvcascade.tiers.stored import Holding, Reading, Removed, StoredChunk, StoredEpoch, StoredNamespace
from kvcascade.types import Entry, Outcome

from .chunkfile import facts, same_file
from .epochs import Epoch, Epochs
from .layout import (
    BLOCK,
    GONE,
    Access,
    Home,
    chunks,
    fans,
    footprint,
    header,
    listed,
    place,
    server_time,
    writers_folder,
)
from .quarantine import Quarantine
from .writers import SILENT, Identity, dead, epoch_of, living, remove

__all__ = ["FsStored"]

TRIES = 3
"""How often a file is looked at that is not right and changes meanwhile."""


class Listed(NamedTuple):
    """What a listing has seen of a file."""

    info: os.stat_result
    nbytes: int
    """Of the file, as far as it is worth reading."""


class FsStored(StoredNamespace):
    """A folder for each epoch, a file for each chunk."""

    def __init__(self, root: Path, home: Home, access: Access) -> None:
        self.namespace = home.namespace
        self.place = str(home.path)
        self._root = root
        self._home = home
        self._access = access
        self._epochs = Epochs(home.marks, self.namespace, access)

    @property
    def locked_by(self) -> str:
        with mapped(self._root):
            users = living(self._root, time.time(), SILENT)
            return next((user.in_words for user in users if user.exclusive), "")

    # -- listing

    def holding(self) -> Holding:
        with mapped(self._home.path):
            files = [info for _, info in self._files()]
            times = [info.st_mtime for info in files]
            return Holding(
                place=self.place,
                namespace=str(self.namespace),
                chunks=len(files),
                bytes=sum(info.st_size for info in files),
                oldest=min(times, default=None),
                newest=max(times, default=None),
                used_by=", ".join(user.in_words for user in self._users(time.time())),
                tenant=self._home.tenant,
            )

    def _files(self) -> Iterator[tuple[str, os.stat_result]]:
        return (chunk for epoch in self._home.epochs() for fan in fans(epoch) for chunk in chunks(fan))

    def _users(self, now: float) -> list[Identity]:
        return [user for user in living(self._root, now) if self._is_of(user)]

    def _is_of(self, user: Identity) -> bool:
        return bool(user.namespace) and self._home.path.name.startswith(user.namespace)

    def chunks(self, prefix: str = "", share: float = 1.0) -> Iterator[StoredChunk]:
        if self._home.format != FORMAT and not self._home.damaged:
            return

        def wanted(name: str) -> bool:
            return (name.startswith((prefix, "x"))) and (share >= 1 or random() < share)

        with mapped(self._home.path):
            for folder, epoch in self._by_epoch(time.time()).items():
                for fan in fans(folder):
                    for path, info in chunks(fan, wanted):
                        chunk = _chunk(path, info, epoch)
                        if chunk.entry.key.hex().startswith(prefix):
                            yield chunk

    def _by_epoch(self, now: float) -> dict[Path, StoredEpoch]:
        """The folders of the epochs."""
        stamps = [epoch_of(self._root, user) for user in self._users(now)]
        notes = {note.stem: epoch for note, epoch in self._epochs.notes().items()}
        return {
            folder: self._facts(notes.get(folder.name), "" in stamps or folder.name in stamps)
            for folder in self._home.epochs()
        }

    def _facts(self, epoch: Epoch | None, in_use: bool) -> StoredEpoch:
        if epoch is None:
            return StoredEpoch("unknown", None, void=False)
        words = "private" if epoch.private else f"weights {epoch.name}" if epoch.name else "unnamed"
        if not self._epochs.is_over(epoch):
            return StoredEpoch(words, epoch.name, void=False)
        return StoredEpoch(words if epoch.private else f"{words}, over", None, void=not in_use)

    # -- reading

    def read(self, chunks: Sequence[StoredChunk]) -> list[Reading]:
        return [self._read(chunk) for chunk in chunks]

    def _read(self, chunk: StoredChunk) -> Reading:
        nbytes = chunk.token.nbytes
        try:
            for _ in range(TRIES):
                raw, info = read_raw(chunk.place, 0, nbytes)
                envelope = parse(raw)
                if isinstance(envelope, Envelope) and len(raw) < min(footprint(envelope.nbytes), info.st_size):
                    nbytes = min(footprint(envelope.nbytes), info.st_size)  # it was less when it was listed
                    continue
                reading = _verified(chunk.place, envelope, raw, info)
                if reading.outcome.ok:
                    return reading
                now = facts(chunk.place)
                if now is None:
                    break
                if same_file(now, info):
                    return reading
        except OSError as error:
            if error.errno not in GONE:
                return Reading.failed(error)
        return Reading(Outcome.MISSING)

    # -- removing

    def remove(self, chunks: Iterable[StoredChunk], quarantine: bool = False) -> Removed:
        if process := self.locked_by:
            raise ConfigError(f"exclusive: {self._root} is in use by {process}, for itself; end it first")
        kept = Quarantine(self._home.quarantine, self._access) if quarantine else None
        count = nbytes = 0
        fans: dict[Path, None] = {}
        with mapped(self._home.path):
            for chunk in chunks:
                now = facts(chunk.place)
                if now is not None and same_file(now, chunk.token.info):
                    if kept is not None:
                        kept.keep(chunk.place)
                    Path(chunk.place).unlink(missing_ok=True)
                    count, nbytes = count + 1, nbytes + now.st_size
                    fans[Path(chunk.place).parent] = None
            remove_own([], [*fans, *{fan.parent for fan in fans}])
        return Removed(count, nbytes)

    # -- sweeping

    def sweep(self, dry_run: bool) -> Removed:
        if self._home.format > FORMAT or self.locked_by:
            return Removed()
        with mapped(self._home.path):
            writers = writers_folder(self._root)
            now = time.time() if dry_run or not writers.is_dir() else server_time(writers)
            swept = Removed()
            for folder, epoch in self._by_epoch(now).items():
                swept = swept.plus(_sweep_epoch(folder, epoch.void, dry_run))
            swept = swept.plus(self._sweep_writers(now, dry_run)).plus(self._sweep_notes(now, dry_run))
            return swept.plus(self._sweep_home(now, dry_run))

    def _sweep_writers(self, now: float, dry_run: bool) -> Removed:
        """What dead writers of this namespace have left."""
        nbytes = others = 0
        for identity, left in dead(self._root, now):
            if self._is_of(identity):
                others += len(left)
                nbytes += sum(info.st_size for path in left[:-1] if (info := facts(str(path))))
                if not dry_run:
                    with contextlib.suppress(OSError):
                        remove(left)
        return Removed(0, nbytes, others)

    def _sweep_notes(self, now: float, dry_run: bool) -> Removed:
        """Notes of epochs that are over, in which nothing lies, and in which no engine is."""
        stamps = [epoch_of(self._root, user) for user in self._users(now)]
        useless = [
            note
            for note, epoch in self._epochs.notes().items()
            if epoch is not None
            and self._epochs.is_over(epoch)
            and not {"", note.stem} & set(stamps)
            and not (self._home.path / note.stem).exists()
        ]
        for note in useless if not dry_run else ():
            note.unlink(missing_ok=True)
        return Removed(others=len(useless))

    def _sweep_home(self, now: float, dry_run: bool) -> Removed:
        """The folder of the namespace itself, where it holds no chunk and nobody uses it."""
        if self._users(now) or next(self._files(), None) is not None:
            return Removed()
        return Removed(others=1 if dry_run or remove_home(self._home) else 0)


def remove_home(home: Home) -> bool:
    """Removes all that is ours; False where foreign files keep the folder."""
    for name in (folder for folder in listed(home.marks) if folder.is_dir()):
        remove_own((file for file in listed(name) if file.name.isdecimal()), [name])
    epochs = Epochs(home.marks, home.namespace, Access())
    remove_own([*epochs.notes(), *home.quarantine.glob("*.chunk")], [home.quarantine, home.marks])
    for epoch in home.epochs():
        _sweep_epoch(epoch, void=True, dry_run=False)
    if [entry.name for entry in listed(home.path)] == [NAMESPACE_NAME]:
        remove_own([home.path / NAMESPACE_NAME], [home.path])
    return not home.path.exists()


def remove_own(files: Iterable[Path], folders: Iterable[Path]) -> int:
    """Removes the files, and those folders that are empty then; returns how many folders."""
    removed = 0
    for file in files:
        file.unlink(missing_ok=True)
    for folder in folders:
        with contextlib.suppress(OSError):
            folder.rmdir()
            removed += 1
    return removed


def _sweep_epoch(folder: Path, void: bool, dry_run: bool) -> Removed:
    """Removes the chunks of an epoch that is void, and of any epoch the folders that are empty."""
    count = nbytes = others = full = 0
    for fan in fans(folder):
        found = list(chunks(fan))
        if found and not void:
            full += 1
            continue
        count += len(found)
        nbytes += sum(info.st_size for _, info in found)
        others += 1 if dry_run else remove_own((Path(path) for path, _ in found), [fan])
    if not full:
        others += 1 if dry_run else remove_own([], [folder])
    return Removed(count, nbytes, others)


def _chunk(path: str, info: os.stat_result, epoch: StoredEpoch) -> StoredChunk:
    found = header(path)
    if isinstance(found, Envelope):
        entry = Entry(found.key, found.nbytes, found.written, info.st_mtime)
        nbytes = min(footprint(found.nbytes), info.st_size)
        return StoredChunk(entry, epoch, path, found.sequence, Listed(info, nbytes))
    name = path.rpartition("/")[2].removeprefix("x")
    entry = Entry(bytes.fromhex(name), max(0, info.st_size - BLOCK), info.st_mtime, info.st_mtime)
    return StoredChunk(entry, epoch, path, 0, Listed(info, HEADER_BYTES))


def _verified(path: str, envelope: Envelope | Flaw, raw: memoryview, info: os.stat_result) -> Reading:
    if envelope is Flaw.NEWER_FORMAT:
        return Reading(Outcome.failed(TierRefused("a chunk was written by a newer version")))
    if isinstance(envelope, Flaw):
        return Reading(Outcome.CORRUPT, flaw=envelope)
    payload = raw[BLOCK : BLOCK + envelope.nbytes]
    flaw = flaw_of(raw, payload, bytes.fromhex(Path(path).parent.parent.name), envelope.key)
    if not path.endswith(place("", envelope.key)):
        flaw = Flaw.OTHER_KEY
    elif info.st_size != footprint(envelope.nbytes):
        flaw = Flaw.OTHER_LENGTH
    return (
        Reading(Outcome.CORRUPT, flaw=flaw) if flaw else Reading(Outcome.OK, payload, sequence=envelope.sequence)
    )
