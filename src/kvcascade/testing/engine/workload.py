"""What may happen: engines, stacks and histories, drawn from a seed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any, NamedTuple, TypeAlias

from .shape import EngineShape
from .stack import StackShape, TierShape

__all__ = ["PROFILES", "Action", "Case", "draw_actions", "draw_case"]


class Action(NamedTuple):
    """One thing that happens. It means something in every state, so that a history without some of its actions is
    a history, too."""

    name: str
    args: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return f"{self.name}({', '.join(map(repr, self.args))})"


@dataclass(frozen=True, slots=True)
class Case:
    """An engine and a stack."""

    seed: int
    engine: EngineShape
    stack: StackShape
    prompt_only: bool = False
    batch: bool = True
    """Whether the manager has `match_prefix`; else each chunk is looked up by itself."""
    share_loads: bool = True
    """Whether a request waits while another loads a chunk that it needs."""
    hashes_late: int = 0
    """How many of a request's newest hashes may come late."""
    copy_failures: float = 0.0
    """Share of the copies between device and host that fail."""


_DISK = TierShape("disk")
_SHARED = TierShape(chunks=30, shared=True)
_CHAINS: tuple[tuple[TierShape, ...], ...] = (
    (),
    (TierShape(chunks=20),),
    (TierShape(chunks=6),),
    (_DISK,),
    (TierShape(chunks=8), _DISK),
    (TierShape(chunks=5), TierShape(chunks=30, write="on_evict")),
    (TierShape(chunks=8, write="on_evict"),),
    (_SHARED,),
    (TierShape(chunks=8), _SHARED),
    (TierShape(chunks=6, write="on_evict"), replace(_SHARED, chunks=8)),
)
_FAULTS: tuple[Mapping[str, float], ...] = (
    {},
    {"failed": 0.2},
    {"failed": 0.05, "missing": 0.05, "corrupt": 0.05, "refused": 0.05, "raises": 0.05},
)


def draw_case(seed: int, profile: str = "all") -> Case:
    """The case of this seed."""
    draw = Random(f"case {seed} {profile}")
    return PROFILES[profile](draw, _any_case(seed, draw))


def _any_case(seed: int, draw: Random) -> Case:
    windows = draw.choice([(0,), (0,), (0,), (0, 8), (0, 5), (9,), (0, 0), (0, 7, 0)])
    engine = EngineShape(
        blocks=draw.randint(22, 60) * len(windows),
        windows=windows,
        seqs=draw.randint(1, 5),
        budget=draw.randint(6, 48),
        drafts=draw.choice([0, 0, 1, 3]),
        asynchronous=draw.random() < 0.5,
        ranks=draw.choice([1, 1, 2, 3]),
        blocks_per_chunk=(draw.choice([1, 1, 2, 3]),) * len(windows),
    )
    if len(windows) > 1 and draw.random() < 0.4:
        engine = replace(engine, blocks_per_chunk=tuple(draw.choice([1, 2, 3]) for _ in windows))
    if len(windows) > 1 and draw.random() < 0.6:
        engine = replace(engine, draft_groups=(len(windows) - 1,), drafts=draw.choice([1, 1, 2, 3]))
    stack = StackShape(
        slots=draw.choice([4, 10, 24, 60]),
        tiers=draw.choice(_CHAINS),
        queue=draw.choice([0.125, 0.5, 1.0]),
        concurrency=draw.randint(1, 3),
        seed=seed,
        faults=dict(draw.choice(_FAULTS)),
    )
    return Case(
        seed,
        engine,
        stack,
        prompt_only=draw.random() < 0.1,
        batch=draw.random() < 0.7,
        share_loads=draw.random() < 0.9,
        hashes_late=draw.choice([0, 0, 1, 3]),
        copy_failures=draw.choice([0.0, 0.0, 0.1]),
    )


_Profile: TypeAlias = Callable[[Random, Case], Case]


def _calm(draw: Random, case: Case) -> Case:
    """Nothing fails."""
    return replace(case, stack=replace(case.stack, faults={}), copy_failures=0.0)


def _faults(draw: Random, case: Case) -> Case:
    """Media and copies fail often."""
    return replace(case, stack=replace(case.stack, faults=dict(_FAULTS[draw.choice([1, 2])])), copy_failures=0.1)


def _disk(draw: Random, case: Case) -> Case:
    """Host and disk."""
    return replace(case, stack=replace(case.stack, tiers=(_DISK,)))


def _drafts(draw: Random, case: Case) -> Case:
    """A draft model's group beside the model's own; one step at a time, and room for requests to decode in."""
    engine = replace(
        case.engine,
        windows=(0, draw.choice([0, 0, 8])),
        blocks=120,
        blocks_per_chunk=(1, draw.choice([1, 1, 2])),
        drafts=1,
        draft_groups=(1,),
        asynchronous=False,
    )
    return _calm(draw, replace(case, engine=engine, hashes_late=0, prompt_only=False))


def _plain(draw: Random, case: Case) -> Case:
    """One worker, one group of full attention, no drafts, one step at a time; nothing fails."""
    engine = replace(case.engine, windows=(0,), drafts=0, asynchronous=False, ranks=1, draft_groups=())
    return _calm(draw, replace(case, engine=engine, hashes_late=0))


PROFILES: dict[str, _Profile] = {
    "all": lambda draw, case: case,
    "calm": _calm,
    "faults": _faults,
    "disk": _disk,
    "drafts": _drafts,
    "plain": _plain,
}
"""Name -> what it makes of a case that was drawn."""


def draw_actions(case: Case, steps: int) -> list[Action]:
    """A history with so many steps of the engine."""
    draw = Random(f"actions {case.seed}")
    actions: list[Action] = []
    taken = 0
    while taken < steps:
        (kind,) = draw.choices(list(_WEIGHTS), list(_WEIGHTS.values()))
        actions.append(_DRAWN[kind](draw))
        taken += kind == "step"
    return [*actions, Action("settle")]


_WISHES = (
    *[None] * 6,
    {"priority": "low"},
    {"priority": "high", "pin_for": "1s"},
    {"pin_for": "3s"},
    {"pin_for": "for ever"},
)


def _add(draw: Random) -> Action:
    """Family of tokens, length of the prompt, request to go on from, most tokens, where it stops, its bounds, and
    what its client wishes."""
    return Action(
        "add",
        (
            draw.randrange(4),
            draw.randint(1, 60),
            draw.choice([None, None, 0, 1, 2]),
            draw.randint(1, 20),
            draw.choice([None, None, 1, 3, 6]),
            draw.choice([None, None, None, None, 5, 16, -1, "many"]),
            draw.choice(_WISHES),
        ),
    )


_DRAWN: dict[str, Callable[[Random], Action]] = {
    "step": lambda draw: Action("step", (draw.getrandbits(32),)),
    "add": _add,
    "abort": lambda draw: Action("abort", (draw.randrange(8),)),
    "media": lambda draw: Action("media", tuple(draw.randrange(6) for _ in range(draw.choice([1, 2, 4, 12])))),
    "time": lambda draw: Action("time", (draw.choice([0.1, 1.0, 3.0]),)),
    "forget": lambda draw: Action("forget"),
    "reset": lambda draw: Action(
        "reset", (draw.random() < 0.6, draw.choice(["all", "primary"]), draw.random() < 0.7)
    ),
    "others": lambda draw: Action("others", (draw.randrange(60),)),
    "faults": lambda draw: Action("faults", (draw.random() < 0.5,)),
    "settle": lambda draw: Action("settle"),
}
_WEIGHTS = {
    "step": 100,
    "add": 16,
    "abort": 3,
    "media": 70,
    "time": 5,
    "forget": 8,
    "reset": 1.5,
    "others": 6,
    "faults": 1,
    "settle": 0.4,
}
