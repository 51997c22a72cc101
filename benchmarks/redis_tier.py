"""How fast chunks come to and from a Redis server, and how that compares with redis-py and with a bare socket.

    python -m benchmarks.redis_tier                  # the table
    python -m benchmarks.redis_tier --quick          # 1 MiB only
    python -m benchmarks.redis_tier --server real    # a real server instead of the sink

Contenders, in one process and one thread each:

- tier: this package's redis tier;
- socket: a bare socket that sends the same bytes from, and receives them into, the same buffers, pipelined, and
  computes the same checksums: the limit;
- redis-py: with hiredis; the value is set from the buffer and copied into it, with the same checksum.

The sink is a process of its own that keeps values in memory and does nothing else.
"""

import socket
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import redis

from kvcascade.testing import NAMESPACE, buffer, fill, holds, key_for
from kvcascade.testing.servers.redis import RedisServer
from kvcascade.testing.servers.tls import Certificates, TlsFront, make_certificates
from kvcascade.tiers import OpenContext
from kvcascade.tiers.envelope import HEADER_BYTES, Envelope, checksum, pack
from kvcascade.tiers.redis import RedisSettings

from .harness import Result, argument_parser, child, interleaved, report

KIB, MIB = 1 << 10, 1 << 20
POOL = 128 * MIB
SINK = str(Path(__file__).with_name("redis_sink.py"))


class Place:
    """Where a server is, for each contender."""

    def __init__(self, url: str, ca_file: Path | None = None) -> None:
        self.url = url
        self.ca_file = str(ca_file) if ca_file else None

    def settings(self) -> RedisSettings:
        return RedisSettings(url=self.url, tls={"ca_file": self.ca_file}, deadline="30s", ttl=None)

    def client(self) -> Any:
        tls = {"ssl_ca_certs": self.ca_file} if self.ca_file else {}
        return redis.Redis.from_url(self.url, protocol=2, **tls)

    def connect(self) -> socket.socket:
        if self.url.startswith("unix://"):
            end = socket.socket(socket.AF_UNIX)
            end.connect(self.url.removeprefix("unix://"))
            return end
        host, _, port = self.url.removeprefix("redis://").partition("/")[0].partition(":")
        end = socket.create_connection((host, int(port)))
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return end


class Chunks:
    """A pool of slots, as an engine has it: much larger than the processor's caches. A batch is the next few."""

    def __init__(self, nbytes: int, count: int) -> None:
        self.nbytes = nbytes
        self.count = count
        keys = [key_for(number) for number in range(max(POOL // nbytes // count, 1) * count)]
        self.batches = [Batch(keys[start : start + count], nbytes) for start in range(0, len(keys), count)]

    def turns(self) -> "Iterator[Batch]":
        """One batch after the other, again and again."""
        return cycle(self.batches)


class Batch:
    """Keys, a slot for each, and the checksums of what is in them."""

    def __init__(self, keys: list[bytes], nbytes: int) -> None:
        self.keys = keys
        self.slots = [buffer(nbytes) for _ in keys]
        for view, key in zip(self.slots, keys, strict=True):
            fill(view, key)
        self.sums = [checksum(view) for view in self.slots]

    @property
    def right(self) -> bool:
        return all(holds(view, key) for view, key in zip(self.slots, self.keys, strict=True))

    def spoil(self) -> None:
        for view in self.slots:
            np.frombuffer(view, np.uint8)[:] = 0xAA


class Contender:
    """Stores and loads the next batch at each call; returns its payload bytes."""

    def __init__(self, chunks: Chunks) -> None:
        self._moved = chunks.nbytes * chunks.count
        self._turns = chunks.turns()

    def store(self) -> int:
        self.store_batch(next(self._turns))
        return self._moved

    def load(self) -> int:
        self.load_batch(next(self._turns))
        return self._moved

    def store_batch(self, batch: Batch) -> None:
        raise NotImplementedError

    def load_batch(self, batch: Batch) -> None:
        raise NotImplementedError


class Bare(Contender):
    """The limit: nothing but the system calls, the checksums and the bytes of the protocol."""

    def __init__(self, place: Place, chunks: Chunks) -> None:
        super().__init__(chunks)
        self._end = place.connect()
        self._value = HEADER_BYTES + chunks.nbytes
        self._ahead = memoryview(bytearray(len(b"$%d\r\n" % self._value) + HEADER_BYTES))
        self._tail = memoryview(bytearray(2))

    def store_batch(self, batch: Batch) -> None:
        for view, key in zip(batch.slots, batch.keys, strict=True):
            name = b"bare:" + key.hex().encode()
            header = pack(Envelope(bytes(16), key, len(view), 0.0, 0, checksum(view)), HEADER_BYTES)
            front = b"*3\r\n$3\r\nSET\r\n$%d\r\n%b\r\n$%d\r\n" % (len(name), name, self._value)
            self._send([front + header, view, b"\r\n"])
        left = 5 * len(batch.keys)
        while left:
            left -= len(self._end.recv(left))

    def load_batch(self, batch: Batch) -> None:
        names = [b"bare:" + key.hex().encode() for key in batch.keys]
        self._send([b"*2\r\n$3\r\nGET\r\n$%d\r\n%b\r\n" % (len(name), name) for name in names])
        for view, right in zip(batch.slots, batch.sums, strict=True):
            self._receive([self._ahead])
            self._receive([view, self._tail])
            if checksum(view) != right:
                raise ValueError("wrong bytes")

    def _send(self, parts: list[Any]) -> None:
        sent, whole = self._end.sendmsg(parts), sum(map(len, parts))
        if sent != whole:
            raise ValueError(f"{sent} of {whole} bytes were sent")

    def _receive(self, parts: list[memoryview]) -> None:
        received, whole = self._end.recvmsg_into(parts, 0, socket.MSG_WAITALL)[0], sum(map(len, parts))
        if received != whole:
            raise ValueError(f"{received} of {whole} bytes were received")

    def close(self) -> None:
        self._end.close()


class Peer(Contender):
    """redis-py with hiredis, the way it is meant to be used."""

    def __init__(self, place: Place, chunks: Chunks) -> None:
        super().__init__(chunks)
        self._client = place.client()

    def store_batch(self, batch: Batch) -> None:
        pipe = self._client.pipeline(transaction=False) if len(batch.keys) > 1 else self._client
        for key, view in zip(batch.keys, batch.slots, strict=True):
            checksum(view)
            pipe.set(b"peer:" + key, view)
        if pipe is not self._client:
            pipe.execute()

    def load_batch(self, batch: Batch) -> None:
        values = [self._client.get(b"peer:" + batch.keys[0])] if len(batch.keys) == 1 else self._many(batch)
        for value, view, right in zip(values, batch.slots, batch.sums, strict=True):
            np.copyto(np.frombuffer(view, np.uint8), np.frombuffer(value, np.uint8))
            if checksum(view) != right:
                raise ValueError("wrong bytes")

    def _many(self, batch: Batch) -> list[bytes]:
        pipe = self._client.pipeline(transaction=False)
        for key in batch.keys:
            pipe.get(b"peer:" + key)
        found: list[bytes] = pipe.execute()
        return found

    def close(self) -> None:
        self._client.close()


class Ours(Contender):
    """The tier, as a lane calls it."""

    def __init__(self, place: Place, chunks: Chunks, again: bool) -> None:
        super().__init__(chunks)
        self._tier = place.settings().open(OpenContext(NAMESPACE, chunks.nbytes))
        self._again = again  # the sink stores a chunk that is there again; a server would say that it has it

    def store_batch(self, batch: Batch) -> None:
        if not self._again:
            self._tier.delete(batch.keys)
        self._check(self._tier.write(batch.keys, batch.slots))

    def load_batch(self, batch: Batch) -> None:
        self._check(self._tier.read(batch.keys, batch.slots))

    def _check(self, outcomes: list[Any]) -> None:
        if not all(outcome.ok for outcome in outcomes):
            raise ValueError(f"{outcomes}")

    def close(self) -> None:
        self._tier.close()


def run(place: Place, link: str, sizes: list[int], batches: list[int], real: bool, options: Any) -> list[Result]:
    results = []
    for nbytes in sizes:
        for count in batches:
            chunks = Chunks(nbytes, count)
            contenders: dict[str, Any] = {"tier": Ours(place, chunks, again=not real)}
            if link != "tls":
                contenders["socket"] = Bare(place, chunks)
            contenders["redis-py"] = Peer(place, chunks)
            for one in contenders.values():
                _check(one, chunks)
            for verb in ("store", "load"):
                case = {"link": link, "verb": verb, "KiB": nbytes // KIB, "chunks": count}
                works: dict[str, Callable[[], int]] = {
                    name: getattr(one, verb) for name, one in contenders.items()
                }
                results += interleaved(case, works, options.rounds, options.seconds)
            for one in contenders.values():
                one.close()
    return results


def _check(contender: Contender, chunks: Chunks) -> None:
    """It stores all chunks, and really brings their bytes."""
    for batch in chunks.batches:
        contender.store_batch(batch)
    for batch in chunks.batches:
        batch.spoil()
        contender.load_batch(batch)
        if not batch.right:
            raise ValueError(f"{type(contender).__name__} brings other bytes")


@contextmanager
def places(real: bool, links: list[str]) -> Iterator[dict[str, Place]]:
    with ExitStack() as running:
        folder = Path(running.enter_context(tempfile.TemporaryDirectory()))
        certificates = make_certificates(folder / "tls", "127.0.0.1")
        found = {}
        server = running.enter_context(RedisServer(folder, unix=True)) if real else None
        for link in links:
            found[link] = _place(running, link, folder, certificates, server)
        yield found


def _place(
    running: ExitStack, link: str, folder: Path, certificates: Certificates, server: RedisServer | None
) -> Place:
    if server is not None:
        if link == "tls":
            front = running.enter_context(TlsFront(server.port, certificates))
            return Place(f"rediss://127.0.0.1:{front.port}/0", certificates.ca_file)
        return Place(server.unix_url if link == "unix" else server.url)
    if link == "unix":
        return Place(f"unix://{running.enter_context(child(SINK, 'unix', str(folder / 'sink.sock')))}")
    files = [str(certificates.cert_file), str(certificates.key_file)] if link == "tls" else []
    port = running.enter_context(child(SINK, link, *files))
    scheme = "rediss" if link == "tls" else "redis"
    return Place(f"{scheme}://127.0.0.1:{port}/0", certificates.ca_file if link == "tls" else None)


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--server", choices=["sink", "real"], default="sink")
    parser.add_argument("--links", nargs="+", choices=["tcp", "unix", "tls"], default=["tcp", "unix", "tls"])
    parser.add_argument("--quick", action="store_true", help="chunks of 1 MiB only, 1 and 4 at a time")
    options = parser.parse_args()
    sizes = [MIB] if options.quick else [256 * KIB, MIB, 4 * MIB]
    batches = [1, 4] if options.quick else [1, 4, 16]
    real = options.server == "real"
    results = []
    with places(real, options.links) as found:
        for link, place in found.items():
            sys.stderr.write(f"{link}\n")
            results += run(place, link, sizes, batches, real, options)
    report(results, "tier", options.json, options.out, options.plot)


if __name__ == "__main__":
    main()
