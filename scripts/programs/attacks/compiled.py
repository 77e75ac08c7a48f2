"""To come."""
from __future__ import annotations
from scripts.programs.attacks.common import Attacker
from scripts.programs.faults import Fault
ATTACKS: dict[Fault, Attacker] = {}
