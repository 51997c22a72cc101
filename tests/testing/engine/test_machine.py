"""The simulated engine over a stack, in histories that hypothesis chooses.

Short here; as long as one likes with KVCASCADE_EXAMPLES=2000 (histories, 60 by default).
"""

import os

from hypothesis import HealthCheck, settings

from kvcascade.testing.engine.machine import EngineStateMachine

TestEngine = EngineStateMachine.TestCase
TestEngine.settings = settings(
    max_examples=int(os.environ.get("KVCASCADE_EXAMPLES", "60")),
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
