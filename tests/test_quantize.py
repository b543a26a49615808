"""Grids against closed forms and torch's own; every architecture on one, its original untouched."""
import dataclasses
import json
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
from eval import evaluate  # noqa: E402
from model import PRESETS, RESIDUALS, Config, Transformer, save_checkpoint  # noqa: E402
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
    again = fake_quantize(y, bits, per, grid)
    assert (again - y).abs().max() <= 1e-5 * step.max() + 1e-8 * 2 ** bits


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
        linears = {f"{path}.weight" for path, m in model.named_modules()
                   if isinstance(m, nn.Linear)}
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
    (lambda: fake_quantize(torch.ones(4), 1), "bits"),
    (lambda: fake_quantize(torch.ones(4), 17), "bits"),
    (lambda: fake_quantize(torch.ones(4), 8, "row"), "per"),
    (lambda: fake_quantize(torch.ones(4), 8, 3), "divide"),
    (lambda: fake_quantize(torch.ones(4), 8, ranges="mean"), "ranges"),
    (lambda: Q.parse("w8a0"), "0 bits"),
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
            **{f"gate-{gate}": dict(gate=gate) for gate in ("channel", "head", "token", "position",
                                                            "single-static")},
            "linear-ffn": dict(ffn="linear"),
            "dyt-oasis": dict(preset="oasis", norm="dyt", router_norm=True),
            "sandwich-ledger": dict(preset="ledger", norm="sandwich", gate="single"),
            "kv-bias-attnres": dict(preset="attnres", attn_bias=True, n_kv_head=1),
            "ledger-cap": dict(preset="ledger", ledger_cap=3.0, ledger_gamma=0.5)}


@pytest.mark.parametrize("variant", list(VARIANTS))
def test_every_model_quantises_and_stays_what_it_was(variant):
    """16 bits are nearly the identity, fewer bits lie further away; the original is untouched."""
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


@pytest.mark.parametrize("preset, more", [
    ("vanilla", {}), ("ledger", {}), ("oasis", {}), ("oasis", {"router_norm": True}),
    ("attnres-block", {}), ("hc2", {}), ("delta", {})])
def test_every_site_is_reached_and_does_something(preset, more):
    """One site at 2 bits moves the logits; nothing chosen moves nothing; ranges come from data."""
    model = tiny(preset, n_layer=1, ledger_gamma=0.5, router_init="zero", **more)
    tokens = ids(1, 24)
    truth = logits_of(model, tokens)
    names = Q.sites(quantize(model, "w2a2"))
    assert len(names) == len(set(names))
    nothing = logits_of(quantize(model, "w2a2", only=set()), tokens)
    assert (nothing - truth).abs().max() < 2e-5
    for name in names:
        moved = (logits_of(quantize(model, "w2a2", only={name}), tokens) - truth).abs().max()
        if name.endswith("commit:out"):     # one number a token: with a range of its own, exact
            assert moved < 2e-5
        else:
            assert moved > 2e-4, name
    static = quantize(model, "w4a4-static", tokens)
    assert all(q.lo <= 0 <= q.hi and q.hi > q.lo for q in Q.quantizers(static).values())


def test_sites_are_the_papers():
    """Roles and places of a nano OASIS: linear inputs and outputs, norms, probabilities, context,
    the stream, router projections; not the head, not the embedding."""
    kinds = {Q.kind_of(name) for name in Q.sites(quantize(tiny("oasis"), "w8a8"))}
    linear = {"wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down"}
    assert kinds == {f"{name}:{role}" for name in linear for role in ("weight", "in", "out")} | {
        "norms:out", "final_norm:out", "probs", "context", "residual:sum", "residual:stream"}
    assert {name.rpartition(":")[2] for name in kinds} <= set(Q.SITES)
    depth = [name for name in Q.sites(quantize(tiny("oasis"), "w8a8")) if "residual.sites" in name]
    assert len(depth) == 4 * 2 * 3                  # wq and wk of four routers: weight, in, out
    assert set(Q.sites(quantize(tiny("oasis"), "w8"))) == {
        name for name in Q.sites(quantize(tiny("oasis"), "w8a8", head=True)) if "weight" in name}


def test_head_and_embedding_only_when_asked():
    tied, loose = tiny(tied_head=True), tiny()
    for scheme in Q.SCHEMES:
        twin = quantize(tied, scheme, ids(2, 16))
        assert torch.equal(twin.embed.weight, tied.embed.weight)
        assert torch.equal(twin.head.weight, tied.embed.weight)
        head = quantize(tied, scheme, ids(2, 16), head=True)
        assert torch.equal(head.embed.weight, tied.embed.weight)
        assert not torch.equal(head.head.weight, tied.embed.weight)
        embed = quantize(tied, scheme, ids(2, 16), embed=True)
        assert not torch.equal(embed.embed.weight, tied.embed.weight)
        assert torch.equal(embed.head.weight, tied.embed.weight)
        assert torch.equal(quantize(loose, scheme, ids(2, 16)).head.weight, loose.head.weight) \
            == ("a" in scheme)


def test_activation_quantisers_of_the_ledger_are_not_passed_by():
    """The fused update reads weights: had it been used, these sites would do nothing."""
    model, tokens = tiny("ledger"), ids(2, 24)
    maps = [name for name in Q.sites(quantize(model, "w8a8")) if "residual.sites" in name
            and not name.endswith("weight")]
    assert len(maps) == 4 * (5 * 2 + 1) * 2
    moved = logits_of(quantize(model, "w2a2", only=set(maps)), tokens)
    assert (moved - logits_of(model, tokens)).abs().max() > 0.1


def test_static_ranges_by_hand():
    """Running min-max with momentum 0.9, the widest, and percentiles, of a site that is known: the
    stream after sublayer 0."""
    model, batches = tiny(), [ids(2, 16, seed=i) for i in range(3)]
    seen = []

    def record(name, l, x):
        if l == 0:
            seen.append(x)
    record.names = {"stream"}
    for tokens in batches:
        with torch.no_grad():
            model(tokens, record=record)
    lows, highs = [x.min().item() for x in seen], [x.max().item() for x in seen]
    ema = lambda v: 0.9 * (0.9 * v[0] + 0.1 * v[1]) + 0.1 * v[2]
    expected = {"running": (ema(lows), ema(highs)), "minmax": (min(lows), max(highs)),
                "percentile": tuple(ema([np.percentile(x.numpy().astype(float), share)
                                         for x in seen]) for share in (0.001, 99.999))}
    for ranges, (lo, hi) in expected.items():
        twin = quantize(model, "w8a8-static", batches, ranges=ranges, only={"residual.0:stream"})
        q = Q.quantizers(twin)["residual.0:stream"]
        assert (q.lo.item(), q.hi.item()) == pytest.approx((lo, hi), rel=1e-5)


def spiked():
    """A model with a massive activation: one channel of the embedding is 300 for the first id, and
    the norms are told to look away from it (gain near zero), as trained models do."""
    model = tiny(d_model=64, head_dim=32)
    with torch.no_grad():
        model.embed.weight[0, 5] = 300.0
        for norm in [*model.norms, model.final_norm]:
            norm.weight[5] = 1e-3
    tokens = ids(8, 33, seed=1)
    tokens[:, 0] = 0
    return model, tokens


def test_a_massive_activation_costs_every_token_that_shares_its_range():
    """fp <= w8a8 <= w4a4 <= static. With the stream alone on a grid, a range for each token spares
    the other tokens, and one range for all does not."""
    model, tokens = spiked()
    model.head.weight.data *= 4
    with torch.no_grad():           # targets the model predicts, so that noise can only hurt
        for t in range(1, 33):
            tokens[:, t] = model(tokens[:, :t])[0][:, -1].argmax(-1)
    x = tokens[:, :-1]
    names = ["w8a8", "w4a4", "w8a8-static", "w4a4-static"]
    loss = {name: r["delta_loss"] for name, r in Q.measure(model, tokens, names, x).items()}
    assert -1e-3 <= loss["w8a8"] <= loss["w4a4"] <= loss["w4a4-static"]
    assert 10 * loss["w8a8"] < loss["w8a8-static"] <= loss["w4a4-static"]
    truth = logits_of(model, x)[:, 1:]
    only = {f"residual.{l}:stream" for l in range(4)}
    error = lambda scheme, **how: (logits_of(quantize(model, scheme, x, only=only, **how), x)[:, 1:]
                                   - truth).square().mean().sqrt().item() / truth.std().item()
    assert error("w8a8") < 0.1 < 1 / 3 < error("w8a8-static", ranges="minmax")


def test_smoothing_is_the_same_function_with_smaller_outliers():
    """The identity at 16 bits; with an outlier channel in the norms' outputs, fewer bits gain."""
    model, tokens = tiny(), ids(4, 24)
    with torch.no_grad():
        for norm in model.norms:
            norm.weight[3] = 60.0
        for sublayer in model.sublayers:
            for name in Q.READERS:
                if hasattr(sublayer, name):
                    getattr(sublayer, name).weight[:, 3] *= 1 / 60
    truth = logits_of(model, tokens)
    error = lambda scheme, **how: (logits_of(quantize(model, scheme, tokens, **how), tokens)
                                   - truth).square().mean().sqrt().item() / truth.std().item()
    assert error("w16a16", smooth=0.5) < 2e-3
    for scheme in ("w8a8", "w4a4", "w8a8-static"):
        assert error(scheme, smooth=0.5) < 0.5 * error(scheme)
    s = Q.smoothing(model, [tokens], 0.5)
    assert torch.equal(s["norms.0"], s["sublayers.0.wv"]) and s["norms.0"].argmax() == 3


def test_quantised_copies_generate_as_they_read():
    """A token's range is its own, so a cache changes nothing but rounding."""
    model = quantize(tiny(), "w8a8")
    tokens = ids(1, 6)
    out = model.generate(tokens, 8, temperature=0)
    again = tokens
    for _ in range(8):
        again = torch.cat([again, logits_of(model, again)[:, -1:].argmax(-1)], 1)
    assert torch.equal(out, again)


def test_half_precision_models():
    model = tiny("oasis").bfloat16()
    for scheme in Q.SCHEMES:
        twin = quantize(model, scheme, ids(2, 16))
        assert {p.dtype for p in twin.parameters()} == {torch.bfloat16}
        assert logits_of(twin, ids(2, 16)).dtype == torch.bfloat16


# ------------------------------------------------------------------------------------- int8

@pytest.mark.parametrize("smooth", [0.0, 0.5])
@pytest.mark.parametrize("scheme", ["w8a8", "w8a8-static", "w4a6"])
def test_integers_equal_the_simulation(scheme, smooth):
    """In fp64 the two differ by 1e-14; the int8 path does use integers."""
    model, tokens = tiny(ffn_bias=True).double(), ids(2, 24)
    twin = quantize(model, scheme, tokens, smooth=smooth)
    for name, m in Q.linears(twin).items():
        x = normal(3, 5, m.weight.shape[1], dtype=torch.float64) * 3
        count = Q.use_integers(twin)
        assert count == len(Q.linears(twin)) == 14 and m.codes.dtype == torch.int8
        m.output, kept = nn.Identity(), m.output
        real = m(x)
        Q.use_integers(twin, False)
        fake = m(x)
        m.output = kept
        assert (real - fake).abs().max() <= 1e-12 * fake.abs().max(), name
    Q.use_integers(twin)
    integer = logits_of(twin, tokens)
    Q.use_integers(twin, False)
    assert (integer - logits_of(twin, tokens)).abs().max() < 1e-6
    assert Q.use_integers(quantize(model, "w8")) == 0


def test_size_in_bytes():
    model = tiny()
    size = Q.size_in_bytes(model)
    assert size == 4 * sum(p.numel() for p in model.parameters())
    linear = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    rows = sum(len(m.weight) for m in model.modules() if isinstance(m, nn.Linear))
    assert Q.size_in_bytes(quantize(model, "w4")) == size - 4 * linear + linear // 2 + 4 * rows
    tied = tiny(tied_head=True)
    assert Q.size_in_bytes(tied) == 4 * sum(p.numel() for p in tied.parameters())


# ------------------------------------------------------------------------------------- measures

@pytest.mark.parametrize("preset", ["oasis", "ledger"])
def test_measure_uses_the_windows_of_evaluate(preset):
    """16 bits give evaluate's own loss; a copy can itself be evaluated, records and all."""
    model, text = tiny(preset), ids(2000)
    how = dict(T=32, n_sequences=12, batch_size=5, bos_policy="window", bos=257)
    results = Q.measure(model, text, ["w16a16", "w4a4"], **how)
    truth = evaluate(model, text, light=True, **how)["val"]["loss"]
    whole = evaluate(quantize(model, "w4a4"), text, **how)
    assert whole["val"]["loss"] == pytest.approx(results["w4a4"]["loss"], abs=1e-9)
    assert whole["massive"]["max"] > 0 and len(whole["outliers"]["per_layer"]) == 4
    assert results["w16a16"]["loss"] == pytest.approx(truth, abs=1e-3)
    for entry in results.values():
        assert entry["loss"] - entry["delta_loss"] == pytest.approx(truth, abs=1e-9)
        assert entry["ppl"] == pytest.approx(math.exp(entry["loss"]))
        assert len(entry["worst"]) == 5
        assert [dB for _, dB in entry["worst"]] == sorted(dB for _, dB in entry["worst"])
    assert set(Q.measure(model, text, ["w8"], head=True, embed=True, **how)) == {"w8+head+embed"}


def test_noise_is_six_decibels_a_bit():
    model, tokens = tiny(), ids(2, 24)
    ratio = {b: Q.noise(quantize(model, f"w{b}a{b}"), tokens) for b in (6, 8)}
    for name in ("norms.0:out", "sublayers.1.w_up:weight"):
        assert ratio[8][name] - ratio[6][name] == pytest.approx(12.04, abs=0.8)


def test_attribution_finds_the_site():
    """One linear map whose weights hold an outlier in every row costs more than all the others."""
    model, tokens = tiny(), ids(6, 33)
    with torch.no_grad():
        model.sublayers[1].w_down.weight[:, 0] = 30
        model.sublayers[1].w_up.weight[0] = 0        # and that column is never used
    how = dict(T=32, n_sequences=6)
    change = Q.attribute(model, "w4", tokens, **how)
    loudest = max(change, key=lambda name: abs(change[name]))
    assert loudest == "sublayers.1.w_down:weight"
    kinds = Q.attribute(model, "w4", tokens, by="kind", **how)
    assert max(kinds, key=lambda name: abs(kinds[name])) == "w_down:weight" and len(kinds) == 8
    assert list(change.values()) == sorted(change.values(), reverse=True)


# ------------------------------------------------------------------------------------- program

@pytest.fixture
def run(tmp_path):
    """A run folder and, as its corpus, a text file outside of it."""
    model, folder = tiny(), tmp_path / "run"
    folder.mkdir()
    text = tmp_path / "text.jsonl"
    lines = (json.dumps({"text": f"{i} squared is {i * i}, as all know. " * 4}) for i in range(300))
    text.write_text("\n".join(lines) + "\n")
    save_checkpoint(str(folder / "checkpoint.pt"), {
        "config": dataclasses.asdict(model.config), "model": model.state_dict(),
        "run": {"data": str(text), "tokenizer": "bytes", "bos": "window"}})
    return folder


def test_program(run, capsys):
    (run / "metrics.json").write_text('{"val": {"loss": 1.0}}')
    code = Q.main([str(run), "--scheme", "w8a8", "w4a4-static", "--attribute", "kind", "--int8",
                   "--n-sequences", "6", "--smooth", "--batches", "2"])
    out = capsys.readouterr()
    assert code == 0, out.err
    metrics = json.loads((run / "metrics.json").read_text())
    assert metrics["val"] == {"loss": 1.0}
    assert set(metrics["quant"]) == {"w8a8+smooth", "w4a4-static+smooth"}
    entry = metrics["quant"]["w8a8+smooth"]
    assert {"loss", "ppl", "delta_loss", "bytes", "worst"} <= set(entry)
    assert "attribution" not in entry and "w_up:in" in entry["attribution_by_kind"]
    for part in (f"{entry['loss']:.4f}", "in int8", "floating point"):
        assert part in out.out
    drawn = {"grids", "attribution-w8a8+smooth", "attribution-w4a4-static+smooth"}
    for name in drawn:
        assert (run / "figures" / f"quant-{name}.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize("arguments, message", [
    (["--scheme", "q8"], "scheme"), (["--scheme", "w99"], "bits"), (["--batches", "0"], "batches"),
    (["--smooth", "2"], "alpha"), (["--ranges", "running", "--scheme", "w8a8"], "batches"),
    (["--data", "no-such-corpus"], "no-such-corpus"), (["--device", "nowhere"], "nowhere")])
def test_bad_input_is_one_line_and_leaves_everything(run, capsys, arguments, message):
    before = sorted(os.listdir(run))
    assert Q.main([str(run), "--n-sequences", "2", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error and error.count("\n") == 1 and error.startswith("quantize.py: ")
    assert sorted(os.listdir(run)) == before


def test_no_such_run(tmp_path, capsys):
    assert Q.main([str(tmp_path / "nothing")]) == 2
    assert "nothing" in capsys.readouterr().err


def test_figures_say_what_was_planted():
    model, tokens = spiked()
    (calm_label, calm), (label, wild) = Q.spike_pair(model, tokens)
    assert "taken out" in calm_label and "as it is" in label and wild.max() > 250 > calm.max()
    (label, calm), (planted_label, wild) = Q.spike_pair(tiny(), ids(2, 24))
    assert "as it is" in label and "planted" in planted_label
    assert len(wild) == len(calm) + 1 and wild[-1] == 1000 * calm.abs().median()
    titles = [ax.get_title() for ax in Q.draw_grids([(label, calm), (planted_label, wild)]).axes]
    lost = [float(title.split(", ")[-1].split("%")[0]) for title in titles]     # 8, 4; 8, 4 bits
    assert lost[0] < 5 and lost[2] > 75 and lost[3] > 99
    sweep = {name: dict(loss=1.0) for name in ("w2", "w4", "w2a2-static", "w4a4-static")}
    assert len(Q.draw_sweep(sweep, 1.0).axes[0].lines) == 3
