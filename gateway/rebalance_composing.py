"""What the long-term loop of a gateway is made of: what it looks at, what it decides by, and how it converts nodes."""

from __future__ import annotations

from gateway import rebalance_config
from gateway.config import GatewayConfig
from gateway.conversions import Conversions
from gateway.executors import Executors, OwnNodes
from gateway.history import History
from gateway.model import ServedModel
from gateway.observing import Observer
from gateway.rebalancing import Rebalancing
from gateway.registry import Registry
from gateway.samples import Samples
from gateway.shared.sharing import Sharing
from gateway.state import State
from gateway.threshold import Threshold
from gateway.traffic import TrafficMeter
from gateway.verification import Verification
from scheduler.threshold import ThresholdFollower


def long_term(
    config: GatewayConfig,
    state: State,
    registry: Registry,
    model: ServedModel,
    samples: Samples,
    own: OwnNodes,
    shared: Sharing,
    threshold: Threshold,
    meter: TrafficMeter,
) -> Rebalancing:
    """The loop that moves nodes between prefill and decode. Raises ConfigError for a file that cannot be read."""
    setup = rebalance_config.read(config.rebalance, config.rebalance_file)
    history = History(state)
    conversions = Conversions(
        registry,
        Executors(own, setup.executors),
        Verification(registry, samples),
        history,
        shared.leadership,
        setup.limits,
    )
    return Rebalancing(
        setup.settings,
        setup.step_s,
        Observer(registry, meter, model.layout),
        conversions,
        threshold,
        history,
        shared.leadership,
        ThresholdFollower() if config.threshold_auto else None,
        shared.pass_on,
    )
