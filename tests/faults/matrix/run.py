"""One fault under load: warm up, strike, hold, mend, recover, and count what is left."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field

from tests.faults.matrix.faults import Fault
from tests.faults.matrix.leaks import Held, count, tickets
from tests.faults.matrix.load import GRACE_S, Load, Traffic, loading
from tests.faults.matrix.outcome import Kind
from tests.faults.matrix.scene import DEADLINE_S, Scene
from tests.stacks import eventually

WARM_S, RECOVER_S = 3.0, 3.0
CANARIES_S = 2.0
SETTLE_S = 30.0
TICKET_SKEW_S = 3.0


@dataclass(frozen=True, slots=True)
class Report:
    """Of one fault: how requests ended, what is wrong with that, and what is still held.

    ``remote`` of the answers were prefilled far away.
    """

    fault: str
    counts: Mapping[str, int]
    slowest_s: float
    remote: int
    wrong: tuple[str, ...] = ()
    leaks: Mapping[str, str] = field(default_factory=dict)

    @property
    def passed(self) -> bool:
        """Whether nothing is."""
        return not self.wrong and not self.leaks


def warm_up(scene: Scene) -> None:
    """Until every pair of nodes has met: their connections are kept."""
    with loading(Load(scene.stack.url, Traffic("tiny", DEADLINE_S))):
        time.sleep(4 * WARM_S)


def strike(scene: Scene, fault: Fault) -> Report:
    """Let it happen."""
    before = settled(scene, Held())
    scene.canaries(CANARIES_S)
    load = Load(scene.stack.url, Traffic("tiny", DEADLINE_S, leaving=fault.leaving))
    with loading(load):
        time.sleep(WARM_S)
        fault.strike(scene)
        time.sleep(fault.for_s)
        fault.mend(scene)
        scene.await_complete()
        at_mend = len(load.outcomes)
        time.sleep(RECOVER_S)
    wrong = [f"{one.kind} {one.detail}" for one in load.outcomes if one.kind not in fault.allowed]
    if not any(one.kind is Kind.ANSWER for one in load.outcomes[at_mend:]):
        wrong.append("nothing was answered after it was mended")
    remote = sum(one.route.startswith("remote") for one in load.outcomes)
    if not remote:
        wrong.append("no answer was prefilled far away: what strikes there struck nobody")
    slowest = max((one.seconds for one in load.outcomes), default=0.0)
    if slowest > DEADLINE_S + GRACE_S:
        wrong.append(f"a request took {slowest:.1f} s")
    scene.canaries(0)  # what they hold is no leak
    leaks = settled(scene, before).leaks(before)
    return Report(fault.name, dict(load.counts), slowest, remote, tuple(wrong), leaks)


def settled(scene: Scene, before: Held) -> Held:
    """What is held once nothing leaks any more, or after a while."""
    found = [count(scene.http, scene.below())]

    def fine() -> bool:
        found.append(count(scene.http, scene.below()))
        last = found[-1]
        return not (last.leaks(before) if before.kept else {n: v for n, v in last.held.items() if v})

    eventually(fine, SETTLE_S, every_s=0.5)
    return found[-1]


def forgotten_tickets(scene: Scene) -> bool:
    """Whether every ticket is forgotten once the deadline of the last request has passed."""
    return eventually(lambda: tickets(scene.http) == 0, DEADLINE_S + TICKET_SKEW_S + GRACE_S, every_s=1.0)
