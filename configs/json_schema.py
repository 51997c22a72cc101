"""JSON Schema of a whole stack, for editors and other tools."""

from typing import Any

from kvcascade.errors import ConfigError

from .registry import TIERS, known
from .schema import StackSettings, tier_class

__all__ = ["stack_schema"]

_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_REFERENCE = {"type": "string", "pattern": r"^\$\{.*\}$"}
_NOTES = ("title", "description", "default")
_SCALARS = ("integer", "number", "boolean")


def stack_schema() -> dict[str, Any]:
    """What a stack file may say, with all tier types that are installed here; a type that can't be used is left
    out. Where a number or a word is wanted, `${NAME}` fits too."""
    stack = StackSettings.model_json_schema()
    defs: dict[str, Any] = stack.pop("$defs", {})
    branches = []
    for kind in sorted(known(TIERS)):
        try:
            tier = tier_class(kind).model_json_schema(ref_template="#/$defs/{model}")
        except ConfigError:
            continue
        defs |= tier.pop("$defs", {})
        defs[f"tier:{kind}"] = _tier(tier, kind)
        branches.append({"$ref": f"#/$defs/tier:{kind}"})
    defs.pop("TierBase", None)
    stack["properties"]["tiers"]["items"] = {"oneOf": branches, "discriminator": {"propertyName": "type"}}
    stack["$defs"] = {name: _with_references(schema) for name, schema in defs.items()}
    return {"$schema": _DRAFT, **_with_references(stack)}


def _tier(schema: dict[str, Any], kind: str) -> dict[str, Any]:
    schema["properties"]["type"] = {"const": kind}
    schema["required"] = ["type", *(name for name in schema.get("required", []) if name not in ("type", "name"))]
    return schema


def _with_references(schema: dict[str, Any]) -> dict[str, Any]:
    """The schema, with `${NAME}` allowed for every key's scalar but a tier's type."""
    properties = {
        name: value if name == "type" else _or_reference(value)
        for name, value in schema.get("properties", {}).items()
    }
    return {**schema, "properties": properties} if properties else schema


def _or_reference(schema: dict[str, Any]) -> dict[str, Any]:
    if "anyOf" in schema:
        return {**schema, "anyOf": [*schema["anyOf"], _REFERENCE]}
    if schema.get("type") in _SCALARS or "enum" in schema or "const" in schema:
        notes = {key: value for key, value in schema.items() if key in _NOTES}
        bare = {key: value for key, value in schema.items() if key not in _NOTES}
        return {**notes, "anyOf": [bare, _REFERENCE]}
    return schema
