"""A file is an entry: names of a package's public modules, and call strings like `rope(base=5)`."""

import ast
import importlib
import pkgutil
from types import ModuleType
from typing import Any

from tx_jax.errors import UserError, nearest, one_line


def names(package: str) -> list[str]:
    """List the public modules of `package`; a leading underscore marks a helper."""
    path = importlib.import_module(package).__path__
    return sorted(m.name for m in pkgutil.iter_modules(path) if not m.name.startswith("_"))


def parse_call(spec: str) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """Parse `name`, `name(3)` or `name(key=value)` into (name, positional, keywords).

    Only literals are allowed as values.

    Raises:
      UserError: the string is not a call of that form.
    """
    try:
        node = ast.parse(spec.strip(), mode="eval").body
        if isinstance(node, ast.Name):
            return node.id, (), {}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            args = tuple(ast.literal_eval(a) for a in node.args)
            kwargs = {k.arg: ast.literal_eval(k.value) for k in node.keywords if k.arg}
            if len(kwargs) == len(node.keywords):
                return node.func.id, args, kwargs
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        pass  # a key that is a list is a TypeError, deep nesting one of the last two
    raise UserError(f"'{one_line(spec)}' is not of the form name or name(key=value); write each "
                    "option once, with a number, a word in quotes, True or False as its value.")


def load(package: str, name: str, what: str) -> ModuleType:
    """Import the module `name` of `package`; `what` says in the error what was looked for."""
    options = names(package)
    if name not in options:
        raise UserError(f"there is no {what} named '{name}'{nearest(name, options)}")
    return importlib.import_module(f"{package}.{name}")
