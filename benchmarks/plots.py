"""Draws the results of a benchmark, also those that another environment wrote as JSON.

python -m benchmarks.plots results.json plot.png
"""

import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw"]

Row: TypeAlias = Mapping[str, Any]
"""A result as in the JSON: its case, its contender, and what was measured."""

_MEASURES = {"gb_per_s": "GB/s", "us": "µs", "seconds": "seconds"}
_COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#7f7f7f"]
_PANELS_A_ROW = 3


def draw(rows: Sequence[Row], path: Path) -> None:
    """One panel for each kind of case, a line for each contender, over the number that varies most.

    Raises:
        SystemExit: there is no matplotlib.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise SystemExit(
            "a plot needs matplotlib, which is not installed here: write JSON with --out, and draw it elsewhere "
            "with python -m benchmarks.plots"
        ) from None
    measure = next(name for name in _MEASURES if name in rows[0])
    across = _most_varied(rows)
    panels: dict[str, list[Row]] = {}
    for row in rows:
        kind = " ".join(str(value) for name, value in row["case"].items() if name != across)
        panels.setdefault(kind, []).append(row)
    columns = min(_PANELS_A_ROW, len(panels))
    lines = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(1 + 4 * columns, 1 + 3 * lines), dpi=120, layout="constrained")
    grid = figure.subplots(lines, columns, squeeze=False)
    for axes, (kind, found) in zip(grid.flat, panels.items(), strict=False):
        _draw_panel(axes, found, across, measure)
        axes.set_title(kind, fontsize=10)
    for axes in grid.flat[len(panels) :]:
        axes.set_visible(False)
    names = list(dict.fromkeys(row["contender"] for row in rows))
    handles = [figure.axes[0].plot([], [], "o-", color=_colour(names, name), label=name)[0] for name in names]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    figure.savefig(path)


def _draw_panel(axes: "Axes", rows: Sequence[Row], across: str, measure: str) -> None:
    names = list(dict.fromkeys(row["contender"] for row in rows))
    for name in names:
        found = [row for row in rows if row["contender"] == name]
        places = [row["case"].get(across, 0) for row in found]
        axes.plot(places, [row[measure] for row in found], "o-", color=_colour(names, name), linewidth=1.5)
    axes.set_xlabel(across)
    axes.set_ylabel(_MEASURES[measure])
    places = sorted({row["case"].get(across, 0) for row in rows})
    if places[0] > 0 and places[-1] >= 8 * places[0]:
        axes.set_xscale("log")
    if measure == "gb_per_s":
        axes.set_ylim(0, None)
    else:
        axes.set_yscale("log")
    axes.grid(alpha=0.3, which="both")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _most_varied(rows: Sequence[Row]) -> str:
    """The number of the cases that has most values."""
    values: dict[str, set[float]] = {}
    for row in rows:
        for name, value in row["case"].items():
            if isinstance(value, int | float):
                values.setdefault(name, set()).add(value)
    return max(values, key=lambda name: len(values[name]), default="")


def _colour(names: Sequence[str], name: str) -> str:
    return _COLOURS[names.index(name) % len(_COLOURS)]


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
