"""Quantisation: what an outlier costs when all values of a tensor share one ruler.

    scale s = (max - min) / (2^b - 1)      code = clamp(round(x / s) + z, 0, 2^b - 1)
    value   = s (code - z)                 |value - x| <= s / 2

Every value on the grid pays the same error, half a step, and the largest value sets the step: one
activation a thousand times the others leaves them a thousandth of the levels. At 8 bits 255 steps
become a quarter of one, and the whole tensor but its outlier rounds to zero. That is the practical
case against massive activations (Bondarenko et al., arXiv 2306.12929; OASIS, arXiv 2605.17887).

Nothing here saves time: weights and activations are rounded to the grid and stored as floats, which
tells the loss exactly (`integer_product` does the same in int8, as a check). A scheme is a name:

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

import argparse
import copy
import math
import os
import re
import sys
import time
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from tqdm import tqdm

import eval as evaluation
from attnres import (LOGIT_MAX, AttnRes, OasisRouter, couple, depth_null, depth_weights,
                     inverse_rms, mix, tell)
from data.prepare import open_source
from eval import evaluating
from ledger import Delta, HyperConnection2, Ledger, update
from model import Attention, DynamicTanh, RMSNorm, StandardResidual, load_checkpoint, rotate
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


def steps_of(x: torch.Tensor, grid: Grid) -> torch.Tensor:
    """code - zero: by how many steps the nearest level to x lies away from zero."""
    steps = (wide(x) / grid.scale).round_()
    return steps.clamp_(grid.low - grid.zero, grid.high - grid.zero)


def encode(x: torch.Tensor, grid: Grid) -> torch.Tensor:
    """Codes, as floats. Infinities get the outermost codes, NaN stays NaN."""
    return steps_of(x, grid) + grid.zero


def decode(codes: torch.Tensor, grid: Grid) -> torch.Tensor:
    return grid.scale * (codes - grid.zero)


def on_grid(x: torch.Tensor, grid: Grid) -> torch.Tensor:
    """The nearest level to each x, same dtype. Gradient: straight through where x lies between the
    outermost levels, 0 beyond them."""
    y = steps_of(x.detach(), grid).mul_(grid.scale).to(x.dtype)
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
        lo, hi = (-percentile(-rows)).clamp(max=0), percentile(rows).clamp(min=0)   # (ranges)
    elif ranges == "mse":
        lo, hi = least_error(rows, lo, hi, bits, grid)
    return lo.view(shape), hi.view(shape)


def percentile(rows: torch.Tensor, above: float = 1e-5) -> torch.Tensor:
    """What a share `above` of each row exceeds, linear between neighbours. (R, n) -> (R,)."""
    rank = above * (rows.shape[1] - 1)                      # from the top, 0 is the largest
    top = rows.topk(min(int(rank) + 2, rows.shape[1]), 1).values
    return top[:, int(rank)] * (1 - rank % 1) + top[:, -1] * (rank % 1)


def least_error(rows, lo, hi, bits: int, grid, steps: int = 50):
    """Out of `steps` shrunken copies of (lo, hi), the one with the least squared error per row."""
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
# paper's code also puts the scores (before softmax) on a grid; `attention_probs` keeps them inside.


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
    smooth: float = 0.0           # SmoothQuant's alpha; 0: off

    @property
    def per(self) -> str:
        """One range for each: weights are always symmetric, activations asymmetric."""
        return "tensor" if self.static else "token"


SCHEMES = ("w8", "w4", "w8a8", "w4a4", "w8a8-static", "w4a4-static")


def parse(name: str | Scheme, **fields) -> Scheme:
    """"w4a8-static" -> Scheme; fields (head, embed, ranges, smooth), unless None, are set.

    Default ranges: running 99.999 % percentiles if static [OASIS 1.9], else a token's extremes.
    Raises QuantError.
    """
    if isinstance(name, str):
        found = re.fullmatch(r"w(\d+)(?:a(\d+)(-static)?)?", name)
        if not found:
            raise QuantError(f"scheme {name!r}: wBITS, wBITSaBITS or wBITSaBITS-static, as in "
                             f"{', '.join(SCHEMES)}")
        weight, act, static = found.groups()
        if act is not None and not int(act):
            raise QuantError(f"scheme {name!r}: activations of 0 bits; weights alone are w{weight}")
        own = f"w{int(weight)}" + (f"a{int(act)}" if act else "") + (static or "")     # no w08
        name = Scheme(own, int(weight), int(act or 0), bool(static),
                      "percentile" if static else "minmax")
    scheme = replace(name, **{key: value for key, value in fields.items() if value is not None})
    for bits in (scheme.weight_bits, scheme.act_bits or 8):
        check_options(bits, "tensor", scheme.ranges)
    if not 0 <= scheme.smooth <= 1:
        raise QuantError(f"smooth={scheme.smooth:g}: alpha lies between 0 and 1")
    if not scheme.static and scheme.ranges == "running":
        raise QuantError(f"{scheme.name}: a running range needs batches; only static schemes do")
    return scheme


# ---------------------------------------------------------------------------- the parts, quantised

class Quantizer(nn.Module):
    """One site: activations in, activations on an asymmetric grid out.

    Dynamic: every token has its own range; one number a token (a gate) is then exact. Static: one
    range, of the values seen while `watching`, when x passes through untouched: it describes the
    model with its rounded weights, not the errors of other activations.
    """

    def __init__(self, name: str, scheme: Scheme, smooth=None):
        super().__init__()
        self.name, self.scheme = name, scheme
        self.watching = False
        self.meter = None           # [signal energy, error energy] while noise is measured
        self.register_buffer("lo", None)
        self.register_buffer("hi", None)
        self.register_buffer("smooth", smooth)      # (d), see `smoothing`

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
        z = x if self.smooth is None else x / self.smooth                           # (..., n)
        if self.watching:
            self.watch(z)
            return x
        y = on_grid(z, self.grid(z))                                                # (..., n)
        y = y if self.smooth is None else y * self.smooth                           # (..., n)
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

    integer = False                     # True: the product in int8, see `integer_product`

    def __init__(self, linear: nn.Linear, name: str, scheme: Scheme, site):
        super().__init__()
        self.name, self.bias = name, linear.bias
        self.bits = scheme.weight_bits if site.chosen(f"{name}:weight") else 0
        self.input, self.output = site(f"{name}:in"), site(f"{name}:out")
        smooth = site.smooth.get(name, 1.0)                                         # (in)
        weight = linear.weight.detach() * smooth                                    # (out, in)
        self.grid = symmetric(*extent(weight, "tensor" if scheme.static else "channel"),
                              scheme.weight_bits)
        weight = on_grid(weight, self.grid) / smooth if self.bits else linear.weight.detach()
        self.weight = nn.Parameter(weight.clone())
        self.meter = [0.0, 0.0]
        note(self.meter, linear.weight.detach(), weight)

    def forward(self, x):
        if self.integer:
            y = integer_product(self, x)                                            # (..., out)
        else:
            y = F.linear(self.input(x), self.weight, self.bias)                     # (..., out)
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
        keys, values, mask = k, v, ctx.mask
        if a.extra is not None:
            keys, values, mask = a.extra(k, v, mask)                                # (B, G, 1+S, D)
        how = dict(normalizer=c.normalizer, null_logit=a.null_logit, mask=mask,
                   gamma=c.clip_gamma, zeta=c.clip_zeta)
        probs, null = attention_probs(q, keys, **how)           # (B, H, T, S), (B, H, T)
        heads = wide(values).repeat_interleave(q.shape[1] // v.shape[1], dim=1)     # (B, H, S, D)
        out = (self.probs(probs) @ heads).to(v.dtype).transpose(1, 2)               # (B, T, H, D)
        out = self.context(out.flatten(-2)).unflatten(-1, (-1, D))                  # (B, T, H, D)
        gate = None
        if a.gate is not None:
            gate = a.gate(u, ctx)                                                   # (B, T, H, D)
            out = out * gate                                                        # (B, T, H, D)
        if ctx.record is not None:
            a.tell(ctx.record, q, keys, v, out.transpose(1, 2), null, gate, how)
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
        return grid(state) if torch.is_tensor(state) else grid(torch.stack(state)).unbind()

    def finish(self, state):
        return self.inner.finish(state)                                             # (B, T, d)

    def penalty(self, state):
        return self.inner.penalty(state)


class QuantizedAttnRes(QuantizedResidual):
    """No stream is written here: sources are sublayers' outputs, their mix is the stream."""

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
        s = torch.stack(candidates, 2)                                              # (B, T, n, d)
        if c.router_norm:
            s = s * inverse_rms(s, c.norm_eps)                                      # (B, T, n, d)
        q, k = site.wq(s[:, :, -1]) / math.sqrt(site.a), site.wk(s)     # (B, T, a), (B, T, n, a)
        g = (k @ q.unsqueeze(-1)).squeeze(-1)                                       # (B, T, n)
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

    def __init__(self, scheme: Scheme, only, n_sublayer: int, smooth: dict):
        self.scheme, self.n_sublayer, self.smooth = scheme, n_sublayer, smooth
        self.chosen = only if callable(only) else (lambda name: only is None or name in only)

    def __call__(self, name: str) -> nn.Module:
        if not (self.scheme.act_bits and self.chosen(name)):
            return nn.Identity()
        place, _, role = name.partition(":")
        read = role == "in" or place.startswith("norms.")
        return Quantizer(name, self.scheme, self.smooth.get(place) if read else None)


# ------------------------------------------------------------------------------------- quantize

@torch.no_grad()
def quantize(model, scheme: str | Scheme, calibration=None, *, only=None, **fields):
    """A quantised copy of a Transformer; the model itself stays bit-identical.

    scheme: see `parse`, which also takes the fields head, embed, ranges, smooth. calibration, for
    static schemes and smoothing: a sequence of batches of ids (B, T), one (n, T) tensor, or an
    earlier copy, which hands on what it has found. only: quantise these sites alone, a set of names
    or a test of one (`sites` lists them).
    The copy is a model like any other: eval.evaluate and generate take it.
    Raises QuantError: unknown scheme, no calibration data where it is needed.
    """
    scheme, model = parse(scheme, **fields), evaluation.unwrap(model)
    earlier = calibration if isinstance(calibration, nn.Module) else None
    batches = calibration.split(8) if torch.is_tensor(calibration) else calibration
    if (scheme.static or scheme.smooth) and earlier is None and not batches:
        raise QuantError(f"{scheme.name} needs calibration data")
    smooth = {} if not scheme.smooth else earlier.factors if earlier is not None else \
        smoothing(model, batches, scheme.smooth)
    twin = copy.deepcopy(model)
    tied = twin.head.weight is twin.embed.weight
    head = not (tied or scheme.act_bits) if scheme.head is None else scheme.head
    site = SiteMaker(scheme, only, model.config.n_sublayer, smooth)
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
    twin.factors = smooth
    if scheme.static and earlier is not None:
        found = quantizers(earlier)
        for name, q in quantizers(twin).items():
            q.lo, q.hi = found[name].lo, found[name].hi
    elif scheme.static:
        calibrate(twin, batches)
    return twin


def quantizers(model) -> dict[str, Quantizer]:
    """The activation sites of a quantised copy, by name."""
    return {m.name: m for m in model.modules() if isinstance(m, Quantizer)}


def linears(model) -> dict[str, QuantizedLinear]:
    """The quantised linear maps of a copy, by name."""
    return {m.name: m for m in model.modules() if isinstance(m, QuantizedLinear) and m.bits}


def sites(model) -> list[str]:
    """Names of all sites of a quantised copy, for `only`."""
    return sorted([*quantizers(model), *(f"{name}:weight" for name in linears(model))])


def calibrate(model, batches):
    """Fix the ranges of a copy on batches of ids, each an update of the running range."""
    watched = quantizers(model).values()
    for q in watched:
        q.watching = True
    with evaluating(model):
        for tokens in batches:
            model(tokens.to(model.embed.weight.device))
    for q in watched:
        q.watching = False


READERS = ("wq", "wk", "wv", "w_gate", "w_up")      # what reads a pre-norm


def smoothing(model, batches, alpha: float) -> dict[str, torch.Tensor]:
    """SmoothQuant's factors (arXiv 2211.10438, eq. 4): part of an activation's outlier channels is
    moved into the weights that read them, W x = (W diag s) (x / s), so that both are easy to round:

        s_j = max |x_j|^alpha / max |W_j|^(1 - alpha)        channel j, of a pre-norm's output

    One s (d,) for a norm and its readers: {place: s}. Here quantisers round x / s and multiply by s
    again, weights likewise; a server would fold s into the norm's gain. The function is the same.
    """
    peak = {}

    def record(name, l, u):
        top = u.abs().flatten(0, -2).amax(0)                                        # (d)
        peak[l] = torch.maximum(peak.get(l, top), top)

    record.names = {"norm_out"}
    with evaluating(model):
        for tokens in batches:
            model(tokens.to(model.embed.weight.device), record=record)
    factors = {}
    for l, sublayer in enumerate(model.sublayers):
        readers = {f"sublayers.{l}.{name}": getattr(sublayer, name).weight for name in READERS
                   if hasattr(sublayer, name)}
        weight = torch.stack([w.abs().amax(0) for w in readers.values()]).amax(0)   # (d)
        s = peak[l].clamp(min=1e-5) ** alpha / weight.clamp(min=1e-5) ** (1 - alpha)    # (d)
        factors |= dict.fromkeys([f"norms.{l}", *readers], s)
    return factors


# -------------------------------------------------------------------------------------- measures

def loss_of(model, windows) -> float:
    """Nats per target, as eval.evaluate's val.loss."""
    device, nll = model.embed.weight.device, 0.0
    with evaluating(model):
        for x, y in windows:
            nll += evaluation.summed_nll(model(x.to(device))[0], y.to(device))
    return nll / windows.n_targets


def size_in_bytes(model) -> int:
    """What the weights take: those on a grid packed to their bits, with fp32 scales; the rest as it
    is, a shared tensor once."""
    quantised = {id(m.weight): m for m in linears(model).values()}
    size = 0
    for p in model.parameters():
        linear = quantised.get(id(p))
        size += p.numel() * p.element_size() if linear is None else \
            -(-p.numel() * linear.bits // 8) + 4 * linear.grid.scale.numel()
    return size


def noise(model, tokens) -> dict[str, float]:
    """Signal to quantisation noise of every site of a copy, in dB, worst first: 10 log10 of the sum
    of x^2 over the sum of (rounded x - x)^2, on one batch of ids (B, T). 6 dB are one bit."""
    meters = {}
    for name, q in quantizers(model).items():
        q.meter = meters[name] = [0.0, 0.0]
    with evaluating(model):
        model(tokens.to(model.embed.weight.device))
    for q in quantizers(model).values():
        q.meter = None
    meters |= {f"{name}:weight": m.meter for name, m in linears(model).items()}
    ratio = {name: 10 * math.log10(signal / error) for name, (signal, error) in meters.items()
             if signal > 0 and 0 < error < math.inf}
    return dict(sorted(ratio.items(), key=lambda item: item[1]))


def label(scheme: Scheme) -> str:
    """The key under which metrics.json holds a scheme: its name, and what was asked beside it."""
    extra = [("head", scheme.head), ("embed", scheme.embed), ("smooth", scheme.smooth),
             (scheme.ranges, scheme.ranges != parse(scheme.name).ranges)]
    return "+".join([scheme.name, *(name for name, asked in extra if asked)])


def measure(model, tokens, schemes=SCHEMES, calibration=None, *, worst: int = 5, head=None,
            embed=None, ranges=None, smooth=None, progress: bool = False, **options) -> dict:
    """{scheme: {loss, ppl, delta_loss, bytes, worst}}: metrics.json's `quant`.

    tokens, options (T, n_sequences, batch_size, bos_policy, tokenizer, bos, eot): as for
    eval.evaluate, and the same windows. loss in nats per token, ppl = exp(loss); delta_loss: minus
    the loss in floating point on those windows. bytes: `size_in_bytes`. worst: [site, dB] of the
    sites with the lowest signal to noise (`noise`, on the first batch of windows).
    calibration: for static schemes, training data (`calibration_batches`). Raises QuantError.
    """
    model = evaluation.unwrap(model)
    windows = evaluation.open_windows(model, tokens, **options)
    truth, results = loss_of(model, windows), {}
    if not math.isfinite(truth):
        raise QuantError(f"the loss in floating point is {truth}: there is nothing to compare with")
    for name in tqdm(schemes, "quantize", disable=None if progress else True, leave=False):
        scheme = parse(name, head=head, embed=embed, ranges=ranges, smooth=smooth)
        twin = quantize(model, scheme, calibration)
        loss = loss_of(twin, windows)
        results[label(scheme)] = {
            "loss": loss, "ppl": math.exp(min(loss, 700.0)), "delta_loss": loss - truth,
            "bytes": size_in_bytes(twin),
            "worst": [list(item) for item in noise(twin, next(iter(windows))[0]).items()][:worst]}
    return results


def kind_of(site: str) -> str:
    """A site's name without its depth: "sublayers.3.w_down:in" -> "w_down:in"."""
    place = re.sub(r"\.\d+", "", site)
    return place.removeprefix("sublayers").removeprefix("residual.sites").lstrip(".:")


def attribute(model, scheme, tokens, calibration=None, *, by: str = "site", progress: bool = False,
              **options) -> dict[str, float]:
    """Where the error comes from: the change of loss with one site alone on its grid, worst first.

    by: "site", or "kind" (the same place at every depth at once), for models of many layers.
    The sum is not the loss of all sites together: errors compound. tokens, options: as `measure`.
    """
    model = evaluation.unwrap(model)
    windows = evaluation.open_windows(model, tokens, **options)
    truth, groups = loss_of(model, windows), {}
    calibrated = quantize(model, scheme, calibration)
    for site in sites(calibrated):
        groups.setdefault(site if by == "site" else kind_of(site), set()).add(site)
    change = {}
    for name, group in tqdm(groups.items(), "attribute", disable=None if progress else True,
                            leave=False):
        change[name] = loss_of(quantize(model, scheme, calibrated, only=group), windows) - truth
    return dict(sorted(change.items(), key=lambda item: -item[1]))


def calibration_batches(model, run: dict, data: str | None = None, *, T: int | None = None,
                        n_batches: int = 4, batch_size: int = 8, bos: str | None = None) -> list:
    """Batches (B, T) of the training split, spread evenly over it; four by default [OASIS 1.9].
    run: what its checkpoint says of it (tokenizer, data, bos); data: another corpus."""
    source = open_source(data or run.get("data") or "stdlib", "train",
                         tokenizer=run.get("tokenizer"))
    windows = source.windows(T or model.config.block_size, batch_size,
                             bos_policy=bos or run.get("bos") or "none")
    return [x for x, _ in windows.sequential(n_batches * batch_size)]


# ---------------------------------------------------------------------------------- real integers

def integer_product(linear: QuantizedLinear, x: torch.Tensor) -> torch.Tensor:
    """W x + b in int8 with int32 sums, what hardware would do. x (..., in) -> (..., out).

    x = s_x (c - z) with codes c in 0 .. 255, one more than int8 holds, so c - 128 is stored:
    W x = s_w s_x (W_codes (c - 128) + (128 - z) sum_j W_codes). Integers up to the last product.
    """
    q = linear.input
    x = x if q.smooth is None else x / q.smooth                                     # (..., in)
    grid, shift = q.grid(x), 2 ** (q.scheme.act_bits - 1)
    a = (encode(x, grid) - shift).to(torch.int8).flatten(0, -2)                     # (N, in)
    w = linear.codes                                                                # (out, in)
    zero = (shift - grid.zero).to(torch.int32).expand(*x.shape[:-1], 1).flatten(0, -2)  # (N, 1)
    total = torch._int_mm(a, w.T) + zero * w.sum(1, dtype=torch.int32)              # (N, out)
    scale = grid.scale.expand(*x.shape[:-1], 1).flatten(0, -2) * linear.grid.scale.view(1, -1)
    y = (total * scale).unflatten(0, x.shape[:-1]).to(x.dtype)                      # (..., out)
    return y if linear.bias is None else y + linear.bias                            # (..., out)


def use_integers(model, on: bool = True) -> int:
    """Switch a copy's linear maps to int8 products; returns how many can. Weights and inputs must
    have at most 8 bits; maps that other code reads without calling them (none, with activations
    quantised) would stay in floating point."""
    able = [m for m in linears(model).values() if m.bits <= 8 and isinstance(m.input, Quantizer)
            and m.input.scheme.act_bits <= 8]
    for m in able:
        m.integer = on
        smooth = 1.0 if m.input.smooth is None else m.input.smooth
        m.codes = encode(m.weight.detach() * smooth, m.grid).to(torch.int8) if on else None
    return len(able)


def check_integers(model, tokens, **options) -> tuple[float, float, list[list[str]]]:
    """Of a w8a8 copy: loss with rounded floats, loss in int8, a table row for each shape of map.

    The losses agree in their first digits only: where a float's last bit tips a value to the
    neighbouring level, the difference is a whole step from there on. Times: best of 5, 1024 tokens.
    """
    windows = evaluation.open_windows(model, tokens, **options)
    losses = [loss_of(model, windows)]
    use_integers(model)
    losses.append(loss_of(model, windows))
    rows, shapes = [], {tuple(m.weight.shape): m for m in linears(model).values() if m.integer}
    for (out, width), m in shapes.items():
        x = torch.randn(1024, width, generator=torch.Generator().manual_seed(0)).to(m.weight)
        with torch.no_grad():
            real, fake = integer_product(m, x), F.linear(m.input(x), m.weight, m.bias)
            a = torch.zeros(1024, width, dtype=torch.int8, device=x.device)
            times = [fastest(lambda: F.linear(x, m.weight)), fastest(lambda: integer_product(m, x)),
                     fastest(lambda: torch._int_mm(a, m.codes.T))]
        rows.append([f"{width} -> {out}", f"{(real - fake).abs().max() / fake.abs().max():.1e}",
                     *(f"{1e3 * t:.2f}" for t in times), f"{m.weight.nbytes:,}",
                     f"{m.codes.nbytes + m.grid.scale.nbytes:,}"])
    use_integers(model, False)
    return *losses, rows


def fastest(run, times: int = 5) -> float:
    """Seconds."""
    def once():
        start = time.perf_counter()
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter() - start
    once()
    return min(once() for _ in range(times))


# --------------------------------------------------------------------------------------- figures

def spike_pair(model, tokens) -> list[tuple[str, torch.Tensor]]:
    """A stream of the model with and without a massive activation: two labels, two tensors (n,).

    The stream is the one with the largest |x| / median, on ids (B, T). Massive is what exceeds 100
    and 1000 x the median [Sun 5.5]; if the model has such values they are taken out for the second
    panel, and if it has none, one of 1000 x the median is planted. The label says which.
    """
    streams = {}

    def record(name, l, x):
        streams[l] = wide(x).flatten().cpu()

    record.names = {"stream"}
    with evaluating(model):
        model(tokens.to(model.embed.weight.device), record=record)
    ratio = {l: (x.abs().max() / x.abs().median().clamp(min=1e-12)).item()
             for l, x in streams.items()}
    l = max(ratio, key=ratio.get)
    x, bar = streams[l], 1000 * streams[l].abs().median()
    massive = (x.abs() > 100) & (x.abs() >= bar)
    place = f"stream after sublayer {l}"
    if massive.any():
        return [(f"{place}, its {int(massive.sum())} massive values taken out", x[~massive]),
                (f"{place}, as it is: largest {ratio[l]:.0f} x the median", x)]
    planted = torch.cat([x, bar.view(1)])
    return [(f"{place}, as it is: largest {ratio[l]:.0f} x the median", x),
            (f"{place}, and one planted value of 1000 x the median", planted)]


def draw_grids(panels: list[tuple[str, torch.Tensor]], bits=(8, 4)):
    """Histograms of tensors with the levels of one range for all values over them: what is left of
    the body of a distribution when one value sets the step."""
    edge = max(wide(panels[0][1]).abs().quantile(0.999).item() if len(panels[0][1]) < 2 ** 24
               else panels[0][1].std().item() * 4, 1e-6)
    fig, axes = evaluation.new_figure(5.2 * len(bits), 2.9 * len(panels), len(panels), len(bits),
                                      sharex=True, sharey=True)
    for i, (title, x) in enumerate(panels):
        x = wide(x).flatten().cpu()
        for ax, b in zip(axes[i * len(bits):], bits):
            grid = asymmetric(*extent(x, "tensor", bits=b), b)
            levels = decode(torch.arange(grid.high + 1), grid)
            levels = levels[levels.abs() <= edge]
            body, step = x[x.abs() <= edge], grid.scale.item()
            ax.hist(body.numpy(), 121, range=(-edge, edge), color=evaluation.BLUE, log=True,
                    weights=torch.full_like(body, 100 / len(x)).numpy())
            ax.vlines(levels.numpy(), 0, 1, transform=ax.get_xaxis_transform(),
                      color=evaluation.RED, lw=0.4 if len(levels) > 40 else 1.2)
            lost = ((x.abs() < step / 2) & (x != 0)).double().mean().item()
            ax.set(xlim=(-edge, edge), title=f"{title}\n{b} bits: step {step:.3g}, levels in "
                   f"view: {len(levels)}, {lost:.1%} of values become 0")
            ax.title.set_fontsize(9)
        axes[i * len(bits)].set_ylabel("% of values (log)")
    for ax in axes[-len(bits):]:
        ax.set_xlabel("activation (red: levels of the grid)")
    return fig


def draw_attribution(change: dict[str, float], title: str, most: int = 25):
    """Bars: the loss that each site costs alone, the worst first."""
    worst = list(change.items())[:most]
    fig, (ax,) = evaluation.new_figure(8, 1.2 + 0.24 * len(worst))
    bars = ax.barh(range(len(worst)), [v for _, v in worst], color=evaluation.BLUE, height=0.7)
    ax.bar_label(bars, [f"{v:+.4f}" for _, v in worst], padding=3, fontsize=8)
    ax.set_yticks(range(len(worst)), [name.removeprefix("sublayers.") for name, _ in worst],
                  fontsize=8)
    ax.invert_yaxis()
    ax.margins(x=0.15)
    ax.set(title=title, xlabel="change of loss, nats per token, with this site alone quantised")
    return fig


def draw_sweep(results: dict, truth: float):
    """Loss against bits, a line for each family of schemes. results: of `measure`."""
    lines = {}
    for name, entry in results.items():
        s = parse(name.partition("+")[0])
        if s.act_bits in (0, s.weight_bits):
            family = "weights only" if not s.act_bits else \
                "weights and activations, " + ("static" if s.static else "per token")
            lines.setdefault(family, []).append((s.weight_bits, entry["loss"]))
    fig, (ax,) = evaluation.new_figure(6, 4)
    for (family, points), color, marker in zip(
            sorted(lines.items()), (evaluation.RED, evaluation.BLUE, "#009E73"), "^os"):
        ax.plot(*zip(*sorted(points)), marker=marker, color=color, label=family)
    ax.axhline(truth, color="black", ls="--", lw=1, label="floating point")
    ax.set(xlabel="bits", ylabel="loss, nats per token", title="What rounding costs")
    ax.xaxis.get_major_locator().set_params(integer=True)
    ax.legend(frameon=False)
    return fig


# --------------------------------------------------------------------------------------- program

COLUMNS = [     # for eval.compare and eval.study_table: header, path in metrics.json, format
    (f"Δ {name}", f"quant.{name}.delta_loss", "+.4f") for name in SCHEMES]
SWEEP = [name for b in (2, 3, 4, 5, 6, 8) for name in (f"w{b}", f"w{b}a{b}", f"w{b}a{b}-static")]


def table(results: dict, model) -> str:
    """Before and after, one scheme a row."""
    first = next(iter(results.values()))
    truth, size = first["loss"] - first["delta_loss"], size_in_bytes(model)
    rows = [["floating point", f"{truth:.4f}", f"{math.exp(min(truth, 700)):.3f}", "", f"{size:,}"]]
    rows += [[name, f"{r['loss']:.4f}", f"{r['ppl']:.3f}", f"{r['delta_loss']:+.4f}",
              f"{r['bytes']:,}"] for name, r in results.items()]
    return evaluation.markdown(["scheme", "loss", "ppl", "delta", "bytes"], rows)


def report_run(path: str, model=None, schemes=SCHEMES, *, data: str | None = None,
               bos: str | None = None, device: str = "cpu", draw: bool = True,
               out: str | None = None, attribution: str | None = None, sweep: bool = False,
               integers: bool = False, batches: int = 4, head=None, embed=None, ranges=None,
               smooth=None, download: bool = False, problems: dict | None = None,
               **options) -> dict:
    """Quantise a run, add `quant` to its metrics.json, draw, print. Returns `measure`'s results.

    model: the run's, if it is in memory. data, bos: by default the run's own; static ranges come
    from the training split, `batches` batches of it. attribution: None, "site" or "kind", for every
    scheme. sweep: SWEEP's bits too. integers: check w8a8 in int8. problems: GSM8K for each
    scheme, with eval.report_gsm8k's options. options: eval.evaluate's.
    """
    if model is None:
        model, run, folder = evaluation.open_run(path, device, download)
    else:
        run, folder = load_checkpoint(path).get("run") or {}, path
    folder, tokens = out or folder, evaluation.text_of(run, data)
    options = evaluation.with_defaults(run, bos, options)
    fields = dict(head=head, embed=embed, ranges=ranges, smooth=smooth)
    names = list(dict.fromkeys([*schemes, *(SWEEP if sweep else ())]))
    plans = [parse(name, **fields) for name in names]
    calibration = None
    if any(plan.static or plan.smooth for plan in plans):
        calibration = calibration_batches(model, run, data, T=options.get("T"), n_batches=batches,
                                          batch_size=options.get("batch_size", 8), bos=bos)
    results = measure(model, tokens, plans, calibration, progress=True, **options)
    print(table(results, model))
    first, figures = next(iter(results.values())), {}
    for plan in plans[:len(schemes)]:
        entry = results[label(plan)]
        worst = ", ".join(f"{name} {dB:.1f} dB" for name, dB in entry["worst"])
        print(f"{label(plan)}: lowest signal to noise: {worst}")
        if attribution:
            change = attribute(model, plan, tokens, calibration, by=attribution, progress=True,
                               **options)
            entry["attribution" if attribution == "site" else "attribution_by_kind"] = change
            figures[f"attribution-{label(plan)}"] = draw_attribution(
                change, f"{label(plan)}: {entry['delta_loss']:+.4f} nats with all sites")
        if problems:
            entry["gsm8k"] = evaluation.report_gsm8k(quantize(model, plan, calibration), run,
                                                     folder, label=label(plan), **problems)
    if sweep:
        figures["sweep"] = draw_sweep(results, first["loss"] - first["delta_loss"])
    if integers:
        fake, real, rows = check_integers(quantize(model, "w8a8"), tokens, **options)
        print(f"\nw8a8: loss {fake:.6f} with rounded floats, {real:.6f} in int8\n\n"
              + evaluation.markdown(["linear", "difference", "float ms", "int8 ms", "product alone",
                                     "bytes", "int8 bytes"], rows))
    print(f"metrics  {evaluation.save_metrics(folder, {'quant': results})}")
    if draw:
        x = next(iter(evaluation.open_windows(model, tokens, **options)))[0]
        figures["grids"] = draw_grids(spike_pair(model, x))
        paths = [evaluation.save_figure(fig, os.path.join(folder, "figures", f"quant-{name}.png"))
                 for name, fig in figures.items()]
        print("figures  " + " ".join(paths))
    return results


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="Codes: weights -2^(b-1) .. 2^(b-1) - 1 around zero, activations 0 .. 2^b - 1.\n"
               "What is quantised:\n" + "\n".join(f"  {role:10s} {text}"
                                                  for role, text in SITES.items()))
    parser.add_argument("paths", nargs="+", metavar="RUN",
                        help="run folder, checkpoint file, or Llama or Qwen3 folder")
    parser.add_argument("--scheme", nargs="+", default=list(SCHEMES), metavar="NAME",
                        help=f"wBITS, wBITSaBITS, wBITSaBITS-static (default {' '.join(SCHEMES)})")
    what = parser.add_argument_group("what is quantised, and how")
    what.add_argument("--head", action="store_const", const=True, help="the head too")
    what.add_argument("--embed", action="store_const", const=True, help="the embeddings too")
    what.add_argument("--ranges", choices=list(RANGES), help="how activations' ranges are found "
                      "(default: percentile if static, else minmax)")
    what.add_argument("--smooth", type=float, nargs="?", const=0.5, metavar="ALPHA",
                      help="SmoothQuant: move outlier channels into the weights (0.5)")
    what.add_argument("--batches", type=int, default=4,
                      help="calibration batches of the training split (default 4)")
    look = parser.add_argument_group("looking closer")
    look.add_argument("--attribute", nargs="?", const="site", choices=("site", "kind"),
                      help="one site at a time; kind: one place at all depths at a time")
    look.add_argument("--sweep", action="store_true", help="2 to 8 bits of every family")
    look.add_argument("--int8", action="store_true", help="check w8a8 with integer products")
    text = parser.add_argument_group("text and running")
    text.add_argument("--data", help="corpus name, text or token file (default: the run's own)")
    text.add_argument("--bos", choices=("none", "document", "window"),
                      help="where a BOS id is shown (default: as in training)")
    text.add_argument("--T", type=int, help="tokens per window (default: the model's block_size)")
    text.add_argument("--n-sequences", type=int, default=64,
                      help="windows to evaluate (default 64)")
    text.add_argument("--batch-size", type=int, default=8, help="windows at a time (default 8)")
    text.add_argument("--device", default="cpu", help="cpu, cuda, ... (default cpu)")
    text.add_argument("--out", help="folder for the results (default: the run's own; runs/NAME for "
                      "a pretrained folder)")
    text.add_argument("--download", action="store_true", help="a hub id may be fetched")
    text.add_argument("--no-figures", action="store_true", help="numbers only")
    evaluation.add_gsm8k_flags(parser)
    return parser


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        if args.batches < 1:
            raise QuantError(f"--batches {args.batches} must be at least 1")
        problems = args.gsm8k and {"source": args.gsm8k, **evaluation.gsm8k_options(args)}
        for path, _, out in evaluation.places(args):
            report_run(path, schemes=args.scheme, data=args.data, bos=args.bos, out=out,
                       device=args.device, draw=not args.no_figures, attribution=args.attribute,
                       sweep=args.sweep, integers=args.int8, batches=args.batches, head=args.head,
                       embed=args.embed, ranges=args.ranges, smooth=args.smooth, T=args.T,
                       n_sequences=args.n_sequences, batch_size=args.batch_size,
                       download=args.download, problems=problems)
    except evaluation.FAILURES as error:
        print(f"quantize.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("quantize.py: stopped", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
