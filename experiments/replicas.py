"""How five seeds should share a machine: every replica strategy on two small tasks.

  python -m experiments.replicas [--repeats 7] [--seeds 5] [--devices 2]

Minutes on 2 CPU cores. Warm times in one process, strategies interleaved, medians of the ratio to
"sequential" within a round. Targets on 2 cores with the strategy picked automatically: at most 0.6
for the retrieval task, at most 0.85 for the language model. "cores" is CPU time over wall time:
where "queue" shows well under the number of devices, other processes held the cores and the ratios
say little. "quietest" divides the shortest times, which such disturbance touches least.
"""

import argparse
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from tx_jax.study.replicas import STRATEGIES, Program, Result, run_replicas

Params = dict[str, jax.Array]
TARGETS = {"retrieval": 0.6, "language model": 0.85}


def adam(params: Params, grads: Params, state: Params, lr: jax.Array) -> tuple[Params, Params]:
    """One Adam update (0.9, 0.999, 1e-8); `state` holds m_*, v_* and the step count."""
    count = state["count"] + 1.0
    new, out = {"count": count}, {}
    for name, g in grads.items():
        m = new["m_" + name] = 0.9 * state["m_" + name] + 0.1 * g
        v = new["v_" + name] = 0.999 * state["v_" + name] + 0.001 * g * g
        out[name] = params[name] - lr * (m / (1.0 - 0.9 ** count)) / (
            jnp.sqrt(v / (1.0 - 0.999 ** count)) + 1e-8)
    return out, new


def make_program(init_params: Any, loss: Any, steps: int) -> Program:
    """`steps` Adam steps per chunk on `loss(params, key, shared)`; replica = {key, lr}."""
    def init(replica, shared):
        init_key, key = jax.random.split(replica["key"])
        params = init_params(init_key)
        zeros = {p + n: jnp.zeros_like(x) for n, x in params.items() for p in ("m_", "v_")}
        return params, {"count": jnp.float32(0.0), **zeros}, key

    def step(replica, carry, shared):
        def one(carry, _):
            params, state, key = carry
            key, sub = jax.random.split(key)
            value, grads = jax.value_and_grad(loss)(params, sub, shared)
            params, state = adam(params, grads, state, replica["lr"])
            return (params, state, key), value

        carry, values = jax.lax.scan(one, carry, None, length=steps)
        return carry, values[-1]

    return Program(init, step)


def cross_entropy(logits_TV: jax.Array, targets_T: jax.Array) -> jax.Array:
    """Mean nats."""
    picked_T = jnp.take_along_axis(logits_TV, targets_T[..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits_TV, axis=-1) - picked_T)


def retrieval_params(key: jax.Array) -> Params:
    """Key and value embeddings of unit variance, one head of width 64, an output table."""
    keys = jax.random.split(key, 6)
    params = {n: jax.random.normal(k, (64, 64)) for n, k in zip(("ek", "ev"), keys, strict=False)}
    return params | {n: jax.random.normal(k, (64, 64)) / 8.0
                     for n, k in zip("qkvo", keys[2:], strict=True)}


def retrieval_loss(params: Params, key: jax.Array, shared: Any) -> jax.Array:
    """Fused key-value retrieval: 32 rows of 16 items (64 keys, 64 values), 16 queries each."""
    B, S = 32, 16
    key_items, key_values, key_queries = jax.random.split(key, 3)
    items_BS = jnp.argsort(jax.random.uniform(key_items, (B, 64)), axis=-1)[:, :S]
    values_BS = jax.random.randint(key_values, (B, S), 0, 64)
    picked_BT = jax.random.randint(key_queries, (B, S), 0, S)
    wanted_BT = jnp.take_along_axis(items_BS, picked_BT, 1)
    x_BSD = params["ek"][items_BS] + params["ev"][values_BS]
    q_BTH = params["ek"][wanted_BT] @ params["q"]
    logits_BTS = jnp.einsum("BTH,BSH->BTS", q_BTH, x_BSD @ params["k"]) / 8.0
    out_BTD = jnp.einsum("BTS,BSD->BTD", jax.nn.softmax(logits_BTS), x_BSD @ params["v"])
    return cross_entropy(out_BTD @ params["o"], jnp.take_along_axis(values_BS, picked_BT, 1))


def lm_params(key: jax.Array) -> Params:
    """Two layers of width 64 with 4 heads and tied embeddings of 65 characters: 0.1 M numbers."""
    keys = jax.random.split(key, 5)

    def normal(k, *shape):
        return jax.random.normal(k, shape) * shape[-2] ** -0.5

    return {"embed": 0.1 * jax.random.normal(keys[0], (65, 64)), "qkv": normal(keys[1], 2, 64, 192),
            "o": normal(keys[2], 2, 64, 64), "up": normal(keys[3], 2, 64, 256),
            "down": normal(keys[4], 2, 256, 64)}


def lm_loss(params: Params, key: jax.Array, shared: jax.Array) -> jax.Array:
    """Next character on 16 random windows of 64 from the text `shared` (int32 [n])."""
    B, T, D = 16, 64, 64
    start_B = jax.random.randint(key, (B,), 0, shared.shape[0] - T - 1)
    tokens_BT = shared[start_B[:, None] + jnp.arange(T + 1)[None, :]]
    causal_TS = jnp.tril(jnp.ones((T, T), bool))

    def norm(x_BTD):
        return x_BTD * jax.lax.rsqrt(jnp.mean(x_BTD * x_BTD, axis=-1, keepdims=True) + 1e-6)

    def block(x_BTD, layer):
        qkv = (norm(x_BTD) @ layer["qkv"]).reshape(B, T, 3, 4, 16)
        s_BNTS = jnp.einsum("BTNH,BSNH->BNTS", qkv[:, :, 0], qkv[:, :, 1]) * 0.25
        p_BNTS = jax.nn.softmax(jnp.where(causal_TS[None, None], s_BNTS, -1e9))
        out_BTNH = jnp.einsum("BNTS,BSNH->BTNH", p_BNTS, qkv[:, :, 2])
        x_BTD = x_BTD + out_BTNH.reshape(B, T, D) @ layer["o"]
        return x_BTD + jax.nn.gelu(norm(x_BTD) @ layer["up"]) @ layer["down"], None

    layers = {n: params[n] for n in ("qkv", "o", "up", "down")}
    x_BTD, _ = jax.lax.scan(block, params["embed"][tokens_BT[:, :-1]], layers)
    return cross_entropy(norm(x_BTD) @ params["embed"].T, tokens_BT[:, 1:])


def tasks() -> dict[str, tuple[Program, Any, int]]:
    """name -> (program, shared, chunks)."""
    text = jax.random.randint(jax.random.key(7), (100_000,), 0, 65)
    return {"retrieval": (make_program(retrieval_params, retrieval_loss, 25), {}, 4),
            "language model": (make_program(lm_params, lm_loss, 4), text, 2)}


def measure(task: tuple[Program, Any, int], seeds: int, repeats: int,
            devices: list[jax.Device],
            ) -> tuple[dict[str, list[float]], dict[str, list[float]], dict[str, Result]]:
    """Warm wall seconds and CPU/wall of every strategy, interleaved, and one result of each."""
    program, shared, chunks = task
    replicas = {"key": jax.random.split(jax.random.key(0), seeds),
                "lr": jnp.full(seeds, 1e-3, jnp.float32)}
    cache: dict[Any, Any] = {}
    names = [*STRATEGIES, "auto"]

    def run(name: str) -> tuple[float, float, Result]:
        began, used = time.perf_counter(), time.process_time()
        result = run_replicas(program, replicas, shared, chunks, strategy=name, devices=devices,
                              cache=cache)
        wall = time.perf_counter() - began
        return wall, (time.process_time() - used) / wall, result

    results = {name: run(name)[2] for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    cores: dict[str, list[float]] = {name: [] for name in names}
    for _ in range(repeats):
        for name in names:
            wall, busy, _ = run(name)
            seconds[name].append(wall)
            cores[name].append(busy)
    return seconds, cores, results


def main() -> None:
    """Print one table per task."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--devices", type=int, default=2, help="virtual CPU devices")
    parser.add_argument("--task", choices=list(TARGETS), help="default both")
    args = parser.parse_args()
    if jax.config.jax_platforms in (None, "", "cpu"):
        jax.config.update("jax_num_cpu_devices", args.devices)
    devices = jax.local_devices()
    console = Console()
    for name, task in tasks().items():
        if args.task not in (None, name):
            continue
        seconds, cores, results = measure(task, args.seeds, args.repeats, devices)
        picked = results["auto"]
        table = Table(title=f"{name}: {args.seeds} seeds, {len(devices)} x "
                            f"{devices[0].device_kind}, auto picked {picked.strategy}")
        for column in ("strategy", "seconds", "ratio", "quietest", "cores", "compile s",
                       "last loss"):
            table.add_column(column, justify="left" if column == "strategy" else "right")
        for s, times in seconds.items():
            ratios = [t / base for t, base in zip(times, seconds["sequential"], strict=True)]
            table.add_row(s, f"{statistics.median(times):.3f}", f"{statistics.median(ratios):.2f}",
                          f"{min(times) / min(seconds['sequential']):.2f}",
                          f"{statistics.median(cores[s]):.2f}",
                          f"{results[s].compile_seconds:.1f}", f"{results[s].records[0, -1]:.4f}")
        console.print(table)
        ratio = statistics.median(a / b for a, b in zip(
            seconds["auto"], seconds["sequential"], strict=True))
        console.print(f"auto {ratio:.2f} (target {TARGETS[name]}), candidates timed at "
                      + ", ".join(f"{k} {v:.3f} s" for k, v in picked.timings.items())
                      + f" per chunk; {picked.flops / 1e6:.1f} MFLOP per chunk and seed")


if __name__ == "__main__":
    main()
