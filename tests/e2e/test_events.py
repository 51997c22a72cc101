"""What an engine tells others of its chunks, and what a request may say of where they come from."""

import socket
import time
from collections import defaultdict
from itertools import count

import pytest

from kvcascade.testing.vllm import BLOCK, full_blocks, on_disk, prompt

msgspec = pytest.importorskip("msgspec")
zmq = pytest.importorskip("zmq")

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

PROMPTS = [prompt(length, seed) for seed, length in enumerate((200, 700))]
HANG = 120.0
NOT_ASKED = "-"


class Listener:
    """Asks vLLM's publisher for all that it has published: one that subscribes misses what was before its
    subscription came."""

    def __init__(self):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._endpoint = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
        self.config = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": "inproc://nobody",
            "replay_endpoint": self._endpoint,
        }
        """What a user gives as --kv-events-config."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.connect(self._endpoint)
        self._next = 0
        self.places = defaultdict(set)
        """The blocks that are in each place, by medium and tier."""
        self.removed = defaultdict(set)

    def until(self, what, step):
        """Listens until what was heard is enough; an engine tells only while it steps."""
        end = time.monotonic() + HANG
        while not what():
            assert time.monotonic() < end, f"{dict(self.places)} {dict(self.removed)}"
            step()
            self._hear()

    def _hear(self):
        from vllm.distributed.kv_events import KVEventBatch

        self._socket.send_multipart([b"", self._next.to_bytes(8, "big")])
        while self._socket.poll(HANG * 1000):
            _, _, number, payload = self._socket.recv_multipart()
            if not payload:
                return
            self._next = int.from_bytes(number, "big") + 1
            for event in msgspec.msgpack.decode(payload, type=KVEventBatch).events:
                self._take(event)

    def _take(self, event):
        place, blocks = (event.medium, event.ownership), set(event.block_hashes)
        if type(event).__name__ == "BlockStored":
            assert event.medium != "STORAGE" or event.locality == "LOCAL"
            self.places[place] |= blocks
        else:
            assert blocks <= self.places[place]
            self.places[place] -= blocks
            self.removed[place] |= blocks

    def close(self):
        self._socket.close(0)
        self._context.term()


@pytest.fixture
def listener():
    listener = Listener()
    yield listener
    listener.close()


def test_what_is_stored_and_what_goes_is_told_of_each_tier(engine, way, listener, seen, tmp_path):
    """What was heard says at any time what the tiers hold. Both are small: prompts of 168 chunks go through host
    memory of 127."""
    stack = on_disk(tmp_path / "disk", "4MiB")
    stack["tiers"][1]["capacity"] = "4MiB"
    writer = engine(stack, way, kv_events_config=listener.config)
    others = count(100)
    cpu, disk = ("CPU", None), ("STORAGE", "disk")

    def nothing_new():
        writer.generate(prompts=[prompt(BLOCK // 2, next(others))], tokens=1)

    def all_is_told():
        held = writer.metrics()
        host = held.get("kvcascade_chunks.host", len(listener.places[cpu]))  # vLLM's own has no such number
        return (len(listener.places[cpu]), len(listener.places[disk])) == (host, held["kvcascade_chunks.disk"])

    writer.generate(prompts=PROMPTS, tokens=1)
    listener.until(lambda: listener.places[disk] and all_is_told(), nothing_new)
    assert listener.places[disk] <= listener.places[cpu]
    assert len(listener.places[cpu]) == sum(len(each) // BLOCK for each in PROMPTS)
    assert not listener.removed

    for number in range(8):
        writer.generate(prompts=[prompt(700, 20 + number)], tokens=1)
    listener.until(lambda: listener.removed[disk] and listener.removed[cpu] and all_is_told(), nothing_new)
    seen.note(way, "KV events of host memory and disk, stored and removed", "-", NOT_ASKED)


def test_tiers_that_a_request_does_not_allow_are_not_read(engine, way, plain, seen, tmp_path):
    stack = on_disk(tmp_path / "disk")
    writer = engine(stack, way)
    writer.generate(prompts=PROMPTS, tokens=1)
    writer.close()
    reader = engine(stack, way)
    answers = [
        reader.generate(prompts=[each], tokens=1, params={"kv_load_tiers": [allowed]})[0]
        for each, allowed in zip(
            PROMPTS,
            ({"medium": "STORAGE", "locality": "REMOTE"}, {"medium": "STORAGE", "locality": "LOCAL"}),
            strict=True,
        )
    ]
    assert [answer["cached"] for answer in answers] == [0, full_blocks(700)]
    expected = plain(prompts=PROMPTS, tokens=1)
    assert [answer["tokens"] for answer in answers] == [answer["tokens"] for answer in expected]
    seen.note(way, "`kv_load_tiers`: remote storage only, local storage only", [0, full_blocks(700)])
