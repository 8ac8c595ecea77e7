"""Budgets: counted from the program, equal to the closed forms, and matched by depth."""

import dataclasses

import pytest

from tx_jax import forms
from tx_jax.config import EncoderConfig, ModelConfig
from tx_jax.errors import UserError
from tx_jax.study.budget import closed_flops, closed_parameters, match, measure

CFG = ModelConfig(layers=3, d_model=32, heads=4, norm="none", positions="none", mlp="relu",
                  attention="reference")
V, S, T = 8, 12, 10


def make(layers, encoder=None, **options):
    cfg = dataclasses.replace(CFG, layers=layers, **options)
    return forms.build(cfg, encoder, V, S + T)


@pytest.mark.parametrize("encoder", [None, EncoderConfig(), EncoderConfig(layers=2)])
def test_counts_equal_the_closed_forms(encoder):
    """Within 5 %: softmax, residuals and non-linearities come on top of the products."""
    found = measure(make(3, encoder), S, T)
    own = {} if encoder is None else {"encoder": encoder.layers or 3}
    head = 2 * CFG.d_model * V * (T if encoder else S + T)
    forward = closed_flops(32, 128, decoder=3, source=S, target=T, **own) + head
    assert forward < found.forward < 1.05 * forward
    assert 2.7 * found.forward < found.training < 3.1 * found.forward
    layers = closed_parameters(3, 32, 128, cross=encoder is not None)
    if encoder:
        layers += closed_parameters(encoder.layers or 3, 32, 128)
    assert found.layers == layers and found.parameters == layers + V * 32


def test_depths_that_match():
    """Experiments b.2: L_dec = 7 L / 3 by parameters, 7 L / 6 by operations of equal lengths."""
    pair = measure(make(6, EncoderConfig()), 16, 16)
    by_parameters = match(make, lambda b: b.layers, pair.layers, 16, 16)
    by_operations = match(make, lambda b: b.training, pair.training, 16, 16)
    assert (by_parameters, by_operations) == (14, 7)


def test_the_nearer_depth_is_taken():
    one = measure(make(1), S, T).layers
    assert match(make, lambda b: b.layers, int(2.4 * one), S, T) == 2
    assert match(make, lambda b: b.layers, int(2.6 * one), S, T) == 3


def test_what_cannot_be_matched_is_refused():
    with pytest.raises(UserError, match="2 layers come to .*, less than the"):
        match(make, lambda b: b.layers, 10**9, S, T, most=2)
