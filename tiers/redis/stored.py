"""What is on the servers of one namespace, seen from outside the engines that share it."""

import random
from collections.abc import Iterable, Iterator, Sequence

from kvcascade.errors import ConfigError, TierError, TierRefused
from kvcascade.tiers.envelope import HEADER_BYTES, Flaw
from kvcascade.tiers.stored import Holding, Reading, Removed, StoredChunk, StoredEpoch, StoredNamespace
from kvcascade.types import Buffer, Entry, Namespace, Outcome

from .chunks import Names, fetch
from .engines import engines_of, in_words
from .epochs import Epoch, Epochs
from .exchange import Answer, Exchange, plain
from .listing import Listed, look, scan
from .replies import Refusal, Stored
from .settings import RedisSettings

__all__ = ["RedisStored"]

_BATCH = 500
_STAMP_DIGITS = 32
_REMOVE = """
if redis.call('GETRANGE', KEYS[1], 0, ARGV[2] - 1) == ARGV[1] then
    return redis.call('UNLINK', KEYS[1])
end
return 0
"""


class RedisStored(StoredNamespace):
    """Values whose names begin alike. Looking at them counts as a use on servers that evict by recency."""

    def __init__(self, settings: RedisSettings, exchange: Exchange, digest: str, namespace: Namespace) -> None:
        self.namespace = namespace
        self._digest = digest
        self._exchange = exchange
        self._names = Names(settings.prefix, digest)
        self._epochs = Epochs(namespace, self._names, exchange, settings.deadline)
        self.place = self._names.base.decode()

    # Listing

    def holding(self) -> Holding:
        listed = list(self._listed("", 1.0))
        times = [one.envelope.written for one in listed if one.envelope]
        return Holding(
            place=self.place,
            namespace=str(self.namespace),
            chunks=len(listed),
            bytes=sum(one.length for one in listed),
            oldest=min(times, default=None),
            newest=max(times, default=None),
            used_by=self.used_by(),
            tenant=self.tenant,
        )

    @property
    def tenant(self) -> str:
        return dict(self.namespace.fields).get("tenant", "")

    def used_by(self) -> str:
        """The engines that live, in words; "" where there are none."""
        return ", ".join(sorted(map(in_words, self._engines())))

    def _engines(self) -> dict[str, str | None]:
        return engines_of(self._exchange, self._names, self._digest)

    def chunks(self, prefix: str = "", share: float = 1.0) -> Iterator[StoredChunk]:
        current = self._epochs.current()
        used = set(self._engines().values())
        for one in self._listed(prefix, share):
            stamp = self._stamp(one)
            if epoch := current.get(stamp):
                yield _chunk(one, _facts(epoch))
            else:
                over = used.isdisjoint((stamp.hex(), None))  # None: an engine is in an epoch that is not known
                yield _chunk(one, StoredEpoch("private or over", None, void=over))

    def _listed(self, prefix: str, share: float) -> Iterator[Listed]:
        """All values that may be chunks."""
        for names in scan(self._exchange, self._names.base + b"?" * _STAMP_DIGITS + b":" + prefix.encode()):
            chosen = [name for name in names if random.random() < share and _is_hex(*self._parts(name))]
            yield from look(self._exchange, chosen)

    def _parts(self, name: bytes) -> tuple[bytes, bytes]:
        """Stamp and key, in hexadecimal."""
        stamp, _, key = name[len(self._names.base) :].partition(b":")
        return stamp, key

    def _stamp(self, listed: Listed) -> bytes:
        return bytes.fromhex(self._parts(listed.name)[0].decode())

    # Reading

    def read(self, chunks: Sequence[StoredChunk]) -> list[Reading]:
        payloads = [memoryview(bytearray(max(0, chunk.token.length - HEADER_BYTES))) for chunk in chunks]
        fetched = [
            fetch(chunk.token.name, payload, self._stamp(chunk.token), chunk.entry.key)
            for chunk, payload in zip(chunks, payloads, strict=True)
        ]
        answers = self._exchange.ask([one.request for one in fetched])
        return [
            _reading(chunk, answer, bytes(one.header), payload)
            for chunk, answer, one, payload in zip(chunks, answers, fetched, payloads, strict=True)
        ]

    # Removing

    def remove(self, chunks: Iterable[StoredChunk], quarantine: bool = False) -> Removed:
        if quarantine:
            raise ConfigError(f"{self.place}: a redis tier keeps no quarantine")
        removed = Removed()
        batch: list[StoredChunk] = []
        for chunk in chunks:
            batch.append(chunk)
            if len(batch) >= _BATCH:
                removed, batch = removed.plus(self._remove(batch)), []
        return removed.plus(self._remove(batch))

    def _remove(self, chunks: Sequence[StoredChunk]) -> Removed:
        """Each in one step, if it begins as it did."""
        tokens: list[Listed] = [chunk.token for chunk in chunks]
        requests = [plain(one.name, "EVAL", _REMOVE, 1, one.name, one.header, HEADER_BYTES) for one in tokens]
        answers = self._exchange.ask(requests)
        gone = [
            one.length
            for one, answer in zip(tokens, answers, strict=True)
            if self._exchange.checked(one.name, answer) == 1
        ]
        return Removed(len(gone), sum(gone))

    def remove_all(self) -> Removed:
        """All that is ours, marks and description too."""
        count = nbytes = others = 0
        for names in scan(self._exchange, self._names.base):
            sizes = self._exchange.ask([plain(name, "STRLEN", name) for name in names])
            gone = self._exchange.ask([plain(name, "UNLINK", name) for name in names])
            for name, size, answer in zip(names, sizes, gone, strict=True):
                if self._exchange.checked(name, answer) != 1:
                    continue
                if name[len(self._names.base) :].startswith((b"epoch:", b"engine:", b"namespace")):
                    others += 1
                else:
                    count, nbytes = count + 1, nbytes + (size if isinstance(size, int) else 0)
        return Removed(count, nbytes, others)


def _is_hex(*texts: bytes) -> bool:
    return all(text and len(text) % 2 == 0 and not text.strip(b"0123456789abcdef") for text in texts)


def _facts(epoch: Epoch) -> StoredEpoch:
    return StoredEpoch(f"weights {epoch.name}" if epoch.name else "unnamed", epoch.name, void=False)


def _chunk(listed: Listed, epoch: StoredEpoch) -> StoredChunk:
    key = bytes.fromhex(listed.name.rpartition(b":")[2].decode())
    envelope = listed.envelope
    written, sequence = (envelope.written, envelope.sequence) if envelope else (0.0, 0)
    entry = Entry(key, max(0, listed.length - HEADER_BYTES), written, written)
    return StoredChunk(entry, epoch, listed.name.decode(), sequence, listed)


def _reading(chunk: StoredChunk, answer: Answer, header: bytes, payload: Buffer) -> Reading:
    if isinstance(answer, TierError):
        return Reading(Outcome.failed(answer))
    if isinstance(answer, Refusal):
        return Reading(Outcome.failed(TierRefused(f"{answer.code} {answer.text}")))
    if isinstance(answer, Stored) and not answer.in_place and chunk.token.length < HEADER_BYTES:
        return Reading(Outcome.CORRUPT, flaw=Flaw.NO_ENVELOPE)
    if not isinstance(answer, Stored) or not answer.in_place or header != chunk.token.header:
        return Reading(Outcome.MISSING)
    if answer.flaw is not None:
        return Reading(Outcome.CORRUPT, flaw=answer.flaw)
    return Reading(Outcome.OK, payload, None, chunk.sequence)
