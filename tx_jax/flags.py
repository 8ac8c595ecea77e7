"""Flags derived from typed frozen dataclasses: dotted, validated, and refused when ineffective."""

import dataclasses
import re
import typing
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from absl import flags as absl_flags

from tx_jax.errors import UserError, nearest

_KINDS = {int: "a whole number", float: "a number", bool: "true or false"}
_LISTS = {tuple[int, ...]: int, tuple[float, ...]: float, tuple[str, ...]: str}


@dataclass(frozen=True)
class Leaf:
    """One settable field: its dotted name, type, default and metadata."""

    name: str
    type: Any
    default: Any
    meta: Mapping[str, Any]


def leaves(settings: Any, prefix: str = "") -> dict[str, Leaf]:
    """Every leaf field of a settings object, by dotted name; nested dataclasses are entered."""
    found: dict[str, Leaf] = {}
    hints = typing.get_type_hints(type(settings))
    for f in dataclasses.fields(settings):
        name, value = prefix + f.name, getattr(settings, f.name)
        if dataclasses.is_dataclass(value):
            found |= leaves(value, name + ".")
        else:
            found[name] = Leaf(name, hints[f.name], value, f.metadata)
    return found


def replace(settings: Any, changes: Mapping[str, Any], prefix: str = "") -> Any:
    """Return `settings` with dotted fields replaced; each dataclass validates itself again.

    All changes of one nested dataclass arrive together, so that their order cannot matter.

    Raises:
      UserError: an unknown name, or a value that a dataclass refuses.
    """
    names = {f.name for f in dataclasses.fields(settings)}
    own: dict[str, Any] = {}
    nested: dict[str, dict[str, Any]] = {}
    for dotted, value in changes.items():
        head, _, rest = dotted.partition(".")
        if head not in names:
            raise UserError(f"there is no setting '{prefix}{dotted}'"
                            f"{nearest(prefix + dotted, leaves(settings, prefix))}")
        if rest:
            nested.setdefault(head, {})[rest] = value
        else:
            own[head] = value
    for head, inner in nested.items():
        own[head] = replace(getattr(settings, head), inner, f"{prefix}{head}.")
    return dataclasses.replace(settings, **own)


def parse(argv: Sequence[str], settings: Any, extra: Mapping[str, Leaf]) -> dict[str, Any]:
    """Parse command-line words into {dotted name: value} of the flags that were given.

    Args:
      argv: words after the program's name.
      settings: its leaves are the flags, its values the defaults.
      extra: further flags (of the launcher), by name.

    Raises:
      UserError: an unknown flag, a bad value, a stray word, or a flag given twice.
    """
    known = dict(extra) | leaves(settings)
    values = absl_flags.FlagValues()
    for leaf in known.values():
        _define(values, leaf)
    try:
        rest = values(["launch", *argv])[1:]
    except absl_flags.UnrecognizedFlagError as error:
        name = error.flagname
        options = [*known, *(f"no{n}" for n, leaf in known.items() if leaf.type is bool)]
        raise UserError(f"there is no flag --{name}{nearest(name, options)}") from None
    except absl_flags.IllegalFlagValueError as error:
        found = re.match(r"flag --(.+?)=(.*?): ", str(error), re.DOTALL)
        leaf = known[found[1]]
        raise UserError(f"--{leaf.name}={found[2]} is not {_KINDS[leaf.type]}; write it like "
                        f"--{leaf.name}={leaf.default}.") from None
    except absl_flags.Error as error:
        raise UserError(f"{_sentence(str(error))}; see --help for its type.") from None
    if rest:
        raise UserError(f"'{rest[0]}' is not a flag; write every setting as --name=value.")
    given: dict[str, Any] = {}
    for name, leaf in known.items():
        if values[name].present > 1:
            raise UserError(f"--{name} is given {values[name].present} times; give it once.")
        if values[name].present:
            given[name] = _convert(leaf, values[name].value)
    return given


def check_effective(settings: Any, given: Iterable[str], swept: Mapping[str, str]) -> None:
    """Refuse flags that would change nothing.

    Args:
      settings: the final settings.
      given: dotted names the user set.
      swept: {dotted name: the setting that decides it instead}.
    """
    known = leaves(settings)
    for name in given:
        if name not in known:
            continue
        if name in swept:
            raise UserError(f"--{name} has no effect here because this study sweeps it; "
                            f"use --{swept[name]}.")
        when = known[name].meta.get("when")
        if when:
            sibling, holds, reason = when
            path = name.rpartition(".")[0]
            other = f"{path}.{sibling}" if path else sibling
            if not holds(known[other].default):
                raise UserError(f"--{name} has no effect with --{other}={known[other].default}, "
                                f"since {reason}; drop it or change --{other}.")


def _define(values: absl_flags.FlagValues, leaf: Leaf) -> None:
    text = leaf.meta.get("help", "")
    if leaf.meta.get("choices"):
        text += f" ({', '.join(map(str, leaf.meta['choices']))})"
    if leaf.type in _LISTS:
        default = ",".join(map(str, leaf.default))
        absl_flags.DEFINE_list(leaf.name, default, text, flag_values=values)
        return
    define = {bool: absl_flags.DEFINE_boolean, int: absl_flags.DEFINE_integer,
              float: absl_flags.DEFINE_float, str: absl_flags.DEFINE_string}[leaf.type]
    define(leaf.name, leaf.default, text, flag_values=values)


def _convert(leaf: Leaf, value: Any) -> Any:
    if leaf.type not in _LISTS:
        return value
    kind = _LISTS[leaf.type]
    if not value:
        raise UserError(f"--{leaf.name} is empty; give at least one value.")
    try:
        return tuple(kind(v) for v in value)
    except ValueError:
        raise UserError(f"--{leaf.name}={','.join(value)} is not a list of {kind.__name__} values; "
                        f"write it like --{leaf.name}="
                        f"{','.join(map(str, leaf.default))}.") from None


def _sentence(message: str) -> str:
    return message.strip().rstrip(".").replace("\n", " ")
