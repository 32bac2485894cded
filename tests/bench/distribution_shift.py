"""Does the long-term controller follow the traffic, and leave it alone when it stands still?

    python -m tests.bench.distribution_shift [--seeds 5] [--hours 12] [--json]

On the published case study's fleet: half-hour phases at 0.9 of each phase's best capacity (inputs three times as long,
then outputs of 8192 instead of 1024 tokens, then back as it was; also with inputs back first), dwell 60 s, 30 s a
conversion and drains on top. Printed is, for each phase, after how many seconds the nodes that serve have regained 95 %
of the best split's capacity for good; and how many conversions hours of stationary traffic cause.
"""

from __future__ import annotations

import argparse
import itertools
import json
from dataclasses import dataclass, replace
from math import log

import numpy as np

from scheduler.case_study import LENGTHS, LINK_GBPS, OUTPUT_TOKENS, PUBLISHED_T
from scheduler.case_study import hybrid as deployment
from scheduler.controller.controller import Controller
from scheduler.controller.settings import ControllerSettings, Mode
from scheduler.decision import Decision
from scheduler.facts import Facts
from scheduler.lengths import TruncatedLogNormal
from scheduler.policy import RoutingPolicy
from scheduler.simulator.baselines import Static
from scheduler.simulator.fleet import Settings
from scheduler.simulator.long_term import LongTerm
from scheduler.simulator.presets import hybrid
from scheduler.simulator.run import Run, simulate
from scheduler.simulator.traffic import Traffic
from scheduler.split_search import SplitSearch
from scheduler.throughput import Reading

PHASE_S = 1800.0
LOAD = 0.9
REGAINED = 0.95
PREFILL = 3
LONG_INPUTS = TruncatedLogNormal(LENGTHS.mu + log(3), LENGTHS.sigma, LENGTHS.low, LENGTHS.high)
LONG_OUTPUT = 8192


@dataclass(frozen=True, slots=True)
class Phase:
    """What comes during it."""

    lengths: TruncatedLogNormal
    output: int = OUTPUT_TOKENS


AS_IT_WAS = Phase(LENGTHS)
SHIFTS = {
    "inputs x3, then outputs too, then back": (
        AS_IT_WAS,
        Phase(LONG_INPUTS),
        Phase(LONG_INPUTS, LONG_OUTPUT),
        AS_IT_WAS,
    ),
    "inputs x3, then outputs instead, then back": (
        AS_IT_WAS,
        Phase(LONG_INPUTS),
        Phase(LENGTHS, LONG_OUTPUT),
        AS_IT_WAS,
    ),
}


class InForce:
    """Routes by the threshold in force and nothing else: what is seen here is the controller's work alone."""

    def __init__(self) -> None:
        self._policy = RoutingPolicy()

    def decide(self, facts: Facts) -> Decision:
        """Above it goes away."""
        return Static(self._policy, facts.threshold_tokens).decide(facts)

    def fall_back(self, facts: Facts) -> Decision:
        """As the policy does."""
        return self._policy.fall_back(facts)


def search(phase: Phase) -> SplitSearch:
    """The throughput model of a phase."""
    site = replace(deployment(LINK_GBPS), output_tokens=phase.output)
    return SplitSearch(site, phase.lengths, Reading.MEAN_SERVICE)


def traffic(phases: tuple[Phase, ...], phase_s: float, seed: int) -> Traffic:
    """Poisson arrivals at ``LOAD`` of each phase's best capacity."""
    source = np.random.default_rng(seed)
    arrivals, prompts, outputs = [], [], []
    for number, phase in enumerate(phases):
        count = source.poisson(LOAD * search(phase).split().lambda_max * phase_s)
        arrivals.append(np.sort(source.uniform(0.0, phase_s, count)) + number * phase_s)
        drawn = np.exp(source.normal(phase.lengths.mu, phase.lengths.sigma, 4 * count))
        inside = drawn[(drawn >= phase.lengths.low) & (drawn <= phase.lengths.high)]
        prompts.append(inside[:count].astype(np.int64) + 1)
        outputs.append(np.full(count, phase.output))
    return Traffic(np.concatenate(arrivals), np.concatenate(prompts), np.concatenate(outputs))


def simulated(requests: Traffic) -> tuple[Run, Controller]:
    """One run, from the split that is best for the traffic as it was."""
    fleet = hybrid(PREFILL)
    controller = Controller(ControllerSettings(mode=Mode.AUTO), itertools.count(1).__next__)
    settings = Settings(round(PUBLISHED_T))
    return simulate(fleet, settings, InForce(), requests, LongTerm(controller, fleet, requests)), controller


def regained(run: Run, phases: tuple[Phase, ...], phase_s: float = PHASE_S) -> list[float | None]:
    """Seconds from each phase's beginning; None where it was not regained, or lost again."""
    serving = serving_splits(run)
    found: list[float | None] = []
    for number, phase in enumerate(phases):
        begins, ends, model = number * phase_s, (number + 1) * phase_s, search(phase)
        enough = REGAINED * model.split().lambda_max
        since: float | None = None
        for at, prefill, decode in serving:
            until = next((later for later, _, _ in serving if later > at), float("inf"))
            if until <= begins or at >= ends:
                continue
            alone = model.threshold((prefill,)).prefill_limit
            spoken = decode * deployment(LINK_GBPS).local[0].decode.tokens_per_s / phase.output
            if min(alone, spoken) < enough:
                since = None
            elif since is None:
                since = max(at, begins) - begins
        found.append(since)
    return found


def serving_splits(run: Run) -> list[tuple[float, int, int]]:
    """When the nodes that serve became how many in prefill and in decode: one that changes serves in neither."""
    steps = []
    for one in run.records.conversions:
        to_prefill = one.to == "prefill"
        steps.append((one.asked_at, (0, -1) if to_prefill else (-1, 0)))
        if one.served_at == one.served_at:
            steps.append((one.served_at, (1, 0) if to_prefill else (0, 1)))
    prefill, decode = PREFILL, run.fleet.local[0].count - PREFILL
    found = [(0.0, prefill, decode)]
    for at, (more_prefill, more_decode) in sorted(steps):
        prefill, decode = prefill + more_prefill, decode + more_decode
        found.append((at, prefill, decode))
    return found


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--hours", type=float, default=12.0, help="of stationary traffic, one run a seed")
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    shifts: dict[str, list[list[float | None]]] = {}
    for name, phases in SHIFTS.items():
        shifts[name] = [regained(simulated(traffic(phases, PHASE_S, seed))[0], phases) for seed in range(asked.seeds)]
    still = [
        len(simulated(traffic((AS_IT_WAS,), asked.hours * 3600.0, seed))[0].records.conversions)
        for seed in range(asked.seeds if asked.hours > 0 else 0)
    ]
    if asked.json:
        print(json.dumps({"regained_s": shifts, "stationary_hours": asked.hours, "conversions": still}))
        return
    for name, runs in shifts.items():
        print(name)
        for seed, each in enumerate(runs):
            print(f"  seed {seed}: " + ", ".join("never" if s is None else f"{s:.0f} s" for s in each[1:]))
    print(f"conversions in {asked.hours:g} h of stationary traffic, by seed: {still}")


if __name__ == "__main__":
    main()
