"""The schema of a tier stack, and ready-made stacks (`*.yaml` beside this file)."""

from .load import load_stack, parse_stack, resolved
from .schema import StackSettings

__all__ = ["StackSettings", "load_stack", "parse_stack", "resolved"]
