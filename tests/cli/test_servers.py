"""The same commands over a disk, a Redis server and a bucket: one stack of all that keeps chunks elsewhere."""

import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcascade.testing import key_for
from kvcascade.testing.servers.redis import RedisServer
from kvcascade.testing.servers.s3 import S3Store, available_stores, running_store

TIERS = ("disk", "redis", "s3")


@pytest.fixture(scope="module")
def redis(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    with RedisServer(tmp_path_factory.mktemp("redis")) as running:
        yield running


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Store]:
    kinds = available_stores()
    if not kinds:
        pytest.skip("no S3 store to be had here")
    with running_store(kinds[0], tmp_path_factory.mktemp("s3")) as running:
        yield running


@pytest.fixture
def three(stack: Any, redis: RedisServer, store: S3Store, monkeypatch: pytest.MonkeyPatch) -> Any:
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)
    prefix = f"test-{secrets.token_hex(6)}"
    stack.file.write_text(
        f"version: 1\ntiers:\n  - {{type: host, capacity: 4MiB}}\n"
        f"  - {{type: disk, path: {stack.folder / 'disk'}, capacity: 16MiB, queue: 0.5}}\n"
        f"  - {{type: redis, url: '{redis.url}', prefix: {prefix}, queue: 0.5, deadline: 5s}}\n"
        f"  - {{type: s3, bucket: kvcascade-tests, prefix: {prefix}, endpoint_url: '{store.endpoint}', "
        f"create_bucket: true, queue: 0.5}}\n"
    )
    return stack


def test_every_command_on_every_tier(three: Any, redis: RedisServer, tmp_path: Path) -> None:
    three.fill("redis", range(20))
    done = three.run("export", tmp_path / "a.kvc")
    assert (done.exit_code, done.stdout) == (0, "")
    assert three.run("import", tmp_path / "a.kvc").exit_code == 0
    assert three.holds("s3", range(20)) == list(range(20))
    done = three.run("warm", "--into", "disk", "--limit", "640KiB")
    assert done.exit_code == 0
    assert len(three.keys("disk")) == 10
    assert three.run("warm").exit_code == 0
    for tier in TIERS:
        assert three.holds(tier, range(20)) == list(range(20))
    assert [fact["tier"] for fact in three.json("inspect", key_for(5).hex())] == list(TIERS)
    assert three.run("verify").exit_code == 0
    ls = three.run("ls")
    assert ls.exit_code == 0
    assert ls.stdout.count(" 20 ") == 3

    place = three.chunk("redis", 7).place
    byte = redis.ask("GETRANGE", place, 9000, 9000)
    redis.ask("SETRANGE", place, 9000, bytes([byte[0] ^ 1]))
    found = {one["tier"]: one["corrupt"] for one in three.json("verify")}
    assert found == {"disk": 0, "redis": 1, "s3": 0}
    assert three.run("verify", "--corrupt", "remove").exit_code == 1
    assert three.holds("redis", range(20)) == [number for number in range(20) if number != 7]

    assert three.run("gc").stdout == "There is nothing to remove.\n"
    assert three.run("gc", "--prefix", key_for(3).hex()[:12], "--yes").stdout.count("removed 1 chunk ") == 3
    assert three.run("gc", "--older-than", "0s", "--yes").exit_code == 0
    assert all(three.keys(tier) == [] for tier in TIERS)


def test_epochs_that_are_over_go_beside_a_running_engine(three: Any, engine: Any, tmp_path: Path) -> None:
    running = engine(three)
    running("serve", keys=list(range(6)))
    assert running("reset")
    running("serve", keys=list(range(10, 16)))
    done = three.run("gc", "--yes")
    assert done.exit_code == 0, done.stderr
    running("forget")
    assert running("serve", keys=list(range(10, 16))) == 6
    for tier in ("disk", "s3"):  # on a Redis server they go by their ttl
        assert three.keys(tier) == sorted(map(key_for, range(10, 16)))
    assert three.run("export", tmp_path / "a.kvc").stderr.startswith("Wrote 0 chunks")
    running.stop()
    assert three.run("gc", "--yes").exit_code == 0
    assert three.keys("disk") == three.keys("s3") == []


def test_a_server_that_is_away_is_named_and_the_others_go_on(
    three: Any, redis: RedisServer, tmp_path: Path
) -> None:
    three.fill("disk", range(4))
    three.fill("s3", range(4, 8))
    redis.stop()
    try:
        for command, arguments in (
            ("verify", ()),
            ("ls", ()),
            ("gc", ("--dry-run",)),
            ("export", (tmp_path / "a",)),
        ):
            done = three.run(command, *arguments)
            assert done.exit_code == 1, command
            assert done.stderr.startswith("redis: "), command
        assert done.stderr.endswith(f"Wrote 8 chunks (512 KiB) to {tmp_path / 'a'}.\n")
    finally:
        redis.start()
