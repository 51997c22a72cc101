"""The device's blocks: who uses them, which are free, and which of them are the prefix cache."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from .requests import SimRequest
from .shape import EngineShape

__all__ = ["Block", "BlockPool", "BlockTables", "Blocks"]


@dataclass(eq=False, slots=True)
class Block:
    """A block of the device. `block_hash` is set as long as the prefix cache knows it."""

    block_id: int
    refs: int = 0
    block_hash: tuple[bytes, int] | None = None

    @property
    def is_null(self) -> bool:
        return self.block_id == 0


class Blocks:
    """The blocks of one request, a list for each group; as vLLM hands them to a connector."""

    def __init__(self, blocks: Sequence[Sequence[Block]]) -> None:
        self.blocks = tuple(blocks)

    def get_block_ids(self) -> tuple[list[int], ...]:
        return tuple([block.block_id for block in group] for group in self.blocks)


class BlockPool:
    """All blocks. A free block that the prefix cache knows is handed out last, any other at once: what was just
    freed is what is next overwritten."""

    def __init__(self, count: int) -> None:
        self.all = [Block(number) for number in range(count)]
        self.null = self.all[0]
        self._free = OrderedDict((block.block_id, block) for block in self.all[1:])
        self._cached: dict[tuple[bytes, int], dict[int, Block]] = {}

    @property
    def free(self) -> int:
        return len(self._free)

    @property
    def empty(self) -> bool:
        """Whether no request uses a block, and the prefix cache knows none."""
        return not self._cached and self.free == len(self.all) - 1

    def take(self, count: int) -> list[Block]:
        """Blocks for new content; what the prefix cache knew of them is forgotten."""
        taken = [self._free.popitem(last=False)[1] for _ in range(count)]
        for block in taken:
            self._forget(block)
            block.refs = 1
        return taken

    def share(self, blocks: Iterable[Block]) -> None:
        """One more request uses these."""
        for block in blocks:
            if block.is_null:
                continue
            self._free.pop(block.block_id, None)
            block.refs += 1

    def release(self, blocks: Iterable[Block]) -> None:
        """One request less uses these; the first is handed out again first."""
        first: list[Block] = []
        last: list[Block] = []
        for block in blocks:
            if block.is_null:
                continue
            block.refs -= 1
            if block.refs == 0:
                (first if block.block_hash is None else last).append(block)
        for block in reversed(first):
            self._free[block.block_id] = block
            self._free.move_to_end(block.block_id, last=False)
        self._free.update((block.block_id, block) for block in last)

    def cache(self, block: Block, key: bytes, group: int) -> None:
        """The block holds, or will when the steps that are planned have run, the tokens of this hash."""
        if block.is_null or block.block_hash is not None:
            return
        block.block_hash = (key, group)
        self._cached.setdefault((key, group), {})[block.block_id] = block

    def find(self, key: bytes, group: int) -> Block | None:
        return next(iter(self._cached.get((key, group), {}).values()), None)

    def reset(self) -> bool:
        """Empties the prefix cache. False, and nothing is done, while a request uses a block."""
        if self.free != len(self.all) - 1:
            return False
        for block in self.all:
            block.block_hash = None
        self._cached.clear()
        return True

    def _forget(self, block: Block) -> None:
        if block.block_hash is not None:
            holders = self._cached[block.block_hash]
            del holders[block.block_id]
            if not holders:
                del self._cached[block.block_hash]
            block.block_hash = None


class BlockTables:
    """Which blocks each request has."""

    def __init__(self, shape: EngineShape) -> None:
        self.pool = BlockPool(shape.blocks)
        self._shape = shape
        self._tables: dict[str, list[list[Block]]] = {}
        self._cached: dict[str, int] = {}
        """Request -> leading blocks that have been given to the prefix cache."""

    def blocks(self, req_id: str) -> Blocks:
        return Blocks(self._tables.get(req_id) or [[] for _ in self._shape.windows])

    def find_hit(self, request: SimRequest) -> tuple[list[list[Block]], int]:
        """The longest prefix that every group has in the prefix cache, without the last token: its blocks, a list
        for each group, and its tokens."""
        length = (request.num_tokens - 1) // self._shape.tokens_per_block
        keys = request.block_hashes[:length]
        found: dict[int, list[Block]] = {}
        while True:
            before = len(keys)
            for group in sorted(range(len(self._shape.windows)), key=lambda group: self._shape.windows[group] > 0):
                found[group] = self._find_in_group(keys, group)
                keys = keys[: len(found[group])]
            if len(keys) == before:
                break
        hit = [found[group][: len(keys)] for group in range(len(self._shape.windows))]
        return hit, len(keys) * self._shape.tokens_per_block

    def missing(self, request: SimRequest, tokens: int) -> int:
        """Free blocks that the request would take in order to have slots for so many tokens, at most."""
        return self._needed(request, tokens, request.num_computed_tokens, (), capped=True)

    def allocate(
        self,
        request: SimRequest,
        new: int,
        hit: Sequence[Sequence[Block]] = (),
        local: int = 0,
        external: int = 0,
        lookahead: int = 0,
        reserved: int = 0,
        whole: bool = False,
    ) -> list[list[Block]] | None:
        """Gives a request slots for `new` more tokens, behind `local` ones of a hit and `external` ones to load.
        Returns the new blocks of each group; None where there is no room.

        Args:
            lookahead: slots for tokens that are only drafted.
            reserved: blocks that must stay free.
            whole: refuse unless the whole request would fit.
        """
        adopted = request.num_computed_tokens + local + external
        if whole and self._needed(request, request.num_tokens, adopted, hit, capped=True) > self.pool.free:
            return None
        need = min(adopted + new + lookahead, self._shape.max_tokens)
        self.release_skipped(request, adopted - request.num_in_flight_tokens)
        if self._needed(request, need, adopted, hit) > self.pool.free - reserved:
            return None
        if request.request_id not in self._tables:
            self._adopt(request, hit, adopted)
        if external:
            self._extend(request, adopted)
        return self._extend(request, need)

    def cache(self, request: SimRequest, tokens: int) -> None:
        """Gives the request's full blocks, up to so many tokens, to the prefix cache."""
        full = min(tokens // self._shape.tokens_per_block, len(request.block_hashes))
        for group, table in enumerate(self._tables[request.request_id]):
            for place in range(self._cached.get(request.request_id, 0), min(full, len(table))):
                self.pool.cache(table[place], request.block_hashes[place], group)
        self._cached[request.request_id] = max(full, self._cached.get(request.request_id, 0))

    def release_skipped(self, request: SimRequest, processed: int) -> None:
        """Frees the blocks that a sliding window has left behind after so many tokens."""
        for window, table in zip(self._shape.windows, self._tables.get(request.request_id, ()), strict=False):
            freed = []
            for place in reversed(range(min(self._skipped(window, processed), len(table)))):
                if table[place].is_null:
                    break
                freed.append(table[place])
                table[place] = self.pool.null
            self.pool.release(freed)

    def pop(self, req_id: str) -> list[Block]:
        """The blocks of a request, which has none from now on; in the order in which they are to be released."""
        self._cached.pop(req_id, None)
        return [block for table in self._tables.pop(req_id, []) for block in table][::-1]

    def free(self, req_id: str) -> None:
        """The request's blocks are free; its tail is handed out first."""
        for table in self._tables.get(req_id, []):
            self.pool.release(table[::-1])
        self._tables.pop(req_id, None)
        self._cached.pop(req_id, None)

    def _skipped(self, window: int, tokens: int) -> int:
        """Leading blocks that no further token attends to."""
        return max(0, tokens - window + 1) // self._shape.tokens_per_block if window else 0

    def _find_in_group(self, keys: Sequence[bytes], group: int) -> list[Block]:
        window = self._shape.windows[group]
        if not window:
            prefix: list[Block] = []
            for key in keys:
                block = self.pool.find(key, group)
                if block is None:
                    break
                prefix.append(block)
            return prefix
        need = -(-(window - 1) // self._shape.tokens_per_block)
        found = [self.pool.null] * len(keys)
        run = 0
        for place in reversed(range(len(keys))):
            block = self.pool.find(keys[place], group)
            run = run + 1 if block else 0
            found[place] = block or self.pool.null
            if run >= need:
                return [*[self.pool.null] * place, *found[place : place + run]]
        return found[:run]

    def _needed(
        self, request: SimRequest, tokens: int, adopted: int, hit: Sequence[Sequence[Block]], capped: bool = False
    ) -> int:
        """Free blocks that the request would take in order to have slots for so many tokens."""
        size, needed = self._shape.tokens_per_block, 0
        table = self._tables.get(request.request_id)
        for group, window in enumerate(self._shape.windows):
            total = -(-tokens // size)
            if capped and window:
                total = min(total, -(-(window - 1 + self._shape.budget * self._shape.depth) // size) + 1)
            if table is not None:
                needed += max(0, total - len(table[group]))
                continue
            blocks = hit[group] if hit else ()
            skipped = self._skipped(window, adopted)
            needed += max(0, total - max(skipped, len(blocks)))
            needed += sum(block.refs == 0 and not block.is_null for block in blocks[skipped:])
        return needed

    def _adopt(self, request: SimRequest, hit: Sequence[Sequence[Block]], adopted: int) -> None:
        """The request begins with the blocks of its hit, but for those that its windows have left behind."""
        tables = []
        for group, window in enumerate(self._shape.windows):
            skipped = self._skipped(window, adopted)
            kept = list(hit[group][skipped:]) if hit else []
            self.pool.share(kept)
            tables.append([*[self.pool.null] * skipped, *kept])
        self._tables[request.request_id] = tables
        if hit:
            self._cached[request.request_id] = len(hit[0])

    def _extend(self, request: SimRequest, tokens: int) -> list[list[Block]]:
        added = []
        for table in self._tables[request.request_id]:
            new = self.pool.take(max(0, -(-tokens // self._shape.tokens_per_block) - len(table)))
            table += new
            added.append(new)
        return added
