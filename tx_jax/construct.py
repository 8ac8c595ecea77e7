"""Build a component from its call string, with errors that name its options."""

import dataclasses
from typing import Any

from tx_jax import plugins
from tx_jax.errors import UserError, nearest, one_line


def construct(package: str, spec: str, class_name: str, what: str) -> Any:
    """Build `class_name` of the module named by `spec` in `package`, as in `rope(base=500000)`.

    Raises:
      UserError: no such module, an unknown option, or too many positional values.
    """
    name, args, kwargs = plugins.parse_call(spec)
    cls = getattr(plugins.load(package, name, what), class_name)
    fields = [f.name for f in dataclasses.fields(cls)]
    unknown = sorted(set(kwargs) - set(fields))
    if unknown:
        hint = nearest(unknown[0], fields) if fields else "; it has no options."
        raise UserError(f"the {what} '{name}' has no option '{unknown[0]}'{hint}")
    if len(args) > len(fields) or set(fields[:len(args)]) & set(kwargs):
        known = f"its options are: {', '.join(fields)}." if fields else "it has no options."
        raise UserError(f"'{one_line(spec)}' gives the {what} '{name}' a value too many; {known}")
    return cls(*args, **kwargs)
