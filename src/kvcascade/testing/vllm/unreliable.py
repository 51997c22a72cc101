"""Another connector of vLLM's, to stand beside ours in a MultiConnector: it promises and does not keep it."""

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)

__all__ = ["UnreliableConnector"]


class _Broken(KVConnectorMetadata):
    """Device blocks whose promised content does not come in this step, and the requests that they belong to."""

    def __init__(self, blocks: list[int], requests: list[str]) -> None:
        self.blocks = blocks
        self.requests = requests


class UnreliableConnector(KVConnectorBase_V1, SupportsHMA):
    """Promises the whole prompt of every so manieth request (`every`, of the first `requests` ones); then clears
    the blocks that vLLM has allocated for it, and says that it could not fill them: before vLLM goes on with the
    request (`asynchronous`), or after it has computed with them. Stores nothing."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._every = self._kv_transfer_config.get_from_extra_config("every", 1)
        self._requests = self._kv_transfer_config.get_from_extra_config("requests", 1 << 30)
        self._asynchronous = self._kv_transfer_config.get_from_extra_config("asynchronous", False)
        self._block_size = vllm_config.cache_config.block_size
        self._met: dict[str, int] = {}
        self._promised: set[str] = set()
        self._blocks: list[int] = []
        self._loading: list[str] = []
        self._ended: set[str] = set()
        self._caches: dict[str, Any] = {}
        self._invalid: set[int] = set()

    # In the scheduler

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        number = self._met.setdefault(request.request_id, len(self._met))
        if request.request_id in self._promised or number % self._every or number >= self._requests:
            return 0, False
        whole = (request.num_prompt_tokens - 1) // self._block_size * self._block_size
        tokens = max(0, whole - num_computed_tokens)
        return tokens, self._asynchronous and tokens > 0

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        if num_external_tokens:
            self._promised.add(request.request_id)
            self._loading.append(request.request_id)
            (ids,) = blocks.get_block_ids()
            whole = (request.num_prompt_tokens - 1) // self._block_size
            self._blocks += ids[whole - num_external_tokens // self._block_size : whole]

    def build_connector_meta(self, scheduler_output: Any) -> _Broken:
        broken = _Broken(self._blocks, self._loading)
        self._blocks, self._loading = [], []
        return broken

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, None]:
        return False, None

    # In the workers

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        self._caches = kv_caches

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        broken = self._get_connector_metadata()
        for cache in self._caches.values():
            cache[broken.blocks] = 0
        self._invalid.update(broken.blocks)
        self._ended.update(broken.requests)

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_finished(self, finished_req_ids: set[str]) -> tuple[None, set[str] | None]:
        ended, self._ended = self._ended, set()
        return None, ended if self._asynchronous else None

    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid, self._invalid = self._invalid, set()
        return invalid
