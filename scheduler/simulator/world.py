"""The simulated fleet at work: a request comes, is decided on, prefilled, sent, decoded.

What decides is handed in and is what the gateway asks. Nothing is dropped: where a decision finds no way, the request
waits here until something changes.
"""

from __future__ import annotations

from collections.abc import Collection
from math import isnan

from scheduler.decision import Option
from scheduler.facts import PrefillCurve
from scheduler.links import LinkState
from scheduler.simulator.clock import Clock
from scheduler.simulator.decode import DecodeNode
from scheduler.simulator.fleet import LOCAL, Fleet, LinkSpec, Role, Settings
from scheduler.simulator.flows import Flow
from scheduler.simulator.gathering import Gathering, Site
from scheduler.simulator.jobs import Job
from scheduler.simulator.links import Link
from scheduler.simulator.machine import Machine
from scheduler.simulator.prefill import PrefillNode
from scheduler.simulator.prefixes import PrefixStore
from scheduler.simulator.records import Records, Spans
from scheduler.simulator.seams import Policy, Roles, Watcher
from scheduler.simulator.traffic import Traffic
from scheduler.sizes import last_chunk, transfer_bytes


class Arrives:
    """The next request of the traffic comes."""

    __slots__ = ("index", "world")

    def __init__(self, world: World, index: int) -> None:
        self.world = world
        self.index = index

    def fire(self, now: float) -> None:
        """Let it in."""
        self.world.arrive(self.index, now)


class CacheArrives:
    """A cache has come and can be decoded from; void where the request goes another way by now."""

    __slots__ = ("attempt", "job", "world")

    def __init__(self, world: World, job: Job) -> None:
        self.world = world
        self.job = job
        self.attempt = job.attempt

    def fire(self, now: float) -> None:
        """Hand it to the decode node."""
        if self.attempt == self.job.attempt:
            self.world.arriving.pop(self.job.index)
            self.world.decoders[self.job.decode_node].ready(self.job, now)


class World:
    """All that is simulated, and the way of a request through it."""

    def __init__(
        self,
        fleet: Fleet,
        settings: Settings,
        policy: Policy,
        traffic: Traffic,
        records: Records,
        spans: Spans | None = None,
    ) -> None:
        self.clock = Clock()
        self.fleet = fleet
        self.settings = settings
        self.policy = policy
        self.records = records
        self.spans = spans
        self.machines: dict[str, Machine] = {}
        self.prefillers: dict[str, PrefillNode] = {}
        self.decoders: dict[str, DecodeNode] = {}
        self.sites: list[Site] = []
        self.links: dict[str, Link] = {}
        self._ways: dict[str, LinkSpec] = {LOCAL: fleet.local_link} | {each.name: each.link for each in fleet.clusters}
        self.speeds: dict[str, LinkState] = {}
        self.stores: dict[str, PrefixStore] = {}
        self.parked: list[Job] = []
        self.arriving: dict[int, Job] = {}
        self.arrived = 0
        self.done = 0
        self.watcher: Watcher | None = None
        self.roles: Roles | None = None
        self._arrivals: list[float] = traffic.arrival_s.tolist()
        self._prompts: list[int] = traffic.prompt_tokens.tolist()
        self._outputs: list[int] = traffic.output_tokens.tolist()
        self._blocks = traffic.blocks if fleet.store is not None else ()
        self._ratios = {codec.name: codec for codec in fleet.codecs}
        self._build()
        self.gathering = Gathering(fleet, settings, list(self.machines.values()), self.sites, self.stores)
        self.clock.at(self._arrivals[0], Arrives(self, 0))

    def _build(self) -> None:
        fleet, clock = self.fleet, self.clock
        self.links[LOCAL] = Link(LOCAL, fleet.local_link.bytes_per_s, fleet.local_link.rtt_s, clock, self.sent)
        for kind in fleet.local:
            for number in range(kind.count):
                name = f"{kind.name}-{number}"
                prefill = self._prefill_node(name, LOCAL, kind.curve)
                # what is prefilled in place, mixing or not, takes a chunk between two steps
                chunk_s = self.settings.chunk_s or kind.curve.seconds(0, fleet.chunk_tokens)
                decode = DecodeNode(name, kind.step_s, kind.curve, clock, self, chunk_s, fleet.codecs)
                role = Role.PREFILL if number < kind.prefill else Role.DECODE
                self.machines[name] = Machine(name, role, prefill, decode)
                self.decoders[name] = decode
        for cluster in fleet.clusters:
            nodes = [
                self._prefill_node(f"{cluster.name}-{n}", cluster.name, cluster.curve) for n in range(cluster.count)
            ]
            link = cluster.link
            self.links[cluster.name] = Link(cluster.name, link.bytes_per_s, link.rtt_s, clock, self.sent)
            speed = self.speeds[cluster.name] = LinkState()
            self.sites.append(Site(cluster.name, nodes, speed))
        if fleet.store is not None:
            shared = PrefixStore(fleet.store)
            for name in self.prefillers:
                self.stores[name] = shared if fleet.store.shared else PrefixStore(fleet.store)

    def _prefill_node(self, name: str, cluster: str, curve: PrefillCurve) -> PrefillNode:
        node = PrefillNode(
            name,
            cluster,
            curve,
            self.fleet.chunk_tokens,
            self.settings.ordering,
            self.clock,
            self,
            self.fleet.pool_bytes,
            self.fleet.codecs,
        )
        self.prefillers[name] = node
        return node

    # ---- a request's way

    def arrive(self, index: int, now: float) -> None:
        """A request comes, and the next one is awaited."""
        following = index + 1
        self.arrived = following
        if following < len(self._arrivals):
            self.clock.at(self._arrivals[following], Arrives(self, following))
        blocks = self._blocks[index] if self._blocks else ()
        self.route(Job(index, now, self._prompts[index] - 1, self._outputs[index], blocks), now)

    def route(self, job: Job, now: float, fall_back: bool = False, without: Collection[str] = ()) -> Option | None:
        """Decide on a request and send it on its way; None where there is none yet."""
        facts = self.gathering.facts(job, now, without)
        decision = self.policy.fall_back(facts) if fall_back else self.policy.decide(facts)
        option = decision.chosen
        if option is None:
            self.parked.append(job)
            return None
        job.attempt += 1
        job.option = option
        job.begun = False
        job.flow = None
        job.cached = option.cached_tokens
        job.held = option.start
        job.decode_node = option.decode_node
        job.prefill_node = option.prefill_node or ""
        job.wire_bytes = option.wire_bytes
        remote = option.cluster is not None and option.cluster != LOCAL
        job.remote = remote
        self.records.remote[job.index] = remote
        decode = self.decoders[option.decode_node]
        decode.assigned += 1
        if remote and option.cluster is not None:
            self.speeds[option.cluster].started(option.wire_bytes)
        node = self.prefillers.get(job.prefill_node)
        if node is not None and node.accepting:
            node.submit(job, now)
        elif job.stop > job.cached:
            self.decoders[job.prefill_node or job.decode_node].mix(job, now)
        else:
            self._arrives(job, self.fleet.local_link.delay_s(0), now)
        if self.watcher is not None:
            self.watcher.dispatched(job, option, now)
        return option

    def resume_parked(self, now: float) -> None:
        """Something changed: what found no way may find one."""
        parked, self.parked = self.parked, []
        for job in parked:
            self.route(job, now)

    # ---- what prefill nodes say

    def prefill_begins(self, node: PrefillNode, job: Job, now: float) -> float:
        """The export opens as a flow, with the release curve of this prompt."""
        sizes, stop, option = self.fleet.sizes, job.stop, job.option
        assert option is not None
        start = job.held if job.held < stop else stop
        total = float(transfer_bytes(sizes, start, stop))
        last_tokens, last = last_chunk(sizes, start, stop, node.chunk_tokens)
        last_bytes = float(last)
        cached = float(sizes.per_token * (job.cached - start)) if job.cached > start else 0.0
        codec = self._ratios.get(option.codec)
        cap = None
        if codec is not None:
            ratio = codec.wire_ratio or 1.0
            total, last_bytes, cached = total * ratio, last_bytes * ratio, cached * ratio
            cap = codec.encode_bytes_per_s * ratio if codec.encode_bytes_per_s else None
        last_s = min(node.curve.seconds(stop - last_tokens, stop), job.service_s)
        job.wire_bytes = total
        flow = job.flow = Flow(job, now, now + job.service_s, last_s, total, last_bytes, cached, cap)
        self.links[node.cluster].open(flow, now)
        return total

    def prefill_pauses(self, job: Job, now: float) -> None:
        """Its export pauses as well."""
        assert job.flow is not None
        job.flow.rest(now)
        self.links[self.prefillers[job.prefill_node].cluster].changed(now)

    def prefill_resumes(self, job: Job, now: float) -> None:
        """Its export goes on as well."""
        assert job.flow is not None
        job.flow.resume(now)
        self.links[self.prefillers[job.prefill_node].cluster].changed(now)

    def prefill_ends(self, node: PrefillNode, job: Job, now: float) -> None:
        """All of its export has been let go."""
        if job.blocks and node.name in self.stores:
            self.stores[node.name].keep(job.blocks, job.stop)
        if self.spans is not None:
            self.spans.add(node.name, "prefill", now - job.service_s, now, job.index)
        assert job.flow is not None
        self.links[node.cluster].computed(job.flow, now)
        if self.roles is not None:
            self.roles.freed(node.name, now)

    # ---- what links say

    def sent(self, flow: Flow, now: float) -> None:
        """The last byte of an export has left."""
        job, option = flow.owner, flow.owner.option
        assert option is not None
        node = self.prefillers[job.prefill_node]
        node.exported(flow.total, now)
        link = self.links[node.cluster]
        self.records.wire_bytes[job.index] += flow.total
        if job.remote:
            speed = self.speeds[node.cluster]
            speed.observe(int(flow.total), now - flow.began, max(0.0, now - flow.released_at), now, option.codec_s)
            speed.ended(option.wire_bytes)
        if self.spans is not None:
            self.spans.add(f"link {link.name}", "transfer", flow.began, now, job.index)
        if job.blocks and job.decode_node in self.stores:
            self.stores[job.decode_node].keep(job.blocks, job.stop, snapshots=False)
        job.flow = None
        self._arrives(job, self._ways[node.cluster].delay_s(job.stop), now)

    def _arrives(self, job: Job, delay_s: float, now: float) -> None:
        if delay_s > 0:
            self.arriving[job.index] = job
            self.clock.at(now + delay_s, CacheArrives(self, job))
        else:
            self.decoders[job.decode_node].ready(job, now)

    # ---- what decode nodes say

    def computed_in_place(self, node: DecodeNode, job: Job, now: float) -> None:
        """A prompt computed beside streams decodes here or, over the local network, at once elsewhere."""
        if job.blocks and node.name in self.stores:
            self.stores[node.name].keep(job.blocks, job.stop)
        self._arrives(job, self.fleet.local_link.delay_s(0), now)

    def stream_begins(self, job: Job, now: float, first_at: float) -> None:
        """The first token is under way."""
        self.records.first_at[job.index] = first_at
        self.records.cached_tokens[job.index] = job.cached

    def stream_ends(self, node: DecodeNode, job: Job, now: float) -> None:
        """A request is done."""
        self.done += 1
        self.records.done_at[job.index] = now
        # when the first token was foreseen, a step took longer than it did
        self.records.first_at[job.index] = min(self.records.first_at[job.index], now)
        if self.spans is not None:
            self.spans.add(node.name, "decode", self.records.first_at[job.index], now, job.index)
        if self.roles is not None:
            self.roles.freed(node.name, now)
        if self.parked:
            self.resume_parked(now)

    # ---- requests that go another way

    @property
    def unfinished(self) -> bool:
        """Whether something is still to come or to be done."""
        return self.done + self.records.failed < len(self._arrivals)

    def unanswered(self, job: Job) -> bool:
        """Whether a request has no first token yet."""
        return isnan(self.records.first_at[job.index])

    def under_way(self) -> list[Job]:
        """Every request between its decision and its slot's node: it waits for prefill, is computed, or is sent."""
        found = dict(self.arriving)
        for node in self.prefillers.values():
            found |= {job.index: job for job in node.jobs()}
        for link in self.links.values():
            found |= {flow.owner.index: flow.owner for flow in link.flows}
        for decoder in self.decoders.values():
            found |= {job.index: job for job in decoder.mixing()}
        return [found[index] for index in sorted(found)]

    def undo(self, job: Job) -> None:
        """Forget where a request was promised to; it is on no node by now."""
        self.decoders[job.decode_node].assigned -= 1
        if job.remote and job.option is not None and job.option.cluster is not None:
            self.speeds[job.option.cluster].ended(job.option.wire_bytes)
        job.attempt += 1

    def give_up(self, job: Job, now: float) -> bool:
        """Take a request from wherever it is on its way. False where its cache has arrived."""
        mixes = self.decoders.get(job.prefill_node or job.decode_node)
        if mixes is not None and mixes.unmix(job, now):
            self.undo(job)
            return True
        node = self.prefillers.get(job.prefill_node)
        if self.arriving.pop(job.index, None) is not None:
            self.decoders[job.decode_node].assigned -= 1
            job.attempt += 1
            return True
        if node is None or (job.begun and job.flow is None):
            return False
        node.withdraw(job, now)
        flow, job.flow = job.flow, None
        if flow is not None:
            link = self.links[node.cluster]
            link.close(flow, now)
            self.records.wire_bytes[job.index] += flow.sent
            node.exported(flow.total, now)
        self.undo(job)
        return True

    def fail(self, job: Job) -> None:
        """A request gets no answer, or only a part of one."""
        self.records.failed += 1
        job.attempt += 1
