"""Rules as text: `causal & window(256)` is read here and written by `str(rule)`."""

import ast
import re

from tx_jax.errors import UserError, nearest, one_line
from tx_jax.masks.rules import Causal, Dilated, Explicit, Full, Global, Prefix, Rule, Window

ELEMENTARY = {"full": Full, "causal": Causal, "window": Window, "prefix": Prefix,
              "dilated": Dilated, "global": Global, "explicit": Explicit}
# What people look for among the rules, but no rule knows.
DATA = ("segment", "segments", "documents", "padding", "pad", "length", "lengths")
DEEPEST = 100
QUOTED = r"""'[^']*'|"[^"]*"|"""


def parse_mask(text: str) -> Rule:
    """Read a rule such as `causal & window(256)`; `str(rule)` is read back to an equal rule.

    Raises:
      UserError: a name is unknown, an argument is wrong, or the text is not built from names,
        calls with literal arguments, `&`, `|`, `~` and parentheses.
    """
    shown = one_line(text)
    if strange := next((c for c in text if not c.isascii()), ""):
        raise UserError(f"the mask '{shown}' contains {strange!r}; write it with plain (ASCII) "
                        "letters, as in causal & window(256).")
    if "global_" in re.findall(QUOTED + r"\w+", text):
        raise UserError(f"there is no mask rule named 'global_' in '{shown}'"
                        f"{nearest('global_', ELEMENTARY)}")
    try:
        # `global` is a word of Python's own, which its parser refuses as a name.
        tree = ast.parse(_rename(text.strip(), "global", "global_"), mode="eval").body
        return _read(tree, shown, 1)
    except UserError:
        raise
    except (RecursionError, MemoryError):
        raise _too_deep(shown) from None
    except (SyntaxError, ValueError):
        raise UserError(f"the mask '{shown}' cannot be read; write it like causal & window(256) "
                        "with &, |, ~ and parentheses.") from None


def _read(node: ast.expr, text: str, depth: int) -> Rule:
    if depth > DEEPEST:
        raise _too_deep(text)
    match node:
        case ast.BinOp(left=left, op=ast.BitAnd(), right=right):
            return _read(left, text, depth + 1) & _read(right, text, depth + 1)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _read(left, text, depth + 1) | _read(right, text, depth + 1)
        case ast.UnaryOp(op=ast.Invert(), operand=operand):
            return ~_read(operand, text, depth + 1)
        case ast.Name(id=name):
            return _build(name, [], [], node, text)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
            return _build(name, args, keywords, node, text)
    raise UserError(f"'{_source(node)}' in the mask '{text}' is not a rule; use the rules "
                    f"{', '.join(sorted(ELEMENTARY))} with &, |, ~ and parentheses.")


def _build(name: str, args: list[ast.expr], keywords: list[ast.keyword], node: ast.expr, text: str
           ) -> Rule:
    name = "global" if name == "global_" else name
    if name in DATA:
        raise UserError(f"'{name}' in the mask '{text}' is not a rule: documents and padding come "
                        "with the data, as segment ids; leave it out here, and in code give them "
                        "to Mask(rule, q_segments_BT, k_segments_BS).")
    if name not in ELEMENTARY:
        raise UserError(f"there is no mask rule named '{name}' in '{text}'"
                        f"{nearest(name, ELEMENTARY)}")
    given = [k.arg for k in keywords]
    if twice := next((key for key in given if key and given.count(key) > 1), None):
        raise UserError(f"'{_source(node)}' in the mask '{text}' gives {twice} twice; give it "
                        "once.")
    try:
        # A key None is `**`, whose value is no literal that could be read.
        values = [ast.literal_eval(a) for a in args]
        named = {k.arg: ast.literal_eval(k.value) for k in keywords}
    except (ValueError, TypeError):
        raise UserError(f"the arguments of '{_source(node)}' in the mask '{text}' must "
                        "be numbers, as in window(256).") from None
    try:
        return ELEMENTARY[name](*values, **named)
    except TypeError:
        fields = ", ".join(ELEMENTARY[name].__dataclass_fields__)
        raise UserError(f"the mask rule '{name}' in '{text}' must be written "
                        f"{name}({fields}).".replace("()", "")) from None


def _rename(source: str, old: str, new: str) -> str:
    """Replace a word of the source outside of its quoted strings."""
    return re.sub(QUOTED + rf"\b{old}\b", lambda m: new if m[0] == old else m[0], source)


def _source(node: ast.expr) -> str:
    return one_line(_rename(ast.unparse(node), "global_", "global"))


def _too_deep(text: str) -> UserError:
    return UserError(f"the mask '{text}' nests more than {DEEPEST} operators; write it with fewer "
                     "rules, or as one table with explicit.")
