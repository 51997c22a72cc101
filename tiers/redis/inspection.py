"""What `check`, `ls` and `clear` find on the servers: beside running engines, or without any."""

import json
import re
from collections.abc import Iterator
from typing import Any

from kvcascade.configs.units import format_duration, format_size
from kvcascade.errors import ConfigError, TierError
from kvcascade.tiers.base import Probe, StoredNamespace
from kvcascade.tiers.envelope import HEADER_BYTES
from kvcascade.types import Namespace

from .chunks import Names
from .engines import SILENT
from .exchange import Answer, Exchange, plain
from .links import Links
from .listing import scan
from .replies import Refusal, error_of
from .settings import Location, RedisSettings
from .stored import RedisStored

__all__ = ["clear", "probe", "stored"]

_TOOLS = "kvcascade-tools"
_OLDEST = (6, 2)


def _exchange(settings: RedisSettings) -> Exchange:
    return Exchange(Links(settings, _TOOLS), settings.deadline)


# Check


def probe(settings: RedisSettings, chunk_bytes: int | None) -> Probe:
    """Looks whether the tier would open, without changing anything."""
    found = Probe()
    exchange = None
    try:
        exchange = _exchange(settings)
        for where in exchange.links.route.primaries():
            _look(exchange, where, settings, chunk_bytes, found)
        _try_commands(exchange, settings, found)
    except (ConfigError, TierError) as error:
        found.problems.append(str(error))
    finally:
        if exchange is not None:
            exchange.links.close()
    return found


def _look(
    exchange: Exchange, where: Location, settings: RedisSettings, chunk_bytes: int | None, found: Probe
) -> None:
    server = _info(exchange, where, "server")
    name, version = _version(server)
    mode = server.get("redis_mode") or server.get("server_mode") or "mode not told"
    found.facts.append((f"server {where}", f"{name} {version}, {mode}"))
    numbers = [int(part) for part in re.findall(r"\d+", version)[:2]]
    if numbers and tuple(numbers) < _OLDEST:
        found.problems.append(f"{where}: {name} {version} is too old; 6.2 or newer is needed")
    if mode == "cluster" and settings.mode != "cluster":
        found.problems.append(f"{where}: a node of a Redis Cluster; set mode: cluster, and its nodes")
    found.facts += _memory(_info(exchange, where, "memory"), settings)
    replication = _info(exchange, where, "replication")
    if replication.get("role") == "slave":
        found.problems.append(f"{where}: a read-only replica; use its primary, {replication.get('master_host')}")
    else:
        found.facts.append(("replicas", replication.get("connected_slaves", "not told")))
    limit = exchange.largest(where)
    if chunk_bytes is not None and chunk_bytes + HEADER_BYTES > limit:
        text = f"chunks of {format_size(chunk_bytes)} are above its proto-max-bulk-len of {format_size(limit)}"
        found.problems.append(f"{where}: {text}, and would be refused")


def _version(server: dict[str, str]) -> tuple[str, str]:
    if "valkey_version" in server:
        return "Valkey", server["valkey_version"]
    return "Redis", server.get("redis_version", "of a version that it does not tell")


def _memory(memory: dict[str, str], settings: RedisSettings) -> Iterator[tuple[str, str]]:
    limit, policy = _number(memory, "maxmemory"), memory.get("maxmemory_policy", "")
    if not memory:
        return
    used = format_size(_number(memory, "used_memory"))
    if not limit:
        yield "memory", f"{used} used; no maxmemory: it grows until the machine has no more. Set one"
    elif policy == "noeviction":
        yield "memory", f"{used} of {format_size(limit)}; noeviction: once it is full, new chunks are refused"
    elif policy.startswith("volatile") and settings.ttl is None:
        yield "memory", f"{used} of {format_size(limit)}; {policy} evicts nothing without a ttl: set one"
    else:
        yield "memory", f"{used} of {format_size(limit)}; {policy}"
    yield (
        "ttl",
        "none: chunks stay until they are evicted" if settings.ttl is None else format_duration(settings.ttl),
    )


def _number(facts: dict[str, str], name: str) -> int:
    text = facts.get(name, "")
    return int(text) if text.isdecimal() else 0


def _info(exchange: Exchange, where: Location, section: str) -> dict[str, str]:
    """Facts that a server tells of itself; {} where the user may not know."""
    (answer,) = exchange.ask_at(where, [plain(b"", "INFO", section)])
    if isinstance(answer, TierError):
        raise answer
    if isinstance(answer, Refusal):
        if answer.code != "NOPERM":
            raise error_of(answer, where)
        return {}
    lines = answer.decode(errors="replace").splitlines() if isinstance(answer, bytes) else []
    return dict(line.split(":", 1) for line in lines if ":" in line)


def _try_commands(exchange: Exchange, settings: RedisSettings, found: Probe) -> None:
    """Whether the user may do what an engine does, tried on a key that is not there."""
    name = Names.all_of(settings.prefix) + b"check"
    tried: dict[str, tuple[Any, ...]] = {
        "SET": (name, "", "XX"),
        "GET": (name,),
        "EXISTS": (name,),
        "UNLINK": (name,),
        "TOUCH": (name,),
        "EVAL": ("return 0", 1, name),
    }
    answers = exchange.ask([plain(name, word, *words) for word, words in tried.items()])
    denied = [word for word, answer in zip(tried, answers, strict=True) if _is(answer, "NOPERM")]
    if denied:
        rules = " ".join(f"+{word.lower()}" for word in denied)
        who = settings.credentials()[0] or "default"
        found.problems.append(
            f"the user {who!r} may not use {', '.join(denied)} on {settings.prefix}:*; "
            f"allow it: ACL SETUSER {who} {rules} ~{settings.prefix}:*"
        )
    others = [
        answer for answer in answers if isinstance(answer, Refusal | TierError) and not _is(answer, "NOPERM")
    ]
    for answer in others[:1]:
        if _is(answer, "OOM"):
            found.facts.append(("memory", "it is full now: new chunks are refused"))
        else:
            exchange.checked(name, answer)


def _is(answer: Answer, code: str) -> bool:
    return isinstance(answer, Refusal) and answer.code == code


# What is kept


def stored(settings: RedisSettings) -> list[StoredNamespace]:
    """What the servers hold of each namespace.

    Raises:
        TierError: they can't be asked.
    """
    return list(_namespaces(settings, _exchange(settings)))


def _namespaces(settings: RedisSettings, exchange: Exchange) -> list[RedisStored]:
    base = Names.all_of(settings.prefix)
    digests: set[str] = set()
    for names in scan(exchange, base):
        digests |= {name[len(base) :].partition(b":")[0].decode(errors="replace") for name in names}
    found = []
    for digest in sorted(digests):
        name = Names(settings.prefix, digest).description
        namespace = _described(exchange.command(name, "GET", name))
        found.append(RedisStored(settings, exchange, digest, namespace))
    return found


def _described(text: object) -> Namespace:
    """As far as it is described; the description may have been evicted."""
    try:
        fields = json.loads(text) if isinstance(text, bytes) else {}
    except ValueError:
        fields = {}
    named = fields.items() if isinstance(fields, dict) else ()
    return Namespace(tuple((str(name), str(value)) for name, value in named))


def clear(settings: RedisSettings, tenant: str | None) -> list[str]:
    """Removes the namespaces of `tenant`, or all of them where it is None.

    Raises:
        ConfigError: an engine is using one of them; nothing was removed.
        TierError: the servers can't be asked.
    """
    exchange = _exchange(settings)
    try:
        kept = [one for one in _namespaces(settings, exchange) if tenant in (None, one.tenant)]
        for one in kept:
            if users := one.used_by():
                raise ConfigError(
                    f"{one.place} is in use by {users}; end them first (one that was killed is forgotten after "
                    f"{format_duration(SILENT)}). Nothing was removed"
                )
        return [_cleared(one) for one in kept]
    finally:
        exchange.links.close()


def _cleared(kept: RedisStored) -> str:
    removed = kept.remove_all()
    return f"removed {kept.place}* ({removed.chunks:,} chunks, {format_size(removed.bytes)})"
