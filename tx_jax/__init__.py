"""tx_jax: a laboratory for attention, positions and Transformer architecture in JAX."""
