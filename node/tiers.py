"""Which tiers a node has below its pool: what flags ask for, checked against the machine, and made."""

from __future__ import annotations

from pathlib import Path

from kvcache.tiers.files import DirectoryTaken, FileStore
from kvcache.tiers.level import Level
from kvcache.tiers.memory import MemoryStore
from kvcache.topology import MemoryKind
from node.config import ConfigError
from node.tier_config import FileTier, MemoryTier, TierConfig
from node.topology.machine import Machine
from node.topology.numa import find_memory

DISK_MIB = 4096


def tier_config(
    disk: Path | None,
    disk_mib: int | None,
    disk_keep: bool,
    cxl_mib: int,
    cxl_numa: int | None,
    *,
    prefix_cache: bool,
    machine: Machine,
) -> TierConfig:
    """Raises ConfigError for flags that say nothing together, and for memory that the machine does not have."""
    if disk is None and (disk_mib is not None or disk_keep):
        raise ConfigError("--tier-disk: missing; it names the directory that the other --tier-disk flags are about")
    if not cxl_mib and cxl_numa is not None:
        raise ConfigError("--tier-cxl-mib: missing; it says how much of the NUMA node to use")
    if not prefix_cache and (disk is not None or cxl_mib):
        raise ConfigError("--no-prefix-cache: tiers hold what the prefix cache lets go of; leave one of them out")
    memory = _memory(cxl_mib << 20, cxl_numa, machine) if cxl_mib else None
    files = FileTier(disk, (disk_mib or DISK_MIB) << 20, disk_keep) if disk is not None else None
    return TierConfig(memory, files)


def make_levels(config: TierConfig, page_bytes: int) -> list[Level]:
    """The tiers, the fastest first; takes their memory, and their directory. Raises ConfigError."""
    levels = []
    if config.memory is not None:
        pages = config.memory.nbytes // page_bytes
        if not pages:
            raise ConfigError(f"--tier-cxl-mib: too small, one page of this model takes {page_bytes} bytes")
        try:
            store = MemoryStore(page_bytes, pages, config.memory.numa)
        except OSError as error:
            raise ConfigError(f"--tier-cxl-mib: {error}") from error
        levels.append(Level("cxl", store, pages * page_bytes, config.memory.note))
    if config.files is not None:
        try:
            files = FileStore(config.files.directory)
        except (OSError, DirectoryTaken) as error:
            raise ConfigError(f"--tier-disk: {error}") from error
        levels.append(Level("disk", files, config.files.nbytes))
    return levels


def _memory(nbytes: int, numa: int | None, machine: Machine) -> MemoryTier:
    """A node of CXL memory, or the one that was named, whatever it is made of."""
    found = {node.numa: node for node in find_memory(machine)}
    if numa is None:
        cxl = [node.numa for node in found.values() if node.kind is MemoryKind.CXL]
        if not cxl:
            raise ConfigError(
                "--tier-cxl-mib: this machine has no NUMA node of CXL memory; leave it out, or name a node of other "
                "memory with --tier-cxl-numa as a model of one"
            )
        numa = cxl[0]
    if numa not in found:
        raise ConfigError(f"--tier-cxl-numa: {numa}; the NUMA nodes with memory are {sorted(found)}")
    node = found[numa]
    if nbytes > node.nbytes:
        raise ConfigError(f"--tier-cxl-mib: {nbytes >> 20}, but NUMA node {numa} has {node.nbytes >> 20} MiB")
    note = "" if node.kind is MemoryKind.CXL else f"modelled: NUMA node {numa} is {node.kind.value} memory"
    return MemoryTier(nbytes, numa, note)
