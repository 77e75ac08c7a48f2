"""What plans leave of an accelerator's budget to its caching allocator, which takes more than what lives.

The budget is about what the process takes from the device: the allocator's reserved bytes. Plans are about live bytes.
Between the two lie the allocator's fragments: cached blocks, and parts of segments that no request fits into. How many
there are depends on the sizes and the order of all requests, so it is not known before; it is seen in steps.

Covers the margin of one runtime, over all its steps. Does not cover plans (plan_cache), nor a step that runs out of
memory all the same (csrc/observe/op_rescue.h).

Note: how the margin is found
  1. Only steps that followed their plan count, and not the first two of a plan. If more is reserved behind one than
     the budget, that may be what others have left in the cache: the cache is given back right before another step, and
     what is reserved behind that step is its own. With a new plan it is given back too.
  2. If that is more than the budget, live bytes are to be less in the same proportion. If the allocator had to give
     its cache back within a step, because the device itself had no more, they are to be a few percent less, the more
     the oftener it had to. Then a plan for that is waited for.
  3. Steps that follow no plan count where they keep running out of the device's memory.
  4. The search rests as long as steps of a plan fit. It ends at what a step needs at the least; at half of the budget;
     and where making less live does not help any more, or costs more than a user can bear: then the best margin so
     far is taken.
  5. While a cut may still come, a step whose live bytes pass the budget does not show that it cannot be met: the
     allocator rounds requests up, which the margin will make room for.
"""

from __future__ import annotations

from collections.abc import Callable

_BEFORE_JUDGED = 2  # steps of a plan
_PATIENCE = 8  # steps in which a plan for the new margin is waited for
_LEAST_LESS, _MOST_LESS = 0.01, 0.2  # of what lives, at a time
_LESS_FOR_RETRY, _MOST_FOR_RETRIES = 0.04, 0.1  # for each of a step's few, and for all
_UNPLANNED_RETRIES = 8  # steps without a plan in which the device had no more, before they count
_ABOVE_LEAST = 1.01
_MOST_SHARE = 0.5  # of the budget
_LOOKED_FOR = 16  # steps in which a cut may still come, from the first one or the last cut on
_UNPLANNED = 6  # steps in a row without a plan: none comes
_IN_VAIN = 5  # cuts in a row that do not help
_HELPS = 0.995  # of the reserved bytes before
_NOT_FITTING = 1e6  # that more is reserved than the budget is worse than any number of retries


class AllocatorMargin:
    """Takes in what the allocator came to in each step, and says how much of the budget is left to it.

    Args:
        budget_bytes: the budget, which the reserved bytes are to keep to.
        plans: whether there are plans to make for less; else only a device that is full counts (rule 3).
    """

    def __init__(self, budget_bytes: int, *, plans: bool = True) -> None:
        self._budget_bytes = budget_bytes
        self._plans = plans
        self.bytes = 0
        """What plans keep below the budget."""
        self.measures = False
        """Whether the cache is to be given back right before the next step."""
        self._measured = False  # before the step that goes on it was
        self._plan: object = None  # that the last step followed
        self._steps = 0  # of that plan
        self._waited: int | None = None  # steps for a plan for this margin; None: it is there
        self._retries: int | None = None
        self._without = 0  # steps in a row that followed no plan
        self._unplanned = 0  # of such steps, those with retries
        self._settled = False  # steps of this plan fit
        self._over = False  # nothing more is looked for
        self._left = _LOOKED_FOR if plans else 0
        self._best: tuple[float, int] | None = None  # what a margin came to, and that margin
        self._in_vain = 0

    @property
    def is_looked_for(self) -> bool:
        """Whether more of the budget may be kept away soon."""
        return self._left > 0 and not self._over and self._without <= _UNPLANNED

    def measure(self) -> None:
        """Take in that the cache is given back, right before a step."""
        self._measured, self.measures = True, False

    def saw(
        self,
        *,
        reserved_bytes: int,
        peak_bytes: int,
        retries: int,
        least_bytes: Callable[[], int],
        plan: object,
        dear: bool = False,
    ) -> None:
        """Take a step in.

        Args:
            reserved_bytes: that the allocator has taken from the device when the step is over.
            peak_bytes: the most that lived in it.
            retries: how often the allocator gave its cache back because the device had no more, ever.
            least_bytes: asked for a budget that the step needs at the least; 0 where none is known.
            plan: that the step has followed; None where it has not.
            dear: whether that plan costs more than a user can bear.
        """
        measured, self._measured = self._measured, False
        before = retries if self._retries is None else self._retries
        retried, self._retries = max(0, retries - before), retries
        self._left -= self._left > 0
        if not self._plans:
            plan = None
        self._without = self._without + 1 if plan is None else 0
        if plan is None:
            self._unplanned += retried > 0
            if self._unplanned > _UNPLANNED_RETRIES:
                self._unplanned = 0
                self._keep_away(_part_after(retried), peak_bytes, least_bytes())
            return
        if plan is not self._plan or self._is_patience_over():
            self._plan, self._steps, self._waited, self._settled = plan, 0, None, False
            self.measures = reserved_bytes > self._budget_bytes and not self._over
            return
        if self._waited is not None or self._over or (self._settled and not retried):
            return
        self._steps += 1
        if self._steps < _BEFORE_JUDGED:
            return
        fits = reserved_bytes <= self._budget_bytes
        if fits and not retried:
            self._settled = True
            return
        if not fits and not measured:
            self.measures = True
            return
        came_to = float(retried) if fits else _NOT_FITTING * reserved_bytes / self._budget_bytes
        if dear or self._is_in_vain(came_to):
            self._take_best()
            return
        part = _part_after(retried) if fits else self._budget_bytes / reserved_bytes
        self._keep_away(part, peak_bytes, least_bytes())

    def _is_patience_over(self) -> bool:
        if self._waited is None:
            return False
        self._waited += 1
        return self._waited > _PATIENCE

    def _is_in_vain(self, came_to: float) -> bool:
        """Take in what this margin came to; return whether less does not help any more."""
        if self._best is None or came_to < self._best[0] * _HELPS:
            self._best, self._in_vain = (came_to, self.bytes), 0
        else:
            self._in_vain += 1
        return self._in_vain >= _IN_VAIN

    def _take_best(self) -> None:
        self._over = True
        if self._best is not None:
            self.bytes = min(self.bytes, self._best[1])

    def _keep_away(self, part: float, peak_bytes: int, least_bytes: int) -> None:
        """Let only a part of what lived live from the next plan on."""
        limit_bytes = min(self._budget_bytes - self.bytes, peak_bytes)
        part = min(max(part, 1 - _MOST_LESS), 1 - _LEAST_LESS)
        lowest_bytes = max(_ABOVE_LEAST * least_bytes, (1 - _MOST_SHARE) * self._budget_bytes)
        less_bytes = int(max(part * limit_bytes, lowest_bytes))
        if less_bytes < self._budget_bytes - self.bytes and less_bytes < limit_bytes:
            self.bytes = self._budget_bytes - less_bytes
            self._waited = 0
            self._left = _LOOKED_FOR
        elif self._best is not None:
            self._take_best()


def _part_after(retries: int) -> float:
    """Return which part of what may live does so from now on, after a step with so many retries."""
    return 1 - min(_LESS_FOR_RETRY * retries, _MOST_FOR_RETRIES)
