import io

import pytest
from rich.console import Console

from kvcascade.configs import parse_stack
from kvcascade.errors import ConfigError
from kvcascade.replay.compare import (
    compare,
    comparison_json,
    models_of,
    parse_capacities,
    parse_policies,
    render_comparison,
)
from kvcascade.replay.simulate_stack import TierModel

PROMPTS = [(1, 2), (3, 4), (1, 2), (3,)]


def comparison(capacities="50%,1,64KiB", policies="lru,optimal", tiers=()):
    return compare("some", PROMPTS, parse_policies(policies), parse_capacities(capacities, 65536), list(tiers))


def test_capacities_are_shares_chunks_or_sizes():
    assert [row.chunks for row in comparison("50%,37.5 %,3,128KiB").rows] == [2, 1, 3, 2]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "Allowed: a share of the distinct chunks"),
        ("5%,lots", "--capacity 'lots'"),
        ("5GiX", r"unknown unit 'GiX'.*Allowed: a share"),
        ("-5", "--capacity '-5'"),
        ("0", "--capacity 0: is less than one chunk"),
        ("20%", "--capacity 20%: is less than one chunk"),
        ("1KiB", "--capacity 1KiB: is less than one chunk"),
    ],
)
def test_other_capacities_are_refused_with_what_is_allowed(text, said):
    with pytest.raises(ConfigError, match=said):
        comparison(text)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("lru,arcs", r"unknown policy 'arcs' \(did you mean 'arc'\?\)"),
        ("optimum", r"'optimum' \(did you mean 'optimal'\?\); allowed: lru, arc, s3fifo, optimal, lhd"),
        ("", "unknown policy ''"),
    ],
)
def test_unknown_policies_are_refused_with_the_nearest(text, said):
    with pytest.raises(ConfigError, match=said):
        parse_policies(text)


def test_the_comparison_as_data():
    data = comparison("2", tiers=[TierModel("host", 2), TierModel("disk", None)])
    assert comparison_json(data) == {
        "trace": "some",
        "requests": 4,
        "chunks": 7,
        "distinct_chunks": 4,
        "infinite": round(3 / 7, 6),
        "capacities": [{"capacity": "2", "chunks": 2, "hit_rate": {"lru": 0.0, "optimal": round(2 / 7, 6)}}],
        "stack": {
            "hit_rate": round(2 / 7, 6),
            "tiers": [
                {"name": "host", "chunks": 2, "hits": 0, "written": 7},
                {"name": "disk", "chunks": None, "hits": 2, "written": 4},
            ],
        },
    }
    assert comparison_json(comparison())["stack"] is None


def test_the_comparison_as_a_table():
    out = io.StringIO()
    render_comparison(
        comparison("2", tiers=[TierModel("host", 2), TierModel("disk", None)]), Console(file=out, width=80)
    )
    for shown in (
        "optimal",
        "0.2857",
        "infinite",
        "0.4286",
        "no bound",
        "whole stack",
        "7 chunks, 4 of them distinct",
    ):
        assert shown in out.getvalue()


def test_the_models_of_a_stack_are_those_its_tiers_give(tmp_path):
    stack = parse_stack(
        {
            "version": 1,
            "tiers": [
                {"type": "host", "capacity": "1MiB"},
                {"type": "memory", "name": "bounded", "capacity": "2MiB"},
                {"type": "memory", "name": "endless"},
            ],
        }
    )
    host, bounded, endless = [(model.name, model.chunks) for model in models_of(stack, 65536)]
    # The pool's own header takes a slot's room.
    assert (host, bounded, endless) == (("host", 15), ("bounded", 32), ("endless", None))
    with pytest.raises(ConfigError, match="the tier 'host' holds no chunk of 1 MiB"):
        models_of(stack, 1 << 20)


def test_the_model_of_a_shared_directory_has_its_watermarks(tmp_path):
    marks = {"high": 0.8, "low": 0.6}
    folder = {"type": "fs", "path": str(tmp_path), "capacity": "2MiB", "watermarks": marks}
    for exclusive, soft in ((False, (0.8, 0.6)), (True, None)):
        tiers = [{"type": "host", "capacity": "1MiB"}, {**folder, "exclusive": exclusive}]
        model = models_of(parse_stack({"version": 1, "tiers": tiers}), 65536 - 4096)[1]
        assert (model.chunks, model.soft) == (32, soft)
