"""Types and columns are named by plain English, by terms of the field, and by what docs/glossary.md explains."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

_PLAIN = """
    activation affordable alone around aside asked at away back backward begin begins begun
    beside boundary bounds bytes cache cap check children cloned clones column columns
    comparisons config copies copy cost costs default description dir direct directory disable
    distance end ends enough enterable error estimate evaluation evaluator event excess failed
    failures fallback falls file final finding first fits found free function hits host if in
    infeasible inplace input inputs ins interrupted invalid items key kind known label largest
    last late launched least leaves likely line lists live local lost lower made making memory
    measured merged min mismatch mismatches misses missing modification movable name needs next not now
    number offsets on only optimizer ordinary out outcome outdated output outs over overdue
    parents peak per persistent planning possible predicted process publish queue queued rank
    ratios read reads record refusals repeats report rest result rises runs searched seconds
    seed seen share size span standing strict table taken tensors text threads time times title
    to totals trace uncounted under unhashed unit usable usage use uses vain wait walk warnings
    watch weights whole why with work world write writes written
"""
PLAIN = set(_PLAIN.split())
"""Words that mean here what they mean anywhere."""

_FIELD = "cupy delta descriptor disk driver flops graph op ops packed packs s torch unpacks verify"
FIELD = set(_FIELD.split())
"""Words of PyTorch, of operating systems and of units."""


def words_of(name: str) -> set[str]:
    parts = name.strip("_").split("_")
    return {
        word.lower() for part in parts for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+|[0-9]+", part)
    }


def names_in(source: str) -> set[str]:
    """Names of classes, and of the columns and fields that they declare."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ClassDef):
            found.add(node.name)
            found |= {
                each.target.id
                for each in node.body
                if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name)
            }
    return found


def explained() -> set[str]:
    """Words of the glossary's terms, as they stand and as their endings make them."""
    text = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")
    terms = re.findall(r"^\| \*\*(.+?)\*\* \|", text, re.MULTILINE)
    terms += re.findall(r"\*(\w+)\*", text)
    return {word.lower() for term in terms for word in re.findall(r"[A-Za-z]+", term)}


def is_known(word: str, known: set[str]) -> bool:
    endings = ("", "s", "es", "d", "ed", "ped", "ing")
    stems = {word.removesuffix(each) for each in endings if word.endswith(each)}
    return bool(stems & known) or any(word + each in known for each in ("s", "ed", "e"))


def test_each_word_of_a_name_is_plain_or_explained():
    known = PLAIN | FIELD | explained()
    unknown = {
        f"{word} (in {name}, {path.relative_to(ROOT)})"
        for path in (ROOT / "delta_runtime").rglob("*.py")
        for name in names_in(path.read_text(encoding="utf-8"))
        for word in words_of(name)
        if not is_known(word, known)
    }
    assert not unknown, "say what it means in docs/glossary.md: " + ", ".join(sorted(unknown))


def test_an_unexplained_word_is_found():
    (name,) = names_in("class Frobnicator:\n    pass\n")
    assert not is_known(*words_of(name), PLAIN | FIELD | explained())


def test_no_word_of_the_lists_is_left_over():
    """A word that no name has any more goes from the lists."""
    used = {
        word
        for path in (ROOT / "delta_runtime").rglob("*.py")
        for name in names_in(path.read_text(encoding="utf-8"))
        for word in words_of(name)
    }
    assert not (PLAIN | FIELD) - used
