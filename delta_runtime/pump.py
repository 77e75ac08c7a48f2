"""Between the session and the ledger: events out of the one, the order of victims back into it.

Covers how the account is kept, and the ranking for which the session asks when memory gets tight and no plan says what
leaves. Does not cover what leaves (online), nor the record of a step (record).
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import numpy as np

from delta_runtime.act.tiers import Tiers
from delta_runtime.core.events import Distance, Events, Place, PublishQueue, Shortfall
from delta_runtime.core.transfer import Links
from delta_runtime.extension import _C
from delta_runtime.online.ledger import Ledger, LedgerError
from delta_runtime.online.policies import Policy
from delta_runtime.record.step_log import drain_events

logger = logging.getLogger(__name__)


class Pump:
    """Keeps the account of one session, and ranks what is there.

    Args:
        session: of the runtime.
        policy: says what goes first.
        tiers: below the device.
        checked: whether the ledger verifies itself after each event.
    """

    def __init__(
        self,
        session: _C.Session,
        policy: Policy,
        tiers: Tiers,
        *,
        checked: bool,
    ) -> None:
        self._session = session
        self._policy = policy
        self._tiers = tiers
        self._checked = checked
        self._ledger = Ledger(policy, checked=checked)
        self._logged: list[Events] = []  # of the step that is logged now
        session.set_default_weight(int(policy.default_weight))
        self.distance: Distance = policy.distance
        """What weights are divided by when room is needed."""
        session.set_distance(int(self.distance))
        self.tick_s = 0.0
        """Mean seconds of an op; 0 as long as nothing is known."""
        self.listener: Callable[[Events], None] | None = None
        """Called with all events that are taken in; while there is one, none are left out."""

    def drain(self, _: int = 0) -> None:
        """Take in what has happened since the last time, but for what `end_step` has left out."""
        events = drain_events(self._session)
        if not len(events):
            return
        if self.listener is not None:
            self.listener(events)
        if self._session.logging():
            self._logged.append(events)
        try:
            self._ledger.handle(events)
        except LedgerError:
            if self._checked:
                raise
            logger.exception("delta_runtime: the ledger is spent; a new one starts")
            self._ledger = Ledger(self._policy)

    def end_step(self) -> None:
        """Take in what has happened, as far as a later ranking can see anything of it.

        Of a page that came and went since the last time it sees nothing, unless the ledger needs all events.
        """
        needs_all = self._session.logging() or self.listener is not None or self._ledger.needs_all
        if needs_all or not self._session.leave_out_gone():
            self.drain()

    def take_logged(self) -> Events | None:
        """Return the events of the step that was logged, for its record; None where there are none."""
        logged, self._logged = self._logged, []
        return np.concatenate(logged) if logged else None

    def take_shortfall(self) -> Shortfall | None:
        """Return the worst request for room since this was asked last that could not be met; None where all were."""
        return self._ledger.take_shortfall()

    def rank(self, need_bytes: int) -> None:
        """Rank what is there, when room is needed and no plan says what leaves.

        Args:
            need_bytes: that are asked for.
        """
        self.drain()
        queue: PublishQueue = self._ledger.rank(int(self._session.tick()), self.links())
        distance = queue.distance if not self._policy.plans else self.distance
        self._session.publish(
            np.ascontiguousarray(queue.pages),
            np.ascontiguousarray(queue.weights),
            np.ascontiguousarray(queue.exits),
            int(distance),
        )

    def links(self) -> Links:
        """Return what is known of the lanes now: the throttle, or what they were seen to do."""
        if Place.SWAPPED not in self._policy.evicts_to:
            return Links()
        nearest = self._session.tiers()[0]
        throttle = self._tiers.link_bytes_per_s if nearest["tier"] == "host" else 0.0
        speed = {}
        for name in ("out", "in"):
            _, bytes_, busy_s, _ = nearest[name]
            seen = bytes_ / busy_s if busy_s > 0 else 0.0
            speed[name] = (seen or throttle) if self._tiers.link_measured else (throttle or seen)
        return Links(
            out_bytes_per_s=speed["out"],
            in_bytes_per_s=speed["in"],
            out_queued_bytes=nearest["out"][3],
            in_queued_bytes=nearest["in"][3],
            store_bytes=nearest["cap_bytes"],
            tick_s=self.tick_s,
        )
