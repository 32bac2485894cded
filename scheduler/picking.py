"""Which node of a cluster: the prefill node that would be done first, the decode node that is least in others' way."""

from __future__ import annotations

from collections.abc import Sequence

from scheduler.facts import DecodeNodeFacts, PrefillNodeFacts, RequestFacts
from scheduler.predict import compute_s, wait_s


def decode_node(nodes: Sequence[DecodeNodeFacts], request: RequestFacts, slack: int) -> DecodeNodeFacts | None:
    """The decode node with the longest held prefix among those with a slot free and few generations.

    Few: no more than ``slack`` above the fewest. Then the session's own node wins, then fewer generations, then the
    name. Suspended ones only where all are.
    """
    lora, session = request.lora, request.session_nodes
    usable = [n for n in nodes if not n.suspended] or nodes
    free = [n for n in usable if n.free_slots > 0 and (not lora or lora in n.loras)]
    if not free:
        return None
    most = min([n.running for n in free]) + slack
    return min(
        [
            (-n.held_tokens, n.node_id not in session, n.running, n.node_id, n.dp_rank or 0, n)
            for n in free
            if n.running <= most
        ]
    )[-1]


def prefill_node(
    nodes: Sequence[PrefillNodeFacts], request: RequestFacts, stop: int, session_s: float
) -> PrefillNodeFacts | None:
    """The node that would be done first; a session's own node counts as ``session_s`` quicker.

    Where any speed is unmeasured, waits cannot be compared: then the fewest tokens still to compute win, and a tie goes
    to the unmeasured node, which is how it comes to be measured.
    """
    lora, session = request.lora, request.session_nodes
    best, least = None, 0.0
    for node in nodes:
        if node.free_slots <= 0 or (lora and lora not in node.loras):
            continue
        wait = node.queued_s
        if wait is None:
            wait = wait_s(node)
        compute = compute_s(node.cached_tokens, stop, node.prefill)
        if wait is None or compute is None:
            return _least_work([n for n in nodes if n.free_slots > 0 and (not lora or lora in n.loras)], stop)
        done = wait + compute
        if session and node.node_id in session:
            done -= session_s
        if best is None or done < least or (done == least and _name(node) < _name(best)):
            best, least = node, done
    return best


def _name(node: PrefillNodeFacts) -> tuple[str, int]:
    return node.node_id, node.dp_rank or 0


def _least_work(nodes: Sequence[PrefillNodeFacts], stop: int) -> PrefillNodeFacts:
    return min(
        nodes,
        key=lambda n: (
            n.queued_tokens + max(0, stop - n.cached_tokens),
            n.prefill is not None,
            *_name(n),
        ),
    )
