"""Softmax1: attention that is allowed to look at nothing.

    p_j = exp(x_j) / (exp(s) + sum_i exp(x_i))        null = exp(s) / (exp(s) + sum_i exp(x_i))

Softmax must hand out a mass of one, so a head with nothing to say dumps it on a token that carries
little: the attention sink. Softmax1 (s = 0; Miller 2023; OutEffHop, arXiv 2404.03828; OASIS, arXiv
2605.17887) offers one more option, a null key of logit s and value zero; what falls on it is the
null mass. With s learned, one per head, it is the sink logit of gpt-oss.

Read first: `softmax1` (the function), `attention_probs` (the reference, and the only place in the
project that builds a T x S matrix), then `attend`, which every model calls. What comes between is
the same function made fast. `python softmax1.py` checks every path and draws the idea.

Legend: B batch, H query heads, Hkv key/value heads, T queries, S keys, D head size.
"""

from __future__ import annotations  # the kernels' parameters may say tl before it is there

import argparse
import functools
import inspect
import importlib.util
import math
import os
import statistics
import time

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

NORMALIZERS = {
    "softmax": "sums to one, the ordinary choice: null mass 0",
    "softmax1": "one more option with logit 0 and value 0 (OutEffHop, OASIS)",
    "clipped": "softmax stretched to (gamma, zeta) and clipped to (0, 1) (Bondarenko et al.)",
    "sparsemax": "Euclidean projection on the simplex: exact zeros",
    "entmax15": "1.5-entmax: between softmax and sparsemax, exact zeros",
    "sink": "softmax1 with a learned null logit per head (gpt-oss)",
}
WITH_NULL_KEY = ("softmax1", "sink")
IMPLS = ("auto", "eager", "sdpa", "cpu", "triton")
UNREACHABLE = -1e20  # a null logit so low that only a row which sees nothing falls on it: softmax
HIDDEN = -1e30       # the score of a hidden key on the fused paths: far lower still, yet finite
TRITON = importlib.util.find_spec("triton") is not None  # asked, not imported: that takes a while


# ---------------------------------------------------------------------------- the function itself

def _wide_dtype(x: torch.Tensor) -> torch.dtype:
    """fp32 (fp64 stays): a bf16 sum over a long row is wrong by a percent."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _wide(x: torch.Tensor) -> torch.Tensor:
    return x.to(_wide_dtype(x))


def _softmax_null(x: torch.Tensor, null_logit, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over `x` and one more logit of value zero -> probabilities, null mass (dim kept).

    The shift m is the maximum over *all* logits, the null's included: adding exp(0) after a shift
    by the maximum of the row alone would be another function.
    """
    x = x.clamp(max=torch.finfo(x.dtype).max)  # an fp16 logit of 1e6 is +inf, and inf - inf NaN
    s = _tensor(null_logit, x.dtype, x.device)
    m = torch.maximum(x.amax(dim, keepdim=True), s).detach()
    e, e_null = torch.exp(x - m), torch.exp(s - m)
    total = e.sum(dim, keepdim=True) + e_null
    return e / total, e_null / total


def _tensor(null_logit, dtype, device) -> torch.Tensor:
    if not isinstance(null_logit, torch.Tensor):  # filled in place: a copy would wait for the GPU
        null_logit = torch.full((), null_logit, dtype=dtype, device=device)
    return null_logit.to(device, dtype).clamp(min=UNREACHABLE)


def softmax1(logits: torch.Tensor, dim: int = -1, null_logit=0.0) -> torch.Tensor:
    """exp(x_j) / (exp(s) + sum_i exp(x_i)) along `dim`; same dtype, computed in fp32. [OASIS 1.2]

    null_logit s: a float, or a tensor that broadcasts against `logits` with size 1 along `dim`;
    -inf makes it the plain softmax. A row of -inf gives zeros (all its mass is null).
    """
    return _softmax_null(_wide(logits), null_logit, dim)[0].to(logits.dtype)


class _Entmax(torch.autograd.Function):
    """alpha-entmax along the last axis for alpha 2 (sparsemax) and 1.5, exact, by sorting.

    p = relu((alpha - 1) x - tau) ^ (1 / (alpha - 1)), tau such that p sums to one. The Jacobian
    is diag(w) - w wᵀ / sum(w) with w = p^(2 - alpha): softmax's own with w for p.
    (Martins & Astudillo 2016, arXiv 1602.02068; Peters et al. 2019, arXiv 1905.05702.)
    """

    @staticmethod
    def forward(ctx, x, alpha):
        z = (x - x.amax(-1, keepdim=True).clamp(min=UNREACHABLE)) * (alpha - 1)
        top = z.sort(-1, descending=True).values.clamp(min=-2)  # tau >= -1: lower ones are out
        rank = torch.arange(1, z.size(-1) + 1, device=z.device, dtype=z.dtype)
        mean = top.cumsum(-1) / rank  # of the `rank` largest
        if alpha == 2:  # rank * (mean - tau) = 1
            tau = mean - 1 / rank
        else:  # rank * (variance + (mean - tau)^2) = 1
            variance = (top.square().cumsum(-1) / rank - mean.square()).clamp(min=0)
            tau = mean - (1 / rank - variance).clamp(min=0).sqrt()
        size = (tau <= top).sum(-1, keepdim=True).clamp(min=1)  # of the support
        p = (z - tau.gather(-1, size - 1)).clamp(min=0) ** (1 / (alpha - 1))
        ctx.save_for_backward(p)
        ctx.alpha = alpha
        return p

    @staticmethod
    def backward(ctx, dp):
        p, = ctx.saved_tensors
        w = (p > 0).to(p.dtype) if ctx.alpha == 2 else p.sqrt()
        mean = (w * dp).sum(-1, keepdim=True) / w.sum(-1, keepdim=True).clamp(min=1e-30)
        return w * (dp - mean), None


def sparsemax(x: torch.Tensor) -> torch.Tensor:
    """Euclidean projection of each row on the simplex. Same dtype; a row of -inf gives zeros."""
    return _Entmax.apply(_wide(x), 2.0).to(x.dtype)


def entmax15(x: torch.Tensor) -> torch.Tensor:
    """1.5-entmax of each row. Same dtype; a row of -inf gives zeros."""
    return _Entmax.apply(_wide(x), 1.5).to(x.dtype)


def clipped_softmax(x: torch.Tensor, gamma: float, zeta: float) -> torch.Tensor:
    """clip((zeta - gamma) softmax(x) + gamma, 0, 1) of each row. [Bondarenko 5.3]

    What is clipped gets no gradient: a head reaches exact zeros without ever larger logits.
    """
    p = _softmax_null(_wide(x), UNREACHABLE, -1)[0]
    return ((zeta - gamma) * p + gamma).clamp(0, 1).to(x.dtype)


# ---------------------------------------------------------------------------- the reference

def attention_probs(q, k, normalizer="softmax", causal=True, null_logit=None, mask=None, *,
                    gamma=-12 / 512, zeta=1.0, scale=None) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention weights (B, H, T, S) and null mass (B, H, T), both fp32 (fp64 for fp64 inputs).

    The reference that every fast path is held to, and what recording uses: quadratic in memory.
    Arguments and errors as in `attend`.
    """
    _check(q, k, k, normalizer, null_logit, mask, gamma, zeta)
    T, S = q.size(2), k.size(2)
    with torch.autocast(q.device.type, enabled=False):
        k = _wide(k).repeat_interleave(q.size(1) // k.size(1), dim=1)  # (B, H, S, D)
        scores = (_wide(q) @ k.mT) * _scale(q, scale)  # (B, H, T, S)
        if causal:
            triangle = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)  # (T, S)
            scores = scores.masked_fill(~triangle, -math.inf)  # (B, H, T, S)
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)  # (B, H, T, S)
        if normalizer in WITH_NULL_KEY:
            s = _null_logits(q, null_logit).view(1, -1, 1, 1)  # (1, H, 1, 1)
            p, null = _softmax_null(scores, s, -1)  # (B, H, T, S), (B, H, T, 1)
            return p, null.squeeze(-1)
        if normalizer == "clipped":
            p = clipped_softmax(scores, gamma, zeta)  # (B, H, T, S)
            return p, (1 - p.sum(-1)).clamp(min=0)
        sums_to_one = {"sparsemax": sparsemax, "entmax15": entmax15,
                       "softmax": functools.partial(softmax1, null_logit=UNREACHABLE)}
        p = sums_to_one[normalizer](scores)  # (B, H, T, S)
        return p, p.new_zeros(p.shape[:-1])


def _attend_eager(q, k, v, normalizer, causal, null_logit, mask, gamma, zeta, scale):
    p, null = attention_probs(q, k, normalizer, causal, null_logit, mask,
                              gamma=gamma, zeta=zeta, scale=scale)  # (B, H, T, S), (B, H, T)
    with torch.autocast(q.device.type, enabled=False):
        v = _wide(v).repeat_interleave(q.size(1) // v.size(1), dim=1)  # (B, H, S, D)
        return (p @ v).to(q.dtype), null  # (B, H, T, D), (B, H, T)


# ---------------------------------------------------------------------------- SDPA, any device

def _attend_sdpa(q, k, v, normalizer, causal, null_logit, mask, scale):
    """Softmax1 from plain SDPA: the null key becomes a real one, a row of zeros before the others.

    Three spare columns (of eight, for alignment) carry what a zero row cannot. They meet only in
    the null key and in hidden keys:
        q  [s / scale, rounding error of that, 3e4]      score of the null key: s
        k  [1, 1, 0] null, [0, 0, -3e4] hidden, else 0   score of a hidden key: far below all
        v  [1, 0, 0] null, else 0                        out's first spare column: the null mass
    SDPA aligns its causal triangle top-left, so q gets as many rows of zeros as k has more keys,
    dropped at the end: linear memory, for the time of S queries in the place of T.
    The null mass comes out in q's dtype: 0.4 % in bf16, where the fused paths give fp32.
    """
    (B, H, T, D), S = q.shape, k.size(2)
    scale = _scale(q, scale)
    zeros = torch.zeros((B, H, T), dtype=_wide_dtype(q), device=q.device)  # (B, H, T)
    if normalizer == "softmax" and mask is None and (not causal or T == S):
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale,
                                              enable_gqa=k.size(1) != H), zeros
    null = int(normalizer in WITH_NULL_KEY)  # number of null keys
    first = S + null - T if causal else 0  # rows of zeros before the queries
    s = _null_logits(q, null_logit)[:, None, None] / scale  # (H, 1, 1)
    q, k, v = F.pad(q, (0, 8, first, 0)), F.pad(k, (0, 8, null, 0)), F.pad(v, (0, 8, null, 0))
    rough = s.to(q.dtype)
    fine = (s - rough).to(q.dtype)  # (H, 1, 1)
    spare = torch.cat([rough, fine, torch.full_like(rough, 3e4)], -1)  # (H, 1, 3)
    q = torch.cat([q[..., :D], spare.expand(B, H, q.size(2), 3), q[..., D + 3:]], -1)
    k[:, :, :null, D:D + 2] = 1  # (B, Hkv, null + S, D + 8)
    v[:, :, :null, D] = 1  # (B, Hkv, null + S, D + 8)
    if mask is not None:
        k[:, :, null:, D + 2].masked_fill_(~mask[:, 0].expand(B, 1, S), -3e4)
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale,
                                         enable_gqa=k.size(1) != H)[:, :, first:]
    mass = out[..., D].to(zeros.dtype) if null else zeros  # (B, H, T)
    if mask is not None:  # a row that sees nothing, and no null key near, averaged the hidden keys
        seen = mask.expand(-1, -1, -1, S).cumsum(-1)[..., S - T if causal else -1:]  # (B, 1, 1, ..)
        out = out.masked_fill(seen.mT == 0, 0)  # (B, H, T, D + 8)
        mass = mass.masked_fill(seen[:, 0] == 0, float(null))  # (B, H, T)
    return out[..., :D], mass  # (B, H, T, D), (B, H, T)


# ---------------------------------------------------------------------------- the fused paths

# Flash attention never holds more than a tile of the T x S matrix. Beside its output it knows the
# log-sum-exp of each row, and that is all the null key needs: it is one more term of that sum.
#
#     lse = log sum_j exp(S_j)     L = log(exp(s) + exp(lse))     null = exp(s - L)
#     P = exp(S - L)               out = P v = softmax(S) v * exp(lse - L)
#
# Backward, given dO for out and dL for L (the gradient of null reaches L through exp(s - L)):
#
#     dS = P (dO v^T - delta)      delta = rowsum(dO * out) - dL       ds = -sum(null * delta)
#     dq = scale dS k              dk = scale dS^T q                   dv = P^T dO
#
# the ordinary flash backward, with (out, L) in the place of (out, lse) and dL in delta. A row that
# sees no key has L = s, P = 0, and no gradient.

def _fused_forward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, s: torch.Tensor,
                   seen: torch.Tensor | None, causal: bool, scale: float,
                   backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    """-> out (B, H, T, D), L (B, H, T). Strides as the kernel left them: the CPU's writes
    (B, T, H, D), in which the model's next step, merging the heads, is free."""
    return FUSED[backend][0](q, k, v, s, seen, causal, scale)


def _fused_backward(dout: torch.Tensor, dL: torch.Tensor | None, q: torch.Tensor, k: torch.Tensor,
                    v: torch.Tensor, seen: torch.Tensor | None, out: torch.Tensor, L: torch.Tensor,
                    causal: bool, scale: float,
                    backend: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """-> dq, dk, dv in the dtype of q, strides as the kernel left them."""
    grads = FUSED[backend][1](dout, dL, q, k, v, seen, out, L, causal, scale)
    return tuple(g.to(q.dtype) for g in grads)


def _box(name: str, function, fake):
    """A sealed box for torch.compile, which must know shapes and strides: contiguous ones."""
    @functools.wraps(function)
    def contiguous(*args):
        return tuple(t.contiguous() for t in function(*args))
    contiguous.__signature__ = inspect.signature(function, eval_str=True)
    op = torch.library.custom_op(name, contiguous, mutates_args=())
    op.register_fake(fake)
    return op


_forward_box = _box("softmax1::forward", _fused_forward, lambda q, k, v, s, *_: (
    q.new_empty(q.shape), s.new_empty(q.shape[:3])))
_backward_box = _box("softmax1::backward", _fused_backward, lambda dout, dL, q, k, v, *_: tuple(
    t.new_empty(t.shape) for t in (q, k, v)))


class _Fused(torch.autograd.Function):
    """(q, k, v, s (H,)) -> out, L: differentiable in all of them, through both outputs."""

    @staticmethod
    def forward(ctx, q, k, v, s, seen, causal, scale, backend):
        run = _forward_box if torch.compiler.is_compiling() else _fused_forward
        out, L = run(q, k, v, s, seen, causal, scale, backend)  # (B, H, T, D), (B, H, T)
        ctx.save_for_backward(q, k, v, s, seen, out, L)
        ctx.how = causal, scale, backend
        ctx.set_materialize_grads(False)  # no gradient of null: nothing to fold in
        return out, L

    @staticmethod
    @once_differentiable  # a second derivative is an error, not a wrong number
    def backward(ctx, dout, dL):
        q, k, v, s, seen, out, L = ctx.saved_tensors
        dout = torch.zeros_like(out) if dout is None else _rows(dout)  # (B, H, T, D)
        run = _backward_box if torch.compiler.is_compiling() else _fused_backward
        dq, dk, dv = run(dout, dL, q, k, v, seen, out, L, *ctx.how)
        ds = None
        if ctx.needs_input_grad[3]:
            delta = (_wide(dout) * _wide(out)).sum(-1) - (0 if dL is None else dL)  # (B, H, T)
            ds = -(torch.exp(s[:, None] - L) * delta).sum((0, 2))  # (H,)
        return dq, dk, dv, ds, None, None, None, None


def _attend_fused(q, k, v, normalizer, causal, null_logit, mask, scale, backend):
    null_key = normalizer in WITH_NULL_KEY
    s = _null_logits(q, null_logit if null_key else UNREACHABLE)  # (H,)
    out, L = _Fused.apply(_rows(q), _rows(k), _rows(v), s, mask, causal, _scale(q, scale), backend)
    return out, torch.exp(s[:, None] - L) if null_key else torch.zeros_like(L)


def _rows(x):
    """Kernels walk along contiguous rows; every other stride is free."""
    return x if x.stride(-1) == 1 else x.contiguous()


# ---------------------------------------------------------------------------- fused, CPU

CPU_HAS_BF16 = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: True)()


def _key_blocks(T: int, S: int, causal: bool) -> list[tuple[slice, bool]]:
    """The CPU kernel aligns its causal triangle top-left: a chunk of T < S queries sees the S - T
    older keys whole, then its own T keys through the triangle. L joins the two exactly."""
    if not causal or T == S:
        return [(slice(0, S), causal)]
    return [(slice(0, S - T), False), (slice(S - T, S), True)]


def _key_bias(seen, q, S):
    """0 where a key may be seen, HIDDEN elsewhere; never wider than the mask it was given."""
    if seen is None:
        return None
    bias = torch.zeros_like(seen, dtype=q.dtype).masked_fill_(~seen, HIDDEN)
    return bias.expand(*bias.shape[:3], S)  # (B or 1, H or 1, T or 1, S)


def _cpu_forward(q, k, v, s, seen, causal, scale):
    if q.dtype == torch.float16:  # HIDDEN is out of its range, and no CPU is fast in it
        out, L = _cpu_forward(q.float(), k.float(), v.float(), s, seen, causal, scale)
        return out.half(), L
    bias, outs, lses = _key_bias(seen, q, k.size(2)), [], []
    for keys, triangle in _key_blocks(q.size(2), k.size(2), causal):
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k[:, :, keys], v[:, :, keys], 0.0, triangle, scale=scale,
            attn_mask=None if bias is None else bias[..., keys])  # (B, H, T, D), (B, H, T)
        outs.append(out)
        lses.append(lse)
    L = functools.reduce(torch.logaddexp, lses, s[:, None]).contiguous()  # (B, H, T)
    parts = [out.mul_(torch.exp(lse - L).unsqueeze(-1)) for out, lse in zip(outs, lses)]
    return functools.reduce(torch.add, parts), L  # (B, H, T, D), (B, H, T)


def _cpu_backward(dout, dL, q, k, v, seen, out, L, causal, scale):
    """The kernel forms delta itself, as rowsum(dO * out), and uses `out` for nothing else. So dL is
    folded into out along dO; where a row's dO is zero, it travels in one more column instead."""
    if q.dtype == torch.float16 or q.dtype == torch.bfloat16 and not CPU_HAS_BF16:
        # four times faster than the bf16 backward of a CPU that has no bf16 units
        dout, q, k, v, out = (t.float() for t in (dout, q, k, v, out))
    if dL is not None:
        norm2 = dout.square().sum(-1, dtype=L.dtype)  # (B, H, T)
        if ((norm2 < 1e-30) & (dL != 0)).any():
            pad = 8  # the column, and zeros that keep the rows aligned
            dout, q, k, v, out = (F.pad(t, (0, pad)) for t in (dout, q, k, v, out))
            dout[..., -1], out[..., -1] = 1, -dL
            grads = _cpu_backward(dout, None, q, k, v, seen, out, L, causal, scale)
            return [g[..., :-pad] for g in grads]
        fold = (-dL / norm2.clamp(min=1e-30)).to(q.dtype).unsqueeze(-1)  # (B, H, T, 1)
        out = torch.addcmul(out, dout, fold)  # (B, H, T, D)
    bias, parts = _key_bias(seen, q, k.size(2)), []
    for keys, triangle in _key_blocks(q.size(2), k.size(2), causal):
        parts.append(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            dout, q, k[:, :, keys], v[:, :, keys], out, L, 0.0, triangle, scale=scale,
            attn_mask=None if bias is None else bias[..., keys]))
    dq, dk, dv = zip(*parts)
    if len(parts) == 1:  # the usual case: nothing to join, nothing to copy
        return parts[0]
    return functools.reduce(torch.add, dq), torch.cat(dk, 2), torch.cat(dv, 2)


# ---------------------------------------------------------------------------- fused, Triton

# One program owns one tile of queries (forward, dq) or of keys (dk, dv) and walks along the other
# axis. The kernels work in base 2 throughout: x = S log2(e), exp2 is the hardware's own. Each walk
# has two stretches, unrolled: tiles that are wholly visible need no comparison (EDGE = 0), those on
# the causal diagonal or across the end of the sequence do (EDGE = 1). Products of fp32 tiles take
# three tf32 products each, which keeps fp32 accuracy on tensor cores. `_kernels` binds `tl`.

tl = None


def _triton_forward(Q, K, V, NULL, SEEN, OUT, LSE, q_b, q_h, q_t, k_b, k_h, k_s, v_b, v_h, v_s,
                    o_b, o_h, o_t, seen_b, seen_s, scale, H, T, S,
                    GROUP: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr,
                    MASKED: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
                    BLOCK_S: tl.constexpr):
    LOG2E = 1.4426950408889634
    t0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_T  # the longest rows start first
    b, h = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    t, d, past = t0 + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D), S - T
    rows = (t < T)[:, None] & (d < D)[None, :]
    q = tl.load(Q + b * q_b + h * q_h + t[:, None] * q_t + d[None, :], mask=rows, other=0.0)
    K += b * k_b + h // GROUP * k_h
    V += b * v_b + h // GROUP * v_h

    # The online softmax starts as if the null key had been seen: maximum s, sum 1, value 0. The
    # maximum is therefore finite from the start, and no row, however masked, can make a NaN.
    m = tl.zeros([BLOCK_T], tl.float32) + tl.load(NULL + h) * LOG2E
    l = tl.zeros([BLOCK_T], tl.float32) + 1.0
    acc = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    last = tl.minimum(S, t0 + BLOCK_T + past) if CAUSAL else S
    whole = (tl.minimum(S, t0 + past + 1) if CAUSAL else S) // BLOCK_S * BLOCK_S
    for EDGE in tl.static_range(2):
        for j0 in range(whole * EDGE, last if EDGE else whole, BLOCK_S):
            j = j0 + tl.arange(0, BLOCK_S)
            inside = (d < D)[None, :] & (j < S)[:, None] if EDGE else (d < D)[None, :]
            k = tl.load(K + j[:, None] * k_s + d[None, :], mask=inside, other=0.0)
            x = tl.dot(q, tl.trans(k), input_precision="tf32x3") * (scale * LOG2E)
            if EDGE:
                seen = (j < S)[None, :] & (t[:, None] + past >= j[None, :] if CAUSAL else True)
                x = tl.where(seen, x, float("-inf"))
            if MASKED:
                seen = tl.load(SEEN + b * seen_b + j * seen_s, mask=j < S, other=0)
                x = tl.where(seen[None, :] != 0, x, float("-inf"))
            m_new = tl.maximum(m, tl.max(x, 1))
            p, shrink = tl.exp2(x - m_new[:, None]), tl.exp2(m - m_new)
            v = tl.load(V + j[:, None] * v_s + d[None, :], mask=inside, other=0.0)
            l = l * shrink + tl.sum(p, 1)
            acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="tf32x3")
            m = m_new
    out = (acc / l[:, None]).to(OUT.dtype.element_ty)
    tl.store(OUT + b * o_b + h * o_h + t[:, None] * o_t + d[None, :], out, mask=rows)
    natural = (m + tl.log2(l)) / LOG2E
    tl.store(LSE + (b * H + h) * T + t, natural, mask=t < T)


def _triton_dq(Q, K, V, SEEN, OUT, LSE, DOUT, DLSE, DELTA, DQ, q_b, q_h, q_t, k_b, k_h, k_s,
               v_b, v_h, v_s, o_b, o_h, o_t, g_b, g_h, g_t, seen_b, seen_s, scale, H, T, S,
               GROUP: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr,
               MASKED: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
               BLOCK_S: tl.constexpr):
    LOG2E = 1.4426950408889634
    t0 = (tl.num_programs(0) - 1 - tl.program_id(0)) * BLOCK_T
    b, h = (tl.program_id(1) // H).to(tl.int64), (tl.program_id(1) % H).to(tl.int64)
    t, d, past = t0 + tl.arange(0, BLOCK_T), tl.arange(0, BLOCK_D), S - T
    rows = (t < T)[:, None] & (d < D)[None, :]
    q = tl.load(Q + b * q_b + h * q_h + t[:, None] * q_t + d[None, :], mask=rows, other=0.0)
    g = tl.load(DOUT + b * g_b + h * g_h + t[:, None] * g_t + d[None, :], mask=rows, other=0.0)
    o = tl.load(OUT + b * o_b + h * o_h + t[:, None] * o_t + d[None, :], mask=rows, other=0.0)
    K += b * k_b + h // GROUP * k_h
    V += b * v_b + h // GROUP * v_h
    row = (b * H + h) * T + t
    lse = tl.load(LSE + row, mask=t < T, other=0.0) * LOG2E
    delta = tl.sum(g.to(tl.float32) * o.to(tl.float32), 1)
    delta -= tl.load(DLSE + row, mask=t < T, other=0.0)  # all that the null's gradient changes
    tl.store(DELTA + row, delta, mask=t < T)  # for dk and dv

    dq = tl.zeros([BLOCK_T, BLOCK_D], tl.float32)
    last = tl.minimum(S, t0 + BLOCK_T + past) if CAUSAL else S
    whole = (tl.minimum(S, t0 + past + 1) if CAUSAL else S) // BLOCK_S * BLOCK_S
    for EDGE in tl.static_range(2):
        for j0 in range(whole * EDGE, last if EDGE else whole, BLOCK_S):
            j = j0 + tl.arange(0, BLOCK_S)
            inside = (d < D)[None, :] & (j < S)[:, None] if EDGE else (d < D)[None, :]
            k = tl.load(K + j[:, None] * k_s + d[None, :], mask=inside, other=0.0)
            v = tl.load(V + j[:, None] * v_s + d[None, :], mask=inside, other=0.0)
            x = tl.dot(q, tl.trans(k), input_precision="tf32x3") * (scale * LOG2E)
            p = tl.exp2(x - lse[:, None])
            if EDGE:
                seen = (j < S)[None, :] & (t[:, None] + past >= j[None, :] if CAUSAL else True)
                p = tl.where(seen, p, 0.0)
            if MASKED:
                seen = tl.load(SEEN + b * seen_b + j * seen_s, mask=j < S, other=0)
                p = tl.where(seen[None, :] != 0, p, 0.0)
            dp = tl.dot(g, tl.trans(v), input_precision="tf32x3")
            dx = p * (dp - delta[:, None])
            dq = tl.dot(dx.to(k.dtype), k, dq, input_precision="tf32x3")
    dq = (dq * scale).to(DQ.dtype.element_ty)
    tl.store(DQ + (row * D)[:, None] + d[None, :], dq, mask=rows)


def _triton_dkv(Q, K, V, SEEN, LSE, DOUT, DELTA, DK, DV, q_b, q_h, q_t, k_b, k_h, k_s,
                v_b, v_h, v_s, g_b, g_h, g_t, seen_b, seen_s, scale, H, T, S,
                GROUP: tl.constexpr, D: tl.constexpr, CAUSAL: tl.constexpr,
                MASKED: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
                BLOCK_S: tl.constexpr):
    LOG2E = 1.4426950408889634
    j0, heads = tl.program_id(0) * BLOCK_S, H // GROUP  # the first keys, seen by most, start first
    b, h = (tl.program_id(1) // heads).to(tl.int64), (tl.program_id(1) % heads).to(tl.int64)
    j, d, past = j0 + tl.arange(0, BLOCK_S), tl.arange(0, BLOCK_D), S - T
    rows = (j < S)[:, None] & (d < D)[None, :]
    k = tl.load(K + b * k_b + h * k_h + j[:, None] * k_s + d[None, :], mask=rows, other=0.0)
    v = tl.load(V + b * v_b + h * v_h + j[:, None] * v_s + d[None, :], mask=rows, other=0.0)
    if MASKED:
        seen_j = tl.load(SEEN + b * seen_b + j * seen_s, mask=j < S, other=0)

    dk = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_S, BLOCK_D], tl.float32)
    # queries [first, whole) straddle the diagonal, those from `whole` on see all of these keys;
    # rows past T load zeros and add nothing
    first = tl.maximum(j0 - past, 0) // BLOCK_T * BLOCK_T if CAUSAL else 0
    whole = tl.cdiv(tl.maximum(j0 + BLOCK_S - 1 - past, 0), BLOCK_T) * BLOCK_T if CAUSAL else 0
    for head in range(GROUP):  # every query head that shares these keys
        hq = h * GROUP + head
        for EDGE in tl.static_range(2):
            for t0 in range(first if EDGE else whole, tl.minimum(whole, T) if EDGE else T, BLOCK_T):
                t = t0 + tl.arange(0, BLOCK_T)
                inside = (t < T)[:, None] & (d < D)[None, :]
                q = tl.load(Q + b * q_b + hq * q_h + t[:, None] * q_t + d[None, :], mask=inside,
                            other=0.0)
                g = tl.load(DOUT + b * g_b + hq * g_h + t[:, None] * g_t + d[None, :], mask=inside,
                            other=0.0)
                row = (b * H + hq) * T + t
                lse = tl.load(LSE + row, mask=t < T, other=0.0) * LOG2E
                delta = tl.load(DELTA + row, mask=t < T, other=0.0)
                x = tl.dot(k, tl.trans(q), input_precision="tf32x3") * (scale * LOG2E)
                p = tl.exp2(x - lse[None, :])  # (keys, queries)
                if EDGE:
                    p = tl.where(t[None, :] + past >= j[:, None], p, 0.0)
                if MASKED:
                    p = tl.where(seen_j[:, None] != 0, p, 0.0)
                dv = tl.dot(p.to(g.dtype), g, dv, input_precision="tf32x3")
                dp = tl.dot(v, tl.trans(g), input_precision="tf32x3")
                dx = p * (dp - delta[None, :])
                dk = tl.dot(dx.to(q.dtype), q, dk, input_precision="tf32x3")
    to = ((b * heads + h) * S + j)[:, None] * D + d[None, :]
    tl.store(DK + to, (dk * scale).to(DK.dtype.element_ty), mask=rows)
    tl.store(DV + to, dv.to(DV.dtype.element_ty), mask=rows)


@functools.cache
def _kernels() -> dict:
    """The three kernels, compiled on first use; importing this file never imports triton."""
    global tl
    import triton
    import triton.language
    tl = triton.language
    return {f.__name__: triton.jit(f) for f in (_triton_forward, _triton_dq, _triton_dkv)}


def _blocks(kernel: str, block_d: int, itemsize: int) -> tuple[int, int, int, int]:
    """BLOCK_T, BLOCK_S, warps, stages: the largest tried that need at most 99 KB of shared memory
    (consumer cards) and spill no register, on sm_80 and on sm_90. The tests compile them all."""
    narrow = block_d <= 64
    if itemsize == 4:
        warps = 8 if kernel == "_triton_dkv" else 4
        return (32, 32, warps, 1) if narrow else (16, 16, warps, 1)
    return {"_triton_forward": (128, 64, 8, 3 if narrow else 2),
            "_triton_dq": (64, 64, 4 if narrow else 8, 2),
            "_triton_dkv": (32, 128 if narrow else 64, 8, 2)}[kernel]


_fitted = {}  # (kernel, BLOCK_D, itemsize) -> smaller tiles, on a card where those above do not fit


def _launch(kernel: str, length: int, programs: int, args: tuple, q, group, causal, masked):
    """Run a kernel over `length` rows of its own axis, for `programs` (batch, head) pairs."""
    from triton.runtime.errors import OutOfResources
    block_d = max(16, 1 << (q.size(3) - 1).bit_length())
    key = kernel, block_d, q.element_size()
    while True:
        block_t, block_s, warps, stages = _fitted.get(key) or _blocks(*key)
        tile = block_s if kernel == "_triton_dkv" else block_t
        try:
            with torch.cuda.device_of(q):
                return _kernels()[kernel][(-(-length // tile), programs)](
                    *args, GROUP=group, D=q.size(3), CAUSAL=causal, MASKED=masked, BLOCK_D=block_d,
                    BLOCK_T=block_t, BLOCK_S=block_s, num_warps=warps, num_stages=stages)
        except OutOfResources:
            if block_t == block_s == 16:
                raise
            _fitted[key] = max(16, block_t // 2), max(16, block_s // 2), warps, 1
            say_once(f"{kernel}: tiles of {block_t} x {block_s} do not fit this card: halved")


def _seen_bytes(seen, q, S):
    """A padding mask (B or 1, 1, 1, S or 1) as bytes (B, S) and its two strides."""
    if seen is None:
        return None, 0, 0
    seen = seen[:, 0, 0].to(torch.int8).expand(q.size(0), S)  # (B, S)
    return seen, *seen.stride()


def _run_forward(q, k, v, s, seen, causal, scale):
    (B, H, T, D), (_, Hkv, S, _) = q.shape, k.shape
    out, L = torch.empty_like(q, memory_format=torch.contiguous_format), s.new_empty(B, H, T)
    seen, *seen_strides = _seen_bytes(seen, q, S)
    strides = (n for x in (q, k, v, out) for n in x.stride()[:3])
    args = q, k, v, s.contiguous(), seen, out, L, *strides, *seen_strides, scale, H, T, S
    _launch("_triton_forward", T, B * H, args, q, H // Hkv, causal, seen is not None)
    return out, L  # (B, H, T, D), (B, H, T)


def _run_backward(dout, dL, q, k, v, seen, out, L, causal, scale):
    (B, H, T, D), (_, Hkv, S, _) = q.shape, k.shape
    dL = torch.zeros_like(L) if dL is None else dL.contiguous()  # (B, H, T)
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    delta = torch.empty_like(L)  # (B, H, T)
    seen, *seen_strides = _seen_bytes(seen, q, S)
    end = *seen_strides, scale, H, T, S
    args = (q, k, v, seen, out, L, dout, dL, delta, dq,
            *(n for x in (q, k, v, out, dout) for n in x.stride()[:3]), *end)
    _launch("_triton_dq", T, B * H, args, q, H // Hkv, causal, seen is not None)
    args = (q, k, v, seen, L, dout, delta, dk, dv,
            *(n for x in (q, k, v, dout) for n in x.stride()[:3]), *end)
    _launch("_triton_dkv", S, B * Hkv, args, q, H // Hkv, causal, seen is not None)
    return dq, dk, dv


FUSED = {"cpu": (_cpu_forward, _cpu_backward), "triton": (_run_forward, _run_backward)}


# ---------------------------------------------------------------------------- one call for all

def _scale(q, scale):
    return 1 / math.sqrt(q.size(-1)) if scale is None else scale


def _null_logits(q, null_logit):
    """The null logit of each head, (H,), fp32 (fp64 beside fp64 queries)."""
    s = _tensor(0.0 if null_logit is None else null_logit, _wide_dtype(q), q.device)
    return s.expand(q.size(1))  # (H,)


def _check(q, k, v, normalizer, null_logit, mask, gamma, zeta):
    """One clear ValueError for what would otherwise be a wrong number or an out-of-bounds read."""
    def need(ok, message, *what):       # formatted on failure only: decoding calls this often
        if not ok:
            raise ValueError("attend: " + message.format(*what))
    need(normalizer in NORMALIZERS, "normalizer is one of {}, not {!r}", list(NORMALIZERS),
         normalizer)
    need(q.dim() == k.dim() == v.dim() == 4, "q, k and v are (batch, heads, length, head_dim)")
    (B, H, T, D), (_, Hkv, S, _) = q.shape, k.shape
    need(k.shape == v.shape == (B, Hkv, S, D) and Hkv and H % Hkv == 0,
         "shapes q {}, k {}, v {} do not fit together", *map(tuple, (q.shape, k.shape, v.shape)))
    need(q.numel() and k.numel(), "nothing to attend to: q {}, k {}", tuple(q.shape),
         tuple(k.shape))
    need(q.dtype == k.dtype == v.dtype, "dtypes differ: q {}, k {}, v {}", q.dtype, k.dtype,
         v.dtype)
    need(q.device == k.device == v.device, "devices differ: {}, {}, {}", q.device, k.device,
         v.device)
    need(normalizer != "sink" or null_logit is not None, "sink needs its learned null_logit (H,)")
    need(null_logit is None or normalizer in WITH_NULL_KEY, "{} has no null_logit", normalizer)
    if isinstance(null_logit, torch.Tensor):
        need(null_logit.shape in ((), (1,), (H,)), "null_logit is one number or ({},) numbers", H)
    if mask is not None:
        need(mask.dtype == torch.bool, "mask is boolean, True = may be seen")
        need(mask.device == q.device, "mask is on {}, q on {}", mask.device, q.device)
        need(mask.dim() == 4 and all(m in (1, n) for m, n in zip(mask.shape, (B, H, T, S))),
             "mask {} does not broadcast to {}", tuple(mask.shape), (B, H, T, S))
    need(gamma <= 0 and zeta >= 1, "clipped needs gamma <= 0 and zeta >= 1: {}, {}", gamma, zeta)


def _refusal(impl, normalizer, q, k, causal, mask) -> str | None:
    """Why `impl` cannot do this call; None when it can."""
    if impl == "eager":
        return None
    if normalizer not in ("softmax", *WITH_NULL_KEY):
        return f"{normalizer} needs its whole row at once: only eager does that"
    if causal and q.size(2) > k.size(2):
        return "more causal queries than keys: only eager does that"
    if impl == "cpu":
        return None if q.device.type == "cpu" else f"the tensors are on {q.device}"
    if mask is not None and mask.size(1) * mask.size(2) > 1:
        return "a mask that differs by head or by query: only eager and cpu do that"
    return _triton_refusal(normalizer, q) if impl == "triton" else None


def _triton_refusal(normalizer, q) -> str | None:
    if normalizer == "softmax":
        return "softmax is SDPA's own"
    if not TRITON:
        return "triton is not installed (pip install triton)"
    if q.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"the tensors are on {q.device}, the kernels need CUDA"
    if q.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        return f"the kernels have no {q.dtype}"
    if q.size(3) > 128:
        return f"head size {q.size(3)} is above the kernels' 128"
    if max(q.size(0) * q.size(1), 1) > 65535:
        return "more than 65535 batch entries times heads"
    return None


@functools.cache
def say_once(line: str) -> None:
    print(line, flush=True)


def _choices(normalizer: str, device_type: str, plain: bool = True) -> tuple[str, ...]:
    """What `auto` tries, best first. plain: no mask, and queries and keys of equal length."""
    if normalizer == "softmax" and (plain or device_type != "cpu"):
        return "sdpa", "eager"
    first = {"cpu": ("cpu",), "cuda": ("triton", "sdpa")}.get(device_type, ("sdpa",))
    return *first, "eager"


def attend(q, k, v, normalizer="softmax", causal=True, null_logit=None, mask=None, impl="auto", *,
           gamma=-12 / 512, zeta=1.0, scale=None) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention -> out (B, H, T, D) in q's dtype and null mass (B, H, T) in fp32.

    q (B, H, T, D); k, v (B, Hkv, S, D): each key/value head serves H / Hkv query heads in a row.
    causal: query t sees the keys j <= t + S - T (aligned at the end, as decoding needs).
    mask: boolean, True = may be seen, broadcasts to (B, H, T, S); (B, 1, 1, S) for padding.
    null_logit: a number or (H,) numbers, learned for "sink"; for "softmax1" 0 unless given.
    gamma, zeta: of "clipped"; the default is OPT's -12 / 512. scale: of q k^T, 1 / sqrt(D).
    impl: "auto", or one of "eager", "sdpa", "cpu", "triton" by force.

    Both outputs are differentiable. The null mass is 1 - sum(p) where rows may sum to less than
    one, else zeros: a row that sees nothing gives out 0 and null 1 (softmax1, sink, clipped) or
    null 0 (softmax, sparsemax, entmax15), and no gradient. Under autocast q, k, v are cast.
    ValueError for shapes or options that do not fit, and for an impl that cannot do the call.
    """
    if torch.is_autocast_enabled(q.device.type):
        q, k, v = (t.to(torch.get_autocast_dtype(q.device.type)) for t in (q, k, v))
    _check(q, k, v, normalizer, null_logit, mask, gamma, zeta)
    if impl not in IMPLS:
        raise ValueError(f"attend: impl is one of {IMPLS}, not {impl!r}")
    causal = causal and q.size(2) > 1  # the last query sees everything
    plain = mask is None and (not causal or q.size(2) == k.size(2))
    choices = _choices(normalizer, q.device.type, plain) if impl == "auto" else (impl,)
    refusals = []
    for name in choices:
        if (refusal := _refusal(name, normalizer, q, k, causal, mask)) is None:
            break
        refusals.append(refusal)
    else:  # "eager", the last that "auto" tries, refuses nothing
        raise ValueError(f"attend: impl {impl!r}: {refusals[0]}")
    if choices[0] == "triton" and refusals and normalizer in WITH_NULL_KEY:
        say_once(f"softmax1: {refusals[0]}: {name} instead")
    if name == "eager":
        return _attend_eager(q, k, v, normalizer, causal, null_logit, mask, gamma, zeta, scale)
    if name == "sdpa":
        return _attend_sdpa(q, k, v, normalizer, causal, null_logit, mask, scale)
    return _attend_fused(q, k, v, normalizer, causal, null_logit, mask, scale, name)


def describe(normalizer: str, device_type: str) -> str:
    """One phrase for a run's header: which implementation `attend` picks by itself."""
    names = {"eager": "eager, quadratic memory", "sdpa": "SDPA", "cpu": "fused flash for CPU",
             "triton": "Triton kernels" if TRITON else "SDPA with a zero key (no triton)"}
    if normalizer not in ("softmax", *WITH_NULL_KEY):
        return names["eager"]
    first = _choices(normalizer, device_type)[0]
    return "SDPA with a zero key" if first == "sdpa" and normalizer != "softmax" else names[first]


# ---------------------------------------------------------------------------- the self-check

SHAPES = {"cpu": [((1, 8, 512, 64), torch.float32), ((1, 4, 512, 64), torch.bfloat16),
                  ((1, 2, 1024, 128), torch.float32)],
          "cuda": [((8, 16, 2048, 64), torch.bfloat16), ((4, 16, 4096, 128), torch.bfloat16),
                   ((4, 8, 1000, 80), torch.float16), ((4, 8, 1024, 64), torch.float32)]}


def _flex(q, k, v):
    """The same function from FlexAttention: its log-sum-exp, and a sigmoid."""
    from torch.nn.attention import flex_attention as flex
    mask = flex.create_block_mask(lambda b, h, t, j: t >= j, None, None, q.size(2), k.size(2),
                                  device=q.device)
    out, lse = _compiled(flex.flex_attention)(q, k, v, block_mask=mask, return_lse=True)
    return out * torch.sigmoid(lse).unsqueeze(-1).to(out.dtype), torch.sigmoid(-lse)


@functools.cache
def _compiled(f):
    return torch.compile(f, dynamic=False)


def _paths(device: str) -> dict:
    """Every way to compute Softmax1 on this device, by name."""
    impls = {"cpu": ("eager", "sdpa", "cpu"), "cuda": ("eager", "sdpa") + ("triton",) * TRITON}
    paths = {impl: functools.partial(attend, normalizer="softmax1", impl=impl)
             for impl in impls[device]}
    return paths | ({"flex": _flex} if device == "cuda" and TRITON else {})


def max_relative_error(path, shape=(1, 2, 64, 32), dtype=torch.float32, device="cpu", shift=-4.0):
    """Worst of out, null, dq, dk, dv against the fp64 reference: max |a - b| / max |b|, where for
    the null mass each row counts by itself. Logits near `shift`: the null carries much of the mass.
    """
    make = torch.Generator().manual_seed(0)
    q, k, v, g = (torch.randn(shape, generator=make) for _ in range(4))
    q[..., 0], k[..., 0] = 4, shift / 4 * math.sqrt(shape[-1])  # adds `shift` to every logit
    g_null = torch.randn(shape[:3], generator=make)

    def run(f, dtype, wide):
        inputs = [x.to(dtype).to(device, wide).requires_grad_() for x in (q, k, v)]
        out, null = f(*inputs)
        cotangents = [g.to(dtype).to(out), g_null.to(null)]
        return [out, null, *torch.autograd.grad([out, null], inputs, cotangents)]
    reference = run(functools.partial(attend, normalizer="softmax1", impl="eager"), dtype,
                    torch.float64)
    errors = [(a.double() - b).abs() / (b if i == 1 else b.abs().max())
              for i, (a, b) in enumerate(zip(run(path, dtype, dtype), reference))]
    return max(e.max().item() for e in errors)


def time_ratios(paths: dict, shape, dtype, device="cpu", rounds=5) -> dict:
    """{path: [forward, forward + backward, the same with a null gradient]}, time over that of plain
    causal SDPA (softmax, no null), medians over interleaved rounds; None where memory ran out."""
    q, k, v = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    g, g_null = torch.randn_like(q), torch.randn(shape[:3], device=device)

    def once(f, kind):
        start = time.perf_counter()
        with torch.set_grad_enabled(kind > 0):
            out, null = f(q, k, v)
        if kind:
            outputs = ([out], [g]) if kind == 1 else ([out, null], [g, g_null.to(null)])
            torch.autograd.grad(outputs[0], (q, k, v), outputs[1])
        if device == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - start
    seconds = {}
    for i in range(rounds + 2):  # two to warm up
        for name, f in {"plain": functools.partial(attend, impl="sdpa"), **paths}.items():
            for kind in range(2 if name == "plain" else 3):
                try:
                    seconds.setdefault((name, kind), []).append(once(f, kind))
                except torch.cuda.OutOfMemoryError:
                    seconds[name, kind] = [math.nan] * (rounds + 2)
    median = {key: statistics.median(times[2:]) for key, times in seconds.items()}
    return {name: [median[name, kind] / median["plain", min(kind, 1)] for kind in range(3)]
            for name in paths}


def self_check(device: str = "cpu") -> bool:
    """Print the table; True when every path holds the reference within its dtype's rounding."""
    where = f"{torch.get_num_threads()} threads"
    where = torch.cuda.get_device_name() if device == "cuda" else where
    print(f"Softmax1 on {device} ({where}), torch {torch.__version__}; time / plain causal SDPA\n")
    print(f"{'(B, H, T, D)':>20} {'dtype':>9} {'path':>7} {'max rel. error':>15}"
          f" {'forward':>8} {'+ backward':>11} {'+ null grad':>12}")
    good = True
    for shape, dtype in SHAPES[device]:
        paths, small = _paths(device), (1, 2, min(shape[2], 512), shape[3])
        ratios = time_ratios(paths, shape, dtype, device)
        for name, path in paths.items():
            error = max_relative_error(path, small, dtype, device)
            ok = error < 32 * torch.finfo(dtype).eps
            good &= ok
            print(f"{str(shape):>20} {str(dtype)[6:]:>9} {name:>7} {error:>15.1e}"
                  f" {ratios[name][0]:>8.2f} {ratios[name][1]:>11.2f} {ratios[name][2]:>12.2f}"
                  + ("" if ok else "   WRONG"))
    return good


def draw(path: str) -> None:
    """The idea in one picture: where the mass goes as all logits of a row fall together."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    shift = torch.linspace(6, -6, 241)
    logits = torch.tensor([1.5, 0.5, 0.0, -0.5, -1.5]) + shift[:, None]  # (241, 5)
    fig, axes = plt.subplots(1, 2, figsize=(9, 3.6), sharey=True, layout="constrained")
    shades = [plt.cm.Blues(x) for x in (0.85, 0.7, 0.55, 0.4, 0.25)]
    for ax, s, title in zip(axes, (-math.inf, 0.0), ("softmax", "Softmax1")):
        p = softmax1(logits, null_logit=s)  # (241, 5)
        areas = [*p.T.numpy(), (1 - p.sum(-1)).clamp(min=0).numpy()]
        ax.stackplot(shift.numpy(), areas, colors=[*shades, "#e8a33d"], edgecolor="white", lw=0.5)
        ax.set(title=title, xlabel="mean logit of the row", xlim=(6, -6), ylim=(0, 1))
    axes[0].set_ylabel("attention mass")
    axes[0].text(0, 0.5, "five keys share a mass of one,\nhowever little they match",
                 ha="center", va="center", bbox=dict(fc="white", ec="none", alpha=0.85))
    axes[1].text(3.4, 0.5, "five keys", ha="center", bbox=dict(fc="white", ec="none", alpha=0.85))
    axes[1].text(-3.4, 0.6, "null: attend\nto nothing", ha="center")
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    fig.savefig(path + ".tmp", format="png", dpi=150)
    os.replace(path + ".tmp", path)
    print(f"figure: {path}\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="check every Softmax1 path, draw the idea")
    parser.add_argument("--device", choices=SHAPES, default="cpu", help="where to run the check")
    parser.add_argument("--figure", default="figures/softmax1.png", help="where to put the picture")
    args = parser.parse_args()
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("--device cuda: no CUDA device here")
    try:
        draw(args.figure)
    except OSError as error:
        parser.error(f"cannot write the figure: {error}")
    good = self_check(args.device)
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
