"""Quantisation: what an outlier costs when all values of a tensor share one ruler.

    scale s = (max - min) / (2^b - 1)      code = clamp(round(x / s) + z, 0, 2^b - 1)
    value   = s (code - z)                 |value - x| <= s / 2

Every value on the grid pays the same error, half a step, and the largest value sets the step: one
activation a thousand times the others leaves them a thousandth of the levels. At 8 bits 255 steps
become a quarter of one, and the whole tensor but its outlier rounds to zero. That is the practical
case against massive activations (Bondarenko et al., arXiv 2306.12929; OASIS, arXiv 2605.17887).

Nothing here saves time: weights and activations are rounded to the grid and stored as floats, which
tells the loss exactly (`integer`, below, computes the same in int8 to prove it). A scheme is a name:

    w8, w4              weights only, per output channel, round to nearest           [Ledger 2.8]
    w8a8, w4a4          and activations, a range for every token, found on the fly
    w8a8-static, ...    one range for each tensor, fixed on training data            [OASIS 1.9]

Any bits from 2 to 16: w6, w4a8, w3a3-static. Read first: `Grid` to `fake_quantize`, the arithmetic;
then SITES, what is put on a grid; then `QuantizedLinear`. `quantize` returns a copy.

    python quantize.py runs/NAME --scheme w8a8 w4a4          before and after, and the worst sites
    python quantize.py runs/NAME --scheme w4a4 --attribute   the loss, one site at a time

Shapes: B batch, T tokens, S keys, H heads, D head size, d width; l counts sublayers from 0.
"""
from __future__ import annotations

import copy
import math
import re
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

import eval as evaluation
from attnres import (LOGIT_MAX, AttnRes, OasisRouter, couple, depth_null, depth_weights, mix,
                     tell)
from eval import evaluating
from ledger import Delta, HyperConnection2, Ledger, update
from model import Attention, DynamicTanh, RMSNorm, StandardResidual, rotate
from softmax1 import attention_probs

RANGES = {
    "minmax": "smallest and largest value seen",
    "running": "moving average of each batch's, momentum 0.9",
    "percentile": "the same, of the 99.999 % percentiles",
    "mse": "the same, of the ranges with the least squared error",
}


class QuantError(ValueError):
    """A request that cannot be quantised, in one line."""


# ---------------------------------------------------------------------------------------- grids

class Grid(NamedTuple):
    """value = scale (code - zero), for the integers low <= code <= high. scale, zero broadcast."""
    scale: torch.Tensor
    zero: torch.Tensor
    low: int
    high: int


def wide(x: torch.Tensor) -> torch.Tensor:
    """fp32 (fp64 stays): a grid of 8 bits is finer than bf16."""
    return x if x.dtype == torch.float64 else x.float()


def symmetric(lo, hi, bits: int) -> Grid:
    """Zero is a level in the middle. Codes -2^(b-1) .. 2^(b-1) - 1; the largest of |lo|, |hi| gets
    2^(b-1) - 1, so a range that is not clipped uses 2^b - 1 levels. [Ledger 2.8, 1e-8 included]"""
    top = 2 ** (bits - 1) - 1
    scale = torch.maximum(-lo, hi) / top + 1e-8
    return Grid(scale, torch.zeros_like(scale), -top - 1, top)


def asymmetric(lo, hi, bits: int) -> Grid:
    """Codes 0 .. 2^b - 1 from lo to hi, which enclose 0; zero itself is a level. [OASIS 1.9]"""
    top = 2 ** bits - 1
    scale = (hi / top - lo / top).clamp(min=torch.finfo(lo.dtype).tiny)    # hi - lo may overflow
    return Grid(scale, (-lo / scale).round(), 0, top)


def encode(x: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Codes, as floats. Infinities get the outermost codes, NaN stays NaN."""
    return ((wide(x) / grid.scale).round_() + grid.zero).clamp_(grid.low, grid.high)


def decode(codes: torch.Tensor, grid: Grid) -> torch.Tensor:
    return grid.scale * (codes - grid.zero)


def on_grid(x: torch.Tensor, grid: Grid) -> torch.Tensor:
    """The nearest level to each x, same dtype. Gradient: straight through where x lies between the
    outermost levels, 0 beyond them."""
    y = decode(encode(x.detach(), grid), grid).to(x.dtype)
    if not (torch.is_grad_enabled() and x.requires_grad):
        return y
    ends = (decode(torch.full_like(grid.zero, code), grid) for code in (grid.low, grid.high))
    inside = wide(x).clamp(*ends).to(x.dtype)
    return y + (inside - inside.detach())          # the second term is exactly zero


def extent(x: torch.Tensor, per: str, ranges: str = "minmax", bits: int = 8, grid=asymmetric):
    """(lo, hi), lo <= 0 <= hi, that a grid should span: shapes broadcast against x.

    per: "tensor" (one range), "token" (one for each last axis), "channel" (one for each index of
    the first axis: an output channel of a weight). ranges: RANGES, of this tensor. Values that are
    not finite have no say; a tensor without any finite value has the range (0, 0).
    """
    x = wide(x.detach())
    shape = {"tensor": (1,) * x.ndim, "token": (*x.shape[:-1], 1),
             "channel": (*x.shape[:1], *(1,) * (x.ndim - 1))}[per]
    rows = x.reshape(math.prod(shape), -1)                                          # (ranges, n)
    lo, hi = rows.amin(1), rows.amax(1)                     # aminmax is 10 x slower along an axis
    if not (lo.isfinite() & hi.isfinite()).all():
        rows = torch.where(rows.isfinite(), rows, 0.0)
        lo, hi = rows.amin(1), rows.amax(1)
    lo, hi = lo.clamp(max=0), hi.clamp(min=0)                                       # (ranges)
    if ranges == "percentile":
        lo = torch.maximum(lo, quantile(rows, 1e-5).clamp(max=0))
        hi = torch.minimum(hi, quantile(rows, 1 - 1e-5).clamp(min=0))
    elif ranges == "mse":
        lo, hi = least_error(rows, lo, hi, bits, grid)
    return lo.view(shape), hi.view(shape)


def quantile(rows: torch.Tensor, q: float) -> torch.Tensor:
    """q-quantile of each row, linear between neighbours (torch.quantile stops at 16 M values)."""
    at = q * (rows.shape[1] - 1)
    below, above = (rows.kthvalue(int(rank) + 1, 1).values for rank in (at // 1, -(-at // 1)))
    return below * (1 - at % 1) + above * (at % 1)


def least_error(rows, lo, hi, bits: int, grid, steps: int = 50):
    """The range, out of `steps` shrunken copies of (lo, hi), with the least squared error per row."""
    best, choice = torch.full_like(lo, math.inf), torch.ones_like(lo)
    for share in torch.arange(steps, 0, -1).div(steps).tolist():
        candidate = grid(lo[:, None] * share, hi[:, None] * share, bits)
        error = (on_grid(rows, candidate) - rows).square().sum(1)                   # (ranges)
        better = error < best
        best = torch.where(better, error, best)
        choice = torch.where(better, torch.full_like(choice, share), choice)
    return lo * choice, hi * choice


def fake_quantize(x: torch.Tensor, bits: int, per: str | int = "tensor", grid=asymmetric,
                  ranges: str = "minmax") -> torch.Tensor:
    """x on a grid of its own: new tensor, same shape and dtype, straight-through gradient.

    per: as in `extent`, or a number: one range for so many neighbours along the last axis.
    grid: symmetric or asymmetric. Zeros stay exactly zero; infinities become the largest finite
    value of their range and NaN stays NaN, neither moves the other values.
    Raises QuantError for bits outside 2 .. 16, unknown options, groups that do not divide.
    """
    check_options(bits, per, ranges)
    if isinstance(per, int):
        if per < 1 or x.shape[-1] % per:
            raise QuantError(f"groups of {per} do not divide {x.shape[-1]} channels")
        return fake_quantize(x.unflatten(-1, (-1, per)), bits, "token", grid, ranges).flatten(-2)
    return on_grid(x, grid(*extent(x, per, ranges, bits, grid), bits)) if x.numel() else x.clone()


def check_options(bits: int, per, ranges: str):
    if not 2 <= bits <= 16:
        raise QuantError(f"{bits} bits: choose 2 to 16")
    if not isinstance(per, int) and per not in ("tensor", "token", "channel"):
        raise QuantError(f"per {per!r}: choose tensor, token, channel, or a group size")
    if ranges not in RANGES:
        raise QuantError(f"ranges {ranges!r}: choose from {', '.join(RANGES)}")


# -------------------------------------------------------------------------------------- schemes

SITES = {     # role -> where. A site's name is "place:role", as in "sublayers.0.wq:in"
    "weight": "every nn.Linear: projections, feed-forward, gates, routers; not the head unless "
              "asked (w8, w4: the head too, unless it is tied), not the embeddings unless asked",
    "in": "the input of every such nn.Linear",
    "out": "the output of every such nn.Linear, and of every norm",
    "probs": "attention probabilities",
    "context": "weighted sums of values, all heads of a token together, before the output gate",
    "stream": "the residual after each sublayer; AttnRes: the mix that each sublayer reads",
    "sum": "OASIS: stream + sublayer output, the newest candidate of the depth softmax",
    "scratch": "Ledger: D after each entry",
    "committed": "Ledger: C after each entry",
}
# In floating point: attention scores and both softmaxes, gates' sigmoids, recency bias, beta. The
# paper's code also puts the scores (before softmax) on a grid; here no tensor holds them.


@dataclass(frozen=True)
class Scheme:
    """What `parse` makes of a scheme's name."""
    name: str
    weight_bits: int
    act_bits: int = 0             # 0: activations stay as they are
    static: bool = False          # ranges fixed on calibration data, one for each tensor
    ranges: str = "minmax"        # how activations' ranges are found: RANGES
    head: bool | None = None      # None: in weight-only schemes, if it is not tied [Ledger 2.8]
    embed: bool = False

    @property
    def per(self) -> str:
        """One range for each: weights are always symmetric, activations asymmetric."""
        return "tensor" if self.static else "token"


SCHEMES = ("w8", "w4", "w8a8", "w4a4", "w8a8-static", "w4a4-static")


def parse(name: str | Scheme, **fields) -> Scheme:
    """"w4a8-static" -> Scheme; fields (head, embed, ranges) that are not None replace defaults.

    Default ranges: running 99.999 % percentiles if static [OASIS 1.9], else a token's extremes.
    Raises QuantError.
    """
    if isinstance(name, str):
        found = re.fullmatch(r"w(\d+)(?:a(\d+)(-static)?)?", name)
        if not found:
            raise QuantError(f"scheme {name!r}: wBITS, wBITSaBITS or wBITSaBITS-static, as in "
                             f"{', '.join(SCHEMES)}")
        weight, act, static = found.groups()
        name = Scheme(name, int(weight), int(act or 0), bool(static),
                      "percentile" if static else "minmax")
    scheme = replace(name, **{key: value for key, value in fields.items() if value is not None})
    for bits in (scheme.weight_bits, scheme.act_bits or 8):
        check_options(bits, "tensor", scheme.ranges)
    if not scheme.static and scheme.ranges == "running":
        raise QuantError(f"{scheme.name}: a running range needs batches; only static schemes do")
    return scheme


# ---------------------------------------------------------------------------- the parts, quantised

class Quantizer(nn.Module):
    """One site: activations in, activations on an asymmetric grid out.

    Dynamic: every token has its own range. Static: one range, of the values seen while `watching`,
    when x passes through untouched: ranges describe the model, not the errors of other sites.
    """

    def __init__(self, name: str, scheme: Scheme):
        super().__init__()
        self.name, self.scheme = name, scheme
        self.watching = False
        self.meter = None           # [signal energy, error energy] while noise is measured
        self.register_buffer("lo", None)
        self.register_buffer("hi", None)

    def watch(self, x):
        s = self.scheme
        lo, hi = extent(x, "tensor", "minmax" if s.ranges == "running" else s.ranges, s.act_bits)
        lo, hi = lo.reshape(()), hi.reshape(())
        if self.lo is None:
            self.lo, self.hi = lo, hi
        elif s.ranges == "minmax":
            self.lo, self.hi = torch.minimum(self.lo, lo), torch.maximum(self.hi, hi)
        else:
            self.lo, self.hi = 0.9 * self.lo + 0.1 * lo, 0.9 * self.hi + 0.1 * hi

    def grid(self, x) -> Grid:
        s = self.scheme
        if not s.static:
            return asymmetric(*extent(x, "token", s.ranges, s.act_bits), s.act_bits)
        if self.lo is None:
            raise QuantError(f"{s.name}: no calibration data has reached {self.name}")
        return asymmetric(self.lo, self.hi, s.act_bits)

    def forward(self, x):
        """(..., n) -> the same shape and dtype; a token is a last axis."""
        if self.watching:
            self.watch(x)
            return x
        y = on_grid(x, self.grid(x))
        if self.meter is not None:
            note(self.meter, x, y)
        return y


def note(meter: list, x, y):
    """Add the energies of x and of y - x."""
    meter[0] += wide(x).square().sum(dtype=torch.float64).item()
    meter[1] += (wide(y) - wide(x)).square().sum(dtype=torch.float64).item()


class QuantizedLinear(nn.Module):
    """W x + b with W on a symmetric grid, in place in `.weight` for whoever reads it there (the
    fused ledger, the router), and quantisers before and behind."""

    def __init__(self, linear: nn.Linear, name: str, scheme: Scheme, site):
        super().__init__()
        self.bits = scheme.weight_bits if site.chosen(f"{name}:weight") else 0
        per = "tensor" if scheme.static else "channel"
        weight = linear.weight.detach()
        if self.bits:
            self.grid = symmetric(*extent(weight, per), self.bits)
            weight = on_grid(weight, self.grid)                                     # (out, in)
        self.weight, self.bias = nn.Parameter(weight.clone()), linear.bias
        self.input, self.output = site(f"{name}:in"), site(f"{name}:out")
        self.meter = [0.0, 0.0]
        note(self.meter, linear.weight.detach(), weight)

    def forward(self, x):
        y = F.linear(self.input(x), self.weight, self.bias)                         # (..., out)
        return self.output(y)                                                       # (..., out)


class QuantizedNorm(nn.Sequential):
    """A norm, and its output on a grid."""

    def __init__(self, norm, name: str, scheme: Scheme, site):
        super().__init__(norm, site(f"{name}:out"))


class QuantizedAttention(nn.Module):
    """model.Attention with its probabilities and its context on grids.

    Quantised probabilities are a T x S matrix by nature, so they are built, by the reference. What
    a recorder is told as "attn_probs" is the matrix before its rounding.
    """

    def __init__(self, attention: Attention, name: str, scheme: Scheme, site):
        super().__init__()
        self.inner = attention
        self.probs, self.context = site(f"{name}:probs"), site(f"{name}:context")

    def forward(self, u, ctx, null=None):
        """u (B, T, d) -> y (B, T, d), head-mean null mass (B, T): model.Attention.forward."""
        a, c, D = self.inner, self.inner.config, self.inner.config.head_dim
        q = a.q_norm(a.wq(u).unflatten(-1, (-1, D))).transpose(1, 2)                # (B, H, T, D)
        k = a.k_norm(a.wk(u).unflatten(-1, (-1, D))).transpose(1, 2)                # (B, G, T, D)
        v = a.wv(u).unflatten(-1, (-1, D)).transpose(1, 2)                          # (B, G, T, D)
        if ctx.cos is not None:
            q, k = rotate(q, ctx.cos, ctx.sin), rotate(k, ctx.cos, ctx.sin)
        if ctx.cache is not None:
            k, v = ctx.cache.append(a.index, k, v)                                  # (B, G, S, D)
        how = dict(normalizer=c.normalizer, null_logit=a.null_logit, mask=ctx.mask,
                   gamma=c.clip_gamma, zeta=c.clip_zeta)
        probs, null = attention_probs(q, k, **how)              # (B, H, T, S), (B, H, T)
        heads = wide(v).repeat_interleave(q.shape[1] // v.shape[1], dim=1)          # (B, H, S, D)
        out = (self.probs(probs) @ heads).to(v.dtype).transpose(1, 2)               # (B, T, H, D)
        out = self.context(out.flatten(-2)).unflatten(-1, (-1, D))                  # (B, T, H, D)
        gate = None
        if a.gate is not None:
            gate = a.gate(u, ctx)                                                   # (B, T, H, D)
            out = out * gate                                                        # (B, T, H, D)
        if ctx.record is not None:
            a.tell(ctx.record, q, k, v, out.transpose(1, 2), null, gate, how)
        return a.wo(out.flatten(-2)), null.mean(1)              # (B, T, d), (B, T)


class QuantizedResidual(nn.Module):
    """A residual whose streams (one tensor, or a tuple) are put on a grid as they are written."""

    def __init__(self, residual, name: str, scheme: Scheme, site):
        super().__init__()
        self.inner = residual
        self.stream = nn.ModuleList(site(f"{name}.{l}:stream") for l in range(site.n_sublayer))

    def start(self, x, record=None):
        return self.inner.start(x, record)

    def read(self, state, l: int):
        return self.inner.read(state, l)                                            # (B, T, d)

    def write(self, state, l: int, u, y, null):
        state, grid = self.inner.write(state, l, u, y, null), self.stream[l]
        return grid(state) if torch.is_tensor(state) else tuple(grid(s) for s in state)

    def finish(self, state):
        return self.inner.finish(state)                                             # (B, T, d)

    def penalty(self, state):
        return self.inner.penalty(state)


class QuantizedAttnRes(QuantizedResidual):
    """No stream is written here: the sources are sublayer outputs, the mix of them is the stream."""

    def write(self, state, l: int, u, y, null):
        return self.inner.write(state, l, u, y, null)

    def read(self, state, l: int):
        h = self.inner.read(state, l)                                               # (B, T, d)
        return self.stream[l - 1](h) if l else h                                    # (B, T, d)

    def finish(self, state):
        return self.stream[-1](self.inner.finish(state))                            # (B, T, d)


class QuantizedLedger(QuantizedResidual):
    """Writes through `update`, the plain equations: the fused ones read weights, and would go past
    the quantisers of its low-rank maps."""

    def __init__(self, residual: Ledger, name: str, scheme: Scheme, site):
        super().__init__(residual, name, scheme, site)
        del self.stream
        self.D, self.C = (nn.ModuleList(site(f"{name}.{l}:{role}") for l in range(site.n_sublayer))
                          for role in ("scratch", "committed"))

    def write(self, state, l: int, u, y, null):
        ledger = self.inner
        D, C, c = update(ledger.sites[l], state.D, state.C, u, y)   # (B, T, d) x 2, (B, T, 1)
        if ledger.cap:
            norm = C.norm(dim=-1, keepdim=True)                                     # (B, T, 1)
            C = C * (ledger.cap / (norm + 1e-6)).clamp(max=1)                       # (B, T, d)
        D, C = self.D[l](D), self.C[l](C)                                           # (B, T, d) x 2
        if state.record is not None:
            ledger.tell(state.record, l, ledger.sites[l], D, C, C - state.C, u)
        return SimpleNamespace(D=D, C=C, opened=state.opened + [c.mean()], record=state.record)


class QuantizedRouter(OasisRouter):
    """OASIS' router with every candidate projected: the short cut through W_k^T q that the original
    takes never computes the keys, which are a site. [OASIS 1.3, 1.9]"""

    def __init__(self, router: OasisRouter, name: str, scheme: Scheme, site):
        nn.Module.__init__(self)
        self.config, self.sites = router.config, router.sites
        self.sum, self.stream = (nn.ModuleList(site(f"{name}.{l}:{role}")
                                               for l in range(site.n_sublayer))
                                 for role in ("sum", "stream"))

    def route(self, state, l: int, candidates: list, psi: list):
        """n x (B, T, d) -> (B, T, d), as attnres.router_reference."""
        site, c = self.sites[l], self.config
        state.inner[-1] = candidates[-1] = self.sum[l](candidates[-1])              # (B, T, d)
        q = site.wq(candidates[-1]) / math.sqrt(site.a)                             # (B, T, a)
        g = torch.stack([(q * site.wk(s)).sum(-1) for s in candidates], -1)         # (B, T, n)
        g = g + site.bias(len(candidates))                                          # (B, T, n)
        if site.b is not None:
            g, beta = couple(g, psi, site.b)                                        # (B, T, n)
            tell(state.record, "depth_beta", l, lambda: beta)
        g = g.clamp(-LOGIT_MAX, LOGIT_MAX)                                          # (B, T, n)
        w = depth_weights(g, c.depth_normalizer, c.clip_gamma, c.clip_zeta)         # (B, T, n)
        tell(state.record, "depth_weights", l, lambda: w.movedim(-1, 0))
        tell(state.record, "depth_null", l, lambda: depth_null(g, w, c.depth_normalizer))
        tell(state.record, "depth_recency", l, lambda: site.recency)
        return self.stream[l](mix(w, candidates))                                   # (B, T, d)


TWINS = {nn.Linear: QuantizedLinear, RMSNorm: QuantizedNorm, DynamicTanh: QuantizedNorm,
         Attention: QuantizedAttention, StandardResidual: QuantizedResidual,
         Delta: QuantizedResidual, HyperConnection2: QuantizedResidual, Ledger: QuantizedLedger,
         AttnRes: QuantizedAttnRes, OasisRouter: QuantizedRouter}


class SiteMaker:
    """Makes the quantiser of a site, or nothing where the scheme or the caller wants none."""

    def __init__(self, scheme: Scheme, only, n_sublayer: int):
        self.scheme, self.n_sublayer = scheme, n_sublayer
        self.chosen = only if callable(only) else (lambda name: only is None or name in only)

    def __call__(self, name: str) -> nn.Module:
        wanted = self.scheme.act_bits and self.chosen(name)
        return Quantizer(name, self.scheme) if wanted else nn.Identity()


# ------------------------------------------------------------------------------------- quantize

@torch.no_grad()
def quantize(model, scheme: str | Scheme, calibration=None, *, only=None, **fields):
    """A quantised copy of a Transformer; the model itself stays bit-identical.

    scheme: see `parse`, which also takes the fields head, embed, ranges. calibration, for static
    schemes: batches of ids, an iterable of (B, T), or one (n, T) tensor; or `ranges_of` an earlier
    copy. only: quantise these sites alone, a set of names or a test of one (`sites` lists them).
    The copy is a model like any other: eval.evaluate and generate take it.
    Raises QuantError: unknown scheme, static without calibration.
    """
    scheme, model = parse(scheme, **fields), evaluation.unwrap(model)
    if scheme.static and calibration is None:
        raise QuantError(f"{scheme.name} needs calibration data")
    twin = copy.deepcopy(model)
    tied = twin.head.weight is twin.embed.weight
    head = not (tied or scheme.act_bits) if scheme.head is None else scheme.head
    site = SiteMaker(scheme, only, model.config.n_sublayer)
    for path, module in reversed(list(twin.named_modules())):       # children before parents
        make = TWINS.get(type(module))
        if make is None or not (head or path != "head"):
            continue
        if make is QuantizedLinear or scheme.act_bits:
            parent, _, child = path.rpartition(".")
            setattr(twin.get_submodule(parent), child, make(module, path, scheme, site))
    if scheme.embed:
        per = "tensor" if scheme.static else "channel"
        for embedding in (m for m in twin.modules() if isinstance(m, nn.Embedding)):
            embedding.weight = nn.Parameter(fake_quantize(embedding.weight, scheme.weight_bits, per,
                                                          symmetric))               # (V, d)
    if scheme.static:
        calibrate(twin, calibration)
    return twin


def quantizers(model) -> dict[str, Quantizer]:
    """The activation sites of a quantised copy, by name."""
    return {m.name: m for m in model.modules() if isinstance(m, Quantizer)}


def calibrate(model, calibration):
    """Fix the ranges of a quantised copy: run batches of ids through it, or take `ranges_of`."""
    sites = quantizers(model)
    if isinstance(calibration, dict):
        for name, q in sites.items():
            q.lo, q.hi = calibration[name]
        return
    if torch.is_tensor(calibration):
        calibration = calibration.split(8)
    for q in sites.values():
        q.watching = True
    with evaluating(model):
        for tokens in calibration:
            model(tokens.to(model.embed.weight.device))
    for q in sites.values():
        q.watching = False


def ranges_of(model) -> dict:
    """{site: (lo, hi)} of a calibrated copy, for another copy: one calibration serves many."""
    return {name: (q.lo, q.hi) for name, q in quantizers(model).items()}
