"""Ledger Residuals: the equations, the two corners, the gauge, and the fused path against both."""
import copy
import math

import pytest
import torch

from ledger import Ledger, Site, fused_update, gates, update
from model import Config, Transformer

TINY = dict(vocab_size=61, n_layer=3, n_head=2, d_model=32, head_dim=16, d_ff=48, block_size=24,
            ledger_rank=4)


def ids(*shape, seed=0):
    return torch.randint(TINY["vocab_size"], shape, generator=torch.Generator().manual_seed(seed))


def awake_site(d=16, r=3, std=0.5, dtype=torch.double):
    torch.manual_seed(0)
    site = Site(d, r, depth=0.5).to(dtype)
    for p in site.parameters():
        torch.nn.init.normal_(p, 0, std)
    return site


def streams(d=16, dtype=torch.double, T=7):
    g = torch.Generator().manual_seed(3)
    return [torch.randn(2, T, d, generator=g, dtype=dtype).requires_grad_() for _ in range(4)]


def model(residual="ledger", **fields):
    return Transformer(Config(**{**TINY, "residual": residual, **fields})).double()


def test_update_is_the_papers_equations():
    """One token, written out with matrices [Ledger 2.2]."""
    site, (D, C, u, y) = awake_site(), streams(T=1)
    new_D, new_C, c = update(site, D, C, u, y)
    for b in range(2):
        d, a, v, w = (x[b, 0] for x in (D, C, u, y))
        matrix = lambda m: m.up.weight @ m.down.weight
        b_e = torch.sigmoid(matrix(site.erase) @ v + site.erase.up.bias)
        b_w = torch.sigmoid(matrix(site.write) @ v + site.write.up.bias)
        k = matrix(site.key) @ v
        k = k / k.norm()
        d = d - b_e * (torch.outer(k, k) @ d) + b_w * (w + matrix(site.write_delta) @ w)
        gate = torch.sigmoid(site.commit.weight[0] @ v + site.commit.bias[0])
        a = a + gate * (d + matrix(site.commit_delta) @ d)
        assert torch.allclose(new_D[b, 0], d, atol=1e-12)
        assert torch.allclose(new_C[b, 0], a, atol=1e-12)
        assert torch.allclose(c[b, 0, 0], gate, atol=1e-12)


@pytest.mark.parametrize("T", [1, 7])
@pytest.mark.parametrize("std", [0.02, 0.5, 3.0])
def test_fused_equals_update_with_gradients(T, std):
    """Values and every gradient, the commit gates' own among them, gates saturated included."""
    results = []
    for entry in (update, fused_update):
        site, inputs = awake_site(std=std), streams(T=T)
        out = entry(site, *inputs)
        g = torch.Generator().manual_seed(5)
        torch.autograd.backward(out, [torch.randn(o.shape, generator=g, dtype=o.dtype)
                                      for o in out])
        results.append([*out] + [x.grad for x in inputs]
                       + [p.grad for n, p in site.named_parameters() if n != "read_gain"])
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-10)


def test_fused_gradient_is_the_true_gradient():
    site = awake_site(d=5, r=2, std=0.7)
    inputs = [x[:1, :2, :5].detach().clone().requires_grad_() for x in streams()]
    assert torch.autograd.gradcheck(lambda *x: fused_update(site, *x), inputs)


def test_fused_keeps_less_than_half_for_backward():
    """Bytes that autograd holds between forward and backward, inputs and weights apart."""
    kept = {}
    for entry in (update, fused_update):
        site, inputs = awake_site(d=64, r=8, dtype=torch.float), streams(d=64, T=64,
                                                                       dtype=torch.float)
        known = {x.untyped_storage().data_ptr() for x in [*inputs, *site.parameters()]}
        held = {}

        def pack(x):
            if x.untyped_storage().data_ptr() not in known:
                held[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
            return x
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
            out = entry(site, *inputs)
        kept[entry.__name__] = sum(held.values())
        del out
    assert kept["fused_update"] < 0.5 * kept["update"], kept


def test_fused_in_bfloat16_autocast():
    """Within bf16's own error of the float32 result, and the streams stay in float32."""
    site, inputs = awake_site(std=0.2, dtype=torch.float), streams(dtype=torch.float)
    truth = update(site, *inputs)
    with torch.autocast("cpu", torch.bfloat16):
        low = fused_update(site, *inputs)
    for a, b in zip(truth, low):
        assert b.dtype == torch.float32
        assert (a - b).abs().max() < 0.03 * a.abs().max()
    (low[0].sum() + low[1].sum()).backward()
    assert all(x.grad is not None and x.grad.isfinite().all() for x in inputs)


def test_erase_removes_the_direction_and_nothing_else():
    """Gate open, nothing written: D loses exactly its component along k."""
    site, (D, C, u, _) = awake_site(), streams()
    with torch.no_grad():
        site.erase.up.weight.zero_(), site.erase.up.bias.fill_(40)
    new_D, _, _ = update(site, D, C, u, torch.zeros_like(D))
    k = gates(site, u)[2]
    assert torch.allclose((k * new_D).sum(-1), torch.zeros(2, 7, dtype=torch.double), atol=1e-10)
    across = D - k * (k * D).sum(-1, keepdim=True)
    assert torch.allclose(new_D, across, atol=1e-10)
    assert not torch.allclose(new_D, D)


@pytest.mark.parametrize("corner", ["vanilla_corner", "last_commit_corner"])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float, 1e-3), (torch.double, 1e-9)])
def test_corners_are_the_standard_transformer(corner, dtype, tolerance):
    vanilla, ledger = model("standard").to(dtype), model().to(dtype)
    truth = vanilla(ids(2, 10))[0]
    assert (ledger(ids(2, 10))[0] - truth).abs().max() > 10 * tolerance     # not by accident
    getattr(ledger.residual, corner)()
    assert (ledger(ids(2, 10))[0] - truth).abs().max() < tolerance
    assert ledger.residual.gamma == (1.0 if corner == "vanilla_corner" else 0.0)


def test_initial_gates_follow_the_paper():
    """Erase 0.047, write 0.953, commit linear in the logit from 0.018 to 0.982 [Ledger 2.3]."""
    ledger, seen = model(), {}
    ledger(ids(2, 6), record=lambda name, l, x: seen.__setitem__((name, l), x))
    assert seen["erase_gate", 0].mean().item() == pytest.approx(0.047, abs=5e-4)
    assert seen["write_gate", 5].mean().item() == pytest.approx(0.953, abs=5e-4)
    logits = [torch.logit(seen["commit_gate", l]).mean().item() for l in range(6)]
    assert logits[0] == pytest.approx(-4) and logits[-1] == pytest.approx(4)
    steps = [b - a for a, b in zip(logits, logits[1:])]
    assert max(steps) == pytest.approx(min(steps))
    site = ledger.residual.sites[2]
    assert not site.write_delta.up.weight.any() and not site.commit_delta.up.weight.any()
    assert site.key.up.weight.any() and not site.read_gain.any()


def test_penalty_is_alpha_times_mean_opening_and_closes_the_gates():
    ledger = model(sparsity=0.3)
    opened = {}
    ledger(ids(2, 6), record=lambda name, l, x: opened.setdefault((name, l), x))
    mean = torch.stack([opened["commit_gate", l].mean() for l in range(6)]).mean()
    _, loss = ledger(ids(2, 6), ids(2, 6, seed=1))
    assert ledger.aux.item() == pytest.approx(0.3 * mean.item())
    without = model(sparsity=0.0)(ids(2, 6), ids(2, 6, seed=1))[1]
    assert (loss - without).item() == pytest.approx(0.3 * mean.item())
    state = ledger.residual.start(torch.randn(1, 3, 32, dtype=torch.double))
    u = torch.randn(1, 3, 32, dtype=torch.double)
    state = ledger.residual.write(state, 0, u, u, None)
    ledger.residual.penalty(state).backward()
    bias = ledger.residual.sites[0].commit.bias
    assert bias.grad.item() > 0             # gradient descent lowers it


def test_a_shut_gate_commits_nothing_and_the_cap_holds():
    site, (D, C, u, y) = awake_site(), streams()
    with torch.no_grad():
        site.commit.weight.zero_(), site.commit.bias.fill_(-800)
    assert torch.equal(update(site, D, C, u, y)[1], C)
    capped, norms = model(ledger_cap=0.2), []

    def record(name, l, x):
        norms.append(x.norm(dim=-1))
    record.names = {"committed"}
    capped(ids(2, 6), record=record)
    assert max(n.max() for n in norms) <= 0.2
    free = []
    model()(ids(2, 6), record=lambda name, l, x: free.append(x.norm(dim=-1))
            if name == "committed" else None)
    assert max(n.max() for n in free) > 0.2


def test_read_gain_couples_the_streams():
    ledger = model()
    before = ledger(ids(1, 6))[0]
    with torch.no_grad():
        for site in ledger.residual.sites:
            site.read_gain.fill_(0.5)
    assert (ledger(ids(1, 6))[0] - before).abs().max() > 1e-4


def test_only_c_is_decoded():
    """What is added to D after the last commit does not reach the logits; with gamma it does."""
    for gamma, moved in ((0.0, False), (0.5, True)):
        residual = Ledger(Config(**TINY, residual="ledger", ledger_gamma=gamma)).double()
        state = residual.start(torch.randn(1, 3, 32, dtype=torch.double))
        u = torch.randn(1, 3, 32, dtype=torch.double)
        state = residual.write(state, 0, u, u, None)
        before = residual.finish(state).clone()
        state.D = state.D + 1
        assert torch.equal(residual.finish(state), before) != moved


def test_the_scale_of_the_commits_is_a_gauge():
    """Halving all of a token's commit gates halves the penalty and leaves the logits alone: the
    head reads norm(C). This is why eval.py reports the relative profile too [Ledger 2.8]."""
    ledger = model(norm_eps=1e-12)
    logits, _ = ledger(ids(1, 6), ids(1, 6, seed=1))
    full = ledger.aux.item()
    for l, site in enumerate(ledger.residual.sites):
        c = torch.sigmoid(torch.tensor(-4 + 8 * l / 5)).item() / 2
        site.commit.bias.data.fill_(math.log(c / (1 - c)))
    half_logits, _ = ledger(ids(1, 6), ids(1, 6, seed=1))
    assert ledger.aux.item() == pytest.approx(full / 2)
    assert torch.allclose(half_logits, logits, atol=1e-6)


def test_hc2_starts_as_the_standard_transformer_and_then_leaves_it():
    hc2 = model("hc2", norm_eps=1e-12)
    truth = model("standard", norm_eps=1e-12)(ids(2, 8))[0]
    assert torch.allclose(hc2(ids(2, 8))[0], truth, atol=1e-8)
    with torch.no_grad():
        hc2.residual.out_mix[2, 0] = 1.0
    assert (hc2(ids(2, 8))[0] - truth).abs().max() > 1e-4


def test_delta_has_one_corner_and_tied_gates():
    delta = model("delta")
    truth = model("standard")(ids(2, 8))[0]
    assert (delta(ids(2, 8))[0] - truth).abs().max() > 1e-3
    delta.residual.vanilla_corner()
    assert torch.allclose(delta(ids(2, 8))[0], truth, atol=1e-9)
    frozen = model("delta").residual        # a tied gate at 0 freezes the stream
    frozen.gate[0].up.bias.data.fill_(-800)
    x, u = torch.randn(2, 1, 3, 32, dtype=torch.double)
    assert torch.equal(frozen.write(x, 0, u, u, None), x)


def test_update_and_fused_train_alike():
    """Three optimiser steps through either path end in the same weights."""
    import ledger as module
    ends = []
    for entry in (update, fused_update):
        m = model()
        original, module.fused_update = module.fused_update, entry
        try:
            optimizer = torch.optim.SGD(m.parameters(), 0.5)
            for step in range(3):
                m(ids(2, 9, seed=step), ids(2, 9, seed=step + 9))[1].backward()
                optimizer.step(), optimizer.zero_grad()
        finally:
            module.fused_update = original
        ends.append(copy.deepcopy(m.state_dict()))
    for name in ends[0]:
        assert torch.allclose(ends[0][name], ends[1][name], atol=1e-9), name
