"""The I/O process: what a stack does whose lanes run in it, and what is left where it or the engine is killed."""

import logging
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import pytest

from kvcascade.configs.registry import TIERS, known
from kvcascade.errors import ConfigError
from kvcascade.manager.io import IoProcess
from kvcascade.manager.io.wire import Found, Told
from kvcascade.stack import build, build_lower
from kvcascade.testing import Driver, buffer, key_for
from kvcascade.testing.lanes import WatchedLane
from kvcascade.testing.servers.redis import RedisServer
from kvcascade.tiers import OpenContext
from kvcascade.tiers.host import HostPool
from kvcascade.types import Changes, Entry, Key, LookupResult, RequestContext, Usage

from .io_engine import CHUNK, NAMESPACE, io_children, stack_of

KEYS = [key_for(number) for number in range(256)]
_HANG = 30.0


class Engine(Driver):
    """A manager over real tiers in an I/O process, whose lanes are watched."""

    def __init__(self, tiers: Sequence[dict[str, Any]], slots: int = 16, epoch: str = "", **stack: Any) -> None:
        before = set(io_children())
        super().__init__(build(stack_of(tiers, slots, **stack), NAMESPACE, CHUNK), epoch)
        self.pid = (set(io_children()) - before).pop()
        self.levels = self.manager._chain.levels
        self.lanes = [WatchedLane(level.name, level.lane) for level in self.levels]
        for level, lane in zip(self.levels, self.lanes, strict=True):
            level.lane = lane

    def begin(self, req_id: str) -> RequestContext:
        for lane in self.lanes:
            lane.begin(req_id)
        return super().begin(req_id)

    def store(self, ctx: RequestContext, keys: Sequence[Key]) -> list[Key]:
        """Offers these chunks until all are granted: the need for room may have to wait for copies."""

        def stored() -> bool:
            offer = self.offer(ctx, keys)
            if offer is not None:
                self.manager.complete_store(offer.keys, ctx)
            return offer is not None and not offer.refused

        self.until(stored, "the store stays refused")
        return list(keys)

    def kill(self, number: int = signal.SIGKILL) -> None:
        os.kill(self.pid, number)

    def comes_back(self) -> None:
        """Steps until another I/O process serves all tiers."""
        gone = self.pid
        self.until(lambda: set(io_children()) - {gone} != set(), "it is not started again")
        self.pid = (set(io_children()) - {gone}).pop()
        self.until(lambda: all(level.up for level in self.levels), "the tiers do not come back")

    def push_out(self, since: int, count: int = 16) -> None:
        """What is in primary makes room for others."""
        for start in range(since, since + count, 4):
            self.serve(f"push out {start}", KEYS[start : start + 4])

    def end(self) -> None:
        self.check_at_rest()
        for lane in self.lanes:
            assert not lane.unsettled, "a job was not told of"
            assert sorted(lane.submitted) == sorted(lane.reported), "not each job was told of once"
        self.manager.shutdown()


@pytest.fixture
def engine() -> Iterator[Callable[..., Engine]]:
    """Starts an engine; afterwards nothing may be left of it."""
    started: list[Engine] = []

    def start(tiers: Sequence[dict[str, Any]], **options: Any) -> Engine:
        started.append(Engine(tiers, **options))
        return started[-1]

    yield start
    for one in started:
        one.manager.shutdown(timeout=2.0)
    assert not io_children()


def disk(path: Path, **options: Any) -> dict[str, Any]:
    return {"type": "disk", "path": str(path / "disk"), "capacity": "4MiB", "queue": 1.0, **options}


def shared(path: Path, **options: Any) -> dict[str, Any]:
    return {"type": "fs", "path": str(path / "fs"), "queue": 1.0, "probe_ttl": "20ms", **options}


@pytest.fixture
def odd(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A tier that misbehaves as files in the folder `odd` say."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.setitem(known(TIERS), "odd", EntryPoint("odd", "odd_tier:OddSettings", TIERS))
    (tmp_path / "odd").mkdir()
    return {"type": "odd", "path": str(tmp_path / "odd"), "queue": 1.0, **QUICK}


QUICK = {"breaker": {"failures": 2, "probe_every": "50ms"}}


def test_chunks_come_back_from_each_tier_also_after_a_restart(
    engine: Callable[..., Engine], tmp_path: Path
) -> None:
    for hits in (0, 4):
        one = engine([disk(tmp_path), shared(tmp_path)])
        assert one.serve("first", KEYS[:4]) == hits
        one.push_out(10)
        assert one.serve("again", KEYS[:4]) == 4
        one.end()


def test_a_killed_io_process_is_started_again_and_serves_what_is_on_the_medium(
    engine: Callable[..., Engine], tmp_path: Path
) -> None:
    one = engine([disk(tmp_path, **QUICK)])
    one.serve("store", KEYS[:8])
    one.push_out(16)
    one.kill()
    one.comes_back()
    assert one.serve("again", KEYS[:8]) == 8
    one.end()


def test_what_was_only_in_the_memory_of_a_killed_io_process_is_a_miss(engine: Callable[..., Engine]) -> None:
    one = engine([{"type": "memory", "capacity": "4MiB", "queue": 1.0, **QUICK}])
    one.serve("store", KEYS[:8])
    one.push_out(16)
    one.kill()
    one.comes_back()
    one.step()
    assert list(one.levels[0].residency) == []
    assert one.serve("again", KEYS[:8]) == 0
    one.push_out(32)
    assert one.serve("stored anew", KEYS[:8]) == 8
    one.end()


@pytest.mark.parametrize("seed", range(3))
def test_it_is_killed_in_the_middle_of_stores_and_loads(
    engine: Callable[..., Engine], tmp_path: Path, seed: int
) -> None:
    """Every byte is compared, each job told of once, and the residency is what the disk holds."""
    chance = random.Random(seed)
    one = engine([disk(tmp_path, capacity="1080KiB", concurrency=2, **QUICK)], slots=12)
    for kills in range(4):
        for number in range(chance.randrange(20)):
            prompt = 4 * chance.randrange(32)
            one.serve(f"{kills} {number}", KEYS[prompt : prompt + 4])
        contexts = [one.begin(f"{kills} {name}") for name in "ab"]
        prompt = 4 * chance.randrange(32)
        one.manager.match_prefix(KEYS[prompt : prompt + 4], contexts[0])
        one.store(contexts[1], KEYS[128 + prompt : 130 + prompt])
        one.step()
        time.sleep(chance.random() * 0.002)
        one.kill()
        for ctx in contexts:
            one.finish(ctx)
        one.comes_back()
    one.settle()
    held = set(one.levels[0].residency)
    one.end()
    settings = stack_of([disk(tmp_path, capacity="1080KiB")], 12).secondary[0]
    with settings.open(OpenContext(NAMESPACE, CHUNK)) as tier:  # type: ignore[attr-defined]
        assert {entry.key for entry in tier.entries()} == held


def test_it_is_killed_again_and_again_below_a_chain_that_demotes(
    engine: Callable[..., Engine], tmp_path: Path
) -> None:
    one = engine(
        [
            disk(tmp_path, capacity="1080KiB", write="on_evict", **QUICK),
            shared(tmp_path, write="on_evict", **QUICK),
        ],
        slots=12,
    )
    chance = random.Random(7)
    for number in range(120):
        prompt = 4 * chance.randrange(48)
        one.serve(f"r{number}", KEYS[prompt : prompt + 4])
        if number % 30 == 20:
            one.kill()
            one.comes_back()
    one.push_out(200, 48)
    assert sum(one.serve(f"last {start}", KEYS[start : start + 4]) for start in range(200, 248, 4)) > 12
    one.end()


def test_a_stopped_io_process_costs_no_more_than_the_deadline(
    engine: Callable[..., Engine], tmp_path: Path
) -> None:
    one = engine([disk(tmp_path, deadline="200ms", **QUICK)])
    one.serve("store", KEYS[:8])
    one.push_out(16)
    one.kill(signal.SIGSTOP)
    ctx = one.begin("waits")
    assert one.lookup(ctx, KEYS[0]) is LookupResult.MISS
    one.store(ctx, KEYS[100:102])
    assert one.lookup(ctx, KEYS[100]) is LookupResult.HIT
    one.finish(ctx)
    one.until(lambda: not one.levels[0].up, "the tier is not down")
    assert one.manager.get_stats().pinned_slots > 0, "what it may still use stays out of use"
    one.kill(signal.SIGCONT)
    one.until(lambda: one.levels[0].up, "the tier does not come back")
    assert one.serve("again", KEYS[:8]) == 8
    one.end()


@pytest.mark.parametrize("busy", [False, True])
def test_a_stopped_io_process_is_killed_at_shutdown(
    engine: Callable[..., Engine], tmp_path: Path, busy: bool
) -> None:
    one = engine([disk(tmp_path, deadline="200ms", **QUICK)])
    one.serve("store", KEYS[:8])
    one.kill(signal.SIGSTOP)
    if busy:
        ctx = one.begin("stores")
        one.store(ctx, KEYS[100:104])
        one.finish(ctx)
    one.manager.shutdown(timeout=0.3)
    assert not io_children()
    with pytest.raises(Exception, match="closed"):
        one.manager.pool.slot(0)


def test_it_may_die_as_it_closes_a_tier(
    engine: Callable[..., Engine], tmp_path: Path, odd: dict[str, Any]
) -> None:
    one = engine([odd, disk(tmp_path)])
    one.serve("store", KEYS[:4])
    (tmp_path / "odd" / "dies").touch()
    one.end()
    assert not io_children()


def test_what_one_tier_raises_ends_no_other(
    engine: Callable[..., Engine], tmp_path: Path, odd: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    one = engine([disk(tmp_path), odd])
    one.serve("store", KEYS[:8])
    (tmp_path / "odd" / "raises").touch()
    one.push_out(16)
    assert one.serve("again", KEYS[:8]) == 8
    assert io_children() == [one.pid]
    one.end()
    assert caplog.text.count("raises OSError: odd") == 1


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_it_ends_with_the_engine_not_with_what_is_sent_to_all(
    engine: Callable[..., Engine], tmp_path: Path, name: str
) -> None:
    """A terminal's Ctrl-C, or an orchestrator's SIGTERM, may reach all: the engine still has to shut down."""
    one = engine([disk(tmp_path)])
    one.serve("store", KEYS[:4])
    one.kill(signal.Signals[name])
    one.push_out(16)
    assert one.serve("again", KEYS[:4]) == 4
    assert io_children() == [one.pid]
    assert os.getsid(one.pid) == one.pid
    one.end()


# Resets


@pytest.mark.parametrize("target", ["", "v2"])
def test_nothing_of_before_a_reset_comes_back_when_it_is_killed(
    engine: Callable[..., Engine], tmp_path: Path, target: str
) -> None:
    """Another engine keeps using the shared directory with the weights of before."""
    other = Driver(build(stack_of([shared(tmp_path)], 16, io="thread"), NAMESPACE, CHUNK), "old")
    one = engine([disk(tmp_path, **QUICK), shared(tmp_path, **QUICK)], epoch="old")
    one.serve("store", KEYS[:8])
    assert one.manager.reset_cache("all", target).ok
    other.serve("the old weights", KEYS[:16])
    one.epoch = "new"
    one.kill()
    one.comes_back()
    assert one.serve("again", KEYS[:8]) == 0
    one.push_out(64)
    assert one.serve("stored anew", KEYS[:8]) == 8
    one.push_out(80)
    one.kill()
    one.comes_back()
    assert one.serve("of the new weights, on the disk", KEYS[:8]) == 8
    assert one.serve("of the other engine", KEYS[8:16]) == 0
    one.end()
    other.manager.shutdown()


def test_a_reset_that_it_does_not_live_to_do_is_done_later(engine: Callable[..., Engine], tmp_path: Path) -> None:
    one = engine([disk(tmp_path, **QUICK)], epoch="old")
    one.serve("store", KEYS[:8])
    one.kill(signal.SIGSTOP)
    assert list(one.manager.reset_cache("all", timeout=0.1).failed) == ["disk"]
    one.epoch = "new"
    one.kill()
    one.comes_back()
    assert one.serve("again", KEYS[:8]) == 0
    one.end()


def test_a_reset_while_a_tier_is_opened_again_holds(
    engine: Callable[..., Engine], tmp_path: Path, odd: dict[str, Any]
) -> None:
    """What it has found of before is known to be void once the reset is answered."""
    one = engine([odd])
    (tmp_path / "odd" / "found").write_text("\n".join(key.hex() for key in KEYS[:8]))
    (tmp_path / "odd" / "slow").touch()
    one.kill()
    one.until((tmp_path / "odd" / "waits").exists, "it is not opened again")
    one.manager.reset_cache("all", timeout=_HANG)
    (tmp_path / "odd" / "slow").unlink()
    one.comes_back()
    assert list(one.levels[0].residency) == []
    one.end()


def test_what_comes_to_light_after_a_tier_was_opened_again_is_kept(
    engine: Callable[..., Engine], odd: dict[str, Any]
) -> None:
    """A scan after a power cut finds more than the index, which was told, had."""
    one = engine([odd])
    one.kill()
    one.comes_back()
    one.step()
    tier = one.levels[0].tier
    entries = [Entry(key, CHUNK, 1.0, 1.0) for key in KEYS[:2]]
    tier.hear(Found(0, entries[:1], {}, last=True))  # type: ignore[attr-defined]
    tier.hear(Told(0, Usage(0, 0, None), {}, [], [Changes(appeared=(entries[1],))]))  # type: ignore[attr-defined]
    one.step()
    assert set(one.levels[0].residency) == set(KEYS[:2])
    one.end()


# The engine's process


def engine_process(path: Path, *arguments: str) -> "subprocess.Popen[str]":
    script = Path(__file__).with_name("io_engine.py")
    return subprocess.Popen(
        [sys.executable, str(script), str(path), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


def gone(pid: int) -> bool:
    """Whether a process ends, within a time that no test should take."""
    end = time.monotonic() + _HANG
    while time.monotonic() < end:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return True
        if state == "Z":
            return True
        time.sleep(0.01)
    return False


@pytest.mark.parametrize("how", ["", "fork", "early"])
def test_it_ends_when_the_engine_is_killed(engine: Callable[..., Engine], tmp_path: Path, how: str) -> None:
    """Also where a fork of the engine lives on, with its end of the socket, and where the child has just been
    started; the disk is free for the next one."""
    with engine_process(tmp_path, *how.split()) as process:
        assert process.stdout
        child, forked = map(int, process.stdout.readline().split())
        process.kill()
        process.wait()
        ended = gone(child)
        if forked:
            os.kill(forked, signal.SIGKILL)
    assert ended
    one = engine([disk(tmp_path)])
    assert one.serve("again", KEYS[:4]) == (0 if how == "early" else 4)
    one.end()


def test_a_fork_of_the_engine_harms_nothing(engine: Callable[..., Engine], tmp_path: Path) -> None:
    one = engine([disk(tmp_path)])
    one.serve("store", KEYS[:4])
    forked = os.fork()
    if not forked:
        try:
            one.manager._chain.close(1.0)
            os._exit(0)
        finally:
            os._exit(1)
    assert os.waitpid(forked, 0)[1] == 0
    one.push_out(16)
    assert one.serve("again", KEYS[:4]) == 4
    assert io_children() == [one.pid]
    one.end()


def _serve_in_a_daemon(path: str) -> None:
    driver = Driver(build(stack_of([disk(Path(path))], 16), NAMESPACE, CHUNK))
    driver.serve("store", KEYS[:4])
    for start in range(16, 32, 4):
        driver.serve(f"push out {start}", KEYS[start : start + 4])
    if driver.serve("again", KEYS[:4]) != 4:
        sys.exit(2)
    driver.manager.shutdown()


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_an_engine_may_be_a_daemonic_process(tmp_path: Path, method: str) -> None:
    """Which `multiprocessing` lets have no children."""
    if method == "spawn":
        code = "import sys; from io_engine import daemon; daemon(sys.argv[1])"
        run = subprocess.run(
            [sys.executable, "-c", code, str(tmp_path)], cwd=Path(__file__).parent, timeout=_HANG * 2, check=False
        )
        assert run.returncode == 0
        return
    process = multiprocessing.get_context(method).Process(
        target=_serve_in_a_daemon, args=(str(tmp_path),), daemon=True
    )
    process.start()
    process.join(_HANG)
    assert process.exitcode == 0
    process.close()


def test_two_stacks_have_a_process_each(engine: Callable[..., Engine], tmp_path: Path) -> None:
    """The death of one is not noticed by the other."""
    one, other = engine([disk(tmp_path / "one", **QUICK)]), engine([disk(tmp_path / "other")])
    one.serve("store", KEYS[:4])
    other.serve("store", KEYS[:4])
    assert sorted(io_children()) == sorted([one.pid, other.pid])
    one.kill()
    other.push_out(16)
    assert other.serve("again", KEYS[:4]) == 4
    one.step()  # which notices the death
    one.until(lambda: len(set(io_children()) - {one.pid}) == 2, "it is not started again")
    one.until(lambda: one.levels[0].up, "the tier does not come back")
    other.end()
    one.push_out(16)
    assert one.serve("again", KEYS[:4]) == 4
    one.end()


# Opening


def test_what_can_not_be_opened_is_said_as_without_a_process(tmp_path: Path) -> None:
    (tmp_path / "disk").write_text("a file")
    texts = []
    for io in ("thread", "process"):
        with pytest.raises(ConfigError) as caught:
            build(stack_of([disk(tmp_path)], 16, io=io), NAMESPACE, CHUNK)
        texts.append(str(caught.value))
    assert texts[0] == texts[1]
    assert "tiers[1] (disk)" in texts[0]
    assert not io_children()


def test_an_io_process_that_can_not_start_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(ConfigError, match="ended with exit code 1 before the tier was open"):
        build(stack_of([disk(tmp_path)], 16), NAMESPACE, CHUNK)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "missing"))
    with pytest.raises(ConfigError, match="no process can be started"):
        build(stack_of([disk(tmp_path)], 16), NAMESPACE, CHUNK)
    assert not io_children()


def test_a_foreign_pool_is_refused(tmp_path: Path) -> None:
    slot = buffer(CHUNK)
    with pytest.raises(ConfigError, match="io: 'process' needs host memory of our own"):
        build_lower(stack_of([disk(tmp_path)], 16), NAMESPACE, CHUNK, lambda number: slot, 1)


def test_a_tier_that_is_not_there_yet_is_taken_in_when_it_comes(
    engine: Callable[..., Engine], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What the tier logs in the I/O process stands in the engine's log."""
    server = RedisServer(tmp_path / "redis")
    redis = {"type": "redis", "url": server.url, "probe_ttl": "20ms", "queue": 1.0, **QUICK}
    with caplog.at_level(logging.WARNING, "kvcascade"):
        one = engine([redis])
        one.until(lambda: "can't be opened now" in caplog.text, "nothing is logged")
    assert not one.levels[0].up
    assert one.serve("nothing below", KEYS[:4]) == 0
    with server:
        one.until(lambda: one.levels[0].up, "the server is not taken in")
        one.serve("store", KEYS[4:8])
        one.push_out(16)
        assert one.serve("again", KEYS[4:8]) == 4
        one.end()


def test_the_io_process_is_small_and_shows_no_settings(engine: Callable[..., Engine], tmp_path: Path) -> None:
    one = engine([disk(tmp_path)])
    one.serve("store", KEYS[:4])
    proc = Path(f"/proc/{one.pid}")
    command = (proc / "cmdline").read_bytes().split(b"\0")
    assert str(tmp_path).encode() not in b" ".join(command)
    assert "libtorch" not in (proc / "maps").read_text()
    files = {str(fd.readlink()) for fd in (proc / "fd").iterdir()}
    assert sum("kvcascade-host" in name for name in files) == 1, "the pool, once"
    one.end()


def test_settings_that_can_not_be_handed_over_are_an_error(tmp_path: Path) -> None:
    """A third party's class that is defined within a function can't be found by its name."""

    class Local(type(stack_of([disk(tmp_path)], 16).secondary[0])):  # type: ignore[misc]
        """As the disk's."""

    with HostPool(4, CHUNK) as pool, pytest.raises(ConfigError, match="settings can't be handed to a process"):
        IoProcess(pool, [Local(path=str(tmp_path), capacity=1 << 22)], OpenContext(NAMESPACE, CHUNK))
    assert not io_children()
