"""An engine in a process of its own: run as a script by the tests, with its arguments in JSON.

It opens the tier, says "open", and waits for a line. Then it stores and loads chunks at random; at its end it says
"done". Whatever is wrong it says as it sees it.
"""

import json
import random
import sys
from typing import Any

from kvcascade.testing import buffer, bytes_for, holds, key_for
from kvcascade.tiers import OpenContext
from kvcascade.tiers.s3 import S3Settings
from kvcascade.types import Namespace, OutcomeKind


def main() -> None:
    given: dict[str, Any] = json.loads(sys.argv[1])
    tier = S3Settings(**given["settings"]).open(OpenContext(Namespace.of(**given["namespace"]), given["chunk"]))
    say("open")
    sys.stdin.readline()
    choose = random.Random(given["seed"])
    keys = [key_for(number) for number in range(given["among"])]
    target = buffer(given["chunk"])
    for _ in range(given["rounds"]):
        batch = choose.sample(keys, 4)
        outcomes = tier.write(batch, [memoryview(bytes_for(key, given["chunk"])) for key in batch])
        complain("write", [outcome for outcome in outcomes if not outcome.ok])
        (outcome,) = tier.read(batch[:1], [target])
        if outcome.ok and not holds(target, batch[0]):
            say("wrong bytes")
        if not outcome.ok and outcome.kind is not OutcomeKind.MISSING:
            complain("read", [outcome])
    say("done")
    tier.close()


def complain(verb: str, outcomes: list[Any]) -> None:
    """The stand-ins for a store answer 500 where two writers of one object meet: a lane would try again."""
    for outcome in outcomes:
        if "InternalError" not in str(outcome.cause) and "status 500" not in str(outcome.cause):
            say(f"{verb}: {outcome}")


def say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
