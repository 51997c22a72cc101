"""What pydantic found, in words for a person."""

import re
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from .document import KeyPath
from .masking import is_secret_name, mask
from .registry import nearest
from .schema import CONTRADICTION

__all__ = ["explain", "show"]

_KINDS = {
    "string_type": "text",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "model_type": "a mapping",
    "model_attributes_type": "a mapping",
    "dict_type": "a mapping",
    "list_type": "a list",
    "tuple_type": "a list",
    "set_type": "a list",
    "frozen_set_type": "a list",
    "path_type": "a path",
}
_BOUNDS = {
    "greater_than": ("more than", "gt"),
    "greater_than_equal": ("at least", "ge"),
    "less_than": ("less than", "lt"),
    "less_than_equal": ("at most", "le"),
}


def explain(error: ValidationError, model: type[BaseModel], data: Any) -> Iterator[tuple[KeyPath, str]]:
    """One (key, text) for each thing that is wrong in `data`, which `model` has refused."""
    unions: dict[KeyPath, list[tuple[KeyPath, ErrorDetails]]] = {}
    for detail in error.errors(include_url=False):
        path, union = _locate(detail, data)
        if detail["type"] == CONTRADICTION:
            yield from (((*path, *inner), text) for inner, text in detail["ctx"]["found"])
        elif union is None:
            yield path, mask(_describe(path, [detail], model, data))
        else:
            unions.setdefault(union, []).append((path, detail))
    for union, found in unions.items():
        inside = [(path, detail) for path, detail in found if len(path) > len(union)]
        for path, detail in inside:
            yield path, mask(_describe(path, [detail], model, data))
        if not inside:
            yield union, mask(_describe(union, [detail for _, detail in found], model, data))


def show(value: Any) -> str:
    """A value as the file would have it, short, without the passwords of URLs."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, dict | list):
        return f"{'a' if value else 'an empty'} {'mapping' if isinstance(value, dict) else 'list'}"
    text = repr(mask(value)) if isinstance(value, str) else str(value)
    return text if len(text) <= 80 else f"{text[:76]}...'"


def _locate(detail: ErrorDetails, data: Any) -> tuple[KeyPath, KeyPath | None]:
    """The key that an error is about, and the key of the union it comes from. pydantic puts the names of a union's
    branches between the keys."""
    path: KeyPath = ()
    union: KeyPath | None = None
    for part in detail["loc"]:
        absent = detail["type"] == "missing" and part == detail["loc"][-1]
        if isinstance(data, dict) and (part in data or absent):
            data = data.get(part)
            path = (*path, part)
        elif isinstance(data, list) and isinstance(part, int):
            data = data[part]
            path = (*path, part)
        elif union is None:
            union = path
    return path, union


def _describe(path: KeyPath, details: list[ErrorDetails], model: type[BaseModel], data: Any) -> str:
    kind = details[0]["type"]
    if kind == "missing":
        return "required, but missing"
    if kind == "extra_forbidden":
        return _unknown(str(path[-1]), _names(model, path[:-1]))
    texts = list(dict.fromkeys(_wanted(detail) for detail in details))
    wanted = " or ".join([texts[0], *(text.removeprefix("expected ") for text in texts[1:])])
    if any(isinstance(part, str) and is_secret_name(part) for part in path):
        return "not usable" if kind == "value_error" else wanted
    value = _value(path, data)
    if kind == "string_type" and isinstance(value, bool | int | float):
        wanted += "; put it in quotes"
    if kind == "literal_error" and isinstance(value, str):
        wanted += nearest(value, re.findall(r"'([^']*)'", wanted))
    if kind == "value_error" and isinstance(value, dict | list):
        return wanted
    shown = show(value)
    named = wanted.startswith(f"{shown} ") or (isinstance(value, str) and value and shown in wanted)
    return wanted if named else f"{shown}: {wanted}"


def _wanted(detail: ErrorDetails) -> str:
    kind, context = detail["type"], detail.get("ctx", {})
    if kind in _KINDS:
        return f"expected {_KINDS[kind]}"
    if kind in _BOUNDS:
        words, limit = _BOUNDS[kind]
        return f"expected {words} {context[limit]:g}"
    if kind in ("literal_error", "enum"):
        return f"expected {context['expected']}"
    if kind == "value_error":
        return str(context["error"])
    return detail["msg"][:1].lower() + detail["msg"][1:]


def _unknown(name: str, names: list[str]) -> str:
    return f"unknown key{nearest(name, names)}; allowed: {', '.join(names)}"


def _names(model: type[BaseModel], path: KeyPath) -> list[str]:
    """The keys of the mapping at `path`."""
    for part in path:
        field = model.model_fields.get(str(part))
        model = _model_in(field.annotation) or model if field else model
    return [field.alias or name for name, field in model.model_fields.items()]


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for inner in get_args(annotation) if (found := _model_in(inner))), None)


def _value(path: KeyPath, data: Any) -> Any:
    for part in path:
        data = data[part]
    return data
