"""Score functions: how a query and a key give a logit. One file each, one interface (`_base.py`).

These are variants: each computes something else. `DotProduct` ones are plain dot products of
transformed queries and keys, so every implementation of attention can run them.
"""

from tx_jax.attention.scores._base import DotProduct, ScoreFunction
from tx_jax.construct import construct
from tx_jax.errors import UserError

__all__ = ["DotProduct", "ScoreFunction", "make_score"]


def make_score(spec: str | ScoreFunction) -> ScoreFunction:
    """Build a score function from its call string, as in `cosine(gain=7.9)`."""
    if isinstance(spec, ScoreFunction):
        return spec
    if not isinstance(spec, str):
        raise UserError(f"a score must be a name or a ScoreFunction, not {spec!r}.")
    return construct("tx_jax.attention.scores", spec, "Score", "score function")
