"""vLLM's scheduler, block pool and attention kernels in miniature, as strict as the real ones are with a connector.

It frees blocks that a window has left at the next schedule, gives them to whoever asks next, poisons what is freed,
asks again after a preemption, calls layer hooks in layer order, and dies where a connector reports what it must not.
Block ids are unique over all groups, which share memory, and 0 is nobody's.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from engines.vllm.blocks import LayerBlocks
from engines.vllm.bookkeeping import Bookkeeping, JobParams
from engines.vllm.mapping import CacheLayer, map_layers
from engines.vllm.memory import TORCH_DTYPES
from engines.vllm.packing import TransposedKeys
from engines.vllm.steps import Blocks
from engines.vllm.working import Results, Working
from kvcache.layout import DType, GroupKind, GroupSpec, KVLayout, LayerSpec, TensorSpec

PER_GROUP = 3
POISON = float("nan")


def hybrid_layout(heads: int = 2, dim: int = 8, window: int = 40, layers: int = 6) -> KVLayout:
    """Sliding layers with a full one at the end, as Gemma has them."""
    tensors = tuple(TensorSpec(name, DType.BFLOAT16, (heads, dim)) for name in ("k", "v"))
    full = GroupSpec(GroupKind.FULL, (LayerSpec(layers - 1, tensors),))
    sliding = GroupSpec(GroupKind.SLIDING, tuple(LayerSpec(n, tensors) for n in range(layers - 1)), window)
    return KVLayout((full, sliding))


def content(ids: Sequence[int], layer: int, tensor: int, start: int, stop: int, spec: TensorSpec) -> Tensor:
    """What the kernels "compute" for tokens [start, stop): it follows from all tokens before, and is exact in bf16."""
    sums = torch.tensor([sum(ids[: at + 1]) * 7 + at for at in range(start, stop)])
    heads, dim = spec.shape
    where = torch.arange(heads * dim).reshape(1, heads, dim) * 3 + layer * 11 + tensor * 5
    return ((sums.reshape(-1, 1, 1) + where) % 251).to(TORCH_DTYPES[spec.dtype])


@dataclass
class FakeRequest:
    """A request; ``local`` tokens were found in vLLM's own prefix cache when it was admitted."""

    request_id: str
    ids: list[int]
    kv_transfer_params: dict[str, Any] | None
    max_tokens: int
    num_computed_tokens: int = 0
    num_prompt_tokens: int = 0
    status: str = "waiting"
    said: int = 0
    blocks: list[list[int]] = field(default_factory=list)
    failed: bool = False

    def __post_init__(self) -> None:
        self.num_prompt_tokens = len(self.ids)


@dataclass
class _Cached:
    req_ids: list[str]
    num_computed_tokens: list[int]


@dataclass
class _New:
    req_id: str
    num_computed_tokens: int


@dataclass
class _BlockState:
    blocks: dict[str, Blocks]

    def get_block_ids(self, req_id: str) -> Blocks | None:
        return self.blocks.get(req_id)


@dataclass
class _Output:
    scheduled_new_reqs: list[_New]
    scheduled_cached_reqs: _Cached
    num_scheduled_tokens: dict[str, int]
    total_num_scheduled_tokens: int
    kv_connector_block_state: _BlockState | None


class FakeVllm:
    """One server of ``ranks`` workers. ``step`` is one step of its engine."""

    def __init__(
        self,
        layout: KVLayout,
        node_block_tokens: int,
        *,
        block_tokens: int = 16,
        blocks: int = 200,
        budget: int = 64,
        ranks: int = 1,
        policy: str = "fail",
    ) -> None:
        self.layout = layout
        self.shift = 0
        """Added to every token when KV is computed: what is computed twice can be told apart."""
        self.requests: dict[str, FakeRequest] = {}
        self.finished: list[FakeRequest] = []
        self.workers: list[Working] = []
        """One for each rank, to be put here by whoever connects them."""
        self._size = block_tokens
        self._budget = budget
        self._ranks = ranks
        self._policy = policy
        self._free = list(range(blocks - 1, 0, -1))
        self._shared: dict[tuple[int, ...], list[int]] = {}
        self._pinned: dict[str, FakeRequest] = {}
        self._loads_reported: Counter[str] = Counter()
        self._described = self._describe()
        self.groups = 1 + max(layer.group for layer in self._described)
        self.bookkeeping = Bookkeeping(node_block_tokens)
        self.tensors = [self._storage(blocks) for _ in range(ranks)]
        self.layers: list[dict[str, LayerBlocks]] = []
        """By rank and by name: what a connector would find registered."""
        for rank, storage in enumerate(self.tensors):
            places = map_layers(layout, self._described, [block_tokens] * self.groups, rank, ranks)
            self.layers.append(
                {place.name: LayerBlocks(place, storage[place.name], self._packing(place.g)) for place in places}
            )

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def add(self, name: str, ids: Sequence[int], params: JobParams | None, max_tokens: int = 1) -> FakeRequest:
        """A request over HTTP."""
        request = FakeRequest(name, list(ids), params.as_params() if params else None, max_tokens)
        self.requests[name] = request
        return request

    def preempt(self, name: str) -> None:
        """Out of blocks: a request loses all of its and starts anew."""
        request = self.requests[name]
        self._release(request)
        request.num_computed_tokens, request.status = 0, "waiting"

    def abort(self, name: str) -> None:
        """The client has left. A load under way keeps its blocks until the connector says that it is over."""
        request = self.requests[name]
        self._finish(request, keep=request.status == "loading")

    def run(self, steps: int = 200) -> None:
        """Step until nothing is left."""
        for _ in range(steps):
            if not self.requests and not self._pinned:
                self.step()
                return
            self.step()
        raise AssertionError(f"still at hand: {list(self.requests)} {list(self._pinned)}")

    def step(self) -> None:
        """Schedule, compute, and take in what the workers report."""
        scheduled = self._schedule()
        running = {name: self.requests[name] for name in scheduled}
        first = [name for name, request in running.items() if request.status == "fresh"]
        state = _BlockState({name: tuple(list(ids) for ids in request.blocks) for name, request in running.items()})
        output = _Output(
            [_New(name, running[name].num_computed_tokens) for name in first],
            _Cached(
                [name for name in running if name not in first],
                [request.num_computed_tokens for name, request in running.items() if name not in first],
            ),
            scheduled,
            sum(scheduled.values()),
            state,
        )
        step = self.bookkeeping.step(output)
        for rank, worker in enumerate(self.workers):
            worker.begin_step(step)
            if scheduled:
                for layer in sorted(self._described, key=lambda each: each.index):
                    for name, request in running.items():
                        self._compute(rank, layer, request, scheduled[name])
                    worker.save_layer(layer.name)
            worker.end_step()
        for name, request in running.items():
            request.status = "running"
            request.num_computed_tokens += scheduled[name]
            if request.num_computed_tokens == len(request.ids):
                request.said += 1
                if request.said == request.max_tokens:
                    self._finish(request)
                else:
                    request.ids.append(100 + request.said)
        self._report()

    def held(self, request: FakeRequest, rank: int, g: int, n: int, start: int, stop: int) -> tuple[Tensor, Tensor]:
        """K and V of tokens that a request has in its blocks, straight from the tensors."""
        index = self.layout.groups[g].layers[n].index
        layer = next(each for each in self._described if each.index == index)
        rows: list[list[Tensor]] = [[], []]
        for at in range(start, stop):
            block = request.blocks[layer.group][at // self._size]
            assert block, f"token {at} of layer {index} is in the null block"
            k, v = self._parts(self.tensors[rank][layer.name], g)
            rows[0].append(k[block, :, :, at % self._size])
            rows[1].append(v[block, :, at % self._size])
        return torch.stack(rows[0]), torch.stack(rows[1])

    def layer_blocks(self, request: FakeRequest) -> list[tuple[str, list[int]]]:
        """Every layer, and a request's blocks in its group."""
        return [(layer.name, request.blocks[layer.group]) for layer in self._described]

    # ---- inside

    def _describe(self) -> list[CacheLayer]:
        found = []
        group = 0
        for spec in self.layout.groups:
            size = PER_GROUP if spec.kind is GroupKind.SLIDING else len(spec.layers)
            for at, layer in enumerate(spec.layers):
                heads, dim = layer.tensors[0].shape
                kind = "SlidingWindowSpec" if spec.window else "FullAttentionSpec"
                name = f"model.layers.{layer.index}.self_attn.attn"
                number, own = group + at // size, max(1, heads // self._ranks)
                dtype = str(layer.tensors[0].dtype)
                found.append(CacheLayer(name, layer.index, number, kind, spec.window, own, dim, dim, dtype))
            group += math.ceil(len(spec.layers) / size)
        return found

    def _storage(self, blocks: int) -> dict[str, Tensor]:
        """Layers of one place in every group share one tensor, as they do in vLLM."""
        found: dict[str, Tensor] = {}
        places: dict[int, Tensor] = {}
        seen: dict[int, int] = {}
        for layer in self._described:
            at = seen.get(layer.group, 0)
            seen[layer.group] = at + 1
            if at not in places:
                shape = (blocks, layer.heads, self._size, layer.k_dim + layer.v_dim)
                places[at] = torch.full(shape, POISON, dtype=torch.bfloat16)
            found[layer.name] = places[at]
        return found

    def _packing(self, g: int) -> TransposedKeys:
        k, v = self.layout.groups[g].layers[0].tensors
        return TransposedKeys(self._size, k.shape[1], v.shape[1])

    def _parts(self, cache: Tensor, g: int) -> tuple[Tensor, Tensor]:
        k, _ = self.layout.groups[g].layers[0].tensors
        flat = cache.view(cache.shape[0], cache.shape[1], -1)
        split = self._size * k.shape[1]
        return flat[..., :split].view(*flat.shape[:2], -1, self._size), flat[..., split:].view(
            *flat.shape[:2], self._size, -1
        )

    def _window(self, group: int) -> int | None:
        return next(layer.window for layer in self._described if layer.group == group)

    def _schedule(self) -> dict[str, int]:
        scheduled: dict[str, int] = {}
        budget = self._budget
        for request in list(self.requests.values()):
            if request.status == "waiting" and not self._admit(request):
                continue
            if request.status == "loading" or not budget:
                continue
            tokens = min(budget, len(request.ids) - request.num_computed_tokens)
            self._slide(request)
            self._allocate(request, request.num_computed_tokens + tokens, request.num_computed_tokens)
            scheduled[request.request_id] = tokens
            budget -= tokens
        return scheduled

    def _admit(self, request: FakeRequest) -> bool:
        """Look into the prefix cache, ask the connector, allocate; True where it can compute in this step."""
        local = 0
        request.blocks = [[] for _ in range(self.groups)]
        if not request.num_computed_tokens:
            local = self._hit(request)
            external = self.bookkeeping.matched(request, local)
            assert self.bookkeeping.matched(request, local) == external, "asking twice changes nothing"
            assert local + external < len(request.ids), "a token is left to compute"
            self._allocate(request, local + external, local + external)
            self.bookkeeping.allocated(request, tuple(list(ids) for ids in request.blocks), external)
            request.num_computed_tokens = local + external
            if external:
                request.status = "loading"
                return False
        request.status = "fresh"
        return True

    def _hit(self, request: FakeRequest) -> int:
        """The longest run of whole blocks that some request has left in the cache; their ids are shared."""
        for count in range((len(request.ids) - 1) // self._size, 0, -1):
            known = self._shared.get(tuple(request.ids[: count * self._size]))
            if known is None:
                continue
            per = len(known) // self.groups
            for group in range(self.groups):
                request.blocks[group] = known[group * per : (group + 1) * per]
            return count * self._size
        return 0

    def share(self, request: FakeRequest, tokens: int) -> None:
        """Keep a running request's first blocks for others with the same beginning, for good."""
        count = tokens // self._size
        self._shared[tuple(request.ids[: count * self._size])] = [
            block for ids in request.blocks for block in ids[:count]
        ]

    def _allocate(self, request: FakeRequest, tokens: int, computed: int) -> None:
        """Blocks for the first ``tokens`` tokens; none where a window has left them when ``computed`` are done."""
        for group, ids in enumerate(request.blocks):
            window = self._window(group)
            first = 0 if window is None else max(0, computed - window + 1) // self._size
            for at in range(len(ids), math.ceil(tokens / self._size)):
                ids.append(0 if at < first else self._free.pop())

    def _slide(self, request: FakeRequest) -> None:
        for group, ids in enumerate(request.blocks):
            window = self._window(group)
            first = 0 if window is None else max(0, request.num_computed_tokens - window + 1) // self._size
            for at in range(min(first, len(ids))):
                self._give_back([ids[at]])
                ids[at] = 0

    def _give_back(self, ids: Sequence[int]) -> None:
        shared = {block for known in self._shared.values() for block in known}
        for block in ids:
            if block and block not in shared:
                for storage in self.tensors:
                    for tensor in storage.values():
                        tensor[block] = POISON
                self._free.insert(0, block)

    def _release(self, request: FakeRequest) -> None:
        for ids in request.blocks:
            self._give_back(ids)
        request.blocks = [[] for _ in range(self.groups)]

    def _finish(self, request: FakeRequest, keep: bool = False) -> None:
        blocks = tuple(list(ids) for ids in request.blocks) or tuple([] for _ in range(self.groups))
        keep = self.bookkeeping.finished(request, blocks) or keep
        del self.requests[request.request_id]
        self.finished.append(request)
        if keep:
            self._pinned[request.request_id] = request
        else:
            self._release(request)

    def _compute(self, rank: int, layer: CacheLayer, request: FakeRequest, tokens: int) -> None:
        g, n = next(
            (g, n)
            for g, group in enumerate(self.layout.groups)
            for n, each in enumerate(group.layers)
            if each.index == layer.index
        )
        begin, end = request.num_computed_tokens, request.num_computed_tokens + tokens
        shard = next(p.shard for p in self.workers[rank]._layers.values() for p in [p.place] if p.name == layer.name)
        window = self.layout.groups[g].first_token(begin)
        if begin:
            seen = self.held(request, rank, g, n, window, begin)
            assert all(bool(rows.isfinite().all()) for rows in seen), "attention reads what was never written"
        shifted = [token + self.shift for token in request.ids]
        for t, parts in enumerate(self._parts(self.tensors[rank][layer.name], g)):
            spec = self.layout.groups[g].layers[n].tensors[t]
            rows = content(shifted, layer.index, t, begin, end, spec)[:, shard.first : shard.first + shard.count]
            for at in range(begin, end):
                block = request.blocks[layer.group][at // self._size]
                if t == 0:
                    parts[block, :, :, at % self._size] = rows[at - begin]
                else:
                    parts[block, :, at % self._size] = rows[at - begin]

    def _report(self) -> None:
        results = [worker.results() for worker in self.workers]
        for name in frozenset.intersection(*(each.sent for each in results)):
            self._release(self._pinned.pop(name))
        failed = frozenset.union(*(each.failed for each in results))
        assert failed <= frozenset.union(*(each.loaded for each in results)), "a failed load is over, too"
        for name in self._loaded_by_all(results):
            if name in self._pinned:
                self._release(self._pinned.pop(name))
                continue
            request = self.requests[name]
            assert request.status == "loading", "a load is reported once, and only an asynchronous one"
            if name not in failed:
                request.status = "fresh"
            elif self._policy == "fail":
                request.failed = True
                self._finish(request)
            else:
                self.preempt(name)

    def _loaded_by_all(self, results: Sequence[Results]) -> list[str]:
        """Reports of a load come in different steps from different ranks; vLLM counts them."""
        self._loads_reported.update(name for each in results for name in each.loaded)
        done = [name for name, count in self._loads_reported.items() if count == self._ranks]
        for name in done:
            del self._loads_reported[name]
        return done

    def wait_for(self, condition: Callable[[], bool], within_s: float = 5.0) -> None:
        """Step until it is true: loads run on threads of their own."""
        deadline = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < deadline, "it never came true"
            self.step()
