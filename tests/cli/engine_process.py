"""An engine in a process of its own: run as a script by the tests, with its settings in JSON.

Each line on its input is a command in JSON, each line on its output the answer. It compares every byte it loads.
"""

import json
import sys
from itertools import count
from typing import Any

from kvcascade.configs import load_stack
from kvcascade.manager import SecondaryTierManager
from kvcascade.stack import build
from kvcascade.testing import Driver, key_for
from kvcascade.types import Namespace

CHUNK = 64 << 10


class Engine:
    def __init__(self, stack: str, epoch: str = "") -> None:
        self.manager: SecondaryTierManager = build(load_stack(stack), Namespace.of(model="m"), CHUNK)
        self.driver = Driver(self.manager, epoch)
        self.requests = count()

    def serve(self, keys: list[int]) -> int:
        """A prompt of these chunks: how many were found and compared; the others were stored."""
        return self.driver.serve(f"r{next(self.requests)}", [key_for(key) for key in keys])

    def forget(self) -> None:
        """Nothing is left in primary, and what was known of others is asked anew."""
        self.manager.reset_cache("primary")

    def reset(self, weights: str = "") -> bool:
        return self.manager.reset_cache("all", weights).ok

    def churn(self, prompts: int) -> int:
        """Serves so many prompts of chunks that nobody has asked for before: more than the disk holds."""
        for _ in range(prompts):
            start = 10_000 + 8 * next(self.requests)
            self.driver.serve(f"c{start}", [key_for(key) for key in range(start, start + 8)])
        return prompts

    def stop(self) -> None:
        self.manager.shutdown()


def main() -> None:
    engine = Engine(**json.loads(sys.argv[1]))
    print(json.dumps("open"), flush=True)  # noqa: T201
    for line in sys.stdin:
        verb, arguments = json.loads(line)
        answer: Any = getattr(engine, verb)(**arguments)
        print(json.dumps(answer), flush=True)  # noqa: T201
        if verb == "stop":
            return


if __name__ == "__main__":
    main()
