"""How fast chunks come to and from a bucket, and how that compares with boto3 and with a bare signed HTTP client.

    python -m benchmarks.s3_tier                    # the table
    python -m benchmarks.s3_tier --quick            # 1 MiB only
    python -m benchmarks.s3_tier --server rclone    # a real server instead of the sink; also moto, minio

Contenders, in one process and one thread each:

- tier: this package's s3 tier, as a lane calls it;
- http: a bare socket that sends the same payloads from, and receives them into, the same buffers, one request
  after the other, each signed by botocore in the lightest way, and computes the same checksums: the limit;
- boto3: put_object and get_object, with payloads neither signed nor checked by it; the body is read into the
  buffer, with the same checksum.

The sink is a process of its own that keeps objects in memory and does nothing else.
"""

import os
import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
import botocore.config
import botocore.session
import numpy as np

from kvcascade.testing import NAMESPACE, buffer, fill, holds, key_for
from kvcascade.testing.servers.s3 import running_store
from kvcascade.tiers import OpenContext
from kvcascade.tiers.envelope import Envelope, checksum, pack
from kvcascade.tiers.s3 import S3Settings
from kvcascade.tiers.s3.layout import ENVELOPE
from kvcascade.tiers.s3.messages import Request
from kvcascade.tiers.s3.signing import Terms, signed

from .harness import Result, argument_parser, child, interleaved, report

KIB, MIB = 1 << 10, 1 << 20
SINK = str(Path(__file__).with_name("s3_sink.py"))
BUCKET = "benchmark"


class Chunks:
    """A batch: keys, and a buffer for each."""

    def __init__(self, nbytes: int, count: int) -> None:
        self.nbytes = nbytes
        self.keys = [key_for(number) for number in range(count)]
        self.buffers = [buffer(nbytes) for _ in self.keys]
        for view, key in zip(self.buffers, self.keys, strict=True):
            fill(view, key)

    @property
    def right(self) -> bool:
        return all(holds(view, key) for view, key in zip(self.buffers, self.keys, strict=True))

    def spoil(self) -> None:
        for view in self.buffers:
            np.frombuffer(view, np.uint8)[:] = 0xAA


class Bare:
    """The limit: nothing but the signature, the system calls and the checksums."""

    def __init__(self, endpoint: str, chunks: Chunks) -> None:
        parts = urlsplit(endpoint)
        self._end = socket.create_connection((parts.hostname or "", parts.port or 80))
        self._end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._chunks = chunks
        self._names = ["bare/" + key.hex() for key in chunks.keys]
        credentials = botocore.session.Session().get_credentials()
        self._terms = Terms(f"{endpoint}/{BUCKET}/", "us-east-1", "s3", credentials)
        self._ahead = memoryview(bytearray(4096))
        self._sums = [checksum(view) for view in chunks.buffers]

    def store(self) -> int:
        for name, view, key in zip(self._names, self._chunks.buffers, self._chunks.keys, strict=True):
            header = pack(Envelope(bytes(16), key, len(view), 0.0, 0, checksum(view)), ENVELOPE)
            head = signed(Request("PUT", name, body=(memoryview(header), view)), self._terms)
            self._send([head, header, view])
            self._receive_head()
        return self._chunks.nbytes * len(self._names)

    def load(self) -> int:
        for name, view, right in zip(self._names, self._chunks.buffers, self._sums, strict=True):
            self._send([signed(Request("GET", name), self._terms)])
            start, stop = self._receive_head()
            while stop - start < ENVELOPE:
                stop += self._end.recv_into(self._ahead[stop:])
            have = stop - start - ENVELOPE
            view[:have] = self._ahead[start + ENVELOPE : stop]
            if (
                self._end.recv_into(view[have:], 0, socket.MSG_WAITALL) != len(view) - have
                or checksum(view) != right
            ):
                raise ValueError("wrong bytes")
        return self._chunks.nbytes * len(self._names)

    def _send(self, parts: list[Any]) -> None:
        sent, whole = self._end.sendmsg(parts), sum(map(len, parts))
        if sent != whole:
            raise ValueError(f"{sent} of {whole} bytes were sent")

    def _receive_head(self) -> tuple[int, int]:
        """Where the body begins in what has come, and where that ends."""
        stop = self._end.recv_into(self._ahead)
        head = bytes(self._ahead[:stop]).partition(b"\r\n\r\n")[0]
        if not head.startswith(b"HTTP/1.1 200"):
            raise ValueError(f"{head!r}")
        return len(head) + 4, stop

    def close(self) -> None:
        self._end.close()


class Peer:
    """boto3, told to do no more than the others."""

    def __init__(self, endpoint: str, chunks: Chunks) -> None:
        config = botocore.config.Config(
            s3={"payload_signing_enabled": False, "addressing_style": "path"},
            request_checksum_calculation="when_required",
            response_checksum_validation="when_required",
        )
        self._client: Any = boto3.session.Session().client("s3", "us-east-1", endpoint_url=endpoint, config=config)
        self._chunks = chunks
        self._names = ["peer/" + key.hex() for key in chunks.keys]
        self._sums = [checksum(view) for view in chunks.buffers]

    def store(self) -> int:
        for place, (name, view) in enumerate(zip(self._names, self._chunks.buffers, strict=True)):
            self._sums[place] = checksum(view)
            self._client.put_object(Bucket=BUCKET, Key=name, Body=bytes(view))
        return self._chunks.nbytes * len(self._names)

    def load(self) -> int:
        for name, view, right in zip(self._names, self._chunks.buffers, self._sums, strict=True):
            body = self._client.get_object(Bucket=BUCKET, Key=name)["Body"]
            filled = 0
            while filled < len(view):
                filled += body.readinto(view[filled:])
            body.close()
            if checksum(view) != right:
                raise ValueError("wrong bytes")
        return self._chunks.nbytes * len(self._names)

    def close(self) -> None:
        self._client.close()


class Ours:
    """The tier, as a lane calls it."""

    def __init__(self, endpoint: str, chunks: Chunks, again: bool) -> None:
        settings = S3Settings.model_validate(
            {"bucket": BUCKET, "endpoint_url": endpoint, "deadline": "60s", "create_bucket": True}
        )
        self._tier = settings.open(OpenContext(NAMESPACE, chunks.nbytes))
        self._chunks = chunks
        self._again = again  # the sink stores a chunk that is there again; a server would say that it has it

    def store(self) -> int:
        if not self._again:
            self._tier.delete(self._chunks.keys)
        self._check(self._tier.write(self._chunks.keys, self._chunks.buffers))
        return self._chunks.nbytes * len(self._chunks.keys)

    def load(self) -> int:
        self._check(self._tier.read(self._chunks.keys, self._chunks.buffers))
        return self._chunks.nbytes * len(self._chunks.keys)

    def _check(self, outcomes: list[Any]) -> None:
        if not all(outcome.ok for outcome in outcomes):
            raise ValueError(f"{outcomes}")

    def close(self) -> None:
        self._tier.close()


def run(endpoint: str, sizes: list[int], batches: list[int], real: bool, options: Any) -> list[Result]:
    results = []
    for nbytes in sizes:
        for count in batches:
            chunks = Chunks(nbytes, count)
            contenders: dict[str, Any] = {
                "tier": Ours(endpoint, chunks, again=not real),
                "http": Bare(endpoint, chunks),
                "boto3": Peer(endpoint, chunks),
            }
            for verb in ("store", "load"):
                case = {"verb": verb, "KiB": nbytes // KIB, "chunks": count}
                works: dict[str, Callable[[], int]] = {
                    name: getattr(one, verb) for name, one in contenders.items()
                }
                results += interleaved(case, works, options.rounds, options.seconds)
                _compare(works, chunks, verb)
            for one in contenders.values():
                one.close()
    return results


def _compare(works: dict[str, Callable[[], int]], chunks: Chunks, verb: str) -> None:
    """Every contender really brings the bytes."""
    for name, work in works.items() if verb == "load" else ():
        chunks.spoil()
        work()
        if not chunks.right:
            raise ValueError(f"{name} brings other bytes")


@contextmanager
def endpoint_of(server: str) -> Iterator[str]:
    if server == "sink":
        os.environ.update(AWS_ACCESS_KEY_ID="benchmark", AWS_SECRET_ACCESS_KEY="benchmark")
        with child(SINK) as port:
            yield f"http://127.0.0.1:{port}"
        return
    with tempfile.TemporaryDirectory() as folder, running_store(server, Path(folder)) as store:
        os.environ.update(store.environment)
        yield store.endpoint


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--server", choices=["sink", "rclone", "moto", "minio"], default="sink")
    parser.add_argument("--quick", action="store_true", help="chunks of 1 MiB only, 1 and 4 at a time")
    options = parser.parse_args()
    sizes = [MIB] if options.quick else [256 * KIB, MIB, 4 * MIB]
    batches = [1, 4] if options.quick else [1, 4, 16]
    with endpoint_of(options.server) as endpoint:
        sys.stderr.write(f"{options.server} at {endpoint}\n")
        results = run(endpoint, sizes, batches, options.server != "sink", options)
    report(results, "tier", options.json, options.out, options.plot)


if __name__ == "__main__":
    main()
