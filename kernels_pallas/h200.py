"""Compiles for an NVIDIA H200 on a machine without a GPU, and reads what the compiler made.

Needs JAX_PLATFORMS=cpu, and the wheels of the extra `compile` in a folder `h200` of the virtual
environment; inside the environment itself JAX would miss its CUDA libraries at every start.
"""

import contextlib
import importlib.util
import os
import re
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
from jax.experimental import topologies

from kernels_pallas import sass

TARGET = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  shared_memory_per_block_optin: 232448
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 150000000000
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
runtime_version { major: 13 minor: 0 patch: 0 }
device_description_str: "NVIDIA H200"
"""
FOLDER = Path(sys.prefix) / "h200"
WHEELS = {"jax-cuda13-plugin": "jax_cuda13_plugin", "jax-cuda13-pjrt": "jax_plugins.xla_cuda13"}
_DUMPS = ("MOSAIC_GPU_DUMP_PTXAS", "MOSAIC_GPU_DUMP_SASS", "MOSAIC_GPU_DUMP_RESOURCES")


@dataclass(frozen=True)
class Facts:
    """What the compiler says of a program with one kernel.

    Attributes:
      registers: per thread, before the kernel shares them out among its warpgroups.
      spills: bytes stored and loaded. shared: bytes of shared memory without barriers.
      temp: bytes of global memory that the program needs beyond arguments and outputs.
      text: the disassembled kernel.
    """

    registers: int
    spills: int
    shared: int
    temp: int
    text: str


def missing() -> str:
    """The command that installs what is missing; "" = nothing is."""
    absent = [wheel for wheel, module in WHEELS.items() if not _there(module)]
    absent += [] if _disassembler() else ["nvidia-cuda-nvdisasm"]
    if not absent:
        return ""
    return ("python -m pip install --no-deps --target .venv/h200 -c constraints.txt "
            + " ".join([*WHEELS, "nvidia-cuda-nvdisasm"]))


def restart_with_compiler(module: str) -> None:
    """Starts `python -m module` anew with the folder of wheels on its path, unless it is there.

    JAX looks for them while it is imported, so adding them later is too late.
    """
    if FOLDER.is_dir() and str(FOLDER) not in sys.path:
        paths = [str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]
        os.execve(sys.executable, [sys.executable, "-m", module, *sys.argv[1:]],
                  os.environ | {"PYTHONPATH": os.pathsep.join(paths)})


def device() -> jax.Device:
    """A compile-only H200."""
    return topologies.get_topology_desc(platform="cuda", target_config=TARGET,
                                        topology="1x1x1").devices[0]


def compile_facts(function: Callable, *args: jax.ShapeDtypeStruct) -> Facts:
    """Compiles for the device in the shardings of the arguments.

    Raises:
      ValueError: the program has no Mosaic GPU kernel, or more than one.
    """
    # Mosaic looks for its disassembler here.
    os.environ["MOSAIC_GPU_CUDA_ROOT"] = _disassembler()
    os.environ |= dict.fromkeys(_DUMPS, "1")
    with _output() as read:
        compiled = jax.jit(function).lower(*args).compile()
    text = read()
    registers = re.findall(r"Used (\d+) registers", text)
    if len(registers) != 1:
        raise ValueError(f"the program has {len(registers)} kernels, not one.")
    spills = sum(map(int, re.findall(r"(\d+) bytes spill", text)))
    shared = re.search(r"smem_scratch_bytes=(\d+)", text)
    return Facts(int(registers[0]), spills, int(shared[1]) if shared else -1,
                 compiled.memory_analysis().temp_size_in_bytes, text)


def hgmma(facts: Facts) -> int:
    """Number of warpgroup matrix instructions."""
    return sass.count(facts.text, "HGMMA")


@contextlib.contextmanager
def _output():
    """Collects what the process, C++ included, writes to its two streams."""
    with tempfile.TemporaryFile() as file:
        kept = [(stream, os.dup(stream.fileno())) for stream in (sys.__stdout__, sys.__stderr__)]
        content: list[str] = []
        try:
            for stream, _ in kept:
                stream.flush()
                os.dup2(file.fileno(), stream.fileno())
            yield lambda: content[0]
        finally:
            for stream, copy in kept:
                stream.flush()
                os.dup2(copy, stream.fileno())
                os.close(copy)
            file.seek(0)
            content.append(file.read().decode(errors="replace"))


def _there(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


def _disassembler() -> str:
    """The folder that holds bin/nvdisasm, "" if there is none."""
    folders = [Path(p) / "nvidia" / "cu13" for p in sys.path]
    return next((str(f) for f in folders if (f / "bin" / "nvdisasm").exists()), "")
