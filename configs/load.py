"""Reads a stack: finds everything that is wrong with it, and says so in one `ConfigError`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import ValidationError

from kvcascade.errors import ConfigError

from .document import Document, KeyPath, Problem, read_mapping, read_yaml
from .masking import masked
from .problems import explain, show
from .registry import TIERS, known, nearest
from .schema import Settings, StackSettings, TierBase, tier_class

__all__ = ["load_stack", "parse_stack", "resolved", "shipped"]

_S = TypeVar("_S", bound=Settings)
_MAX_BYTES = 1 << 20  # of a file; anything larger is no stack


def load_stack(path_or_name: str | Path) -> StackSettings:
    """The stack of a YAML file, or a shipped one by its name ("embedded"; a file of that name is "./embedded").

    Raises:
        ConfigError: it can't be read or used; with all problems found, one a line, in the order of the file.
    """
    if isinstance(path_or_name, str) and path_or_name in (stacks := shipped()):
        path_or_name = stacks[path_or_name]
    return parse_stack(_read(Path(path_or_name)), str(path_or_name))


def parse_stack(data: Mapping[str, Any] | str, source: str = "<dict>") -> StackSettings:
    """The stack that YAML text or a mapping of the same shape describes. `source` names it in messages.

    Raises:
        ConfigError: it can't be used; with all problems found, one a line.
    """
    document = read_yaml(data, source) if isinstance(data, str) else read_mapping(data, source)
    settings = _stack(document)
    if settings is None or document.problems:
        raise ConfigError("\n".join(problem.located(source) for problem in sorted(set(document.problems))))
    return settings


def resolved(settings: StackSettings) -> str:
    """The stack as YAML, every default spelled out, without secrets."""
    data = settings.model_dump(mode="json")
    for tier in data["tiers"]:
        if tier.get("capacity", 0) is None:
            tier.pop("eviction", None)  # nothing is evicted there
    return yaml.safe_dump(masked(data), sort_keys=False, allow_unicode=True)


def shipped() -> dict[str, Path]:
    """The ready-made stacks by name."""
    return {path.stem: path for path in sorted(Path(__file__).parent.glob("*.yaml"))}


def _read(path: Path) -> str:
    try:
        with path.open("rb") as file:
            raw = file.read(_MAX_BYTES + 1)
    except FileNotFoundError:
        siblings = [str(near) for near in path.parent.glob("*.y*ml")] if path.parent.is_dir() else []
        near = nearest(str(path), [*siblings, *shipped()])
        raise ConfigError(f"{path}: no such file{near}; shipped stacks: {', '.join(shipped())}") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: can't be read: {getattr(error, 'strerror', None) or error}") from error
    if len(raw) > _MAX_BYTES:
        raise ConfigError(f"{path}: larger than 1 MiB; that is not a stack")
    try:
        return raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: not UTF-8 text") from None


def _stack(document: Document) -> StackSettings | None:
    data = document.data
    if not isinstance(data, dict):
        if not document.problems:
            what = "is empty" if data is None else "is not a mapping"
            document.problems.append(Problem(document.line(()), "", f"{what}; a stack begins with: version: 1"))
        return None
    rest = {key: value for key, value in data.items() if key != "tiers"}
    given = data.get("tiers")
    if isinstance(given, list) and given:
        tiers = [_tier(document, tier, place) for place, tier in enumerate(given)]
        if None not in tiers:
            rest["tiers"] = tuple(tiers)
    elif "tiers" in data:
        document.complain(
            ("tiers",), f"{show(given)}: expected a list of one tier or more, the first of type host"
        )
    return _validate(document, StackSettings, rest, ())


def _tier(document: Document, data: Any, place: int) -> TierBase | None:
    at: KeyPath = ("tiers", place)
    if not isinstance(data, dict):
        document.complain(at, f"{show(data)}: expected a mapping, beginning with: type: ...")
        return None
    kind = data.get("type")
    if not isinstance(kind, str):
        wrong = f"{show(kind)}: expected text" if "type" in data else "required, but missing"
        document.complain((*at, "type"), f"{wrong}; allowed: {', '.join(sorted(known(TIERS)))}")
        return None
    try:
        model = tier_class(kind)
    except ConfigError as error:
        document.complain((*at, "type"), str(error))
        return None
    return _validate(document, model, data, at)


def _validate(document: Document, model: type[_S], data: dict[str, Any], at: KeyPath) -> _S | None:
    """The settings that `data` gives; None, with the problems noted, where it gives none."""
    try:
        if model is StackSettings:
            return model.model_validate(data)
        return model.model_validate_json(json.dumps(data))  # JSON's strictness: a list also fits a tuple
    except ValidationError as error:
        refused = error
    if _take_as_text(document, refused, data, at):
        return _validate(document, model, data, at)
    for path, text in explain(refused, model, data):
        if (*at, *path) != ("tiers",) or "tiers" not in document.data:  # there, but left out for its own problems
            document.complain((*at, *path), text)
    return None


def _take_as_text(document: Document, error: ValidationError, data: dict[str, Any], at: KeyPath) -> bool:
    """Makes text of what `${}` gave where text is wanted, even if it reads as a number. Whether any changed."""
    changed = False
    for detail in error.errors(include_url=False):
        text = document.replaced.pop((*at, *detail["loc"]), None)
        if text is None or detail["type"] not in ("string_type", "path_type"):
            continue
        *outer, last = detail["loc"]
        holder: Any = data
        for part in outer:
            holder = holder[part]
        holder[last] = text
        changed = True
    return changed
