"""Text in, batches out.

`load_text` reads documents, `prepare` cuts them into training and validation part and tokenises
both once, `train_iterator` and `eval_batches` turn the tokens into rows. Importing this package
starts no jax backend.
"""

from tx_jax.data.batches import Batch, epoch_starts, eval_batches, train_iterator, window_starts
from tx_jax.data.prepare import Part, Prepared, prepare, split_tail
from tx_jax.data.sources import Corpus, ParallelCorpus, load_parallel, load_text, text_hash

__all__ = ["Batch", "Corpus", "ParallelCorpus", "Part", "Prepared", "epoch_starts", "eval_batches",
           "load_parallel", "load_text", "prepare", "split_tail", "text_hash", "train_iterator",
           "window_starts"]
