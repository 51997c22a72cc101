"""Stores, one of each kind for all tests of a run; each test has a prefix of its own in a bucket."""

import secrets
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from kvcascade.testing.servers.s3 import S3Store, available_stores, running_store
from kvcascade.tiers.s3 import S3Settings

BUCKET = "kvcascade-tests"


class Stores:
    """Starts each kind of store when it is first asked for."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: dict[str, S3Store] = {}
        self._stack = ExitStack()

    def __getitem__(self, kind: str) -> S3Store:
        if kind not in self._running:
            self._running[kind] = self._stack.enter_context(running_store(kind, self._folder / kind))
        return self._running[kind]

    def close(self) -> None:
        self._stack.close()


@pytest.fixture(scope="session")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stores]:
    stores = Stores(tmp_path_factory.mktemp("s3"))
    yield stores
    stores.close()


@pytest.fixture(params=available_stores())
def store(request: pytest.FixtureRequest, stores: Stores, monkeypatch: pytest.MonkeyPatch) -> S3Store:
    """A store, with its credentials in the environment."""
    store = stores[request.param]
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)
    return store


def settings_for(store: S3Store, **given: Any) -> S3Settings:
    given = {"bucket": BUCKET, "prefix": f"test-{secrets.token_hex(6)}", "create_bucket": True, **given}
    return S3Settings(endpoint_url=store.endpoint, **given)
