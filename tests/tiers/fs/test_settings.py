"""The settings of the fs tier, and what `check`, `ls` and `clear` make of a directory."""

import os
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from kvcascade.errors import ConfigError
from kvcascade.tiers.fs import FsSettings, inventory
from kvcascade.types import Namespace, Outcome

MIB = 1 << 20


def test_defaults() -> None:
    settings = FsSettings(path="/mnt/kv")
    assert (settings.type, settings.name, settings.capacity, settings.exclusive) == ("fs", "fs", None, False)
    assert (settings.mode, settings.group) == ("0600", None)
    assert (settings.write, settings.fill, settings.probe_ttl) == ("through", False, 10.0)
    assert (settings.durability, settings.on_corrupt) == ("none", "remove")


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"path": ""}, "expected a folder"),
        ({"path": "/kv", "mode": 600}, "in quotes and octal"),
        ({"path": "/kv", "mode": "0288"}, "in quotes and octal"),
        ({"path": "/kv", "mode": "0060"}, "in quotes and octal"),
        ({"path": "/kv", "mode": "0770"}, "folders get their x from r"),
        ({"path": "/kv", "group": ""}, "at least 1 character"),
        ({"path": "/kv", "capacity": 0}, "greater than 0"),
        ({"path": "/kv", "exclusive": True}, "exclusive without capacity"),
        ({"path": "/kv", "durability": "sync"}, "'none', 'flush' or 'fsync'"),
        ({}, "Field required"),
    ],
)
def test_what_is_wrong_is_said(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        FsSettings(**given)


def test_two_tiers_can_not_have_one_directory(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "kv")
    claims = [FsSettings(path=str(tmp_path / name)).claims() for name in ("kv", "link", "other")]
    assert claims[0] == claims[1] != claims[2]


def test_a_probe_changes_nothing(shared: Any) -> None:
    probe = shared.settings(capacity=MIB).probe(64 << 10)
    assert probe.problems == []
    assert probe.chunks == MIB // (68 << 10)
    facts = dict(probe.facts)
    assert facts["capacity"] == "1 MiB, soft"
    assert facts["in use by"] == "nobody"
    assert facts["path"] == f"{shared.path} (will be made in {shared.path.parent})"
    assert not shared.path.exists()


def test_a_capacity_that_the_file_system_can_not_hold_is_a_warning(
    shared: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies there already has its room."""
    tier = shared.engine()
    shared.store(tier, shared.keys(*range(10)))
    monkeypatch.setattr(inventory, "free_bytes", lambda path: (MIB, 2 * MIB))
    for capacity, warned in ((MIB, False), (MIB + 10 * 69632, False), (MIB + 11 * 69632, True)):
        probe = shared.settings(capacity=capacity).probe()
        assert probe.problems == []
        assert ("warning" in dict(probe.facts)) is warned
    assert "1 MiB are free and 680 KiB are in use here already" in dict(probe.facts)["warning"]


def test_a_probe_beside_a_running_engine(shared: Any) -> None:
    shared.engine()
    probe = shared.settings().probe()
    assert probe.problems == []
    assert probe.chunks is None
    assert dict(probe.facts)["in use by"].startswith(f"process {os.getpid()} on ")
    assert dict(probe.facts)["capacity"] == "none: nothing is evicted"
    (problem,) = shared.settings(exclusive=True, capacity=MIB).probe().problems
    assert "is used by process" in problem


def test_a_probe_finds_what_open_would_find(shared: Any) -> None:
    shared.path.write_text("mine")
    (problem,) = shared.settings().probe().problems
    assert "is not a folder" in problem
    (problem,) = shared.settings(group="no-such-group").probe().problems
    assert "is no group of this machine" in problem


def test_holdings_name_each_namespace(shared: Any) -> None:
    assert shared.settings().holdings() == []
    other = Namespace.of(model="other", tenant="acme")
    one, two = shared.engine(), shared.engine(namespace=other)
    shared.store(one, shared.keys(1, 2))
    one.move_to("v2")
    shared.store(one, shared.keys(3))
    shared.store(two, shared.keys(1))
    two.close()
    held = {holding.tenant: holding for holding in shared.settings().holdings()}
    assert {tenant: holding.chunks for tenant, holding in held.items()} == {"": 3, "acme": 1}
    assert held[""].bytes == 3 * one.footprint(shared.chunk)
    assert held["acme"].namespace == "model=other tenant=acme"
    assert held[""].used_by.startswith(f"process {os.getpid()} on ")
    assert held["acme"].used_by == ""
    assert held["acme"].oldest == held["acme"].newest is not None


def test_clear_removes_a_tenants_namespaces(shared: Any) -> None:
    other = Namespace.of(model="other", tenant="acme")
    one, two = shared.engine(), shared.engine(namespace=other)
    shared.store(one, shared.keys(1))
    shared.store(two, shared.keys(1, 2))
    two.move_to("v2")
    with pytest.raises(ConfigError, match=r"in use by process .* Nothing was removed"):
        shared.settings().clear("acme")
    two.close()
    (line,) = shared.settings().clear("acme")
    assert line.startswith(f"removed {two._opened.home.path} (")
    assert not two._opened.home.path.exists()
    assert shared.load(one, shared.keys(1)) == [Outcome.OK]


def test_clear_of_everything_leaves_nothing(shared: Any) -> None:
    tier = shared.engine(capacity=MIB, on_corrupt="quarantine")
    shared.store(tier, shared.keys(1, 2))
    os.truncate(shared.file(tier, shared.keys(1)[0]), 100)
    shared.load(tier, shared.keys(1))
    tier.maintain(60.0)
    tier.move_to("v2")
    tier.close()
    assert len(shared.settings().clear(None)) == 1
    assert list(shared.path.iterdir()) == []
    assert shared.settings().clear(None) == []
