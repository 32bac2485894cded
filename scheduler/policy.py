"""Where to prefill: facts in, decision out. The live gateway, a replay and a report use this same object.

The threshold tests the local compute increment, prompt tokens - 1 - the longest prefix that a local prefill node
holds: the decode engine runs the last prompt token itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from msgspec.structs import replace

from kvcache.quality import Quality
from scheduler.codec_choice import choose_codec
from scheduler.decision import Decision, Option, Reason, Refusal
from scheduler.facts import ClusterFacts, DecodeNodeFacts, Facts, PrefillNodeFacts, RouteHint
from scheduler.predict import Export, compute_s, wait_s
from scheduler.sizes import last_chunk, transfer_bytes


@dataclass(frozen=True, slots=True)
class PolicyValues:
    """Codecs inside the local cluster and across to another, while nothing better was measured, and slack.

    Both must be exact, which every request allows. A remote way counts as slower only beyond ``slower_factor`` times
    the local prediction plus ``slower_slack_s``: a difference within the error of the predictions must not overrule the
    threshold.
    """

    local_codec: str = "raw"
    remote_codec: str = "lossless"
    slower_factor: float = 1.25
    slower_slack_s: float = 0.05

    def __post_init__(self) -> None:
        for field in ("local_codec", "remote_codec"):
            if getattr(self, field) not in Quality.EXACT.codecs:
                exact = " or ".join(Quality.EXACT.codecs)
                raise ValueError(f"{field}: {getattr(self, field)!r} is no exact codec, it must be {exact}")


class RoutingPolicy:
    """Decides where a request is prefilled and decoded. Holds values only; equal facts give equal decisions."""

    def __init__(self, values: PolicyValues | None = None) -> None:
        self.values = values or PolicyValues()

    def decide(self, facts: Facts) -> Decision:
        """Choose among the local way and the reachable, permitted remote ones."""
        return _Case(facts, self.values).decide()

    def fall_back(self, facts: Facts) -> Decision:
        """Choose the local way for a request whose first attempt failed or was late."""
        return _Case(facts, self.values).fall_back()


class _Case:
    """One request's options, worked out once."""

    def __init__(self, facts: Facts, values: PolicyValues) -> None:
        self.facts = facts
        self.values = values
        self.tokens = facts.request.prompt_tokens - 1
        self.decode = _decode_node(facts.decode_nodes)
        self.local = next((c for c in facts.clusters if c.local), None)
        self.local_alive = self.local is not None and self.local.reachable and bool(self.local.nodes)

    def decide(self) -> Decision:
        if self.decode is None:
            return self._no_decode()
        in_place = self._in_place(self.decode)
        if self.tokens - self.decode.cached_tokens <= 0:
            return self._chose(in_place, Reason.NOTHING_TO_PREFILL, (in_place,))
        local = self._local(self.decode)
        remotes = self._remotes(self.decode)
        options = tuple(o for o in (local, *remotes) if o is not None)
        hint, name = self.facts.request.hint, self.facts.request.hint_cluster
        if hint is RouteHint.CLUSTER and self.local is not None and name == self.local.name:
            hint = RouteHint.LOCAL
        if hint is RouteHint.LOCAL:
            return self._locally(local, Reason.HINT, options)
        if hint is not RouteHint.NONE:
            wanted = [o for o in remotes if hint is RouteHint.REMOTE or o.cluster == name]
            best = _quickest(wanted, self.facts)
            if best is None:
                return Decision(None, Refusal.HINTED_CLUSTER_UNAVAILABLE, options, self.facts)
            return self._chose(best, Reason.HINT, options)
        if self._local_increment() <= self.facts.threshold_tokens:
            return self._locally(local, Reason.BELOW_THRESHOLD, options)
        best = _quickest(remotes, self.facts)
        if best is None:
            return self._locally(local, Reason.NO_REMOTE, options)
        if local is not None and self._slower(best, local):
            options = tuple(replace(o, allowed=o not in remotes or not self._slower(o, local)) for o in options)
            return self._locally(local, Reason.REMOTE_SLOWER, options)
        return self._chose(best, Reason.ABOVE_THRESHOLD, options)

    def fall_back(self) -> Decision:
        if self.decode is None:
            return self._no_decode()
        local = self._local(self.decode)
        if local is None:
            return Decision(None, Refusal.OVERLOADED, (), self.facts)
        return self._chose(local, Reason.FALLBACK, (local,))

    def _no_decode(self) -> Decision:
        refusal = Refusal.OVERLOADED if self.facts.decode_nodes else Refusal.NO_DECODE_NODE
        return Decision(None, refusal, (), self.facts)

    def _chose(self, option: Option, reason: Reason, options: tuple[Option, ...]) -> Decision:
        return Decision(option, reason, options, self.facts)

    def _locally(self, local: Option | None, reason: Reason, options: tuple[Option, ...]) -> Decision:
        if local is None:
            return Decision(None, Refusal.OVERLOADED, options, self.facts)
        return self._chose(local, reason if self.local_alive else Reason.NO_LOCAL_PREFILL, options)

    def _local_increment(self) -> int:
        held = self.local.nodes if self.local is not None and self.local_alive else ()
        return self.tokens - max((node.cached_tokens for node in held), default=0)

    def _local(self, decode: DecodeNodeFacts) -> Option | None:
        """The local way; in place where no local prefill node is alive, None where all of them are full."""
        if self.local is None or not self.local_alive:
            return self._in_place(decode)
        return self._option(self.local, decode)

    def _remotes(self, decode: DecodeNodeFacts) -> list[Option]:
        permitted = self.facts.request.allowed_clusters
        found = [
            self._option(cluster, decode)
            for cluster in self.facts.clusters
            if not cluster.local and cluster.reachable and (permitted is None or cluster.name in permitted)
        ]
        return [option for option in found if option is not None]

    def _in_place(self, decode: DecodeNodeFacts) -> Option:
        increment = max(0, self.tokens - decode.cached_tokens)
        predicted = compute_s(decode.cached_tokens, self.tokens, decode.prefill)
        return Option(None, None, decode.node_id, increment, 0, self.values.local_codec, True, predicted)

    def _option(self, cluster: ClusterFacts, decode: DecodeNodeFacts) -> Option | None:
        node = _prefill_node(cluster.nodes, self.tokens)
        if node is None:
            return None
        default = self.values.local_codec if cluster.local else self.values.remote_codec
        request, stop = self.facts.request, self.tokens
        increment = max(0, stop - node.cached_tokens)
        start = _sent_from(decode.held_tokens, stop, request.chunk_tokens)
        nbytes = transfer_bytes(request.sizes, start, stop)
        last = last_chunk(request.sizes, start, stop, request.chunk_tokens) if request.chunk_tokens else (0, 0)
        export = Export(stop - increment, stop, nbytes, *last)
        choice = choose_codec(default, request.quality, export, node, decode, cluster.link)
        codec = choice.chosen
        return Option(
            cluster.name,
            node.node_id,
            decode.node_id,
            increment,
            nbytes,
            codec.name,
            True,
            codec.predicted_ttft_s,
            codec.quality,
            nbytes if codec.wire_bytes is None else codec.wire_bytes,
            choice.codec_s,
            choice.options,
            start,
            stop - increment,
        )

    def _slower(self, remote: Option, local: Option) -> bool:
        """Whether both were measured and the remote way is predicted slower.

        Not on the word of an old measurement: a way that is avoided would never be measured again.
        """
        fresh = any(cluster.name == remote.cluster and cluster.link.fresh for cluster in self.facts.clusters)
        if not fresh or remote.predicted_ttft_s is None or local.predicted_ttft_s is None:
            return False
        limit = self.values.slower_factor * local.predicted_ttft_s + self.values.slower_slack_s
        return remote.predicted_ttft_s > limit


def _sent_from(held: int, stop: int, chunk_tokens: int) -> int:
    """Where a transfer begins. What is final only at ``stop`` goes with its last chunk, even if all blocks are held."""
    if held < stop:
        return held
    return (stop - 1) // chunk_tokens * chunk_tokens if chunk_tokens else 0


def _decode_node(nodes: Sequence[DecodeNodeFacts]) -> DecodeNodeFacts | None:
    """The decode node with a free slot, the fewest generations and the longest cached prefix; ties by name."""
    free = [node for node in nodes if node.free_slots > 0]
    return min(free, key=lambda n: (n.running, -n.cached_tokens, n.node_id), default=None)


def _prefill_node(nodes: Sequence[PrefillNodeFacts], tokens: int) -> PrefillNodeFacts | None:
    """The node that would be done first.

    Where any speed is unmeasured, waits cannot be compared: then the fewest tokens still to compute win, and a tie goes
    to the unmeasured node, which is how it comes to be measured.
    """
    free = [node for node in nodes if node.free_slots > 0]

    def work(node: PrefillNodeFacts) -> int:
        return node.queued_tokens + max(0, tokens - node.cached_tokens)

    def done_s(node: PrefillNodeFacts) -> float | None:
        wait, compute = wait_s(node), compute_s(node.cached_tokens, tokens, node.prefill)
        return None if wait is None or compute is None else wait + compute

    waits = {node.node_id: done_s(node) for node in free}
    measured = {name: wait for name, wait in waits.items() if wait is not None}
    if len(measured) == len(free):
        return min(free, key=lambda n: (measured[n.node_id], n.node_id), default=None)
    return min(free, key=lambda n: (work(n), n.prefill is not None, n.node_id), default=None)


def _quickest(options: Sequence[Option], facts: Facts) -> Option | None:
    """The option of least predicted TTFT; where one is unmeasured, of the least queue. Ties by cluster name."""
    predicted = [o.predicted_ttft_s for o in options if o.predicted_ttft_s is not None]
    if len(predicted) == len(options):
        return min(options, key=lambda o: (o.predicted_ttft_s or 0.0, o.cluster or ""), default=None)
    queued = {n.node_id: n.queued_tokens for c in facts.clusters for n in c.nodes}
    return min(options, key=lambda o: (queued[o.prefill_node or ""], o.cluster or ""), default=None)
