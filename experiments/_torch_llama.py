"""The peer of `decoding_speed.py`: `generate()` of Hugging Face transformers, over pipes.

It imports nothing of this project, so any Python that has torch, transformers and NumPy can run it.
Arguments: a JSON object (see `main`). It prints one JSON line when ready; then every line on
standard input is a request, answered by one JSON line with seconds and tokens.
"""

import json
import sys
import time

import numpy as np
import torch
import transformers


def build(config: dict, path: str) -> transformers.LlamaForCausalLM:
    """A Llama of these sizes with the weights of an .npz file, float32."""
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config))
    with np.load(path) as arrays:
        state = {name: torch.from_numpy(arrays[name]) for name in arrays.files}
    model.load_state_dict(state, strict=True)
    return model.eval()


def main(options: dict) -> None:
    """Serve. `options`: threads, arrays (an .npz of parameters), config (of LlamaConfig)."""
    torch.set_num_threads(options["threads"])
    transformers.logging.set_verbosity_error()
    model = build(options["config"], options["arrays"])
    print(json.dumps({"version": f"transformers {transformers.__version__}, "
                                 f"torch {torch.__version__}",
                      "parameters": sum(p.numel() for p in model.parameters())}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        ids = torch.tensor(request["prompts"])
        began = time.perf_counter()
        with torch.inference_mode():
            out = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False,
                                 max_new_tokens=request["new"], min_new_tokens=request["new"],
                                 pad_token_id=0, eos_token_id=None, use_cache=True)
        seconds = time.perf_counter() - began
        print(json.dumps({"seconds": seconds, "tokens": out[:, ids.shape[1]:].tolist()}),
              flush=True)


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
