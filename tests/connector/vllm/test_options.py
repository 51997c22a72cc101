"""What a user gives in kv_connector_extra_config."""

from types import SimpleNamespace

import pytest

from kvcascade.connector.vllm.options import replica_of, stack_of
from kvcascade.errors import ConfigError

STACK = {"version": 1, "tiers": [{"type": "host", "capacity": "8MiB"}]}


def test_a_stack_is_a_path_a_shipped_name_or_the_stack_itself(tmp_path):
    path = tmp_path / "stack.yaml"
    path.write_text("version: 1\ntiers:\n  - {type: host, capacity: 8MiB}\n")
    assert stack_of({"spec_name": "KVCascade", "stack": str(path)}) == stack_of({"stack": STACK})
    assert stack_of({"stack": "host-only"}).primary.type == "host"


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, r"kv_connector_extra_config\.stack: required, but missing; for example"),
        ({"stak": "x"}, r"stack: required, but missing \(did you mean 'stak'\?\)"),
        ({"stack": 5}, r"stack: 5: expected the path of a YAML file"),
        ({"stack": ""}, r"stack: '': expected the path of a YAML file"),
        ({"stack": "/not/there.yaml"}, r"/not/there\.yaml: no such file"),
        ({"stack": {"version": 1, "tiers": [{"type": "hots"}]}}, r"tiers\[0\]\.type.*did you mean 'host'"),
        ({"stack": STACK, "canonical_layout": True}, r"canonical_layout: not served"),
    ],
)
def test_what_is_wrong_is_said(extra, message):
    with pytest.raises(ConfigError, match=message):
        stack_of(extra)


def test_keys_that_nobody_knows_are_warned_of(caplog):
    stack_of({"stack": STACK, "block_per_chunk": 4})
    assert "block_per_chunk: not a key that KVCascade knows (did you mean 'blocks_per_chunk'?)" in caplog.text


@pytest.mark.parametrize(("size", "index"), [(1, 0), (1, 3), (4, 3)])
def test_replicas_are_told_apart_by_their_index(size, index):
    assert replica_of(SimpleNamespace(data_parallel_size=size, data_parallel_index=index)) == index
