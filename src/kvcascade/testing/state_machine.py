"""A tier against a plain dict, in sequences of calls that hypothesis chooses and shrinks."""

import tempfile
from pathlib import Path
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvcascade.tiers import OpenContext, Tier
from kvcascade.types import Key, Outcome, OutcomeKind

from .bytes import buffer, bytes_for, holds, key_for
from .conformance import NAMESPACE

__all__ = ["TierStateMachine"]

CHUNK = 16 << 10
KEYS = st.sampled_from([key_for(number) for number in range(12)])
BATCHES = st.lists(KEYS, max_size=4)
LENGTHS = {key_for(number): (1, 512, 4097, CHUNK)[number % 4] for number in range(12)}


class TierStateMachine(RuleBasedStateMachine):
    """Every call of a tier is answered as a dict would answer it. A subclass opens the tier:

        class MineMachine(TierStateMachine):
            def open(self, path, context): ...

        TestMineMachine = MineMachine.TestCase

    Give it a small capacity (a few hundred KiB, if it may be that small) so that refusals come up.
    """

    persists: ClassVar[bool] = False
    """Whether `reopen` finds again what was there."""

    def __init__(self) -> None:
        super().__init__()
        self._folder = tempfile.TemporaryDirectory(prefix="kvcascade-")
        self._model: dict[Key, int] = {}  # key -> payload bytes
        self._moves = 0
        self._epoch = ""

    def open(self, path: Path, context: OpenContext) -> Tier:
        """Opens the tier in `path`, empty at first."""
        raise NotImplementedError(f"{type(self).__name__} must define open(self, path, context)")

    @initialize()
    def start(self) -> None:
        self._tier = self._open()

    @rule(keys=BATCHES, victims=BATCHES)
    def write(self, keys: list[Key], victims: list[Key]) -> None:
        sources = [memoryview(bytes_for(key, LENGTHS[key], self._epoch)) for key in keys]
        outcomes = self._tier.write(keys, sources, victims)
        for victim in victims:
            self._model.pop(victim, None)
        for key, outcome in zip(keys, outcomes, strict=True):
            if outcome == Outcome.OK:
                self._model[key] = LENGTHS[key]
            else:
                assert outcome == Outcome.REFUSED, f"write gave {outcome}"
                assert key not in self._model, "a chunk that is there was refused"
                self._check_refusal_is_due(LENGTHS[key])

    @rule(keys=BATCHES)
    def read(self, keys: list[Key]) -> None:
        targets = [buffer(LENGTHS[key]) for key in keys]
        outcomes = self._tier.read(keys, targets)
        assert outcomes == [self._expected(key) for key in keys]
        for key, outcome, target in zip(keys, outcomes, targets, strict=True):
            assert not outcome.ok or holds(target, key, self._epoch), f"wrong bytes for {key.hex()}"

    @rule(key=KEYS)
    def read_at_another_length(self, key: Key) -> None:
        (outcome,) = self._tier.read([key], [buffer(LENGTHS[key] + 1)])
        if key in self._model:
            assert outcome.kind in (OutcomeKind.CORRUPT, OutcomeKind.MISSING)
            if not self._tier.exists([key])[0]:
                del self._model[key]
        else:
            assert outcome == Outcome.MISSING

    @rule(keys=st.lists(KEYS, max_size=4, unique=True))
    def delete(self, keys: list[Key]) -> None:
        assert self._tier.delete(keys) == [self._expected(key) for key in keys]
        for key in keys:
            self._model.pop(key, None)

    @rule(keys=BATCHES)
    def touch(self, keys: list[Key]) -> None:
        self._tier.touch(keys)

    @rule()
    def maintain(self) -> None:
        changes = self._tier.maintain(1.0)
        for entry in changes.appeared:
            assert self._model.get(entry.key) == entry.nbytes
        for key in changes.vanished:
            assert key not in self._model

    @rule()
    def move(self) -> None:
        self._moves += 1
        self._epoch = f"v{self._moves}"
        self._tier.move_to(self._epoch)
        self._model.clear()

    @precondition(lambda self: self.persists)
    @rule()
    def reopen(self) -> None:
        self._tier.close()
        self._tier = self._open()

    @invariant()
    def holds_what_the_model_holds(self) -> None:
        if not hasattr(self, "_tier"):
            return
        assert self._tier.exists(list(LENGTHS)) == [key in self._model for key in LENGTHS]
        assert {entry.key: entry.nbytes for entry in self._tier.entries()} == self._model
        usage = self._tier.usage()
        if not self._tier.capabilities.shared:
            assert usage.chunks == len(self._model)
            assert usage.bytes == sum(map(self._tier.footprint, self._model.values()))
        assert usage.capacity is None or usage.bytes <= usage.capacity

    def teardown(self) -> None:
        if hasattr(self, "_tier"):
            self._tier.close()
        self._folder.cleanup()

    def _open(self) -> Tier:
        context = OpenContext(NAMESPACE, CHUNK, epoch=self._epoch)
        return self.open(Path(self._folder.name), context)

    def _expected(self, key: Key) -> Outcome:
        return Outcome.OK if key in self._model else Outcome.MISSING

    def _check_refusal_is_due(self, nbytes: int) -> None:
        usage = self._tier.usage()
        assert usage.capacity is not None, "a tier without a bound refused"
        assert usage.bytes + self._tier.footprint(nbytes) > usage.capacity, "refused, although there is room"
