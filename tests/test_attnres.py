"""attnres.py against the two papers: references, degenerate cases, coupling, the whole model."""
import math
import runpy
import sys

import pytest
import torch

from attnres import (INITS, LOGIT_MAX, AttnRes, OasisRouter, attnres_reference, depth_weights,
                     last_branch, router_reference, two_phase_reference)
from conftest import ROOT
from model import PRESETS, Config, Transformer, load_model, save_checkpoint

KINDS = ("softmax", "softmax1", "clipped", "sparsemax", "entmax15")
DEPTH = [name for name, fields in PRESETS.items()
         if fields.get("residual") in ("attnres", "oasis")]
B, T, d = 2, 5, 12


def config(preset="vanilla", **fields):
    """A small model; norm_eps so small that RMSNorm forgets the scale of what it reads."""
    return Config(**{**PRESETS[preset], "n_layer": 2, "n_head": 2, "d_model": 32, "vocab_size": 40,
                     "block_size": 16, "norm_eps": 1e-12, **fields})


def stir(module, seed=0, scale=0.5):
    """Move every parameter of a residual away from its start, reproducibly."""
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            p.add_(torch.randn(p.shape, generator=g, dtype=torch.float64), alpha=scale)
    return module


def tokens(seed=0, length=12, vocab=40):
    return torch.randint(vocab, (2, length), generator=torch.Generator().manual_seed(seed))


class Keep:
    """A recorder that stores what is asked for, by (name, sublayer)."""

    def __init__(self, *names):
        self.names, self.seen = set(names), {}

    def __call__(self, name, l, x):
        self.seen[name, l] = x


class Stack:
    """Stand-ins for the sublayers: y = tanh(h M_l), with a null mass that depends on h."""

    def __init__(self, L, seed=1):
        g = torch.Generator().manual_seed(seed)
        new = lambda *shape: torch.randn(shape, generator=g, dtype=torch.float64)
        self.x = new(B, T, d).requires_grad_()
        self.mats = new(L, d, d).requires_grad_()
        self.heads = new(L, d).requires_grad_()

    def sublayer(self, l, h, null, attention):
        y = torch.tanh(h @ self.mats[l])
        return y, torch.sigmoid(h @ self.heads[l]) if attention else null

    def run(self, residual):
        state, null = residual.start(self.x), None
        for l in range(len(self.mats)):
            h = residual.read(state, l)
            y, null = self.sublayer(l, h, null, residual.config.ffn == "none" or l % 2 == 0)
            state = residual.write(state, l, h, y, null)
        return residual.finish(state)

    def gradients(self, out, module):
        leaves = [self.x, self.mats, self.heads, *module.parameters()]
        weight = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view_as(out)
        return torch.autograd.grad((out * weight).sum(), leaves, allow_unused=True)


def assert_same(a, b, tolerance=1e-10):
    for x, y in zip(a, b, strict=True):
        if x is None or y is None:
            assert x is y or not (y if x is None else x).any()
        else:
            assert (x - y).abs().max() <= tolerance * max(1, y.abs().max())


# ----------------------------------------------------------------- fast forms = the references

def kimi_by_the_paper(stack, m):
    """AttnRes written from AttnRes 4.1, 4.2 and OASIS 1.4, with the list of blocks in full."""
    c, L = m.config, len(stack.mats)
    S = max(1, c.depth_block)
    outputs, psis, null = [], [], None

    def read(l):
        if l == 0:
            return stack.x
        groups = [range(i, min(i + S, l)) for i in range(0, l, S)]
        sources = [stack.x] + [sum(outputs[i] for i in group) for group in groups]
        psi = [torch.zeros(B, T)] + [sum(psis[i] for i in group) / len(group) for group in groups]
        coupled = dict(psi=psi, beta=torch.nn.functional.softplus(m.b[l - 1])) if c.coupling else {}
        return attnres_reference(sources, m.query[l - 1], m.key_gain[l - 1], c.norm_eps,
                                 c.depth_normalizer, **coupled)

    for l in range(L):
        y, null = stack.sublayer(l, read(l), null, c.ffn == "none" or l % 2 == 0)
        outputs.append(y)
        psis.append(null)
    return read(L)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("block,coupling,ffn", [(0, False, "swiglu"), (0, True, "swiglu"),
                                                (1, True, "none"), (3, True, "swiglu"),
                                                (4, False, "swiglu"), (6, True, "swiglu")])
def test_attnres_equals_the_stacked_reference(kind, block, coupling, ffn):
    c = config(d_model=d, n_layer=6 if ffn == "none" else 3, ffn=ffn, residual="attnres",
               depth_normalizer=kind, depth_block=block, coupling=coupling, norm_eps=1e-6)
    m, stack = stir(AttnRes(c).double()), Stack(6)
    fast, slow = stack.run(m), kimi_by_the_paper(stack, m)
    assert_same([fast], [slow])
    assert_same(stack.gradients(fast, m), stack.gradients(slow, m))


def oasis_by_the_paper(stack, m):
    """The wiring of OASIS 1.3, block by block: A = H + [x + y], M = A + [h + z], H <- H + [x']."""
    c, L = m.config, len(stack.mats)
    per_block = 1 if c.ffn == "none" else 2
    history, psis, x, null = [stack.x], [torch.zeros(B, T, dtype=torch.float64)], stack.x, None
    for l in range(0, L, per_block):
        candidates, psi = list(history), list(psis)
        for i in range(l, l + per_block):
            y, null = stack.sublayer(i, x, null, i == l)
            candidates, psi = candidates + [x + y], psi + [null]
            site, n = m.sites[i], len(candidates)
            step = torch.arange(n, dtype=torch.float64)
            bias = site.recency * (step - n + 2 if c.router_init == "index" else step / (n - 1))
            coupled = dict(psi=psi, beta=torch.nn.functional.softplus(site.b)) if c.coupling else {}
            x = router_reference(candidates, site.wq.weight, site.wk.weight, bias,
                                 c.depth_normalizer, **coupled,
                                 norm_eps=c.norm_eps if c.router_norm else None)
        assert n == l // per_block + 1 + per_block           # candidates: block index + 2, then + 3
        history, psis = history + [x], psis + [null]
    return x


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("init,coupling,ffn,norm", [
    ("zero", False, "swiglu", False), ("recent", True, "swiglu", False),
    ("index", True, "swiglu", False), ("recent", True, "none", False),
    ("zero", True, "swiglu", True)])
def test_router_equals_the_stacked_reference(kind, init, coupling, ffn, norm):
    c = config(d_model=d, n_layer=6 if ffn == "none" else 3, ffn=ffn, residual="oasis",
               depth_normalizer=kind, router_init=init, coupling=coupling, router_norm=norm)
    m, stack = stir(OasisRouter(c).double(), scale=0.3), Stack(6)
    fast, slow = stack.run(m), oasis_by_the_paper(stack, m)
    assert_same([fast], [slow])
    assert_same(stack.gradients(fast, m), stack.gradients(slow, m))


def test_two_phases_equal_the_direct_form():
    """Serving order (all finished blocks at once, then the partial sum) gives the same reads."""
    S, g = 4, torch.Generator().manual_seed(0)
    new = lambda *shape: torch.randn(shape, generator=g, dtype=torch.float64)
    blocks, w, ys = [new(B, T, d) * 10 ** i for i in range(3)], new(S, d), new(S, B, T, d)
    partials = [None] + [ys[:s].sum(0) for s in range(1, S)]
    reads = two_phase_reference(blocks, partials, w)
    for s in range(S):
        sources = blocks if s == 0 else blocks + [partials[s]]
        direct = attnres_reference(sources, w[s], torch.ones(d, dtype=torch.float64))
        assert_same([reads[s]], [direct])


# --------------------------------------------------------------------------- degenerate cases

def test_zero_queries_read_the_uniform_mean():
    m, stack = AttnRes(config(d_model=d, n_layer=3, residual="attnres")).double(), Stack(6)
    with torch.no_grad():
        m.init_special()
    outs = []
    state, h = m.start(stack.x), stack.x
    for l in range(6):
        h = m.read(state, l)
        assert_same([h], [(stack.x + sum(outs)) / (l + 1)])
        outs.append(stack.sublayer(l, h, None, False)[0])
        state = m.write(state, l, h, outs[-1], torch.zeros(B, T))
    assert_same([m.finish(state)], [(stack.x + sum(outs)) / 7])


@pytest.mark.parametrize("block", (0, 4))
def test_attnres_starts_as_the_standard_residual(block):
    """Every read is the stream times a positive number, which RMSNorm divides out. Where a block
    holds several outputs its source is their sum, so the mean is the stream times 1/n again."""
    a, b = (Transformer(config(preset, **fields)).double()
            for preset, fields in (("vanilla", {}), ("attnres", {"depth_block": block})))
    logits = a(tokens())[0]
    assert logits.abs().max() > 0.1
    assert (logits - b(tokens())[0]).abs().max() < 1e-7      # what is left is norm_eps = 1e-12
    stir(b.residual)
    assert (logits - b(tokens())[0]).abs().max() > 1e-3      # and the queries are alive


def test_blocks_of_one_are_full_and_one_block_routes_embedding_against_sum():
    full, ones, one = (stir(AttnRes(config(d_model=d, n_layer=3, depth_block=k)).double())
                       for k in (0, 1, 6))
    stack = Stack(6)
    assert torch.equal(stack.run(full), stack.run(ones))
    state, total = one.start(stack.x), 0
    for l in range(6):
        h = one.read(state, l)
        if l:
            k = [v / v.square().mean(-1, keepdim=True).sqrt() for v in (stack.x, total)]
            p = torch.sigmoid(((k[1] - k[0]) * one.query[l - 1] * one.key_gain[l - 1]).sum(-1))
            assert_same([h], [(1 - p)[..., None] * stack.x + p[..., None] * total], 1e-9)
        y = stack.sublayer(l, h, None, False)[0]
        total = total + y
        state = one.write(state, l, h, y, torch.zeros(B, T))


def test_in_kimis_flavour_depth_softmax1_only_rescales():
    """Logits do not move; a norm measured on what is read does, by exactly the null mass."""
    models = [Transformer(config("attnres", depth_normalizer=k)).double()
              for k in ("softmax", "softmax1")]
    keeps = [Keep("stream", "depth_null", "depth_weights") for _ in models]
    logits = [stir(m.residual) and m(tokens(), record=keep)[0] for m, keep in zip(models, keeps)]
    assert (logits[0] - logits[1]).abs().max() < 1e-6        # norm_eps = 1e-12
    assert logits[0].std() > 0.05
    plain, off = (keep.seen["stream", 3] for keep in keeps)
    null = keeps[1].seen["depth_null", 4]
    assert 0.01 < null.mean() < 0.9
    assert_same([off], [plain * (1 - null[..., None])], 1e-6)
    assert not keeps[0].seen["depth_null", 4].any()


def test_in_oasis_flavour_depth_softmax1_is_alive():
    """There the output is added to what was read, so a scale of the stream is no gauge."""
    a, b = (Transformer(config("attnres-oasis", depth_normalizer=k, router_init="zero")).double()
            for k in ("softmax", "softmax1"))
    assert (a(tokens())[0] - b(tokens())[0]).abs().max() > 1e-3


# ----------------------------------------------------------------------------------- coupling

@pytest.mark.parametrize("residual", ("attnres", "oasis"))
@pytest.mark.parametrize("normalizer", ("softmax", "sparsemax", "entmax15"))
def test_coupling_is_inert_where_tokens_leave_no_null_mass(residual, normalizer):
    off, on = (Transformer(config(residual=residual, normalizer=normalizer, coupling=c))
               for c in (False, True))
    for m in (off, on):
        stir(m.residual) if residual == "attnres" else None
        with torch.no_grad():
            for name, p in m.named_parameters():
                if name.endswith(".b"):
                    p.fill_(3.0)
    if residual == "attnres":           # stirring drew b too, last: the queries are the same
        assert torch.equal(off.residual.query, on.residual.query)
    keep = Keep("psi")
    assert torch.equal(off(tokens())[0], on(tokens(), record=keep)[0])
    assert sorted(l for _, l in keep.seen) == [0, 2]
    assert not any(psi.any() for psi in keep.seen.values())


@pytest.mark.parametrize("residual", ("attnres", "oasis"))
@pytest.mark.parametrize("normalizer", ("softmax1", "clipped"))
def test_coupling_is_alive_where_they_do(residual, normalizer):
    off, on = (Transformer(config(residual=residual, normalizer=normalizer, coupling=c))
               for c in (False, True))
    with torch.no_grad():
        for name, p in on.named_parameters():
            if name.endswith(".b"):
                p.fill_(3.0)
    assert (off(tokens())[0] - on(tokens())[0]).abs().max() > 1e-6


@pytest.mark.parametrize("kind", ("softmax", "softmax1"))
def test_more_null_mass_means_less_weight_by_the_formula(kind):
    """Raising one psi by D lowers its logit by beta D against the others'; the mean stays."""
    m = AttnRes(config(d_model=d, n_layer=2, coupling=True, normalizer="softmax1",
                       residual="attnres", depth_normalizer=kind)).double()
    with torch.no_grad():
        m.init_special()
        m.b.fill_(2.0)
    beta, stack, weights = math.log1p(math.exp(2.0)), Stack(4), []
    for raised in (0.0, 0.4):
        keep = Keep("depth_weights", "depth_beta")
        state = m.start(stack.x, keep)
        for l in range(4):
            m.read(state, l)
            null = torch.full((B, T), 0.1 + (raised if l == 1 else 0.0), dtype=torch.float64)
            state = m.write(state, l, None, stack.x * (l + 1), null)
        m.finish(state)
        weights.append(keep.seen["depth_weights", 4])                               # (n, B, T)
        assert keep.seen["depth_beta", 4].item() == pytest.approx(beta)
    before, after = weights
    shift = (after / before).log()
    assert (after[2] < before[2]).all() and (after[0] > before[0]).all()
    gap = (shift[2] - shift[0]).mean().item()
    assert gap == pytest.approx(-beta * 0.4, rel=1e-6)


@pytest.mark.parametrize("residual", ("attnres", "oasis"))
def test_gradient_reaches_queries_and_keys_below_through_psi(residual):
    """No stop-gradient: loss -> psi of block 0 -> its queries and keys. Detached: not that way."""
    gradients = {}
    for detach in (False, True):
        m = Transformer(config(residual=residual, normalizer="softmax1", coupling=True,
                               depth_normalizer="softmax1", coupling_detach=detach)).double()
        stir(m.residual)
        keep = Keep("psi")
        loss = m(tokens(), tokens(1), record=keep)[1]
        psi = keep.seen["psi", 0]
        assert psi.requires_grad is not detach
        weights = [m.sublayers[0].wq.weight, m.sublayers[0].wk.weight]
        if not detach:
            to_psi = torch.autograd.grad(loss, psi, retain_graph=True)[0]           # (B, T)
            assert to_psi.abs().max() > 1e-9
            through = torch.autograd.grad(psi, weights, to_psi, retain_graph=True)
            assert all(g.abs().max() > 1e-12 for g in through)
        gradients[detach] = torch.autograd.grad(loss, weights)
    for direct, both in zip(gradients[True], gradients[False]):
        assert (direct - both).abs().max() > 1e-12


def test_beta_starts_small_and_stays_at_most_ten():
    for residual in ("attnres", "oasis"):
        m = Transformer(config(residual=residual, normalizer="softmax1", coupling=True))
        for b, expected in ((None, math.log1p(math.exp(-5))), (1e4, 10.0)):
            with torch.no_grad():
                for name, p in m.named_parameters():
                    if b and name.endswith(".b"):
                        p.fill_(b)
            keep = Keep("depth_beta")
            m(tokens(), record=keep)
            assert len(keep.seen) == 4
            for beta in keep.seen.values():
                assert beta.item() == pytest.approx(expected, rel=1e-5)


# ------------------------------------------------------------------------------- starting points

def test_newest_weight_at_the_start():
    """r = 8 spread over n candidates is far from a residual; the index bias is near one."""
    for n, weight in ((3, 0.98), (5, 0.87), (9, 0.63), (17, 0.39), (33, 0.22)):
        assert last_branch(n, "softmax", "recent") == pytest.approx(weight, abs=0.006)
        assert last_branch(n, "softmax", "zero") == pytest.approx(1 / n)
        assert last_branch(n, "softmax1", "zero") == pytest.approx(1 / (n + 1))
    for n in (2, 3, 10, 100, 1000):
        for kind in ("softmax", "softmax1"):
            assert last_branch(n, kind, "index") > 0.999
    assert set(INITS) == {"zero", "recent", "index", "kimi"}


@pytest.mark.parametrize("init", ("zero", "recent", "index"))
def test_router_starts_with_the_published_spread(init):
    m = Transformer(config("oasis", d_model=256, n_layer=1, router_init=init))
    a = 64
    std = 1 / math.sqrt(3 * 256) if init == "zero" else 0.02 / math.sqrt(a)
    for site in m.residual.sites:
        assert site.wq.weight.shape == site.wk.weight.shape == (a, 256)
        for w in (site.wq.weight, site.wk.weight):
            assert w.std().item() == pytest.approx(std, rel=0.03)
        assert site.recency.item() == (0 if init == "zero" else 8)
        assert site.b.item() == -5
    assert not torch.equal(m.residual.sites[0].wq.weight, m.residual.sites[1].wq.weight)
    assert Transformer(config("oasis", d_model=512)).residual.sites[0].a == 128


def test_index_bias_starts_near_the_standard_residual():
    a = Transformer(config("vanilla")).double()
    apart = {init: (a(tokens())[0] - Transformer(config("attnres-oasis", router_init=init)).double()
                    (tokens())[0]).abs().max().item() for init in ("index", "recent", "zero")}
    assert apart["index"] < 1e-3 < apart["recent"] < apart["zero"]


def test_huge_router_scores_are_clamped():
    m = Transformer(config("oasis"))
    with torch.no_grad():
        for site in m.residual.sites:
            site.wq.weight.mul_(1e9)
            site.wk.weight.mul_(1e9)
    keep = Keep("depth_weights", "depth_null")
    loss = m(tokens(), tokens(1), record=keep)[1]
    loss.backward()
    assert loss.isfinite() and all(p.grad.isfinite().all() for p in m.parameters())
    w = depth_weights(torch.tensor([[[-LOGIT_MAX, LOGIT_MAX]]]), "softmax1")
    assert keep.seen["depth_weights", 3].max() <= w.max()


# ------------------------------------------------------------------------------- the whole model

def arms():
    yield from ((name, {}) for name in DEPTH)
    yield "attnres-block", {"coupling": True, "normalizer": "softmax1", "depth_block": 3}
    yield "attnres", {"ffn": "none", "coupling": True, "normalizer": "softmax1", "n_layer": 3}
    yield "oasis", {"ffn": "none", "n_layer": 3}
    yield "oasis", {"router_init": "index"}


ARMS = pytest.mark.parametrize("preset,fields", list(arms()))


@ARMS
def test_gradients_reach_every_parameter(preset, fields):
    """At the start none is unused, as DDP demands; away from it every one is alive."""
    if preset in ("oasis-sparsemax", "oasis-entmax15"):
        fields = {**fields, "router_init": "zero"}           # see the next test
    m = Transformer(config(preset, **fields)).double()
    m(tokens(), tokens(1))[1].backward()
    assert not [name for name, p in m.named_parameters() if p.grad is None]
    stir(m.residual, scale=0.05)
    m.zero_grad()
    m(tokens(), tokens(1))[1].backward()
    assert not [name for name, p in m.named_parameters() if not p.grad.any()]


@pytest.mark.parametrize("kind,reach", (("sparsemax", 1), ("entmax15", 2)))
def test_a_sparse_router_with_r_8_is_a_standard_residual_that_cannot_learn(kind, reach):
    """Sparsemax drops what lies 1 below the top, 1.5-entmax 2: with r / (n-1) above that, the
    newest candidate has all the weight and no logit a gradient, up to n = 8 or 4 candidates."""
    m = Transformer(config("attnres-oasis", depth_normalizer=kind)).double()
    logits, loss = m(tokens(), tokens(1))
    assert (logits - Transformer(config()).double()(tokens())[0]).abs().max() < 1e-12
    loss.backward()
    assert not any(p.grad.any() for p in m.residual.parameters())
    edge = int(8 / reach)
    assert last_branch(edge, kind, "recent") == 1 > last_branch(edge + 2, kind, "recent")


@ARMS
def test_later_tokens_change_nothing_before_them(preset, fields):
    m = Transformer(config(preset, **fields)).double()
    stir(m.residual)
    x, y = tokens(), tokens()
    y[:, 7:] = (y[:, 7:] + 1) % 40
    a, b = m(x)[0], m(y)[0]
    assert (a[:, :7] - b[:, :7]).abs().max() < 1e-12
    assert (a[:, 7:] - b[:, 7:]).abs().max() > 1e-6


@ARMS
def test_recording_and_checkpointing_change_nothing(preset, fields):
    m = Transformer(config(preset, **fields)).double()
    stir(m.residual)
    logits, loss = m(tokens(), tokens(1))
    plain = torch.autograd.grad(loss, list(m.parameters()))
    keep = Keep("depth_weights", "depth_null", "psi", "depth_beta", "depth_recency")
    assert torch.equal(logits, m(tokens(), record=keep)[0])
    c, L = m.config, m.config.n_sublayer
    readers = range(1, L + 1) if c.residual == "attnres" else range(L)
    for name, shape in (("depth_weights", None), ("depth_null", (2, 12))):
        assert sorted(l for n, l in keep.seen if n == name) == list(readers)
        assert all(x.shape[-2:] == (2, 12) for (n, _), x in keep.seen.items() if n == name)
    for l in readers:
        w, null = keep.seen["depth_weights", l], keep.seen["depth_null", l]
        assert (w.sum(0) + null - 1).abs().max() < 1e-6
    assert [l for n, l in keep.seen if n == "psi"] == list(range(0, L, 1 if c.ffn == "none" else 2))
    assert any(n == "depth_beta" for n, _ in keep.seen) is c.coupling
    m.grad_checkpoint = True
    again = m(tokens(), tokens(1))[1]
    assert_same(torch.autograd.grad(again, list(m.parameters())), plain, 1e-12)


@ARMS
def test_generation_with_a_cache_equals_the_full_forward(preset, fields):
    m = Transformer(config(preset, **fields)).double()
    stir(m.residual)
    out = m.generate(tokens(length=4), 8, temperature=0)
    for t in range(4, 12):
        assert torch.equal(m(out[:, :t])[0][:, -1].argmax(-1), out[:, t])


@pytest.mark.parametrize("preset", ("attnres-block", "oasis"))
def test_autocast_and_bf16(preset):
    m = Transformer(config(preset))
    stir(m.residual, scale=0.02)
    exact, loss = m(tokens(), tokens(1))
    gradients = torch.autograd.grad(loss, list(m.parameters()))
    with torch.autocast("cpu", torch.bfloat16):
        mixed, loss = m(tokens(), tokens(1))
    rough = torch.autograd.grad(loss, list(m.parameters()))
    for x, y in zip(rough, gradients):
        assert x.dtype == y.dtype == torch.float32
    a, b = (torch.cat([x.flatten() for x in g]) for g in (rough, gradients))
    assert (a - b).norm() < 0.05 * b.norm()
    low, loss = m.bfloat16()(tokens(), tokens(1))
    loss.backward()
    for logits in (mixed, low):
        assert logits.dtype == torch.bfloat16
        assert (logits.float() - exact).abs().max() < 0.05 * exact.abs().max()


@pytest.mark.parametrize("preset", ("attnres-block", "oasis"))
def test_checkpoint_round_trip(preset, tmp_path):
    m = Transformer(config(preset, coupling=True, normalizer="softmax1", router_init="index"))
    stir(m.residual)
    path = str(tmp_path / "checkpoint.pt")
    save_checkpoint(path, {"config": vars(m.config), "model": m.state_dict()})
    again, _ = load_model(path)
    assert again.config == m.config
    assert torch.equal(m(tokens())[0], again(tokens())[0])


def test_residual_parameters_are_not_decayed():
    m = Transformer(config("oasis"))
    free = set(m.decay_groups()["no_decay"])
    assert {name for name, _ in m.named_parameters() if name.startswith("residual.")} <= free
    assert "residual.sites.0.b" in free and "residual.sites.0.recency" in free


@pytest.mark.parametrize("fields,word", [({"depth_normalizer": "sink"}, "sink"),
                                         ({"router_init": "warm"}, "warm"),
                                         ({"depth_block": -1}, "-1")])
def test_contradictions_are_one_clear_line(fields, word):
    for residual in ("attnres", "oasis"):
        with pytest.raises(ValueError, match=word) as error:
            Transformer(config(residual=residual, **fields))
        assert "\n" not in str(error.value)


@pytest.mark.slow
@pytest.mark.parametrize("preset", ("attnres", "attnres-block", "oasis"))
def test_compiled_equals_eager(preset):
    m = Transformer(config(preset))
    stir(m.residual, scale=0.1)
    logits, loss = m(tokens(), tokens(1))
    plain = torch.autograd.grad(loss, list(m.parameters()))
    torch._dynamo.reset()
    fast = torch.compile(m)
    logits_fast, loss_fast = fast(tokens(), tokens(1))
    assert (logits - logits_fast).abs().max() < 1e-4
    assert_same(torch.autograd.grad(loss_fast, list(m.parameters())), plain, 1e-4)


def test_the_self_check_runs_and_draws(tmp_path, monkeypatch, capsys):
    def run(path):
        monkeypatch.setattr(sys, "argv", ["attnres.py", "--figure", str(path)])
        runpy.run_path(str(ROOT / "attnres.py"), run_name="__main__")
    path = tmp_path / "new" / "start.png"
    run(path)
    assert path.stat().st_size > 1000
    assert "0.982" in capsys.readouterr().out
    with pytest.raises(SystemExit) as stop:
        run(tmp_path / "new" / "start.png" / "x.png")
    assert stop.value.code == 2
    assert "cannot write the figure" in capsys.readouterr().err


def test_a_normed_router_does_not_see_how_large_its_streams_are():
    """Streams a thousand times as large: the same weights, where a plain router's saturate."""
    for norm in (True, False):
        m = stir(OasisRouter(config("oasis", router_init="zero", router_norm=norm)).double())
        streams = [torch.randn(B, T, m.config.d_model, dtype=torch.float64) for _ in range(3)]
        psi, weights = [torch.zeros(B, T, dtype=torch.float64)] * 3, []
        for size in (1, 1000):
            state = m.start(streams[0], lambda name, l, x: weights.append(x)
                            if name == "depth_weights" else None)
            m.route(state, 1, [size * s for s in streams], psi)
        small, large = weights
        assert torch.allclose(small, large, atol=1e-5) == norm
