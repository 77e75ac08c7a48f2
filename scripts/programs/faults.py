"""The ways in which a runtime that rebuilds values was seen to go wrong, by name.

A fault here is a class of programs: something happens in them that can make a recomputed value differ from the one
that was dropped, or that moves a state which belongs to the user. Each says what it may cost: most must come out with
the same bits; a few cannot be seen by anybody when they happen, so that the one legal answer beside the same bits is a
clear error. What is not listed as legal is a finding.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType


class Fault(enum.Enum):
    """What a program does that may go wrong."""

    DRAWS_ON_THREADS = "random numbers drawn on threads"
    DISPATCH_MODE = "a mode that changes results"
    SUBCLASS_OPERAND = "an operand that is a tensor subclass"
    RAW_FILL = "memory filled past torch"
    PAST_DISPATCHER = "torch's own writes past the dispatcher"
    SHARED_MEMORY = "two storages over one memory"
    OWN_VERSION_COUNTER = "an alias with a version counter of its own"
    COLLECTIVE = "a collective that writes its argument"
    NUMERIC_FLAG = "a flag that changes numbers"
    STORAGE_RESIZED = "a storage resized or exchanged"
    PARTIAL_OVERWRITE = "an overwrite that does not cover"
    SAVED_WRITTEN = "a saved tensor written in backward"
    UNSEEN_WRITE = "a write on another thread, past autograd or while disabled"
    OP_CHANGES = "an op that begins to behave otherwise"
    FRESH_THREAD = "backward on a fresh thread"
    PYTHON_RANDOM = "Python's random numbers"
    AUDIT_DRAWS = "a custom op that draws numbers of its own"
    EXCEPTION = "an exception at any place"
    INTERRUPT = "a signal at any place"
    LEAF_ATTRIBUTE = "an attribute of a leaf"
    LIST_OP = "an op on a list that is long, or that fails half-way"
    SEVERAL_BACKWARDS = "several backwards, some of them differentiable"
    LEFT_ELSEWHERE = "left, closed or disabled in the middle"
    COMPILED = "a compiled part"
    NATIVE_CODE = "an op or a function in C++"


class Moment(enum.Enum):
    """When the place of a value counts: as the thing happens, or when backward is about to ask."""

    AS_IT_HAPPENS = "as it happens"
    AS_BACKWARD_BEGINS = "as backward begins"


class Family(enum.Enum):
    """What a program needs around it."""

    EAGER = "eager"
    TWO_PROCESS = "two_process"
    COMPILED = "compiled"


@dataclass(frozen=True, slots=True)
class Terms:
    """What a fault may cost, and how it is counted.

    Args:
        moment: when the place of the values that it endangers is taken for the coverage table.
        loud: names of errors that are legal where an ordinary run has none; empty: none is.
        why_loud: why nothing else is possible.
        needs_evidence: only comparing what came back with what went can see it, so that with
            verify="off" wrong bits are what was asked for, and such programs are not made.
    """

    moment: Moment = Moment.AS_IT_HAPPENS
    loud: frozenset[str] = frozenset()
    why_loud: str = ""
    needs_evidence: bool = False


_MADE = Moment.AS_BACKWARD_BEGINS
_LOUD = frozenset({"RecomputeMismatch", "InplaceModification"})

TERMS: Mapping[Fault, Terms] = MappingProxyType(
    {
        Fault.DRAWS_ON_THREADS: Terms(),
        Fault.DISPATCH_MODE: Terms(_MADE, needs_evidence=True),  # one computes with numpy, in place
        Fault.SUBCLASS_OPERAND: Terms(_MADE),
        Fault.RAW_FILL: Terms(
            loud=_LOUD,
            why_loud="the write is a store to memory: neither torch nor Python sees it happen",
            needs_evidence=True,
        ),
        Fault.PAST_DISPATCHER: Terms(
            loud=_LOUD,
            why_loud="apply_, map_ and methods of a storage change no version and run no op",
            needs_evidence=True,
        ),
        Fault.SHARED_MEMORY: Terms(
            loud=_LOUD,
            why_loud="a numpy array, or a second mapping of one file, is written without torch",
            needs_evidence=True,
        ),
        Fault.OWN_VERSION_COUNTER: Terms(
            loud=_LOUD,
            why_loud="what a recipe reads is overwritten on another thread, or while the runtime is "
            "disabled, where nobody makes a copy first",
            needs_evidence=True,
        ),
        Fault.COLLECTIVE: Terms(_MADE),
        Fault.NUMERIC_FLAG: Terms(),
        Fault.STORAGE_RESIZED: Terms(
            loud=_LOUD, why_loud="the memory that a recipe reads is given back by its owner"
        ),
        Fault.PARTIAL_OVERWRITE: Terms(_MADE),
        Fault.SAVED_WRITTEN: Terms(),
        Fault.UNSEEN_WRITE: Terms(
            loud=_LOUD,
            why_loud="a write while the runtime is disabled, or on a thread that it does not "
            "observe, through `.data`, moves no version counter that anybody else holds",
            needs_evidence=True,
        ),
        Fault.OP_CHANGES: Terms(
            _MADE,
            loud=_LOUD,
            why_loud="no two runs of the op are alike, and it was not so when it was trusted",
            needs_evidence=True,
        ),
        Fault.FRESH_THREAD: Terms(),
        Fault.PYTHON_RANDOM: Terms(),
        Fault.AUDIT_DRAWS: Terms(_MADE, needs_evidence=True),
        Fault.EXCEPTION: Terms(),
        Fault.INTERRUPT: Terms(),
        Fault.LEAF_ATTRIBUTE: Terms(_MADE),
        Fault.LIST_OP: Terms(_MADE),
        Fault.SEVERAL_BACKWARDS: Terms(_MADE),
        Fault.LEFT_ELSEWHERE: Terms(),
        Fault.COMPILED: Terms(_MADE),
        Fault.NATIVE_CODE: Terms(
            loud=_LOUD,
            why_loud="a function in C++ stores to memory that no schema names",
            needs_evidence=True,
        ),
    }
)
"""What each fault may cost."""
