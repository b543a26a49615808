"""Grids against closed forms and torch's own; every architecture on a grid, the original untouched."""
import math
import os
import sys

import numpy as np
import pytest
import torch
import torch.nn as nn
from hypothesis import given, settings
from hypothesis import strategies as st

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import quantize as Q  # noqa: E402
from model import PRESETS, RESIDUALS, Config, Transformer  # noqa: E402
from quantize import QuantError, asymmetric, fake_quantize, quantize, symmetric  # noqa: E402

TINY = dict(vocab_size=258, n_layer=2, n_head=2, d_model=32, block_size=32, ledger_rank=4)


def tiny(preset="vanilla", seed=0, **fields):
    """A small model whose weights are large enough for logits to matter and gates to be open."""
    model = Transformer(Config(**{**TINY, **PRESETS[preset], **fields}), seed)
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            if p.ndim >= 2:
                p.copy_(torch.randn(p.shape, generator=g) / p.shape[-1] ** 0.5)
    return model


def ids(*shape, seed=0, vocab=256):
    return torch.from_numpy(np.random.default_rng(seed).integers(vocab, size=shape))


def normal(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@torch.no_grad()
def logits_of(model, tokens):
    return model(tokens)[0]


# -------------------------------------------------------------------------------------- arithmetic

@pytest.mark.parametrize("bits", [2, 3, 4, 6, 8])
def test_number_of_levels(bits):
    """Asymmetric: 2^b. Symmetric: 2^b - 1 if nothing is clipped, and 2^b, to -2^(b-1), if it is."""
    x = torch.linspace(-1, 1, 100_001)
    assert len(fake_quantize(x + 0.5, bits).unique()) == 2 ** bits
    assert len(fake_quantize(x, bits, grid=symmetric).unique()) == 2 ** bits - 1
    clipped = symmetric(torch.tensor([-0.5]), torch.tensor([0.5]), bits)
    assert Q.encode(x, clipped).unique().tolist() == list(range(-2 ** (bits - 1), 2 ** (bits - 1)))


@settings(max_examples=60, deadline=None, derandomize=True)
@given(st.integers(2, 16), st.sampled_from(["tensor", "token", "channel", 4]),
       st.booleans(), st.floats(-30, 30), st.floats(0.01, 100), st.integers(0, 99))
def test_error_is_at_most_half_a_step_and_zero_a_level(bits, per, is_symmetric, shift, size, seed):
    """Within the range, whatever its place, even one that lies far from zero. Twice is as once."""
    grid = symmetric if is_symmetric else asymmetric
    x = normal(3, 5, 8, seed=seed, dtype=torch.float64) * size + shift
    x[0, 0, :4] = 0
    before = x.clone()
    y = fake_quantize(x, bits, per, grid)
    groups = x.unflatten(-1, (-1, 4)) if per == 4 else x
    lo, hi = Q.extent(groups, "token" if per == 4 else per)
    step = grid(lo, hi, bits).scale.expand_as(groups).reshape(x.shape)
    assert ((y - x).abs() <= step / 2 * (1 + 1e-6)).all()
    assert (y[0, 0, :4] == 0).all()
    assert torch.equal(x, before)
    assert (fake_quantize(y, bits, per, grid) - y).abs().max() <= 1e-5 * step.max() + 1e-8 * 2 ** bits


def test_against_the_fake_quantisation_of_torch():
    x = normal(64, 32) * 3 + 1
    grid = asymmetric(*Q.extent(x, "tensor"), 8)
    oracle = torch.fake_quantize_per_tensor_affine(x, grid.scale.item(), int(grid.zero), 0, 255)
    assert torch.allclose(fake_quantize(x, 8), oracle, rtol=0, atol=1e-6)
    rows = symmetric(*Q.extent(x, "channel"), 4)
    oracle = torch.fake_quantize_per_channel_affine(
        x, rows.scale.flatten(), torch.zeros(64, dtype=torch.int32), 0, -8, 7)
    assert torch.allclose(fake_quantize(x, 4, "channel", symmetric), oracle, rtol=0, atol=1e-6)


def test_round_to_nearest_as_ledger_defines_it():
    """Ledger's weights by hand: scale = row absmax / qmax + 1e-8, clamp to [-qmax - 1, qmax]."""
    model = tiny("ledger")
    for bits in (8, 4):
        twin = dict(quantize(model, f"w{bits}").named_parameters())
        qmax = 2 ** (bits - 1) - 1
        linears = {f"{path}.weight" for path, m in model.named_modules() if isinstance(m, nn.Linear)}
        assert "head.weight" in linears and "residual.sites.1.key.down.weight" in linears
        for name, p in model.named_parameters():
            expected = p
            if name in linears:
                scale = p.abs().amax(1, keepdim=True) / qmax + 1e-8
                expected = (p / scale).round().clamp(-qmax - 1, qmax) * scale
                assert not torch.equal(expected, p)
            assert torch.equal(twin[name], expected), name


@pytest.mark.parametrize("per", ["tensor", "token", "channel", 2])
@pytest.mark.parametrize("grid", [symmetric, asymmetric])
@pytest.mark.parametrize("ranges", list(Q.RANGES))
def test_degenerate_values_are_defined(per, grid, ranges):
    zeros = torch.zeros(4, 6)
    assert torch.equal(fake_quantize(zeros, 4, per, grid, ranges), zeros)
    constant = torch.full((4, 6), -2.5)
    assert torch.allclose(fake_quantize(constant, 4, per, grid, ranges), constant, rtol=1e-6)
    x = normal(4, 6)
    x[:, :2] = torch.tensor([1.0, -1.0])           # so every group has a finite value of each sign
    wild = x.clone()
    wild[1, 3], wild[2, 3] = math.inf, math.nan
    y = fake_quantize(wild, 8, per, grid, ranges)
    assert y[2, 3].isnan() and y.isnan().sum() == 1 and not y.isinf().any()
    assert y[1, 3] == y[torch.tensor([1, 1]), torch.tensor([3, 2])].max()
    lost = torch.full((4, 6), math.nan)
    assert fake_quantize(lost, 8, per, grid, ranges).isnan().all()
    assert fake_quantize(torch.full((4, 6), math.inf), 8, per, grid, ranges).abs().max() < 1e-5
    for extreme in (1e-44, 1e-30, 3e38):
        y = fake_quantize(torch.tensor([[extreme, -extreme, 0, 0]]), 8, per, grid, ranges)
        assert y.isfinite().all() and (y - y.new_tensor([[extreme, -extreme, 0, 0]])).abs().max() \
            <= max(extreme / 100, 1e-8)
    assert fake_quantize(torch.empty(0, 6), 8, per, grid).shape == (0, 6)


def test_straight_through_gradient():
    """1 between the outermost levels, 0 where the range clips; the value is the level, exactly."""
    x = torch.tensor([-2.0, -0.5, 0.1, 0.9, 3.0], requires_grad=True)
    grid = asymmetric(torch.tensor([-1.0]), torch.tensor([1.0]), 8)
    y = Q.on_grid(x, grid)
    y.sum().backward()
    assert x.grad.tolist() == [0, 1, 1, 1, 0]
    assert torch.equal(y.detach(), Q.on_grid(x.detach(), grid))


def test_half_precision_is_rounded_on_a_wide_grid():
    x = normal(16, 64).bfloat16()
    y = fake_quantize(x, 8)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, fake_quantize(x.float(), 8).bfloat16())


def test_one_outlier_costs_every_other_value():
    """The error of the rest grows with the outlier; a range of its own per token confines it, and a
    clipped range gives the outlier up."""
    x = normal(800, 256)
    x[3, 7] = 1000
    rest = torch.ones(800, 256, dtype=torch.bool)
    rest[3] = False
    error = lambda **how: (fake_quantize(x, 8, **how) - x)[rest].square().mean().item()
    assert error() > 0.8                               # nearly everything became 0
    assert error(per="token") < 1e-3
    assert error(ranges="percentile") < 1e-3           # 1e-5 of 204800 values: two are out
    assert error(per="channel") < 1e-3 and error(per=16) < 1e-3


def test_percentile_and_least_squares_ranges():
    x = normal(400, 300)
    lo, hi = Q.extent(x, "tensor", "percentile")
    oracle = np.percentile(x.numpy().astype(np.float64), [0.001, 99.999])
    assert [lo.item(), hi.item()] == pytest.approx(oracle.tolist(), rel=1e-5)
    error = lambda ranges: (fake_quantize(x, 4, ranges=ranges) - x).square().mean().item()
    assert error("mse") < 0.8 * error("minmax")
    per_row = lambda ranges: (fake_quantize(x, 3, "token", symmetric, ranges) - x).square().sum(1)
    assert (per_row("mse") <= per_row("minmax")).all()


@pytest.mark.parametrize("call, message", [
    (lambda: fake_quantize(torch.ones(4), 1), "bits"), (lambda: fake_quantize(torch.ones(4), 17), "bits"),
    (lambda: fake_quantize(torch.ones(4), 8, "row"), "per"),
    (lambda: fake_quantize(torch.ones(4), 8, 3), "divide"),
    (lambda: fake_quantize(torch.ones(4), 8, ranges="mean"), "ranges"),
    (lambda: Q.parse("int8"), "scheme"), (lambda: Q.parse("w8-static"), "scheme"),
    (lambda: Q.parse("w1a8"), "bits"), (lambda: Q.parse("w8a32"), "bits"),
    (lambda: quantize(tiny(), "w8a8-static"), "calibration")])
def test_bad_requests_are_one_line(call, message):
    with pytest.raises(QuantError, match=message) as error:
        call()
    assert "\n" not in str(error.value)


# ------------------------------------------------------------------------------------- every model

VARIANTS = {**{name: dict(preset=name) for name in PRESETS},
            "gpt": dict(pos="learned", ffn="gelu", ffn_bias=True), "tied": dict(tied_head=True),
            "gqa": dict(n_head=4, n_kv_head=2), "attention-only": dict(ffn="none"),
            **{norm: dict(norm=norm) for norm in ("sandwich", "sandwich-qk", "dyt", "post")},
            **{f"gate-{gate}": dict(gate=gate) for gate in ("channel", "head", "token")},
            "ledger-cap": dict(preset="ledger", ledger_cap=3.0, ledger_gamma=0.5)}


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_every_model_quantises_and_stays_what_it_was(variant):
    """16 bits are nearly the identity, fewer bits are further away, the original is bit-identical."""
    model, tokens = tiny(**VARIANTS[variant]), ids(2, 24)
    state = {name: t.clone() for name, t in model.state_dict().items()}
    truth = logits_of(model, tokens)
    size = truth.std().item()
    distance = {}
    for scheme in ("w16a16", "w8a8", "w4a4", "w8", "w4", "w8a8-static", "w4a4-static"):
        twin = quantize(model, scheme, tokens)
        distance[scheme] = (logits_of(twin, tokens) - truth).square().mean().sqrt().item() / size
    assert 0 < distance["w16a16"] < 2e-3
    assert distance["w16a16"] < distance["w8a8"] / 10
    assert distance["w8a8"] < distance["w4a4"] / 2 and distance["w8a8"] < 0.2
    assert 0 < distance["w8"] < distance["w4"] / 4
    assert distance["w8a8-static"] < distance["w4a4-static"]
    assert torch.equal(logits_of(model, tokens), truth)
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())


def test_every_residual_has_a_twin():
    assert set(RESIDUALS.values()) < set(Q.TWINS)
