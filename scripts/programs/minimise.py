from __future__ import annotations
from dataclasses import replace
from scripts.programs.program import Instruction, Program, Phase

def remove(program: Program, numbers: set[int]) -> Program:
    """The program without these instructions, and without what needs what they made."""
    order = {id(each): number for number, each in enumerate(program.instructions())}
    gone: set[str] = set()

    def keep(each: Instruction) -> Instruction | None:
        if order[id(each)] in numbers or set(each.args) & gone:
            gone.update(each.assigns())
            return None
        body = tuple(kept for inner in each.body if (kept := keep(inner)) is not None)
        if each.body and not body and not each.out:
            return None
        return replace(each, body=body)
    phases = {}
    for phase in Phase:
        phases[phase] = tuple(kept for top in program.phases.get(phase, ()) if (kept := keep(top)) is not None)
    return replace(program, phases=phases)
