"""What carries a node's KV beside TCP, by its configuration and by what its machine has."""

from __future__ import annotations

import logging

from kvcache.topology import MachineReport
from kvcache.transport import Carrier
from kvcache.transport.hostlane import HostCarrier
from kvcache.transport.nixl_agent import NixlMissing
from kvcache.transport.nixl_lane import NixlCarrier, agent_name
from kvcache.transport.ucx import RDMA, ucx_settings
from node.config import ConfigError, NodeConfig
from node.identity import Identity

log = logging.getLogger(__name__)


def carriers(config: NodeConfig, identity: Identity, machine: MachineReport) -> list[Carrier]:
    """Memory within the host, and NIXL over RDMA ports where it is asked for. Raises ConfigError."""
    found: list[Carrier] = [HostCarrier(identity.public_key)] if config.shared_memory else []
    if config.nixl:
        settings = ucx_settings(machine)
        if settings is None:
            log.warning("--nixl carries nothing here: this machine has no active RDMA port")
            return found
        try:
            found.append(NixlCarrier(RDMA, agent_name(identity.node_id, identity.incarnation), settings))
        except NixlMissing as error:
            raise ConfigError(f"--nixl: {error}") from error
    return found
