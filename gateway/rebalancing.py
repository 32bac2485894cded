"""The long-term loop of a running gateway: looks every few seconds, and does what the controller decides."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from gateway.conversions import Conversions, not_leader
from gateway.errors import ApiError
from gateway.history import ActionRecord, History
from gateway.leadership import Leadership
from gateway.observing import Observer
from gateway.threshold import Threshold
from kvcache.wire import Role
from scheduler.controller.actions import Action, Convert, SetThreshold
from scheduler.controller.assessment import Assessment
from scheduler.controller.controller import Controller
from scheduler.controller.forecast import DailyPattern
from scheduler.controller.observation import Observation, Spoken, Stage
from scheduler.controller.proposals import NoSuchProposal, Proposal
from scheduler.controller.settings import ControllerSettings
from scheduler.threshold import ThresholdFollower

log = logging.getLogger(__name__)

PassOn = Callable[[Sequence[int], Sequence[Spoken]], None]


class Rebalancing:
    """Owns the controller and drives it between ``start`` and ``stop``. Only a gateway that leads acts.

    ``follower`` follows the best threshold, where it is automatic. ``pass_on`` gets the traffic that this gateway saw
    while another one leads.
    """

    def __init__(
        self,
        settings: ControllerSettings,
        step_s: float,
        observer: Observer,
        conversions: Conversions,
        threshold: Threshold,
        history: History,
        leadership: Leadership,
        follower: ThresholdFollower | None = None,
        pass_on: PassOn | None = None,
    ) -> None:
        self.conversions = conversions
        self.history = history
        self.step_s = step_s
        self.seen: Observation | None = None
        """The newest look at the fleet."""
        self._observer = observer
        self._threshold = threshold
        self._leadership = leadership
        self._follower = follower
        self._pass_on = pass_on
        self._task: asyncio.Task[None] | None = None
        self.controller = Controller(
            settings,
            leadership.next_epoch,
            DailyPattern(history.slots()),
            unix_at_0=time.time() - time.monotonic(),
        )

    @property
    def assessment(self) -> Assessment | None:
        """The last look at the whole."""
        return self.controller.assessment

    def view(self) -> dict[str, Any]:
        """Mode, the last look at the whole and the newest proposals, as plain values."""
        controller = self.controller
        found: dict[str, Any] = msgspec.to_builtins(
            {
                "mode": controller.settings.mode,
                "assessment": controller.assessment,
                "proposals": controller.proposals.all,
            }
        )
        return found

    def start(self) -> None:
        """Begin to look; there must be a running loop."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """End the looking and what conversions there are. Idempotent."""
        task, self._task = self._task, None
        if task is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        await self.conversions.close()

    async def _run(self) -> None:
        """Step for ever. A step that breaks is logged, and the next one comes."""
        while True:
            await asyncio.sleep(self.step_s)
            try:
                self.step(time.monotonic())
            except Exception:
                log.exception("rebalancing step broke")

    def step(self, now: float) -> None:
        """Look once and act."""
        seen = self._observer.observe(self._threshold.tokens, self.conversions.take_failed())
        self.seen = seen or self.seen
        if seen is None:
            return
        if not self._leadership.leads:
            if self._pass_on is not None:
                self._pass_on(seen.lengths, seen.spoken)
            return
        for action in self.controller.step(seen, now):
            self._act(action)
        self._follow()
        slot = self.controller.finished_slot
        if slot is not None:
            self.history.add_slot(slot)
        self._note_log()

    def approve(self, number: int, by: str) -> Proposal:
        """A person approves. Raises ApiError 404, or 409 where another gateway leads."""
        if not self._leadership.leads:
            raise not_leader(self._leadership)
        try:
            return self.controller.approve(number, by, time.monotonic())
        except NoSuchProposal as error:
            raise ApiError(404, str(error), code="proposal_not_found") from error
        finally:
            self._note_log()

    def refuse(self, number: int, by: str) -> Proposal:
        """A person refuses. Raises ApiError 404, or 409 where another gateway leads."""
        if not self._leadership.leads:
            raise not_leader(self._leadership)
        try:
            return self.controller.refuse(number, by, time.monotonic())
        except NoSuchProposal as error:
            raise ApiError(404, str(error), code="proposal_not_found") from error
        finally:
            self._note_log()

    def _act(self, action: Action) -> None:
        match action:
            case SetThreshold(tokens=tokens, reason=reason):
                self._threshold.tokens, self._threshold.reason = max(0, round(tokens)), reason
                log.info("threshold tokens=%d", self._threshold.tokens)
            case Convert(node_id=node_id, stage=stage):
                role = Role.PREFILL if stage is Stage.PREFILL else Role.DECODE
                try:
                    self.conversions.begin(
                        node_id,
                        role,
                        action.reason[:500],
                        "controller",
                        epoch=action.epoch,
                        proposal=action.proposal,
                        figures=self._figures(),
                    )
                except ApiError as error:  # it changed meanwhile; the next step sees that
                    self.history.note(ActionRecord(time.time(), "not_converted", f"{node_id}: {error.message}"))

    def _follow(self) -> None:
        """Set the threshold anew where that was left to what is seen, whoever moves nodes."""
        if self._follower is None or self.assessment is None:
            return
        tokens = self._follower.follow(self._threshold.tokens, self.assessment.threshold_best)
        if tokens != self._threshold.tokens:
            self._threshold.tokens = tokens
            self._threshold.reason = "prefill at home and in the clusters are full together there"
            log.info("threshold tokens=%d", tokens)

    def _figures(self) -> dict[str, Any]:
        figures: dict[str, Any] = msgspec.to_builtins(self.assessment)
        return figures

    def _note_log(self) -> None:
        """Keep what the controller said since the last time."""
        offset = time.time() - time.monotonic()
        for entry in self.controller.take_log():
            figures = {} if self.assessment is None else self._figures()
            self.history.note(ActionRecord(entry.at + offset, entry.what, entry.reason, figures))
