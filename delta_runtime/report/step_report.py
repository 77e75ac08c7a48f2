"""The report of a step: where the memory went, what was evicted, what it cost, what stood in the way.

Counts come from the extension; peaks are the allocator's own. Rendering is rich's, which draws from
Python's random generator, already when it is imported: it is imported late, and the generator put back.
"""

from __future__ import annotations

import contextlib
import html
import io
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from delta_runtime.core.errors import UsageError
from delta_runtime.core.events import Bounds, Shortfall
from delta_runtime.core.units import format_bytes, format_seconds
from delta_runtime.report.step_plot import LiveBytes, draw

if TYPE_CHECKING:
    from rich.table import Table

_REASONS = {
    "source": "inputs, parameters, buffers",
    "small": "smaller than min_bytes",
    "device": "on another device",
    "layout": "sparse, quantized or a subclass",
    "opaque": "from compiled code or an op that must not run twice",
    "unknown": "made where the runtime does not look",
}


@contextlib.contextmanager
def _random_state_kept() -> Iterator[None]:
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


@dataclass(frozen=True, slots=True)
class StepTotals:
    """Counts of one step, or of all of them.

    Args:
        steps: steps counted.
        peak_bytes: the allocator's highest live bytes.
        over_budget_steps: steps of which it passed the budget.
        packs, unpacks: saved tensors packed and unpacked.
        managed_unpacks: of the latter, those of storages that may be evicted.
        packed_bytes: bytes of managed storages.
        drops, dropped_bytes: storages freed to be recomputed.
        rebuilds, rebuilt_bytes, rebuild_s: storages recomputed, with the seconds of it.
        replayed_ops: ops run again.
        shortcuts, shortcut_failures: of these, made by a cheaper way; ways that were tried and failed.
        swap_outs, swapped_out_bytes: storages whose device copy went, for one below; `clean_evictions`
            of them at once, because the copy was there already.
        written_back_bytes: bytes copied to a tier below, whether their device copy went or not.
        swap_ins, swapped_in_bytes: storages copied back.
        prefetches: copies back that began before they were asked for.
        prefetch_hits, prefetch_late, prefetch_misses: what was asked for was there, was on its way,
            or was not.
        prefetch_vain: brought back and evicted again before it was used.
        swap_refusals: storages that no tier below had room for.
        failed_writes, failed_reads, lost_pages: copies to and from the disk that failed; storages among
            the latter that could not be recomputed either.
        write_error, read_error: the errno of the first failure of each, or 65,536 where the device failed; 0 for none.
        out_stall_s, in_stall_s: seconds that the step waited for a lane. On an accelerator these, and `rebuild_s`,
            are the device's, and counted when they are known: a step or two later. Waits for its disk are the host's.
        rescues, rescued_bytes: times that an allocation itself had to ask for room, or that an op ran out of memory.
        over_limit: allocations of an accelerator for which more than the budget had to be reserved.
        shortfalls, shortfall_bytes: requests that could not be met, and the worst of them.
        audits, audit_failures: ops run once more while their results were there; of these, other results.
        unhashed: values of which an accelerator's full memory had no room for a hash: not compared.
        comparisons, mismatches: storages that came back and were compared with what went; of these, other bytes.
        alone_steps: steps that were left alone, since observing them costs too much; see standing_aside.
        idle_steps: steps that were not observed, since those before had nothing to do; see idle_steps.
        kept_bytes: bytes saved but not managed, by reason.
        exposed_bytes: most bytes of managed storages that code outside autograd held when room was needed.
        planning_s: seconds of planning, between the steps and, in all of them together, beside them.
        begin_bytes: live at the first op.
        stuck_bytes, stuck_op: the most of the last step that nothing could be evicted from, and the op.
        uncounted_bytes: bytes of tensors that the CPU pool does not own.
        plan_hits: storages saved that a plan had foreseen.
        plan_misses: storages that no plan knew when they were saved, rebuilt, or written in place, or that a
            plan carried out as written had away when they were asked for.
        plan_actions: what was done because a plan is carried out as written: storages that left, copies back
            that began, and storages that were rebuilt before they were asked for.
        plan_overdue: storages that such a plan let go of, and that were still there when it wanted them again,
            or when the step ended: somebody else held them, or their copy was late.
    """

    steps: int = 0
    peak_bytes: int = 0
    over_budget_steps: int = 0
    ops: int = 0
    packs: int = 0
    unpacks: int = 0
    managed_unpacks: int = 0
    packed_bytes: int = 0
    drops: int = 0
    dropped_bytes: int = 0
    rebuilds: int = 0
    rebuilt_bytes: int = 0
    rebuild_s: float = 0.0
    replayed_ops: int = 0
    shortcuts: int = 0
    shortcut_failures: int = 0
    swap_outs: int = 0
    swapped_out_bytes: int = 0
    clean_evictions: int = 0
    written_back_bytes: int = 0
    swap_ins: int = 0
    swapped_in_bytes: int = 0
    prefetches: int = 0
    prefetch_hits: int = 0
    prefetch_late: int = 0
    prefetch_misses: int = 0
    prefetch_vain: int = 0
    swap_refusals: int = 0
    failed_writes: int = 0
    failed_reads: int = 0
    lost_pages: int = 0
    write_error: int = 0
    read_error: int = 0
    out_stall_s: float = 0.0
    in_stall_s: float = 0.0
    boundary_evictions: int = 0
    rescues: int = 0
    rescued_bytes: int = 0
    over_limit: int = 0
    shortfalls: int = 0
    shortfall_bytes: int = 0
    audits: int = 0
    audit_failures: int = 0
    unhashed: int = 0
    comparisons: int = 0
    mismatches: int = 0
    clones_on_write: int = 0
    pumps: int = 0
    plan_hits: int = 0
    plan_misses: int = 0
    plan_actions: int = 0
    plan_overdue: int = 0
    exposed_bytes: int = 0
    planning_s: float = 0.0
    begin_bytes: int = 0
    stuck_bytes: int = 0
    stuck_op: str = ""
    uncounted_bytes: int = 0
    alone_steps: int = 0
    idle_steps: int = 0
    kept_bytes: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def from_counters(cls, counters: object, **others: int) -> StepTotals:
        """Take the extension's counters over (`_C.Counters`), and what others have counted."""
        counted: dict[str, Any] = {name: getattr(counters, name) for name in COUNTED_BY_THE_SESSION}
        return cls(**counted | others)

    def since(self, earlier: StepTotals, *, peak_bytes: int) -> StepTotals:
        """Return what happened between an earlier count and this one, with the peak of that time."""
        then = earlier.kept_bytes
        return StepTotals(
            **{name: getattr(self, name) - getattr(earlier, name) for name in _COUNTED},
            **{name: getattr(self, name) for name in _LEVELS},
            peak_bytes=peak_bytes,
            kept_bytes={key: now - then.get(key, 0) for key, now in self.kept_bytes.items()},
        )


_NAMES = tuple(f.name for f in fields(StepTotals))
_COUNTED_BY_OTHERS = {
    "steps",
    "alone_steps",
    "idle_steps",
    "over_budget_steps",
    "peak_bytes",
    "planning_s",
    "uncounted_bytes",
}
COUNTED_BY_THE_SESSION = tuple(name for name in _NAMES if name not in _COUNTED_BY_OTHERS)
_LEVELS = (
    "shortfall_bytes",
    "exposed_bytes",
    "begin_bytes",
    "stuck_bytes",
    "stuck_op",
    "uncounted_bytes",
    "write_error",
    "read_error",
)
_COUNTED = tuple(name for name in _NAMES if name not in {*_LEVELS, "peak_bytes", "kept_bytes"})
_MANY_FRAGMENTS = 0.05  # of the budget


@dataclass(frozen=True, slots=True)
class TierUse:
    """What became of one tier below the device, since the runtime began.

    Args:
        name: "host memory", "disk (O_DIRECT)" or "disk (page cache)": the last is memory of the
            system's as long as there is some, whatever it is called.
        cap_bytes: most bytes that it takes.
        peak_bytes: the most that blocks in it had at once.
        out_bytes, out_s: copied to it, and the seconds of that.
        in_bytes, in_s: copied back from it, and the seconds of that.
    """

    name: str
    cap_bytes: int
    peak_bytes: int
    out_bytes: int
    out_s: float
    in_bytes: int
    in_s: float

    @classmethod
    def of(cls, row: Mapping[str, Any], *, direct: bool) -> TierUse:
        """Read what the session tells of a tier.

        Args:
            row: as the session gives it.
            direct: whether the spill file goes past the page cache.
        """
        if row["tier"] == "host":
            name = "pinned host memory" if row["pinned_bytes"] else "host memory"
        else:
            name = "disk (O_DIRECT)" if direct else "disk (page cache)"
        return cls(
            name=name,
            cap_bytes=row["cap_bytes"],
            peak_bytes=row["peak_used_bytes"],
            out_bytes=row["out"][1],
            out_s=row["out"][2],
            in_bytes=row["in"][1],
            in_s=row["in"][2],
        )

    def text(self) -> str:
        """How full it was, and what went which way how fast."""
        ways = [
            f"{way} {format_bytes(bytes_)} at {format_bytes(bytes_ / seconds)}/s"
            for way, bytes_, seconds in (
                ("out", self.out_bytes, self.out_s),
                ("in", self.in_bytes, self.in_s),
            )
            if bytes_ and seconds > 0
        ]
        return "; ".join(
            [f"{format_bytes(self.peak_bytes)} of {format_bytes(self.cap_bytes)}", *ways]
        )


@dataclass(frozen=True, slots=True)
class StepReport:
    """The last step and the totals of a runtime; prints as a table.

    Args:
        budget_bytes: the budget; 0 where none is kept.
        policy, device: their names.
        last: counts of the last step.
        totals: counts of all steps.
        activation_bytes: bytes of all saved values of the step recorded last.
        ordinary_peak_bytes: what its peak would have been with nothing evicted.
        bounds: lower bound and least budget of the steps that were recorded.
        limit_bytes: the peak that is kept to because the budget cannot be met; 0 where it is not given up.
        reserved_bytes: what an accelerator's allocator has taken from the device, its cache included; 0 on the CPU.
        margin_bytes: what of the budget is left to that allocator's fragments.
        expandable: whether the allocator has been told to avoid them (`expandable_segments`).
        tiers: what became of each tier below the device, nearest first.
        process: which of several this is, beginning with its rank; empty where there is one only.
        shortfall: the worst request for room that could not be met; None where all were.
        live: live bytes over the last step that was observed; see `plot`.
    """

    budget_bytes: int
    policy: str
    device: str
    last: StepTotals
    totals: StepTotals
    activation_bytes: int = 0
    ordinary_peak_bytes: int = 0
    bounds: Bounds = field(default_factory=lambda: Bounds(0, "", 0))
    limit_bytes: int = 0
    reserved_bytes: int = 0
    margin_bytes: int = 0
    expandable: bool = False
    tiers: tuple[TierUse, ...] = ()
    process: str = ""
    shortfall: Shortfall | None = None
    live: LiveBytes = field(default_factory=LiveBytes, repr=False, compare=False)

    def as_dict(self) -> dict[str, Any]:
        """All of it as plain dicts and numbers, but for the live bytes of each op."""
        plain = asdict(self)
        del plain["live"]
        return plain

    def plot(self, path: str | Path | None = None) -> Any:
        """Draw the live bytes over the last step, beside what they would have been with nothing evicted.

        Args:
            path: where the picture is written, in the format of its ending; None: nowhere.

        Returns:
            A `matplotlib.figure.Figure`; a notebook shows it after `%matplotlib inline`.

        Raises:
            UsageError: no step has run yet.
            ImportError: matplotlib is not installed.
        """
        if not len(self.live.ops):
            raise UsageError(
                "no step has been observed yet: there is nothing to plot.",
                change="Run one forward and backward.",
            )
        title = f"{format_bytes(self.last.peak_bytes)} at the most; policy {self.policy}"
        return draw(self.live, self.budget_bytes, title, None if path is None else Path(path))

    @property
    def over_budget_bytes(self) -> int:
        """How far the peak of any step lay above the budget; 0 where it never did."""
        return max(0, self.totals.peak_bytes - self.budget_bytes) if self.budget_bytes else 0

    def verdict(self) -> str:
        """One sentence on all steps: what was saved, or why nothing was; and one on fragments where they are many."""
        return self._what_was_done() + self._on_fragments()

    def _on_fragments(self) -> str:
        if self.margin_bytes < _MANY_FRAGMENTS * self.budget_bytes or not self.margin_bytes:
            return ""
        said = f" The allocator's fragments take {format_bytes(self.margin_bytes)} of the budget."
        if self.device.startswith("cuda") and not self.expandable:
            said += (
                " Its segments do not grow: the environment or the program says so (expandable_segments), or the card "
                "cannot. There are fewer fragments where they do."
            )
        return said

    def _what_was_done(self) -> str:
        totals = self.totals
        several = totals.steps > 1
        if totals.steps == 0:
            return "No step with saved tensors has run inside the runtime yet."
        if self.budget_bytes == 0:
            return "The policy evicts nothing; the step was only observed."
        if self.over_budget_bytes:
            held = (
                f"; {format_bytes(totals.exposed_bytes)} of saved tensors were held by code outside autograd"
                if totals.exposed_bytes
                else ""
            )
            most = "up to " if several else ""
            when = f" in {totals.over_budget_steps:,} of {totals.steps:,} steps" if several else ""
            return (
                f"The budget was passed by {most}{format_bytes(self.over_budget_bytes)}{when}: "
                f"{self._needs()}{held}."
            )
        over = f", over {totals.steps:,} steps" if several else ""
        done = []
        if totals.drops:
            done.append(
                f"Freed {format_bytes(totals.dropped_bytes)} in {totals.drops:,} storages and recomputed "
                f"{format_bytes(totals.rebuilt_bytes)} of it in {format_seconds(totals.rebuild_s)}{over}."
            )
        if totals.swap_outs:
            done.append(
                f"Swapped {format_bytes(totals.swapped_out_bytes)} in {totals.swap_outs:,} storages out and "
                f"{format_bytes(totals.swapped_in_bytes)} in, waiting "
                f"{format_seconds(totals.out_stall_s + totals.in_stall_s)} for the lanes{over}."
            )
        if done:
            return " ".join(done)
        if totals.shortfalls:
            return f"Nothing could be evicted when room was needed: {self._needs()}."
        if totals.packed_bytes == 0:
            kept = {name: size for name, size in totals.kept_bytes.items() if size}
            if not kept:
                return "Nothing was evicted: autograd saved nothing that the runtime could see."
            worst = max(kept, key=lambda name: kept[name])
            return (
                f"Nothing could be evicted: all that was saved is kept, most of it "
                f"({format_bytes(kept[worst])}{over}) because it is {_REASONS[worst]}."
            )
        peak = f"the highest peak of {totals.steps:,} steps," if several else "the step's peak of"
        idle = (
            f" {totals.idle_steps:,} of them were idle: known to fit, and not observed."
            if totals.idle_steps
            else ""
        )
        if totals.peak_bytes > self.budget_bytes > 0:
            return (
                f"Nothing was evicted: {peak} {format_bytes(totals.peak_bytes)}{',' * several} passes the "
                f"budget.{idle}"
            )
        return (
            f"Nothing had to be evicted: {peak} {format_bytes(totals.peak_bytes)}{',' * several} "
            f"fits the budget.{idle}"
        )

    def _needs(self) -> str:
        """Return what the steps need, by both numbers."""
        bounds = self.bounds
        needs = (
            f"beside what cannot be evicted, {bounds.lower_op or 'one op'} needs "
            f"{format_bytes(bounds.lower_bytes)}"
        )
        if bounds.least_bytes:
            needs += f"; the least budget is about {format_bytes(bounds.least_bytes)}"
        if self.limit_bytes:
            needs += f", and {format_bytes(self.limit_bytes)} is kept to instead"
        if self.totals.alone_steps:
            needs += (
                f"; {self.totals.alone_steps:,} steps were left alone, for observing them alone makes each "
                "half as long again"
            )
        return needs

    def one_line(self) -> str:
        """One line for a log."""
        rank = f"{self.process.split(',')[0]}, " if self.process else ""
        return (
            f"{rank}step {self.totals.steps}: peak {format_bytes(self.last.peak_bytes)} of "
            f"{format_bytes(self.budget_bytes)}, dropped {format_bytes(self.last.dropped_bytes)}, "
            f"recompute {format_seconds(self.last.rebuild_s)}, rescues {self.last.rescues}"
        )

    def _repr_html_(self) -> str:
        """Render the table in a notebook."""
        with _random_state_kept():
            table = self._rich_table()
            rows = zip(*(column.cells for column in table.columns), strict=True)

            def row(cells: Iterable[object], tag: str) -> str:
                texts = (html.escape(str(cell)) for cell in cells)
                return f"<tr>{''.join(f'<{tag}>{text}</{tag}>' for text in texts)}</tr>"

            return "".join(
                [
                    f"<table><caption>{html.escape(str(table.title))}</caption>",
                    f"<thead>{row((column.header for column in table.columns), 'th')}</thead>",
                    f"<tbody>{''.join(row(cells, 'td') for cells in rows)}</tbody></table>",
                    f"<p>{html.escape(self.verdict())}</p>",
                ]
            )

    def _add_lanes(self, table: Table) -> None:
        """Add what went over the lanes, and how long the step waited for them."""
        pairs = (self.last, self.totals)

        def row(name: str, text: Callable[[StepTotals], str]) -> None:
            table.add_row(name, *(text(each) for each in pairs))

        row("swapped out", lambda t: format_bytes(t.swapped_out_bytes))
        row("swapped in", lambda t: format_bytes(t.swapped_in_bytes))
        row("copied to a tier below", lambda t: format_bytes(t.written_back_bytes))
        row("waited for the lane out", lambda t: format_seconds(t.out_stall_s))
        row("waited for the lane in", lambda t: format_seconds(t.in_stall_s))
        row(
            "evictions, clean / waited",
            lambda t: f"{t.clean_evictions} / {t.swap_outs - t.clean_evictions}",
        )
        row(
            "prefetch: there / late / missed",
            lambda t: f"{t.prefetch_hits} / {t.prefetch_late} / {t.prefetch_misses}",
        )
        if self.totals.swap_refusals:
            row("no room in a tier below", lambda t: f"{t.swap_refusals:,}")
        if self.totals.failed_writes or self.totals.failed_reads:
            row("failed, writing / reading", lambda t: f"{t.failed_writes} / {t.failed_reads}")
        for tier in self.tiers:
            table.add_row(f"{tier.name}, at the most", "", tier.text())

    def __str__(self) -> str:
        with _random_state_kept():
            return f"{self._table()}{self.verdict()}"

    def _table(self) -> str:
        from rich.console import Console

        out = io.StringIO()
        Console(file=out, width=100, force_terminal=False).print(self._rich_table())
        return out.getvalue()

    def _rich_table(self) -> Table:
        from rich.table import Table

        process = f", {self.process}" if self.process else ""
        table = Table(title=f"delta_runtime: policy {self.policy} on {self.device}{process}")
        table.add_column("")
        table.add_column("last step", justify="right")
        table.add_column(f"{self.totals.steps} steps", justify="right")
        last, totals = self.last, self.totals

        def size(name: str, get: str) -> None:
            table.add_row(
                name, format_bytes(getattr(last, get)), format_bytes(getattr(totals, get))
            )

        def count(name: str, get: str) -> None:
            table.add_row(name, f"{getattr(last, get):,}", f"{getattr(totals, get):,}")

        if self.budget_bytes:
            table.add_row(
                "budget", format_bytes(self.budget_bytes), format_bytes(self.budget_bytes)
            )
        size("peak (allocator)", "peak_bytes")
        if self.reserved_bytes:
            table.add_row("reserved (allocator)", format_bytes(self.reserved_bytes), "")
        if self.margin_bytes:
            table.add_row("left to fragments", format_bytes(self.margin_bytes), "")
        if self.ordinary_peak_bytes:
            table.add_row("peak with nothing evicted", format_bytes(self.ordinary_peak_bytes), "")
            table.add_row("activations", format_bytes(self.activation_bytes), "")
        table.add_row(
            "over the budget",
            format_bytes(max(0, last.peak_bytes - self.budget_bytes) if self.budget_bytes else 0),
            format_bytes(self.over_budget_bytes),
        )
        if self.shortfall is not None:
            table.add_row(
                "not found when asked for", "", format_bytes(self.shortfall.missing_bytes)
            )
        size("managed", "packed_bytes")
        size("dropped", "dropped_bytes")
        size("recomputed", "rebuilt_bytes")
        table.add_row(
            "recompute time", format_seconds(last.rebuild_s), format_seconds(totals.rebuild_s)
        )
        count("ops run again", "replayed_ops")
        if totals.written_back_bytes or totals.swap_refusals:
            self._add_lanes(table)
        if totals.mismatches:
            count("came back different", "mismatches")
        if totals.unhashed:
            count("not compared for want of room", "unhashed")
        count("rescues", "rescues")
        if totals.over_limit:
            count("reserved more than the budget", "over_limit")
        for reason, words in _REASONS.items():
            if totals.kept_bytes.get(reason):
                table.add_row(
                    f"kept: {words}",
                    format_bytes(last.kept_bytes.get(reason, 0)),
                    format_bytes(totals.kept_bytes[reason]),
                )
        if totals.exposed_bytes:
            size("held outside autograd", "exposed_bytes")
        if totals.uncounted_bytes:
            size("not seen by the pool", "uncounted_bytes")
        table.add_row(
            "planning", format_seconds(last.planning_s), format_seconds(totals.planning_s)
        )
        bounds = self.bounds
        if bounds.lower_op:
            table.add_row(f"lower bound: {bounds.lower_op}", "", format_bytes(bounds.lower_bytes))
        if bounds.least_bytes:
            table.add_row("least budget", "", format_bytes(bounds.least_bytes))
        if self.limit_bytes:
            table.add_row("kept to instead of the budget", "", format_bytes(self.limit_bytes))
        return table
