"""Tiers that flags ask for are there, or are refused by name. The CXL machine is one of the written-down ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from node import tiers
from node.config import ConfigError
from node.tier_config import FileTier, MemoryTier, TierConfig
from node.tiers import make_levels, tier_config
from tests.node.machines import TextMachine

PAGE = 4096
CXL, PLAIN = TextMachine("a100-pcie"), TextMachine("h100-nvswitch")


def configured(machine: TextMachine = PLAIN, prefix_cache: bool = True, **flags) -> TierConfig:
    said = {"disk": None, "disk_mib": None, "disk_keep": False, "cxl_mib": 0, "cxl_numa": None} | flags
    return tier_config(**said, prefix_cache=prefix_cache, machine=machine)


def test_nothing_is_there_unless_it_is_asked_for() -> None:
    assert configured(CXL) == TierConfig()
    assert make_levels(TierConfig(), PAGE) == []
    assert not TierConfig().keep


def test_cxl_memory_is_found_and_other_memory_is_called_a_model_of_it() -> None:
    found = configured(CXL, cxl_mib=64).memory
    assert found is not None
    assert (found.nbytes, found.note) == (64 << 20, "")
    assert configured(PLAIN, cxl_mib=64, cxl_numa=0).memory == MemoryTier(
        64 << 20, 0, "modelled: NUMA node 0 is dram memory"
    )


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ({"disk_mib": 100}, "--tier-disk: missing"),
        ({"disk_keep": True}, "--tier-disk: missing"),
        ({"cxl_numa": 0}, "--tier-cxl-mib: missing"),
        ({"cxl_mib": 64}, "no NUMA node of CXL memory"),
        ({"cxl_mib": 64, "cxl_numa": 9}, "--tier-cxl-numa: 9"),
        ({"cxl_mib": 1 << 30, "cxl_numa": 0}, "--tier-cxl-mib: 1073741824, but NUMA node 0 has"),
        ({"disk": Path("x"), "prefix_cache": False}, "--no-prefix-cache"),
    ],
)
def test_flags_that_cannot_work_are_named(flags, named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        configured(**flags)


def test_levels_are_made_the_fastest_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    monkeypatch.setattr(tiers, "MemoryStore", lambda *wanted: made.append(wanted))
    config = TierConfig(MemoryTier(10 * PAGE + 1, 3, "modelled"), FileTier(tmp_path / "tier", 1 << 20, True))
    memory, files = make_levels(config, PAGE)
    assert made == [(PAGE, 10, 3)]
    assert (memory.name, memory.capacity, memory.note) == ("cxl", 10 * PAGE, "modelled")
    assert (files.name, files.capacity) == ("disk", 1 << 20)
    with pytest.raises(ConfigError, match=r"--tier-disk: .* is used by another node"):
        make_levels(config, PAGE)
    files.store.close(keep=False)


def test_what_cannot_be_had_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--tier-disk: "):
        make_levels(TierConfig(files=FileTier(tmp_path / "file" / "below", 1 << 20, False)), PAGE)
    with pytest.raises(ConfigError, match="NUMA node 1000"):
        make_levels(TierConfig(MemoryTier(1 << 20, 1000, "")), PAGE)
    with pytest.raises(ConfigError, match="too small"):
        make_levels(TierConfig(MemoryTier(1, 0, "")), PAGE)
