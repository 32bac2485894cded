"""Messages of the control stream between a node and its gateway: msgpack maps with a type tag, bounded in size.

A node dials the gateway and keeps one stream open; jobs and cancels come down, heartbeats, progress and tokens go up.
Nothing here names an address that a peer chose for us: addresses come from the registry alone. Unknown fields are
ignored, so that gateways and nodes of neighbouring versions talk.
"""

from __future__ import annotations

import msgspec

from kvcache.engine_figures import EngineFigures
from kvcache.kv_audit import AuditKv, KvAudited
from kvcache.quality import Quality
from kvcache.renewal import CertificateIssued, RenewCertificate
from kvcache.replicas import Already, Leaving, Siblings
from kvcache.tiers.report import TierReport
from kvcache.wire import Role

MAX_MESSAGE_BYTES = 16 << 20


class KvAddress(msgspec.Struct, frozen=True):
    """Where a node's KV port is reached: the advertised address, which may differ from the bound one."""

    host: str
    port: int


class KvPeer(msgspec.Struct, frozen=True):
    """Whom to dial: the registered address, and which node, incarnation and key must be proved there."""

    node_id: str
    incarnation: str
    public_key: bytes
    address: KvAddress


class ModelInfo(msgspec.Struct, frozen=True):
    """What a node serves. ``fingerprint`` holds the named parts, so that a mismatch can name the field."""

    name: str
    fingerprint: dict[str, str]
    context_tokens: int
    chunk_tokens: int
    vocab_size: int


class Sampling(msgspec.Struct, frozen=True):
    """How to choose tokens. ``temperature`` 0 is greedy; ``seed`` None draws from the system's entropy.

    ``logprobs`` None asks for none, n for the n likeliest beside the chosen one, -1 for the whole vocabulary.

    ``logit_bias`` is added to the logits of tokens, as (id, bias) pairs. ``repetition_penalty`` weakens tokens of the
    prompt and of the answer, the other two those of the answer: once for being there, and for each time. ``min_p`` bars
    what is less likely than that share of the likeliest. Engines before ``Join.max_answers`` know none of these.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()

    @property
    def adjusts(self) -> bool:
        """Whether logits are changed before a token is chosen, or what is unlikely is barred."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.min_p)
        return any(penalties) or self.repetition_penalty != 1 or bool(self.logit_bias)


class TokenLogprob(msgspec.Struct, frozen=True):
    """One token of the vocabulary and its log-probability under the model, before temperature and truncation."""

    token_id: int
    logprob: float


class CodecWork(msgspec.Struct, frozen=True):
    """What a set of codecs has done on a node: raw bytes and processor seconds, digests included, 0 for nothing.

    ``wire_bytes`` is what the ``encoded_bytes`` became.
    """

    codec: str
    encoded_bytes: int = 0
    wire_bytes: int = 0
    encode_s: float = 0.0
    decoded_bytes: int = 0
    decode_s: float = 0.0


# ---- node -> gateway


class Join(msgspec.Struct, frozen=True, tag=True):
    """First message of a node. ``kv_address`` None says that this node only dials.

    ``codecs`` are the sets of codecs that it has for this model, as it measured them when it started, and
    ``encoders`` is how many processors encode one transfer at once. A node that ``probes`` understands ProbeLink,
    one with ``kv_events`` ReplayKvEvents, one that ``converts`` ChangeRole, one that ``moves`` SharePrefix and
    TakePrefix; ``role_epoch`` is that of the last ChangeRole that it obeyed. ``max_running`` is how many answers it
    speaks at once, 0 for one that does not say.
    ``max_answers`` is how many answers to one prompt it gives at most, 0 for a node that knows no penalties either.
    ``transports`` are what it can send and receive KV by; a node that names none has TCP.
    One that ``audits`` understands AuditKv.
    ``topology`` is its machine as ``kvcache.topology`` writes it, b"" where it says nothing; one that cannot be read
    keeps nobody out.
    One with ``siblings`` understands Siblings, Leaving and Already; ``gateways`` are those that it holds a stream to
    already, by the names in their Welcomes.
    """

    node_id: str
    incarnation: str
    cluster: str
    role: Role
    public_key: bytes
    kv_address: KvAddress | None
    model: ModelInfo
    version: str
    max_queue: int
    codecs: tuple[CodecWork, ...] = ()
    encoders: int = 1
    probes: bool = False
    kv_events: bool = False
    converts: bool = False
    role_epoch: int = 0
    max_running: int = 0
    topology: bytes = b""
    moves: bool = False
    siblings: bool = False
    gateways: tuple[str, ...] = ()
    max_answers: int = 0
    transports: tuple[str, ...] = ()
    audits: bool = False


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Once a second, and at once after a change of ``accepting``. Rates are 0 while nothing was measured.

    ``codecs`` is what those of the Join have done in transfers since the node started. ``detail`` says what keeps the
    node from taking or beginning work, "" where nothing does; other nodes' troubles are not its own.

    ``tiers`` are those below the pool, the fastest first.
    Pages that the prefix cache can let go of count as free; it keeps ``pages_cached``. Since the node started
    ``cache_hits`` jobs have found ``cache_hit_tokens`` there, and ``pages_evicted`` were let go of. ``engine`` is what
    an engine with a cache of its own says of that.

    Other gateways than the one that hears this gave the node ``others_jobs`` that are at hand, with ``others_tokens``
    of prompts to compute. It plays ``role`` since the ChangeRole of ``role_epoch``, whichever gateway gave that. Nodes
    before this version leave both None.

    The node remembers ``tickets`` that were used or wait for their job, and has turned away ``refused_tickets``. It
    runs ``tasks``, and has ``files`` open.
    """

    accepting: bool
    queued_jobs: int
    queued_tokens: int
    running: int
    pages_total: int
    pages_free: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    open_transfers: int
    detail: str = ""
    links: tuple[LinkReport, ...] = ()
    codecs: tuple[CodecWork, ...] = ()
    pages_cached: int = 0
    cache_hits: int = 0
    cache_hit_tokens: int = 0
    pages_evicted: int = 0
    tiers: tuple[TierReport, ...] = ()
    engine: EngineFigures | None = None
    others_jobs: int | None = None
    others_tokens: int = 0
    role: Role | None = None
    role_epoch: int = 0
    tickets: int = 0
    refused_tickets: int = 0
    tasks: int = 0
    files: int = 0


class LinkReport(msgspec.Struct, frozen=True):
    """One KV peer as the kernel and the stream see it, over all connections to it. 0 means not measured.

    ``delivery_bytes_per_s`` is the sum of the connections' last rates that were the path's limit; ``app_limited`` says
    that lately there was too little to send to measure it anew. ``paced_bytes_per_s`` is what the kernel is told not to
    exceed, 0 without a limit.

    The others are of what this node sends. ``least_rtt_s`` is the path's own round trip, ``bytes_acked`` and
    ``bytes_resent`` count since the peer began, and ``probe_bytes`` is the part of both that measured idle connections.
    In the last second or so the path did ``at_least_bytes_per_s``, and where it was the limit no more than
    ``at_most_bytes_per_s``. For ``stalled_s`` nothing has been acknowledged though much waited.
    """

    peer_node: str
    rtt_s: float
    goodput_bytes_per_s: float
    bytes_received: int
    bytes_sent: int
    retransmits: int
    connections: int = 0
    connections_lost: int = 0
    delivery_bytes_per_s: float = 0.0
    app_limited: bool = True
    paced_bytes_per_s: float = 0.0
    least_rtt_s: float = 0.0
    bytes_acked: int = 0
    bytes_resent: int = 0
    probe_bytes: int = 0
    at_least_bytes_per_s: float = 0.0
    at_most_bytes_per_s: float = 0.0
    stalled_s: float = 0.0


class PrefillStarted(msgspec.Struct, frozen=True, tag=True):
    """The engine has begun to compute this job, behind the first ``cached_tokens``."""

    transfer: bytes
    cached_tokens: int = 0


class PrefillDone(msgspec.Struct, frozen=True, tag=True):
    """Every token of the job is computed; the transfer may still be under way.

    ``tokens`` were computed in ``compute_s``, behind ``cached_tokens`` that needed no computing.
    """

    transfer: bytes
    compute_s: float
    tokens: int
    cached_tokens: int = 0


class TransferDone(msgspec.Struct, frozen=True, tag=True):
    """Asking side: verified and committed, or kept where a TakePrefix asked for it.

    ``exposed_s`` runs from the last chunk's end to the commit.
    ``transfer_s`` runs from the grant of room; for pieces that did not wait for it, as if granted a round trip before.
    ``kv_digest`` is xxh3-128 over the piece digests in plan order: of the committed bytes, or, where a codec is
    inexact, of what arrived.
    ``transport`` carried it at last, ``failed_transports`` had been tried before. ``backlog_bytes`` (raw) were still to
    come, or to be acknowledged, when the last chunk was computed: they are what ``exposed_s`` was taken by.
    """

    transfer: bytes
    raw_bytes: int
    wire_bytes: int
    codec: str
    transfer_s: float
    exposed_s: float
    kv_digest: bytes
    transport: str = "tcp"
    backlog_bytes: int = 0
    failed_transports: tuple[str, ...] = ()


class Delta(msgspec.Struct, frozen=True, tag=True):
    """New tokens of one generation and the text that became certain with them (held back inside a stop string).

    ``answer`` counts from 0, where there are several to one prompt.
    """

    generation: str
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[tuple[TokenLogprob, ...], ...] | None = None
    answer: int = 0


class AnswerEnded(msgspec.Struct, frozen=True, tag=True):
    """One of several answers to one prompt ended well, as Finished says of a single one. Finished comes after all."""

    generation: str
    answer: int
    reason: str
    stop_text: str | None = None


class Finished(msgspec.Struct, frozen=True, tag=True):
    """The generation ended well. ``reason`` is stop or length; ``stop_text`` names the stop string that matched.

    ``cached_tokens`` of the prompt were not prefilled in place because their KV was here already. Of several answers
    ``completion_tokens`` is the sum, and how each ended was said before.
    """

    generation: str
    reason: str
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    stop_text: str | None = None


AnswerPart = Delta | AnswerEnded | Finished
"""What a node says of a generation that goes well, up to Finished."""


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A job ended badly and holds nothing any more. ``stage``: queue, prefill, transfer, load or decode."""

    job: str
    stage: str
    cause: str
    detail: str


class Cancelled(msgspec.Struct, frozen=True, tag=True):
    """The cancelled job holds nothing any more. Sent for every Cancel, unknown jobs included."""

    job: str
    prefilled_tokens: int = 0


class RoleChanged(msgspec.Struct, frozen=True, tag=True):
    """The answer to a ChangeRole: ``role`` is what this node plays now, ``changed`` whether it obeyed.

    ``cause`` of a refusal: stale_epoch, incarnation or busy.
    """

    epoch: int
    role: Role
    changed: bool
    cause: str = ""
    detail: str = ""


class KvEvents(msgspec.Struct, frozen=True, tag=True):
    """What changed in this node's prefix cache: a batch as ``kvcache.kv_events`` writes it, and as ZMQ publishes it.

    ``seq`` goes up by one with each, and starts at 0 with each incarnation. None is sent before ReplayKvEvents asks.
    """

    seq: int
    payload: bytes


# ---- gateway -> node


class Welcome(msgspec.Struct, frozen=True, tag=True):
    """Accepted. ``ticket_key`` is the gateway's raw Ed25519 public key; beats are expected every ``beat_s``.

    ``gateway`` names this very process, as long as it lives; "" where it is too old to say.
    """

    ticket_key: bytes
    beat_s: float
    lease_s: float
    gateway: str = ""


class Refused(msgspec.Struct, frozen=True, tag=True):
    """Not accepted; the node exits with this text. ``field`` names what must change."""

    field: str
    reason: str


class Beat(msgspec.Struct, frozen=True, tag=True):
    """The gateway is alive."""


class PrefillJob(msgspec.Struct, frozen=True, tag=True):
    """Compute tokens [start, stop) and send them to whoever holds the ticket; job id = transfer id in hex.

    ``dial`` is set where the decode node accepts and this one must dial. ``priority`` 0 runs first. ``salt`` and
    ``lora`` go into the names of the prompt's blocks. ``traceparent`` is the W3C trace context of the work, "" where it
    is not traced. ``transports`` are to be tried in this order; () is TCP.
    """

    ticket: bytes
    token_ids: tuple[int, ...]
    codec: str
    priority: int = 0
    dial: KvPeer | None = None
    salt: str = ""
    lora: str = ""
    traceparent: str = ""
    transports: tuple[str, ...] = ()


class KvSource(msgspec.Struct, frozen=True):
    """Where a generation's KV comes from: the node that proves this key. ``dial`` None: wait until it dials in.

    ``quality`` bounds the codecs that the decode node offers, and so those that the prefill node may use.
    """

    ticket: bytes
    node_id: str
    incarnation: str
    public_key: bytes
    dial: KvAddress | None
    quality: Quality = Quality.EXACT


class GenerateJob(msgspec.Struct, frozen=True, tag=True):
    """Decode one request; ``source`` None prefills in place. ``deadline`` is Unix seconds for the whole job.

    ``salt`` and ``lora`` go into the names of the prompt's blocks; ``quality`` bounds what is used of the cached ones.
    Of those that wait for room or for a place among the running, the least ``priority`` is first. ``answers`` to this
    one prompt are spoken, from seed, seed + 1 and so on; ``traceparent`` is as in PrefillJob.
    """

    generation: str
    token_ids: tuple[int, ...]
    sampling: Sampling
    source: KvSource | None
    deadline: float
    salt: str = ""
    lora: str = ""
    quality: Quality = Quality.EXACT
    priority: int = 0
    answers: int = 1
    traceparent: str = ""


class SharePrefix(msgspec.Struct, frozen=True, tag=True):
    """Send the ticket's tokens [start, stop) from the prefix cache alone; job id = transfer id in hex.

    ``stop`` is a block boundary, and windows and states are those of the snapshot there. A node that does not keep all
    of it computes nothing: it answers Failed with the cause ``prefix_gone``. It says nothing where all went well.
    ``dial`` is set where this node must dial. ``transports`` are to be tried in this order; () is TCP. Only for nodes
    whose Join says that they know it.
    """

    ticket: bytes
    token_ids: tuple[int, ...]
    codec: str
    dial: KvPeer | None = None
    salt: str = ""
    lora: str = ""
    transports: tuple[str, ...] = ()


class TakePrefix(msgspec.Struct, frozen=True, tag=True):
    """Fetch what another node was told to share, and keep it in the prefix cache; job id = transfer id in hex.

    ``token_ids`` end where the ticket does; the blocks before its start must be here. TransferDone says that it is
    kept. It waits for no room: where there is none to spare it fails. Only for nodes whose Join says that they know it.
    """

    source: KvSource
    token_ids: tuple[int, ...]
    salt: str = ""
    lora: str = ""


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Stop a job (a transfer id in hex, or a generation id) within one chunk and free all it holds."""

    job: str


class RateLease(msgspec.Struct, frozen=True, tag=True):
    """How fast this node may send KV to all its peers together; 0 is no limit. It stands until the next one comes."""

    egress_bytes_per_s: float


class ProbeLink(msgspec.Struct, frozen=True, tag=True):
    """Measure the idle way to a KV peer with about this many bytes; transfers come first. LinkReports have the result.

    Only for nodes whose Join says that they know it.
    """

    peer_node: str
    nbytes: int


class ReplayKvEvents(msgspec.Struct, frozen=True, tag=True):
    """Send KvEvents from this number on, and go on with new ones.

    A node that has them no longer begins anew: a batch that clears everything, then all that it holds.
    """

    start_seq: int


class ChangeRole(msgspec.Struct, frozen=True, tag=True):
    """Take no new jobs, finish those at hand within ``settle_s``, then play ``role``.

    ``epoch`` must be above that of every order before, and ``incarnation`` the node's own. Only for nodes whose Join
    says that they know it.
    """

    role: Role
    epoch: int
    incarnation: str
    settle_s: float


class Drain(msgspec.Struct, frozen=True, tag=True):
    """Take no new jobs; finish those at hand."""


FromNode = (
    Join
    | Heartbeat
    | PrefillStarted
    | PrefillDone
    | TransferDone
    | Delta
    | AnswerEnded
    | Finished
    | Failed
    | Cancelled
    | KvEvents
    | RoleChanged
    | RenewCertificate
    | KvAudited
)
Order = (
    PrefillJob
    | GenerateJob
    | SharePrefix
    | TakePrefix
    | Cancel
    | Drain
    | RateLease
    | ProbeLink
    | ReplayKvEvents
    | ChangeRole
    | CertificateIssued
    | AuditKv
)
"""What a gateway may tell a node that has joined to do, or to have."""
ToNode = Welcome | Refused | Already | Beat | Siblings | Leaving | Order

_encoder = msgspec.msgpack.Encoder()
_from_node: msgspec.msgpack.Decoder[FromNode] = msgspec.msgpack.Decoder(FromNode)
_to_node: msgspec.msgpack.Decoder[ToNode] = msgspec.msgpack.Decoder(ToNode)


class ControlError(ValueError):
    """A control message that does not decode: the stream that carried it is closed."""


def encode(message: FromNode | ToNode) -> bytes:
    """One message as the payload of one binary WebSocket frame."""
    return _encoder.encode(message)


def decode_from_node(data: bytes) -> FromNode:
    """Parse what a node sent. Raises ControlError."""
    try:
        return _from_node.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ControlError(str(error)) from error


def decode_to_node(data: bytes) -> ToNode:
    """Parse what a gateway sent. Raises ControlError."""
    try:
        return _to_node.decode(data)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ControlError(str(error)) from error
