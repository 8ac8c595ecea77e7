"""The peer of `attention_speed.py`: PyTorch's flash attention on the CPU, over pipes.

It imports nothing of this project. Arguments: a JSON object with `threads`, `shape` [B, T, N, H]
and `causal`. Every line on standard input is "forward" or "both", answered by one JSON line with
the seconds of one pass.
"""

import json
import sys
import time

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention


def main(options: dict) -> None:
    """Serve."""
    torch.set_num_threads(options["threads"])
    B, T, N, H = options["shape"]
    q, k, v, d_out = (torch.randn(B, N, T, H) for _ in range(4))
    print(json.dumps({"version": torch.__version__}), flush=True)
    for line in sys.stdin:
        both = line.strip() == "both"
        inputs = [x.detach().requires_grad_(both) for x in (q, k, v)]
        start = time.perf_counter()
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            out = scaled_dot_product_attention(*inputs, is_causal=options["causal"])
            if both:
                out.backward(d_out)
        print(json.dumps({"seconds": time.perf_counter() - start}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
