"""Opening the tier: from a path to a namespace's folder in it, among the others that use it."""

import grp
import json
import logging
import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kvcascade.errors import ConfigError, TierUnavailable
from kvcascade.tiers.base import OpenContext
from kvcascade.tiers.described import NAMESPACE_NAME
from kvcascade.tiers.envelope import FORMAT
from kvcascade.tiers.files import mapped, sync_folder
from kvcascade.types import Namespace

from .chunkfile import direct_works
from .epochs import Epoch, Epochs
from .layout import Access, Home
from .writers import SILENT, Identity, Writer, living, remove_dead

if TYPE_CHECKING:
    from .settings import FsSettings

__all__ = ["Opened", "access_of", "open_directory"]

log = logging.getLogger("kvcascade.tiers.fs")


@dataclass(slots=True)
class Opened:
    """All that a tier works on. It belongs to one process."""

    root: Path
    namespace: Namespace
    home: Home
    access: Access
    writer: Writer
    direct: bool
    epochs: Epochs
    epoch: Epoch

    @property
    def stamp(self) -> bytes:
        """Of the epoch: written into every chunk."""
        return self.namespace.stamp(self.epoch.mark)

    def move_to(self, epoch: str) -> None:
        """Leaves the epoch, for good, and enters another one.

        Raises:
            OSError: the mark can't be written.
        """
        self.writer.be_in("")
        self.epoch = self.epochs.move(self.epoch, epoch)
        self.writer.be_in(self.stamp.hex())


def open_directory(settings: "FsSettings", context: OpenContext) -> Opened:
    """Enters the directory, and makes the namespace's folder in it.

    Raises:
        ConfigError: it can never be opened like this.
        TierUnavailable: it can't be opened now.
    """
    root, digest = Path(settings.path), context.namespace.digest.hex()
    access = access_of(settings)
    writer = Writer(root, Identity.new(digest, settings.exclusive), access)
    with mapped(root), ExitStack() as undo:
        home = Home(root / digest)
        if problem := too_new(home):
            raise ConfigError(problem)
        writer.enter()
        undo.callback(writer.leave)
        now = writer.beat()
        remove_dead(root, now)
        check_use(root, settings.exclusive, writer.identity, now)
        _describe(home, context.namespace, writer, access)
        direct = direct_works(writer.temporary())
        if not direct:
            log.warning("%s: no direct I/O here, the page cache is used", root)
        epochs = Epochs(home.marks, context.namespace, access)
        opened = Opened(root, context.namespace, home, access, writer, direct, epochs, epochs.enter(context.epoch))
        writer.be_in(opened.stamp.hex())
        undo.pop_all()
        return opened


def access_of(settings: "FsSettings") -> Access:
    """
    Raises:
        ConfigError: the group is not known here.
    """
    mode, group = int(settings.mode, 8), settings.group
    if group is None or group.isdecimal():
        return Access(mode, None if group is None else int(group))
    try:
        return Access(mode, grp.getgrnam(group).gr_gid)
    except KeyError:
        raise ConfigError(f"group: {group!r} is no group of this machine; give its name or number") from None


def too_new(home: Home) -> str:
    """What is wrong with a namespace that a newer version has written; "" where nothing is."""
    if home.format <= FORMAT:
        return ""
    return (
        f"path: {home.path} was written in format {home.format}, by a newer version; this one knows {FORMAT}. "
        f"It is left untouched: use another `path`, or the newer version"
    )


def check_use(root: Path, exclusive: bool, me: Identity | None, now: float) -> None:
    """
    Raises:
        ConfigError: another engine uses the directory so that this one can't.
        TierUnavailable: one on another host did a moment ago, and may have ended since.
    """
    for other in living(root, now, SILENT):
        if other == me or not (exclusive or other.exclusive):
            continue
        whose = "for itself" if other.exclusive else "too, and `exclusive` asks for it alone"
        text = f"exclusive: {root} is used by {other.in_words} {whose}"
        if other.lives is None:
            raise TierUnavailable(f"{text}, or was less than {SILENT:g} s ago")
        raise ConfigError(f"{text}; use another `path`, or end that one")


def _describe(home: Home, namespace: Namespace, writer: Writer, access: Access) -> None:
    """Writes down what the folder's name stands for; several engines may do so at once."""
    access.make_folder(home.path)
    wanted = {"format": FORMAT, "fields": dict(namespace.fields)}
    if home.description == wanted:
        return
    temporary = writer.temporary()
    fd = access.create(temporary)
    try:
        os.write(fd, json.dumps(wanted, indent=1, ensure_ascii=False).encode())
        os.fsync(fd)
    finally:
        os.close(fd)
    Path(temporary).replace(home.path / NAMESPACE_NAME)
    for folder in (home.path, home.path.parent):
        sync_folder(folder)
    home.description = wanted
