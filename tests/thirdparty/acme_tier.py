"""A third party's tier, installed by putting this folder on the path: its entry points stand in the .dist-info."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, SecretStr

from kvcascade.configs.schema import EvictionName
from kvcascade.configs.units import Size
from kvcascade.errors import ConfigError, TierUnavailable
from kvcascade.tiers import Holding, OpenContext, Probe, Tier, TierSettings

TENANTS = "acme", "other"


class AcmeSettings(TierSettings):
    """Keeps chunks on a shelf: a folder with one folder a tenant. The tests put them there."""

    type: Literal["acme"] = "acme"
    shelf: Path
    shelves: Annotated[int, Field(ge=1, le=9)] = 1
    nodes: tuple[str, ...] = ()
    url: str = ""
    password: SecretStr | None = None
    password_file: Path | None = None
    token: str = ""
    capacity: Size | None = None
    eviction: EvictionName = "lru"

    def claims(self) -> frozenset[str]:
        return frozenset({f"the shelf {self.shelf}"})

    def open(self, context: OpenContext) -> Tier:
        raise TierUnavailable("the shelf is for looking at")

    def probe(self, chunk_bytes: int | None = None) -> Probe:
        probe = Probe(facts=[("shelf", f"{self.shelf} [{'there' if self.shelf.is_dir() else 'missing'}]")])
        if not self.shelf.is_dir():
            probe.problems.append(f"shelf: {self.shelf} is no folder; create it")
        probe.chunks = self.shelves * 1000 if chunk_bytes else None
        return probe

    def holdings(self) -> list[Holding]:
        if (self.shelf / "down").exists():
            raise TierUnavailable("the shelf does not answer")
        folders = sorted(path for path in self.shelf.iterdir() if path.is_dir() and path.name in TENANTS)
        return [self._holding(folder) for folder in folders]

    def clear(self, tenant: str | None) -> list[str]:
        if (self.shelf / "busy").exists():
            raise ConfigError("process 4711 is using it; stop it first")
        lines = []
        for folder in sorted(self.shelf.iterdir()):
            if folder.is_dir() and folder.name in TENANTS and tenant in (None, folder.name):
                for chunk in folder.iterdir():
                    chunk.unlink()
                folder.rmdir()
                lines.append(f"removed {folder.name}")
        return lines

    def _holding(self, folder: Path) -> Holding:
        files = [path.stat() for path in folder.iterdir()]
        times = [file.st_mtime for file in files]
        return Holding(
            place=str(folder),
            namespace=f"model=m tenant={folder.name}",
            chunks=len(files),
            bytes=sum(file.st_size for file in files),
            oldest=min(times, default=None),
            newest=max(times, default=None),
            tenant=folder.name,
        )
