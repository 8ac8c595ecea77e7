"""The peer of `throughput.py`: a plain GPT in eager PyTorch, driven line by line over pipes.

It imports nothing of this project, so any Python that has torch and NumPy can run it. Arguments: a
JSON object (see `main`). It prints one JSON line when ready; then every line on standard input is a
number of steps, answered by one JSON line with the seconds they took and the last loss.
"""

import json
import sys
import time

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F


class Block(nn.Module):
    """Pre-norm attention and MLP without linear biases, as nanoGPT writes them."""

    def __init__(self, width: int, heads: int, hidden: int, approximate: str) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm, self.mlp_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.gelu = nn.GELU(approximate=approximate)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows, length, width = x.shape
        split = (rows, length, self.heads, width // self.heads)
        qkv = self.qkv(self.attention_norm(x)).split(width, dim=2)
        q, k, v = (y.view(split).transpose(1, 2) for y in qkv)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).contiguous().view(rows, length, width))
        return x + self.down(self.gelu(self.up(self.mlp_norm(x))))


class GPT(nn.Module):
    """Learned positions, tied output head."""

    def __init__(self, vocab: int, context: int, layers: int, width: int, heads: int, hidden: int,
                 approximate: str) -> None:
        super().__init__()
        self.embed, self.positions = nn.Embedding(vocab, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(
            Block(width, heads, hidden, approximate) for _ in range(layers))
        self.final_norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens) + self.positions.weight[None, :tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.final_norm(x), self.embed.weight)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))


def main(options: dict) -> None:
    """Serve. `options`: threads, arrays (an .npz of parameters and batches), shape, optim."""
    torch.set_num_threads(options["threads"])
    model, optim = GPT(**options["shape"]), options["optim"]
    with np.load(options["arrays"]) as arrays:
        tokens, targets = (torch.from_numpy(arrays[name].astype(np.int64))
                           for name in ("tokens", "targets"))
        model.load_state_dict({name: torch.from_numpy(arrays[name])
                               for name in arrays.files if name not in ("tokens", "targets")})
    parameters = list(model.parameters())
    groups = [{"params": [p for p in parameters if p.dim() > 1], "weight_decay": optim["decay"]},
              {"params": [p for p in parameters if p.dim() < 2], "weight_decay": 0.0}]
    adam = torch.optim.AdamW(groups, lr=optim["lr"], betas=optim["betas"], eps=optim["eps"])
    print(json.dumps({"version": torch.__version__, "threads": torch.get_num_threads(),
                      "parameters": sum(p.numel() for p in parameters)}), flush=True)
    done = 0
    for line in sys.stdin:
        steps, start = int(line), time.perf_counter()
        for _ in range(steps):
            loss = model(tokens[done % len(tokens)], targets[done % len(tokens)])
            adam.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(parameters, optim["clip"])
            adam.step()
            done += 1
        last = loss.item()
        print(json.dumps({"seconds": time.perf_counter() - start, "loss": last}), flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
