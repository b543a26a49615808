"""A transformer in one file, with its two softmaxes laid open.

A decoder-only transformer is a list of sublayers (attention, feed-forward, attention, ...) and two
decisions. Which *tokens* does a head read? A softmax over keys decides; `softmax1.attend` is that
call, and every alternative to softmax is behind it. Which *layers* does a sublayer read? In the
standard model nobody decides, the residual stream is a plain sum:

    u = norm_l(h)        y = f_l(u)        h <- h + y                          (pre-norm residual)

Everything this project studies replaces one of the two. The second is an object with five methods,
and `StandardResidual` below is the smallest one:

    start(x, record)            -> state   # x: token embeddings (B, T, d)
    read(state, l)              -> h       # what sublayer l sees, before its own norm
    write(state, l, u, y, null) -> state   # u: normed input, y: sublayer output, null: null mass
    finish(state)               -> x       # what the final norm and the head decode
    penalty(state)              -> scalar  # auxiliary loss, 0 by default

Read first: `Transformer.forward`, five lines that never change whatever the mechanism; then
`Attention.forward`; then one mechanism: softmax1.py, attnres.py or ledger.py.

Shapes: B batch, T new tokens, S tokens seen (cache and new), H heads, G key/value heads,
D head size, d model width, F feed-forward width, L sublayers, V vocabulary.
"""
from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import zlib
from dataclasses import dataclass
from typing import Callable, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from attnres import AttnRes, OasisRouter
from ledger import Delta, HyperConnection2, Ledger
from softmax1 import NORMALIZERS, attend, attention_probs

Record = Callable[[str, int, torch.Tensor], None]

NORMS = ("pre", "sandwich", "sandwich-qk", "dyt", "post")
FFNS = ("swiglu", "gelu", "linear", "none")
GATES = ("none", "channel", "head", "single", "channel-static", "head-static", "single-static",
         "position", "token", "bondarenko")


# --------------------------------------------------------------------------------------- config

@dataclass
class Config:
    """Everything that decides what the model computes. Saved in every checkpoint.

    A zero in n_kv_head, head_dim, d_ff or ledger_rank stands for the usual choice and is resolved
    on construction. Raises ValueError, in one line, for values that contradict each other.
    """
    # shape
    vocab_size: int = 258
    n_layer: int = 4              # transformer blocks: an attention and a feed-forward sublayer
    n_head: int = 2
    n_kv_head: int = 0            # 0: n_head
    head_dim: int = 0             # 0: d_model / n_head
    d_model: int = 128
    d_ff: int = 0                 # 0: 4 d; SwiGLU: 8/3 d, rounded up to 64
    block_size: int = 256         # longest context, tokens
    # backbone
    pos: str = "rope"             # rope | learned | none
    rope_theta: float = 10000.0
    rope_scaling: dict | None = None   # Llama-3 scaling: factor, low_freq_factor, ...
    norm: str = "pre"             # NORMS
    norm_eps: float = 1e-6
    qk_norm: bool = False         # RMSNorm with gain on every head's query and key
    ffn: str = "swiglu"           # FFNS
    ffn_bias: bool = False
    tied_head: bool = False
    # tokens: how a head spends its attention
    normalizer: str = "softmax"   # softmax1.NORMALIZERS
    null_init: float = 0.0        # first value of the learned null logit (normalizer="sink")
    null_start: float = 0.0       # softmax1's null logit before `anneal_null` brings it to 0
    clip_gamma: float = -12 / 512
    clip_zeta: float = 1.0
    attn_bias: bool = False       # one learned key and value more, which every query may attend to
    gate: str = "none"            # GATES
    gate_init: float = 0.25       # initial opening of the bondarenko gate
    # depth: how a sublayer reads the layers below
    residual: str = "standard"    # RESIDUALS
    depth_normalizer: str = "softmax"
    depth_block: int = 0          # AttnRes: sublayers per block; 0 is full (every output a source)
    coupling: bool = False        # token null mass lowers a branch's routing logit
    coupling_detach: bool = False
    router_init: str = "recent"   # OasisRouter: zero | recent | index | identity
    router_norm: bool = False     # OasisRouter: its queries and keys see streams of rms 1
    near_identity: bool = False   # attnres, ledger, hc2 start as the plain residual: see CONVERSION
    ledger_rank: int = 0          # 0: min(64, d/8)
    ledger_gamma: float = 0.0     # share of the scratch stream in what is decoded
    ledger_cap: float = 0.0       # largest token norm of the committed stream; 0: no cap
    sparsity: float = 0.05        # weight of the commit penalty

    def __post_init__(self):
        self.check_types()
        self.n_kv_head = self.n_kv_head or self.n_head
        self.head_dim = self.head_dim or self.d_model // max(1, self.n_head)
        if self.ffn == "none":
            self.d_ff = 0
        elif not self.d_ff:
            self.d_ff = -(-8 * self.d_model // 3 // 64) * 64 if self.ffn == "swiglu" \
                else 4 * self.d_model
        self.ledger_rank = self.ledger_rank or max(1, min(64, self.d_model // 8))
        self.validate()

    @property
    def n_sublayer(self) -> int:
        """L: attention and feed-forward sublayers together."""
        return self.n_layer * (1 if self.ffn == "none" else 2)

    def check_types(self):
        """A Config may come from a file that anything wrote."""
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type == "int" and (type(value) is not int or value < 0):
                raise ValueError(f"{field.name}={value!r} must be a whole number, not negative")
            if field.type == "float" and not (type(value) in (int, float) and math.isfinite(value)):
                raise ValueError(f"{field.name}={value!r} must be a finite number")

    def validate(self):
        for field, allowed in (("norm", NORMS), ("ffn", FFNS), ("gate", GATES),
                               ("normalizer", NORMALIZERS), ("residual", RESIDUALS),
                               ("depth_normalizer", NORMALIZERS),
                               ("pos", ("rope", "learned", "none"))):
            if getattr(self, field) not in allowed:
                raise ValueError(f"{field}={getattr(self, field)!r}: choose from "
                                 f"{', '.join(allowed)}")
        for field in ("vocab_size", "n_layer", "n_head", "n_kv_head", "head_dim", "d_model",
                      "block_size"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field}={getattr(self, field)} must be at least 1")
        if self.n_head % self.n_kv_head:
            raise ValueError(f"n_head={self.n_head} is no multiple of n_kv_head={self.n_kv_head}")
        if self.pos == "rope" and self.head_dim % 2:
            raise ValueError(f"rotary positions need an even head_dim, not {self.head_dim}")
        if self.coupling and self.residual not in ("attnres", "oasis"):
            raise ValueError(f"coupling needs a depth softmax (residual attnres or oasis), "
                             f"not {self.residual}")
        if self.sparsity < 0 or self.ledger_cap < 0:
            raise ValueError(f"sparsity={self.sparsity} and ledger_cap={self.ledger_cap} must not "
                             "be negative")
        if self.clip_gamma > 0 or self.clip_zeta < 1:
            raise ValueError(f"clip_gamma={self.clip_gamma} must not be positive, clip_zeta="
                             f"{self.clip_zeta} not below 1")
        if self.rope_theta <= 0 or self.norm_eps < 0:
            raise ValueError(f"rope_theta={self.rope_theta} must be positive and "
                             f"norm_eps={self.norm_eps} not negative")
        if not 0 < self.gate_init < 1:
            raise ValueError(f"gate_init={self.gate_init} must lie between 0 and 1")
        if self.gate == "bondarenko" and self.d_model != self.n_head * self.head_dim:
            raise ValueError("the bondarenko gate reads one slice of the input for each head: "
                             f"d_model={self.d_model} must be n_head x head_dim = "
                             f"{self.n_head * self.head_dim}")


# ---------------------------------------------------------------------------------------- parts

class RMSNorm(nn.Module):
    """x / rms(x) * gain, rms(x) = sqrt(mean(x^2) + eps) over channels. (..., d) -> (..., d)."""

    def __init__(self, width: int, eps: float = 1e-6, gain: float = 1.0):
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.full((width,), gain))

    def forward(self, x):
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self.eps)  # (..., d)


class DynamicTanh(nn.Module):
    """gain * tanh(alpha x) + bias: a norm that looks at no statistics [Spike 3.7].

    It makes no small stream large, so its authors multiply the embedding of a language model by a
    learned scalar that starts at sqrt(d) (arXiv 2503.10622, appendix A). Their LLaMA of width 4096
    starts with alpha 0.8 before attention and 0.2 elsewhere, and narrower models want larger ones.
    Ours below that width: alpha 1, and a scalar of 64 = sqrt(4096), so that an embedding starts as
    large as theirs. With their alphas and sqrt(128) a nano model learns letter frequencies only.
    """

    def __init__(self, width: int, alpha: float):
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor([alpha]))
        self.weight = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, x):
        return self.weight * torch.tanh(self.alpha * x) + self.bias                 # (..., d)


def make_norm(config: Config, where: str) -> nn.Module:
    """The norm in front of an attention ("attn") or feed-forward ("ffn") sublayer, on a sublayer's
    output ("out"), or before the head ("final"), for each of NORMS [Spike 3.7].

    The gain of an output norm starts at 0.1, our choice (the paper gives none): at 1 every sublayer
    adds a vector of rms 1 to a stream that starts at 0.02, and the token is drowned.
    """
    if config.norm == "dyt" and where != "out":
        wide = config.d_model >= 4096
        return DynamicTanh(config.d_model, (0.8 if where == "attn" else 0.2) if wide else 1.0)
    if where == "out" and config.norm not in ("sandwich", "sandwich-qk"):
        return nn.Identity()
    if where == "attn" and config.norm == "sandwich-qk":
        return nn.Identity()                 # there the norm acts on queries and keys only
    return RMSNorm(config.d_model, config.norm_eps, gain=0.1 if where == "out" else 1.0)


def rope_table(positions: torch.Tensor, config: Config) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of position x frequency, fp32. positions (T,) or (B, T) -> (..., T, D/2).

    Frequencies are theta^(-2i/D); Llama-3 scaling leaves short wavelengths alone, divides long
    ones by `factor`, and blends between (config.json's `rope_scaling`, rope_type "llama3").
    """
    D = config.head_dim
    exponent = torch.arange(0, D, 2, device=positions.device, dtype=torch.float32) / D
    freq = config.rope_theta ** -exponent                                           # (D/2)
    if config.rope_scaling:
        s = config.rope_scaling
        turns = s["original_max_position_embeddings"] * freq / (2 * math.pi)        # (D/2)
        blend = (turns - s["low_freq_factor"]) / (s["high_freq_factor"] - s["low_freq_factor"])
        blend = blend.clamp(0, 1)                                                   # (D/2)
        freq = blend * freq + (1 - blend) * freq / s["factor"]                      # (D/2)
    angle = positions[..., None].float() * freq                                     # (..., T, D/2)
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    """Rotary embedding on half-split pairs (x_i, x_{i + D/2}). x (B, H, T, D) -> (B, H, T, D)."""
    a, b = x.chunk(2, dim=-1)                                                       # (B, H, T, D/2)
    return torch.cat((torch.addcmul(a * cos, b, sin, value=-1),
                      torch.addcmul(b * cos, a, sin)), dim=-1)                      # (B, H, T, D)


class KVCache:
    """Keys and values of all tokens so far: one pair of buffers for each attention sublayer."""

    def __init__(self, config: Config, batch: int, length: int, device=None, dtype=None,
                 prefix: "KVCache | None" = None):
        """prefix: a cache of one row, which every row begins with."""
        shape = (config.n_layer, batch, config.n_kv_head, length, config.head_dim)
        self.k = torch.empty(shape, device=device, dtype=dtype)                 # (n, B, G, S, D)
        self.v = torch.empty(shape, device=device, dtype=dtype)                 # (n, B, G, S, D)
        self.length = 0      # tokens held; Transformer.forward advances it
        if prefix is not None:
            self.length = prefix.length
            self.k[..., :self.length, :] = prefix.k                             # (n, B, G, P, D)
            self.v[..., :self.length, :] = prefix.v                             # (n, B, G, P, D)

    def append(self, i: int, k, v):
        """Store (B, G, T, D) behind what is there; return all of it, (B, G, S, D) twice."""
        end = self.length + k.shape[2]
        self.k[i, :, :, self.length:end] = k
        self.v[i, :, :, self.length:end] = v
        return self.k[i, :, :, :end], self.v[i, :, :, :end]                         # (B, G, S, D)

    @torch.no_grad()
    def slide(self, config: Config, new: int, keep: int = 0):
        """Make room for `new` tokens by forgetting the oldest but for the first `keep`, as
        StreamingLLM does [Streaming 3.2]. Positions are places in the cache, never above its
        length: the tokens that stay move up, and their rotary keys are turned back by as many
        places, R(p - s) k = R(-s) R(p) k. Learned positions were added to the input and stay."""
        gone = self.length + new - self.k.shape[-2]
        if gone <= 0:
            return
        if keep + new > self.k.shape[-2]:
            raise ValueError(f"{keep} kept and {new} new tokens do not fit in a cache of "
                             f"{self.k.shape[-2]}")
        old, place = slice(keep + gone, self.length), slice(keep, self.length - gone)
        k = self.k[..., old, :].clone()                                         # (n, B, G, S, D)
        if config.pos == "rope":
            back = rope_table(torch.tensor([-gone], device=k.device), config)       # (1, D/2) x 2
            k = rotate(k.float(), *back)                                        # (n, B, G, S, D)
        self.k[..., place, :] = k
        self.v[..., place, :] = self.v[..., old, :].clone()
        self.length -= gone


class Context(NamedTuple):
    """What every sublayer of one forward pass shares."""
    x0: torch.Tensor                    # token embeddings (B, T, d)
    positions: torch.Tensor             # (T,) or, for padded batches, (B, T)
    cos: torch.Tensor | None            # rotary tables
    sin: torch.Tensor | None
    mask: torch.Tensor | None           # keys that may be seen, bool (B, 1, 1, S)
    cache: KVCache | None
    record: Record | None


def wanted(record: Record | None, name: str) -> bool:
    """Does this recorder ask for `name`? One with an attribute `names` asks only for those."""
    return record is not None and name in getattr(record, "names", (name,))


class OutputGate(nn.Module):
    """out * sigmoid(g), between a head's weighted sum and the output projection [Spike 3.7].

    g is a linear map of the sublayer's input (channel: one value for each channel of each head,
    head: one for each head, single: one; qiuzh20/gated_attention, arXiv 2505.06708), a parameter of
    that shape (-static), a table over positions, a map of the token's embedding, or Bondarenko's:
    each head reads its own slice of the input through D weights and a bias (arXiv 2306.12929).
    """

    def __init__(self, config: Config):
        super().__init__()
        H, D, d = config.n_head, config.head_dim, config.d_model
        self.kind, self.opening = config.gate, config.gate_init
        shape = {"head": (H, 1), "single": (1, 1)}.get(config.gate.removesuffix("-static"), (H, D))
        self.shape = shape
        if self.kind == "bondarenko":
            self.weight = nn.Parameter(torch.empty(H, D))
            self.bias = nn.Parameter(torch.empty(H))
        elif self.kind.endswith("-static"):
            self.bias = nn.Parameter(torch.zeros(shape))
        elif self.kind == "position":
            self.table = nn.Parameter(torch.empty(config.block_size, H * D))
        else:
            self.map = nn.Linear(d, shape[0] * shape[1], bias=False)

    def init_special(self):
        if hasattr(self, "bias"):
            p = self.opening
            self.bias.fill_(math.log(p / (1 - p)) if self.kind == "bondarenko" else 0.0)

    def forward(self, u, ctx: Context):
        """u (B, T, d) -> opening in (0, 1), broadcastable to (B, T, H, D)."""
        if self.kind.endswith("-static"):
            return self.bias.sigmoid()[None]                                        # (1, H|1, D|1)
        if self.kind == "bondarenko":
            heads = u.unflatten(-1, self.weight.shape)                              # (B, T, H, D)
            g = (heads * self.weight).sum(-1, keepdim=True) + self.bias[:, None]    # (B, T, H, 1)
            return g.sigmoid()                                                      # (B, T, H, 1)
        if self.kind == "position":
            return self.table[ctx.positions].sigmoid().unflatten(-1, self.shape)    # (.., T, H, D)
        g = self.map(ctx.x0 if self.kind == "token" else u)                         # (B, T, H*D)
        return g.sigmoid().unflatten(-1, self.shape)                            # (B, T, H|1, D|1)


class ExtraKey(nn.Module):
    """Explicit attention biases (Sun et al., arXiv 2402.17762): one learned key k' and value v' in
    front of the others, for each key/value head, N(0, 0.02^2). [Sun 5.5]

        out_t = softmax([q_t k', q_t k_1, ..., q_t k_t] / sqrt D) [v', v_1, ..., v_t]

    A sink that need not be a token: the paper's reading is that a model wants a constant bias v',
    and makes one of the first token if it is not given one. k' is never rotated, which with rotary
    positions is a key at position 0, where the first token stands. k' = v' = 0 is Softmax1.
    """

    def __init__(self, config: Config):
        super().__init__()
        self.key = nn.Parameter(torch.empty(config.n_kv_head, config.head_dim))
        self.value = nn.Parameter(torch.empty(config.n_kv_head, config.head_dim))

    def forward(self, k, v, mask):
        """k, v (B, G, S, D), mask (B, 1, 1, S) or None -> the same with S + 1 keys."""
        own = (x.to(k.dtype)[:, None].expand(len(k), -1, 1, -1) for x in (self.key, self.value))
        k, v = (torch.cat(pair, dim=2) for pair in zip(own, (k, v)))                # (B, G, 1+S, D)
        return k, v, None if mask is None else F.pad(mask, (1, 0), value=True)

    @staticmethod
    def mass(q, k, how: dict):
        """What each query pays to the extra key, (B, H, T): the output where its value is 1 and all
        other values are 0, so no attention matrix is built."""
        first = torch.zeros_like(k)                                                 # (B, G, 1+S, D)
        first[:, :, 0] = 1
        return attend(q, k, first, **how)[0][..., 0]                                # (B, H, T)


class Attention(nn.Module):
    """Causal self-attention with grouped heads. Returns its output and the mass it left unspent."""

    def __init__(self, config: Config, index: int):
        super().__init__()
        self.config, self.index = config, index
        H, G, D, d = config.n_head, config.n_kv_head, config.head_dim, config.d_model
        self.wq = nn.Linear(d, H * D, bias=False)
        self.wk = nn.Linear(d, G * D, bias=False)
        self.wv = nn.Linear(d, G * D, bias=False)
        self.wo = nn.Linear(H * D, d, bias=False)
        qk_norm = config.qk_norm or config.norm == "sandwich-qk"
        self.q_norm = RMSNorm(D, config.norm_eps) if qk_norm else nn.Identity()
        self.k_norm = RMSNorm(D, config.norm_eps) if qk_norm else nn.Identity()
        if config.normalizer == "sink":
            self.null_logit = nn.Parameter(torch.full((H,), config.null_init))      # (H)
        else:       # softmax1's is annealed, not learned: a part of the state all the same
            annealed = config.normalizer == "softmax1" and config.null_start
            self.register_buffer("null_logit", torch.tensor(annealed) if annealed else None)    # ()
        self.extra = ExtraKey(config) if config.attn_bias else None
        self.gate = OutputGate(config) if config.gate != "none" else None

    def init_special(self):
        if self.null_logit is not None:
            learned = self.config.normalizer == "sink"
            self.null_logit.fill_(self.config.null_init if learned else self.config.null_start)

    def forward(self, u, ctx: Context, null=None):
        """u (B, T, d) -> y (B, T, d), head-mean null mass (B, T)."""
        c, D = self.config, self.config.head_dim
        q = self.q_norm(self.wq(u).unflatten(-1, (-1, D))).transpose(1, 2)          # (B, H, T, D)
        k = self.k_norm(self.wk(u).unflatten(-1, (-1, D))).transpose(1, 2)          # (B, G, T, D)
        v = self.wv(u).unflatten(-1, (-1, D)).transpose(1, 2)                       # (B, G, T, D)
        if ctx.cos is not None:
            q, k = rotate(q, ctx.cos, ctx.sin), rotate(k, ctx.cos, ctx.sin)
        if ctx.cache is not None:
            k, v = ctx.cache.append(self.index, k, v)                               # (B, G, S, D)
        keys, values, mask = k, v, ctx.mask
        if self.extra is not None:
            keys, values, mask = self.extra(k, v, mask)                             # (B, G, 1+S, D)
        how = dict(normalizer=c.normalizer, null_logit=self.null_logit, mask=mask,
                   gamma=c.clip_gamma, zeta=c.clip_zeta)
        out, null = attend(q, keys, values, **how)                  # (B, H, T, D), (B, H, T)
        gate = None
        if self.gate is not None:
            gate = self.gate(u, ctx)                                                # (B, T, H, D)
            out = out * gate.transpose(-3, -2)                                      # (B, H, T, D)
        if ctx.record is not None:
            self.tell(ctx.record, q, keys, v, out, null, gate, how)
        y = self.wo(out.transpose(1, 2).flatten(-2))                                # (B, T, d)
        return y, null[:, 0] if c.normalizer == "softmax" else null.mean(1)         # (B, T)

    def tell(self, record: Record, q, keys, v, out, null, gate, how):
        """Report what one attention computed; only here is an attention matrix ever wanted. keys:
        with the extra one, if there is one; "k" and "attn_probs" are those of the tokens alone."""
        l = self.index * (1 if self.config.ffn == "none" else 2)
        k = keys[:, :, keys.shape[2] - v.shape[2]:]                                 # (B, G, S, D)
        for name, x in (("q", q), ("k", k), ("v", v), ("head_out", out), ("null", null),
                        ("gate", gate)):
            if x is not None and wanted(record, name):
                record(name, l, x)
        if self.extra is not None and wanted(record, "bias_mass"):
            record("bias_mass", l, self.extra.mass(q, keys, how))                   # (B, H, T)
        if wanted(record, "attn_probs"):
            probs = attention_probs(q, keys, **how)[0]                              # (B, H, T, 1+S)
            record("attn_probs", l, probs[..., keys.shape[2] - v.shape[2]:])        # (B, H, T, S)


class FeedForward(nn.Module):
    """SwiGLU W_down[silu(W_gate u) * (W_up u)], GELU W_down[gelu(W_up u)], linear W_down W_up u."""

    def __init__(self, config: Config, l: int):
        super().__init__()
        self.l = l
        d, F_, bias = config.d_model, config.d_ff, config.ffn_bias
        self.kind = config.ffn
        if self.kind == "swiglu":
            self.w_gate = nn.Linear(d, F_, bias=bias)
        self.w_up = nn.Linear(d, F_, bias=bias)
        self.w_down = nn.Linear(F_, d, bias=bias)

    def forward(self, u, ctx: Context, null=None):
        """u (B, T, d) -> y (B, T, d); hands the newest attention's null mass on."""
        z = self.w_up(u)                                                            # (B, T, F)
        if self.kind == "swiglu":
            g = self.w_gate(u)                                                      # (B, T, F)
            # in place where no backward pass wants g: a twentieth of a forward pass of 512 tokens
            z = F.silu(g) * z if torch.is_grad_enabled() else F.silu(g, inplace=True).mul_(z)
        elif self.kind == "gelu":
            z = F.gelu(z)                                                           # (B, T, F)
        if wanted(ctx.record, "ffn_hidden"):
            ctx.record("ffn_hidden", self.l, z)
        return self.w_down(z), null                                                 # (B, T, d)


class HeadLoss(torch.autograd.Function):
    """Mean cross-entropy of x W^T, a few rows of logits at a time: never all of (N, V), which for a
    vocabulary of 128k is the largest tensor of a training step by far.

    d loss / d logits is known as soon as the logits are: (softmax - onehot) / n. So the gradients
    of x and W are formed on the way and only scaled in the backward pass; no logit is computed
    twice. x (N, d), weight (V, d), targets (N,), -1 does not count. No second derivative.
    """

    @staticmethod
    def forward(ctx, x, weight, targets, rows: int, learn: bool):
        device = x.device.type
        low = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype
        with torch.autocast(device, enabled=False):
            W, counted = weight.to(low), targets != -1                              # (V, d), (N)
            n, total, dx, dW = counted.sum(), 0.0, torch.empty_like(x), None
            for xs, t, c, out in zip(*(a.split(rows) for a in (x, targets, counted, dx))):
                xs, t = xs.to(low), t.clamp(min=0)[:, None]                         # (r, d), (r, 1)
                z = xs @ W.T                                                        # (r, V)
                z = z if z.dtype == torch.float64 else z.float()
                lse = z.logsumexp(-1, keepdim=True)                                 # (r, 1)
                total = total + ((lse - z.gather(1, t))[:, 0] * c).sum()
                if learn:
                    z = z.sub_(lse).exp_().scatter_add_(1, t, z.new_full(t.shape, -1.0))
                    z = z.mul_((c.to(z.dtype) / n)[:, None]).to(low)                # (r, V)
                    out.copy_(z @ W)                                                # (r, d)
                    dW = (z.T @ xs).to(lse.dtype) if dW is None else \
                        dW.addmm_(z.T, xs) if low == dW.dtype else dW.add_(z.T @ xs)    # (V, d)
        if learn:
            ctx.save_for_backward(dx, dW.to(weight.dtype))
        return total / n

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad):
        dx, dW = ctx.saved_tensors
        return dx * grad, dW * grad, None, None, None


class StandardResidual(nn.Module):
    """The residual stream: the state is one tensor, every sublayer adds to it."""

    def __init__(self, config: Config):
        super().__init__()

    def start(self, x, record: Record | None = None):
        return x                                                                    # (B, T, d)

    def read(self, state, l: int):
        return state                                                                # (B, T, d)

    def write(self, state, l: int, u, y, null):
        return state + y                                                            # (B, T, d)

    def finish(self, state):
        return state                                                                # (B, T, d)

    def penalty(self, state):
        return 0.0


RESIDUALS = {"standard": StandardResidual, "ledger": Ledger, "hc2": HyperConnection2,
             "delta": Delta, "attnres": AttnRes, "oasis": OasisRouter}


# ---------------------------------------------------------------------------------- transformer

class Transformer(nn.Module):
    """Decoder-only transformer with an exchangeable token normaliser and residual."""

    new_parameters = ()     # names that the files of from_pretrained did not hold

    def __init__(self, config: Config, seed: int = 0):
        super().__init__()
        c = self.config = config
        self.kinds = ["attn"] * c.n_layer if c.ffn == "none" else ["attn", "ffn"] * c.n_layer
        # empty: init_weights or a file fills it, and normal_ on the meta device takes seconds
        self.embed = nn.Embedding.from_pretrained(torch.empty(c.vocab_size, c.d_model),
                                                  freeze=False)
        if c.pos == "learned":
            self.pos_embed = nn.Embedding(c.block_size, c.d_model)
        if c.norm == "dyt":
            self.embed_scale = nn.Parameter(torch.tensor([max(64.0, math.sqrt(c.d_model))]))
        self.norms = nn.ModuleList(make_norm(c, kind) for kind in self.kinds)
        self.sublayers = nn.ModuleList(
            Attention(c, self.kinds[:l].count("attn")) if kind == "attn" else FeedForward(c, l)
            for l, kind in enumerate(self.kinds))
        self.out_norms = nn.ModuleList(make_norm(c, "out") for _ in self.kinds)
        self.residual = RESIDUALS[c.residual](c)
        self.final_norm = make_norm(c, "final")
        self.head = nn.Linear(c.d_model, c.vocab_size, bias=False)
        if c.tied_head:
            self.head.weight = self.embed.weight
        self.grad_checkpoint = False
        self.loss_rows = None       # rows of logits at a time; 0: all; None: see `rows_at_a_time`
        self.init_weights(seed)

    @torch.no_grad()
    def init_weights(self, seed: int = 0, only=None):
        """Initialise every parameter (or only those named) from (seed, its own name).

        | parameters                       | value                                            |
        |----------------------------------|--------------------------------------------------|
        | matrices and embeddings          | N(0, 0.02^2)                                     |
        | gains, biases and scalars        | as constructed                                   |
        | a mechanism's own parameters     | its `init_special`, e.g. zero pseudo-queries     |

        Because the generator is seeded by name, a weight that two architectures share starts equal
        in both: arms of a study differ in their mechanism and in nothing else.
        """
        for name, p in self.named_parameters():
            if p.is_meta or only is not None and name not in only:
                continue
            if p.ndim >= 2:
                g = torch.Generator().manual_seed(zlib.crc32(f"{seed}:{name}".encode()))
                p.copy_(torch.empty(p.shape).normal_(0, 0.02, generator=g))
            elif name.endswith("bias"):
                p.zero_()
        for module in self.modules():
            if hasattr(module, "init_special"):
                module.init_special()

    def forward(self, tokens, targets=None, record: Record | None = None, *,
                cache: KVCache | None = None, pad_mask=None, last: bool = False):
        """tokens (B, T) -> logits (B, T, V), loss. last: only of the last token, (B, 1, V).

        loss is None without targets (B, T), else mean cross-entropy in nats (targets of -1 do not
        count) plus the residual's penalty, whose value is kept in `self.aux`. Where the logits of a
        loss would be too large to hold, they are None (`rows_at_a_time`). record(name, l, x)
        is called with each measured quantity. With a cache, T new tokens follow those it holds.
        pad_mask (B, S), bool: False at left padding, over cached and new tokens.
        """
        ctx = self.context(tokens, record, cache, pad_mask)
        state, null = self.residual.start(ctx.x0, record), None
        for l in range(len(self.sublayers)):
            h = self.residual.read(state, l)                                        # (B, T, d)
            u, y, null = self.sublayer(l, h, ctx, null)                             # (B, T, d) x 2
            state = self.residual.write(state, l, u, y, null)
        x = self.residual.finish(state)                                             # (B, T, d)
        x = x[:, -1:] if last else x                                                # (B, T|1, d)
        x = self.decode_norm(x, record)                                             # (B, T|1, d)
        if cache is not None:
            cache.length += tokens.shape[1]
        if targets is None:
            return self.head(x), None                                               # (B, T|1, V)
        penalty = self.residual.penalty(state)
        if rows := self.rows_at_a_time(targets):
            logits, loss = None, HeadLoss.apply(x.flatten(0, 1), self.head.weight,
                                                targets.flatten(), rows, torch.is_grad_enabled())
        else:
            logits = self.head(x)                                                   # (B, T, V)
            loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)
        self.aux = penalty.detach() if torch.is_tensor(penalty) else penalty
        return logits, loss + penalty

    def rows_at_a_time(self, targets) -> int:
        """Rows of logits that the loss holds at a time; 0: all of them, unless those are more than
        2^27 numbers, a gigabyte with their gradient. A quantised head computes its own logits."""
        if self.loss_rows is not None or type(self.head) is not nn.Linear:
            return self.loss_rows or 0
        V = self.config.vocab_size
        return max(1, 2 ** 25 // V) if targets.numel() * V > 2 ** 27 else 0

    def sublayer(self, l: int, h, ctx: Context, null):
        """Norm, sublayer, output norm, and the records in between: (B, T, d) -> u, y, null."""
        if wanted(ctx.record, "stream") and l > 0:
            ctx.record("stream", l - 1, h)          # the stream after sublayer l - 1
        if self.grad_checkpoint and torch.is_grad_enabled():
            u, y, null = checkpoint(self.compute, l, h, ctx, null, use_reentrant=False)
        else:
            u, y, null = self.compute(l, h, ctx, null)
        for name, x in (("norm_out", u), ("sublayer_out", y)):
            if wanted(ctx.record, name):
                ctx.record(name, l, x)
        return u, y, null

    def compute(self, l: int, h, ctx: Context, null):
        u = self.norms[l](h)                                                        # (B, T, d)
        y, null = self.sublayers[l](u, ctx, null)                   # (B, T, d), (B, T)
        y = self.out_norms[l](y)                                                    # (B, T, d)
        if self.config.norm == "post":
            y = y + (u - h)      # so h + y = u + f(u): the stream restarts from its normed self
        return u, y, null

    def decode_norm(self, x, record: Record | None):
        """The final norm, with the last two records. (B, T, d) -> (B, T, d)."""
        normed = self.final_norm(x)                                                 # (B, T, d)
        L = len(self.sublayers)
        for name, l, tensor in (("stream", L - 1, x), ("final_norm", L, normed)):
            if wanted(record, name):
                record(name, l, tensor)
        return normed

    def context(self, tokens, record, cache, pad_mask) -> Context:
        """Positions, embeddings, rotary tables and key mask of one forward pass."""
        B, T = tokens.shape
        past = cache.length if cache is not None else 0
        if pad_mask is None:
            positions, mask = torch.arange(past, past + T, device=tokens.device), None  # (T,)
        else:
            positions = (pad_mask.long().cumsum(-1) - 1).clamp(min=0)[:, -T:]       # (B, T)
            mask = pad_mask[:, None, None, :]                                       # (B, 1, 1, S)
        x0 = self.embed(tokens)                                                     # (B, T, d)
        cos = sin = None
        if self.config.pos == "learned":
            if past + T > self.config.block_size:
                raise ValueError(f"{past + T} tokens do not fit in block_size="
                                 f"{self.config.block_size} learned positions")
            x0 = x0 + self.pos_embed(positions)                                     # (B, T, d)
        if self.config.norm == "dyt":
            x0 = x0 * self.embed_scale                                              # (B, T, d)
        if self.config.pos == "rope":
            cos, sin = (t.unsqueeze(-3).to(x0.dtype)                            # (.., 1, T, D/2)
                        for t in rope_table(positions, self.config))
        if wanted(record, "embedding"):
            record("embedding", 0, x0)
        return Context(x0, positions, cos, sin, mask, cache, record)

    @torch.no_grad()
    def anneal_null(self, share: float):
        """Softmax1's null logit becomes share * null_start in every head: 1 leaves the softmax of
        the pretrained model, 0 is Softmax1. Our extension; nothing to do where null_start is 0."""
        for name, logit in self.named_buffers():
            if name.endswith("null_logit"):
                logit.fill_(share * self.config.null_start)

    # ------------------------------------------------------------------------------- accounting

    def decay_groups(self) -> dict[str, list[str]]:
        """Parameter names by weight decay. Matrices of the backbone decay; gains, biases, output
        gates and everything that belongs to the residual (queries, gates, betas) do not: with no
        gradient, decay alone would move a softplus bias from -5 to -0.7 in 100k steps."""
        groups = {"decay": [], "no_decay": []}
        for name, p in self.named_parameters():
            free = is_mechanism(name) or p.ndim < 2
            groups["no_decay" if free else "decay"].append(name)
        return groups

    def count_params(self) -> dict[str, int]:
        """True counts (a tied head counts once): total, embedding (with positions), mechanism."""
        sizes = {name: p.numel() for name, p in self.named_parameters()}
        part = lambda test: sum(n for name, n in sizes.items() if test(name))
        return {"total": sum(sizes.values()),
                "embedding": part(lambda n: n.startswith(("embed.", "pos_embed."))),
                "mechanism": part(is_mechanism)}

    def flops_per_token(self) -> int:
        """Training FLOPs per token: 6 per weight of a matrix, 12 T d per attention (causal: half).
        The PaLM paper's estimate (arXiv 2204.02311, appendix B); gates count as weights."""
        c = self.config
        weights = sum(p.numel() for n, p in self.named_parameters()
                      if p.ndim >= 2 and not n.startswith(("embed.", "pos_embed.")))
        if c.tied_head:
            weights += self.head.weight.numel()
        return 6 * weights + 6 * c.n_layer * c.block_size * c.n_head * c.head_dim

    # ------------------------------------------------------------------------------- generation

    @torch.no_grad()
    def encode(self, tokens) -> KVCache:
        """Keys and values of a text (T,) that many generations begin with, for `generate`."""
        tokens = torch.as_tensor(tokens, device=self.embed.weight.device)[None]     # (1, T)
        cache = KVCache(self.config, *tokens.shape, tokens.device, self.embed.weight.dtype)
        self(tokens, cache=cache, last=True)
        return cache

    @torch.no_grad()
    def generate(self, tokens, max_new_tokens: int, *, temperature: float = 1.0,
                 top_k: int | None = None, pad_mask=None, stop_ids=(), stop=None,
                 prefix: KVCache | None = None, generator=None, n_ids: int | None = None):
        """Continue tokens (B, T) by up to max_new_tokens: (B, T + new), with a key/value cache.

        temperature 0 is greedy; top_k None or 0: all ids may be drawn. pad_mask (B, T), bool, is
        False at left padding. A row that has produced one of stop_ids, or for which stop(new
        tokens (B, n)) -> (B,) is true, repeats its last token; when all rows have ended, generation
        ends. prefix: what `encode` made of ids in front of every row. Past block_size the newest
        half block is encoded anew and goes on as the context. Ids from n_ids on, rows that pad a
        vocabulary, are never drawn.
        Raises FloatingPointError, naming the token, when a logit is NaN, and ValueError if prefix,
        tokens and max_new_tokens together exceed block_size.
        """
        block, T = self.config.block_size, tokens.shape[1]
        P = 0 if prefix is None else prefix.length
        if P and P + T + max_new_tokens > block:
            raise ValueError(f"a prefix of {P} and {T} + {max_new_tokens} tokens do not fit in "
                             f"block_size={block}")
        done = torch.zeros(tokens.shape[0], dtype=torch.bool, device=tokens.device)  # (B,)
        cache = None
        for step in range(max_new_tokens):
            full = cache is not None and cache.length >= block
            if cache is None or full:
                keep = block if not full else max(1, block // 2)
                seen, mask = tokens[:, -keep:], None if pad_mask is None else pad_mask[:, -keep:]
                length = min(block, P + tokens.shape[1] + max_new_tokens)
                cache = KVCache(self.config, len(tokens), length, tokens.device,
                                self.embed.weight.dtype, prefix)
                new, first = seen, tokens.shape[1] - seen.shape[1]
            else:
                new = tokens[:, -1:]                                                # (B, 1)
                mask = None if pad_mask is None else pad_mask[:, first:]            # (B, S)
            mask = mask if mask is None else F.pad(mask, (P, 0), value=True)        # (B, P + S)
            logits = self(new, cache=cache, pad_mask=mask, last=True)[0][:, 0].float()  # (B, V)
            if logits.isnan().any():
                raise FloatingPointError(f"NaN logits at generated token {step}")
            chosen = sample(logits[:, :n_ids], temperature, top_k, generator)       # (B,)
            chosen = torch.where(done, tokens[:, -1], chosen)                       # (B,)
            tokens = torch.cat((tokens, chosen[:, None]), dim=1)                    # (B, T + 1)
            if pad_mask is not None:
                pad_mask = F.pad(pad_mask, (0, 1), value=True)                      # (B, T + 1)
            if stop_ids:
                done |= torch.isin(chosen, torch.tensor(list(stop_ids), device=chosen.device))
            if stop is not None:
                done |= torch.as_tensor(stop(tokens[:, T:]), device=done.device)    # (B,)
            if done.all():
                break
        return tokens

    @classmethod
    def from_pretrained(cls, path: str, *, dtype: torch.dtype = torch.float32,
                        download: bool = False, seed: int = 0, **overrides) -> "Transformer":
        """A model from a run of train.py (folder or checkpoint) or from a Llama or Qwen3 folder.

        path: of either kind, or a hub id, "owner/model", looked for in the local Hugging Face cache
        and fetched into it only with download=True. dtype: fp32 unless told (bf16 widens exactly).
        overrides replace Config fields, e.g. block_size=512 or residual="attnres". The files must
        hold every weight of the backbone and no other. To a Llama or Qwen3 backbone a mechanism may
        add its own: they start from (seed, name) as in a fresh model, and `.new_parameters` lists
        them. Raises CheckpointError, in one line that names tensors and fields; ValueError from
        Config.
        """
        return load_model(path, dtype=dtype, download=download, seed=seed, **overrides)[0]


def sample(logits, temperature: float, top_k: int | None, generator=None):
    """Draw one id a row. logits (B, V) -> (B,)."""
    if temperature <= 0:
        return logits.argmax(-1)                                                    # (B,)
    if top_k:
        kth = logits.topk(min(top_k, logits.shape[-1])).values[:, -1:]              # (B, 1)
        logits = logits.masked_fill(logits < kth, -math.inf)                        # (B, V)
    probs = (logits / temperature).softmax(-1)                                      # (B, V)
    return torch.multinomial(probs, 1, generator=generator)[:, 0]                   # (B,)


# ---------------------------------------------------------------------------------- checkpoints

class CheckpointError(ValueError):
    """A checkpoint that cannot be read or does not fit, in one line."""


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0][:160]


def clean_state_dict(state: dict) -> dict:
    """Strip the prefixes of torch.compile and DistributedDataParallel, in any order."""
    def clean(name):
        while name.startswith(("module.", "_orig_mod.")):
            name = name.split(".", 1)[1]
        return name
    return {clean(name): tensor for name, tensor in state.items()}


def save_checkpoint(path: str, payload: dict):
    """Write tensors and plain Python to a temporary name, flush it to the disk, then rename it: at
    every moment `path` is the last complete checkpoint, whatever kills the process."""
    temporary = f"{path}.tmp"
    try:
        with open(temporary, "wb") as file:
            torch.save(payload, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except (OSError, RuntimeError) as error:      # torch reports a full disk as a RuntimeError
        if os.path.exists(temporary):
            os.remove(temporary)
        raise CheckpointError(f"could not write {path}: {error}; the previous checkpoint is kept") \
            from error


def load_checkpoint(path: str) -> dict:
    """Read what save_checkpoint wrote. Nothing in the file is executed (weights_only)."""
    if os.path.isdir(path):
        path = os.path.join(path, "checkpoint.pt")
    if not os.path.exists(path):
        raise CheckpointError(f"no checkpoint at {path}")
    try:
        payload = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise CheckpointError(f"{path} is truncated or no checkpoint: {first_line(error)}") \
            from error
    if not isinstance(payload, dict) or not all(
            isinstance(payload.get(part), dict) for part in ("config", "model")):
        raise CheckpointError(f"{path} is no checkpoint of this project (no config and model)")
    return payload


def config_from(saved: dict, **overrides) -> Config:
    """Config from a checkpoint's dictionary; unknown fields are an error, not a guess."""
    known = {f.name for f in dataclasses.fields(Config)}
    unknown = sorted((saved.keys() | overrides.keys()) - known)
    if unknown:
        raise CheckpointError(f"unknown Config fields: {', '.join(unknown)}")
    return Config(**{**saved, **overrides})


def is_mechanism(name: str) -> bool:
    """Does a tensor belong to a mechanism, or to the backbone that all architectures share?"""
    return name.startswith("residual.") or ".gate." in name or ".extra." in name \
        or name.endswith("null_logit")


def check_fit(own: dict, found: dict, path: str):
    """Name what is missing, unexpected or misshapen. own, found: tensor name -> shape."""
    wrong = [f"missing {n}" for n in own if n not in found]
    wrong += [f"unexpected {n}" for n in found if n not in own]
    wrong += [f"{n} is {tuple(found[n])}, not {tuple(own[n])}" for n in own
              if n in found and tuple(found[n]) != tuple(own[n])]
    if wrong:
        raise CheckpointError(f"{path} does not fit the model: {'; '.join(wrong[:8])}"
                              + (f"; and {len(wrong) - 8} more" if len(wrong) > 8 else ""))


def load_weights(model: Transformer, state: dict, path: str = "checkpoint",
                 convert: bool = False):
    """Strict load that names what does not fit. convert: a mechanism that the state does not know
    keeps its initial values, and `model.new_parameters` names them."""
    state, own = clean_state_dict(state), model.state_dict()
    new = {n for n in own if convert and is_mechanism(n) and n not in state}
    check_fit({n: t.shape for n, t in own.items() if n not in new},
              {n: t.shape for n, t in state.items()}, path)
    model.load_state_dict(state, strict=False)
    model.new_parameters = tuple(n for n, _ in model.named_parameters() if n in new)


def load_model(path: str, *, dtype: torch.dtype = torch.float32, download: bool = False,
               seed: int = 0, **overrides) -> tuple[Transformer, dict]:
    """(model, checkpoint) of whatever from_pretrained reads. A Llama or Qwen3 folder is shown as a
    checkpoint too: config, model, and as run its tokenizer.json, if it has one."""
    folder = find_pretrained(os.fspath(path), download)
    if folder:
        model, run = load_pretrained(folder, dtype, seed, **overrides), {}
        if find_tokenizer(folder):
            run["tokenizer"] = find_tokenizer(folder)
        return model, {"config": dataclasses.asdict(model.config), "model": model.state_dict(),
                       "run": run}
    payload = load_checkpoint(path)
    model = Transformer(config_from(payload["config"], **overrides), seed)
    load_weights(model, payload["model"], path, convert=bool(overrides))
    return model.to(dtype), payload


# What a conversion sets unless told otherwise, so that the pretrained function is where training
# starts; each entry is inert where its mechanism is not.
#
# | mechanism       | start                                               | what remains     |
# |-----------------|-----------------------------------------------------|------------------|
# | AttnRes         | zero queries; reads n sum alpha_i v_i, the stream   | rounding         |
# | OASIS router    | W_q = 0, an index bias of IDENTITY_STEP a candidate | exp(-step)       |
# | Ledger          | last-commit corner, its gates at +-NEAR, not +-30   | exp(-NEAR)       |
# | hc2             | reads the sum of its two streams                    | rounding         |
# | softmax1        | null logit -30, brought to 0 by `anneal_null`       | rounding         |
# | sink            | learned null logit -20: lower has no gradient       | exp(-20 - lse)   |
# | bondarenko gate | open                                                | 1e-4 of a head   |
#
# delta, clipped, sparsemax, entmax15, attn_bias and the other gates have no such start.
CONVERSION = {"near_identity": True, "router_init": "identity", "null_start": -30.0,
              "null_init": -20.0, "gate_init": 0.9999}


# -------------------------------------------------------------------------- pretrained backbones
# A folder as `transformers` writes it: config.json, model.safetensors or shards, tokenizer.json.

HF_FILES = ("config.json", "model*.safetensors*", "tokenizer.json", "tokenizer_config.json")
HF_MODELS = {"llama": {}, "qwen3": {"qk_norm": True, "head_dim": 128}}  # model_type -> its defaults
HF_CONFIG = {"vocab_size": "vocab_size", "num_hidden_layers": "n_layer",     # theirs -> ours
             "num_attention_heads": "n_head", "hidden_size": "d_model",
             "intermediate_size": "d_ff", "max_position_embeddings": "block_size",
             "rms_norm_eps": "norm_eps"}
HF_OPTIONAL = {"num_key_value_heads": "n_kv_head", "head_dim": "head_dim",
               "tie_word_embeddings": "tied_head", "mlp_bias": "ffn_bias"}
HF_FIXED = {"hidden_act": "silu", "attention_bias": False, "use_sliding_window": False,
            "rope_interleaved": False, "quantization_config": None}     # all that we compute
HF_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
HF_NAMES = {"embed": "embed_tokens", "final_norm": "norm", "norms.0": "input_layernorm",
            "wq": "self_attn.q_proj", "wk": "self_attn.k_proj", "wv": "self_attn.v_proj",
            "wo": "self_attn.o_proj", "q_norm": "self_attn.q_norm", "k_norm": "self_attn.k_norm",
            "norms.1": "post_attention_layernorm", "w_gate": "mlp.gate_proj",
            "w_up": "mlp.up_proj", "w_down": "mlp.down_proj"}                # ours -> theirs


def hf_name(name: str) -> str:
    """sublayers.5.w_up.weight -> model.layers.2.mlp.up_proj.weight. Names of ours alone stay."""
    module, _, leaf = name.rpartition(".")
    kind, *rest = module.split(".")
    if module == "head":
        return f"lm_head.{leaf}"
    if kind in ("norms", "sublayers"):
        l = int(rest[0])
        part = rest[1] if kind == "sublayers" else f"norms.{l % 2}"
        return f"model.layers.{l // 2}.{HF_NAMES[part]}.{leaf}" if part in HF_NAMES else name
    return f"model.{HF_NAMES[module]}.{leaf}" if module in HF_NAMES else name


def read_json(path: str) -> dict:
    try:
        with open(path, encoding="utf-8") as file:
            return dict(json.load(file))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        raise CheckpointError(f"cannot read {path}: {first_line(error)}") from None


def find_pretrained(path: str, download: bool = False) -> str | None:
    """The Llama or Qwen3 folder that `path` is, or a hub id names. None: `path` is something else.
    Nothing is fetched without download=True; huggingface_hub alone sees the user's token."""
    if os.path.exists(path):
        config = os.path.join(path, "config.json")
        foreign = os.path.exists(config) and not os.path.exists(os.path.join(path, "checkpoint.pt"))
        return path if foreign and "model_type" in read_json(config) else None
    if not re.fullmatch(r"\w[\w.-]*/\w[\w.-]*", path):
        return None
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import GatedRepoError
    except ImportError:
        raise CheckpointError(f"no checkpoint at {path}; were it a hub id, it would take "
                              "huggingface_hub: pip install huggingface_hub") from None
    try:
        return snapshot_download(path, allow_patterns=HF_FILES, local_files_only=not download)
    except GatedRepoError:
        raise CheckpointError(f"{path} is gated: accept its licence at https://huggingface.co/"
                              f"{path}, log in with `hf auth login`, try again") from None
    except Exception as error:      # network, disk, no such model: requests' and httpx' own errors
        raise CheckpointError(
            f"could not download {path}: {first_line(error)}" if download else
            f"no checkpoint at {path}, and no such model in the Hugging Face cache "
            "(a hub id is fetched only when asked: --download, or download=True)") from None


def find_tokenizer(folder: str) -> str | None:
    """The tokenizer.json beside the weights, for data.get_tokenizer. The model's vocabulary may be
    larger, padded for speed (Qwen3: 151,936 rows, 151,669 ids)."""
    path = os.path.join(folder, "tokenizer.json")
    return path if os.path.exists(path) else None


def hf_config(folder: str, **overrides) -> Config:
    """config.json -> Config. What we do not compute, and what is missing, is an error."""
    path = os.path.join(folder, "config.json")
    try:
        fields = hf_fields(path, overrides)
    except CheckpointError:
        raise
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(f"{path}: a value of the wrong type: {first_line(error)}") from None
    return config_from(fields, **overrides)


def hf_fields(path: str, overrides: dict) -> dict:
    """Config's fields from config.json. overrides: their names count as given."""
    found = {key: value for key, value in read_json(path).items() if value is not None}
    if found.get("model_type") not in HF_MODELS:
        raise CheckpointError(f"{path}: model_type {found.get('model_type')!r} is not one of "
                              f"{', '.join(HF_MODELS)}")
    old, new = (dict(found.get(key, {})) for key in ("rope_scaling", "rope_parameters"))
    rope = {"rope_theta": found.get("rope_theta"), **old, **new}
    kind = rope.get("rope_type", rope.get("type", "default"))
    wrong = [f"{key}={found[key]!r} (only {value!r})" for key, value in HF_FIXED.items()
             if found.get(key, value) != value]
    if set(found.get("layer_types", ())) - {"full_attention"}:
        wrong.append("layer_types other than full_attention")
    if kind not in ("default", "llama3") or rope.get("partial_rotary_factor", 1) != 1:
        wrong.append(f"rope {kind!r} (only default and llama3, on whole heads)")
    if any(old.get(key, value) != value for key, value in new.items()):
        wrong.append("a rope_scaling and another rope_parameters")
    if wrong:
        raise CheckpointError(f"{path} asks for what this model does not compute: "
                              + "; ".join(wrong))
    missing = [key for key, ours in HF_CONFIG.items() if key not in found and ours not in overrides]
    missing += [key for key in HF_SCALING
                if kind == "llama3" and not isinstance(rope.get(key), (int, float))]
    if rope["rope_theta"] is None and "rope_theta" not in overrides:
        missing.append("rope_theta")        # a default would be wrong for every recent model
    if missing:
        raise CheckpointError(f"{path} lacks {', '.join(missing)}")
    fields = dict(HF_MODELS[found["model_type"]], rope_theta=rope["rope_theta"])
    fields |= {ours: found[key] for key, ours in (HF_CONFIG | HF_OPTIONAL).items() if key in found}
    if kind == "llama3":
        fields["rope_scaling"] = {key: rope[key] for key in HF_SCALING}
    return fields


def open_tensors(folder: str) -> dict:
    """Tensor name -> the opened safetensors file that holds it: one file, or the index's shards."""
    try:
        from safetensors import safe_open
    except ImportError:
        raise CheckpointError(f"{folder} needs safetensors: pip install safetensors") from None
    names, index = ["model.safetensors"], os.path.join(folder, "model.safetensors.index.json")
    if os.path.exists(index) and not os.path.exists(os.path.join(folder, names[0])):
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not all(
                isinstance(name, str) and name == os.path.basename(name)
                for name in shards.values()):
            raise CheckpointError(f"{index}: its weight_map must name files of this folder")
        names = sorted(set(shards.values()))
    where = {}
    for path in (os.path.join(folder, name) for name in names):
        try:
            file = safe_open(path, framework="pt")
        except Exception as error:          # the library's own class, or OSError
            raise CheckpointError(f"{path} is missing, truncated or no safetensors file: "
                                  f"{first_line(error)}") from None
        # old conversions also store the rotary frequencies, which are no weights
        where |= {key: file for key in file.keys() if not key.endswith("rotary_emb.inv_freq")}
    return where


def check_tensors(own: dict, where: dict, folder: str):
    """Names, shapes and types against the files' headers, before a weight is read."""
    headers = {key: file.get_slice(key) for key, file in where.items()}
    check_fit(own, {key: header.get_shape() for key, header in headers.items()}, folder)
    for key, header in headers.items():
        if header.get_dtype() not in ("F64", "F32", "F16", "BF16"):
            raise CheckpointError(f"{folder}: {key} is {header.get_dtype()}: quantised weights "
                                  "are not read")


@torch.no_grad()
def load_pretrained(folder: str, dtype: torch.dtype, seed: int = 0, **overrides) -> Transformer:
    """The model of a Llama or Qwen3 folder. The files are mapped and each tensor copied once: what
    it takes is the checkpoint (pages of the file) and the model, never a second copy of either."""
    config, where = hf_config(folder, **overrides), open_tensors(folder)
    with torch.device("meta"):              # shapes alone: no memory, no time
        model = Transformer(config)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    theirs = {name: hf_name(name) for name in shapes if not is_mechanism(name)}
    twin = where.get("lm_head.weight") if config.tied_head else None
    if twin and theirs["embed.weight"] in where:
        del where["lm_head.weight"]         # stored twice: compared below
    elif twin:
        theirs["embed.weight"] = "lm_head.weight"
    check_tensors({key: shapes[name] for name, key in theirs.items()}, where, folder)

    model = model.to(dtype).to_empty(device="cpu")
    if config.tied_head:
        model.head.weight = model.embed.weight          # to_empty has parted them
    own = dict(model.named_parameters())
    model.new_parameters = tuple(name for name in own if is_mechanism(name))
    for name in model.new_parameters:
        own[name].fill_(math.nan)           # what init_weights may forget will not go unseen
    model.init_weights(seed, only=model.new_parameters)
    for name, key in theirs.items():
        own[name].copy_(where[key].get_tensor(key))
    pairs = zip(model.embed.weight.split(4096), twin.get_tensor("lm_head.weight").split(4096)) \
        if twin else ()
    if not all(torch.equal(a, b.to(dtype)) for a, b in pairs):
        raise CheckpointError(f"{folder}: lm_head.weight is not the embedding, though config.json "
                              "ties them; tied_head=False keeps both")
    return model


# ------------------------------------------------------------------------------ presets and sizes

_ROUTER = {"residual": "oasis"}
PRESETS = {
    "vanilla": {},
    "suppress": {"qk_norm": True},
    # Ledger Residuals (arXiv 2606.20743); hc2 and delta are its controls
    "ledger": {"residual": "ledger", "sparsity": 0.05},
    "ledger-hs": {"residual": "ledger", "sparsity": 0.3},
    "hc2": {"residual": "hc2"},
    "delta": {"residual": "delta"},
    # other ways to spend attention, on the plain residual
    "outeffhop": {"normalizer": "softmax1"},
    "clip": {"normalizer": "clipped"},
    "sparsemax": {"normalizer": "sparsemax"},
    "entmax15": {"normalizer": "entmax15"},
    "sink": {"normalizer": "sink"},
    "gated": {"gate": "bondarenko"},
    "kv-bias": {"attn_bias": True},
    # Attention Residuals: Kimi's operator (arXiv 2603.15031)
    "attnres": {"residual": "attnres"},
    "attnres-block": {"residual": "attnres", "depth_block": 4},
    # and OASIS' router (arXiv 2605.17887): its vanilla, the corners, and the full method
    "attnres-oasis": _ROUTER,
    "oasis-token": {**_ROUTER, "normalizer": "softmax1"},
    "oasis-depth": {**_ROUTER, "depth_normalizer": "softmax1"},
    "oasis-both": {**_ROUTER, "normalizer": "softmax1", "depth_normalizer": "softmax1"},
    "oasis": {**_ROUTER, "normalizer": "softmax1", "depth_normalizer": "softmax1",
              "coupling": True},
    "oasis-clip": {**_ROUTER, "normalizer": "clipped"},
    "oasis-gated": {**_ROUTER, "gate": "bondarenko"},
    "oasis-sparsemax": {**_ROUTER, "normalizer": "sparsemax", "depth_normalizer": "sparsemax"},
    "oasis-entmax15": {**_ROUTER, "normalizer": "entmax15", "depth_normalizer": "entmax15"},
}

_LEDGER_BACKBONE = {"pos": "learned", "ffn": "gelu", "ffn_bias": True, "tied_head": False}
SIZES = {
    "nano": {"n_layer": 4, "n_head": 2, "d_model": 128, "block_size": 256},
    "micro": {"n_layer": 6, "n_head": 4, "d_model": 256, "block_size": 256},
    "toy": {"n_layer": 3, "n_head": 1, "d_model": 64, "block_size": 64, "pos": "learned"},
    "toy-paper": {"n_layer": 3, "n_head": 1, "d_model": 256, "block_size": 256, "pos": "learned"},
    "60m": {"n_layer": 10, "n_head": 8, "d_model": 768, "d_ff": 1536, "block_size": 1024},
    "160m": {"n_layer": 12, "n_head": 12, "d_model": 768, "block_size": 1024, **_LEDGER_BACKBONE},
    "290m": {"n_layer": 12, "n_head": 16, "d_model": 1024, "block_size": 1024, **_LEDGER_BACKBONE},
}
