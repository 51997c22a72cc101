"""Whatever it is given, the loader answers with settings or with a `ConfigError`."""

from typing import Any

import yaml
from hypothesis import given
from hypothesis import strategies as st

from kvcascade.configs import StackSettings, parse_stack, resolved
from kvcascade.errors import ConfigError

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=20)
    | st.sampled_from(
        ["host", "memory", "noop", "lru", "1GiB", "2s", "${HOME}", "${X:-4}", "${", "always", 1, 0.5]
    )
)
KEYS = st.sampled_from(
    [
        "version",
        "tiers",
        "type",
        "name",
        "capacity",
        "eviction",
        "promote",
        "after",
        "watermarks",
        "high",
        "password",
    ]
) | st.text(max_size=8)
ANYTHING = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=6), max_leaves=20
)
TIERS = st.lists(
    st.fixed_dictionaries({"type": st.sampled_from(["host", "memory", "noop"]) | SCALARS})
    .flatmap(lambda tier: st.dictionaries(KEYS, ANYTHING, max_size=4).map(lambda rest: rest | tier))
    .map(lambda tier: {"capacity": "1GiB"} | tier),
    max_size=4,
)
STACKS = st.fixed_dictionaries({"version": st.just(1), "tiers": TIERS}) | ANYTHING


def answer(data: Any) -> StackSettings | str:
    try:
        return parse_stack(data, "x")
    except ConfigError as error:
        lines = str(error).split("\n")
        assert all(line.startswith("x:") for line in lines)
        return str(error)


@given(STACKS)
def test_any_data_gets_settings_or_messages(data: Any) -> None:
    found = answer(data if isinstance(data, dict) else {"version": 1, "tiers": data})
    if isinstance(found, StackSettings):
        assert answer(resolved(found)) == found


@given(STACKS)
def test_any_yaml_gets_the_answer_of_its_data(data: Any) -> None:
    answer(yaml.safe_dump(data))


@given(st.text() | st.text(alphabet="version: 1\ntiers-{}[]&*!|>'\"%@`#\t\0\ufeff${}:-"))
def test_any_text_gets_settings_or_messages(text: str) -> None:
    answer(text)
