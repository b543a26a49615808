"""Softmax1: attention that is allowed to look at nothing.

    p_j = exp(x_j) / (exp(s) + sum_i exp(x_i))        null = exp(s) / (exp(s) + sum_i exp(x_i))

Softmax must hand out a mass of one, so a head with nothing to say dumps it on a token that carries
little: the attention sink. Softmax1 (s = 0; Miller 2023; OutEffHop, arXiv 2404.03828; OASIS, arXiv
2605.17887) adds one more option, a null key with the fixed logit s and the value zero. Whatever falls
on it is the null mass. A learned s per head is the sink logit of gpt-oss.

Read first: `softmax1` (the function), `attention_probs` (the reference, and the only place in the
project that builds a T x S matrix), then `attend`, which every model calls.

Legend: B batch, H query heads, Hkv key/value heads, T queries, S keys, D head size.
"""

import functools
import math

import torch
import torch.nn.functional as F

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


# ---------------------------------------------------------------------------- the function itself

def _wide(x: torch.Tensor) -> torch.Tensor:
    """fp32 (fp64 stays): a bf16 sum over a long row is wrong by a percent."""
    return x if x.dtype == torch.float64 else x.float()


def _softmax_null(x: torch.Tensor, null_logit, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Softmax over `x` and one more logit with value zero -> (probabilities, null mass, kept dim).

    The shift m is the maximum over *all* logits, the null included: adding exp(0) after a shift by
    the row maximum alone would be another function. null_logit = -inf is the plain softmax.
    """
    big = torch.finfo(x.dtype).max
    x = x.clamp(max=big)  # an fp16 logit of 1e6 is +inf, and inf - inf is no number
    s = torch.as_tensor(null_logit, dtype=x.dtype, device=x.device)
    m = torch.maximum(x.amax(dim, keepdim=True), s).clamp(min=-big).detach()
    e, e_null = torch.exp(x - m), torch.exp(s - m)
    total = (e.sum(dim, keepdim=True) + e_null).clamp(min=1)  # 0 only where nothing may be seen
    return e / total, e_null / total


def softmax1(logits: torch.Tensor, dim: int = -1, null_logit=0.0) -> torch.Tensor:
    """exp(x_j) / (exp(s) + sum_i exp(x_i)) along `dim`, same dtype, computed in fp32. [OASIS 1.2]

    null_logit s: a float, or a tensor that broadcasts against `logits` with size 1 along `dim`.
    A row of -inf gives zeros (all its mass is null), with zero gradients.
    """
    return _softmax_null(_wide(logits), null_logit, dim)[0].to(logits.dtype)


class _Entmax(torch.autograd.Function):
    """alpha-entmax for alpha 2 (sparsemax) and 1.5, along the last axis, exact by sorting.

    p = relu((alpha - 1) x - tau) ^ (1 / (alpha - 1)) with tau such that p sums to one. The Jacobian
    is diag(s) - s sᵀ / sum(s) with s = p^(2 - alpha): softmax's own, with s in the place of p.
    (Martins & Astudillo 2016, arXiv 1602.02068; Peters et al. 2019, arXiv 1905.05702.)
    """

    @staticmethod
    def forward(ctx, x, alpha):
        z = (x - x.amax(-1, keepdim=True).clamp(min=torch.finfo(x.dtype).min)) * (alpha - 1)
        top = z.sort(-1, descending=True).values.clamp(min=-2)  # tau >= -1: below is out
        rank = torch.arange(1, z.size(-1) + 1, device=z.device, dtype=z.dtype)
        mean = top.cumsum(-1) / rank
        if alpha == 2:
            tau = mean - 1 / rank
        else:  # rank * (variance + (mean - tau)^2) = 1
            variance = (top.square().cumsum(-1) / rank - mean.square()).clamp(min=0)
            tau = mean - (1 / rank - variance).clamp(min=0).sqrt()
        size = (tau <= top).sum(-1, keepdim=True).clamp(min=1)
        p = (z - tau.gather(-1, size - 1)).clamp(min=0) ** (1 / (alpha - 1))
        ctx.save_for_backward(p)
        ctx.alpha = alpha
        return p

    @staticmethod
    def backward(ctx, dp):
        p, = ctx.saved_tensors
        s = (p > 0).to(p.dtype) if ctx.alpha == 2 else p.sqrt()
        mean = (s * dp).sum(-1, keepdim=True) / s.sum(-1, keepdim=True).clamp(min=1e-30)
        return s * (dp - mean), None


def sparsemax(x: torch.Tensor) -> torch.Tensor:
    """Euclidean projection of each row on the simplex. Same dtype; a row of -inf gives zeros."""
    return _Entmax.apply(_wide(x), 2.0).to(x.dtype)


def entmax15(x: torch.Tensor) -> torch.Tensor:
    """1.5-entmax of each row. Same dtype; a row of -inf gives zeros."""
    return _Entmax.apply(_wide(x), 1.5).to(x.dtype)


def clipped_softmax(x: torch.Tensor, gamma: float, zeta: float) -> torch.Tensor:
    """clip((zeta - gamma) softmax(x) + gamma, 0, 1). [Bondarenko 5.3]

    What is clipped gets no gradient: a head can reach exact zeros without growing its logits.
    """
    p = _softmax_null(_wide(x), -math.inf, -1)[0]
    return ((zeta - gamma) * p + gamma).clamp(0, 1).to(x.dtype)


# ---------------------------------------------------------------------------- the reference

def _may_see(q, k, causal, mask):
    """Boolean (.., T, S), True where a query may look; None when it may look everywhere."""
    T, S = q.size(-2), k.size(-2)
    if causal and T > 1:
        lower = torch.ones(T, S, dtype=torch.bool, device=q.device).tril(S - T)  # (T, S)
        mask = lower if mask is None else mask & lower
    return mask


def attention_probs(q, k, normalizer="softmax", causal=True, null_logit=None, mask=None, *,
                    gamma=-12 / 512, zeta=1.0, scale=None) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention weights (B, H, T, S) and null mass (B, H, T), both fp32: the reference.

    Arguments as in `attend`. For recording and for tests; quadratic in memory.
    """
    _check(q, k, k, normalizer, null_logit, mask, gamma, zeta)
    with torch.autocast(q.device.type, enabled=False):
        k = _wide(k).repeat_interleave(q.size(1) // k.size(1), dim=1)  # (B, H, S, D)
        scores = (_wide(q) @ k.mT) * _scale(q, scale)  # (B, H, T, S)
        seen = _may_see(q, k, causal, mask)
        if seen is not None:
            scores = scores.masked_fill(~seen, -math.inf)  # (B, H, T, S)
        if normalizer in WITH_NULL_KEY:
            s = _null_logits(q, null_logit).view(1, -1, 1, 1)  # (1, H, 1, 1)
            p, null = _softmax_null(scores, s, -1)
            return p, null.squeeze(-1)  # (B, H, T, S), (B, H, T)
        if normalizer == "clipped":
            p = clipped_softmax(scores, gamma, zeta)  # (B, H, T, S)
            return p, (1 - p.sum(-1)).clamp(min=0)  # (B, H, T, S), (B, H, T)
        p = {"sparsemax": sparsemax, "entmax15": entmax15}.get(
            normalizer, lambda x: _softmax_null(x, -math.inf, -1)[0])(scores)
        return p, p.new_zeros(p.shape[:-1])  # (B, H, T, S), (B, H, T)


def _attend_eager(q, k, v, normalizer, causal, null_logit, mask, gamma, zeta, scale):
    p, null = attention_probs(q, k, normalizer, causal, null_logit, mask,
                              gamma=gamma, zeta=zeta, scale=scale)  # (B, H, T, S), (B, H, T)
    with torch.autocast(q.device.type, enabled=False):
        v = _wide(v).repeat_interleave(q.size(1) // v.size(1), dim=1)  # (B, H, S, D)
        return (p @ v).to(q.dtype), null  # (B, H, T, D), (B, H, T)


# ---------------------------------------------------------------------------- SDPA

def _attend_sdpa(q, k, v, normalizer, causal, null_logit, mask, gamma, zeta, scale):
    out = F.scaled_dot_product_attention(q, k, v, is_causal=causal and q.size(2) > 1, scale=scale,
                                         enable_gqa=k.size(1) != q.size(1))  # (B, H, T, D)
    return out, torch.zeros(q.shape[:3], dtype=_wide(q[:0]).dtype, device=q.device)


# ---------------------------------------------------------------------------- one call for all

def _scale(q, scale):
    return 1 / math.sqrt(q.size(-1)) if scale is None else scale


def _null_logits(q, null_logit):
    """The null logit of each head, (H,), fp32 (fp64 beside fp64 queries)."""
    s = torch.as_tensor(0.0 if null_logit is None else null_logit, device=q.device)
    return s.to(_wide(q[:0]).dtype).expand(q.size(1))  # (H,)


def _check(q, k, v, normalizer, null_logit, mask, gamma, zeta):
    """One clear ValueError for what would otherwise be a wrong number or an out-of-bounds read."""
    def need(ok, message):
        if not ok:
            raise ValueError(f"attend: {message}")
    need(normalizer in NORMALIZERS, f"unknown normalizer {normalizer!r}; one of {list(NORMALIZERS)}")
    need(q.dim() == k.dim() == v.dim() == 4, "q, k and v are (batch, heads, length, head_dim)")
    (B, H, T, D), (_, Hkv, S, _) = q.shape, k.shape
    need(k.shape == v.shape == (B, Hkv, S, D) and H % Hkv == 0,
         f"shapes q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)} do not fit together")
    need(q.dtype == k.dtype == v.dtype, f"dtypes differ: {q.dtype}, {k.dtype}, {v.dtype}")
    need(normalizer != "sink" or null_logit is not None, "sink needs its learned null_logit (H,)")
    need(null_logit is None or normalizer in WITH_NULL_KEY, f"{normalizer} has no null_logit")
    if isinstance(null_logit, torch.Tensor):
        need(null_logit.shape in ((), (1,), (H,)), f"null_logit is a number or ({H},) numbers")
    if mask is not None:
        need(mask.dtype == torch.bool, "mask is boolean, True = may be seen")
        need(mask.dim() == 4 and all(m in (1, n) for m, n in zip(mask.shape, (B, H, T, S))),
             f"mask {tuple(mask.shape)} does not broadcast to {(B, H, T, S)}")
    need(gamma <= 0 and zeta >= 1, f"clipped needs gamma <= 0 and zeta >= 1: {gamma}, {zeta}")


def attend(q, k, v, normalizer="softmax", causal=True, null_logit=None, mask=None, impl="auto", *,
           gamma=-12 / 512, zeta=1.0, scale=None) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention -> out (B, H, T, D) in q's dtype, null mass (B, H, T) in fp32; both differentiable."""
    if torch.is_autocast_enabled(q.device.type):
        dtype = torch.get_autocast_dtype(q.device.type)
        q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    _check(q, k, v, normalizer, null_logit, mask, gamma, zeta)
    plain = normalizer == "softmax" and mask is None and (not causal or q.size(2) in (1, k.size(2)))
    path = _attend_sdpa if plain and impl in ("auto", "sdpa") else _attend_eager
    return path(q, k, v, normalizer, causal, null_logit, mask, gamma, zeta, scale)


def describe(normalizer: str, device_type: str) -> str:
    """One phrase for a run's header: which implementation `attend` picks by itself."""
    return "SDPA" if normalizer == "softmax" else "eager reference"
