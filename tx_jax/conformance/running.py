"""How an implementation runs: refusals, decoding, devices, transformations, memory."""

import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from tx_jax.conformance.options import OPTIONS, covers, make_call, split
from tx_jax.conformance.subject import (
    Check,
    Failure,
    Skip,
    Subject,
    close,
    ensure,
    weights_of,
)
from tx_jax.errors import UserError
from tx_jax.masks import Causal, Prefix, Window


def refusals(subject: Subject) -> str:
    """What is not declared is refused in one sentence, never computed in part."""
    refused = []
    for name, values in OPTIONS.items():
        for value in values:
            choice = {"dtype": subject.dtype.name} | {name: value}
            if covers(choice, subject.capabilities):
                continue
            slopes, traced, static = split(make_call(choice), choice["dtype"])
            try:
                subject(*slopes.pop("args"), **static | traced | slopes)
            except UserError as error:
                ensure("\n" not in str(error), f"the refusal of {name}={value} has several lines")
                refused.append(f"{name}={value}")
            else:
                raise Failure(f"{name}={value} is not declared, but computed")
    return ", ".join(refused) or "nothing to refuse"


def decoding(subject: Subject) -> str:
    """Token by token with a growing cache gives the full pass."""
    mask = Causal()
    if subject.can("window", "prefix"):
        mask = Causal() & Window(3) | Prefix(1)
    q, k, v = subject.qkv(0, 2, 6, 6, N=2, K=2)
    call = jax.jit(lambda *a: subject(*a, mask=mask))
    full = call(q, k, v)
    for t in (0, 3, 5):
        row = call(q[:, t:t + 1], k[:, :t + 1], v[:, :t + 1])
        close(row[:, 0], full[:, t], f"token {t} on a cache of {t + 1} keys")
    return str(mask)


def cached_decoding(subject: Subject) -> str:
    """On a cache that is longer than what is written, q_start says where the queries stand."""
    q, k, v = subject.qkv(1, 2, 6, 6)
    full = jax.jit(lambda *a: subject(*a, mask=Causal()))(q, k, v)
    part = jax.jit(lambda q: subject(q, k, v, mask=Causal(), q_start=2))(q[:, 2:4])
    close(part, full[:, 2:4], "q_start=2")
    if not subject.can("traced_start"):
        return "q_start as a number"
    step = jax.jit(lambda q, t: subject(q, k, v, mask=Causal(), q_start=t))
    for t in range(6):
        close(step(q[:, t:t + 1], jnp.int32(t))[:, 0], full[:, t], f"traced q_start={t}")
    starts = jnp.array([1, 4])
    rows = jnp.stack([q[0, 1:3], q[1, 4:6]])
    right = jnp.stack([full[0, 1:3], full[1, 4:6]])
    close(step(rows, starts), right, "q_start of each example")
    return "q_start as a number, traced, per example"


def sharding(subject: Subject) -> str:
    """Split over devices by batch and by heads, results equal those of one device."""
    count = min(8, jax.device_count())
    if count < 2:
        raise Skip("there is one device only")
    data = 2 if count >= 4 else count
    heads = count // data
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:data * heads]).reshape(data, heads),
                             ("data", "heads"))
    arrays = subject.qkv(2, data, 5, 5, N=2 * heads, K=heads if subject.can("gqa") else 2 * heads)
    options = {"mask": Causal()} if subject.can("causal") else {}

    def call(*a):
        out, pull = jax.vjp(lambda *a: subject(*a, **options), *a)
        return out, *pull(weights_of(out.shape).astype(out.dtype))
    place = NamedSharding(mesh, PartitionSpec("data", None, "heads", None))
    single = jax.jit(call)(*arrays)
    spread = jax.jit(call, in_shardings=(place,) * 3)(*(jax.device_put(x, place) for x in arrays))
    for name, a, b in zip(("output", "dq", "dk", "dv"), spread, single, strict=True):
        close(a, np.asarray(b, np.float64), f"{name} on {data} x {heads} devices")
    return f"{data} x {heads} devices"


def transformations(subject: Subject) -> None:
    """jit, vmap, remat, scan, vmap of grad and jacrev agree with the plain call."""
    q, k, v = subject.qkv(3, 2, 4, 4, H=8)
    options = {"mask": Causal()} if subject.can("causal") else {}

    def call(q, k, v):
        return subject(q, k, v, **options)
    jitted = jax.jit(call)
    out = jitted(q, k, v)
    w = weights_of(out.shape)

    def loss(q, w=w):
        return jnp.sum(w * jitted(q, k[:len(q)], v[:len(q)]).astype(jnp.float32))
    slope = jax.jit(jax.grad(loss))(q)
    close(call(q, k, v), out, "without jit")
    batched = jax.vmap(jitted)(q[:, None], k[:, None], v[:, None])[:, 0]
    close(batched, out, "vmap")
    close(jax.jit(jax.grad(jax.checkpoint(loss)))(q), slope, "grad of remat")
    scanned = jax.lax.scan(lambda c, x: (c, jax.grad(loss)(x)), 0, jnp.stack([0 * q, q]))[1]
    close(scanned[1], slope, "grad in scan")

    def one(q, k, v, w):
        return jnp.sum(w * jitted(q[None], k[None], v[None])[0].astype(jnp.float32))
    close(jax.jit(jax.vmap(jax.grad(one)))(q, k, v, w), slope, "vmap of grad")
    rows = jax.jit(jax.jacrev(lambda q: jitted(q, k, v).astype(jnp.float32)[0, 1]))(q)
    own = jax.jit(jax.grad(lambda q: jnp.sum(w[0, 1] * jitted(q, k, v).astype(jnp.float32)[0, 1])))
    close(jnp.einsum("nh,nhbtmd->btmd", w[0, 1], rows.astype(jnp.float32)), own(q), "jacrev",
          dtype=subject.dtype)


def forward_mode(subject: Subject) -> str:
    """Forward-mode derivatives are right where declared, and a TypeError otherwise."""
    q, k, v = subject.qkv(4, 1, 4, 4)
    (tangent,) = subject.normal(5, q.shape)
    options = {"mask": Causal()} if subject.can("causal") else {}

    def loss(q):
        out = subject(q, k, v, **options).astype(jnp.float32)
        return jnp.sum(weights_of(out.shape) * out**2)
    if not subject.capabilities.jvp:
        try:
            jax.jvp(loss, (q,), (tangent,))
        except TypeError:
            return "refused as declared"
        raise Failure("forward-mode derivatives are not declared, but computed")
    slope = jax.jit(jax.grad(loss))
    along = jax.jit(lambda t: jax.jvp(loss, (q,), (t,))[1])(tangent)
    inner = jnp.sum(slope(q).astype(jnp.float32) * tangent.astype(jnp.float32))
    close(along, inner, "jvp beside grad", slack=5, dtype=subject.dtype)
    twice = jax.jit(lambda t: jax.jvp(slope, (q,), (t,))[1])(tangent)
    back = jax.jit(jax.grad(lambda q: jnp.vdot(slope(q), tangent).astype(jnp.float32)))(q)
    close(twice, back, "jvp of grad beside grad of grad", slack=20)
    return "jvp, and jvp of grad"


def declared_degree(memory: str) -> int | None:
    """Degree in the lengths T and S of a growth in letters: "T + S" is 1, "N T S" is 2."""
    if not memory:
        return None
    terms = re.split(r"[+,]|\belse\b", re.sub(r"\(.*?\)", "", memory))
    return max(len(re.findall(r"\b[TS]\b", term)) for term in terms[:1])


def memory_growth(subject: Subject) -> str:
    """Memory between 1024 and 4096 tokens, forward and backward, grows as declared."""
    options = {"mask": Causal()} if subject.can("causal") else {}

    def call(*a):
        return subject(*a, **options)

    def slope(*a):
        return jax.grad(lambda *a: jnp.sum(call(*a).astype(jnp.float32)), (0, 1, 2))(*a)
    growth = {}
    for name, function in (("forward", call), ("backward", slope)):
        sizes: list[float] = []
        for T in (1024, 4096):
            shape = jax.ShapeDtypeStruct((1, T, 2, 16), subject.dtype)
            analysis: Any = jax.jit(function).lower(shape, shape, shape).compile().memory_analysis()
            if analysis is None:
                raise Skip("the compiler tells no memory here")
            sizes.append(max(1, analysis.temp_size_in_bytes))
        growth[name] = math.log(sizes[1] / sizes[0]) / math.log(4)
    seen = ", ".join(f"{name} T^{value:.2f}" for name, value in growth.items())
    degree = declared_degree(subject.capabilities.memory)
    if degree is not None and max(growth.values()) > degree + 0.2:
        raise Failure(f"memory grows as {seen}, but '{subject.capabilities.memory}' is declared")
    return seen if degree is not None else f"{seen} (none declared)"


CHECKS = (
    Check(refusals), Check(decoding, ("causal",)),
    Check(cached_decoding, ("causal", "shifted")), Check(sharding), Check(transformations),
    Check(forward_mode), Check(memory_growth))
