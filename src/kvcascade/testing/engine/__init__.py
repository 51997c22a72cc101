"""A simulated paged-attention engine, over the connector's two halves; see docs/simulation.md.

engine = SimulatedEngine(EngineShape(), manager, manager.pool)
engine.add(SimRequest("request-1", prompt=[1, 2, 3, 4, 5], max_tokens=8, tokens_per_block=4))
while engine.step(Random(0)):
    ...
"""

from .engine import SimulatedEngine
from .requests import SimRequest
from .shape import EngineShape

__all__ = ["EngineShape", "SimRequest", "SimulatedEngine"]
