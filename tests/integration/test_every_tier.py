"""Every tier type that is installed goes through the same life, built as a stack file builds it."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcascade.configs import parse_stack, registry
from kvcascade.stack import build
from kvcascade.testing import Driver, key_for
from kvcascade.testing.servers.redis import RedisServer
from kvcascade.testing.servers.s3 import available_stores, running_store
from kvcascade.types import Namespace

KEYS = [key_for(number) for number in range(64)]
CHUNK = 4096
NEEDS: dict[str, dict[str, Any]] = {
    "disk": {"path": "disk", "capacity": "8MiB"},
    "fs": {"path": "fs"},
    "memory": {"capacity": "8MiB"},
}
"""What a type can't do without, and what suits a test; paths lie in the test's folder. Those that need a server
get one from `needs`."""
KEEPS = ("disk", "fs", "redis", "s3")
"""Types that a restart finds warm."""
OPTIONAL: dict[str, Any] = {
    "name": "below",
    "write": "through",
    "fill": True,
    "promote": "always",
    "ttl": "1h",
    "deadline": "10s",
    "concurrency": 2,
    "queue": 0.5,
    "admit_after": 1,
    "retries": 1,
    "breaker": {"failures": 3, "probe_every": "1s"},
}


def _types() -> list[str]:
    return sorted(set(registry.known(registry.TIERS)) - {"host"})


@pytest.fixture
def needs(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    if kind == "redis":
        with RedisServer(tmp_path / "redis") as server:
            yield {"url": server.url}
    elif kind == "s3":
        with running_store(available_stores()[0], tmp_path / "s3") as store:
            for name, value in store.environment.items():
                monkeypatch.setenv(name, value)
            yield {"endpoint_url": store.endpoint, "bucket": "test", "create_bucket": True}
    else:
        fixed = NEEDS.get(kind, {}).items()
        yield {name: str(tmp_path / value) if name == "path" else value for name, value in fixed}


@pytest.mark.parametrize("options", [{}, OPTIONAL], ids=["defaults", "every option"])
@pytest.mark.parametrize("kind", _types())
@pytest.mark.parametrize("io", ["thread", "process"])
def test_a_tier_from_a_stack_file_stores_serves_and_resets(
    io: str, kind: str, options: dict[str, Any], needs: dict[str, Any]
) -> None:
    """llm-d/llm-d-kv-cache#499: no tier drifts away from what the builder passes."""
    settings = parse_stack(
        {
            "version": 1,
            "log_every": "0s",
            "io": io,
            "tiers": [
                {"type": "host", "capacity": 33 * CHUNK},
                {"type": kind, "promote": "always", **needs, **options},
            ],
        }
    )
    kept = 0 if kind == "noop" else 4
    for epoch, again in (("", 0), ("", kept if kind in KEEPS else 0)):
        driver = Driver(build(settings, Namespace.of(model="test"), CHUNK), epoch)
        assert driver.serve("first", KEYS[:4]) == again
        for start in range(10, 42, 4):
            driver.serve(f"push out {start}", KEYS[start : start + 4])
        assert driver.serve("again", KEYS[:4]) == kept
        driver.check_at_rest()
        driver.manager.shutdown()
    driver = Driver(build(settings, Namespace.of(model="test"), CHUNK), "new weights")
    assert driver.manager.reset_cache().ok
    assert driver.serve("nothing of before", KEYS[:4]) == 0
    driver.check_at_rest()
    driver.manager.shutdown()
