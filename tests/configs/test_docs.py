"""The page on configuration names every setting there is."""

from pathlib import Path

import pytest

from kvcascade.configs import StackSettings, registry
from kvcascade.configs.schema import tier_class

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
SHIPPED = ["host", "disk", "fs", "redis", "s3", "memory", "noop"]


@pytest.mark.skipif(not PAGE.exists(), reason="the docs are not here: this runs against an installed package")
@pytest.mark.parametrize("kind", ["stack", *SHIPPED])
def test_every_setting_is_on_the_page(kind: str) -> None:
    model = StackSettings if kind == "stack" else tier_class(kind)
    page = PAGE.read_text()
    assert [name for name in model.model_fields if f"`{name}`" not in page] == []


def test_every_tier_type_that_ships_is_known() -> None:
    assert set(SHIPPED) <= set(registry.known(registry.TIERS))
