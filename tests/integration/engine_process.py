"""An engine in a process of its own: run as a script by the tests, with its settings in JSON.

Each line on its input is a command in JSON, each line on its output the answer. It compares every byte it loads.
"""

import json
import sys
import time
from typing import Any

from kvcascade.configs import parse_stack
from kvcascade.manager import SecondaryTierManager
from kvcascade.stack import build
from kvcascade.testing import Driver, FaultTier, GateTier, key_for
from kvcascade.tiers import Tier
from kvcascade.types import Namespace

CHUNK = 4096


class Engine:
    """Host memory, and a shared directory that can be made to hang and to fail."""

    def __init__(self, path: str, weights: str) -> None:
        shared = {
            "type": "fs",
            "path": path,
            "deadline": "300ms",
            "probe_ttl": "20ms",
            "concurrency": 2,
            "queue": 1.0,
        }
        shared["breaker"] = {"failures": 2, "probe_every": "20ms"}
        stack = {"version": 1, "log_every": "0s", "weights_version": weights}
        stack["tiers"] = [{"type": "host", "capacity": "256KiB"}, shared]
        self.manager: SecondaryTierManager = build(
            parse_stack(stack), Namespace.of(model="test"), CHUNK, wrap=self._wrap
        )
        self.requests = 0

    def _wrap(self, name: str, tier: Tier) -> Tier:
        self.fault = FaultTier(tier, 0, {})
        self.gate = GateTier(self.fault, hold=["write"])
        self.gate.open()
        return self.gate

    def store(self, keys: list[int], epoch: str, hangs: bool = False) -> int:
        """Stores these chunks; returns how many the directory has taken so far, in all. `hangs`: begins to."""
        driver, ctx = self._request(epoch)
        driver.store(ctx, [key_for(key) for key in keys])
        driver.finish(ctx)
        driver.step()
        if hangs:
            self.gate.wait_for("write")
        else:
            driver.settle()
        return self.manager.get_stats().tiers[1].written

    def find(self, keys: list[int], epoch: str) -> int:
        """How many leading ones of these chunks the directory gives."""
        self.manager.reset_cache("primary", timeout=0.2)
        time.sleep(0.03)  # what was known about the directory is asked anew
        driver, ctx = self._request(epoch)
        driver.step()
        prompt = [key_for(key) for key in keys]
        hits = driver.match(ctx, prompt).hits
        driver.load(ctx, prompt[:hits])
        driver.finish(ctx)
        driver.settle()
        return hits

    def reset(self, weights: str, timeout: float = 5.0) -> list[str]:
        """Returns the tiers that could not be voided in time."""
        return list(self.manager.reset_cache("all", weights, timeout).failed)

    def hang(self) -> None:
        self.gate.shut()

    def go_on(self) -> None:
        self.gate.open()

    def unreachable(self, now: bool) -> None:
        self.fault.down = now

    def come_back(self) -> None:
        """Steps until the directory is used again."""
        driver = Driver(self.manager)
        driver.until(lambda: self.manager.get_stats().tiers[1].up, "the directory does not come back")
        driver.settle()

    def stop(self) -> None:
        self.gate.open()
        self.manager.shutdown()

    def _request(self, epoch: str) -> tuple[Driver, Any]:
        self.requests += 1
        driver = Driver(self.manager, epoch)
        return driver, driver.begin(f"r{self.requests}")


def main() -> None:
    engine = Engine(*json.loads(sys.argv[1]))
    print(json.dumps("open"), flush=True)  # noqa: T201
    for line in sys.stdin:
        verb, arguments = json.loads(line)
        print(json.dumps(getattr(engine, verb)(**arguments)), flush=True)  # noqa: T201
        if verb == "stop":
            return


if __name__ == "__main__":
    main()
