"""What the extension offers. csrc/bindings/ binds it, csrc/util/signals.cpp what keeps signals away.

Sizes are bytes, times seconds, ticks counts of ops. Rows cross as bytes: structs that core/events.py and
record/step_log.py lay out as numpy dtypes. tests/native/test_stub.py compares this file with the extension.
"""

from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any, TypedDict

import torch
from numpy.typing import NDArray

TierRow = TypedDict(
    "TierRow",
    {
        "tier": str,  # host or disk
        "cap_bytes": int,
        "used_bytes": int,
        "peak_used_bytes": int,
        "taken_bytes": int,
        "descriptor": int,
        "pinned_bytes": int,
        "refusals": int,
        "out": tuple[int, int, float, int],  # transfers, bytes, busy seconds, bytes queued
        "in": tuple[int, int, float, int],
        "streams": tuple[int, int] | None,
    },
)

Column = NDArray[Any]
Callback = Callable[[int], object]

class Plan:
    """A plan as the session carries it out; csrc/state/plan.h. Columns as of `delta_runtime.core.plan.Plan`.

    Raises:
        ValueError: the columns do not fit each other, or the plan cannot be carried out: its intervals are out
            of order, or it is not carried out as written and a value leaves more than once.
    """

    def __init__(
        self,
        *,
        fingerprints: Column,
        weights: Column,
        use_offsets: Column,
        uses: Column,
        interval_offsets: Column,
        dropped_twice: Column,
        begins: Column,
        ends: Column,
        exits: Column,
        copy_back_at: Column,
        as_written: bool = False,
    ) -> None: ...

class Counters:
    """What a session has counted since its counters were reset; csrc/state/counters.h has a word on each."""

    ops: int
    packs: int
    unpacks: int
    managed_unpacks: int
    packed_bytes: int
    drops: int
    dropped_bytes: int
    rebuilds: int
    rebuilt_bytes: int
    replayed_ops: int
    shortcuts: int
    shortcut_failures: int
    rebuild_s: float
    swap_outs: int
    swapped_out_bytes: int
    clean_evictions: int
    swap_ins: int
    swapped_in_bytes: int
    written_back_bytes: int
    prefetches: int
    prefetch_hits: int
    prefetch_late: int
    prefetch_misses: int
    prefetch_vain: int
    swap_refusals: int
    failed_writes: int
    failed_reads: int
    lost_pages: int
    write_error: int
    read_error: int
    out_stall_s: float
    in_stall_s: float
    boundary_evictions: int
    rescues: int
    rescued_bytes: int
    shortfalls: int
    shortfall_bytes: int
    comparisons: int
    mismatches: int
    unhashed: int
    audits: int
    audit_failures: int
    clones_on_write: int
    pumps: int
    plan_hits: int
    plan_misses: int
    plan_actions: int
    plan_overdue: int
    exposed_bytes: int
    begin_bytes: int
    stuck_bytes: int
    stuck_op: str
    kept_bytes: dict[str, int]

class Levels:
    """How much a session has of what, at this moment."""

    live_tickets: int
    pages: int
    managed_pages: int
    managed_resident_bytes: int
    dropped_now_bytes: int
    swapped_now_bytes: int
    uncounted_bytes: int
    step_peak_bytes: int

class Session:
    """The runtime's side in C++: pages, tickets, records."""

    def __init__(
        self,
        *,
        device: str = "cpu",
        budget_bytes: int = 0,
        min_bytes: int = 4096,
        verify: int = 1,
        stress: int = 0,
        seed: int = 0,
        drop: bool = True,
        swap: bool = False,
        host_bytes: int = 0,
        link_bytes_per_s: float = 0.0,
        spill_file: int = -1,
        spill_bytes: int = 0,
        spill_direct: bool = False,
        pin: Callable[[int, int], bool] | None = None,
        unpin: Callable[[int, int], bool] | None = None,
    ) -> None: ...
    # Entering and leaving.
    def pack_hook(self) -> Callable[[torch.Tensor], Any]: ...
    def unpack_hook(self) -> Callable[[Any], torch.Tensor]: ...
    def enter(self) -> None: ...
    def leave(self) -> None: ...
    def rest(self) -> None: ...
    def stop_lanes(self) -> None: ...
    def set_pump(self, called: Callback | None) -> None: ...
    def set_step_over(self, called: Callback | None) -> None: ...
    def set_drain(self, called: Callback | None) -> None: ...
    # Steps.
    def begin_step(self) -> None: ...
    def end_step(self) -> None: ...
    def forget_past(self) -> None: ...
    def set_taping(self, on: bool) -> None: ...
    def set_logging(self, on: bool) -> None: ...
    def logging(self) -> bool: ...
    def tick(self) -> int: ...
    def step_begin_tick(self) -> int: ...
    def cloned_bytes(self) -> int: ...
    def fingerprint(self) -> int: ...
    def judge(self, later: bool = False) -> str: ...
    # What was seen.
    def counters(self) -> Counters: ...
    def levels(self) -> Levels: ...
    def reset_counters(self) -> None: ...
    def packs(self) -> int: ...
    def live_bytes(self) -> int: ...
    def tiers(self) -> list[TierRow]: ...
    def take_in_transfers(self) -> None: ...
    def drain_events(self) -> bytes: ...
    def logged_ops(self) -> bytes: ...
    def logged_inputs(self) -> bytes: ...
    def logged_outputs(self) -> bytes: ...
    def logged_names(self) -> dict[int, str]: ...
    def set_tracing(self, on: bool) -> None: ...
    def drain_trace(self) -> bytes: ...
    def profile(self) -> bytes: ...
    # What is to leave.
    def set_budget(self, budget_bytes: int) -> None: ...
    def set_default_weight(self, weight: int) -> None: ...
    def set_distance(self, distance: int) -> None: ...
    def set_plans(self, plans: Sequence[Plan]) -> None: ...
    def publish(self, pages: Column, weights: Column, exits: Column, distance: int) -> None: ...
    def make_room(self, bytes_: int) -> int: ...
    def begin_copies(self) -> None: ...
    def take_in(self, tensor: torch.Tensor) -> None: ...
    # Writes that the dispatcher does not see.
    def mark_written(self, tensor: torch.Tensor) -> None: ...
    def prepare_write(self, tensor: torch.Tensor) -> None: ...

class Ticket:
    """What autograd gets in place of a saved tensor."""

class Shielded:
    """A callable that no signal handler interrupts."""

    def __init__(self, function: Callable[..., Any]) -> None: ...
    def __call__(self, *args: Any, **kwargs: Any) -> Any: ...

cpu_pool: ModuleType  # delta_runtime/cpu_pool.py has its functions
planners: ModuleType  # Cover, Evaluation, PresenceSearch and RerunColumns, of csrc/planners
dry_run: ModuleType  # enter, leave, is_entered, is_known: csrc/dry_run
simulate: ModuleType  # StepColumns, Plan, VirtualStep and Totals, of csrc/simulate

def place_of(ticket: Any) -> str: ...
def asked_to_stop() -> bool: ...
def signals_held() -> int: ...
def set_main_thread(ident: int | None) -> None: ...
def set_error_types(
    inplace: type[BaseException], mismatch: type[BaseException], swap: type[BaseException]
) -> None: ...
def set_budget_error(type_: type[BaseException]) -> None: ...
def set_python_random(save: Callable[[], Any], restore: Callable[[Any], object]) -> None: ...
def before_raw_access(
    tensor_or_storage: Any, writes: bool, loan: int, listeners: Sequence[Session]
) -> bool: ...
def take_back(loans: Sequence[int], listeners: Sequence[Session]) -> None: ...
def any_watches() -> bool: ...
def watch_data_setter() -> None: ...
def release_repointed() -> None: ...
def forget_locks() -> None: ...
def preallocate(descriptor: int, bytes_: int) -> int: ...
def live_records() -> int: ...

# For tests and benchmarks.
def set_sabotage(which: int) -> None: ...
def sabotage_names() -> list[str]: ...
def set_most_watched_bytes(bytes_: int) -> int: ...
def set_poison(on: bool) -> None: ...
def allocate_with_error_pending(bytes_: int) -> bool: ...
def enter_bare_observer() -> None: ...
def leave_bare_observer() -> None: ...
def device_hash(t: torch.Tensor, budget_bytes: int = ...) -> tuple[int, int]: ...
