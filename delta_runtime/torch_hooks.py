"""What a runtime puts into torch while it is entered, and takes away again.

Saved-tensor hooks, the observer, the hooks around optimizers' steps, the methods of tensors that write past the
dispatcher, and torch.func's way of switching hooks off. Covers one set of these at a time, on one thread. Does not
cover what they do: the session does that.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

from delta_runtime import optimizer_hooks, raw_access, saved_leaves
from delta_runtime.core.warn import warn
from delta_runtime.extension import _C, shielded
from delta_runtime.optimizer_hooks import OptimizerHook

HookPair: TypeAlias = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]

_RESCUE_KEY = "TESTING_ONLY_GenericMode"
"""The dispatch key whose fallback runs ops again that ran out of an accelerator's memory (csrc/observe/op_rescue.h)."""

_attached: TorchHooks | None = None
_torch_disable_saved_tensors_hooks = torch.autograd.graph.disable_saved_tensors_hooks


class TorchHooks:
    """The hooks of one runtime.

    Args:
        session: of the runtime; it packs and unpacks.
        on_cpu: whether the device is the CPU pool.
        strict: whether an allocation above the budget is an error.
        step_over: called at the first op behind a backward.
        pump: called when room is needed and no plan says what leaves; None where nobody ranks.
        drain: called when many events have piled up.
        before_optimizer, after_optimizer: called around each step of an optimizer.
    """

    def __init__(
        self,
        session: _C.Session,
        *,
        on_cpu: bool,
        strict: bool,
        step_over: Callable[[int], None],
        pump: Callable[[int], None] | None,
        drain: Callable[[int], None],
        before_optimizer: OptimizerHook,
        after_optimizer: OptimizerHook,
    ) -> None:
        self._session = session
        self._on_cpu = on_cpu
        self._strict = strict
        self._pump = pump
        self._drain = drain
        self._before_optimizer = before_optimizer
        self._after_optimizer = after_optimizer
        self.step_over = step_over
        self.pair: HookPair = (session.pack_hook(), session.unpack_hook())
        """The two that autograd calls."""
        self.thread = threading.current_thread()
        """That the runtime was entered on last."""
        self.entry = 0
        """Changes whenever the runtime is entered or left: whoever is inside of another entry has lost its own."""
        self.are_attached = False

    def attach(self, above: Sequence[HookPair] = ()) -> None:
        """Put all in place, below the hooks in `above`."""
        global _attached
        _attached = self
        self.are_attached = True
        self._session.set_pump(self._pump)
        self._session.set_step_over(self.step_over)
        self._session.set_drain(self._drain)
        if not self._on_cpu:
            _let_higher_order_ops_pass()
        self._session.enter()
        raw_access.listen(self._session)
        saved_leaves.install()
        _C.watch_data_setter()
        if self._on_cpu:
            _C.cpu_pool.set_soft_limit_is_hard(self._strict)
        choose_hooks()
        for pair in (self.pair, *above):
            torch._C._autograd._push_saved_tensors_default_hooks(*pair)
        torch.autograd.graph.disable_saved_tensors_hooks = _disable_saved_tensors_hooks
        optimizer_hooks.attach(self._before_optimizer, self._after_optimizer)

    def attach_lowest(self) -> None:
        """Put all in place, below all hooks that are there."""
        above = _take_all()
        try:
            self.attach(above)
        except BaseException:
            self.detach()
            if not any_hooks():
                _put(above)
            raise

    def detach(self) -> None:
        """Take away what `attach` put in place, or as much of it as there is. Idempotent."""
        if not self.are_attached:
            return
        self.are_attached = False
        try:
            self._pop_pair()
        finally:
            self._take_from_process()

    def detach_again(self) -> None:
        """Take away what autograd has put back behind a backward that had a hook which detached.

        It puts the saved-tensor hooks back that were there when the backward began. Nothing where they are not there,
        or on another thread.
        """
        if not self.are_attached and self.thread is threading.current_thread():
            self._pop_pair()
            _C.rescue_no_ops()

    def _pop_pair(self) -> None:
        above = self.above()
        if above is not None:
            for _ in (self.pair, *above):
                torch._C._autograd._pop_saved_tensors_default_hooks()
            for pair in above:
                torch._C._autograd._push_saved_tensors_default_hooks(*pair)

    def abandon(self) -> None:
        """Take away what is not of the thread that entered: that thread ended, and its hooks with it."""
        self.are_attached = False
        self._take_from_process()

    def _take_from_process(self) -> None:
        global _attached
        if _attached is self:
            _attached = None
        optimizer_hooks.detach(self._before_optimizer)
        torch.autograd.graph.disable_saved_tensors_hooks = _torch_disable_saved_tensors_hooks
        self._session.leave()
        self._session.set_pump(None)
        self._session.set_step_over(None)
        self._session.set_drain(None)
        if self._on_cpu:
            _C.cpu_pool.set_soft_limit_is_hard(False)

    def above(self) -> list[HookPair] | None:
        """Return the hooks that others put on top of ours and have not taken away yet, lowest first.

        None where ours are not there.
        """
        above = _take_all(down_to=self.pair)
        found = any_hooks()
        _put(above)
        return above if found else None


def any_hooks() -> bool:
    """Whether anybody has saved-tensor hooks in place on this thread."""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def _take_all(down_to: HookPair | None = None) -> list[HookPair]:
    """Take away all saved-tensor hooks that are above the pair, or all there are. Return them, lowest first."""
    taken: list[HookPair] = []
    while (top := torch._C._autograd._top_saved_tensors_default_hooks(True)) is not None:
        if down_to is not None and top[0] is down_to[0]:
            break
        torch._C._autograd._pop_saved_tensors_default_hooks()
        taken.append(top)
    taken.reverse()
    return taken


def _put(pairs: Sequence[HookPair]) -> None:
    for pair in pairs:
        torch._C._autograd._push_saved_tensors_default_hooks(*pair)


def choose_hooks() -> None:
    """Have autograd call the session without Python, but where remote procedure calls are on.

    There its distributed engine may be used, which bears only PyTorch's own default engine.
    """
    rpc = sys.modules.get("torch.distributed.rpc")
    _C.use_direct_hooks(
        rpc is None or not rpc.is_available() or not rpc._is_current_rpc_agent_set()
    )


def _let_higher_order_ops_pass() -> None:
    """Have torch.cond, flex_attention and their kin take no notice of `_RESCUE_KEY`.

    They choose by dispatch keys what they do, and raise where one is on that they know nothing of. The ops that they
    call have the key all the same. For good: without the runtime the key is never on.
    """
    key = torch._C._parse_dispatch_key(_RESCUE_KEY)
    of_later_ones = torch._ops._HIGHER_ORDER_OP_DEFAULT_FALLTHROUGH_DISPATCH_KEYS
    if key not in of_later_ones:
        of_later_ones.append(key)
        for op in torch._ops._higher_order_ops.values():
            op.fallthrough(key)


class disable(contextlib.ContextDecorator):  # noqa: N801  used like a function
    """Take the entered runtime's hooks, observer and soft limit away for the duration of a block."""

    def __init__(self) -> None:
        self._hooks: TorchHooks | None = None
        self._entry = 0  # that this is inside of
        self._above: Sequence[HookPair] = ()

    def _recreate_cm(self) -> disable:
        return disable()

    @shielded
    def __enter__(self) -> None:
        hooks = _attached
        _C.suspend_idle(True)
        if hooks is None or hooks.thread is not threading.current_thread():
            return
        self._above = hooks.above() or ()
        self._hooks, self._entry = hooks, hooks.entry
        hooks.detach()

    @shielded
    def __exit__(self, *_: object) -> None:
        hooks, self._hooks = self._hooks, None
        _C.suspend_idle(False)
        if hooks is None or hooks.entry != self._entry:
            return  # left meanwhile: there is nothing to put back
        if hooks.thread is not threading.current_thread():
            warn(
                "delta_runtime: a block of delta_runtime.disable() ended on another thread than the one "
                "it began on. The runtime stays off until it is left and entered again.",
            )
            return
        for _pair in self._above:
            torch._C._autograd._pop_saved_tensors_default_hooks()
        hooks.attach(self._above)


class _disable_saved_tensors_hooks(contextlib.ContextDecorator):  # noqa: N801  as torch's
    """Stand down for what cannot bear hooks (torch.func), where torch would raise because of ours.

    Hooks that somebody else put on top of ours still make torch raise, as it should.
    """

    def __init__(self, error_message: str) -> None:
        self._message = error_message
        self._stack = contextlib.ExitStack()

    def _recreate_cm(self) -> _disable_saved_tensors_hooks:
        return _disable_saved_tensors_hooks(self._message)

    @shielded
    def __enter__(self) -> None:
        top = torch._C._autograd._top_saved_tensors_default_hooks(False)
        with contextlib.ExitStack() as stack:
            if _attached is not None and top is not None and top[0] is _attached.pair[0]:
                stack.enter_context(disable())
            stack.enter_context(_torch_disable_saved_tensors_hooks(self._message))
            self._stack = stack.pop_all()

    @shielded
    def __exit__(self, *raised: Any) -> None:
        self._stack.__exit__(*raised)
