import io
import json
import sys
from collections import Counter

import pytest
from rich.console import Console

from kvcascade.errors import ConfigError
from kvcascade.manager.stats import StackStats, TierStats
from kvcascade.replay import plot as plots
from kvcascade.replay.report import Report, render, to_json
from kvcascade.replay.runner import Tally
from kvcascade.types import MissReason


def a_report(requests=300, **changes):
    report = Report("some", 1 << 16, total=requests, seconds=2.5, **changes)
    host = TierStats("host", "host", capacity=4 << 20)
    disk = TierStats("nvme", "disk", capacity=None, misses=Counter({MissReason.NEVER_STORED: 12}))
    disk.write_latency.add(0.5)
    disk.written, disk.written_bytes = 1000, 10**9
    tally = Tally()
    report.take(tally, StackStats(tiers=[host, disk]))
    for number in range(1, requests + 1):
        tally.requests, tally.chunks, tally.loaded = number, number * 10, number * 4
        tally.prompt_tokens, tally.cached_tokens = number * 5000, number * 2500
        host.hits, disk.hits = number, number * 3
        host.bytes, disk.bytes = min(number << 16, 4 << 20), number << 16
        report.take(tally, StackStats(tiers=[host, disk]))
    return report


def text_of(report):
    out = io.StringIO()
    render(report, Console(file=out, width=100))
    return out.getvalue()


def test_a_person_reads_what_was_found_and_where():
    text = text_of(a_report())
    for shown in (
        "some through host -> nvme",
        "nvme (disk)",
        "300 requests in 2.5 s: 1,500,000 prompt tokens in 3,000 chunks of 64 KiB",
        "40.00% of the chunks were found; 50.00% of the prompt tokens needed no prefill",
        "1,200 chunks were loaded and compared byte for byte: 0 wrong bytes",
        "missed: never stored",
        "2.00 GB/s",
        "4 MiB (100%)",
        "no bound",
    ):
        assert shown in text
    assert "shed" not in text
    assert "Ctrl-C" not in text
    assert "Down" not in text


def test_it_says_what_went_wrong():
    report = a_report(interrupted=True, skipped=3)
    report.total = 500
    report.tiers[1].shed, report.tiers[1].up = 77, False
    text = text_of(report)
    assert "Down at the end: nvme." in text
    assert "Stopped by Ctrl-C: 200 requests were not played" in text
    assert "3 broken lines of the trace were left out" in text
    assert "shed" in text


def test_the_report_as_data_survives_json_and_adds_up():
    data = json.loads(json.dumps(to_json(a_report())))
    assert data["hits"] == sum(tier["hits"] for tier in data["tiers"]) == 1200
    assert (data["hit_rate"], data["share_without_prefill"], data["wrong_bytes"]) == (0.4, 0.5, 0)
    assert data["tiers"][1]["misses"] == {"never stored": 12}
    assert [tier["hit_rate"] for tier in data["tiers"]] == [0.1, 0.3]


@pytest.fixture(scope="module")
def fonts_loaded(tmp_path_factory):
    """matplotlib keeps the files of its fonts open, from its first drawing on."""
    plots.plot(a_report(), tmp_path_factory.mktemp("plots") / "first.png")


@pytest.mark.usefixtures("fonts_loaded")
@pytest.mark.parametrize("report", [a_report(), a_report(requests=1), a_report(requests=0)], ids=["300", "1", "0"])
def test_any_replay_can_be_shown_and_drawn(report, tmp_path):
    assert "requests in" in text_of(report)
    picture = tmp_path / "some.png"
    plots.check_plot(picture)
    plots.plot(report, picture)
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("name", "said"),
    [("some.docx", r"must end in one of .*\.png"), ("nowhere/some.png", "the folder .* does not exist")],
)
def test_a_plot_that_can_not_be_written_is_refused_before_the_work(tmp_path, name, said):
    with pytest.raises(ConfigError, match=said):
        plots.check_plot(tmp_path / name)


def test_without_matplotlib_it_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.backends.backend_agg", None)
    with pytest.raises(ConfigError, match=r"pip install 'kvcascade\[plot\]'"):
        plots.check_plot(tmp_path / "some.png")
