"""A fixed share of one core for a process, kept by the kernel: so three engines on two cores are three machines.

Needs root and the cpu controller of cgroups, of either version.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
PERIOD_US = 10_000
"""Short beside anything that is measured, so that a share is a speed."""
WEIGHT = 100
"""Against one of an ordinary process: what a group is due, it gets within a period."""


class SharesUnavailable(Exception):
    """This machine does not let us; the text says why."""


@contextlib.contextmanager
def cpu_share(name: str, cores: float) -> Iterator[Path]:
    """A control group that gets ``cores`` of processor time and no more; ``join`` puts a process into it.

    Its processes must have ended when the block does. Raises SharesUnavailable.
    """
    second = (ROOT / "cgroup.controllers").exists()
    group = (ROOT if second else ROOT / "cpu") / f"prfaas-{os.getpid()}-{name}"
    quota = round(cores * PERIOD_US)
    try:
        group.mkdir()
    except OSError as error:
        raise SharesUnavailable(f"{group}: {error.strerror}; it takes root and the cpu controller") from error
    try:
        try:
            if second:
                (group / "cpu.weight").write_text(str(WEIGHT * 100))
                (group / "cpu.max").write_text(f"{quota} {PERIOD_US}")
            else:
                (group / "cpu.shares").write_text(str(WEIGHT * 1024))
                (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
                (group / "cpu.cfs_quota_us").write_text(str(quota))
        except OSError as error:
            raise SharesUnavailable(f"{group}: {error.strerror}; the cpu controller is not enabled here") from error
        yield group
    finally:
        group.rmdir()


def join(group: Path, pid: int) -> None:
    """All threads of a process."""
    (group / "cgroup.procs").write_text(str(pid))
