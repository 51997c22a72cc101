"""Writes to a disk tier until it is killed: run as a script by the kill tests, with its arguments in JSON."""

import json
import random
import sys

from kvcascade.testing import bytes_for, key_for
from kvcascade.tiers import OpenContext
from kvcascade.tiers.disk import DiskSettings
from kvcascade.types import Namespace


def main() -> None:
    given = json.loads(sys.argv[1])
    choose = random.Random(given["seed"])
    tier = DiskSettings(path=given["path"], capacity=given["capacity"], durability=given["durability"]).open(
        OpenContext(Namespace.of(**given["namespace"]), given["chunk"], epoch=given["epoch"])
    )
    room = (tier.usage().capacity or 0) // tier.footprint(given["chunk"])
    held = [entry.key for entry in tier.entries()]
    say("open")
    epoch = given["epoch"]
    while True:
        if choose.random() < given["moves"]:
            epoch = f"v{choose.randrange(10**9)}"
            tier.move_to(epoch)
            say(json.dumps({"epoch": epoch}))
            held = []
        fresh = [key_for(choose.randrange(given["keys"])) for _ in range(choose.randint(1, 8))]
        fresh = [key for key in dict.fromkeys(fresh) if key not in held]
        sizes = [choose.choice([given["chunk"], given["chunk"], 1000]) for _ in fresh]
        excess = max(0, len(held) + len(fresh) - room)
        choose.shuffle(held)
        victims, held = held[:excess], held[excess:]
        payloads = [memoryview(bytes_for(key, nbytes, epoch)) for key, nbytes in zip(fresh, sizes, strict=True)]
        outcomes = tier.write(fresh, payloads, victims)
        done = [key for key, outcome in zip(fresh, outcomes, strict=True) if outcome.ok]
        held += done
        tier.touch(choose.sample(held, min(3, len(held))))
        if choose.random() < 0.1:
            gone, held = held[:2], held[2:]
            tier.delete(gone)
            victims += gone
        tier.maintain(0.01)
        say(json.dumps({"stored": [key.hex() for key in done], "gone": [key.hex() for key in victims]}))


def say(line: str) -> None:
    """One whole line a step, so that the reader knows what was committed for sure."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
