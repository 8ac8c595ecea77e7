"""`python -m kernels_pallas.compile_report [name ...]`: the kernels on an H200, and a gate.

Compiles every configuration without a GPU and prints registers, spills, shared memory, matrix and
exp2 instructions per block of keys, and the global memory beyond arguments and outputs. JAX's own
`attention_mgpu` is compiled the same way for comparison.
Instructions are counted, nothing is timed.
Exit status 1 where a kernel spills, does not fit, multiplies without the tensor cores, or needs
memory that grows faster than the length; names choose configurations by what they contain.
"""

import os
import sys
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from unittest import mock

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.gpu import attention_mgpu
from jax.sharding import SingleDeviceSharding

from kernels_pallas import h200, sass
from kernels_pallas.config import SHARED_LIMIT, WIDTHS, default_config
from kernels_pallas.forward import flash_forward
from kernels_pallas.ranges import EMPTY, FULL, PARTIAL, block_ranges

LENGTH, HEADS, WINDOW = 8192, 16, 1024
TEMP_LIMIT = 2**20  # the weights of these shapes would take 2 GiB


@dataclass(frozen=True)
class Case:
    """One configuration of the forward kernel."""

    width: int
    dtype: str
    mask: str

    def __str__(self) -> str:
        return f"d{self.width}-{self.dtype}-{self.mask}"


CASES = tuple(Case(width, dtype, mask) for width in WIDTHS for dtype in ("bfloat16", "float16")
              for mask in ("none", "causal", "window", "segments", "lengths"))


def program(case: Case, q, k, v, segments_BS, lengths_B):
    """The forward pass with the masks of a case; its block ranges are made on the device."""
    call = partial(flash_forward, q, k, v, scale=case.width**-0.5)
    if case.mask == "none":
        return call()
    config, S = default_config(case.width), k.shape[1]
    first_q = jnp.arange(0, S, config.rows)[:, None]
    first_k = jnp.arange(0, S, config.block_kv)[None, :]
    least = first_q - (first_k + config.block_kv - 1)  # of query index minus key index
    most = first_q + config.rows - 1 - first_k
    limit = WINDOW if case.mask == "window" else S
    some, every = (most >= 0) & (least < limit), (least >= 0) & (most < limit)
    if case.mask == "segments":  # ids are known at run time only
        return call(ranges=block_ranges(jnp.where(some, PARTIAL, EMPTY)[None], S, config.block_kv),
                    allowed=lambda i, j: i >= j, q_segments_BT=segments_BS,
                    k_segments_BS=segments_BS)
    if case.mask == "lengths":
        kinds = jnp.where(first_k < lengths_B[:, None, None] + 0 * first_q, FULL, EMPTY)
        return call(ranges=block_ranges(kinds, lengths_B, config.block_kv), lengths=True)
    ranges = block_ranges(jnp.where(every, FULL, jnp.where(some, PARTIAL, EMPTY))[None], S,
                          config.block_kv)
    return call(ranges=ranges, allowed=(lambda i, j: i >= j) if case.mask == "causal" else
                lambda i, j: (i >= j) & (i - j < limit))


def compile_case(case: Case, device: jax.Device, length: int = LENGTH) -> h200.Facts:
    """Facts of one configuration at [1, length, 16, width]."""
    array = partial(jax.ShapeDtypeStruct, sharding=SingleDeviceSharding(device))
    x = array((1, length, HEADS, case.width), jnp.dtype(case.dtype))
    return h200.compile_facts(partial(program, case), x, x, x, array((1, length), jnp.int32),
                              array((1,), jnp.int32))


def compile_shipped(width: int, causal: bool, device: jax.Device) -> h200.Facts:
    """Facts of JAX's `attention_mgpu` with the same tiles, float16 (its tiles always are)."""
    ours = default_config(width)
    config = attention_mgpu.TuningConfig(ours.block_q, ours.block_kv, ours.stages, causal=causal)
    x = jax.ShapeDtypeStruct((1, LENGTH, HEADS, width), jnp.float16,
                             sharding=SingleDeviceSharding(device))
    version = SimpleNamespace(cuda_runtime_get_version=lambda: 13000)
    with mock.patch.object(attention_mgpu, "cuda_versions", version):
        return h200.compile_facts(
            lambda q, k, v: attention_mgpu.attention(q, k, v, config, True), x, x, x)


def failures(facts: h200.Facts) -> list[str]:
    """What the gate has against a kernel."""
    return [words for bad, words in (
        (facts.spills, f"spills {facts.spills} bytes"),
        (facts.shared > SHARED_LIMIT or facts.shared < 0, f"{facts.shared} bytes of shared memory"),
        (not h200.hgmma(facts), "no wgmma"),
        (facts.temp > TEMP_LIMIT, f"{facts.temp} bytes of temporary memory")) if bad]


def line(name: str, facts: h200.Facts) -> str:
    """A row: the loops are those over blocks of keys, in the order of the program."""
    loops = " ".join(f"{x.hgmma}/{x.ex2}/{x.other}" for x in sass.key_loops(facts.text))
    return (f"{name:26} {facts.registers:9} {facts.spills:6} {facts.shared:7} "
            f"{h200.hgmma(facts):5} {facts.temp:8}  {loops}")


def main(names: list[str]) -> int:
    if command := h200.missing():
        print(f"nothing is compiled; install the compiler first: {command}")
        return 1
    device, bad, report = h200.device(), [], partial(print, flush=True)
    report(f"H200, forward, [1, {LENGTH}, {HEADS}, width]; loops: HGMMA/EX2/other instructions "
           "per block of keys and compute warpgroup")
    report(f"{'kernel':26} registers spills  shared hgmma     temp  loops over key blocks")
    for case in CASES:
        if not names or any(name in str(case) for name in names):
            facts = compile_case(case, device)
            report(line(str(case), facts))
            bad += [f"{case}: {words}" for words in failures(facts)]
    for width, causal in ((w, c) for w in WIDTHS for c in (False, True)):
        name = f"shipped-d{width}-{'causal' if causal else 'none'}"
        if not names or any(part in name for part in names):
            report(line(name, compile_shipped(width, causal, device)))
    report("\n".join([*bad, f"gate: {'FAIL' if bad else 'pass'}"]))
    return bool(bad)


if __name__ == "__main__":
    if os.environ.setdefault("JAX_PLATFORMS", "cpu") != "cpu":
        sys.exit("set JAX_PLATFORMS=cpu: the kernels are compiled, not run.")
    h200.restart_with_compiler("kernels_pallas.compile_report")
    sys.exit(main(sys.argv[1:]))
