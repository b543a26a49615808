"""Attention Residuals: a sublayer that chooses which layers to read.

The residual stream hands every sublayer the plain sum of all that was written before. Attention
Residuals put a softmax over *depth* in its place: for each token, a few routing logits, one for each
source below. Two mechanisms bear the name, and they are not the same.

    Kimi Team (arXiv 2603.15031)         sources v_0 = embedding, v_i = output of sublayer i, bare
        g_i = w_l . RMSNorm(v_i)         one learned query for each reader, zero at first
        h_l = sum_i softmax(g)_i v_i     what sublayer l reads, through its own norm

    OASIS (arXiv 2605.17887)             candidates s_0 = embedding, s_i = stream after layer i, and
        q = W_q s_new, k_i = W_k s_i     the newest stream s_new; so each holds all that it sums
        g_i = q . k_i / sqrt(a) + r i / (n-1)
        x = sum_i softmax(g)_i s_i       replaces s_new as the stream

Null coupling (OASIS 1.4) joins this softmax with the one over tokens. A head that spent its mass on
the null option (softmax1.py) said that it had nothing to add; psi is that mass, averaged over heads.
A branch with much of it is asked less:   g_i <- g_i - beta (psi_i - mean psi), beta = softplus(b).
Gradients flow through psi into the queries and keys of the layer that left the mass unspent.

Read first: `attnres_reference` and `router_reference`, the two papers in ten lines each. The classes
compute the same without ever stacking the sources.

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
ROUTER_INITS = ("zero", "recent", "index")


# --------------------------------------------------------------------------------- the references

def depth_weights(logits, kind: str = "softmax", gamma: float = -12 / 512, zeta: float = 1.0):
    """Weights over depth: logits (B, T, n) -> weights (B, T, n), null mass (B, T), both fp32.

    The null option of depth has the value zero: its mass is dropped, never shared out again.
    """
    x = logits if logits.dtype == torch.float64 else logits.float()                 # (B, T, n)
    if kind == "clipped":
        w = clipped_softmax(x, gamma, zeta)                                         # (B, T, n)
    else:
        w = {"softmax": lambda x: x.softmax(-1), "softmax1": softmax1,
             "sparsemax": sparsemax, "entmax15": entmax15}[kind](x)                 # (B, T, n)
    if kind in ("softmax1", "clipped"):
        return w, (1 - w.sum(-1)).clamp(min=0)                                      # (B, T)
    return w, x.new_zeros(x.shape[:-1])                                             # (B, T)


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
    return torch.einsum("btn,nbtd->btd", depth_weights(g, kind)[0], v)              # (B, T, d)


def router_reference(candidates: list, wq, wk, bias, kind: str = "softmax",
                     psi: list | None = None, beta=0.0):
    """The next stream out of the candidate streams, as OASIS' module computes it. [OASIS 1.3]

    candidates n x (B, T, d), the newest last; wq, wk (a, d); bias (n,); psi n x (B, T) -> (B, T, d).
    """
    s = torch.stack(candidates, 2)                                                  # (B, T, n, d)
    q, k = F.linear(s[:, :, -1], wq), F.linear(s, wk)                # (B, T, a), (B, T, n, a)
    g = torch.einsum("bta,btna->btn", q, k) / math.sqrt(len(wq)) + bias             # (B, T, n)
    if psi is not None:
        psi = torch.stack(psi, -1)                                                  # (B, T, n)
        g = g - beta * (psi - psi.mean(-1, keepdim=True))                           # (B, T, n)
    w = depth_weights(g.clamp(-LOGIT_MAX, LOGIT_MAX), kind)[0]                      # (B, T, n)
    return torch.einsum("btn,btnd->btd", w, s)                                      # (B, T, d)


# --------------------------------------------------------------------------------------- the parts

def mix(weights, sources: list):
    """sum_i weights_i sources_i, a running sum over the list. (B, T, n), n x (B, T, d) -> (B, T, d).

    The sum runs in the weights' fp32 and ends in the first source's dtype (the embedding's).
    """
    w = weights.unsqueeze(-2).unbind(-1)                                            # n x (B, T, 1)
    h = w[0] * sources[0]                                                           # (B, T, d)
    for w_i, v_i in zip(w[1:], sources[1:]):
        h = torch.addcmul(h, w_i, v_i)                                              # (B, T, d)
    return h.to(sources[0].dtype)                                                   # (B, T, d)


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
        """Zero queries: every reader starts with the uniform mean, i.e. the residual up to scale."""
        self.query.zero_()
        self.key_gain.fill_(1)
        if self.b is not None:
            self.b.fill_(-5)

    def start(self, x, record=None):
        """x (B, T, d): the embedding is source 0, with psi 0."""
        w = (self.query * self.key_gain)                                            # (L, d)
        state = SimpleNamespace(record=record, w=w, sources=[], logits=[], psi=[],
                                partial=None, partial_psi=[])
        self.add(state, 0, x, x.new_zeros(x.shape[:2], dtype=torch.float32))
        return state

    def score(self, v, w):
        """w . RMSNorm(v) = (w . v) / rms(v), for every reader in w (r, d): (B, T, d) -> (B, T, r)."""
        with torch.autocast(v.device.type, enabled=False):
            v = v if v.dtype == torch.float64 else v.float()                        # (B, T, d)
            scale = (v.square().mean(-1, keepdim=True) + self.config.norm_eps).rsqrt()  # (B, T, 1)
            return F.linear(v, w.to(v.dtype)) * scale                               # (B, T, r)

    def add(self, state, l: int, v, psi):
        """A finished source. Readers l + 1 .. L will ask for it: all their logits, once."""
        state.sources.append(v)
        state.logits.append((l, self.score(v, state.w[l:])))                        # (B, T, L - l)
        state.psi.append(psi)

    def read(self, state, l: int):
        if l == 0:
            return state.sources[0]                                                 # (B, T, d)
        g = [logits[..., l - 1 - first] for first, logits in state.logits]          # n x (B, T)
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
        w, null = depth_weights(g, c.depth_normalizer, c.clip_gamma, c.clip_zeta)   # (B, T, n)
        tell(state.record, "depth_weights", l, lambda: w.movedim(-1, 0))
        tell(state.record, "depth_null", l, lambda: null)
        return mix(w, sources)                                                      # (B, T, d)

    def write(self, state, l: int, u, y, null):
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
        a product needs one factor. (The matrices hold N(0, 0.02^2) drawn by name; only scaled here.)
        """
        zero = self.config.router_init == "zero"
        scale = 1 / (0.02 * math.sqrt(3 * self.config.d_model)) if zero else 1 / math.sqrt(self.a)
        self.wq.weight.mul_(scale)
        self.wk.weight.mul_(scale)
        self.recency.fill_(0.0 if zero else 8.0)
        if self.b is not None:
            self.b.fill_(-5)

    def bias(self, n: int):
        """Recency bias of n candidates, the newest last: (n,).

        r i / (n-1), from 0 to r however deep the model is; "index": r (i - n + 2), a step of r for
        each candidate, so that r = 8 gives the newest a weight above 0.999 at any depth.
        """
        i = torch.arange(n, device=self.recency.device, dtype=self.recency.dtype)   # (n,)
        return self.recency * (i - n + 2 if self.config.router_init == "index" else i / (n - 1))


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
        """n x (B, T, d) -> (B, T, d). q . W_k s_i = (W_k^T q) . s_i: no candidate is projected."""
        site, c = self.sites[l], self.config
        q = site.wq(candidates[-1])                                                 # (B, T, a)
        q = F.linear(q, site.wk.weight.T) / math.sqrt(site.a)                       # (B, T, d)
        g = torch.stack([(q * s).sum(-1) for s in candidates], -1)                  # (B, T, n)
        g = g + site.bias(len(candidates))                                          # (B, T, n)
        if site.b is not None:
            g, beta = couple(g, psi, site.b)                                        # (B, T, n)
            tell(state.record, "depth_beta", l, lambda: beta)
        g = g.clamp(-LOGIT_MAX, LOGIT_MAX)                                          # (B, T, n)
        w, null = depth_weights(g, c.depth_normalizer, c.clip_gamma, c.clip_zeta)   # (B, T, n)
        tell(state.record, "depth_weights", l, lambda: w.movedim(-1, 0))
        tell(state.record, "depth_null", l, lambda: null)
        tell(state.record, "depth_recency", l, lambda: site.recency)
        return mix(w, candidates)                                                   # (B, T, d)

    def finish(self, state):
        return state.x                                                              # (B, T, d)

    def penalty(self, state):
        return 0.0
