"""`kvcascade inspect`: the facts of one chunk."""

import json
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import click

from kvcascade.errors import ConfigError

from .holdings import choose
from .kept import STACK, TIER, Answers
from .options import HEX

if TYPE_CHECKING:
    from kvcascade.tiers import Reading, StoredChunk, StoredNamespace, TierSettings

    Found = tuple[TierSettings, StoredNamespace, StoredChunk]

_SHOWN = 8


@click.command
@STACK
@click.argument("key", type=HEX)
@TIER
@click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")
@click.pass_context
def inspect(ctx: click.Context, stack: str, key: str, name: str | None, as_json: bool) -> None:
    """Shows what is known of one chunk, in each tier and namespace that has it: where it lies, its epoch and
    whether that is void, bytes, times, and whether its bytes are right.

    KEY is in hexadecimal; its first digits are enough where no other key begins so. Exit code 1 where no tier has
    the chunk, or where a copy of it is not right.
    """
    from kvcascade.configs import load_stack

    answers = Answers()
    found = list(_find(choose(load_stack(stack), name), key, answers))
    _check_one(found, key)
    facts = []
    for tier, kept, chunk in found:
        with answers.of(tier):
            facts.append(_facts(tier, kept, chunk, kept.read([chunk])[0]))
    if as_json:
        click.echo(json.dumps(facts, indent=2))
    elif facts:
        _print(facts)
    else:
        click.echo(f"No tier that answers holds a chunk whose key begins with {key}.", err=True)
    ctx.exit(answers.code or (0 if facts and all(fact["right"] for fact in facts) else 1))


def _find(tiers: "list[TierSettings]", key: str, answers: Answers) -> "Iterator[Found]":
    for tier in tiers:
        with answers.of(tier):
            yield from ((tier, kept, chunk) for kept in tier.stored() for chunk in kept.chunks(key))


def _check_one(found: "list[Found]", key: str) -> None:
    keys = sorted({chunk.entry.key.hex() for _, _, chunk in found})
    if key in keys or len(keys) <= 1:
        found[:] = [one for one in found if len(keys) <= 1 or one[2].entry.key.hex() == key]
        return
    more = f"\n  and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    shown = "".join(f"\n  {one}" for one in keys[:_SHOWN])
    raise ConfigError(f"{len(keys)} keys begin with {key}; give more digits:{shown}{more}")


def _facts(
    tier: "TierSettings", kept: "StoredNamespace", chunk: "StoredChunk", reading: "Reading"
) -> dict[str, Any]:
    entry = chunk.entry
    return {
        "key": entry.key.hex(),
        "tier": tier.name,
        "place": chunk.place,
        "namespace": dict(kept.namespace.fields),
        "epoch": chunk.epoch.words,
        "void": chunk.epoch.void,
        "bytes": entry.nbytes,
        "written": entry.written,
        "used": entry.used,
        "sequence": reading.sequence or chunk.sequence,
        "right": reading.outcome.ok,
        "found": _in_words(reading),
    }


def _in_words(reading: "Reading") -> str:
    if reading.flaw is not None:
        return reading.flaw.value
    if reading.outcome.cause is not None:
        return str(reading.outcome.cause)
    return "checksum right" if reading.outcome.ok else "gone meanwhile"


def _print(facts: list[dict[str, Any]]) -> None:
    from kvcascade.configs.units import format_size

    from .output import print_table

    click.echo(f"key {facts[0]['key']}")
    sections = []
    for fact in facts:
        namespace = " ".join(f"{name}={value}" for name, value in fact["namespace"].items())
        rows = [
            ("place", fact["place"]),
            ("namespace", namespace or "(default)"),
            ("epoch", f"{fact['epoch']}{', void' if fact['void'] else ''}"),
            ("payload", f"{format_size(fact['bytes'])} ({fact['bytes']:,} bytes)"),
            ("written", _when(fact["written"])),
            ("used", _when(fact["used"])),
            ("sequence", str(fact["sequence"])),
            ("verified", fact["found"] if fact["right"] else f"NOT RIGHT: {fact['found']}"),
        ]
        names = [fact["tier"], *[""] * (len(rows) - 1)]
        sections.append([(name, *row) for name, row in zip(names, rows, strict=True)])
    print_table(("tier", "", ""), sections)


def _when(at: float) -> str:
    from kvcascade.configs.units import format_duration

    age = format_duration(max(0, round(time.time() - at)))
    return f"{time.strftime('%Y-%m-%d %H:%M:%S %z', time.localtime(at))} ({age} ago)"
