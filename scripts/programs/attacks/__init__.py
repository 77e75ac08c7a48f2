"""What goes for one kind of fault each.

An attack is a generator function `(builder, aim)`: it emits instructions and yields where others may come in between.
It has to have its moment in the phase that the aim names. Each file has some; ATTACKS has them all, by fault.
"""

from __future__ import annotations

from scripts.programs.attacks import collectives, compiled, control, memory, numbers, threads
from scripts.programs.attacks.common import Aim, Attacker
from scripts.programs.faults import Fault

ATTACKS: dict[Fault, Attacker] = {
    **memory.ATTACKS,
    **numbers.ATTACKS,
    **threads.ATTACKS,
    **control.ATTACKS,
    **collectives.ATTACKS,
    **compiled.ATTACKS,
}

__all__ = ["ATTACKS", "Aim", "Attacker"]
