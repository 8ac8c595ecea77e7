"""What the softmax does before any training: random queries and keys, no parameters to learn.

Queries and keys are iid normal. Reported per score and d_k: moments of q.k, saturated rows, and
the norm of d(weights)/d(query), which every gradient to the queries passes through.
"""

from functools import partial

import jax
import jax.numpy as jnp

from tx_jax.attention import ScoreFunction

ROWS_AT_ONCE = 50


@partial(jax.jit, static_argnames=("score", "d_k", "n", "rows"))
def softmax_at_init(key: jax.Array, score: ScoreFunction, scale: jax.Array, *, d_k: int, n: int,
                    rows: int) -> dict[str, jax.Array]:
    """Statistics over `rows` queries, each against its own `n` keys of width `d_k`.

    Args:
      scale: factor on the score, scalar.
      rows: a multiple of ROWS_AT_ONCE.

    Returns:
      Scalars: `variance_ratio` Var(q.k) / d_k, `kurtosis` (excess) of q.k, `max_weight` and
      `entropy` (nats) means, `saturated` share of rows with a weight above 0.99, and mean, median
      and 10th percentile of the Frobenius norm of d(weights)/d(query), [n, d_k] per row.
    """
    params = score.init(jax.random.fold_in(key, 0), {"N": 1, "H": d_k})

    def logit(q_H: jax.Array, k_H: jax.Array) -> jax.Array:
        return score.logits(params, q_H[None, None, None], k_H[None, None, None])[0, 0, 0, 0]

    def row(row_key: jax.Array) -> dict[str, jax.Array]:
        # One draw for both: each would cost its own compilation.
        both = jax.random.normal(row_key, (n + 1, d_k), jnp.float32)
        q_H, k_SH = both[0], both[1:]
        logit_S, slope_SH = jax.vmap(jax.value_and_grad(logit), (None, 0))(q_H, k_SH)
        weight_S = jax.nn.softmax(scale * logit_S)
        # d(weight_s)/dq = weight_s * (d(logit_s)/dq - sum_u weight_u d(logit_u)/dq)
        mean_H = weight_S @ slope_SH
        jacobian_SH = scale * weight_S[:, None] * (slope_SH - mean_H[None, :])
        return {"products": k_SH @ q_H, "max": jnp.max(weight_S),
                "entropy": -jnp.sum(jax.scipy.special.xlogy(weight_S, weight_S)),
                "norm": jnp.sqrt(jnp.sum(jacobian_SH * jacobian_SH))}

    keys = jax.random.split(jax.random.fold_in(key, 1), rows)
    out = jax.lax.map(row, keys, batch_size=ROWS_AT_ONCE)
    z = out["products"].reshape(-1)
    variance = jnp.mean(z**2) - jnp.mean(z) ** 2
    return {"variance_ratio": variance / d_k,
            "kurtosis": jnp.mean((z - jnp.mean(z)) ** 4) / variance**2 - 3.0,
            "max_weight": jnp.mean(out["max"]), "entropy": jnp.mean(out["entropy"]),
            "saturated": jnp.mean((out["max"] > 0.99).astype(jnp.float32)),
            "gradient_mean": jnp.mean(out["norm"]), "gradient_median": jnp.median(out["norm"]),
            "gradient_p10": jnp.percentile(out["norm"], 10)}
