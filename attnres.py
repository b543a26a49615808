"""Attention Residuals: a sublayer that chooses which layers to read.

The residual stream hands every sublayer the plain sum of all that was written before. Attention
Residuals put a softmax over *depth* in its place: for each token, one routing logit for each source
below. Two mechanisms bear the name, and they are not the same.

    Kimi Team (arXiv 2603.15031)         sources v_0 = embedding, v_i = output of sublayer i, bare
        g_i = w_l . RMSNorm(v_i)         one learned query for each reader, zero at first
        h_l = sum_i softmax(g)_i v_i     what sublayer l reads, through its own norm

    OASIS (arXiv 2605.17887)             candidates s_0 = embedding, s_i = stream after layer i, and
        q = W_q s_new, k_i = W_k s_i     the newest stream s_new; so each holds all that it sums
        g_i = q . k_i / sqrt(a) + r i / (n-1)
        x = sum_i softmax(g)_i s_i       replaces s_new as the stream

Null coupling (OASIS 1.4) joins this softmax with the one over tokens. A head that spent its mass on
the null option (softmax1.py) said that it had nothing to add; psi is the heads' mean of that mass.
A branch with much of it is asked less:   g_i <- g_i - beta (psi_i - mean psi), beta = softplus(b).
Gradients flow through psi into the queries and keys of the layer that left the mass unspent.

Read first: `attnres_reference` and `router_reference`, the two papers in ten lines each. The two
classes compute the same without ever stacking the sources, from `weighted_sum` and `products`.

Legend: B batch, T tokens, d model width, a router width, L sublayers, n sources.
"""
from __future__ import annotations

import math
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

from softmax1 import clipped_softmax, entmax15, softmax1, sparsemax

BETA_MAX = 10.0        # coupling strength never exceeds this          [OASIS 1.4]
LOGIT_MAX = 50.0       # routing logits are clamped to [-50, 50]       [OASIS 1.3]
ROUTER_INITS = ("zero", "recent", "index", "identity")
IDENTITY_STEP = 12.0   # router_init="identity": index bias per candidate; exp(-12) is 6e-6


# --------------------------------------------------------------------------------- the references

def depth_weights(logits, kind: str = "softmax", gamma: float = -12 / 512, zeta: float = 1.0):
    """Weights over depth, in fp32: logits (B, T, n) -> (B, T, n). [OASIS 1.3, 1.5]

    kind: softmax, softmax1, clipped (with gamma and zeta), sparsemax or entmax15. What falls on the
    null option of depth is multiplied by zero: that mass is dropped and never shared out again.
    """
    x = wide(logits)                                                                # (B, T, n)
    if kind == "clipped":
        return clipped_softmax(x, gamma, zeta)                                      # (B, T, n)
    return {"softmax": lambda x: x.softmax(-1), "softmax1": softmax1,
            "sparsemax": sparsemax, "entmax15": entmax15}[kind](x)                  # (B, T, n)


def depth_null(logits, weights, kind: str):
    """The mass that a reader left unspent: (B, T, n) twice -> (B, T)."""
    if kind == "softmax1":               # not 1 - sum: that loses every digit of a small null mass
        return torch.sigmoid(-wide(logits).logsumexp(-1))                           # (B, T)
    if kind == "clipped":
        return (1 - weights.sum(-1)).clamp(min=0)                                   # (B, T)
    return weights.new_zeros(weights.shape[:-1])                                    # (B, T)


def wide(x):
    """fp32, and fp64 where it is fp64."""
    return x if x.dtype == torch.float64 else x.float()


def attnres_reference(sources: list, query, gain, eps: float = 1e-6, kind: str = "softmax",
                      psi: list | None = None, beta=0.0):
    """What one sublayer reads, as the paper's pseudo-code has it. [AttnRes 4.1, 4.2]

    sources n x (B, T, d), query and key gain (d,), psi n x (B, T) -> (B, T, d).
    """
    v = torch.stack(sources)                                                        # (n, B, T, d)
    k = F.rms_norm(v, gain.shape, gain, eps)                                        # (n, B, T, d)
    g = torch.einsum("d,nbtd->btn", query, k)                                       # (B, T, n)
    if psi is not None:
        psi = torch.stack(psi, -1)                                                  # (B, T, n)
        g = g - beta * (psi - psi.mean(-1, keepdim=True))                           # (B, T, n)
    return torch.einsum("btn,nbtd->btd", depth_weights(g, kind), v)              # (B, T, d)


def router_reference(candidates: list, wq, wk, bias, kind: str = "softmax",
                     psi: list | None = None, beta=0.0, norm_eps: float | None = None):
    """The next stream out of the candidate streams, as OASIS' module computes it. [OASIS 1.3]

    candidates n x (B, T, d), the newest last; wq, wk (a, d); bias (n,); psi n x (B, T)
    -> (B, T, d). norm_eps: queries and keys are made of s / rms(s), our extension; None: of s.
    """
    s = torch.stack(candidates, 2)                                                  # (B, T, n, d)
    x = s if norm_eps is None else F.rms_norm(s, s.shape[-1:], eps=norm_eps)        # (B, T, n, d)
    q, k = F.linear(x[:, :, -1], wq), F.linear(x, wk)                # (B, T, a), (B, T, n, a)
    g = torch.einsum("bta,btna->btn", q, k) / math.sqrt(len(wq)) + bias             # (B, T, n)
    if psi is not None:
        psi = torch.stack(psi, -1)                                                  # (B, T, n)
        g = g - beta * (psi - psi.mean(-1, keepdim=True))                           # (B, T, n)
    w = depth_weights(g.clamp(-LOGIT_MAX, LOGIT_MAX), kind)                         # (B, T, n)
    return torch.einsum("btn,btnd->btd", w, s)                                      # (B, T, d)


def two_phase_reference(blocks: list, partials: list, w, eps: float = 1e-6) -> list:
    """What all S readers of one block read, in the order that a server computes it. [AttnRes 4.3]

    Phase 1 sends the S queries to the finished blocks at once, which needs no sublayer's output.
    Phase 2 merges each reader's partial sum when it exists, by online softmax.
    blocks n x (B, T, d), partials S x (B, T, d) or None (before anything is summed),
    w (S, d): queries times key gains -> S x (B, T, d).
    """
    v = torch.stack(blocks)                                                         # (n, B, T, d)
    g = torch.einsum("sd,nbtd->sbtn", w, F.rms_norm(v, w.shape[1:], eps=eps))       # (S, B, T, n)
    top = g.amax(-1, keepdim=True)                                                  # (S, B, T, 1)
    e = (g - top).exp()                                                             # (S, B, T, n)
    out, total = torch.einsum("sbtn,nbtd->sbtd", e, v), e.sum(-1, keepdim=True)     # (S, B, T, d)
    reads = []
    for s, p in enumerate(partials):
        if p is None:
            reads.append(out[s] / total[s])                                         # (B, T, d)
            continue
        g_p = F.linear(F.rms_norm(p, w.shape[1:], eps=eps), w[s:s + 1])             # (B, T, 1)
        m = torch.maximum(top[s], g_p)                                              # (B, T, 1)
        old, new = (top[s] - m).exp(), (g_p - m).exp()                              # (B, T, 1)
        reads.append((old * out[s] + new * p) / (old * total[s] + new))             # (B, T, d)
    return reads


# --------------------------------------------------------------------------------------- the parts

def weighted_sum(w, sources):
    """sum_i w_i v_i, one running sum: (B, T, n), n x (B, T, d) -> (B, T, d)."""
    w = w.movedim(-1, 0).unsqueeze(-1).contiguous()                                 # (n, B, T, 1)
    h = w[0] * sources[0]                                                           # (B, T, d)
    for w_i, v_i in zip(w[1:], sources[1:]):
        h.addcmul_(w_i, v_i)                                                        # (B, T, d)
    return h


def products(q, sources):
    """q . v_i for every i: (B, T, d), n x (B, T, d) -> (B, T, n)."""
    return torch.stack([(q * v).sum(-1) for v in sources], -1)                      # (B, T, n)


class Mix(torch.autograd.Function):
    """weighted_sum with its gradient: products for the weights, an outer product for the sources.
    Autograd would get there too, but through n intermediate sums where one will do."""

    @staticmethod
    def forward(ctx, w, *sources):
        ctx.save_for_backward(w, *sources)          # references: no source is copied
        return weighted_sum(w, sources)                                             # (B, T, d)

    @staticmethod
    def backward(ctx, dh):
        w, *sources = ctx.saved_tensors
        return products(dh, sources), *(dh * w_i for w_i in w.unsqueeze(-2).unbind(-1))


class Score(torch.autograd.Function):
    """products with its gradient: the weighted sum, because each is the other's transpose."""

    @staticmethod
    def forward(ctx, q, *sources):
        ctx.save_for_backward(q, *sources)
        return products(q, sources)                                                 # (B, T, n)

    @staticmethod
    def backward(ctx, dg):
        q, *sources = ctx.saved_tensors
        return weighted_sum(dg, sources), *(q * g_i for g_i in dg.unsqueeze(-2).unbind(-1))


def inverse_rms(x, eps: float):
    """1 / rms(x), fp32: (B, T, d) -> (B, T, 1)."""
    return (wide(x).square().mean(-1, keepdim=True) + eps).rsqrt()                  # (B, T, 1)


def mix(weights, sources: list):
    """What is read: fp32 weights (B, T, n), n x (B, T, d) -> (B, T, d) in the embedding's dtype."""
    return Mix.apply(weights, *sources).to(sources[0].dtype)                        # (B, T, d)


def couple(g, psi: list, b):
    """g_i - beta (psi_i - mean psi): g (B, T, n), psi n x (B, T) -> (B, T, n), beta. [OASIS 1.4]"""
    beta = F.softplus(b).clamp(max=BETA_MAX)                                        # ()
    psi = torch.stack(psi, -1)                                                      # (B, T, n)
    return g - beta * (psi - psi.mean(-1, keepdim=True)), beta                      # (B, T, n)


def tell(record, name: str, l: int, make):
    """Report make() under `name` if the recorder asks for it; otherwise do not even compute it."""
    if record is not None and name in getattr(record, "names", (name,)):
        record(name, l, make())


def check_depth(config):
    if config.depth_normalizer == "sink":
        raise ValueError("depth_normalizer=sink: the null logit of depth is not learned; "
                         "choose softmax1 for a null option with logit 0")
    if config.router_init not in ROUTER_INITS:
        raise ValueError(f"router_init={config.router_init!r}: choose from "
                         f"{', '.join(ROUTER_INITS)}")
    if config.depth_block < 0:
        raise ValueError(f"depth_block={config.depth_block} must not be negative")


# ---------------------------------------------------------------------------------------- Kimi's

class AttnRes(nn.Module):
    """Attention over the bare outputs of all sublayers below, or of blocks of them. [AttnRes 4]

    depth_block counts *sublayers* (attention and feed-forward each one) whose outputs are summed to
    one source; 0 and 1 are the full form. The first sublayer of a block reads the finished blocks,
    the others also the partial sum of their own. Sublayer 0 has one source and no choice, so the
    readers with a query are sublayers 1 .. L-1 and, last, the final norm.
    """

    def __init__(self, config):
        super().__init__()
        check_depth(config)
        self.config, self.L = config, config.n_sublayer
        self.block = max(1, config.depth_block)
        self.query = nn.Parameter(torch.zeros(self.L, config.d_model))
        self.key_gain = nn.Parameter(torch.ones(self.L, config.d_model))
        self.b = nn.Parameter(torch.zeros(self.L)) if config.coupling else None

    def init_special(self):
        """Zero queries: all readers start with the uniform mean, the residual up to scale.

        The readers' norm divides the scale out only above its eps: the mean of n sources is n
        times smaller than their sum, and at depth 1e-6 is no longer small beside its square. With
        near_identity a reader therefore reads n times the mean, at zero queries exactly the stream
        of the standard residual, in the block form too; softmax1, whose null starts with one share
        of n + 1, reads n + 1 times its weighted sum. What the null takes later is a smaller stream.
        """
        self.query.zero_()
        self.key_gain.fill_(1)
        if self.b is not None:
            self.b.fill_(-5)

    def start(self, x, record=None):
        """x (B, T, d): the embedding is source 0, with psi 0."""
        w = self.query * self.key_gain                                              # (L, d)
        state = SimpleNamespace(record=record, w=w, sources=[], logits=[], psi=[],
                                partial=None, partial_psi=[])
        self.add(state, 0, x, x.new_zeros(x.shape[:2], dtype=torch.float32))
        return state

    def score(self, v, w):
        """w . RMSNorm(v) = (w . v) / rms(v) for the readers w (r, d): (B, T, d) -> (B, T, r)."""
        with torch.autocast(v.device.type, enabled=False):
            v = wide(v)                                                             # (B, T, d)
            return F.linear(v, w.to(v.dtype)) * inverse_rms(v, self.config.norm_eps)    # (B, T, r)

    def add(self, state, l: int, v, psi):
        """A finished source. Readers l + 1 .. L will ask for it: all their logits, once."""
        state.sources.append(v)
        state.logits.append((l, self.score(v, state.w[l:]).unbind(-1)))     # L - l times (B, T)
        state.psi.append(psi)

    def read(self, state, l: int):
        if l == 0:
            return state.sources[0]                                                 # (B, T, d)
        g = [logits[l - 1 - first] for first, logits in state.logits]               # n x (B, T)
        sources, psi = state.sources, state.psi
        if state.partial is not None:
            g = g + [self.score(state.partial, state.w[l - 1:l])[..., 0]]           # n x (B, T)
            sources = sources + [state.partial]
            psi = psi + [sum(state.partial_psi) / len(state.partial_psi)]
        g = torch.stack(g, -1)                                                      # (B, T, n)
        if self.b is not None:
            g, beta = couple(g, psi, self.b[l - 1])                                 # (B, T, n)
            tell(state.record, "depth_beta", l, lambda: beta)
        c = self.config
        w = depth_weights(g, c.depth_normalizer, c.clip_gamma, c.clip_zeta)         # (B, T, n)
        tell(state.record, "depth_weights", l, lambda: w.movedim(-1, 0))
        tell(state.record, "depth_null", l, lambda: depth_null(g, w, c.depth_normalizer))
        if c.near_identity:
            w = w * (len(sources) + (c.depth_normalizer == "softmax1"))             # (B, T, n)
        return mix(w, sources)                                                      # (B, T, d)

    def write(self, state, l: int, u, y, null):
        """Sum y to its block; a full block becomes a source of its own. [AttnRes 4.2]"""
        psi = null.detach() if self.config.coupling_detach else null                # (B, T)
        if self.config.ffn == "none" or l % 2 == 0:
            tell(state.record, "psi", l, lambda: psi)
        state.partial = y if state.partial is None else state.partial + y           # (B, T, d)
        state.partial_psi.append(psi)
        if len(state.partial_psi) == self.block:
            mean = sum(state.partial_psi) / self.block                              # (B, T)
            self.add(state, l, state.partial, mean)
            state.partial, state.partial_psi = None, []
        return state

    def finish(self, state):
        return self.read(state, self.L)                                             # (B, T, d)

    def penalty(self, state):
        return 0.0


# --------------------------------------------------------------------------------------- OASIS'

class Site(nn.Module):
    """The parameters of one routing decision: two of them in each transformer block."""

    def __init__(self, config):
        super().__init__()
        self.config = config
        self.a = max(config.d_model // 4, 64)
        self.wq = nn.Linear(config.d_model, self.a, bias=False)
        self.wk = nn.Linear(config.d_model, self.a, bias=False)
        self.recency = nn.Parameter(torch.zeros(()))
        self.b = nn.Parameter(torch.zeros(())) if config.coupling else None

    def init_special(self):
        """router_init zero: r = 0, q and k with the spread of nn.Linear's own U(+-1/sqrt d).
        recent and index: r = 8, q and k ~ N(0, (0.02 / sqrt a)^2). Never all zero: the gradient of
        a product needs one factor. (The matrices come as N(0, 0.02^2), drawn by name.)
        identity, for pretrained streams: r = IDENTITY_STEP and q = 0, because a stream that holds
        a spike of 1e4 saturates any random q . k. W_q moves first, W_k as soon as it has.
        """
        init = self.config.router_init
        scale = 1 / (0.02 * math.sqrt(3 * self.config.d_model)) if init == "zero" \
            else 1 / math.sqrt(self.a)
        self.wq.weight.mul_(0.0 if init == "identity" else scale)
        self.wk.weight.mul_(scale)
        self.recency.fill_({"zero": 0.0, "identity": IDENTITY_STEP}.get(init, 8.0))
        if self.b is not None:
            self.b.fill_(-5)

    def bias(self, n: int):
        """Recency bias of n candidates, the newest last: (n,).

        r i / (n-1), from 0 to r however deep the model is; index, identity: r (i - n + 2), a step
        of r for each candidate. Then, with e = exp(-r) and scores near zero, the newest weighs at
        least 1 - e by softmax and (1 - e) / (1 + e - e^2) by softmax1: over 0.999 at any depth for
        r = 8, and the null of softmax1 about e.

        r = 8 does not suit sparse normalisers: they drop what lies 1 (sparsemax) or 2 (entmax15)
        below the top, so with few candidates the newest takes all and no logit gets a gradient.
        """
        i = torch.arange(n, device=self.recency.device, dtype=self.recency.dtype)   # (n,)
        by_index = self.config.router_init in ("index", "identity")
        return self.recency * (i - n + 2 if by_index else i / (n - 1))


class OasisRouter(nn.Module):
    """After every sublayer, a softmax over the streams so far picks the next stream. [OASIS 1.3]

    The history holds the embedding and the output of every whole transformer block; a site sees it
    and this block's own candidates. With ffn="none" a block has one site.
    """

    def __init__(self, config):
        super().__init__()
        check_depth(config)
        self.config = config
        self.sites = nn.ModuleList(Site(config) for _ in range(config.n_sublayer))

    def start(self, x, record=None):
        zero = x.new_zeros(x.shape[:2], dtype=torch.float32)                        # (B, T)
        return SimpleNamespace(record=record, x=x, history=[x], psi=[zero], inner=[], inner_psi=[])

    def read(self, state, l: int):
        return state.x                                                              # (B, T, d)

    def write(self, state, l: int, u, y, null):
        psi = null.detach() if self.config.coupling_detach else null                # (B, T)
        attention_only = self.config.ffn == "none"
        if attention_only or l % 2 == 0:
            tell(state.record, "psi", l, lambda: psi)
        state.inner = state.inner + [state.x + y]
        state.inner_psi = state.inner_psi + [psi]
        state.x = self.route(state, l, state.history + state.inner, state.psi + state.inner_psi)
        if attention_only or l % 2 == 1:        # the block is done: only its output is remembered
            state.history, state.psi = state.history + [state.x], state.psi + [psi]
            state.inner, state.inner_psi = [], []
        return state

    def route(self, state, l: int, candidates: list, psi: list):
        """n x (B, T, d) -> (B, T, d). q . W_k s_i = (W_k^T q) . s_i: no candidate is projected.
        With router_norm, our extension, queries and keys are made of s / rms(s): without it, what
        one step of training does to a logit grows with the square of a stream's size."""
        site, c = self.sites[l], self.config
        q = site.wq(candidates[-1])                                                 # (B, T, a)
        q = F.linear(q, site.wk.weight.T) / math.sqrt(site.a)                       # (B, T, d)
        g = Score.apply(wide(q), *candidates)                                       # (B, T, n)
        if c.router_norm:
            scale = torch.cat([inverse_rms(s, c.norm_eps) for s in candidates], -1)     # (B, T, n)
            g = g * scale * scale[..., -1:]                                         # (B, T, n)
        g = g + site.bias(len(candidates))                                          # (B, T, n)
        if site.b is not None:
            g, beta = couple(g, psi, site.b)                                        # (B, T, n)
            tell(state.record, "depth_beta", l, lambda: beta)
        g = g.clamp(-LOGIT_MAX, LOGIT_MAX)                                          # (B, T, n)
        w = depth_weights(g, c.depth_normalizer, c.clip_gamma, c.clip_zeta)         # (B, T, n)
        tell(state.record, "depth_weights", l, lambda: w.movedim(-1, 0))
        tell(state.record, "depth_null", l, lambda: depth_null(g, w, c.depth_normalizer))
        tell(state.record, "depth_recency", l, lambda: site.recency)
        return mix(w, candidates)                                                   # (B, T, d)

    def finish(self, state):
        return state.x                                                              # (B, T, d)

    def penalty(self, state):
        return 0.0


# ------------------------------------------------------------------------------------ self-check

def compare(a: dict, b: dict, seed: int = 0):
    """Largest difference of the logits of two configurations, and their largest |h| that is read.

    Parameters of the residual are stirred where the second configuration has queries, so that
    routing is far from uniform.
    """
    from model import PRESETS, Config, Transformer
    logits, peaks = [], []
    for fields in (a, b):
        preset, stir = PRESETS[fields["preset"]], fields.get("stir", 0.0)
        config = Config(**{**preset, "n_layer": 6, "d_model": 64, "block_size": 32,
                           **{k: v for k, v in fields.items() if k not in ("preset", "stir")}})
        model = Transformer(config, seed)
        g = torch.Generator().manual_seed(seed)
        tokens = torch.randint(config.vocab_size, (4, 32), generator=g)             # (B, T)
        if stir:
            with torch.no_grad():
                model.residual.query.normal_(0, stir, generator=g)
        peak = []

        def keep(name, l, x):
            peak.append(x.abs().max().item())
        keep.names = {"stream"}
        with torch.no_grad():
            logits.append(model(tokens, record=keep)[0])                            # (B, T, V)
        peaks.append(max(peak))
    return (logits[0] - logits[1]).abs().max().item(), logits[0].abs().max().item(), peaks


def last_branch(n: int, kind: str, init: str) -> float:
    """Weight of the newest of n candidates where the scores q . k are still zero."""
    logits = torch.zeros(n)                                                         # (n,)
    if init != "kimi":
        from model import Config
        site = Site(Config(residual="oasis", router_init=init, d_model=2, n_head=1))
        with torch.no_grad():
            site.init_special()
            logits = site.bias(n).clamp(-LOGIT_MAX, LOGIT_MAX)                      # (n,)
    return depth_weights(logits[None, None], kind)[0, 0, -1].item()


INITS = {"zero": "OASIS, r = 0 (Llama file)", "recent": "OASIS, r = 8 (Qwen, Phi files)",
         "index": "index bias, 8 a step (ours)", "kimi": "Kimi, zero queries (outputs)"}


def figure(path: str):
    """Weight of the newest candidate against how many there are, for every initialisation."""
    import os
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    fig, ax = plt.subplots(figsize=(6.4, 4), layout="constrained")
    n = list(range(2, 66))
    names = {"index": ("index bias, 8 for each candidate", 8, 0.94),
             "recent": ("r = 8 over all candidates\n(OASIS: Qwen, Phi files)", 8.6, 0.67),
             "zero": ("r = 0 (OASIS: Llama file),\nKimi's zero queries", 3.3, 0.33)}
    for color, (init, (name, x, y)) in enumerate(names.items()):
        for kind, line in (("softmax", "-"), ("softmax1", "--")):
            ax.plot(n, [last_branch(k, kind, init) for k in n], line, color=f"C{color}")
        ax.text(x, y, name, color=f"C{color}")
    ax.set_xscale("log", base=2)
    ax.set_xticks([2, 4, 8, 16, 32, 64], labels=["2", "4", "8", "16", "32", "64"])
    ax.set(xlabel="candidates n (dashed: softmax1 over depth)", ylim=(0, 1.03),
           ylabel="weight of the newest", title="How near to a residual does the router start?")
    ax.spines[["top", "right"]].set_visible(False)
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    fig.savefig(path, dpi=150)
    plt.close(fig)


def main():
    import argparse
    parser = argparse.ArgumentParser(description="Check and show the two depth softmaxes.")
    parser.add_argument("--figure", default="figures/attnres.png",
                        help="where the figure of starting weights goes (default: %(default)s)")
    args = parser.parse_args()
    try:
        figure(args.figure)
    except OSError as error:
        parser.error(f"cannot write the figure: {error}")
    print(f"Figure: {args.figure}")

    print("(a) Zero queries are the standard residual: each reader sees the stream over n.")
    for eps in (1e-6, 1e-12):
        diff, size, _ = compare({"preset": "vanilla", "norm_eps": eps},
                                {"preset": "attnres", "norm_eps": eps})
        print(f"    norm_eps {eps:.0e}: max |logit difference| {diff:.1e} of {size:.2f}")

    print("(b) Over depth, softmax1 only rescales what Kimi's readers see; their norm undoes it.")
    for eps in (1e-6, 1e-12):
        diff, size, peaks = compare(
            {"preset": "attnres", "norm_eps": eps, "stir": 0.1},
            {"preset": "attnres", "norm_eps": eps, "stir": 0.1, "depth_normalizer": "softmax1"})
        print(f"    norm_eps {eps:.0e}: max |logit difference| {diff:.1e} of {size:.2f}, yet "
              f"max |h| {peaks[0]:.3f} -> {peaks[1]:.3f} ({peaks[1] / peaks[0] - 1:+.0%})")

    print("(c) Weight of the newest of n candidates at the start: softmax / softmax1")
    ns = (2, 3, 5, 9, 17, 33, 65)
    print(f"    {'n':34s}" + "".join(f"{n:>12d}" for n in ns))
    for init, label in INITS.items():
        cells = (f"{last_branch(n, 'softmax', init):.3f}/{last_branch(n, 'softmax1', init):.3f}"
                 for n in ns)
        print(f"    {label:34s}" + "".join(f"{c:>12s}" for c in cells))


if __name__ == "__main__":
    main()
