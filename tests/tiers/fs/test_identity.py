"""Who an engine is among those that share a directory."""

import socket
from pathlib import Path

import pytest

from kvcascade.testing import buffer, fill, holds, key_for
from kvcascade.tiers import OpenContext
from kvcascade.tiers.fs.settings import FsSettings
from kvcascade.tiers.fs.tier import FsTier
from kvcascade.tiers.fs.writers import Identity, living
from kvcascade.types import Namespace, Outcome

CONTEXT = OpenContext(Namespace.of(model="m"), 512)


@pytest.mark.parametrize("host", ["localhost", "0.0.0.0", ""])
def test_engines_of_one_host_name_are_not_taken_for_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, host: str
) -> None:
    """What a machine calls itself is for people: an address that every machine has made peers look like oneself
    (vllm-project/vllm#47636)."""
    monkeypatch.setattr(socket, "gethostname", lambda: host)
    settings = FsSettings(path=str(tmp_path))
    with settings.open(CONTEXT) as one, settings.open(CONTEXT) as two:
        assert isinstance(one, FsTier) and isinstance(two, FsTier)
        own = {tier._opened.writer.identity for tier in (one, two)}
        assert len(own) == 2
        assert {Identity.parse(str(identity)) for identity in own} == own
        assert own <= set(living(tmp_path, one._now()))
        source, target = buffer(512), buffer(512)
        fill(source, key_for(1))
        assert one.write([key_for(1)], [source]) == [Outcome.OK]
        assert two.read([key_for(1)], [target]) == [Outcome.OK]
        assert holds(target, key_for(1))
    assert not list(living(tmp_path, one._now()))
