"""The one exception for mistakes a user can mend, and the nearest-name hint."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake the user can mend; `launch.py` prints it as one sentence without a stack trace.

    The message says what is wrong, which value, and what to do.
    """


def one_line(text: str) -> str:
    """The text as an error shows it: on one line, and no longer than a line."""
    text = " ".join(text.split())
    return text if len(text) <= 80 else f"{text[:77]}..."


def nearest(name: str, options: Iterable[str]) -> str:
    """Return ", did you mean 'x'?" for the closest option, or the list of options."""
    options = sorted(options)
    close = difflib.get_close_matches(name, options, n=1, cutoff=0.5)
    if close:
        return f", did you mean '{close[0]}'?"
    return f"; choose one of: {', '.join(options)}"
