"""What plans leave of an accelerator's budget to its caching allocator, which takes more than what lives.

The budget is about what the process takes from the device: the allocator's reserved bytes. Plans are about live bytes.
Between the two lie the allocator's fragments: cached blocks, and parts of segments that no request fits into. How many
there are depends on the sizes and the order of all requests, so it is not known before; it is seen in steps.

Covers the margin of one runtime, over all its steps. Does not cover plans (plan_cache), nor a step that runs out of
memory all the same (csrc/observe/op_rescue.h).

Note: how the margin is found
  1. Only a step that followed its plan counts, and not the first two of a plan: until then the cache holds what other
     steps needed. With a new plan the cache is given back to the device, where more is reserved than the budget.
  2. If more is reserved than the budget, live bytes are to be less in the same proportion. If the allocator had to give
     its cache back within the step, because the device itself had no more, they are to be a few percent less,
     the more the oftener it had to.
  3. Steps that follow no plan count where they keep running out of the device's memory.
  4. What a step needs at the least is not touched, nor is more than half of the budget kept away.
  5. As long as the margin is looked for, a step whose live bytes pass the budget does not show that it
     cannot be met: the allocator rounds requests up, which the margin will make room for.
"""

from __future__ import annotations

_BEFORE_JUDGED = 2  # steps of a plan
_PATIENCE = 8  # steps in which a plan for the new margin is waited for
_LEAST_LESS, _MOST_LESS = 0.01, 0.2  # of what may live, at a time
_LESS_FOR_RETRY, _MOST_FOR_RETRIES = 0.02, 0.1  # for each of a step, and for all
_UNPLANNED_RETRIES = 8  # steps without a plan in which the device had no more, before they count
_ABOVE_LEAST = 1.01
_MOST_SHARE = 0.5  # of the budget
_LOOKED_FOR = 40  # steps, at the most


class AllocatorMargin:
    """Takes in what the allocator came to in each step, and says how much of the budget is left to it.

    Args:
        budget_bytes: the budget, which the reserved bytes are to keep to.
    """

    def __init__(self, budget_bytes: int) -> None:
        self._budget_bytes = budget_bytes
        self.bytes = 0
        """What plans keep below the budget."""
        self._plan: object = None  # that the last step followed
        self._steps = 0  # of that plan
        self._waited: int | None = None  # steps for a plan for this margin; None: it is there
        self._retries = 0
        self._unplanned = 0  # retries in steps that followed no plan
        self._left = _LOOKED_FOR

    @property
    def is_looked_for(self) -> bool:
        """Whether more of the budget may be kept away by and by."""
        return self._left > 0

    def saw(self, *, reserved_bytes: int, retries: int, least_bytes: int, plan: object) -> bool:
        """Take a step in.

        Args:
            reserved_bytes: that the allocator has taken from the device when the step is over.
            retries: how often it gave its cache back because the device had no more, ever.
            least_bytes: a budget that the step needs at the least; 0 where none is known.
            plan: that the step has followed; None where it has not.

        Returns:
            Whether the cache is to be given back before the next step.
        """
        self._left -= self._left > 0
        retried, self._retries = retries - self._retries, retries
        over = reserved_bytes > self._budget_bytes
        if plan is None:
            self._unplanned += retried > 0
            if self._unplanned > _UNPLANNED_RETRIES:
                self._unplanned = 0
                self._keep_away(_part_after(retried), least_bytes)
            return False
        if plan is not self._plan or self._is_patience_over():
            self._plan, self._steps, self._waited = plan, 0, None
            return over or retried > 0
        if self._waited is not None:
            return False
        self._steps += 1
        if self._steps < _BEFORE_JUDGED:
            return False
        if over:
            self._keep_away(self._budget_bytes / reserved_bytes, least_bytes)
        elif retried:
            self._keep_away(_part_after(retried), least_bytes)
        else:
            self._left = 0
        return False

    def _is_patience_over(self) -> bool:
        if self._waited is None:
            return False
        self._waited += 1
        return self._waited > _PATIENCE

    def _keep_away(self, part: float, least_bytes: int) -> None:
        """Let only a part of what may live now live from the next plan on."""
        limit_bytes = self._budget_bytes - self.bytes
        part = min(max(part, 1 - _MOST_LESS), 1 - _LEAST_LESS)
        lowest_bytes = max(_ABOVE_LEAST * least_bytes, (1 - _MOST_SHARE) * self._budget_bytes)
        less_bytes = int(max(part * limit_bytes, lowest_bytes))
        if less_bytes < limit_bytes:
            self.bytes = self._budget_bytes - less_bytes
            self._waited = 0
        else:
            self._left = 0


def _part_after(retries: int) -> float:
    """Return which part of what may live does so from now on, after a step with so many retries."""
    return 1 - min(_LESS_FOR_RETRY * retries, _MOST_FOR_RETRIES)
