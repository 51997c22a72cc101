"""What `kvcascade check`, `ls` and `clear` see and do: beside running engines, and without."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import ValidationError

from kvcascade.errors import ConfigError
from kvcascade.testing import buffer, bytes_for, key_for
from kvcascade.tiers import Holding, OpenContext, Tier
from kvcascade.tiers import blocks as blocks_module
from kvcascade.tiers.disk import DiskSettings
from kvcascade.types import Namespace, Outcome

CHUNK = 64 << 10
CAPACITY = 4 << 20
A = Namespace.of(model="m", tenant="")
B = Namespace.of(model="m", tenant="blue")


def settings(path: Path, capacity: int = CAPACITY) -> DiskSettings:
    return DiskSettings(path=str(path), capacity=capacity)


def filled(path: Path, namespace: Namespace = A, chunks: int = 3, engine_id: str = "") -> Tier:
    tier = settings(path).open(OpenContext(namespace, CHUNK, engine_id=engine_id))
    keys = [key_for(number) for number in range(chunks)]
    assert tier.write(keys, [memoryview(bytes_for(key, CHUNK)) for key in keys]) == [Outcome.OK] * chunks
    return tier


def tree(path: Path) -> dict[str, tuple[int, int, int]]:
    """Everything below the path, with what would show a change."""
    return {
        str(found): (found.stat().st_mtime_ns, found.stat().st_size, found.stat().st_mode)
        for found in [path, *path.rglob("*")]
        if not found.name.endswith("-lock")  # of LMDB: a table of readers
    }


# check


def test_a_path_that_is_not_there_yet(tmp_path: Path) -> None:
    before = tree(tmp_path)
    probe = settings(tmp_path / "a" / "b").probe(CHUNK)
    assert probe.problems == []
    assert probe.chunks
    facts = dict(probe.facts)
    assert "will be made in" in facts["path"]
    assert facts["capacity"] == "4 MiB"
    assert tree(tmp_path) == before
    with settings(tmp_path / "a" / "b").open(OpenContext(A, CHUNK)) as tier:
        assert (tier.usage().capacity or 0) == probe.chunks * tier.footprint(CHUNK)


def test_beside_a_running_engine_nothing_changes(tmp_path: Path) -> None:
    tier = filled(tmp_path)
    before = tree(tmp_path)
    probe = settings(tmp_path).probe(CHUNK)
    assert probe.problems == []
    assert f"in use by process {os.getpid()} on " in dict(probe.facts)["engine-0"]
    assert tree(tmp_path) == before
    tier.close()
    assert dict(settings(tmp_path).probe().facts)["engine-0"] == "free"
    assert settings(tmp_path).probe().chunks is None


def test_direct_io_is_looked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blocks_module, "DIRECT", 0)
    assert "page cache" in dict(settings(tmp_path).probe().facts)["direct I/O"]


def test_what_keeps_the_tier_from_starting(tmp_path: Path) -> None:
    """Each is also what `open` says."""
    (tmp_path / "file").write_text("mine")
    cases = {
        "too small": settings(tmp_path / "kv", 300_000),
        "more than the file system": settings(tmp_path / "kv", 1 << 50),
        "not a folder": settings(tmp_path / "file"),
    }
    for text, case in cases.items():
        (problem,) = case.probe(CHUNK).problems
        assert text in problem
        assert problem.startswith(("capacity: ", "path: "))
        with pytest.raises(ConfigError):
            case.open(OpenContext(A, CHUNK))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.fixture
def closed() -> Iterator[Path]:
    """A folder that this user may enter and not write to; root becomes somebody else for that."""
    folder = Path(tempfile.mkdtemp())
    was = os.geteuid()
    try:
        folder.chmod(0o555)
        if was == 0:
            os.seteuid(65534)
        yield folder
    finally:
        os.seteuid(was)
        folder.rmdir()


def test_a_path_that_is_not_writable(closed: Path) -> None:
    (problem,) = settings(closed / "kv").probe(CHUNK).problems
    assert problem == f"path: {closed} is not writable for this user, so {closed / 'kv'} can't be used"
    with pytest.raises(ConfigError, match=f"path: {closed}/kv can't be used: Permission denied"):
        settings(closed / "kv").open(OpenContext(A, CHUNK))


def test_a_namespace_of_a_newer_version(tmp_path: Path) -> None:
    filled(tmp_path).close()
    described = next(tmp_path.rglob("namespace.json"))
    described.write_text(json.dumps({**json.loads(described.read_text()), "format": 99}))
    (problem,) = settings(tmp_path).probe().problems
    assert "format 99" in problem


# ls


def on_disk(holding: Holding) -> int:
    return sum(path.stat().st_blocks * 512 for path in Path(holding.place).iterdir())


@pytest.mark.parametrize("running", [True, False])
def test_what_is_held(tmp_path: Path, running: bool) -> None:
    (tmp_path / "engine-notes").write_text("mine")
    tiers = [filled(tmp_path, A, 3), filled(tmp_path, B, 5)]
    if not running:
        for tier in tiers:
            tier.close()
    one, two = settings(tmp_path).holdings()
    assert (one.namespace, one.tenant, one.chunks) == ("model=m tenant=", "", 3)
    assert (two.namespace, two.tenant, two.chunks) == ("model=m tenant=blue", "blue", 5)
    assert Path(one.place) == tmp_path / "engine-0" / A.digest.hex()
    assert one.bytes == on_disk(one) > 3 * CHUNK
    assert one.oldest
    assert one.newest
    assert one.oldest <= one.newest
    assert bool(one.used_by) is running
    for tier in tiers:
        tier.close()


def test_what_is_held_by_another_process(tmp_path: Path) -> None:
    """LMDB, read beside its writer, without disturbing it."""
    with filled(tmp_path, A, 3) as tier:
        script = f"""
from kvcascade.tiers.disk import DiskSettings
(one,) = DiskSettings(path={str(tmp_path)!r}, capacity={CAPACITY}).holdings()
print(one.chunks, one.used_by)
"""
        for _ in range(2):
            done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
            assert done.stdout.startswith(f"3 process {os.getpid()} on ")
        assert tier.read([key_for(1)], [buffer(CHUNK)]) == [Outcome.OK]
        assert tier.write([key_for(9)], [memoryview(bytes_for(key_for(9), CHUNK))]) == [Outcome.OK]


def test_what_is_held_where_the_index_is_not_trusted(tmp_path: Path) -> None:
    filled(tmp_path, A, 3).close()
    session = next(tmp_path.rglob("session.json"))
    session.write_text(json.dumps({"boot": "another boot", "clean": False, "durability": "none"}))
    next(tmp_path.rglob("index.lmdb")).write_bytes(b"torn")
    (one,) = settings(tmp_path).holdings()
    assert one.chunks == 3
    assert one.oldest


def test_nothing_is_held_where_nothing_is(tmp_path: Path) -> None:
    assert settings(tmp_path / "nowhere").holdings() == []
    assert settings(tmp_path / "nowhere").clear(None) == []
    assert not (tmp_path / "nowhere").exists()


# clear


def test_one_tenant_is_cleared(tmp_path: Path) -> None:
    filled(tmp_path, A, 3).close()
    filled(tmp_path, B, 5).close()
    lines = settings(tmp_path).clear("blue")
    assert len(lines) == 1
    assert "removed" in lines[0]
    assert B.digest.hex() in lines[0]
    assert [holding.tenant for holding in settings(tmp_path).holdings()] == [""]
    assert settings(tmp_path).clear("blue") == []
    with filled(tmp_path, A, 3) as tier:
        assert tier.usage().chunks == 3


def test_everything_is_cleared_and_what_is_not_ours_stays(tmp_path: Path) -> None:
    filled(tmp_path, A, 3, engine_id="one").close()
    filled(tmp_path, B, 5, engine_id="two").close()
    namespace = tmp_path / "engine-one" / A.digest.hex()
    foreign = [tmp_path / "mine", namespace / "mine.slab", tmp_path / "engine-two" / "mine"]
    for path in foreign:
        path.write_text("mine")
    lines = settings(tmp_path).clear(None)
    assert len([line for line in lines if "removed" in line]) == 2
    assert any("foreign files" in line for line in lines)
    below = sorted(path for path in tmp_path.rglob("*") if path.is_file() and path.name != "lock")
    assert below == sorted(foreign)
    assert [path.read_text() for path in foreign] == ["mine"] * 3
    assert settings(tmp_path).holdings() == []
    for path in foreign:
        path.unlink()
    namespace.rmdir()
    settings(tmp_path).clear(None)
    assert list(tmp_path.iterdir()) == []


def test_nothing_is_cleared_under_a_running_engine(tmp_path: Path) -> None:
    filled(tmp_path, A, 3, engine_id="one").close()
    with filled(tmp_path, B, 5, engine_id="two") as tier:
        for tenant in (None, "blue"):
            with pytest.raises(
                ConfigError, match=f"engine-two is in use by process {os.getpid()} on .* Nothing was"
            ):
                settings(tmp_path).clear(tenant)
        assert len(settings(tmp_path).holdings()) == 2
        assert len(settings(tmp_path).clear("")) == 1
        assert tier.read([key_for(1)], [buffer(CHUNK)]) == [Outcome.OK]


# Settings


def test_the_path_is_made_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    assert settings(Path("~/kv")).path == str(tmp_path / "kv")
    assert settings(Path("kv")).path == str(tmp_path / "kv")


def test_two_names_of_a_folder_are_one_claim(tmp_path: Path) -> None:
    (tmp_path / "alias").symlink_to(tmp_path / "kv")
    assert settings(tmp_path / "alias").claims() == settings(tmp_path / "kv").claims()
    assert settings(tmp_path / "kv").claims() != settings(tmp_path / "other").claims()


@pytest.mark.parametrize(
    "wrong",
    [
        {"path": ""},
        {"path": "a\0b"},
        {"durability": "sync"},
        {"on_corrupt": "keep"},
        {"capacity": 0},
        {"pth": "x"},
    ],
)
def test_settings_that_make_no_sense(tmp_path: Path, wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        DiskSettings.model_validate({"path": str(tmp_path), "capacity": "1GiB", **wrong})


def test_settings_load_no_driver() -> None:
    script = (
        "import kvcascade.tiers.disk, sys; print([m for m in ('lmdb', 'numpy', 'xxhash') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"
