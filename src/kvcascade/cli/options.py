"""Types of options."""

import click

__all__ = ["SIZE"]


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


SIZE = _Size()
"""Bytes, more than 0: "64KiB", 65536."""
