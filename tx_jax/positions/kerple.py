"""KERPLE: kernels of distance with learned parameters (Chi et al. 2022, equations 3 and 4)."""

from collections.abc import Mapping
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from tx_jax.options import check_choice
from tx_jax.positions import _base
from tx_jax.positions._pairs import distance, of_head


@dataclass(frozen=True)
class Encoding(_base.Encoding):
    """Logits get -r1 ln(1 + r2 d) or -r1 d^r2 at distance d, two numbers per head and layer.

    The log form tends to `alibi` with slope r1 r2 as r2 falls; the power form is it at r2 = 1.
    r = softplus(raw) keeps parameters positive and r2 = 2 sigmoid(raw) an exponent in (0, 2),
    where the authors' code clips to at least 0.01 (and at most 2) at each step, which stops the
    gradient. They start where it starts them: uniform below 2 and below 1 (log), 1 and 2 (power).

    Attributes:
      form: "log", the better one in the paper, or "power".
    """

    bias_kind = "pair"
    per_layer = True
    form: str = "log"

    def __post_init__(self) -> None:
        check_choice(self, "form", ("log", "power"))

    def init(self, key: jax.Array, sizes: Mapping[str, int]) -> dict[str, jax.Array]:
        first, second = jax.random.split(key)
        high = (2.0, 1.0) if self.form == "log" else (1.0, 2.0)
        r1_N = jax.random.uniform(first, (sizes["N"],), jnp.float32, 0.01, high[0])
        r2_N = jax.random.uniform(second, (sizes["N"],), jnp.float32, 0.01, high[1])
        return raw(self.form, r1_N, r2_N)

    def pair_bias(self, params: _base.Params, head: jax.Array, q_pos: jax.Array, k_pos: jax.Array
                  ) -> jax.Array:
        r1 = jax.nn.softplus(of_head(params["r1_N"], head))
        raw2 = of_head(params["r2_N"], head)
        d = distance(q_pos, k_pos, r1.dtype)
        if self.form == "log":
            return -r1 * jnp.log1p(jax.nn.softplus(raw2) * d)
        # 0^r2 is 0, but its derivative would be 0 * ln 0: the distance is kept from 0 inside.
        power = jnp.exp(2 * jax.nn.sigmoid(raw2) * jnp.log(jnp.maximum(d, 1)))
        return -r1 * jnp.where(d > 0, power, 0)


def raw(form: str, r1_N: jax.Array, r2_N: jax.Array) -> dict[str, jax.Array]:
    """The parameters that stand for r1 > 0 and r2 (> 0, and below 2 in the power form)."""
    def inverse_softplus(r: jax.Array) -> jax.Array:
        return r + jnp.log(-jnp.expm1(-r))

    r2_N = inverse_softplus(r2_N) if form == "log" else jnp.log(r2_N / (2 - r2_N))
    return {"r1_N": inverse_softplus(r1_N), "r2_N": r2_N}
