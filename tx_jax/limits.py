"""How long a text may get: what the positions know, what the model was trained on, what fits.

Closed forms for the bytes and operations of decoding, on integers alone, so that they hold for
models and devices that are not here. L layers, K key heads, N query heads, H their width, D width,
F hidden, V vocabulary, B rows, S places of the cache, T tokens read at a time.
"""

import functools
import os
from collections.abc import Callable
from dataclasses import dataclass

import jax

from tx_jax import models
from tx_jax.attention import SMALL
from tx_jax.cache import check_kind, places_of
from tx_jax.config import ModelConfig, check_whole
from tx_jax.errors import UserError, nearest
from tx_jax.layers import GATED
from tx_jax.letters import letters_of, sizes
from tx_jax.models import DecoderLM
from tx_jax.positions import make_encoding

# Bytes by the vendors' data sheets, which count in 10^9 (NVIDIA: H200, H100 SXM, A100 SXM, L4,
# GeForce RTX 4090). What JAX may use of it is less: by default it reserves three quarters.
DEVICES = {"H200": 141 * 10**9, "H100": 80 * 10**9, "A100-80": 80 * 10**9, "A100-40": 40 * 10**9,
           "L4": 24 * 10**9, "RTX-4090": 24 * 10**9}
CHUNK = 512  # tokens of a prompt that a prediction reads at a time, where nothing else is said
_BYTES = {"float32": 4, "bfloat16": 2}


def max_length(model: DecoderLM) -> int | None:
    """The positions that the model's scheme knows; None = no limit."""
    encoding = make_encoding(model.cfg.positions)
    size = sizes(model.cfg, model.vocab, model.context)
    tables = jax.eval_shape(lambda key: encoding.init(key, size), jax.random.key(0))
    limits = [leaf.shape[letters_of(name).index("T")] for name, leaf in tables.items()
              if "T" in letters_of(name)]
    return min([*limits, *filter(None, [encoding.max_length])], default=None)


def cache_bytes(cfg: ModelConfig, batch: int, size: int, kind: str = "model") -> int:
    """Bytes of keys and values, 2 L K H S B times the bytes of a number.

    An int8 cache holds a byte for a number and a scale in float32 for each H of them.

    Raises:
      UserError: unknown kind.
    """
    check_kind(kind)
    head = cfg.head_width + 4 if kind == "int8" else cfg.head_width * _BYTES[cfg.dtype]
    return 2 * cfg.layers * cfg.groups * head * places_of(cfg, size) * batch


@functools.cache  # tracing what initialises a model takes a while
def weight_bytes(model: DecoderLM) -> int:
    """Bytes of the weights that decoding reads (`decode.unstack`).

    Matrices are in the dtype of the model, the rest in float32; a tied head is held twice, [V, D]
    for looking tokens up and [D, V] for the logits.
    """
    cfg, width = model.cfg, _BYTES[model.cfg.dtype]
    params = jax.eval_shape(lambda: models.init(model, jax.random.key(0)))
    total = width * model.vocab * cfg.d_model if cfg.embeddings == "tied" else 0
    for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
        *above, name = [step.key for step in path]
        matrix = name in ("embed_VD", "head_DV") or above[-1] in ("attention", "cross", "mlp")
        total += leaf.size * (width if matrix else 4)
    return total


def products(model: DecoderLM) -> int:
    """N, the weights that every token is multiplied by: matrices of the layers and the head."""
    cfg = model.cfg
    attention = 2 * cfg.d_model * (cfg.heads + cfg.groups) * cfg.head_width
    return (cfg.layers * (attention + _matrices(cfg) * cfg.d_model * cfg.hidden)
            + cfg.d_model * model.vocab)


def flops_per_token(model: DecoderLM, n: int, *, cached: bool = True) -> int:
    """Operations for the next token of a text of `n` tokens, two for a product and its sum.

    With a cache 2 N + 4 L d S, d = N H the width of all heads and S the places of the cache;
    without, the whole text again: 2 N n + 4 L d n^2, the masked half included. Norms, softmax and
    non-linearities come on top.
    """
    cfg = model.cfg
    keys = 4 * cfg.layers * cfg.heads * cfg.head_width
    if cached:
        return 2 * products(model) + keys * places_of(cfg, n)
    return 2 * products(model) * n + keys * n * n


@dataclass(frozen=True)
class Memory:
    """Bytes of a generation: weights, cache, and the most that anything in between takes."""

    weights: int
    cache: int
    work: int

    @property
    def total(self) -> int:
        """All of it."""
        return self.weights + self.cache + self.work


def predict(model: DecoderLM, batch: int, size: int, kind: str = "model", chunk: int = CHUNK
            ) -> Memory:
    """What a generation takes (`decode.generate`).

    Weights and cache are exact; what lies in between is an estimate of what the compiler plans for
    the read of a chunk or for a step, whichever is more. It was fitted to float32 on a CPU; four
    layers of Llama 3 8B compiled for an H200 came out within 1 %, models of a few MB within 20 %.
    On a CPU bfloat16 takes more than this, as copies in float32.

    Args:
      batch, size: rows, and tokens of each, prompt and new ones together.
      chunk: tokens of the prompt read at a time; 0 = all, and the prompt then has `size` tokens.

    Raises:
      UserError: an unknown kind, or a number that is too small.
    """
    for name, value, low in (("batch", batch, 1), ("size", size, 1), ("chunk", chunk, 0)):
        check_whole(name, value, low)
    return Memory(weight_bytes(model), cache_bytes(model.cfg, batch, size, kind),
                  work_bytes(model, batch, size, kind, chunk))


def work_bytes(model: DecoderLM, batch: int, size: int, kind: str, chunk: int) -> int:
    """The estimate of `predict` of what is neither weights nor cache.

    Activations are in the dtype of the model, logits of attention in float32.
    """
    cfg, S, T = model.cfg, places_of(model.cfg, size), min(chunk or size, size)
    width, ring = _BYTES[cfg.dtype], S < size
    logits = batch * cfg.heads * T * (S + T if ring else S)
    layer = 2 * batch * cfg.groups * cfg.head_width  # keys and values of one place
    hidden = max(_matrices(cfg) * cfg.hidden, 2 * (cfg.heads + cfg.groups) * cfg.head_width)
    read = batch * T * (2 * cfg.d_model + hidden) * width
    if ring:  # old and new ones side by side, in the order of places and of tokens
        read += 2 * layer * (S + T) * 4
    elif cfg.attention == "reference" or cfg.attention == "auto" and logits <= SMALL:
        read += layer * S * 4 + 2 * logits * 4
    elif kind == "int8":  # as numbers of the model
        read += layer * S * 4
    elif T == size:  # zeros that later layers start from
        read += layer * S * width // 2
    step = 4 * batch * cfg.heads * S * 4  # logits and weights, before and after the mask
    return max(read, step) + 4 * batch * (2 * model.vocab + 2 * size)


def _matrices(cfg: ModelConfig) -> int:
    """Matrices of an MLP."""
    return 0 if cfg.mlp == "none" else 3 if cfg.mlp in GATED else 2


@dataclass(frozen=True)
class Fit:
    """The most that fits, and what else bounds it.

    Attributes:
      holds: tokens of a row (`largest_context`) or rows (`largest_batch`); 0: not even one.
      size: tokens of a row.
      defined: positions that the scheme defines; None = all.
      trained: the context that the model was trained on.
    """

    holds: int
    what: str
    size: int
    defined: int | None
    trained: int

    @property
    def bound(self) -> str:
        """What ends a text first: "hardware", "positions", or "training"."""
        if not self.holds:
            return "hardware"
        limits = {"hardware": self.size, "positions": self.defined or self.size + 1,
                  "training": self.trained}
        return min(limits, key=lambda name: (limits[name], list(limits).index(name)))

    def __str__(self) -> str:
        if not self.holds:
            return f"the hardware does not hold a single {self.what}"
        defined = "any position" if self.defined is None else f"{self.defined} positions"
        rows = f" of {self.size} tokens" if self.what == "row" else ""
        return (f"the hardware holds {self.holds} {self.what}s{rows}, the position scheme defines "
                f"{defined}, the model was trained on {self.trained} tokens")


def largest_context(model: DecoderLM, device_bytes: int, batch: int = 1, kind: str = "model",
                    chunk: int = CHUNK) -> Fit:
    """The longest texts, prompt and new tokens together, of which `batch` fit into memory.

    Under a window the cache stops growing, so that the answer is what tokens alone take.

    Raises:
      UserError: a number below 1.
    """
    check_whole("batch", batch, 1)
    most = _largest(model, device_bytes, kind, chunk, lambda n: (batch, n))
    return Fit(most, "token", most, max_length(model), model.context)


def largest_batch(model: DecoderLM, device_bytes: int, size: int, kind: str = "model",
                  chunk: int = CHUNK) -> Fit:
    """The most texts of `size` tokens that fit into memory together.

    Raises:
      UserError: a number below 1.
    """
    check_whole("size", size, 1)
    most = _largest(model, device_bytes, kind, chunk, lambda n: (n, size))
    return Fit(most, "row", size, max_length(model), model.context)


def _largest(model: DecoderLM, device_bytes: int, kind: str, chunk: int,
             shape: Callable[[int], tuple[int, int]]) -> int:
    """The largest n whose generation, of `shape(n)` rows and tokens, fits into memory."""
    check_whole("device_bytes", device_bytes, 1)
    check_whole("chunk", chunk, 0)
    weights, cfg = weight_bytes(model), model.cfg

    def fits(n: int) -> bool:
        batch, size = shape(n)
        return weights + cache_bytes(cfg, batch, size, kind) + work_bytes(
            model, batch, size, kind, chunk) <= device_bytes

    def small(n: int) -> bool:
        batch, size = shape(n)
        return batch * cfg.heads * min(chunk or size, size) * places_of(cfg, size) <= SMALL

    # The estimate falls behind a chunk and where `auto` leaves the reference.
    return _most(fits, (chunk, _most(small)))


def device_bytes(name: str) -> int:
    """Memory of a device of the table, or of "this" machine's first: what JAX may use of a GPU, or
    all that a CPU has.

    Raises:
      UserError: unknown name.
    """
    if name != "this":
        if name not in DEVICES:
            raise UserError(f"the device '{name}' is unknown{nearest(name, ['this', *DEVICES])}")
        return DEVICES[name]
    statistics = jax.local_devices()[0].memory_stats() or {}
    return statistics.get("bytes_limit") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _most(fits: Callable[[int], bool], dips: tuple[int, ...] = (), most: int = 2**50) -> int:
    """The largest n up to `most` with fits(n), 0 if there is none.

    `fits` turns from true to false as n grows; after a number of `dips` it may be true once more.
    """
    start = max((n for n in dips if n < most and fits(n + 1)), default=0)
    low, high = start, start + 1
    while high <= most and fits(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
