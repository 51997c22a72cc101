"""The manager beside a plain model, with faults.

Short here; as long as one likes with KVCASCADE_EXAMPLES=20000 (sequences of calls, 200 by default).
"""

import os

from hypothesis import HealthCheck, settings

from kvcascade.testing.stack_machine import StackStateMachine

TestStack = StackStateMachine.TestCase
TestStack.settings = settings(
    max_examples=int(os.environ.get("KVCASCADE_EXAMPLES", "200")),
    stateful_step_count=60,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
