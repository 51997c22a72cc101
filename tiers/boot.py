"""Which boot of the machine this is."""

from pathlib import Path

__all__ = ["boot_id"]

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Names this boot of the machine; "" where it can't be told."""
    try:
        return BOOT_ID.read_text().strip()
    except OSError:
        return ""
