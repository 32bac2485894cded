"""The ways that one request could take once its decode node is known: what each sends, takes and costs."""

from __future__ import annotations

from scheduler.codec_choice import choose_codec
from scheduler.cost import price, threshold_s, waiting_s
from scheduler.decision import Bar, Move, Option
from scheduler.facts import FREE, ClusterFacts, DecodeNodeFacts, Facts, PrefillNodeFacts
from scheduler.moves import Source
from scheduler.predict import compute_s, pace
from scheduler.sizes import last_chunk, transfer_bytes
from scheduler.values import PolicyValues


class Options:
    """Builds the options of one request, all of which decode on the same node.

    ``queued``: on some node that it would be prefilled on others wait or run, so that the threshold may bend.
    """

    __slots__ = (
        "_decoders",
        "_hour",
        "_last_share",
        "_last_tokens",
        "_nbytes",
        "_start",
        "_threshold_tokens",
        "decode",
        "queued",
        "request",
        "stop",
        "values",
    )

    def __init__(self, facts: Facts, values: PolicyValues, decode: DecodeNodeFacts) -> None:
        request = facts.request
        self.request, self.values, self.decode = request, values, decode
        self._hour = facts.hour
        self._threshold_tokens = max(0, facts.threshold_tokens) if values.threshold_s > 0 else 0
        self.queued = False
        self._decoders = {codec.name: codec.decode_bytes_per_s for codec in decode.codecs}
        self.stop = stop = max(0, request.prompt_tokens - 1)
        self._start = start = _sent_from(decode.held_tokens, stop, request.chunk_tokens)
        self._nbytes = self._last_tokens = 0
        self._last_share = 0.0
        if start < stop:
            self._nbytes = transfer_bytes(request.sizes, start, stop)
            if request.chunk_tokens:
                self._last_tokens, nbytes = last_chunk(request.sizes, start, stop, request.chunk_tokens)
                self._last_share = nbytes / self._nbytes if self._nbytes else 0.0

    def in_place(self) -> Option:
        """The decode node prefills, while its generations wait."""
        decode, stop = self.decode, self.stop
        cached = min(decode.cached_tokens, stop)
        predicted = compute_s(cached, stop, decode.prefill)
        cost, waiting = None, 0.0
        if predicted is not None:
            predicted += decode.reload_s
            waiting = waiting_s(self.values.waiting_weight_per_s, float(decode.running), predicted)
            cost = predicted + waiting
            if self.queued and self._threshold_tokens and decode.prefill is not None:
                at_s = decode.prefill.seconds(0, self._threshold_tokens)
                cost += threshold_s(self.values.threshold_s, predicted, at_s, at_s)
        return Option(
            cluster=None,
            prefill_node=None,
            decode_node=decode.node_id,
            compute_increment=stop - cached,
            transfer_bytes=0,
            codec=self.values.local_codec,
            allowed=True,
            predicted_ttft_s=predicted,
            start=stop,
            cached_tokens=cached,
            cost_s=cost,
            waiting_s=waiting,
            decode_rank=decode.dp_rank,
        )

    def through(
        self,
        cluster: ClusterFacts,
        node: PrefillNodeFacts,
        source: Source | None = None,
        bounded: bool = False,
        home_s: float | None = None,
    ) -> Option:
        """Prefill on ``node``, after a prefix was moved there from ``source``.

        ``bounded``: it must not be congested, nor predicted slower than ``home_s``, where that was predicted. For who
        waits a congested link carries one transfer at a time.
        """
        values, request, stop, link = self.values, self.request, self.stop, cluster.link
        cached, arrives, move = min(node.cached_tokens, stop), node.reload_s, None
        if source is not None:
            move = self._move(source, node)
            cached, arrives = move.stop, move.predicted_s
        paced = pace(node, link, cached, stop, self._last_tokens, self._last_share, arrives, cluster.ttft_ratio)
        default = values.local_codec if cluster.local else values.remote_codec
        choice = choose_codec(default, request.quality, self._nbytes, node, self._decoders, paced)
        codec = choice.chosen
        predicted = codec.predicted_ttft_s
        wire_bytes = self._nbytes if codec.wire_bytes is None else codec.wire_bytes
        cost, waiting, money = None, 0.0, 0.0
        if paced is not None and predicted is not None:
            weight, rate = values.waiting_weight_per_s, paced.rate
            waiting = waiting_s(weight, paced.begin_s, paced.compute_s)
            waiting += waiting_s(weight, paced.queue_s, wire_bytes / rate)
            if cluster.prices is not FREE:
                money = price(cluster.prices, self._hour, paced.compute_s, 0 if cluster.local else wire_bytes)
            if source is not None and move is not None:
                money += price(source.cluster.prices, self._hour, 0.0, move.nbytes)
            cost = predicted + waiting + money * values.seconds_per_unit
            if self.queued and self._threshold_tokens:
                cost += self._bent(cluster, node, paced.compute_s)
            if node.node_id in request.session_nodes:
                cost -= values.session_s
        barred = None
        if bounded:
            slower = predicted is not None and home_s is not None and predicted > home_s + values.slack_s
            if slower and not link.fresh:
                # a way that is avoided on the word of an old measurement would never be measured again
                predicted, cost, slower = None, None, False
            if link.congested and (link.queued_bytes > 0 or request.waited_s <= 0):
                barred = Bar.CONGESTED
            elif slower:
                barred = Bar.SLOWER
            elif predicted is None and link.queued_bytes > 0:
                barred = Bar.BEING_MEASURED
        return Option(
            cluster.name,
            node.node_id,
            self.decode.node_id,
            stop - cached,
            self._nbytes,
            codec.name,
            barred is None,
            predicted,
            codec.quality,
            wire_bytes,
            choice.codec_s,
            choice.options,
            self._start,
            cached,
            cost,
            waiting,
            money,
            barred,
            move,
            node.dp_rank,
            self.decode.dp_rank,
        )

    def _bent(self, cluster: ClusterFacts, node: PrefillNodeFacts, service_s: float) -> float:
        """What the threshold makes of prefilling here; nothing where there is nothing to prefill."""
        curve = node.prefill
        if curve is None:
            return 0.0
        quickest = at_s = curve.seconds(0, self._threshold_tokens)
        for other in cluster.nodes:
            if other.prefill is not curve and other.prefill is not None:
                quickest = min(quickest, other.prefill.seconds(0, self._threshold_tokens))
        return threshold_s(self.values.threshold_s, service_s, at_s, quickest)

    def _move(self, source: Source, node: PrefillNodeFacts) -> Move:
        stop = source.node.cached_tokens
        start = _sent_from(node.held_tokens, stop, self.request.chunk_tokens)
        nbytes = transfer_bytes(self.request.sizes, start, stop)
        return Move(source.cluster.name, source.node.node_id, start, stop, nbytes, source.arrives_s(nbytes))


def _sent_from(held: int, stop: int, chunk_tokens: int) -> int:
    """Where a transfer begins. What is final only at ``stop`` goes with its last chunk, even if all blocks are held."""
    if held < stop:
        return held
    return (stop - 1) // chunk_tokens * chunk_tokens if chunk_tokens and stop > 0 else 0
