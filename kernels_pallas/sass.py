"""Counts of instructions in the text of a disassembled kernel."""

import re
from dataclasses import dataclass

_LABEL = re.compile(r"^\s*(\.L_\w+):")
_INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]*)(.*)")
_TARGET = re.compile(r"\((\.L_\w+)\)")


@dataclass(frozen=True)
class Loop:
    """One loop over key blocks; `other` is everything that is not a matrix product."""

    hgmma: int
    ex2: int
    other: int


def count(text: str, operation: str) -> int:
    """Number of instructions whose name begins with `operation`."""
    return sum(op.startswith(operation) for _, op, _ in _instructions(text))


def key_loops(text: str) -> list[Loop]:
    """The innermost loops with matrix products, in order of their place.

    A loop is what lies between a label and a conditional branch back to it (unconditional ones
    return from code that was moved out of a loop, which is not counted); loops that wait for a
    barrier have no products.
    """
    found = _instructions(text)
    place, at = {}, -1
    for line in text.splitlines():
        if label := _LABEL.match(line):
            place[label[1]] = at + 1
        elif _INSTRUCTION.match(line):
            at += 1
    spans = []
    for i, (condition, op, rest) in enumerate(found):
        target = _TARGET.search(rest) if condition and op.startswith("BRA") else None
        if target and place.get(target[1], i + 1) <= i:
            names = [name for _, name, _ in found[place[target[1]]:i + 1]]
            if any(name.startswith("HGMMA") for name in names):
                spans.append((place[target[1]], i, names))
    inner = [s for s in spans if not any(o is not s and s[0] <= o[0] and o[1] <= s[1]
                                         for o in spans)]
    return [_loop(names) for _, _, names in sorted(inner, key=lambda s: s[0])]


def _loop(names: list[str]) -> Loop:
    products = sum(name.startswith("HGMMA") for name in names)
    return Loop(products, sum(name.startswith("MUFU.EX2") for name in names),
                len(names) - products)


def _instructions(text: str) -> list[tuple[str | None, str, str]]:
    return [m.groups() for m in map(_INSTRUCTION.match, text.splitlines()) if m]
