"""What the epochs of a shared tier must do: a pytest class that the tests of each such tier derive from."""

import threading
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest

from kvcascade.errors import TierError, TierUnavailable
from kvcascade.tiers import OpenContext, TierSettings
from kvcascade.types import Key, Namespace, Outcome

from .bytes import buffer, bytes_for, holds, key_for
from .conformance import NAMESPACE

__all__ = ["EpochConformance", "HeldBatch", "SharedPlace"]

KEY = key_for(1)
HANG = 60.0


class SharedPlace:
    """A place that engines share: each `engine` is one more tier on it."""

    chunk = 64 << 10
    namespace = NAMESPACE

    def __init__(self) -> None:
        self.opened: list[Any] = []

    def settings(self, **given: Any) -> TierSettings:
        """Those of a tier at this place."""
        raise NotImplementedError(f"{type(self).__name__} must define settings(self, **given)")

    def engine(self, epoch: str = "", namespace: Namespace = NAMESPACE, **settings: Any) -> Any:
        """One more tier; it is closed with the place."""
        self.opened.append(self.settings(**settings).open(OpenContext(namespace, self.chunk, epoch=epoch)))
        return self.opened[-1]

    def close(self) -> None:
        for tier in self.opened:
            tier.close()

    def keys(self, *numbers: int) -> list[Key]:
        return [key_for(number) for number in numbers]

    def store(self, tier: Any, keys: Sequence[Key], nbytes: int = chunk, epoch: str = "") -> list[Outcome]:
        outcomes: list[Outcome] = tier.write(keys, [memoryview(bytes_for(key, nbytes, epoch)) for key in keys])
        return outcomes

    def load(self, tier: Any, keys: Sequence[Key], nbytes: int = chunk, epoch: str = "") -> list[Outcome]:
        """Outcomes; where one is OK, the bytes are right."""
        targets = [buffer(nbytes) for _ in keys]
        outcomes: list[Outcome] = tier.read(keys, targets)
        for key, target, outcome in zip(keys, targets, outcomes, strict=True):
            assert not outcome.ok or holds(target, key, epoch), f"wrong bytes of {key.hex()}"
        return outcomes

    def serves(self, tier: Any, epoch: str) -> bool:
        """Whether the chunk `KEY` that was stored for `epoch` is served; that of another one never is."""
        there: bool = tier.exists([KEY]) == [True]
        (outcome,) = self.load(tier, [KEY], epoch=epoch)
        assert outcome == (Outcome.OK if there else Outcome.MISSING)
        return there

    def check_silent(self, tier: Any, refusal: type[TierError] = TierUnavailable) -> None:
        """The tier answers nothing and takes nothing; nor does it move, which is a `refusal`."""
        assert tier.exists([KEY]) == [False]
        assert self.load(tier, [KEY]) == [Outcome.MISSING]
        assert self.store(tier, [KEY]) == [Outcome.REFUSED]
        assert tier.delete([KEY]) == [Outcome.MISSING]
        assert list(tier.entries()) == []
        tier.touch([KEY])
        with pytest.raises(refusal):
            tier.move_to("v2")


class HeldBatch(list):  # type: ignore[type-arg]
    """Buffers, of which those after the first are handed over when they are released."""

    def __init__(self, buffers: list[memoryview]) -> None:
        super().__init__(buffers)
        self.reached, self.released = threading.Event(), threading.Event()

    def __iter__(self) -> Any:
        yield self[0]
        self.reached.set()
        assert self.released.wait(HANG)
        yield from self[1:]

    def held(self, call: Callable[[], list[Outcome]], meanwhile: Callable[[], None]) -> list[Outcome]:
        """The outcomes of a call that is given this batch; `meanwhile` happens while the batch holds it."""
        outcomes: list[Outcome] = []
        thread = threading.Thread(target=lambda: outcomes.extend(call()))
        thread.start()
        assert self.reached.wait(HANG)
        meanwhile()
        self.released.set()
        thread.join(HANG)
        return outcomes


class EpochConformance:
    """The tests of `Tier.move_to` and of what it means to the engines of one place. A subclass, named `Test...`,
    has a fixture `shared` that gives a `SharedPlace`, and says what is known of an epoch:

        class TestMine(EpochConformance):
            def mark(self, tier):
                return tier.epoch.mark
    """

    moves = 20
    """How often engines leave an epoch at once."""
    at_once = 3
    """How many engines do."""
    late: ClassVar[Sequence[Outcome] | None] = (Outcome.OK, Outcome.REFUSED, Outcome.REFUSED)
    """What becomes of a write that a move overtakes after the first chunk; None where it may be written, since
    nobody looks there any more."""

    def mark(self, tier: Any) -> object:
        """What tells the tier's epoch from every other one."""
        raise NotImplementedError(f"{type(self).__name__} must define mark(self, tier)")

    def check_entered(self, marks: Sequence[Any]) -> None:
        """That these are the marks of one epoch after the other."""
        assert len(set(marks)) == self.moves

    @pytest.mark.parametrize("start", ["", "v1"])
    @pytest.mark.parametrize("target", ["", "v2"])
    def test_a_reset_moves_one_engine_and_leaves_the_others(
        self, shared: SharedPlace, start: str, target: str
    ) -> None:
        """vllm-project/vllm#57727: after it, nothing old is served to the one, and all of it to the others."""
        one, other = shared.engine(start), shared.engine(start)
        shared.store(other, [KEY], epoch="old")
        assert shared.serves(one, "old")
        one.move_to(target)
        assert not shared.serves(one, "")
        assert list(one.entries()) == []
        assert shared.serves(other, "old")
        shared.store(one, [KEY], epoch="new")
        assert shared.serves(one, "new")
        assert shared.serves(other, "old")

    @pytest.mark.parametrize("start", ["", "v1"])
    @pytest.mark.parametrize("target", ["", "v2"])
    def test_a_restart_after_a_reset_finds_nothing_old(self, shared: SharedPlace, start: str, target: str) -> None:
        """Its stack file does not know of the reset. Others that run in the old epoch go on storing there."""
        one, other = shared.engine(start), shared.engine(start)
        shared.store(one, [KEY], epoch="old")
        one.move_to(target)
        one.close()
        shared.store(other, [KEY], epoch="old")
        again = shared.engine(start)
        assert not shared.serves(again, "")
        assert shared.serves(other, "old")
        shared.store(again, [KEY], epoch="again")
        again.close()
        assert shared.serves(shared.engine(start), "again")  # the next restart is warm

    def test_engines_that_name_the_same_weights_share(self, shared: SharedPlace) -> None:
        one, two, three = shared.engine(), shared.engine("v1"), shared.engine("v2")
        one.move_to("v2")
        shared.store(one, [KEY], epoch="v2")
        assert shared.serves(three, "v2")
        assert not shared.serves(two, "")
        two.move_to("v2")
        assert shared.serves(two, "v2")
        one.close()
        assert shared.serves(shared.engine("v2"), "v2")

    def test_nobody_joins_an_engine_that_was_reset_without_a_name(self, shared: SharedPlace) -> None:
        one, two = shared.engine(), shared.engine()
        one.move_to("")
        shared.store(one, [KEY], epoch="one")
        two.move_to("")
        assert not shared.serves(two, "")
        for epoch in ("", "v1"):
            assert not shared.serves(shared.engine(epoch), "")
        one.close()
        assert not shared.serves(shared.engine(), "")

    def test_a_reset_to_the_same_name_is_a_reset(self, shared: SharedPlace) -> None:
        """Engines that name it and are reset as well share what comes then."""
        one, two, late = shared.engine("v1"), shared.engine("v1"), shared.engine("v1")
        shared.store(one, [KEY], epoch="old")
        one.move_to("v1")
        assert not shared.serves(one, "")
        shared.store(one, [KEY], epoch="new")
        assert shared.serves(two, "old")
        two.move_to("v1")
        assert shared.serves(two, "new")
        assert shared.serves(late, "old")
        assert shared.serves(shared.engine("v1"), "new")

    def test_weights_that_come_back_begin_empty(self, shared: SharedPlace) -> None:
        one = shared.engine("v1")
        shared.store(one, [KEY], epoch="first")
        one.move_to("v2")
        one.move_to("v1")
        assert not shared.serves(one, "")

    def test_who_starts_unnamed_after_any_reset_is_told_nothing_of_before(self, shared: SharedPlace) -> None:
        """An engine with new weights restarts without a name: what one with older weights stored there meanwhile
        is not for it."""
        one = shared.engine()
        one.move_to("")
        older = shared.engine()
        shared.store(older, [KEY], epoch="older")
        one.move_to("")
        one.close()
        assert not shared.serves(shared.engine(), "")
        assert shared.serves(older, "older")

    def test_engines_that_leave_the_same_epoch_at_once_meet_again(self, shared: SharedPlace) -> None:
        """All engines of a deployment are reset to the same weights, again and again, at the same time."""
        engines = [shared.engine("v1") for _ in range(self.at_once)]
        start = threading.Barrier(len(engines))
        entered: list[list[object]] = [[] for _ in engines]

        def run(who: int) -> None:
            for _ in range(self.moves):
                start.wait(HANG)
                engines[who].move_to("v1")
                entered[who].append(self.mark(engines[who]))

        threads = [threading.Thread(target=run, args=(who,)) for who in range(len(engines))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANG)
        assert entered == [entered[0]] * self.at_once
        self.check_entered(entered[0])

    @pytest.mark.parametrize("target", ["", "v2"])
    def test_a_late_write_of_the_old_epoch_is_not_seen(self, shared: SharedPlace, target: str) -> None:
        """Neither by this engine nor by one that has named the new weights before."""
        tier, keys = shared.engine(), shared.keys(1, 2, 3)
        batch = HeldBatch([memoryview(bytes_for(key, shared.chunk)) for key in keys])
        found = batch.held(lambda: tier.write(keys, batch), lambda: tier.move_to(target))
        assert self.late is None or found == list(self.late)
        assert tier.exists(keys) == [False] * 3
        assert shared.engine(target).exists(keys) == [False] * 3

    def test_a_late_read_of_the_old_epoch(self, shared: SharedPlace) -> None:
        tier, keys = shared.engine(), shared.keys(1, 2)
        shared.store(tier, keys)
        batch = HeldBatch([buffer(shared.chunk) for _ in keys])
        found = batch.held(lambda: tier.read(keys, batch), lambda: tier.move_to("v2"))
        assert found == [Outcome.MISSING] * 2
