"""Stores, one of each kind for all tests of a run; each test has a prefix of its own in a bucket."""

import secrets
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import botocore.loaders
import botocore.session
import pytest

from kvcascade.errors import TierError, TierUnavailable
from kvcascade.testing import TierWrapper
from kvcascade.testing.epochs import SharedPlace
from kvcascade.testing.servers.http_faults import HttpFaults
from kvcascade.testing.servers.s3 import S3Store, available_stores, running_store
from kvcascade.tiers import Tier
from kvcascade.tiers.envelope import Envelope, parse
from kvcascade.tiers.s3 import S3Settings
from kvcascade.tiers.s3.layout import ENVELOPE, place
from kvcascade.tiers.s3.tier import S3Tier
from kvcascade.types import Buffer, Entry, Key, Outcome, OutcomeKind

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


class Place(SharedPlace):
    """A prefix in a bucket of a store that runs."""

    bucket = BUCKET

    def __init__(self, store: S3Store) -> None:
        super().__init__()
        self.server = store
        self.endpoint = store.endpoint
        self.prefix = f"test-{secrets.token_hex(6)}"

    def settings(self, **given: Any) -> S3Settings:
        defaults = {"bucket": BUCKET, "prefix": self.prefix, "create_bucket": True}
        return S3Settings(**{**defaults, "endpoint_url": self.endpoint, **given})

    def client(self) -> Any:
        """boto3's, to reach around the tier."""
        import boto3

        return boto3.session.Session().client("s3", "us-east-1", endpoint_url=self.server.endpoint)

    def names(self) -> list[str]:
        """Of all objects."""
        listed = self.client().list_objects_v2(Bucket=BUCKET, Prefix=self.prefix + "/")
        return [one["Key"] for one in listed.get("Contents", [])]

    def close(self) -> None:
        """Whatever a test has done to a tier, no request is under way once its calls have returned."""
        under_way = [tier._bucket.under_way for tier in self.opened]
        super().close()
        assert not any(under_way), f"permits that were not given back: {under_way}"


class Insisting(TierWrapper):
    """Tries failed keys again, as a lane does: the stand-ins for a store answer 500 where two writers of one
    object meet."""

    def around(self, verb: str, keys: Sequence[Key], buffers: Sequence[Buffer], call: Callable[[], Any]) -> Any:
        answer = call()
        if verb not in ("read", "write", "delete"):
            return answer
        for _ in range(20):
            again = [at for at, outcome in enumerate(answer) if _may_pass(outcome)]
            if not again:
                break
            threading.Event().wait(0.01)
            some = [keys[at] for at in again]
            given = [[buffers[at] for at in again]] if buffers else []
            for at, outcome in zip(again, getattr(self.inner, verb)(some, *given), strict=True):
                answer[at] = outcome
        return answer


class Whole(Insisting):
    """rclone lists objects that are still coming in, with as many bytes as have come; no store that keeps what S3
    promises does so. Here what is listed is compared with what its envelope says."""

    def entries(self) -> Iterator[Entry]:
        tier = self.inner
        assert isinstance(tier, S3Tier)
        assert tier._era is not None
        for entry in tier.entries():
            with suppress(TierError):
                said = tier._bucket.read(place(tier._era.path, entry.key), tier._end(), ENVELOPE)
                envelope = parse(said or b"")
                if isinstance(envelope, Envelope) and envelope.nbytes == entry.nbytes:
                    yield entry


def _may_pass(outcome: Outcome) -> bool:
    return outcome.kind is OutcomeKind.FAILED and isinstance(outcome.cause, TierUnavailable)


@pytest.fixture(scope="session")
def stores(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stores]:
    stores = Stores(tmp_path_factory.mktemp("s3"))
    yield stores
    stores.close()


@pytest.fixture(params=available_stores())
def shared(request: pytest.FixtureRequest, stores: Stores, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """A place on each kind of store, with its credentials in the environment."""
    yield from _place(stores[request.param], monkeypatch)


@pytest.fixture
def one_shared(stores: Stores, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    """A place on the first store that is here, for what does not depend on the store."""
    yield from _place(stores[available_stores()[0]], monkeypatch)


class Faulty(NamedTuple):
    """A place that engines reach through a server that misbehaves when it is told to."""

    shared: Place
    faults: HttpFaults


@pytest.fixture
def faulty(one_shared: Place) -> Iterator[Faulty]:
    port = urlsplit(one_shared.server.endpoint).port
    assert port is not None
    with HttpFaults(port) as faults:
        one_shared.endpoint = faults.endpoint
        yield Faulty(one_shared, faults)
        one_shared.close()


@pytest.fixture(scope="session", autouse=True)
def _models_are_read_once() -> Iterator[None]:
    """botocore reads its models for each session, so for each tier: that would be most of the tests' time."""
    loaders = {}

    def shared_loader(path: str | None = None) -> Any:
        if path not in loaders:
            loaders[path] = botocore.loaders.create_loader(path)
        return loaders[path]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(botocore.session, "create_loader", shared_loader)
        yield


def _place(store: S3Store, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    for name, value in store.environment.items():
        monkeypatch.setenv(name, value)
    place = Place(store)
    yield place
    place.close()


@pytest.fixture
def insisting(shared: Place) -> Callable[[Tier], Tier]:
    return Whole if shared.server.kind == "rclone" else Insisting
