"""The kernel as an H200 would run it, compiled without a GPU in a process of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kernels_pallas import sass

ROOT = Path(__file__).parent.parent


def compiled(*names):
    """The report on some configurations, as words of its lines by name."""
    result = subprocess.run([sys.executable, "-m", "kernels_pallas.compile_report", *names],
                            cwd=ROOT, env=os.environ | {"JAX_PLATFORMS": "cpu"}, text=True,
                            capture_output=True, timeout=300)
    if result.stdout.startswith("nothing is compiled"):
        pytest.skip(result.stdout.strip())
    assert result.returncode == 0, result.stdout + result.stderr
    lines = [line.split() for line in result.stdout.splitlines()]
    return {words[0]: words[1:] for words in lines if words}


def per_block(words):
    """(HGMMA, EX2, other) instructions of each loop over blocks of keys."""
    return [tuple(map(int, loop.split("/"))) for loop in words[5:]]


@pytest.mark.parametrize("width, mask", [
    (64, "none"), *(pytest.param(w, m, marks=pytest.mark.slow)
                      for w, m in ((128, "none"), (128, "causal"), (64, "causal")))])
def test_the_gate_passes_with_no_more_instructions_than_the_shipped_kernel(width, mask):
    report = compiled(f"d{width}-bfloat16-{mask}", f"shipped-d{width}-{mask}")
    assert report["gate:"] == ["pass"]
    loops = per_block(report[f"d{width}-bfloat16-{mask}"])
    shipped = per_block(report[f"shipped-d{width}-{mask}"])
    # Ours has a masked loop before and after the full one, the shipped kernel only after.
    full, full_shipped = loops[len(loops) // 2], shipped[0]
    assert full[:2] == full_shipped[:2] and full[2] <= full_shipped[2]
    assert full[0] == 8 + width // 16
    if mask == "causal":
        assert loops[2][1] == shipped[1][1] and loops[2][2] <= shipped[1][2]


@pytest.mark.slow
def test_segments_in_the_widest_heads_pass_the_gate():
    assert compiled("d256-float16-segments")["gate:"] == ["pass"]


def test_loops_are_found_in_a_listing():
    text = """
.L_x_1:
        /*0010*/                   SYNCS.PHASECHK P1, [R1] ;
        /*0020*/              @!P1 BRA `(.L_x_1) ;
.L_x_2:
        /*0030*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR20], RZ, !UPT ;
.L_x_3:
        /*0040*/                   MUFU.EX2 R1, R1 ;
        /*0050*/               @P1 BRA `(.L_x_2) ;
        /*0060*/                   EXIT ;
        /*0070*/                   BRA `(.L_x_3) ;
"""
    assert sass.key_loops(text) == [sass.Loop(1, 1, 2)]
    assert sass.count(text, "MUFU.EX2") == 1
