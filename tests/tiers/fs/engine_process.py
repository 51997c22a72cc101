"""An engine in a process of its own: run as a script by the tests, with its arguments in JSON.

It opens the tier, says "open", and waits for a line. Then it stores `keys` in an order of its own, or, where these
are "endless", goes on at random until it is killed; it sweeps in between. At its end it says what it saw, in JSON.
"""

import json
import random
import sys
import time
from typing import Any

from kvcascade.testing import buffer, bytes_for, holds, key_for
from kvcascade.tiers import OpenContext
from kvcascade.tiers.fs import FsSettings, lease, sweeper
from kvcascade.tiers.fs.tier import FsTier
from kvcascade.types import Namespace, OutcomeKind

RECENT = 8


def main() -> None:
    given = json.loads(sys.argv[1])
    sweeper.EVERY, sweeper.TELL_EVERY = 0.2, 0.0
    sweeper.REST = sweeper.TELL_REST = lease.RENEW_EVERY = 0.0
    settings = FsSettings(path=given["path"], capacity=given.get("capacity"))
    tier = settings.open(OpenContext(Namespace.of(**given["namespace"]), given["chunk"]))
    assert isinstance(tier, FsTier)
    say("open")
    sys.stdin.readline()
    if given["keys"] == "endless":
        endless(tier, given)
    say(json.dumps(finite(tier, given)))
    tier.close()


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def finite(tier: FsTier, given: dict[str, Any]) -> dict[str, Any]:
    order = random.Random(given["seed"]).sample(given["keys"], len(given["keys"]))
    failed, refused, lost, recent = 0, 0, 0, []
    for number in order:
        key = key_for(number)
        (outcome,) = tier.write([key], [memoryview(bytes_for(key, given["chunk"]))])
        failed += outcome.kind is OutcomeKind.FAILED
        refused += outcome.kind is OutcomeKind.REFUSED
        if given.get("capacity"):
            recent = [*recent[1 - RECENT :], key] if outcome.ok else []
            tier.maintain(0.0)
            lost += tier.exists(recent).count(False)
    for _ in range(20 if given.get("capacity") else 0):
        tier.maintain(1.0)
        time.sleep(0.04)
    evicted = tier._sweeper.evicted if tier._sweeper else 0
    return {"failed": failed, "refused": refused, "lost": lost, "evicted": evicted}


def endless(tier: FsTier, given: dict[str, Any]) -> None:
    choose = random.Random(given["seed"])
    target = buffer(given["chunk"])
    while True:
        keys = [key_for(choose.randrange(given["among"])) for _ in range(4)]
        tier.write(keys, [memoryview(bytes_for(key, given["chunk"])) for key in keys])
        (outcome,) = tier.read(keys[:1], [target])
        if outcome.ok and not holds(target, keys[0]):
            say("wrong bytes")
        if choose.random() < 0.2:
            tier.delete(keys[:1])
        tier.maintain(0.0)
        say("step")


if __name__ == "__main__":
    main()
