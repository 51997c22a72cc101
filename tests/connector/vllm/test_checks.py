"""Settings of vLLM with which a stack is of no use are refused with the reason."""

from types import SimpleNamespace as Object

import pytest

from kvcascade.configs import parse_stack
from kvcascade.connector.vllm.checks import check_engine
from kvcascade.errors import ConfigError

HOST = {"type": "host", "capacity": "1GiB"}


def engine(caching=True, nodes=1, hashes="sha256"):
    return Object(
        cache_config=Object(enable_prefix_caching=caching, prefix_caching_hash_algo=hashes),
        parallel_config=Object(nnodes_within_dp=nodes),
    )


def stack(*tiers):
    return parse_stack({"version": 1, "tiers": [HOST, *tiers]}, "stack")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"caching": False}, "prefix caching is off, so no chunk has a key"),
        ({"nodes": 2}, "the engine spans 2 nodes, and its host pool can't"),
        ({"hashes": "xxhash"}, "'xxhash' gives other hashes in every process, .* disk"),
    ],
)
def test_what_can_not_work_is_refused(tmp_path, monkeypatch, changes, message):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    disk = {"type": "disk", "path": str(tmp_path), "capacity": "1GiB"}
    check_engine(engine(), stack(disk))
    with pytest.raises(ConfigError, match=message):
        check_engine(engine(**changes), stack(disk))


def test_tiers_that_end_with_their_process_need_no_hashes_that_others_have(monkeypatch):
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    check_engine(engine(hashes="xxhash"), stack({"type": "memory", "capacity": "1GiB"}))
