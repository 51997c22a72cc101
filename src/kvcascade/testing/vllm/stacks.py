"""Stacks, and how vLLM is told of them."""

from pathlib import Path
from typing import Any

from kvcascade.configs.units import parse_size

__all__ = [
    "CONNECTOR",
    "SPEC",
    "TIER",
    "WAYS",
    "behind_host",
    "beside_unreliable",
    "host",
    "on_disk",
    "shared",
    "transfer_config",
]

SPEC = "OffloadingConnector"
CONNECTOR = "KVCascadeConnector"
TIER = "tier"
WAYS = (SPEC, CONNECTOR, TIER)
"""The ways in which vLLM can use a stack."""

_HOST = "64MiB"


def transfer_config(way: str, stack: Any, **extra: Any) -> dict[str, Any]:
    """What a user gives as --kv-transfer-config; for `TIER` with vLLM's spec as it runs on a CPU, and as much host
    memory as the stack's own would have."""
    config = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    if way == SPEC:
        return config | {"kv_connector_extra_config": {"spec_name": "KVCascade", "stack": stack, **extra}}
    if way == CONNECTOR:
        own = {"kv_connector": "KVCascadeConnector", "kv_load_failure_policy": "recompute"}
        return config | own | {"kv_connector_extra_config": {"stack": stack, **extra}}
    if way != TIER:
        raise ValueError(f"{way!r} is none of {WAYS}")
    spec = {
        "spec_name": "HostCopySpec",
        "spec_module_path": "kvcascade.testing.vllm.tiering",
        "cpu_bytes_to_use": parse_size(stack["tiers"][0]["capacity"] if isinstance(stack, dict) else _HOST),
        "secondary_tiers": [{"type": "KVCascade", "stack": stack}],
    }
    return config | {"kv_connector_extra_config": spec | extra}


def beside_unreliable(ours: dict[str, Any], **extra: Any) -> dict[str, Any]:
    """Ours in a MultiConnector, beside one that breaks its promises, and is asked first."""
    other = {
        "kv_connector": "UnreliableConnector",
        "kv_connector_module_path": "kvcascade.testing.vllm.unreliable",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": {"connectors": [other, ours]},
    }


_PATIENT = "30s"  # a machine that runs tests may be busy


def host(capacity: str = _HOST) -> dict[str, Any]:
    return {"version": 1, "tiers": [{"type": "host", "capacity": capacity}]}


def on_disk(path: Path, capacity: str = _HOST, **more: Any) -> dict[str, Any]:
    stack = host(capacity)
    stack["tiers"].append({"type": "disk", "path": str(path), "capacity": "256MiB", "deadline": _PATIENT} | more)
    return stack


def shared(path: Path) -> dict[str, Any]:
    return behind_host(type="fs", path=str(path))


def behind_host(**tier: Any) -> dict[str, Any]:
    """Host memory, and behind it a tier with these settings."""
    stack = host()
    stack["tiers"].append({"deadline": _PATIENT} | tier)
    return stack
