"""The dialects by their names in the file of engines."""

from __future__ import annotations

from gateway.dialects.mooncake import Mooncake
from gateway.dialects.nixl_pull import NixlPull
from gateway.dialects.nixl_push import NixlPush
from gateway.dialects.protocol import Dialect
from gateway.dialects.sglang import Sglang
from gateway.fleet.config import DialectName

SPLIT: dict[DialectName, Dialect] = {
    DialectName.VLLM_NIXL_PULL: NixlPull(),
    DialectName.VLLM_NIXL_PUSH: NixlPush(),
    DialectName.VLLM_MOONCAKE: Mooncake(),
    DialectName.SGLANG: Sglang(),
}
