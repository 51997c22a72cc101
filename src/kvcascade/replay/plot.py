"""Draws a replay: which tier served how much of it, and how full the tiers were."""

from pathlib import Path
from typing import TYPE_CHECKING

from kvcascade.errors import ConfigError

from .report import Report, Sample

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["check_plot", "plot"]

_COLOURS = ["#7f7f7f", "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9"]
_WINDOW = 20
"""Samples that a point of the rolling hit rate looks back on."""


def check_plot(path: Path) -> None:
    """Finds out before the work whether a plot can be written there.

    Raises:
        ConfigError: matplotlib is not installed, it has no such format, or the folder does not exist.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
    except ImportError as error:
        raise ConfigError("a plot needs matplotlib; install it with: pip install 'kvcascade[plot]'") from error
    formats = FigureCanvasAgg.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in formats:
        raise ConfigError(f"{path}: a plot's name must end in one of {', '.join(f'.{each}' for each in formats)}")
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: the folder {path.parent} does not exist")


def plot(report: Report, path: Path) -> None:
    """Writes the plot; the format is that of the file's suffix.

    Raises:
        ConfigError: it can't be written.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 7), dpi=120, layout="constrained")
    rates, usage = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2])
    figure.suptitle(f"{report.trace}: {report.tally.requests:,} requests, hit rate {report.tally.hit_rate:.1%}")
    _draw_rates(rates, report)
    _draw_usage(usage, report)
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"can't write the plot {path}: {error.strerror}") from error


def _draw_rates(axes: "Axes", report: Report) -> None:
    samples = [Sample(0, 0, (0,) * len(report.names), ()), *report.samples]
    windows = list(zip([samples[0]] * (_WINDOW - 1) + samples, samples[1:], strict=False))
    places = [now.requests for _, now in windows]
    shown = [place for place, name in enumerate(report.names) if place or report.tally.gpu_hits]
    layers = [[100 * _rate(before, now, place) for before, now in windows] for place in shown]
    labels = [f"found in {report.names[place]}" for place in shown]
    axes.stackplot(
        places, layers, labels=labels, colors=[_COLOURS[place % len(_COLOURS)] for place in shown], alpha=0.85
    )
    whole = [100 * sum(now.hits) / max(1, now.chunks) for _, now in windows]
    axes.plot(places, whole, color="black", linewidth=1.3, label="since the start")
    axes.set_ylabel("chunks found (% of all asked for)")
    axes.set_ylim(0, None)
    span = max(1, report.tally.requests // max(1, len(report.samples))) * _WINDOW
    axes.set_title(f"hit rate over the last {span:,} requests, by the tier that served it", fontsize=10)
    _finish(axes)


def _rate(before: Sample, now: Sample, place: int) -> float:
    chunks = now.chunks - before.chunks
    return (now.hits[place] - before.hits[place]) / chunks if chunks else 0.0


def _draw_usage(axes: "Axes", report: Report) -> None:
    places = [sample.requests for sample in report.samples]
    for number, tier in enumerate(report.tiers):
        share = [100 * sample.used[number] / tier.capacity if tier.capacity else 0.0 for sample in report.samples]
        axes.plot(places, share, color=_COLOURS[(number + 1) % len(_COLOURS)], linewidth=2, label=tier.name)
    axes.set_ylabel("used (% of capacity)")
    axes.set_ylim(0, 105)
    axes.set_xlabel("requests played")
    axes.set_xlim(0, max(1, report.tally.requests))
    _finish(axes)


def _finish(axes: "Axes") -> None:
    axes.grid(alpha=0.3)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False, reverse=True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
