"""Mosaic GPU kernels; imports jax only."""
