"""Fused key-value retrieval: one cross-attention layer that must look a key up among n items.

An item is the sum of a key and a value embedding; a query is a key embedding; the answer is the
value that stands with that key. No feed-forward layer, no norm: the score function is all there is.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from tx_jax.attention import attend, attention_weights, make_score
from tx_jax.letters import shape_of
from tx_jax.loss import token_loss
from tx_jax.study.replicas import Program

VOCABULARY = 64


@dataclass(frozen=True)
class Task:
    """What is compiled once: the score function and every width. Sizes: 64 keys, 64 values."""

    score: str
    d_k: int
    d_model: int = 64
    items: int = 16
    batch: int = 32
    attention: str = "auto"

    @property
    def size(self) -> dict[str, int]:
        """Letters of the layer: one head."""
        return {"D": self.d_model, "N": 1, "K": 1, "H": self.d_k, "V": VOCABULARY}

    @property
    def implementation(self) -> str | None:
        """What `attend` is asked for."""
        return None if self.attention == "auto" else self.attention


def draw(task: Task, steps: int, seed: int) -> dict[str, np.ndarray]:
    """Batches of a run, int8 [steps, batch, items]; keys of a row are distinct, the rest free."""
    rng = np.random.default_rng(seed)
    shape = (steps, task.batch, task.items)
    order = np.argsort(rng.random((*shape[:2], VOCABULARY), dtype=np.float32), axis=-1)
    keys = order[..., :task.items].astype(np.int8)
    values = rng.integers(0, VOCABULARY, shape, dtype=np.int8)
    asked = rng.integers(0, task.items, shape)
    return {"keys": keys, "values": values, "query": np.take_along_axis(keys, asked, -1),
            "answer": np.take_along_axis(values, asked, -1)}


def init(task: Task, key: jax.Array, q_gain: jax.Array) -> dict[str, Any]:
    """Parameters; embeddings have unit variance and projections keep it, times `q_gain` for W_q.

    W_k and W_v see the sum of two embeddings, hence their 1/sqrt(2).
    """
    size, width = task.size, task.d_model
    shapes = {"key_VD": (VOCABULARY, width), "value_VD": (VOCABULARY, width),
              "q_DNH": shape_of("q_DNH", size), "k_DNH": shape_of("k_DNH", size),
              "v_DND": (width, 1, width), "head_DV": shape_of("head_DV", size)}
    draw_key, score_key = jax.random.split(key)
    # One draw cut into pieces: every separate draw would add half a second of compilation.
    ends = np.cumsum([np.prod(shape) for shape in shapes.values()])
    pieces = jnp.split(jax.random.normal(draw_key, (int(ends[-1]),), jnp.float32), ends[:-1])
    params = {name: piece.reshape(shape)
              for (name, shape), piece in zip(shapes.items(), pieces, strict=True)}
    gains = {"q_DNH": q_gain, "k_DNH": 0.5**0.5, "v_DND": 0.5**0.5, "head_DV": 1.0}
    params |= {name: params[name] * (gain * width**-0.5) for name, gain in gains.items()}
    return params | {"score": make_score(task.score).init(score_key, size)}


def _queries_and_keys(params: Any, batch: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    def look_up(table_VD: jax.Array, ids: jax.Array) -> jax.Array:
        return table_VD.at[ids.astype(jnp.int32)].get(mode="promise_in_bounds")

    x_BSD = look_up(params["key_VD"], batch["keys"]) + look_up(params["value_VD"], batch["values"])
    q_BTNH = jnp.einsum("BTD,DNH->BTNH", look_up(params["key_VD"], batch["query"]),
                        params["q_DNH"])
    return q_BTNH, jnp.einsum("BSD,DNH->BSNH", x_BSD, params["k_DNH"]), x_BSD


def loss(params: Any, task: Task, batch: Any, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(mean nats per answer, accuracy) of a batch."""
    q_BTNH, k_BSNH, x_BSD = _queries_and_keys(params, batch)
    v_BSND = jnp.einsum("BSD,DNE->BSNE", x_BSD, params["v_DND"])
    mixed_BTND = attend(q_BTNH, k_BSNH, v_BSND, score=task.score, scale=scale,
                        score_params=params["score"], implementation=task.implementation)
    logits_BTV = jnp.einsum("BTND,DV->BTV", mixed_BTND, params["head_DV"])
    answer = batch["answer"].astype(jnp.int32)
    nats, count = token_loss(logits_BTV, answer)
    hits = jnp.argmax(logits_BTV, axis=-1).astype(jnp.int32) == answer
    return nats / count, jnp.mean(hits.astype(jnp.float32))


def at_init(task: Task, params: Any, batch: Any, scale: jax.Array) -> dict[str, jax.Array]:
    """Saturated rows, mean largest weight and gradient norm of W_q before training."""
    q_BTNH, k_BSNH, _ = _queries_and_keys(params, batch)
    weights_BNTS, _ = attention_weights(q_BTNH, k_BSNH, score=task.score, scale=scale,
                                        score_params=params["score"])
    top = jnp.max(weights_BNTS, axis=-1)
    grads = jax.grad(lambda p: loss(p, task, batch, scale)[0])(params)
    return {"init_saturated": jnp.mean((top > 0.99).astype(jnp.float32)),
            "init_max_weight": jnp.mean(top),
            "init_gradient_q": jnp.sqrt(jnp.sum(grads["q_DNH"] ** 2))}


def program(task: Task, chunk: int) -> Program:
    """Adam on one replica, `chunk` steps at a time.

    replica: {"key", "lr", "scale", "q_gain", "stream"}; stream is the row of `shared` it trains on.
    shared: `draw` of every seed, stacked on a leading axis. Record: loss and accuracy, [chunk].
    The carry keeps `at_init`.
    """

    def start(replica, shared):
        params = init(task, replica["key"], replica["q_gain"])
        first = jax.tree.map(lambda x: x[replica["stream"], 0], shared)
        return {"params": params, "adam": optax.adam(1.0).init(params),
                "step": jnp.zeros((), jnp.int32),
                "at_init": at_init(task, params, first, replica["scale"])}

    def step(replica, carry, shared):
        batches = jax.tree.map(lambda x: jax.lax.dynamic_slice_in_dim(
            x[replica["stream"]], carry["step"], chunk), shared)

        def one(state, batch):
            params, adam = state
            (nats, hits), grads = jax.value_and_grad(loss, has_aux=True)(
                params, task, batch, replica["scale"])
            with jax.numpy_dtype_promotion("standard"):  # inside optax: int32 step to float
                updates, adam = optax.adam(1.0).update(grads, adam)
            updates = jax.tree.map(lambda u: replica["lr"] * u, updates)
            return (optax.apply_updates(params, updates), adam), (nats, hits)

        (params, adam), (nats, hits) = jax.lax.scan(one, (carry["params"], carry["adam"]), batches)
        carry = carry | {"params": params, "adam": adam, "step": carry["step"] + chunk}
        return carry, {"loss": nats, "accuracy": hits}

    return Program(start, step)


def first_kept(accuracy: np.ndarray, level: float, window: int = 50) -> float:
    """`first_reached`, but inf unless the last `window` steps are at `level` too: an unstable run
    that only passes through is not solved.
    """
    kept = accuracy[-window:].mean() >= level - 1e-6
    return first_reached(accuracy, level) if kept else float("inf")


def first_reached(accuracy: np.ndarray, level: float, window: int = 10) -> float:
    """First step at which the mean accuracy of the last `window` steps is `level`; inf if never."""
    smooth = np.convolve(accuracy, np.full(window, 1.0 / window), mode="valid")
    # Half a hit short of the level is still the level: 32 x 16 answers are counted in float32.
    reached = np.flatnonzero(smooth >= level - 1e-6)
    return float(reached[0] + window) if reached.size else float("inf")
