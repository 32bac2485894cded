"""The gateway as one ASGI application: what its parts are to each other, and when they begin and end."""

from __future__ import annotations

import contextlib
import logging

from gateway.access import Access
from gateway.admission import Admission
from gateway.admission_routes import add_admission_routes
from gateway.affinity import Affinity
from gateway.asgi import Receive, Scope, Send
from gateway.audit import AuditLog
from gateway.audit_routes import add_audit_routes
from gateway.breakers import BreakerGauges
from gateway.budgets import Budgets
from gateway.building import AttemptBuilder
from gateway.canary import Canary
from gateway.certificates.issuer import Issuer
from gateway.config import ConfigError, GatewayConfig
from gateway.cors import Cors
from gateway.decisions import Decisions
from gateway.entry import Entry
from gateway.executors import OwnNodes
from gateway.fleet.composing import split_serving
from gateway.fleet.fleet import Fleet
from gateway.fleet.health import HealthWatch
from gateway.fleet.listing import Listing, listed
from gateway.fleet.routes import add_engine_routes
from gateway.health_routes import add_health_routes
from gateway.hot import Generation
from gateway.interconnect import Interconnects
from gateway.interconnect_routes import add_interconnect_routes
from gateway.joining.door import Door
from gateway.joining.refusals import Refusals
from gateway.joining.routes import add_joining_routes
from gateway.joining.tokens import JoinTokens
from gateway.keys import KeyBook
from gateway.kv_audits import KvAudits
from gateway.kv_index import KvIndex
from gateway.kv_upkeep import KvUpkeep
from gateway.live import Change, LiveConfig
from gateway.metrics import Metrics
from gateway.model import ServedModel
from gateway.openapi.route import add_openapi
from gateway.process_metrics import ProcessGauges
from gateway.readiness import Readiness, has_room
from gateway.rebalance_composing import long_term
from gateway.rebalance_metrics import RebalanceGauges
from gateway.registry import Registry
from gateway.relay.figures import RelayFigures
from gateway.relay.places import Places
from gateway.relay.relay import Relay
from gateway.reload_routes import add_reload_routes
from gateway.reloading import Reloading
from gateway.routes import build_routes
from gateway.samples import Samples
from gateway.services import Services
from gateway.sessions import NodeLost
from gateway.shared.alone import Alone
from gateway.shared.common import Common
from gateway.shared.metrics import SharedFigures
from gateway.shared.sharing import Parts, Sharing
from gateway.shared.together import Together
from gateway.state import State
from gateway.stream import ControlStreams
from gateway.tenants import Tenants
from gateway.threshold import Threshold
from gateway.tokenizing import Tokenizing
from gateway.traffic import TrafficMeter
from gateway.upstream.pool import Pool
from gateway.waiting import WaitingRoom
from kvcache.control.replicas import Leaving
from kvcache.tracer import tracer_for
from kvcache.tracing import Tracer
from scheduler.budget import FallbackBudget
from scheduler.policy import RoutingPolicy
from scheduler.retrying import RetryBudget

log = logging.getLogger(__name__)


class Gateway:
    """Composes everything. Owns the state and the threads; ``close`` lets them go."""

    def __init__(self, config: GatewayConfig, model: ServedModel, state: State) -> None:
        self.live = LiveConfig(config)
        self.reloading: Reloading | None = None
        self.state = state
        self.url = config.advertise or ""
        """Where nodes reach this gateway; whoever binds it tells, where no operator did."""
        self.shared = self._sharing(config)
        self._tracer = _tracer(config)
        self._cors = Cors(config.cors_origins)
        self.keys = KeyBook(state)
        own = model.fingerprint if model.exists else None
        self.registry = Registry(state, config.local_cluster, own, model.context_tokens, config.breaker)
        self.kv_index = KvIndex(model.layout, model.fingerprint.digest())
        self._kv_upkeep = KvUpkeep(self.kv_index, config.kv_events, config.state_file)
        self.metrics = Metrics(self.registry, self.kv_index)
        self.decisions = Decisions(state)
        ticket_key = state.ticket_key()
        interconnects = Interconnects(self.registry)
        self.metrics.show(interconnects.transfers)
        builder = AttemptBuilder(self.registry, ticket_key, model.fingerprint.digest(), interconnects)
        threshold, meter = Threshold(config.threshold_tokens), TrafficMeter()
        self.fleet = Fleet(listed(config), config.local_cluster)
        self._upstream = Pool()
        self._health = HealthWatch(self.fleet, self._upstream)
        self._listing = Listing(lambda: self.config, self.fleet, self._health)
        self.waiting = WaitingRoom(config.queue, config.queue_timeout_s, lambda: has_room(self.registry, self.fleet))
        self.metrics.show(self.waiting.metrics)
        self.metrics.show(BreakerGauges(self.registry.breakers))
        self.metrics.show(ProcessGauges())
        tenants = Tenants(state)
        policy = RoutingPolicy(config.policy)
        self.audit = AuditLog(state)
        self._audits = audits = KvAudits(self.registry, self.audit, lambda: self.live.now.audit, self.shared.writing)
        self.metrics.show(audits)
        services = Services(
            self.live,
            model,
            self.registry,
            policy,
            FallbackBudget(sharers=lambda: self.shared.gateways),
            RetryBudget(),
            builder,
            self.decisions,
            self.metrics,
            threshold,
            meter,
            self.kv_index,
            Affinity(),
            self.waiting,
            audits,
            self._tracer,
        )
        own_nodes = OwnNodes()
        samples = Samples(self.registry, builder, model)
        self.canary = Canary(self.registry, samples, lambda: self.live.now.canary_s)
        self.metrics.show(self.canary.outcomes)
        self.metrics.show(self.canary.seconds)
        if isinstance(self.shared, Together):
            self.metrics.show(SharedFigures(self.shared))
        self.rebalancing = long_term(
            config, state, self.registry, model, samples, own_nodes, self.shared, threshold, meter
        )
        self.metrics.show(RebalanceGauges(self.rebalancing))
        self._tokenizing = Tokenizing(model.tokenizer, model.template)
        self._access = Access(self.keys)
        self._budgets = Budgets(state, self.shared.spending)
        admission = Admission(tenants, self.waiting.metrics, self._budgets, self.shared.slices)
        splits = split_serving(services, self.fleet, self._upstream, self._health, self._tokenizing)
        self.generation = Generation(services, self._tokenizing, self._access, admission, self._cors, splits)
        self.answers = self._relayed(admission) or self.generation
        """What answers requests to generate, which do not come by ASGI."""
        issuer = _issuer(config)
        door, tokens = Door(self.registry, issuer, config.join_token), JoinTokens(self.registry, issuer)
        self.refusals = Refusals(self.audit.refused)
        self.metrics.show(self.refusals.counter)
        in_flight = self.generation.in_flight
        self._readiness = Readiness(self.registry, self.fleet, self.canary, self.refusals, lambda: in_flight.leaving)
        self._streams = ControlStreams(
            config,
            self.registry,
            door,
            self.refusals,
            audits,
            self.metrics,
            own_nodes,
            ticket_key,
            self.kv_index,
            interconnects,
            self.shared.id,
        )
        self._routes = build_routes(
            services,
            self.keys,
            self._budgets,
            self._tokenizing,
            self.kv_index,
            self.rebalancing,
            tokens,
            self.not_ready,
            self.shared,
            lambda: self.fleet.models,
        )
        add_joining_routes(self._routes, door, issuer, self.refusals, config.max_body_bytes)
        add_audit_routes(self._routes, self.audit)
        add_interconnect_routes(self._routes, interconnects)
        add_admission_routes(self._routes, tenants, config.max_body_bytes)
        add_health_routes(self._routes, self.canary)
        add_reload_routes(self._routes, self.reload)
        add_engine_routes(self._routes, self.fleet)
        add_openapi(self._routes)
        self._entry = Entry(
            lambda: self.config,
            self._access,
            self._cors,
            self.audit,
            self.shared,
            self._streams,
            self._routes,
        )
        self._follow(policy, threshold)
        self._parts = Parts(
            (self.keys.reload, tenants.reload, self.registry.reload),
            lambda: self._budgets.keep_only([entry.id for entry in self.keys.entries()]),
            self.audit,
            self.decisions,
            self.rebalancing.history,
            self.rebalancing.conversions,
            threshold,
            meter,
            self._streams.tell,
            lambda: self.registry.role_epoch,
            lambda: Common("" if own is None else own.digest(), () if issuer is None else issuer.believed),
        )

    @property
    def config(self) -> GatewayConfig:
        """What is in force now."""
        return self.live.now

    def reload(self) -> list[Change]:
        """Read the configuration again. Raises ConfigError where nothing was changed."""
        if self.reloading is None:
            raise ConfigError("this gateway was not started by `prfaas gateway`")
        return [*self.reloading(), *self._listing.reload()]

    async def follow_certificate(self) -> None:
        """Take a certificate whose files change, until cancelled."""
        if self.reloading is not None:
            await self.reloading.follow_certificate()

    async def leave(self) -> None:
        """Another gateway takes new requests: tell the nodes, and give no orders beside it."""
        for node in self.registry.nodes():
            if node.join.siblings:
                with contextlib.suppress(NodeLost):
                    node.send(Leaving())
        await self.canary.stop()
        await self.rebalancing.stop()
        self.shared.step_down()

    def _sharing(self, config: GatewayConfig) -> Sharing:
        if config.redis is None:
            return Alone(self.state)
        return Together(config.redis, self.state)

    def _follow(self, policy: RoutingPolicy, threshold: Threshold) -> None:
        """Have what keeps a setting of its own follow changes of the configuration."""

        def changed(new: GatewayConfig) -> None:
            policy.values = new.policy
            self.registry.breakers.follow(new.breaker)
            self.waiting.follow(new.queue, new.queue_timeout_s)
            if not new.threshold_auto:
                threshold.tokens = new.threshold_tokens

        self.live.follow(changed)

    def _relayed(self, admission: Admission) -> Relay | None:
        """What answers requests to external engines, and hands on the others; None where there are none."""
        if self.config.engines_file is None:
            return None
        figures = RelayFigures(self.metrics)
        self.metrics.show(figures)
        return Relay(
            self.live,
            self.fleet,
            self._access,
            admission,
            self.waiting,
            self.generation.in_flight,
            figures,
            Places(self.registry),
            self._upstream,
            self._cors,
            self.generation.answer,
            self._tracer,
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI entry point."""
        if scope["type"] == "lifespan":
            await self._lifespan(receive, send)
        elif scope["type"] == "websocket":
            await self._entry.websocket(scope, receive, send)
        else:
            await self._entry.http(scope, receive, send)

    def not_ready(self) -> str | None:
        """What keeps this gateway from serving, or None."""
        return self._readiness.missing()

    def close(self) -> None:
        """Write what is pending and let go of threads and files. Idempotent."""
        self._tokenizing.close()
        self.kv_index.close()
        self._tracer.close()
        self._budgets.close()
        self._upstream.close()
        self.decisions.close()
        self.state.close()

    async def _lifespan(self, receive: Receive, send: Send) -> None:
        """What needs a running loop begins and ends here; ``serve`` closes the rest."""
        while True:
            event = await receive()
            if event["type"] == "lifespan.startup":
                self.shared.start(self.url, self._parts)
                self._kv_upkeep.start()
                self.rebalancing.start()
                self.canary.start()
                self._health.start()
                self._listing.start()
                await self._health.first()
            else:
                await self._listing.stop()
                await self._health.stop()
                await self.canary.stop()
                await self.rebalancing.stop()
                await self._kv_upkeep.stop()
                await self._audits.stop()
                await self._budgets.stop()
                await self.shared.stop()
            await send({"type": f"{event['type']}.complete"})
            if event["type"] == "lifespan.shutdown":
                return


def _issuer(config: GatewayConfig) -> Issuer | None:
    """What signs certificates of nodes. Raises ConfigError for a folder that cannot be used."""
    return None if config.ca_dir is None else Issuer(config.ca_dir, config.node_certificate_s)


def _tracer(config: GatewayConfig) -> Tracer:
    try:
        return tracer_for(config.otlp_endpoint, "prfaas-gateway", f"{config.host}:{config.port}")
    except ValueError as error:
        raise ConfigError(f"--otlp-endpoint: {error}") from error
