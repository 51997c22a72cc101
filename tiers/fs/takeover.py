"""What an engine finds in a directory that it has to itself."""

from pathlib import Path

from kvcascade.types import Key

from .layout import chunks, fans, homes, key_of, looks_whole
from .room import HardRoom, Leftover

__all__ = ["take_over"]


def take_over(root: Path, epoch: str, capacity: int) -> HardRoom:
    """Counts what is there. Beyond the capacity, chunks of other epochs and namespaces are deleted first, then
    those of this `epoch`, the folder: each time the least recently used ones.

    Raises:
        OSError: the directory can't be read.
    """
    others: list[Leftover] = []
    useless: list[Leftover] = []
    ours: list[tuple[Leftover, Key]] = []
    for folder in (folder for home in homes(root) for folder in home.epochs()):
        for path, info in (chunk for fan in fans(folder) for chunk in chunks(fan)):
            chunk = Leftover(info.st_mtime, path, info.st_size)
            if str(folder) != epoch:
                others.append(chunk)
            elif looks_whole(info) and (key := key_of(path)) is not None:
                ours.append((chunk, key))
            else:
                useless.append(chunk)
    others.sort(reverse=True)
    ours.sort(reverse=True)
    held: dict[Key, int] = {}
    room = capacity
    for chunk, key in ours:
        room -= chunk.nbytes
        if room >= 0:
            held[key] = chunk.nbytes
    useless += [chunk for chunk, key in ours if key not in held]
    return HardRoom(capacity, held, others, useless)
