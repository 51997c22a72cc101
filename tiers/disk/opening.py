"""Opening the tier: from a path to a locked folder, slabs and an index that agree."""

import logging
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvcascade.configs.units import format_size
from kvcascade.errors import ConfigError
from kvcascade.tiers.base import OpenContext
from kvcascade.tiers.blocks import block_size, direct_works
from kvcascade.tiers.boot import boot_id
from kvcascade.tiers.envelope import FORMAT
from kvcascade.tiers.files import disk_bytes, free_bytes, mapped, nearest_existing
from kvcascade.types import Namespace

from .folder import COMPACTED_NAME, EngineFolder, NamespaceFolder, Others
from .index import LOCK_NAME, IndexDamaged, LmdbIndex
from .marks import Epoch, Session
from .plan import QUARANTINED, Plan, plan
from .quarantine import Quarantine
from .recovery import Found, Scan, adopt, fit, shorten
from .slabs import Slabs

if TYPE_CHECKING:
    from .settings import DiskSettings

__all__ = ["Opened", "block_for", "lacking_space", "open_folder", "plan_for"]

log = logging.getLogger("kvcascade.tiers.disk")

SPARE_READERS = 32
"""Places in LMDB's reader table beyond the lane's threads: for `kvcascade ls`, and for the dead, until cleared."""


@dataclass(slots=True)
class Opened:
    """All that a tier works on. It belongs to one process."""

    namespace: Namespace
    plan: Plan
    engine: EngineFolder
    folder: NamespaceFolder
    direct: bool
    epoch: Epoch
    session: Session
    """How the session is recorded while it runs."""
    slabs: Slabs
    index: LmdbIndex
    quarantine: Quarantine
    found: Found
    scan: Scan | None
    """Where the index has to be built from the envelopes."""

    def close(self) -> None:
        self.index.close()
        self.slabs.close()
        self.engine.close()


def open_folder(settings: "DiskSettings", context: OpenContext) -> Opened:
    """Locks an engine's folder and brings slabs and index of the namespace in step.

    Raises:
        ConfigError: it can never be opened like this.
        TierUnavailable: it can't be opened now.
    """
    path = Path(settings.path)
    with mapped(path), ExitStack() as undo:
        plan_for(settings, context.chunk_bytes, block_size(nearest_existing(path)))
        _check_space(settings, path)
        engine = EngineFolder.take(path, context.engine_id, context.place)
        undo.callback(engine.close)
        folder = NamespaceFolder.of(engine.path, context.namespace)
        folder.check_format()
        _check_space(settings, engine.path)
        block = block_for(folder)
        layout = plan_for(settings, context.chunk_bytes, block)
        _start_empty_if_foreign(folder, block)
        folder.prepare(context.namespace, block)
        opened = _Opening(settings, context, layout, engine, folder, undo).run()
        undo.pop_all()
        return opened


def plan_for(settings: "DiskSettings", chunk_bytes: int, block: int) -> Plan:
    """
    Raises:
        ConfigError: the capacity does not hold a few chunks.
    """
    return plan(settings.capacity, chunk_bytes, block, settings.on_corrupt == "quarantine")


def block_for(folder: NamespaceFolder) -> int:
    """What everything is aligned to: as it was when the folder was made, where the device can still do that."""
    needed = block_size(nearest_existing(folder.path))
    return folder.block if folder.block and folder.block % needed == 0 else needed


def _check_space(settings: "DiskSettings", folder: Path) -> None:
    if problem := lacking_space(settings, folder):
        raise ConfigError(problem)


def lacking_space(settings: "DiskSettings", folder: Path) -> str:
    """What is wrong where the file system has no room for the capacity, beside what lies in `folder` already; ""
    where it has."""
    ours = sum(disk_bytes(path) for path in folder.rglob("*") if path.is_file())
    free, _ = free_bytes(nearest_existing(folder))
    if free + ours >= settings.capacity:
        return ""
    return (
        f"capacity: {format_size(settings.capacity)} ({settings.capacity} bytes) is more than the file system of "
        f"{settings.path} has: {format_size(free)} are free and {format_size(ours)} are in use here already; "
        f"lower `capacity` or make room"
    )


def _start_empty_if_foreign(folder: NamespaceFolder, block: int) -> None:
    """Removes what an older version, or an alignment that does not work any more, has left."""
    if not folder.path.exists() or not folder.own_files():
        return
    if folder.description.get("format") == FORMAT and folder.block == block:
        return
    log.warning("%s: starts empty, what lay there is of an older format or another block size", folder.path)
    folder.empty()


class _Opening:
    """The steps of opening a namespace's folder, in order; what is opened is closed again through `undo`."""

    def __init__(
        self,
        settings: "DiskSettings",
        context: OpenContext,
        layout: Plan,
        engine: EngineFolder,
        folder: NamespaceFolder,
        undo: ExitStack,
    ) -> None:
        self._settings = settings
        self._context = context
        self._plan = layout
        self._engine = engine
        self._folder = folder
        self._undo = undo
        self._session = Session(boot_id(), clean=False, durability=settings.durability)

    def run(self) -> Opened:
        direct = direct_works(self._folder.path, self._plan.block)
        if not direct:
            log.warning("%s: no direct I/O here, the page cache is used", self._folder.path)
        last = Epoch.read(self._folder.path)
        epoch = Epoch.resume(self._folder.path, self._context.epoch)
        slabs = self._open_slabs(direct)
        index, whole = self._open_index(slabs)
        if index.mark() != epoch.mark:
            index.reset(epoch.mark)
        found, scan = Found(0, 0, 0), None
        if whole:
            index, found = self._fitted(index, slabs)
        else:
            shorten(slabs)
            scan = Scan(slabs, self._plan.block) if slabs.extents and epoch == last else None
            if scan is None:
                self._session.write(self._folder.path)
        return Opened(
            namespace=self._context.namespace,
            plan=self._plan,
            engine=self._engine,
            folder=self._folder,
            direct=direct,
            epoch=epoch,
            session=self._session,
            slabs=slabs,
            index=index,
            quarantine=self._open_quarantine(),
            found=found,
            scan=scan,
        )

    def _open_slabs(self, direct: bool) -> Slabs:
        others = Others(self._engine.path, self._folder)
        durable = self._settings.durability != "none"
        slabs = Slabs(self._folder.path, self._plan, direct, durable, others)
        self._undo.callback(slabs.close)
        while slabs.excess > 0 and others.drop_oldest():
            pass
        return slabs

    def _open_quarantine(self) -> Quarantine:
        kept = QUARANTINED * self._plan.slot_bytes if self._settings.on_corrupt == "quarantine" else 0
        quarantine = Quarantine(self._folder.quarantine, kept)
        quarantine.trim()
        return quarantine

    def _open_index(self, slabs: Slabs) -> tuple[LmdbIndex, bool]:
        """The index, and whether what it says is whole; where not, it is a new one."""
        last = Session.read(self._folder.path)
        if last and last.index_is_whole and self._folder.index.exists():
            try:
                return self._open_whole(last, slabs), True
            except IndexDamaged as error:
                log.warning("%s: the index can't be used and is built anew: %s", self._folder.path, error)
        elif slabs.extents:
            log.warning(
                "%s: the machine has stopped meanwhile, chunks are looked for on the disk", self._folder.path
            )
        Session(boot="", clean=False, durability="none").write(self._folder.path)
        self._folder.index.unlink(missing_ok=True)
        (self._folder.path / LOCK_NAME).unlink(missing_ok=True)
        return self._lmdb(self._plan.index_bytes), False

    def _open_whole(self, last: Session, slabs: Slabs) -> LmdbIndex:
        durable = self._settings.durability != "none"
        unsynced = durable and not last.clean and last.durability == "none"
        if not unsynced:
            self._session.write(self._folder.path)
        size = self._folder.index.stat().st_size
        # Removing takes room, too: an index that has outgrown the plan gets it until it is compacted.
        index = self._lmdb(self._plan.index_bytes if size <= self._plan.index_bytes else 2 * size)
        if unsynced:
            slabs.sync()
            index.sync()
            self._session.write(self._folder.path)
        return index

    def _lmdb(self, map_bytes: int) -> LmdbIndex:
        durability = self._settings.durability
        index = LmdbIndex.for_writing(
            self._folder.index,
            map_bytes=map_bytes,
            limit_bytes=self._plan.index_limit,
            max_readers=self._settings.concurrency + SPARE_READERS,
            sync=durability != "none",
            metasync=durability == "fsync",
        )
        self._undo.callback(index.close)
        return index

    def _fitted(self, index: LmdbIndex, slabs: Slabs) -> tuple[LmdbIndex, Found]:
        """Chunks and index, within the plan; an index that had outgrown it is compacted."""
        found = fit(index, slabs, self._plan, adopt(index, slabs, self._plan.block))
        if self._folder.index.stat().st_size <= self._plan.index_bytes:
            return index, found
        compacted = self._folder.path / COMPACTED_NAME
        compacted.unlink(missing_ok=True)
        index.compact_to(compacted)
        index.close()
        compacted.replace(self._folder.index)
        return self._lmdb(self._plan.index_bytes), found
