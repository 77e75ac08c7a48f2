"""How a program is managed: policy, tiers, budget, `verify`, and how the runtime surrounds the steps."""

from __future__ import annotations

import dataclasses
import os
import random
from dataclasses import dataclass
from typing import Any

import delta_runtime as delta
from scripts.programs.driver import Managed
from scripts.programs.faults import TERMS, Fault

DROPPING = ("dtr", "dtr_local", "msps", "lru", "largest", "next_use")
SWAPPING = ("delta", "capuchin", "stress_swap_all", "stress_mix", "stress_mix")
PLANNING = ("auto", "recompute", "swap")
"""Policies that make plans, which takes far longer than a program of this size: fewer of these."""
SLOW_LINK_BYTES_PER_S = (2e6, 8e6, 40e6)
"""Throttles at which a storage of 4 KiB is on its way for 2 ms, 0.5 ms and 0.1 ms: long against an op."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How one program is managed.

    Args:
        policy: name of a policy.
        share: budget as a share of the ordinary run's peak; 1.0 where the policy evicts anyway.
        verify: as of Runtime.
        style: entered, step, both or anew; see driver.Managed.
        host_budget, link_bytes_per_s, disk_budget: as of Runtime.
        seed: of the policies that choose at random.
        check: check every invariant of the account (DELTA_CHECK).
    """

    policy: str = "stress_drop_all"
    share: float = 1.0
    verify: str = "first"
    style: str = "entered"
    host_budget: str | None = None
    link_bytes_per_s: float | None = None
    disk_budget: str | None = None
    seed: int = 0
    check: bool = False

    def describe(self) -> str:
        """In words."""
        default = Settings(policy="")
        parts = [
            f"{field.name}={getattr(self, field.name)}"
            for field in dataclasses.fields(self)
            if getattr(self, field.name) != getattr(default, field.name)
        ]
        return ", ".join(parts)

    def managed(self, budget_bytes: int) -> Managed:
        """Makes runtimes by these settings under a budget."""
        return Managed(lambda: self.runtime(budget_bytes), self.style)

    def runtime(self, budget_bytes: int) -> delta.Runtime:
        """A runtime by these settings."""
        # Imported late: what the first use of a runtime does to a process is a question, too.
        from delta_runtime.online.policies import get_policy

        policy = dataclasses.replace(get_policy(self.policy), seed=self.seed)
        try:
            if self.check:
                os.environ["DELTA_CHECK"] = "1"
            return delta.Runtime(policy=policy, **self._arguments(budget_bytes))
        finally:
            os.environ.pop("DELTA_CHECK", None)

    def _arguments(self, budget_bytes: int) -> dict[str, Any]:
        arguments: dict[str, Any] = {"device": "cpu", "min_bytes": 0, "verify": self.verify}
        if not self.policy.startswith("stress_"):
            arguments["budget"] = budget_bytes
        for name in ("host_budget", "link_bytes_per_s", "disk_budget"):
            if getattr(self, name) is not None:
                arguments[name] = getattr(self, name)
        return arguments

    def script_lines(self) -> str:
        """The same, as source of a standalone script."""
        arguments = "".join(
            f", {name}={'budget_bytes' if name == 'budget' else repr(value)}"
            for name, value in self._arguments(0).items()
        )
        return (
            f"Peak.share = {self.share!r}\n\n\n"
            "def make_runtime(budget_bytes):\n"
            f"    policy = dataclasses.replace(get_policy({self.policy!r}), seed={self.seed})\n"
            f"    make = lambda: delta.Runtime(policy=policy{arguments})\n"
            f"    return Managed(make, {self.style!r})\n"
        )


def random_settings(rng: random.Random, faults: set[Fault]) -> Settings:
    """Settings that suit a program: everything in reach of chance, what evicts more often than what does not."""
    kind = rng.choices(
        ("drop_all", "random", "budget", "swap", "slow", "disk", "spill", "planned", "off"),
        weights=(22, 10, 13, 12, 13, 15, 5, 8, 2),
    )[0]
    verify = rng.choices(("first", "always", "off"), weights=(60, 20, 20))[0]
    if verify == "off" and any(TERMS[fault].needs_evidence for fault in faults):
        verify = rng.choice(("first", "always"))
    style = rng.choices(("entered", "step", "both", "anew"), weights=(45, 35, 10, 10))[0]
    share = rng.choice((0.15, 0.3, 0.45, 0.6, 0.75, 0.9))
    base = Settings(verify=verify, style=style, seed=rng.randrange(1 << 31), share=share)
    base = dataclasses.replace(base, check=rng.random() < 0.05)
    swapping = rng.choice(SWAPPING)
    if kind == "drop_all":
        return dataclasses.replace(base, policy="stress_drop_all")
    if kind == "random":
        return dataclasses.replace(base, policy="stress_random")
    if kind == "budget":
        return dataclasses.replace(base, policy=rng.choice(DROPPING))
    if kind == "swap":
        return dataclasses.replace(base, policy=swapping, host_budget="16MiB")
    if kind == "slow":
        link = rng.choice(SLOW_LINK_BYTES_PER_S)
        if Fault.DRAWS_ON_THREADS in faults:  # its values are up to 64 times as large
            link *= 10
        return dataclasses.replace(
            base, policy=swapping, host_budget="16MiB", link_bytes_per_s=link
        )
    if kind == "disk":
        return dataclasses.replace(base, policy=swapping, disk_budget="4MiB")
    if kind == "spill":
        return dataclasses.replace(base, policy=swapping, host_budget="16KiB", disk_budget="4MiB")
    if kind == "planned":
        tiers = {} if rng.random() < 0.4 else {"host_budget": "16MiB"}
        policy = rng.choice(PLANNING[:2] if not tiers else PLANNING)
        share = rng.choice((0.5, 0.6, 0.75, 0.9))
        return dataclasses.replace(base, policy=policy, share=share, **tiers)
    return dataclasses.replace(base, policy="off")
