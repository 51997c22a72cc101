"""The JSON Schema of a stack."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvcascade.configs import registry
from kvcascade.configs.json_schema import stack_schema

THIRD_PARTY = Path(__file__).parents[1] / "thirdparty"


@pytest.fixture
def schema(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    monkeypatch.syspath_prepend(THIRD_PARTY)
    registry.known.cache_clear()
    yield stack_schema()
    registry.known.cache_clear()


def references(part: Any) -> set[str]:
    if isinstance(part, dict):
        own = {part["$ref"]} if "$ref" in part else set()
        return own.union(*map(references, part.values()))
    return set().union(*map(references, part)) if isinstance(part, list) else set()


def test_it_holds_every_tier_type_that_can_be_loaded(schema: dict[str, Any]) -> None:
    branches = [branch["$ref"] for branch in schema["properties"]["tiers"]["items"]["oneOf"]]
    types = [
        schema["$defs"][branch.removeprefix("#/$defs/")]["properties"]["type"]["const"] for branch in branches
    ]
    assert {"host", "memory", "noop", "acme"} <= set(types) <= set(registry.known(registry.TIERS))
    assert "acme_gone" not in types


def test_it_says_what_is_required(schema: dict[str, Any]) -> None:
    assert set(schema["required"]) == {"version", "tiers"}
    assert set(schema["$defs"]["tier:host"]["required"]) == {"type", "capacity"}
    assert set(schema["$defs"]["tier:acme"]["required"]) == {"type", "shelf"}
    assert schema["$defs"]["tier:acme"]["additionalProperties"] is False


def test_every_reference_leads_somewhere(schema: dict[str, Any]) -> None:
    assert references(schema) == {f"#/$defs/{name}" for name in schema["$defs"]}


def test_a_reference_to_the_environment_fits_where_a_number_does(schema: dict[str, Any]) -> None:
    shelves = schema["$defs"]["tier:acme"]["properties"]["shelves"]
    assert shelves["default"] == 1
    assert [choice["type"] for choice in shelves["anyOf"]] == ["integer", "string"]
