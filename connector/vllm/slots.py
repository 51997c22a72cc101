"""What goes from the scheduler to the workers beside vLLM's own: the slots of the host pool."""

from collections.abc import Sequence

from . import compat

__all__ = ["SlotSpec"]


class SlotSpec(compat.LoadStoreSpec):
    """Slots of the host pool, one for each chunk, in the order of the chunks. Pickles."""

    def __init__(self, slots: Sequence[int]) -> None:
        self.slots = tuple(slots)

    def __repr__(self) -> str:
        return f"SlotSpec({self.slots!r})"
