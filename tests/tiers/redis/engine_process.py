"""An engine in a process of its own, for tests of what several do to the same servers."""

import json
import random
import sys
from typing import Any

from kvcascade.testing import buffer, bytes_for, holds, key_for
from kvcascade.tiers import OpenContext
from kvcascade.tiers.redis import RedisSettings
from kvcascade.types import Namespace


def main() -> None:
    given: dict[str, Any] = json.loads(sys.argv[1])
    tier = RedisSettings(**given["settings"]).open(
        OpenContext(Namespace.of(**given["namespace"]), given["chunk"], epoch=given.get("epoch", ""))
    )
    keys = [key_for(number) for number in given["keys"]]
    buffers = [memoryview(bytes_for(key, given["chunk"])) for key in keys]
    say("open")
    if given["act"] == "store":
        say(json.dumps([outcome.kind.value for outcome in tier.write(keys, buffers)]))
        tier.close()
        return
    choose = random.Random(given.get("seed"))
    target = buffer(given["chunk"])
    for _ in range(given.get("rounds", 1 << 30)):
        batch = choose.sample(keys, 4)
        tier.write(batch, [memoryview(bytes_for(key, given["chunk"])) for key in batch])
        (outcome,) = tier.read(batch[:1], [target])
        if outcome.ok and not holds(target, batch[0]):
            say("wrong bytes")
        if not outcome.ok and outcome.kind.value != "missing":
            say(f"read: {outcome}")
        if choose.random() < 0.2:
            tier.delete(batch[:1])
    say("done")
    tier.close()


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
