"""Stacks, and how vLLM is told of them."""

from pathlib import Path
from typing import Any

__all__ = ["CONNECTOR", "SPEC", "WAYS", "host", "on_disk", "shared", "transfer_config"]

SPEC = "offloading spec"
CONNECTOR = "connector"
WAYS = (SPEC, CONNECTOR)
"""The ways in which vLLM can use a stack."""


def transfer_config(way: str, stack: Any, **extra: Any) -> dict[str, Any]:
    """What a user gives as --kv-transfer-config."""
    if way == CONNECTOR:
        return {
            "kv_connector": "KVCascadeConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"stack": stack, **extra},
        }
    if way != SPEC:
        raise ValueError(f"{way!r} is none of {WAYS}")
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"spec_name": "KVCascade", "stack": stack, **extra},
    }


_PATIENT = "30s"  # a machine that runs tests may be busy


def host(capacity: str = "64MiB") -> dict[str, Any]:
    return {"version": 1, "tiers": [{"type": "host", "capacity": capacity}]}


def on_disk(path: Path, capacity: str = "64MiB", **more: Any) -> dict[str, Any]:
    stack = host(capacity)
    stack["tiers"].append({"type": "disk", "path": str(path), "capacity": "256MiB", "deadline": _PATIENT, **more})
    return stack


def shared(path: Path) -> dict[str, Any]:
    stack = host()
    stack["tiers"].append({"type": "fs", "path": str(path), "deadline": _PATIENT})
    return stack
