"""Rules as text: `causal & window(256)` is read here and written by `str(rule)`."""

import ast
import re
from typing import Any

from tx_jax.errors import UserError, nearest
from tx_jax.masks.rules import Causal, Dilated, Explicit, Full, Global, Prefix, Rule, Window

ELEMENTARY = {"full": Full, "causal": Causal, "window": Window, "prefix": Prefix,
              "dilated": Dilated, "global": Global, "explicit": Explicit}


def parse_mask(text: str) -> Rule:
    """Read a rule such as `causal & window(256)`; `str(rule)` is read back to an equal rule.

    Raises:
      UserError: a name is unknown, an argument is wrong, or the text is not built from names,
        calls with literal arguments, `&`, `|`, `~` and parentheses.
    """
    try:
        # `global` is a word of Python's own, which its parser refuses as a name.
        tree = ast.parse(re.sub(r"\bglobal\b", "global_", text.strip()), mode="eval").body
    except (SyntaxError, ValueError):
        raise UserError(f"the mask '{text}' cannot be read; write it like causal & window(256) "
                        "with &, |, ~ and parentheses.") from None
    return _read(tree, text)


def _read(node: ast.expr, text: str) -> Rule:
    match node:
        case ast.BinOp(left=left, op=ast.BitAnd(), right=right):
            return _read(left, text) & _read(right, text)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _read(left, text) | _read(right, text)
        case ast.UnaryOp(op=ast.Invert(), operand=operand):
            return ~_read(operand, text)
        case ast.Name(id=name):
            return _build(name, (), {}, text)
        case ast.Call(func=ast.Name(id=name), args=args, keywords=keywords):
            try:
                values = [ast.literal_eval(a) for a in args]
                named = {k.arg: ast.literal_eval(k.value) for k in keywords if k.arg}
            except ValueError:
                raise UserError(f"the arguments of '{_source(node)}' in the mask '{text}' must "
                                "be numbers, as in window(256).") from None
            return _build(name, values, named, text)
    raise UserError(f"'{_source(node)}' in the mask '{text}' is not a rule; use the rules "
                    f"{', '.join(sorted(ELEMENTARY))} with &, |, ~ and parentheses.")


def _source(node: ast.expr) -> str:
    return ast.unparse(node).replace("global_", "global")


def _build(name: str, args: Any, kwargs: Any, text: str) -> Rule:
    name = "global" if name == "global_" else name
    if name not in ELEMENTARY:
        raise UserError(f"there is no mask rule named '{name}' in '{text}'"
                        f"{nearest(name, ELEMENTARY)}")
    try:
        return ELEMENTARY[name](*args, **kwargs)
    except TypeError:
        fields = ", ".join(ELEMENTARY[name].__dataclass_fields__)
        raise UserError(f"the mask rule '{name}' in '{text}' must be written "
                        f"{name}({fields}).".replace("()", "")) from None
