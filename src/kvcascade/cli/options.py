"""Types of options."""

import re
from typing import Any

import click

__all__ = ["DURATION", "HEX", "SHARE", "SIZE"]


class _Size(click.ParamType[int]):
    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        from kvcascade.configs.units import parse_size

        try:
            size = parse_size(value)
        except ValueError as error:
            self.fail(f"{value!r}: {error}", param, ctx)
        if size < 1:
            self.fail(f"{value!r}: expected at least 1 byte", param, ctx)
        return size


class _Duration(click.ParamType[float]):
    name = "duration"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        from kvcascade.configs.units import parse_duration

        try:
            return parse_duration(value)
        except ValueError as error:
            self.fail(f"{value!r}: {error}", param, ctx)


class _Share(click.ParamType[float]):
    name = "percent"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", str(value).strip())
        share = float(match[1]) / 100 if match else 0.0
        if not 0 < share <= 1:
            self.fail(f"{value!r}: expected a share above 0% and up to 100%, such as 5%", param, ctx)
        return share


class _Hex(click.ParamType[str]):
    name = "hex"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        digits = str(value).strip().lower().removeprefix("0x")
        if not re.fullmatch(r"[0-9a-f]+", digits):
            self.fail(f"{value!r}: expected hexadecimal digits", param, ctx)
        return digits


SIZE = _Size()
"""Bytes, more than 0: "64KiB", 65536."""
DURATION = _Duration()
"""Seconds: "500ms", "7d"."""
SHARE = _Share()
"""A share, above 0 and up to 1: "5%"."""
HEX = _Hex()
"""How a key begins: hexadecimal digits, in small letters."""
