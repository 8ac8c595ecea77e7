"""Dynamic NTK scaling of rotary positions (emozilla 2023; Peng et al. 2023, YaRN, section 3.3)."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from tx_jax.options import check_choice, check_number
from tx_jax.positions._angles import Turns, frequencies, traced_turns, turns
from tx_jax.positions._rope import Rope, current_length
from tx_jax.positions.rope_ntk import stretch


@dataclass(frozen=True)
class Encoding(Rope):
    """`rope_ntk` whose factor s grows with the current length l; up to `trained` it is `rope`.

    There is no state: a short input after a long one is turned as if it came first. All queries
    and keys of an example are turned by the frequencies of its current length, so a cache must
    hold keys that are not turned yet and turn all of them at each step, with `length_B` = the
    length so far. A cache does then what the full pass does for its last query; but a full pass
    over l positions also computes the earlier tokens' states at l, where decoding computed them
    when they were last. Beyond `trained` the two differ in models of more than one layer, and a
    packed document differs from the document alone. Up to `trained` all are equal.

    Attributes:
      trained: L, the length the frequencies were trained for; set it.
      factor: f in the form "code"; the form "paper" does not read it.
      form: "code", as in Hugging Face: s = f l / L - (f - 1); or "paper": s = max(1, l / L). Equal
        for f = 1; at l = 2 L and f = 2, s is 3 and 2.
      base, layout, fraction: as in `rope`.
    """

    late = True
    trained: int = 2048
    factor: float = 2.0
    form: str = "code"
    base: float = 10000.0
    layout: str = "half"
    fraction: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number(self, "trained", low=1, whole=True)
        check_number(self, "factor", low=1)
        check_choice(self, "form", ("code", "paper"))

    def frequency(self, width: int) -> np.ndarray:
        return frequencies(self.base, width)

    def turns(self, width: int, pos_BT: jax.Array, length_B: jax.Array | None, dtype) -> Turns:
        excess_B11 = current_length(pos_BT, length_B)[:, None, None] - self.trained
        rate = (self.factor if self.form == "code" else 1.0) / self.trained
        # From the excess in integers, s is accurate just above 1 too.
        s_B11 = 1 + jnp.maximum(excess_B11, 0).astype(dtype) * rate
        grown_B1F = s_B11 ** jnp.asarray(stretch(width), dtype)[None, None, :]
        far = traced_turns(grown_B1F * jnp.asarray(self.frequency(width), dtype)[None, None, :])
        near = (word[None, None, :] for word in turns(self.frequency(width)))
        return tuple(jnp.where(excess_B11 > 0, f, n) for f, n in zip(far, near, strict=True))
