"""Explicit attention biases: one learned key and value more, held to a loop in plain code."""
import math

import pytest
import torch

from eval import evaluate
from model import Config, KVCache, Transformer, is_mechanism, rotate
from quantize import quantize
from softmax1 import attend

TINY = dict(vocab_size=61, n_layer=2, n_head=4, n_kv_head=2, d_model=32, head_dim=8, d_ff=48,
            block_size=24, attn_bias=True)


def build(dtype=torch.float64, **fields) -> Transformer:
    model = Transformer(Config(**{**TINY, **fields})).to(dtype)
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=g).to(dtype))
    return model


def ids(*shape, seed=0):
    return torch.randint(61, shape, generator=torch.Generator().manual_seed(seed))


def reference(a, u, cos, sin):
    """Attention with biases, a query and a head at a time. u (T, d) -> y (T, d), mass of k' (H, T).
    """
    c, T = a.config, len(u)
    q, k, v = (w(u).unflatten(-1, (-1, c.head_dim)).transpose(0, 1) for w in (a.wq, a.wk, a.wv))
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)                     # (H, T, D), (G, T, D)
    heads, mass = [], torch.zeros(c.n_head, T, dtype=u.dtype)
    for h in range(c.n_head):
        g = h // (c.n_head // c.n_kv_head)
        rows = []
        for t in range(T):
            scores = [q[h, t] @ a.extra.key[g]] + [q[h, t] @ k[g, j] for j in range(t + 1)]
            e = (torch.stack(scores) / math.sqrt(c.head_dim)).exp()
            p = e / e.sum()
            mass[h, t] = p[0]
            rows.append(p[0] * a.extra.value[g] + p[1:] @ v[g, :t + 1])
        heads.append(torch.stack(rows))
    return a.wo(torch.cat(heads, -1)), mass


def test_the_model_equals_the_loop_gradients_included():
    """Grouped heads, rotary positions, the fused path of this machine; every parameter's gradient,
    k' and v' among them."""
    model = build()
    a, u = model.sublayers[0], torch.randn(1, 7, 32, dtype=torch.float64, requires_grad=True)
    ctx, g = model.context(ids(1, 7), None, None, None), torch.randn(7, 32, dtype=torch.float64)
    y, _ = a(u, ctx)
    want, _ = reference(a, u[0], ctx.cos[0], ctx.sin[0])
    assert torch.allclose(y[0], want, atol=1e-10)
    inputs = [u, *a.parameters()]
    for got, true in zip(torch.autograd.grad(y[0], inputs, g),
                         torch.autograd.grad(want, inputs, g)):
        assert torch.allclose(got, true, atol=1e-9) and true.abs().max() > 1e-6


def test_every_path_of_attend_gives_the_same():
    """The extra key stands in front: eager, SDPA and the fused CPU path, softmax and Softmax1."""
    model = build(torch.float32)
    a, x = model.sublayers[0], model.embed(ids(2, 9))
    q, k, v = (w(x).unflatten(-1, (-1, 8)).transpose(1, 2) for w in (a.wq, a.wk, a.wv))
    mask = (torch.arange(9) >= torch.tensor([[0], [4]]))[:, None, None]             # (2, 1, 1, 9)
    k, v, mask = a.extra(k, v, mask)
    for normalizer in ("softmax", "softmax1"):
        outs = [attend(q, k, v, normalizer, mask=mask, impl=i)[0] for i in ("eager", "sdpa", "cpu")]
        for out in outs[1:]:
            assert torch.allclose(out, outs[0], atol=1e-5)
    assert torch.allclose(outs[0][1, :, :4].isfinite().float(), torch.ones(1))      # padding rows


def test_its_mass_is_measured_per_query():
    """Recorded without a matrix, equal to the loop's; and what eval.py reports is its mean."""
    model, tokens = build(), ids(1, 8)
    seen = {}
    with torch.no_grad():
        model(tokens, record=lambda n, l, x: seen.__setitem__((n, l), x))
        a, ctx = model.sublayers[0], model.context(tokens, None, None, None)
        _, mass = reference(a, seen["norm_out", 0][0], ctx.cos[0], ctx.sin[0])
    assert torch.allclose(seen["bias_mass", 0][0], mass, atol=1e-9) and mass.std() > 0.01
    probs = seen["attn_probs", 0]
    assert probs.shape == (1, 4, 8, 8) and torch.equal(probs, probs.tril())
    total = probs.sum(-1) + seen["bias_mass", 0]
    assert torch.allclose(total, torch.ones_like(total), atol=1e-9)
    null = evaluate(model, ids(90), T=8)["null"]
    assert null["token_mass"] == 0 and 0.02 < null["bias_mass"] < 0.98
    assert len(null["bias_per_head"]) == 2 and len(null["bias_per_head"][0]) == 4
    assert evaluate(build(attn_bias=False), ids(90), T=8)["null"]["bias_mass"] is None


def test_limits():
    """k' = v' = 0 is Softmax1, its mass the null mass; a k' that no query matches is nothing."""
    model, tokens = build(), ids(2, 9)
    plain, null = build(attn_bias=False), build(attn_bias=False, normalizer="softmax1")
    state = {n: p for n, p in model.state_dict().items() if ".extra." not in n}
    for other in (plain, null):
        other.load_state_dict(state)
    seen = {}
    record = lambda n, l, x: seen.__setitem__((n, l), x)
    with torch.no_grad():
        assert (model(tokens)[0] - plain(tokens)[0]).abs().max() > 0.01
        for a in model.sublayers[::2]:
            a.extra.key.zero_(), a.extra.value.zero_()
        assert torch.allclose(model(tokens, record=record)[0], null(tokens)[0], atol=1e-10)
        mass = seen["bias_mass", 2]
        null(tokens, record=record)
        assert torch.allclose(mass, seen["null", 2], atol=1e-10)
    q, k, v = (torch.rand(1, 2, 5, 4, dtype=torch.float64) for _ in range(3))
    a = model.sublayers[0].extra
    a.key.data, a.value.data = torch.full((2, 4), -1e4).double(), torch.ones(2, 4).double()
    assert torch.allclose(attend(q, *a(k, v, None)[:2])[0], attend(q, k, v)[0], atol=1e-12)


@pytest.mark.parametrize("fields", [{}, {"normalizer": "softmax1"}, {"normalizer": "sparsemax"},
                                    {"pos": "learned"}, {"gate": "head", "residual": "oasis"}])
def test_cache_and_padding(fields):
    model, tokens = build(**fields), ids(1, 11)
    with torch.no_grad():
        truth = model(tokens)[0]
        cache = KVCache(model.config, 1, 16, dtype=torch.float64)
        parts = [model(tokens[:, :6], cache=cache)[0]]
        parts += [model(tokens[:, i:i + 1], cache=cache)[0] for i in range(6, 11)]
        assert torch.allclose(torch.cat(parts, 1), truth, atol=1e-9)
        padded, mask = torch.nn.functional.pad(tokens, (4, 0)), torch.arange(15)[None] >= 4
        assert torch.allclose(model(padded, pad_mask=mask)[0][:, 4:], truth, atol=1e-9)
        whole = model.generate(tokens, 5, temperature=0)
        left = model.generate(padded, 5, temperature=0, pad_mask=mask)
    assert torch.equal(whole[:, 11:], left[:, 15:])


def test_a_quantised_copy_knows_it():
    """At 16 bits the copy is the model, masses included; k' and v' themselves stay as they are."""
    model, tokens = build(torch.float32), ids(2, 9)
    twin = quantize(model, "w16a16")
    seen = [{}, {}]
    with torch.no_grad():
        logits = [m(tokens, record=lambda n, l, x, s=s: s.__setitem__((n, l), x))[0]
                  for m, s in zip((model, twin), seen)]
    assert torch.allclose(*logits, atol=0.02 * logits[0].std().item())
    assert torch.allclose(*(s["bias_mass", 2] for s in seen), atol=1e-3)
    names = [n for n, _ in twin.named_parameters() if "extra" in n]
    assert len(names) == 4 and quantize(model, "w4a4")(tokens)[0].isfinite().all()


def test_first_values_and_bookkeeping():
    """N(0, 0.02^2), of the mechanism, never decayed; all other weights as without it."""
    model = Transformer(Config(**{**TINY, "d_model": 256, "head_dim": 64}))
    values = torch.cat([p.flatten() for n, p in model.named_parameters() if ".extra." in n])
    assert len(values) == 2 * 2 * 2 * 64 and values.std().item() == pytest.approx(0.02, rel=0.15)
    assert values.mean().abs() < 0.004
    assert not [n for n in model.decay_groups()["decay"] if ".extra." in n]
    assert model.count_params()["mechanism"] == len(values)
    assert all(is_mechanism(n) for n, _ in model.named_parameters() if ".extra." in n)
