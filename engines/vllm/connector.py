"""vLLM's KV connector: the only module here that imports vLLM, which loads it by ``kv_connector_module_path``.

It translates between vLLM's calls and ``bookkeeping`` (in the scheduler) or ``working`` (in each worker). What is
copied in ``save_kv_layer`` is copied before it returns, so nothing of vLLM's memory is read later and no request's
blocks wait for an export. Roles flip because a node starts it as ``kv_both``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats
from vllm.model_executor.models.utils import extract_layer_index

from engines.vllm.attaching import Identity, attach
from engines.vllm.blocks import LayerBlocks
from engines.vllm.bookkeeping import Bookkeeping
from engines.vllm.mapping import CacheLayer, Unservable, map_layers
from engines.vllm.messages import PoolInfo
from engines.vllm.packing import check_packing, packing_by_name
from engines.vllm.stats import COUNTS
from engines.vllm.steps import Step
from engines.vllm.working import Working

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

SOCKET = "prfaas_socket"
BLOCK_TOKENS = "prfaas_block_tokens"


@dataclass
class StepMetadata(KVConnectorMetadata):
    """A step's work, as vLLM carries it from its scheduler to its workers."""

    step: Step


class PrfaasConnector(KVConnectorBase_V1, SupportsHMA):
    """See the module. ``kv_connector_extra_config`` names the node's socket and its block size."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config=vllm_config, role=role, kv_cache_config=kv_cache_config)
        check_parallelism(vllm_config)
        extra = self._kv_transfer_config.kv_connector_extra_config
        self._socket = str(extra[SOCKET])
        self._bookkeeping = Bookkeeping(int(extra[BLOCK_TOKENS]))
        self._working: Working | None = None

    # ---- in the scheduler

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens that the node's pool has behind the local ones; they are always loaded asynchronously."""
        found = self._bookkeeping.matched(request, num_computed_tokens)
        return found, found > 0

    def update_state_after_alloc(self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int) -> None:
        """The load's target, or that nothing is to be loaded."""
        self._bookkeeping.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> StepMetadata:
        """What the workers do in this step."""
        return StepMetadata(self._bookkeeping.step(scheduler_output))

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Blocks stay for one more step where the end of an answer is to be kept."""
        return self._bookkeeping.finished(request, block_ids), None

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        """A load fills a request's own blocks in every group."""
        return tuple(range(len(self._kv_cache_config.kv_cache_groups)))

    # ---- in each worker

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        """Connect to the node. Raises Unservable or UnknownPacking, having told the node, for what cannot be."""
        config = self._vllm_config
        parallel = config.parallel_config
        blocks = tuple(group.kv_cache_spec.block_size for group in self._kv_cache_config.kv_cache_groups)
        names = sorted({packing_name(config, name) for name in kv_caches})
        rank = parallel.rank % parallel.tensor_parallel_size
        identity = Identity(rank, parallel.tensor_parallel_size, ",".join(names), blocks)

        def layers(info: PoolInfo) -> Mapping[str, LayerBlocks]:
            described = describe_layers(self._kv_cache_config, kv_caches)
            places = map_layers(info.layout, described, blocks, identity.rank, identity.ranks)
            dims = {layer.name: (layer.k_dim, layer.v_dim) for layer in described}
            found = {}
            for place in places:
                cache, (k_dim, v_dim) = kv_caches[place.name], dims[place.name]
                if cache.device.type != "cpu":
                    raise Unservable(f"a KV cache on {cache.device.type} is not exchanged by this connector, only cpu")
                name = packing_name(config, place.name)
                packing = packing_by_name(name, place.block_tokens, k_dim, v_dim)
                check_packing(packing, name, cache, k_dim, kernel_store(name))
                found[place.name] = LayerBlocks(place, cache, packing)
            return found

        self._working = attach(self._socket, identity, layers)

    def bind_connector_metadata(self, connector_metadata: KVConnectorMetadata) -> None:
        """A step begins."""
        super().bind_connector_metadata(connector_metadata)
        assert isinstance(connector_metadata, StepMetadata)
        if self._working is not None:
            self._working.begin_step(connector_metadata.step)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Loads began with the step and need no forward pass."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """No forward pass runs on what is still being loaded."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Copy what this layer's part of the step made final."""
        if self._working is not None:
            self._working.save_layer(layer_name)

    def wait_for_save(self) -> None:
        """All is copied already; what the step completed is offered."""
        if self._working is not None:
            self._working.end_step()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        """Loads that are over, and requests whose blocks may go."""
        if self._working is None:
            return KVConnectorTransferResults()
        found = self._working.results()
        return KVConnectorTransferResults(set(found.sent), set(found.loaded), set(found.failed))

    def get_kv_connector_stats(self) -> KVConnectorStats | None:
        """Counts since the last step."""
        counts = {} if self._working is None else self._working.tally.take()
        return PrfaasStats(data=dict(counts)) if counts else None

    # ---- of the class

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Layer hooks are not called in the replay of a full graph."""
        return True

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> KVConnectorStats:
        """Counts as they came from a worker."""
        return PrfaasStats(data=dict(data or {}))

    @classmethod
    def build_prom_metrics(
        cls,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> KVConnectorPromMetrics:
        """Counters beside vLLM's own."""
        return PrfaasMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)


# Beside others its statistics are found by its name alone, in processes that came to this module by its path.
KVConnectorFactory.register_connector(PrfaasConnector.__name__, __name__, PrfaasConnector.__name__)


class PrfaasStats(KVConnectorStats):
    """Counts by name; absent ones are 0."""

    def reset(self) -> None:
        """Begin anew."""
        self.data.clear()

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """The sum of both."""
        names = {*self.data, *other.data}
        return PrfaasStats(data={name: self.data.get(name, 0) + other.data.get(name, 0) for name in names})

    def reduce(self) -> dict[str, int | float]:
        """For vLLM's log line."""
        return {name: round(count, 3) for name, count in sorted(self.data.items())}

    def is_empty(self) -> bool:
        """Whether nothing was counted."""
        return not self.data


class PrfaasMetrics(KVConnectorPromMetrics):
    """One counter for each of ``stats.COUNTS``."""

    def __init__(
        self,
        vllm_config: VllmConfig,
        metric_types: dict[Any, Any],
        labelnames: list[str],
        per_engine_labelvalues: dict[int, list[object]],
    ) -> None:
        super().__init__(vllm_config, metric_types, labelnames, per_engine_labelvalues)
        self._counters = {
            name: self._counter_cls(name=f"vllm:prfaas_{name}", documentation=f"{what}.", labelnames=labelnames)
            for name, what in COUNTS.items()
        }

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add what was counted."""
        for name, count in transfer_stats_data.items():
            self._counters[name].labels(*self.per_engine_labelvalues[engine_idx]).inc(count)


def check_parallelism(config: VllmConfig) -> None:
    """Raise Unservable for servers whose KV is spread in ways that this connector does not put together again."""
    parallel = config.parallel_config
    for field in ("pipeline_parallel_size", "data_parallel_size", "decode_context_parallel_size"):
        size = getattr(parallel, field, 1)
        if size != 1:
            raise Unservable(
                f"{field} is {size}: only tensor parallelism is exchanged; start one node for each replica"
            )
    if config.speculative_config is not None:
        raise Unservable("speculative decoding keeps a draft model's KV, which the model's layout does not have")


def describe_layers(config: KVCacheConfig, caches: Mapping[str, torch.Tensor]) -> list[CacheLayer]:
    """vLLM's cache, layer by layer."""
    found = []
    for index, group in enumerate(config.kv_cache_groups):
        for name in group.layer_names:
            spec = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)
            found.append(
                CacheLayer(
                    name=name,
                    index=extract_layer_index(name),
                    group=index,
                    kind=type(spec).__name__,
                    window=getattr(spec, "sliding_window", None),
                    heads=getattr(spec, "num_kv_heads", 0),
                    k_dim=getattr(spec, "head_size", 0),
                    v_dim=getattr(spec, "head_size_v", 0),
                    dtype=str(caches[name].dtype).removeprefix("torch.") if name in caches else "none",
                )
            )
    return found


def packing_name(config: VllmConfig, layer: str) -> str:
    """What the layer's attention calls its packing; "" where it does not say."""
    module = config.compilation_config.static_forward_context.get(layer)
    return str(getattr(module, "isa", ""))


def kernel_store(packing: str) -> Any:
    """The kernel that writes K and V into blocks, as ``packing.check_packing`` wants it."""
    from vllm import _custom_ops as ops

    def store(k: torch.Tensor, v: torch.Tensor, cache: torch.Tensor, slots: torch.Tensor) -> None:
        blocks, heads, tokens, _ = cache.shape
        keys, values = cache.view(blocks, heads, 2 * tokens, -1).chunk(2, dim=2)
        ops.cpu_attn_reshape_and_cache(
            k, v, keys, values, slots, packing, k_scale=1.0, v_scale=1.0, kv_cache_dtype="auto"
        )

    return store
