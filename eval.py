"""Sinks, spikes and outliers, measured: one pass over the text, every number with its definition.

Four things go wrong together in a trained transformer, and each has several published measures that
disagree by an order of magnitude on one model. This file computes them side by side:

    sink       a head spends its attention on the first token      ratio_gu, ratio_spike, mass
    spike      one channel of one token is 1000 x the median       massive: value, place, life cycle
    outlier    heavy tails that an 8-bit grid cannot hold          max infinity norm, kurtosis
    structure  one channel dominates what the head decodes         persistence, BOS concentration

and, for the cures, where the attention that is not spent goes (`null`), which layers a router
reads (`depth`), and when a ledger commits (`structure.commit`).

How: `model(tokens, record=probe)` hands each intermediate tensor to the probes as it is computed; a
probe reduces it in fp32 and lets it go, so nothing of size layers x tokens x width is ever kept.
Attention matrices are built only in a second pass, over the first 64 tokens of every window:
attention is causal, so that pass sees exactly what a context of 64 sees.

Read first: the formulas, small functions; then one probe, `Sinks`; then `evaluate`.

    python eval.py runs/NAME               metrics.json and figures/ in the run's folder
    python eval.py runs/A runs/B           also one table (Markdown, CSV) and one figure
    python eval.py PATH --gsm8k FILE       Pass@1 instead (data/gsm8k.py)
    python eval.py PATH --stream 128:4     loss with a sliding cache instead
    python eval.py FOLDER --anatomy        where spikes and sinks come from, in a trained model

Shapes: B sequences, T tokens, S keys, H heads, d width, L sublayers; l counts sublayers from 0
(attention even, feed-forward odd), so the block number of arXiv 2603.05498 is l + 1.
"""
from __future__ import annotations

import argparse
import contextlib
import csv
import dataclasses
import functools
import io
import json
import math
import os
import sys
import time
import warnings
from collections import defaultdict

import numpy as np
import torch
import torch.nn.functional as F
from tqdm import tqdm

from data import gsm8k
from data.prepare import (DataError, Sequential, TokenFile, Windows, get_tokenizer, open_source,
                          opened)
from model import (KVCache, RMSNorm, StandardResidual, find_pretrained, load_checkpoint, load_model,
                   rope_table, rotate)

EPSILON = 0.3          # a head whose first-token attention exceeds this is a sink head
SINK_TOKENS = 64       # context of the sink measures [Gu 5.4] [Spike 3.3]
SPIKE_RATIO = 100      # a spike: this many medians of its hidden state; massive: 1000, and > 100
TIE = 0.999            # two maxima are one if they differ by less: rounding between batch sizes
TINY = 1e-30           # in the place of a paper's epsilon: only keeps 0 / 0 away


class EvalError(ValueError):
    """A request that cannot be measured, in one line."""


# what ends a measurement with one line: ValueError has CheckpointError, DataError and EvalError,
# the others are of files and of models whose numbers are not finite
FAILURES = ValueError, OSError, ArithmeticError, torch.linalg.LinAlgError


# ------------------------------------------------------------------------------------- formulas

def sequence_kurtosis(x: torch.Tensor, eps: float = 1e-6) -> torch.Tensor:
    """Non-excess kurtosis over all entries of each sequence, sigma unbiased: a Gaussian has 3.

    mean((x - mu)^4) / (sigma^4 + eps) [OASIS 1.8] [Bondarenko 5.3]. The papers' eps = 1e-6 is the
    measure itself for a tensor with sigma below 0.03; eps = TINY is scale-free. (B, ...) -> (B,).
    """
    x = x.flatten(1).float()                                                        # (B, N)
    square = (x - x.mean(1, keepdim=True)).square()                                 # (B, N)
    variance = square.sum(1) / max(1, x.shape[1] - 1)                               # (B)
    return square.square().mean(1) / (variance.square() + eps)                      # (B)


def token_kurtosis(x: torch.Tensor, eps: float = 1e-8) -> torch.Tensor:
    """Excess kurtosis over the channels of each token: m4 / (m2^2 + eps) - 3 [Ledger 2.8].

    With the paper's eps = 1e-8 a token of rms 0.004, such as the first commits of a ledger, scores
    -3 whatever its shape; eps = TINY is scale-free. (..., d) -> (...).
    """
    x = x.float()
    square = (x - x.mean(-1, keepdim=True)).square()                                # (..., d)
    m2 = square.mean(-1)                                                            # (...)
    return square.square().mean(-1) / (m2.square() + eps) - 3                       # (...)


def ratio_gu(probs: torch.Tensor, epsilon: float = EPSILON, k: int = 1) -> torch.Tensor:
    """Is key k a sink? alpha_k = sum_{t >= k} A[t, k] / (T - k + 1) > epsilon [Gu 5.4].

    k counts from 1 as in the paper. probs (B, H, T, T) -> 0 or 1, (B, H); the published ratio is
    the mean over layers, heads and sequences.
    """
    alpha = probs.float()[..., k - 1:, k - 1].mean(-1)                              # (B, H)
    return (alpha > epsilon).float()                                                # (B, H)


def ratio_spike(probs: torch.Tensor, epsilon: float = EPSILON) -> torch.Tensor:
    """Has the head any sink in the first half? max_{k <= T/2} sum_t A[t, k] / T > epsilon.

    [Spike 3.3]: always divided by T, so early keys, which more queries can see, are favoured.
    probs (B, H, T, T) -> 0 or 1, (B, H).
    """
    T = probs.shape[-1]
    alpha = probs.float().sum(-2) / T                                               # (B, H, T)
    return (alpha[..., :max(1, T // 2)].amax(-1) > epsilon).float()                 # (B, H)


def first_token_mass(probs: torch.Tensor) -> torch.Tensor:
    """Mean attention that the queries t >= 1 pay to position 0; query 0 has no choice.
    probs (B, H, T, T) -> (B, H)."""
    return probs.float()[..., 1:, 0].mean(-1)                                       # (B, H)


def max_median(M: torch.Tensor) -> torch.Tensor:
    """Largest over median channel: max_d M / (median_d M + 1e-6) [Ledger 2.8]. (.., d) -> (..)."""
    return M.amax(-1) / (M.median(-1).values + 1e-6)                                # (...)


def structure_of(M: torch.Tensor, M0: torch.Tensor) -> dict:
    """How one channel dominates a stream over depth [Ledger 2.8].

    M[l, d] is the mean of |x| after sublayer l over sequences and positions, M0 that of position 0
    alone; both (L, d). dominant_dim is the argmax of M averaged over depth; persistence the share
    of sublayers in which it is the largest channel; peak_layer where it peaks; bos_concentration
    M0 / M there (of position 0, whatever token it holds); peak_ratio the max of max_median(M).
    margin is ours: M[l, dim] over the largest other channel, averaged over l. Near 1 no channel
    dominates, and persistence, which only counts wins, is a coin toss between near-equals.
    """
    dim = int(M.mean(0).argmax())
    peak = int(M[:, dim].argmax())
    others = M.clone()
    others[:, dim] = 0
    margin = M[:, dim] / (others.amax(1) + 1e-6)                                    # (L)
    return {"dominant_dim": dim,
            "persistence": (M.argmax(1) == dim).double().mean().item(),
            "margin": margin.mean().item(),
            "peak_layer": peak,
            "peak_ratio": max_median(M).max().item(),
            "bos_concentration": (M0[peak, dim] / (M[peak, dim] + 1e-6)).item()}


def find_steps(trace, share: float = 0.25) -> tuple[list[int], list[int]]:
    """Step-up and step-down sublayers of a spike [Spike 3.4].

    trace: L + 1 signed values of the spike's channel at its token; [0] is the embedding, [l + 1]
    follows sublayer l. Rule: |value| rises, or falls, by at least `share` of its peak across the
    sublayer. A quarter, because models share the step between two sublayers (Qwen2.5: 8 and 10).
    """
    size = np.abs(np.asarray(trace, dtype=np.float64))
    jump, bar = np.diff(size), share * size.max()
    up, down = np.flatnonzero(jump >= bar), np.flatnonzero(jump <= -bar)
    return (up.tolist(), down.tolist()) if bar > 0 else ([], [])


def entropy(p: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """-sum p log p in nats, with 0 log 0 = 0."""
    return -torch.xlogy(p, p).sum(dim)


# --------------------------------------------------------------------------------------- probes
#
# A probe has `names` (what it wants to see), is called with every such tensor, and has a `result`;
# with `short`, it is shown the first 64 tokens of each window only.

class Fan:
    """Hands each recorded tensor to the probes that want it; a model computes nothing else."""

    def __init__(self, *probes):
        self.probes = probes
        self.names = set().union(*(probe.names for probe in probes))

    def __call__(self, name: str, l: int, x: torch.Tensor):
        for probe in self.probes:
            if name in probe.names:
                probe(name, l, x)


class Means:
    """Running means in fp64 on the host, by key."""

    def __init__(self):
        self.total, self.count = defaultdict(float), defaultdict(int)

    def add(self, key, x: torch.Tensor, over: int | tuple = 0):
        """Average x over its axes `over`, and over all calls."""
        over = (over,) if isinstance(over, int) else over
        self.total[key] = self.total[key] + x.float().sum(over).cpu().double()
        self.count[key] += math.prod(x.shape[axis] for axis in over)

    def __getitem__(self, key) -> torch.Tensor:
        return self.total[key] / max(1, self.count[key])

    def __contains__(self, key) -> bool:
        return key in self.total

    def depth(self, *prefix) -> list[int]:
        """The sublayers l for which the key (*prefix, l) was seen, in order."""
        return sorted(key[-1] for key in self.total if key[:-1] == prefix)

    def stack(self, *prefix) -> torch.Tensor:
        """Means of all sublayers under a prefix, (L, ...)."""
        return torch.stack([self[(*prefix, l)] for l in self.depth(*prefix)])


class Sinks:
    """Attention sinks, three ways, from attention matrices of at most 64 tokens."""

    names, short = {"attn_probs"}, True

    def __init__(self, epsilon: float = EPSILON):
        self.epsilon, self.mean, self.T = epsilon, Means(), 0

    def __call__(self, name, l, probs):
        self.T = probs.shape[-1]
        self.mean.add(("gu", l), ratio_gu(probs, self.epsilon))
        self.mean.add(("spike", l), ratio_spike(probs, self.epsilon))
        self.mean.add(("first", l), first_token_mass(probs))

    def result(self) -> dict:
        """Ratios are shares of (layer, head, sequence); per_head: first-token mass, layers x H."""
        first = self.mean.stack("first")                                            # (layers, H)
        return {"ratio_gu": self.mean.stack("gu").mean().item(),
                "ratio_spike": self.mean.stack("spike").mean().item(),
                "first_token_mass": first.mean().item(), "epsilon": self.epsilon, "T": self.T,
                "layers": self.mean.depth("first"), "per_head": first.tolist()}

    def brief(self) -> dict:
        return {key: self.result()[key] for key in ("first_token_mass", "ratio_gu")}


def decoded(seen) -> str:
    """The stream that the head reads: the committed one if there is one, else the residual."""
    return "committed" if any("committed" in key for key in seen) else "stream"


class Spikes:
    """Massive activations [Sun 5.5] and spikes [Spike 3.3] of the streams: size, place, number."""

    names = {"stream", "scratch", "committed"}
    keep = 8                # largest (position, channel) pairs remembered for each sublayer

    def __init__(self):
        self.mean, self.peak, self.top = Means(), {}, defaultdict(dict)
        self.seen = defaultdict(int)        # sequences, by (name, l)

    def __call__(self, name, l, x):
        if name == "stream" and ("committed", l) in self.peak:
            return                          # read by no head: it is scratch and committed mixed
        a, key = x.float().abs(), (name, l)                                         # (B, T, d)
        B, T, d = a.shape
        flat = a.flatten(1)                                                         # (B, T*d)
        median, (largest, where) = flat.median(1).values, flat.max(1)               # (B)
        massive = (flat > 100) & (flat >= 1000 * median[:, None])                   # (B, T*d)
        self.mean.add(("massive", *key), massive.sum(1))
        norm = a.norm(dim=-1)                                                       # (B, T)
        self.mean.add(("first", *key), norm[:, 0])
        self.mean.add(("rest", *key), norm[:, 1:], over=(0, 1))
        self.reach(key, largest, median, where, d)
        self.remember(key, *a.max(0), d)
        self.seen[key] += B

    def reach(self, key, largest, median, where, d: int):
        """Keep the maximum, its first place, and the medians of all sequences that reach it: when
        every window begins with the same BOS, rounding must not choose among them."""
        value, place, medians = self.peak.get(key, (0.0, None, []))
        peak = largest.max().item()
        if place is None or peak * TIE > value:
            b = int((largest >= TIE * peak).int().argmax())     # the first
            place, medians = (self.seen[key] + b, *divmod(int(where[b]), d)), []
        value = max(value, peak)
        self.peak[key] = value, place, medians + median[largest >= TIE * value].tolist()

    def remember(self, key, size, row, d: int):
        """Keep the largest (position, channel) pairs; each counts once, whatever the sequence."""
        size, where = size.flatten().topk(min(self.keep, size.numel()))
        top = self.top[key]
        for value, i in zip(size.tolist(), where.tolist()):
            found = (value, self.seen[key] + int(row.flatten()[i]))
            top[divmod(i, d)] = max(top.get(divmod(i, d), found), found)
        self.top[key] = dict(sorted(top.items(), key=lambda item: -item[1][0])[:self.keep])

    def result(self, tokens: torch.Tensor, name: str | None = None) -> dict | None:
        """For the decoded stream (or `name`). tokens: the ids that were shown, (n, T).

        max: largest |x| after any sublayer, on any token; median: of |x| over the T x d hidden
        state in which it lies, mean over those that share the maximum; ratio: max / median.
        count_sun: entries with |x| > 100 and >= 1000 x the median, per sequence, after the
        maximum's sublayer. position0_ratio: mean norm at position 0 over the mean norm elsewhere,
        by sublayer. top: its largest (position, dim).
        """
        name = name or decoded(self.peak)
        layers = sorted(l for n, l in self.peak if n == name)
        if not layers:
            return None
        layer = max(layers, key=lambda l: self.peak[name, l][0])
        value, (sequence, position, dim), medians = self.peak[name, layer]
        median = sum(medians) / len(medians)
        ratio = [(self.mean["first", name, l] / self.mean["rest", name, l]).item() for l in layers]
        top = [{"value": v, "token": int(tokens[n, p]), "position": p, "dim": c, "sequence": n}
               for (p, c), (v, n) in self.top[name, layer].items()]
        return {"channel": name, "max": value, "median": median, "ratio": value / (median + 1e-12),
                "count_sun": self.mean["massive", name, layer].item(), "layer": layer,
                "position": position, "dim": dim, "sequence": sequence,
                "token": int(tokens[sequence, position]),
                "position0_ratio": ratio, "position0_peak": max(ratio), "top": top}


class Outliers:
    """Max infinity norm, three readings, and kurtosis [OASIS 1.8], over the paper's hooks.

    Hooks: final norm, and for each layer the stream it hands on, the feed-forward's output, both
    pre-norms' outputs and the attention's output projection (with sandwich norms: after that norm).
    """

    names = {"final_norm", "stream", "sublayer_out", "norm_out"}

    def __init__(self, kinds: list[str]):
        self.kinds, self.mean = kinds, Means()
        self.layer_end = [l for l in range(len(kinds)) if kinds[l + 1:l + 2] != ["ffn"]]

    def __call__(self, name, l, x):
        if name == "stream" and l not in self.layer_end:
            return
        self.mean.add(("inf", name, l), x.float().abs().flatten(1).amax(1))         # (B)
        self.mean.add(("sequence", name, l), sequence_kurtosis(x))                  # (B)
        self.mean.add(("sequence_scale_free", name, l), sequence_kurtosis(x, TINY))

    def result(self) -> tuple[dict, dict]:
        """(max_inf_norm, kurtosis): per sequence, averaged over sequences, then the maximum of the
        infinity norm, or the mean of the kurtosis, over hooks."""
        values = lambda kind: {key[1:]: self.mean[key].item() for key in self.mean.total
                               if key[0] == kind}
        inf = values("inf")
        largest = max(inf, key=inf.get)
        ffn = [v for (name, l), v in inf.items()
               if name == "sublayer_out" and self.kinds[l] == "ffn"]
        return ({"all_hooks": inf[largest], "at": list(largest),
                 "layer_outputs": max(v for (name, l), v in inf.items() if name == "stream"),
                 "ffn_outputs": max(ffn, default=None)},
                {kind: float(np.mean(list(values(kind).values())))
                 for kind in ("sequence", "sequence_scale_free")})


class Channels:
    """Size and shape of every stream after every sublayer [Ledger 2.8], raw and at unit rms.

    Controls for what accumulation alone does to persistence: the commit increment, and the running
    sum of the stream that sublayers write to, with no gate.
    """

    names = {"stream", "scratch", "committed", "commit_increment"}
    stats = ("norm", "absmax", "max_median", "kurtosis", "kurtosis_scale_free", "dims_50x",
             "dims_massive")

    def __init__(self):
        self.mean, self.sum = Means(), None

    def __call__(self, name, l, x):
        x = x.float()
        if name == "commit_increment":
            return self.profile("increment", l, x)
        if name in ("stream", "scratch"):
            self.accumulate(name, l, x)
        if name == "stream" and ("M", "committed", l) in self.mean:
            return                                                  # as in Spikes
        self.profile(name, l, x)
        self.profile(name + " unit", l, F.normalize(x, dim=-1) * x.shape[-1] ** 0.5)
        self.shape_of(name, l, x)

    def profile(self, name, l, x):
        """M and M0 of `structure_of`."""
        self.mean.add(("M", name, l), x.abs(), over=(0, 1))
        self.mean.add(("M0", name, l), x[:, 0].abs())

    def shape_of(self, name, l, x):
        a = x.abs()                                                                 # (B, T, d)
        median = a.median(-1, keepdim=True).values                                  # (B, T, 1)
        top = a.amax(-1)                                                            # (B, T)
        values = (x.norm(dim=-1), top, top / (median[..., 0] + 1e-6), token_kurtosis(x),
                  token_kurtosis(x, TINY), (a >= 50 * median).sum(-1),
                  ((a > 100) & (a >= 1000 * median)).sum(-1))                       # (B, T) each
        for stat, value in zip(self.stats, values):
            self.mean.add((stat, name, l), value, over=(0, 1))

    def accumulate(self, name, l, x):
        if name == "stream" and ("M", "scratch", l) in self.mean:
            return
        self.sum = x if l == 0 else self.sum + x                                    # (B, T, d)
        self.profile("running", l, self.sum)

    def layer(self, name: str, l: int) -> dict | None:
        """Means over tokens: L2 norm, absmax, max / median, excess kurtosis over channels, channels
        at 50 x the median, massive channels; feat_maxmed is max / median of the mean profile M."""
        if ("M", name, l) not in self.mean:
            return None
        return {**{stat: self.mean[stat, name, l].item() for stat in self.stats},
                "feat_maxmed": max_median(self.mean["M", name, l]).item()}

    def structure(self, name: str) -> dict | None:
        """structure_of for a stream, and again with every token scaled to rms 1: under a scale-free
        final norm the size of a token is a free gauge, its direction is not [Ledger 2.8]."""
        if ("M", name, 0) not in self.mean:
            return None
        raw = structure_of(self.mean.stack("M", name), self.mean.stack("M0", name))
        if ("M", name + " unit", 0) in self.mean:
            unit = structure_of(self.mean.stack("M", name + " unit"),
                                self.mean.stack("M0", name + " unit"))
            raw |= {f"{key}_unit_rms": unit[key] for key in ("persistence", "margin",
                                                           "bos_concentration")}
        return raw

    def result(self, kinds: list[str]) -> tuple[dict, dict]:
        """(feat_maxmed, token_excess and per_layer of `outliers`; `structure` without gates)."""
        name = decoded(self.mean.total)
        layers = [{"layer": l, "kind": kind, **self.layer(name, l),
                   "scratch": self.layer("scratch", l)} for l, kind in enumerate(kinds)]
        average = lambda stat: float(np.mean([entry[stat] for entry in layers]))
        outliers = {"feat_maxmed": max(entry["feat_maxmed"] for entry in layers),
                    "kurtosis": {"token_excess": average("kurtosis"),
                                 "token_excess_scale_free": average("kurtosis_scale_free")},
                    "per_layer": layers}
        return outliers, {"channel": name, "decoded": self.structure(name),
                          "scratch": self.structure("scratch"),
                          "controls": {"increment": self.structure("increment"),
                                       "running_sum": self.structure("running")}}


class Commits:
    """When a ledger commits: gates c_l, and their profile c_l / sum c, blind to a common factor."""

    names = {"commit_gate"}

    def __init__(self, n_sublayer: int):
        self.last, self.mean, self.gates = n_sublayer - 1, Means(), []

    def __call__(self, name, l, c):
        self.gates = self.gates[:l] + [c.float()]                                   # (B, T) each
        self.mean.add(("gate", l), c, over=(0, 1))
        if l == self.last:
            c = torch.stack(self.gates)                                             # (L, B, T)
            share = c / (c.sum(0) + 1e-12)                                          # (L, B, T)
            self.mean.add("share", share, over=(1, 2))
            self.mean.add("entropy", entropy(share), over=(0, 1))

    def result(self) -> dict | None:
        """entropy: of the relative profile over depth, per token, in nats (uniform: log L).
        last_share near 1: the ledger has become an ordinary residual stream [Ledger 2.8]."""
        if not self.gates:
            return None
        share, gate = self.mean["share"], self.mean.stack("gate")
        return {"mean": gate.mean().item(), "per_layer": gate.tolist(),
                "relative_profile": share.tolist(), "last_share": share[-1].item(),
                "entropy": self.mean["entropy"].item(), "entropy_uniform": math.log(len(share))}


class Depth:
    """How a router over layers spends its weights, at every site that has a choice.

    max_weight is OASIS' collapse measure C: the largest routing weight, averaged over sites and
    tokens. entropy: of the whole routing distribution, its null option included, in nats;
    entropy_relative: divided by the log of the number of candidates. [OASIS 1.8]
    """

    names = {"depth_weights", "depth_null", "depth_beta", "depth_recency", "psi"}

    def __init__(self):
        self.mean, self.scalar = Means(), defaultdict(dict)

    def __call__(self, name, l, x):
        if name in ("depth_beta", "depth_recency"):
            self.scalar[name][l] = float(x)
        elif name != "depth_weights":
            self.mean.add((name, l), x, over=(0, 1))                                # (B, T)
        else:
            w = x.float()                                                           # (n, B, T)
            null = (1 - w.sum(0)).clamp(min=0)                                      # (B, T)
            self.mean.add(("weights", l), w, over=(1, 2))
            self.mean.add(("max", l), w.amax(0), over=(0, 1))
            self.mean.add(("entropy", l), entropy(w) + torch.special.entr(null), over=(0, 1))

    def result(self) -> dict | None:
        """weights: for each site, the mean weight of each candidate, the embedding first."""
        sites = self.mean.depth("weights")
        if not sites:
            return None
        weights = {l: self.mean["weights", l].tolist() for l in sites}
        chosen = [l for l in sites if len(weights[l]) > 1] or sites
        average = lambda key: float(np.mean([self.mean[key, l].item() for l in chosen]))
        values = lambda key: [self.mean[key, l].item() for l in self.mean.depth(key)]
        relative = [self.mean["entropy", l].item() / math.log(max(2, len(weights[l])))
                    for l in chosen]
        beta = list(self.scalar["depth_beta"].values())
        return {"max_weight": average("max"), "entropy": average("entropy"),
                "entropy_relative": float(np.mean(relative)), "null_mass": average("depth_null"),
                "sites": sites, "weights": list(weights.values()),
                "max_weight_per_site": values("max"), "null_per_site": values("depth_null"),
                "psi_per_layer": values("psi"),
                "beta": beta or None, "beta_mean": float(np.mean(beta)) if beta else None,
                "recency": list(self.scalar["depth_recency"].values()) or None}


class Nulls:
    """The attention that heads leave unspent, per layer and head; 0 where softmax sums to one. And
    what they spend on a learned key, which is no token either (--attn-bias)."""

    names = {"null", "bias_mass"}

    def __init__(self):
        self.mean = Means()

    def __call__(self, name, l, mass):
        self.mean.add((name, l), mass, over=(0, 2))                                 # (B, H, T)

    def result(self) -> dict:
        per_head = self.mean.stack("null")                                          # (layers, H)
        bias = self.mean.stack("bias_mass") if self.mean.depth("bias_mass") else None
        return {"token_mass": per_head.mean().item(), "layers": self.mean.depth("null"),
                "per_head": per_head.tolist(),
                "bias_mass": None if bias is None else bias.mean().item(),
                "bias_per_head": None if bias is None else bias.tolist()}


class NoOps:
    """The D.4 no-op probe [OASIS 1.8]: where a head adds next to nothing, where does it look?

    A (head, query) is nearly a no-op if the norm of its output, before the output projection, is
    below a quantile pooled over all layers, heads, queries and sequences. Queries 0 to 3 are left
    out: all they can see are sink tokens. The claim: without a null, no-ops force mass on the sink.
    """

    names, short = {"head_out", "attn_probs", "null"}, True
    first = 4

    def __init__(self, quantile: float = 0.1):
        self.quantile, self.seen = quantile, defaultdict(list)

    def __call__(self, name, l, x):
        x = x.float()[:, :, self.first:]                                            # (B, H, T-4, .)
        kept = {"head_out": lambda: {"norm": x.norm(dim=-1)}, "null": lambda: {"null": x},
                "attn_probs": lambda: {"sink": x[..., 0],
                                       "sink4": x[..., :self.first].sum(-1)}}[name]()
        for key, value in kept.items():                                             # (B, H, T-4)
            self.seen[key].append(value.flatten().cpu().numpy())

    def result(self) -> dict | None:
        """Mean mass on position 0, on positions 0 to 3, on the null: at no-ops, and elsewhere."""
        if not self.seen["norm"] or not self.seen["norm"][0].size:
            return None
        x = {key: np.concatenate(parts).astype(np.float64) for key, parts in self.seen.items()}
        bar = float(np.quantile(x["norm"], self.quantile))
        low = x["norm"] <= bar
        rest = low if low.all() else ~low
        return {"quantile": self.quantile, "norm_below": bar,
                **{f"{key}_{where}": float(x[key][mask].mean()) for key in ("sink", "sink4", "null")
                   for where, mask in (("noop", low), ("rest", rest))}}


class Posteriors:
    """E = sum q log q, the negative entropy of reading token j through layer i, q = alpha_i p_i(j):
    depth weight times that layer's token attention, a head's at a time (D.4) [OASIS 1.8].

    The embedding attends to nothing but itself; a feed-forward source shares its layer's attention,
    as it does psi. Sources that mix several layers (block AttnRes) have no p_i and are left out.
    """

    names, short = {"attn_probs", "depth_weights"}, True

    def __init__(self, kinds: list[str]):
        self.kinds, self.mean, self.attention, self.writing = kinds, Means(), [], False

    def __call__(self, name, l, x):
        if name == "attn_probs":
            self.attention = self.attention if l else []
            p = x.float()                                                           # (B, H, T, S)
            self.attention.append((p.sum(-1).mean(1), entropy(p, -1).mean(1)))      # (B, T) x 2
            return
        self.writing |= l == 0          # OASIS routes after a sublayer, Kimi before the next one
        layer = [self.kinds[:i + 1].count("attn") - 1 for i in range(len(self.kinds))]
        owner = layer[:l]                                       # Kimi: one source per sublayer
        if self.writing:                                        # OASIS: finished layers, then this
            owner = [*range(layer[l]), *[layer[l]] * (len(x) - 1 - layer[l])]
        if len(owner) + 1 == len(x) > 1:
            w = x.float()                                                           # (n, B, T)
            E = torch.xlogy(w, w).sum(0)                                            # (B, T)
            for i, a in enumerate(owner, start=1):
                mass, spread = self.attention[a]                                    # (B, T)
                E = E + torch.xlogy(w[i], w[i]) * (mass - 1) - w[i] * spread        # (B, T)
            self.mean.add("E", E, over=(0, 1))

    def result(self) -> float | None:
        return self.mean["E"].item() if "E" in self.mean else None


class Toy:
    """Sink, value drain and residual peak of the Bigram-Backcopy task, and what it learns of the
    task's two parts. [Backcopy 5.7]

    A query at a trigger must look at the token before it; at any other token attention has nothing
    to add, and what it does there, on *non-trigger* queries, is what a sink is.
    """

    names = {"attn_probs", "null", "bias_mass", "v", "stream"}

    def __init__(self, task):
        self.task, self.mean = task, Means()

    def see(self, x, y):
        """The ids (B, T) that the model is about to be shown, and its targets."""
        self.trigger, self.plain = self.task.masks(x)                               # (B, T) x 2
        law = -torch.from_numpy(self.task.bigram)[x, y].log()                       # (B, T)
        self.mean.add("law", law[self.plain])

    def __call__(self, name, l, x):
        if name in ("attn_probs", "null", "bias_mass"):
            mass = x[..., 0] if name == "attn_probs" else x                         # (B, H, T)
            self.mean.add((name, l), mass.transpose(1, 2)[self.plain])              # (queries, H)
        else:
            norm = x.float().norm(dim=-1)                           # (B, T); of "v" (B, G, T)
            self.mean.add((name, "bos", l), norm[..., :1].flatten(), over=0)
            self.mean.add((name, "rest", l), norm[..., 1:].flatten(), over=0)

    def score(self, nll):
        """nll (B, T): of the targets of what was shown."""
        for name, mask in (("markov", self.plain), ("copy", self.trigger)):
            self.mean.add(name, nll[mask])                                          # (queries,)

    def result(self) -> dict:
        """bos_mass, null_mass, bias_mass: what non-trigger queries pay to BOS, to nothing and to
        the learned key of --attn-bias, (layers, H). value_drain: norm of BOS' value over the mean
        of the others', by layer; residual_peak: that of the residual, after every sublayer.
        sink, null, bias and peak are their maxima; drain is the value_drain of the layer with the
        largest sink. markov_loss (non-trigger queries) and copy_loss (trigger queries) in nats, for
        which oracle is the least expected; markov_excess: above what the true law scores on the
        very tokens shown.
        """
        mean = self.mean
        bos, null = mean.stack("attn_probs"), mean.stack("null")                    # (layers, H)
        bias = mean.stack("bias_mass") if mean.depth("bias_mass") else None
        drain = mean.stack("v", "bos") / mean.stack("v", "rest")                    # (layers)
        peak = mean.stack("stream", "bos") / mean.stack("stream", "rest")           # (L)
        return {"sink": bos.max().item(), "null": null.max().item(),
                "bias": None if bias is None else bias.max().item(),
                "bias_mass": None if bias is None else bias.tolist(),
                "drain": drain[bos.amax(1).argmax()].item(), "peak": peak.max().item(),
                "markov_loss": mean["markov"].item(), "copy_loss": mean["copy"].item(),
                "markov_excess": (mean["markov"] - mean["law"]).item(),
                "oracle": self.task.oracle(),
                "bos_mass": bos.tolist(), "null_mass": null.tolist(),
                "value_drain": drain.tolist(), "residual_peak": peak.tolist()}


# ------------------------------------------------------------------------------------- evaluate

def has_table(config) -> bool:
    """Does the model end where its table of positions ends?"""
    return config.pos == "learned" or config.gate == "position"


def unwrap(model):
    """The Transformer inside torch.compile and DistributedDataParallel: records need its Python."""
    while hasattr(model, "_orig_mod") or hasattr(model, "module"):
        model = model._orig_mod if hasattr(model, "_orig_mod") else model.module
    return model


@contextlib.contextmanager
def evaluating(model):
    """Evaluation mode and no gradients; afterwards every module's mode is what it was."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, mode in modes:
            module.training = mode


def is_source(tokens) -> bool:
    """A token file or the toy (data.prepare.open_source), and not an array of ids."""
    return hasattr(tokens, "windows")


def are_windows(tokens) -> bool:
    return getattr(tokens, "ndim", 1) == 2


def open_windows(model, tokens, *, T=None, n_sequences=64, batch_size=8, bos_policy="none",
                 tokenizer=None, bos=None, eot=None, streamed=False):
    """Whatever evaluate accepts -> iterable of (x, y) batches that knows its counts. streamed: a
    window may be longer than the learned positions, for the model never sees it whole."""
    vocab, block = model.config.vocab_size, model.config.block_size
    if is_source(tokens) and tokens.vocab_size > vocab:
        raise EvalError(f"{tokens.path} has a vocabulary of {tokens.vocab_size}, the model one of "
                        f"{vocab}")
    if min(1 if T is None else T, n_sequences, batch_size) < 1:
        raise EvalError("T, n_sequences and batch_size must be at least 1")
    if T is not None and T > block and has_table(model.config) and not streamed:
        raise EvalError(f"T={T} is longer than the model's {block} learned positions")
    if not is_source(tokens):
        tokens = np.asarray(tokens.cpu() if torch.is_tensor(tokens) else tokens)
    if are_windows(tokens):
        T = min(T or block, tokens.shape[1] - 1)
        if T < 1 or not len(tokens):
            raise EvalError(f"no windows to evaluate in an array of shape {tokens.shape}")
        rows = tokens[:n_sequences, :T + 1]                                         # (n, T + 1)
        windows = Sequential(Windows(rows.reshape(-1), T, batch_size, tokenizer=tokenizer),
                             np.arange(len(rows)) * (T + 1))
    else:
        cut = tokens.windows if is_source(tokens) else functools.partial(Windows, tokens)
        windows = cut(T or block, batch_size, bos_policy=bos_policy, bos=bos, eot=eot,
                      tokenizer=tokenizer).sequential(n_sequences)
    for x, y in windows:
        low, top = min(x.min(), y.min()).item(), max(x.max(), y.max()).item()
        if low < 0 or top >= vocab:
            raise EvalError(f"token id {low if low < 0 else top} lies outside the model's "
                            f"vocabulary of {vocab}")
    return windows


def token_nll(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Negative log-likelihood of every target in nats, fp64 on the host; one row at a time, for a
    vocabulary may be large. (B, T, V), (B, T) -> (B, T)."""
    return torch.stack([F.cross_entropy(row.float(), y, reduction="none").cpu().double()
                        for row, y in zip(logits, targets)])


def summed_nll(logits: torch.Tensor, targets: torch.Tensor) -> float:
    """The same, summed."""
    return token_nll(logits, targets).sum().item()


def measure_val(nll: float, windows) -> dict:
    """Loss in nats per target; perplexities per token, word and byte, bits per byte, of one sum.

    Special ids (BOS, end of text) among the targets count for the loss but are no bytes of the
    text: bits per byte = nll / (n_bytes ln 2). A uniform model of bytes has exactly 8. Words are
    whitespace-separated. None where the tokenizer that would count is not at hand.
    """
    try:
        n_bytes, n_words = windows.n_bytes, windows.n_words
    except DataError:
        n_bytes = n_words = None
    per = lambda count: math.exp(min(nll / count, 700.0)) if count else None
    return {"loss": nll / windows.n_targets, "token_ppl": per(windows.n_targets),
            "word_ppl": per(n_words), "byte_ppl": per(n_bytes),
            "bits_per_byte": nll / n_bytes / math.log(2) if n_bytes else None,
            "n_targets": windows.n_targets, "n_bytes": n_bytes, "n_words": n_words}


def loss_by_quarter(by_position: torch.Tensor) -> dict:
    """Mean loss in each quarter of the context: training may count only a part of it. (T,) -> 4."""
    parts = np.array_split(by_position.numpy(), 4)
    return {"loss_by_quarter": [float(part.mean()) if part.size else None for part in parts]}


def measure_steps(model, tokens: torch.Tensor, channel: str, position: int, dim: int) -> dict:
    """The life of one spike: its signed value after every sublayer, and `find_steps` of it.

    tokens (T,): the sequence in which it is largest. Values before the first sublayer: the
    embedding's, or 0 for a committed stream, which starts empty. Step-down sublayers write the
    opposite sign.
    """
    trace = {-1: 0.0}

    def record(name, l, x):
        trace[-1 if name == "embedding" else l] = x[0, position, dim].item()

    record.names = {channel} if channel == "committed" else {channel, "embedding"}
    model(tokens[None].to(model.embed.weight.device), record=record)
    values = [trace[l] for l in sorted(trace)]
    up, down = find_steps(values)
    return {"step_up": up, "step_down": down, "trace": values}


def run_passes(model, windows, probes, batch_size: int, progress: bool = False):
    """Show the windows to the probes, whole and their first 64 tokens -> summed nll, ids (n, T),
    mean nll at each position (T,)."""
    whole = Fan(*(probe for probe in probes if not hasattr(probe, "short")))
    short = Fan(*(probe for probe in probes if hasattr(probe, "short")))
    device, shown, nll, by_position, count = model.embed.weight.device, [], 0.0, 0.0, 0
    batches = -(-len(windows) // batch_size)
    for x, y in tqdm(windows, "evaluate", batches, disable=None if progress else True, leave=False):
        shown.append(x)
        for probe in probes:
            if hasattr(probe, "see"):
                probe.see(x, y)
        x, y = x.to(device), y.to(device)                                           # (B, T)
        losses = token_nll(model(x, record=whole)[0], y)                            # (B, T)
        nll, by_position = nll + losses.sum().item(), by_position + losses.sum(0)
        for probe in probes:
            if hasattr(probe, "score"):
                probe.score(losses)
        if not math.isfinite(nll):
            raise EvalError(f"the loss is {nll} in evaluation batch {len(shown)} of {batches}: the "
                            "model's logits are not finite")
        model(x[:, :SINK_TOKENS], record=short)
        count += y.numel()
    assert count == windows.n_targets, f"{count} targets were scored, not {windows.n_targets}"
    return nll, torch.cat(shown), by_position / len(windows)


def describe(model, tokens, shown, bos_policy: str, bos) -> dict:
    """The protocol: everything that must be known to compare the numbers with other numbers."""
    weight, is_file = model.embed.weight, is_source(tokens)
    bos = tokens.bos if bos is None and is_file else bos
    given = are_windows(tokens)
    n, T = shown.shape
    policy = "as given" if given else getattr(tokens, "bos_policy", bos_policy)
    double = 0 if bos is None or T < 2 else int((shown[:, :2] == bos).all(1).sum())
    if double:
        warnings.warn(f"{double} of {n} windows begin with two BOS ids", stacklevel=3)
    source = tokens.source if is_file else "array"
    spacing = getattr(tokens, "spacing", "spread evenly, not overlapping, ")
    return {"torch": torch.__version__, "device": str(weight.device),
            "dtype": str(weight.dtype).removeprefix("torch."),
            "config": dataclasses.asdict(model.config), "n_params": model.count_params()["total"],
            "mflop_per_token": model.flops_per_token() / 1e6,
            "data": source, "data_sha256": tokens.sha256 if is_file else None,
            "tokenizer": tokens.tokenizer if is_file else None,
            "T": T, "n_sequences": n, "bos_policy": policy, "first_ids": shown[0, :8].tolist(),
            "double_bos": double,
            "text": f"{source}{f' ({tokens.split})' if is_file else ''}, {n} windows of {T} tokens "
                    f"{'' if given else spacing}"
                    f"BOS {policy}, every target scored once, context restarts in each window"}


def evaluate(model, tokens, *, T: int | None = None, n_sequences: int = 64, batch_size: int = 8,
             bos_policy: str = "none", protocol: dict | None = None, light: bool = False,
             epsilon: float = EPSILON, tokenizer=None, bos: int | None = None,
             eot: int | None = None, progress: bool = False) -> dict:
    """Every metric of metrics.json for a model on a text; nested dict of plain Python.

    tokens: a source (a data.TokenFile, or the toy), a 1-d array or tensor of ids (cut into windows
    of T, by default the model's block_size), or an (N, T + 1) array of windows. tokenizer, bos, eot
    are the file's, or may be given for arrays (bytes and words are counted only with a tokenizer).
    protocol: further entries for the protocol. light: only loss, `massive`, `sinks`, kurtosis, null
    mass, a router's summary and, of the toy, `backcopy`, for probes during training.
    Deterministic, touches no random generator, leaves the model in the mode it was in.
    Raises EvalError or DataError: ids outside the vocabulary, a text shorter than a window.
    """
    model = unwrap(model)
    windows = open_windows(model, tokens, T=T, n_sequences=n_sequences, batch_size=batch_size,
                           bos_policy=bos_policy, tokenizer=tokenizer, bos=bos, eot=eot)
    kinds = model.kinds
    spikes, sinks = Spikes(), Sinks(epsilon)
    outliers, channels, commits = Outliers(kinds), Channels(), Commits(len(kinds))
    depth, nulls, noops, posteriors = Depth(), Nulls(), NoOps(), Posteriors(kinds)
    toy = [Toy(windows.task)] if hasattr(windows, "task") else []
    probes = [spikes, sinks, outliers, depth, nulls, *toy] if light else \
        [spikes, sinks, outliers, channels, commits, depth, nulls, noops, posteriors, *toy]
    with evaluating(model):
        nll, shown, by_position = run_passes(model, windows, probes, batch_size, progress)
        massive = spikes.result(shown)
        if not light:
            massive |= measure_steps(model, shown[massive["sequence"]], massive["channel"],
                                     massive["position"], massive["dim"])
            massive["scratch"] = spikes.result(shown, "scratch")
    metrics = {"protocol": describe(model, tokens, shown, bos_policy, bos)
               | (protocol or {}), "val": measure_val(nll, windows) | loss_by_quarter(by_position),
               "massive": massive, "sinks": sinks.result(),
               "backcopy": toy[0].result() if toy else None}
    inf_norm, kurtosis = outliers.result()
    routing = depth.result()
    if light:
        few = ("max_weight", "entropy", "null_mass", "beta", "beta_mean", "recency")
        return metrics | {
            "outliers": {"max_inf_norm": inf_norm, "kurtosis": kurtosis}, "null": nulls.result(),
            "depth": routing and {key: routing[key] for key in few}}
    sizes, structure = channels.result(kinds)
    kurtosis |= sizes.pop("kurtosis")
    return metrics | {
        "outliers": {"max_inf_norm": inf_norm, "kurtosis": kurtosis, **sizes},
        "structure": structure | {"commit": commits.result()},
        "depth": routing and routing | {"negative_entropy": posteriors.result()},
        "null": nulls.result() | {"no_op": noops.result()}}


# -------------------------------------------------------------------------------------- streaming

STREAM_KEEP = 4         # tokens that the other half of each comparison keeps [Streaming 3.2]


def parse_stream(spec: str) -> tuple[int, int]:
    """"WINDOW[:KEEP]" -> (window, keep)."""
    window, _, keep = spec.partition(":")
    if not (window.isdecimal() and (keep.isdecimal() or not keep)):
        raise EvalError(f"--stream {spec}: give WINDOW or WINDOW:KEEP, in tokens")
    return int(window), int(keep or 0)


@torch.no_grad()
def stream_nll(model, x, y, window: int, keep: int = 0, chunk: int = 1) -> torch.Tensor:
    """Loss of every token of streams far longer than the cache. x, y (B, N) -> (B, N), fp64.

    The cache holds at most `window` tokens, `keep` of them the stream's first [Streaming 3.2].
    Tokens come `chunk` at a time, after as many of the oldest others have been forgotten; so each
    sees window - chunk + 1 to window tokens, itself included, at positions counted inside the
    cache. Nothing is computed again: above the first layer the keys and values that stay still
    hold what they read from tokens since forgotten.
    """
    config, weight = model.config, model.embed.weight
    cache = KVCache(config, len(x), window, weight.device, weight.dtype)
    losses = []
    for part, target in zip(x.split(chunk, 1), y.split(chunk, 1)):                  # (B, chunk)
        cache.slide(config, part.shape[1], keep)
        logits = model(part.to(weight.device), cache=cache)[0]                      # (B, chunk, V)
        losses.append(token_nll(logits, target.to(weight.device)))
    return torch.cat(losses, 1)                                                     # (B, N)


def measure_stream(model, tokens, specs, *, n_tokens: int | None = None, n_streams: int = 8,
                   chunk: int | None = None, progress: bool = False, **options) -> dict:
    """Does the model break when its first token leaves the cache? -> {"128:0": {...}, ...}.

    specs: (window, keep) pairs; to the first window keep 0 and keep 4 are added, whose difference
    in loss is `delta`: above 0, the model needed the tokens that were forgotten only because they
    were the first. loss: mean nats per token after the window is full, over n_streams pieces of
    the text, each n_tokens long (default 8 windows); loss_before: until then, equal for all keeps.
    curve: mean loss of each quarter window. chunk: a sixteenth of the window unless given.
    options: open_windows' bos_policy, tokenizer, ...
    """
    model, first = unwrap(model), specs[0][0]
    specs = list(dict.fromkeys([*specs, (first, 0), (first, STREAM_KEEP)]))
    widest = max(window for window, _ in specs)
    n_tokens = n_tokens or 8 * widest
    check_streams(model, specs, n_tokens, chunk)
    windows = open_windows(model, tokens, T=n_tokens, n_sequences=n_streams, batch_size=n_streams,
                           streamed=True, **options)
    x, y = next(iter(windows))                                                      # (B, N)
    found = {"protocol": {"n_tokens": n_tokens, "n_streams": len(x), "positions": "in the cache",
                          "chunk": {window: chunk or max(1, window // 16) for window, _ in specs},
                          "data": getattr(tokens, "source", "array"), **options}}
    with evaluating(model):
        for window, keep in tqdm(specs, "stream", disable=None if progress else True, leave=False):
            nll = stream_nll(model, x, y, window, keep, chunk or max(1, window // 16)).mean(0)
            if not nll.isfinite().all():
                raise EvalError("the loss of the stream is not finite")
            size = max(1, window // 4)
            found[f"{window}:{keep}"] = {
                "loss": nll[window:].mean().item(), "loss_before": nll[:window].mean().item(),
                "curve": [part.mean().item() for part in nll.split(size)], "curve_step": size}
    delta = found[f"{first}:0"]["loss"] - found[f"{first}:{STREAM_KEEP}"]["loss"]
    return found | {"delta": delta}


def check_streams(model, specs, n_tokens: int, chunk: int | None):
    """One line for windows that cannot be streamed."""
    block = model.config.block_size
    for window, keep in specs:
        if window < 2 or keep + (chunk or max(1, window // 16)) > window:
            raise EvalError(f"a window of {window} has no room for {keep} kept and "
                            f"{chunk or max(1, window // 16)} new tokens")
        if window > block and has_table(model.config):
            raise EvalError(f"a window of {window} is longer than the model's {block} learned "
                            "positions")
        if n_tokens <= window:
            raise EvalError(f"{n_tokens} tokens never fill a window of {window}")


# ------------------------------------------------------------------------------- files and tables

def write_text(path: str, text: str) -> str:
    """Write to a temporary name in the same folder, then rename. Returns path."""
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    temporary = f"{path}.tmp"
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        if os.path.exists(temporary):
            os.remove(temporary)
    return path


def plain(x):
    """Strict JSON: numbers that are not finite become null, numpy and torch scalars Python's."""
    if isinstance(x, dict):
        return {str(key): plain(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [plain(value) for value in x]
    x = x.item() if hasattr(x, "item") else x
    return None if isinstance(x, float) and not math.isfinite(x) else x


def merge(old: dict, new: dict) -> dict:
    both = {key: merge(old[key], new[key]) for key in old.keys() & new.keys()
            if isinstance(old[key], dict) and isinstance(new[key], dict)}
    return old | new | both


def read_metrics(run_dir: str) -> dict:
    """A run's metrics.json, {} if there is none. Raises EvalError if it cannot be read."""
    path = os.path.join(run_dir, "metrics.json")
    try:
        with open(path, encoding="utf-8") as file:
            metrics = json.load(file)
        if not isinstance(metrics, dict):
            raise ValueError("no JSON object")
        return metrics
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise EvalError(f"{path} cannot be read ({error}): move it away first") from None


def save_metrics(run_dir: str, metrics: dict) -> str:
    """Merge metrics into RUN/metrics.json, atomically; what others measured stays. -> path."""
    merged = merge(read_metrics(run_dir), plain(metrics))
    return write_text(os.path.join(run_dir, "metrics.json"), json.dumps(merged, indent=1) + "\n")


COLUMNS = [     # header, path in metrics.json, format: how `compare` reads a run
    ("loss", "val.loss", ".4f"), ("bits/byte", "val.bits_per_byte", ".4f"),
    ("max inf norm, all", "outliers.max_inf_norm.all_hooks", ".2f"),
    ("max inf norm, layers", "outliers.max_inf_norm.layer_outputs", ".2f"),
    ("max inf norm, FFNs", "outliers.max_inf_norm.ffn_outputs", ".2f"),
    ("kurtosis", "outliers.kurtosis.sequence", ".2f"),
    ("token excess", "outliers.kurtosis.token_excess", ".2f"),
    ("feature max/med", "outliers.feat_maxmed", ".2f"),
    ("spike", "massive.max", ".2f"), ("spike / median", "massive.ratio", ".1f"),
    ("position-0 norm ratio", "massive.position0_peak", ".2f"),
    ("sink ratio (Gu)", "sinks.ratio_gu", ".1%"),
    ("sink ratio (Spike)", "sinks.ratio_spike", ".1%"),
    ("first-token mass", "sinks.first_token_mass", ".3f"),
    ("persistence", "structure.decoded.persistence", ".2f"),
    ("persistence, unit rms", "structure.decoded.persistence_unit_rms", ".2f"),
    ("BOS concentration", "structure.decoded.bos_concentration", ".2f"),
    ("BOS conc., unit rms", "structure.decoded.bos_concentration_unit_rms", ".2f"),
    ("mean commit gate", "structure.commit.mean", ".3f"),
    ("null mass", "null.token_mass", ".3f"), ("attention-bias mass", "null.bias_mass", ".3f"),
    ("depth max", "depth.max_weight", ".3f"),
    ("toy: BOS mass, non-trigger", "backcopy.sink", ".3f"),
    ("toy: null mass, non-trigger", "backcopy.null", ".3f"),
    ("toy: bias mass, non-trigger", "backcopy.bias", ".3f"),
    ("toy: value drain", "backcopy.drain", ".2f"), ("toy: residual peak", "backcopy.peak", ".2f"),
    ("toy: Markov loss - law's", "backcopy.markov_excess", ".3f"),
    ("toy: copy loss", "backcopy.copy_loss", ".3f")]


def lookup(metrics, path: str):
    """A value by its dotted path, list indices included ("massive.position0_ratio.0"), or None."""
    for key in path.split("."):
        if isinstance(metrics, list) and key.lstrip("-").isdigit():
            metrics = metrics[int(key)] if -len(metrics) <= int(key) < len(metrics) else None
        else:
            metrics = metrics.get(key) if isinstance(metrics, dict) else None
    return metrics


def as_text(value, spec: str) -> str:
    return "–" if value is None or isinstance(value, (dict, list)) else format(value, spec)


def markdown(header: list[str], rows: list[list[str]]) -> str:
    """A Markdown table: first column left, the others right."""
    rule = [":--"] + ["--:"] * (len(header) - 1)
    safe = lambda row: " | ".join(cell.replace("|", "\\|") for cell in row)
    return "\n".join(f"| {safe(row)} |" for row in [header, rule, *rows]) + "\n"


def compare(runs: list[tuple[str, dict]], columns=COLUMNS, out_dir: str | None = None):
    """(name, metrics) of several runs -> Markdown table, CSV table, path of one figure or None.

    One row a run. The CSV has full precision and dotted paths; columns that no run has are left
    out. With out_dir: comparison.md, .csv and .png are written there.
    """
    columns = [c for c in columns if any(lookup(m, c[1]) is not None for _, m in runs)]
    rows = [[name] + [as_text(lookup(metrics, path), spec) for _, path, spec in columns]
            for name, metrics in runs]
    table = markdown(["run"] + [header for header, _, _ in columns], rows)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["run"] + [path for _, path, _ in columns])
    for name, metrics in runs:
        writer.writerow([name] + [lookup(metrics, path) for _, path, _ in columns])
    figure = None
    if out_dir is not None:
        write_text(os.path.join(out_dir, "comparison.md"), table)
        write_text(os.path.join(out_dir, "comparison.csv"), text.getvalue())
        figure = save_figure(draw_comparison(runs), os.path.join(out_dir, "comparison.png"))
    return table, text.getvalue(), figure


def study_table(results: list[dict], columns=COLUMNS, beside: tuple = ()) -> str:
    """Seeds averaged: results of {"arm", "seed", "metrics"} -> Markdown, mean ± sd, a row per arm.

    sd is the sample's (n - 1); with one seed there is none. A cell for which some seeds have no
    value says how many it averages. columns: (header, dotted path, format) as in COLUMNS.
    beside: (header, {arm: text}), a last column of what somebody else reports.
    """
    arms = list(dict.fromkeys(result["arm"] for result in results))
    rows = []
    for arm in arms:
        seeds = [result for result in results if result["arm"] == arm]
        cells = []
        for _, path, spec in columns:
            values = [lookup(result["metrics"], path) for result in seeds]
            values = [v for v in values if v is not None]
            cell = as_text(float(np.mean(values)), spec) if values else "–"
            if len(values) > 1:
                cell += f" ± {format(float(np.std(values, ddof=1)), spec.lstrip('+'))}"
            cells.append(cell + (f" ({len(values)})" if 0 < len(values) < len(seeds) else ""))
        rows.append([arm, str(len(seeds)), *cells, *(texts.get(arm, "–") for texts in beside[1:])])
    return markdown(["arm", "seeds"] + [header for header, _, _ in columns] + [*beside[:1]], rows)


def relative_table(results: list[dict], columns, reference: str) -> str:
    """Change of each measure against the reference arm's run of the same seed, in percent."""
    base = {r["seed"]: r["metrics"] for r in results if r["arm"] == reference}
    changes = []
    for r in results:
        pairs = {path: (lookup(r["metrics"], path), lookup(base[r["seed"]], path))
                 for _, path, _ in columns if r["seed"] in base}
        flat = {path.replace(".", "/"): 100 * (a / b - 1) for path, (a, b) in pairs.items()
                if a is not None and b}
        changes.append({**r, "metrics": flat})
    return study_table(changes, [(header, path.replace(".", "/"), "+.1f")
                                 for header, path, _ in columns])


# ---------------------------------------------------------------------------------------- figures

BLUE, RED = "#0072B2", "#D55E00"        # Okabe and Ito: safe for colour-blind eyes


def new_figure(width: float, height: float, rows: int = 1, cols: int = 1, **options):
    """A figure of inches, with its axes as a flat list. No pyplot: no global state, no display."""
    from matplotlib.figure import Figure
    fig = Figure(figsize=(width, height), layout="constrained")
    axes = fig.subplots(rows, cols, squeeze=False, **options)
    for ax in axes.flat:
        ax.spines[["top", "right"]].set_visible(False)
    return fig, list(axes.flat)


def save_figure(fig, path: str) -> str:
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    fig.savefig(f"{path}.tmp", format="png", dpi=140)
    os.replace(f"{path}.tmp", path)
    return path


SUBLAYER = "sublayer (even: attention, odd: FFN)"


def draw_layers(metrics: dict):
    """Size and tails of the decoded and of the scratch stream after every sublayer."""
    layers, channel = metrics["outliers"]["per_layer"], metrics["structure"]["channel"]
    name = {"committed": "committed C (decoded)"}.get(channel, "residual stream")
    at = [entry["layer"] for entry in layers]
    fig, axes = new_figure(11, 3.4, 1, 3)
    for ax, key, title in zip(axes, ("norm", "max_median", "kurtosis_scale_free"), (
            "L2 norm", "largest / median channel", "excess kurtosis over channels")):
        ax.plot(at, [entry[key] for entry in layers], "o-", color=BLUE, label=name, ms=4)
        if layers[0]["scratch"]:
            ax.plot(at, [entry["scratch"][key] for entry in layers], "s--", color=RED, ms=4,
                    label="scratch D")
        ax.set(title=title, xlabel=SUBLAYER, ylabel="mean over tokens")
        ax.xaxis.get_major_locator().set_params(integer=True)
    axes[0].legend(frameon=False)
    return fig


def draw_surface(a: np.ndarray, massive: dict):
    """|activation| over 64 tokens x channels, a (T, d), after the sublayer of the largest spike."""
    from matplotlib.figure import Figure
    start = massive["position"] // 64 * 64
    a, strip = a[start:start + 64], -(-a.shape[1] // 256)
    a = np.maximum.reduceat(a, np.arange(0, a.shape[1], strip), axis=1)     # at most 256 strips
    fig = Figure(figsize=(7, 5), layout="constrained")
    ax = fig.add_subplot(projection="3d")
    channel, token = np.meshgrid(np.arange(a.shape[1]) * strip, start + np.arange(len(a)))
    ax.plot_surface(channel, token, a, cmap="cividis", rstride=1, cstride=1, linewidth=0)
    ax.set(xlabel="channel", ylabel="token position", zlabel="|activation|",
           title=f"{massive['channel']} after sublayer {massive['layer']}: {massive['max']:.3g} at "
                 f"position {massive['position']}, channel {massive['dim']}")
    ax.view_init(elev=28, azim=-60)
    ax.set_box_aspect(None, zoom=0.9)       # room for the z label
    return fig


def draw_grid(rows: list[list[float]], title: str, xlabel: str, ylabel: str, unit: str, top=None,
              ticks=None):
    """A heat map with its values written in; rows may differ in length."""
    v = np.full((len(rows), max(map(len, rows))), np.nan)
    for row, values in zip(v, rows):
        row[:len(values)] = values
    top = top or max(np.nanmax(v), 1e-6)
    fig, (ax,) = new_figure(2.6 + 0.42 * max(6, v.shape[1]), 1.5 + 0.36 * max(4, len(v)))
    image = ax.imshow(v, cmap="cividis", vmin=0, vmax=top, aspect="auto")
    for (i, j), value in np.ndenumerate(v):
        if v.size <= 300 and not np.isnan(value):
            ax.text(j, i, f"{value:.2f}", ha="center", va="center", fontsize=8,
                    color="black" if value > 0.55 * top else "white")
    ax.set(title=title, xlabel=xlabel, ylabel=ylabel)
    ax.set_yticks(range(len(v)), ticks or range(len(v)))
    ax.xaxis.get_major_locator().set_params(integer=True)
    fig.colorbar(image, ax=ax, label=unit)
    return fig


def draw_attention(maps: list[tuple[str, np.ndarray]]):
    """Attention of a few heads, (title, (T, S)); shades by square root, to show the faint part."""
    from matplotlib.colors import PowerNorm
    fig, axes = new_figure(2.6 * len(maps) + 0.8, 3.1, 1, len(maps), sharey=True)
    for ax, (title, probs) in zip(axes, maps):
        seen = np.where(np.tri(len(probs), dtype=bool), probs, np.nan)
        image = ax.imshow(seen, cmap="cividis", norm=PowerNorm(0.5, 0, 1), interpolation="nearest")
        ax.set(title=title, xlabel="key position")
    axes[0].set_ylabel("query position")
    fig.colorbar(image, ax=axes, label="attention probability")
    return fig


def draw_commits(commit: dict):
    """When the ledger commits: mean gate, and its share of all that a token commits."""
    at = np.arange(len(commit["per_layer"]))
    fig, axes = new_figure(8, 3.2, 1, 2, sharex=True)
    axes[0].plot(at, commit["per_layer"], "o-", color=BLUE)
    axes[0].set(title="commit gate", ylabel="c, mean over tokens", ylim=(0, 1.02))
    axes[1].bar(at, commit["relative_profile"], color=BLUE)
    axes[1].axhline(1 / len(at), color=RED, ls="--", label="uniform")
    axes[1].set(title=f"relative profile, entropy {commit['entropy']:.2f} of "
                f"{commit['entropy_uniform']:.2f} nats", ylabel="share of sum over depth")
    axes[1].legend(frameon=False)
    for ax in axes:
        ax.set(xlabel=SUBLAYER)
        ax.xaxis.get_major_locator().set_params(integer=True)
    return fig


def draw_stream(stream: dict):
    """Loss against position, a line for each window and number of tokens kept."""
    fig, (ax,) = new_figure(9.5, 3.6)
    specs = [key for key in stream if ":" in key]
    looks = zip(specs, (RED, BLUE, "#009E73", "#E69F00", "#CC79A7", "#56B4E9") * 9, "os^Dv*" * 9)
    for spec, color, marker in looks:
        (window, keep), entry = spec.split(":"), stream[spec]
        at = [(i + 0.5) * entry["curve_step"] for i in range(len(entry["curve"]))]
        ax.plot(at, entry["curve"], color=color, marker=marker, ms=3, lw=1.2,
                label=f"{window}, first {keep}: {entry['loss']:.3f}")
        ax.axvline(int(window), color="dimgray", lw=0.8, ls=":")
    ax.set(xlabel="position in the stream (dotted: the window is full)", ylabel="nats per token",
           title=f"Streaming: forgetting the first tokens costs {stream['delta']:+.3f}")
    fig.legend(loc="outside right upper", frameon=False,
               title="window, kept: loss\nonce it is full")
    return fig


def draw_comparison(runs: list[tuple[str, dict]]):
    """Six measures of several runs, a panel each, bars in the order given."""
    wanted = ("val.loss", "outliers.max_inf_norm.layer_outputs", "outliers.kurtosis.sequence",
              "massive.ratio", "sinks.first_token_mass", "structure.decoded.persistence_unit_rms")
    panels = [column for column in COLUMNS if column[1] in wanted]
    fig, axes = new_figure(11, 1.6 + 0.5 * len(runs) + 1.6, 2, 3, sharey=True)
    for ax, (header, path, spec) in zip(axes, panels):
        values = [lookup(metrics, path) for _, metrics in runs]
        bars = ax.barh(range(len(runs)), [v or 0 for v in values], color=BLUE, height=0.65)
        ax.bar_label(bars, [as_text(v, spec) for v in values], padding=3, fontsize=8)
        ax.set_title(header, fontsize=11)
        ax.set_xlabel(path, fontsize=8, color="dimgray")
        ax.margins(x=0.2)
        ax.set_yticks(range(len(runs)), [name for name, _ in runs])
    axes[0].invert_yaxis()
    return fig


GROWTH = [("loss", "val.loss", "linear"), ("sink ratio (Gu)", "sinks.ratio_gu", "linear"),
          ("first-token mass", "sinks.first_token_mass", "linear"),
          ("spike: largest |x|", "massive.max", "linear"),
          ("position-0 norm ratio", "massive.position0_peak", "linear")]
TOY_GROWTH = [("sink: BOS mass, non-trigger queries", "backcopy.sink", "linear"),
              ("drain: norm of BOS' value / others'", "backcopy.drain", "linear"),
              ("peak: norm of BOS' residual / others'", "backcopy.peak", "linear"),
              ("Markov loss above the law's, nats", "backcopy.markov_excess", "log"),
              ("copy loss, nats", "backcopy.copy_loss", "log")]
COLOURS = (BLUE, RED, "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000", "#999999")


def draw_growth(curves: dict[str, list[list[dict]]]):
    """What `evaluate(light=True)` measured in training, a panel a measure: GROWTH, or of the toy
    TOY_GROWTH. curves: name -> for each seed the rows {"step", "probe"} of its log. The line is the
    mean over seeds, the band one standard deviation to either side."""
    first = next(rows[0]["probe"] for seeds in curves.values() for rows in seeds if rows)
    panels = TOY_GROWTH if first.get("backcopy") else GROWTH
    fig, axes = new_figure(12, 6.6, 2, 3)
    for i, (name, seeds) in enumerate(curves.items()):
        shared = set.intersection(*({row["step"] for row in rows} for rows in seeds))
        steps = sorted(shared)
        style = {"color": COLOURS[i % len(COLOURS)], "ls": ("-", "--", ":")[i // len(COLOURS) % 3]}
        for ax, (title, path, scale) in zip(axes, panels):
            y = np.array([[lookup(row["probe"], path) for row in rows if row["step"] in shared]
                          for rows in seeds], dtype=np.float64)                     # (seeds, n)
            mean, sd = y.mean(0), y.std(0, ddof=1) if len(y) > 1 else 0 * y[0]      # (n)
            ax.plot(np.array(steps) + 1, mean, lw=1.6, label=name, **style)
            if len(y) > 1:
                floor = mean.min() / 2 if scale == "log" else -np.inf
                ax.fill_between(np.array(steps) + 1, np.maximum(mean - sd, floor), mean + sd, lw=0,
                                color=style["color"], alpha=0.12 if len(curves) < 7 else 0.06)
            ax.set(title=title, xlabel="step", yscale=scale)
    handles, labels = axes[0].get_legend_handles_labels()
    axes[len(panels)].axis("off")
    axes[len(panels)].legend(handles, labels, frameon=False, loc="center left", fontsize=9,
                             ncols=1 if len(labels) < 14 else 2)
    return fig


def capture(model, tokens: torch.Tensor, channel: str, layer: int, per_head):
    """From one sequence (T,): |channel| after a sublayer, (T, d), and the attention maps of the
    heads that rank first, second, middle and last by first-token mass."""
    order = np.argsort(-np.asarray(per_head), axis=None, kind="stable")
    ranks = sorted({0, min(1, len(order) - 1), len(order) // 2, len(order) - 1})
    heads = [divmod(int(order[rank]), len(per_head[0])) for rank in ranks]
    surface, maps = [], {}

    def record(name, l, x):
        if (name, l) == (channel, layer):
            surface.append(x[0].float().abs().cpu().numpy())                        # (T, d)
        elif name == "attn_probs":
            i = model.kinds[:l].count("attn")
            maps.update({(i, h): x[0, h, :SINK_TOKENS, :SINK_TOKENS].float().cpu().numpy()
                         for j, h in heads if j == i})

    record.names = {channel, "attn_probs"}
    with evaluating(model):
        model(tokens[None].to(model.embed.weight.device), record=record)
    return surface[0], [(f"layer {i}, head {h}: {per_head[i][h]:.2f} on 0", maps[i, h])
                        for i, h in heads]


def figures(model, tokens, out_dir: str, *, metrics: dict | None = None, **options) -> list[str]:
    """Draw what was measured into out_dir; returns the paths.

    tokens and options (T, n_sequences, bos_policy, ...) as for evaluate, which is called if
    metrics are not given. What a model does not have (commits, depth weights, nulls) is not drawn.
    """
    model = unwrap(model)
    metrics = metrics or evaluate(model, tokens, **options)
    keys = ("T", "n_sequences", "batch_size", "bos_policy", "tokenizer", "bos", "eot")
    windows = open_windows(model, tokens, **{k: v for k, v in options.items() if k in keys})
    massive, sinks = metrics["massive"], metrics["sinks"]
    rows = torch.cat([x for x, _ in windows])                                       # (n, T)
    row = rows[massive["sequence"]]                                                 # (T)
    drawn = {"layers": draw_layers(metrics)}
    if sinks["T"] > 1:
        surface, maps = capture(model, row, massive["channel"], massive["layer"], sinks["per_head"])
        drawn["surface"], drawn["attention"] = draw_surface(surface, massive), draw_attention(maps)
        drawn["first_token"] = draw_grid(
            sinks["per_head"], f"attention to position 0, T={sinks['T']}", "head",
            "attention layer", "mean probability")
    if metrics["structure"]["commit"]:
        drawn["commits"] = draw_commits(metrics["structure"]["commit"])
    if metrics["depth"]:
        drawn["depth"] = draw_grid(
            metrics["depth"]["weights"], "depth weights (missing to 1: null)",
            "candidate (0: embedding)", "site: sublayer", "mean weight", 1,
            metrics["depth"]["sites"])
    if metrics["null"]["token_mass"] > 0:
        drawn["null"] = draw_grid(metrics["null"]["per_head"], "null mass", "head",
                                  "attention layer", "mean probability")
    return [save_figure(fig, os.path.join(out_dir, f"{name}.png")) for name, fig in drawn.items()]


# ---------------------------------------------------------------------------------------- anatomy
#
# Where a spike comes from, what the norm makes of it, what attention does with that, and what the
# loss says when it is taken away. `dissect` is the order of the measurements; each is short.

class Enough(Exception):
    """Raised by a recorder that has seen what it came for: the layers above never run."""


class Sizes:
    """The largest |entry| of every token after every sublayer, and its channel; the median."""

    names = {"embedding", "stream"}

    def __init__(self):
        self.size, self.channel, self.mean = defaultdict(list), defaultdict(list), Means()

    def __call__(self, name, l, x):
        l = -1 if name == "embedding" else l
        a = x.float().abs()                                                         # (B, T, d)
        size, channel = a.max(-1)                                                   # (B, T)
        self.size[l].append(size.cpu())
        self.channel[l].append(channel.cpu())
        self.mean.add(("median", l), a.flatten(1).median(1).values)                 # (B)

    def result(self):
        """size and channel (L + 1, n, T), median (L + 1): index 0 is the embedding."""
        stack = lambda kept: torch.stack([torch.cat(kept[l]) for l in sorted(kept)])
        return stack(self.size), stack(self.channel), self.mean.stack("median")


def find_lives(size, median) -> list[dict]:
    """The lives of spikes in one model: `find_steps`, and again below the first step up, as long as
    something there exceeds SPIKE_RATIO medians. A rise with no fall before the next belongs to it.

    size: largest |entry| of any token, median: of all entries, both (L + 1). In order of depth.
    """
    size, lives, end = np.asarray(size), [], len(size)
    while end > 1 and size[:end].max() >= SPIKE_RATIO * median[int(size[:end].argmax())]:
        up, down = find_steps(size[:end])
        if not up:
            break
        if lives and not down:
            lives[0]["step_up"] = up + lives[0]["step_up"]
        else:
            lives.insert(0, {"step_up": up, "step_down": [l for l in down if l > up[0]]})
        end = up[0] + 1
    return lives


def spiking(x: torch.Tensor, bar: float | None) -> torch.Tensor:
    """Tokens with an entry of at least `bar`; without one the first token. (B, T, d) -> (B, T)."""
    if bar is not None:
        return x.float().abs().amax(-1) >= bar                                      # (B, T)
    first = torch.arange(x.shape[1], device=x.device) == 0                          # (T)
    return first.expand(x.shape[:2])                                                # (B, T)


def around(model, rows, sublayers, batch_size: int):
    """For batches of rows (n, T): {l: (the stream before sublayer l, and after it)}, (B, T, d)."""
    for x in rows.split(batch_size):
        kept = {}

        def record(name, l, h):
            kept[-1 if name == "embedding" else l] = h.float()
            if name == "stream" and l == max(sublayers):
                raise Enough

        record.names = {"embedding", "stream"}
        with contextlib.suppress(Enough):
            model(x.to(model.embed.weight.device), record=record)
        yield {l: (kept[l - 1], kept[l]) for l in sublayers}


def describe_life(model, life: dict, sizes, rows, text, batch_size: int) -> dict:
    """A life with its peak, tokens and channels, and the signed trace of its largest entry.

    bar: a quarter of the largest |entry| after the last step up; tokens that reach it spike.
    channels: whose mean over these tokens exceeds SPIKE_RATIO medians, the 16 largest at most.
    """
    size, channel, median = sizes
    l, end = life["step_up"][-1], min(life["step_down"] or [len(size) - 2])
    bar = None if life["young"] else 0.25 * size[l + 1].max().item()
    grown = size[l + 1:end + 1] if end > l else size[l + 1:]        # while the spike is up
    grown = grown[..., :1] if life["young"] else grown
    i, n, p = (int(at) for at in np.unravel_index(int(grown.argmax()), grown.shape))
    i, peak, middle = i + l + 1, grown[i, n, p].item(), median[i + l + 1].item()
    mask = size[l + 1] >= bar if bar else torch.arange(size.shape[2]).expand(size.shape[1:]) == 0
    after = (step[l][1].cpu() for step in around(model, rows, [l], batch_size))
    mean = sum(x[m].double().sum(0) for x, m in zip(after, mask.split(batch_size))) / mask.sum()
    order = mean.abs().argsort(descending=True)[:16].tolist()
    spikes = [c for c in order if mean[c].abs() >= SPIKE_RATIO * median[l + 1]] or order[:1]
    words = defaultdict(list)
    for a, b in mask.nonzero().tolist():
        words[text(rows[a, b])].append(size[l + 1, a, b].item())
    dim = int(channel[i, n, p])
    return life | {
        "bar": bar, "peak": peak, "sublayer": i - 1, "median": middle, "ratio": peak / middle,
        "massive": peak > 100 and peak >= 1000 * middle, "position": p, "channel": dim,
        "text": text(rows[n, p]), "channels": {c: mean[c].item() for c in spikes},
        "n_tokens": int(mask.sum()), "at_first": int(mask[:, 0].sum()), "mask": mask,
        "words": [{"text": word, "count": len(found), "largest": max(found)} for word, found in
                  sorted(words.items(), key=lambda item: (-len(item[1]), -max(item[1])))[:12]],
        "trace": measure_steps(model, rows[n, :p + 1], "stream", p, dim)["trace"]}


def measure_lives(model, sizes, rows, text, batch_size: int) -> list[dict]:
    """All lives, described. If nothing spikes: the first token's largest rise, marked `young`."""
    size, _, median = sizes
    lives = [life | {"young": False} for life in
             find_lives(size.amax((1, 2)).tolist(), median.tolist())]
    if not lives:
        rise = size[:, :, 0].mean(1).diff().tolist()                                # (L)
        ffn = [l for l, kind in enumerate(model.kinds) if kind == "ffn"] or range(len(rise))
        lives = [{"step_up": [max(ffn, key=lambda l: rise[l])], "step_down": [], "young": True}]
    return [describe_life(model, life, sizes, rows, text, batch_size) for life in lives]


# The quadratic form. With the norm's gain folded into W_gate and W_up, the input is h = x / rms(x),
# |h|^2 = d, and where SiLU(z) is nearly z:  F_k(h) = h' U_k h,  U_k = sum_i W_down[k, i] g_i u_i'.

def is_swiglu(model, l: int) -> bool:
    return getattr(model.sublayers[l], "kind", None) == "swiglu"


def folded(model, l: int, dtype=torch.float64):
    """W_gate diag(gain) and W_up diag(gain), (F, d), and W_down, (d, F), of a SwiGLU, on the host.
    A norm with no gain to fold (DynamicTanh) stays in front: its output is then h."""
    ffn, norm = model.sublayers[l], model.norms[l]
    gain = norm.weight if isinstance(norm, RMSNorm) else torch.ones(())
    host = lambda w: w.detach().cpu().to(dtype)
    return (host(ffn.w_gate.weight) * host(gain), host(ffn.w_up.weight) * host(gain),   # (F, d) x 2
            host(ffn.w_down.weight))                                                # (d, F)


def form_products(Wd, a, b, c, e, block: int = 1024):
    """sum_ij W_down[k, i] W_down[k, j] (a_i . b_j)(c_i . e_j) for all channels k, (d), without a
    single d x d form [Spike 3.5]. |U_k|_F^2 is that of (g, g, u, u); tr U_k^2, of (u, g, g, u)."""
    return sum((Wd[:, i:i + block] @ ((a[i:i + block] @ b.T) * (c[i:i + block] @ e.T)) * Wd).sum(1)
               for i in range(0, len(a), block))                                    # (d)


def leading_eigen(Wg, Wu, w, size: int = 6, steps: int = 400, tolerance: float = 1e-9):
    """Eigenvalue of largest size, its vector (d), and the runner-up, of S = (U + U') / 2 where
    U = Wg' diag(w) Wu. Power iteration on a few vectors at once, for one vector alone would not
    settle between +a and -a; S is applied, never formed."""
    apply = lambda v: (Wg.T @ (w[:, None] * (Wu @ v)) + Wu.T @ (w[:, None] * (Wg @ v))) / 2
    v = torch.randn(Wg.shape[1], min(size, Wg.shape[1]),
                    generator=torch.Generator().manual_seed(0)).to(Wg)              # (d, r)
    for _ in range(steps):
        v = torch.linalg.qr(v).Q                                                    # (d, r)
        image = apply(v)                                                            # (d, r)
        values, turn = torch.linalg.eigh(v.T @ image)                               # (r), (r, r)
        order = values.abs().argsort(descending=True)
        value, first = values[order[0]], v @ turn[:, order[0]]                      # (), (d)
        error = image @ turn[:, order[0]] - value * first                           # (d)
        if error.norm() <= tolerance * value.abs():
            break
        v = image
    return value.item(), first, values[order[1]].item() if len(order) > 1 else 0.0


class Amplifier:
    """One SwiGLU as a quadratic form: how much of each output channel is l* |h|^2 cos^2(h, s*)?"""

    def __init__(self, model, l: int, channels: list[int]):
        self.norm, self.channels = model.norms[l], channels
        self.Wg, self.Wu, self.Wd = folded(model, l)
        self.bias = [getattr(model.sublayers[l], name).bias for name in ("w_gate", "w_up")]
        whole = form_products(self.Wd, self.Wg, self.Wg, self.Wu, self.Wu)          # (d)
        square = form_products(self.Wd, self.Wu, self.Wg, self.Wg, self.Wu)         # (d)
        self.frobenius = whole.clamp(min=0).sqrt()                                  # (d)
        self.energy = (whole + square)[channels] / 2                # (m), |S_k|_F^2
        found = [leading_eigen(self.Wg, self.Wu, self.Wd[k]) for k in channels]
        self.value, self.second = (torch.tensor([f[i] for f in found]).double() for i in (0, 2))
        self.vector = torch.stack([f[1] for f in found])                            # (m, d)

    def __call__(self, x) -> dict:
        """x (N, d), the stream before the norm -> (N, m) each: the sublayer's output without its
        bias, the quadratic form, its leading term, cos^2(h, s*), and the share of |output| that
        comes from gates above 4, where SiLU(z) > 0.98 z."""
        h = F.rms_norm(x, x.shape[-1:], eps=self.norm.eps) if isinstance(self.norm, RMSNorm) \
            else self.norm(x)
        h = h.cpu().double()                                                        # (N, d)
        g, u = (h @ W.T if b is None else h @ W.T + b.detach().cpu().double()       # (N, F)
                for W, b in zip((self.Wg, self.Wu), self.bias))
        w = self.Wd[self.channels].T                                                # (F, m)
        parts, along = F.silu(g) * u, (h @ self.vector.T).square()                  # (N, F), (N, m)
        return {"actual": parts @ w, "quadratic": (g * u) @ w, "leading": self.value * along,
                "cos2": along / h.square().sum(1, keepdim=True),
                "linear": (parts * (g > 4)).abs() @ w.abs() / (parts.abs() @ w.abs() + TINY)}

    def summary(self, spike, **values) -> dict:
        """The form's own numbers by channel; medians of values (N, m) over spike tokens, spike (N)
        bool, and over the others. share: of |S_k|_F^2 that is the leading eigenvalue's square."""
        typical = lambda mask: {key: value[mask].median(0).values.tolist()
                                for key, value in values.items()} if mask.any() else None
        return {"channels": self.channels, "eigenvalue": self.value.tolist(),
                "runner_up": self.second.tolist(), "chance": 1 / len(self.frobenius),
                "share": (self.value.square() / self.energy).tolist(),
                "frobenius": self.frobenius[self.channels].tolist(),
                "frobenius_median": self.frobenius.median().item(),
                "same_direction": (self.vector @ self.vector[0]).abs().tolist(),
                "spike": typical(spike), "others": typical(~spike)}


def measure_forms(model, lives, rows, singles, batch_size: int) -> tuple[dict, dict]:
    """The quadratic form of every SwiGLU in which a spike steps up or down, and what it does to
    spike tokens and to others (medians); the size of all forms -> these, {sublayer: points}.

    Tokens: those of the text, and `singles`, each the first and only token of its sequence."""
    life_of = {l: life for life in lives for l in life["step_up"] + life["step_down"]
               if is_swiglu(model, l)}
    forms = {l: Amplifier(model, l, list(life_of[l]["channels"])[:4]) for l in sorted(life_of)}
    seen = {l: defaultdict(list) for l in forms}
    for tokens in (rows, singles[:, None]) if forms else ():
        size = max(1, batch_size * rows.shape[1] // tokens.shape[1])
        for step in around(model, tokens, list(forms), size):
            for l, (before, after) in step.items():
                up = spiking(torch.maximum(before.abs(), after.abs()), life_of[l]["bar"])
                found = forms[l](before.flatten(0, 1)) | {"spike": up.flatten().cpu()}
                for key, value in found.items():
                    seen[l][key].append(value)
    points = {l: {key: torch.cat(parts) for key, parts in x.items()} for l, x in seen.items()}
    blocks = [{"sublayer": l} | form.summary(**points[l]) for l, form in forms.items()]
    sizes = {l: form_products(Wd, Wg, Wg, Wu, Wu).clamp(min=0).sqrt() for l, (Wg, Wu, Wd) in (
        (l, folded(model, l, torch.float32)) for l in range(len(model.kinds))
        if is_swiglu(model, l))}
    return {"blocks": blocks, "sublayers": list(sizes),
            "largest": [x.max().item() for x in sizes.values()],
            "median": [x.median().item() for x in sizes.values()]}, points


def measure_vocabulary(model, life: dict, median: float, ids, text, batch_size: int):
    """Each id alone, as the first token: its largest |entry| after the step up [Spike 3.4]."""
    l, bar = life["step_up"][-1], life["bar"]
    size = torch.cat([step[l][1].abs().amax(-1)[:, 0].cpu()
                      for step in around(model, ids[:, None], [l], batch_size)])    # (n)
    low = size < (bar or 0)
    smallest, middle, largest = size.quantile(torch.tensor([0.0, 0.5, 1.0])).tolist()
    return {"n": len(ids), "of": model.config.vocab_size, "sublayer": l, "threshold": bar,
            "share": 1 - low.float().mean().item() if bar else None,
            "share_massive": (size >= max(100.0, 1000 * median)).float().mean().item(),
            "exceptions": [text(token) for token in ids[low][:8]],
            "smallest": smallest, "middle": middle, "largest": largest}, size


def participation(x: torch.Tensor) -> torch.Tensor:
    """Effective number of entries (sum x^2)^2 / sum x^4: m equal ones among zeros give m.
    (..., d) -> (...)."""
    square = x.double().square()                                                    # (..., d)
    return square.sum(-1).square() / (square.square().sum(-1) + TINY)               # (...)


class Geometry:
    """What the norm and the key projection make of groups of tokens. Set `groups` before a batch:
    name -> (B, T) bool. Keys are turned back to position 0, so that rotation adds no dimension."""

    names = {"stream", "norm_out", "k"}

    def __init__(self, config):
        self.config, self.groups, self.mean = config, {}, Means()
        self.unit, self.count, self.gram = {}, {}, {}

    def __call__(self, name, l, x):
        if name == "k":
            x = x.transpose(1, 2).float()                                           # (B, T, G, D)
            if self.config.pos == "rope":
                cos, sin = rope_table(torch.arange(x.shape[1], device=x.device), self.config)
                x = rotate(x, cos[:, None], -sin[:, None])                          # (B, T, G, D)
        for group, mask in self.groups.items():
            rows, key = x[mask.to(x.device)].float(), (group, l)                    # (n, ...)
            if not len(rows):
                continue
            if name == "k":
                gram = torch.einsum("ngi,ngj->gij", rows, rows).cpu().double()      # (G, D, D)
                self.gram[key] = self.gram.get(key, 0) + gram
            else:
                self.mean.add((name, *key), participation(rows))
            if name == "norm_out":
                self.unit[key] = self.unit.get(key, 0) + F.normalize(rows, dim=-1).sum(0).cpu()
                self.count[key] = self.count.get(key, 0) + len(rows)

    def cosine(self, a: str, b: str, l: int) -> float | None:
        """Mean cosine of pairs of tokens, one of group a and one of b, at the output of norm l."""
        if (a, l) not in self.unit or (b, l) not in self.unit:
            return None
        n, m, product = self.count[a, l], self.count[b, l], self.unit[a, l] @ self.unit[b, l]
        if a == b:
            return ((product - n) / (n * (n - 1))).item() if n > 1 else None
        return (product / (n * m)).item()

    def dimension(self, group: str, l: int):
        """Of the keys, per key head: participation of the energies of its axes, axes for 99 %."""
        energy = torch.linalg.eigvalsh(self.gram[group, l]).flip(-1).clamp(min=0)   # (G, D)
        share = energy.cumsum(-1) / energy.sum(-1, keepdim=True)                    # (G, D)
        return participation(energy.sqrt()).tolist(), ((share < 0.99).sum(-1) + 1).tolist()


class Gaps:
    """How far the first key's logit stands above the other keys', and who else is looked at."""

    names, short = {"q", "k", "attn_probs"}, True

    def __init__(self):
        self.groups, self.mean, self.q = {}, Means(), None

    def __call__(self, name, l, x):
        if name == "attn_probs":
            return self.looks(l, x.float())
        if name == "q":
            self.q = x.float()                                                      # (B, H, T, D)
            return
        q, T = self.q, x.shape[2]
        k = x.float().repeat_interleave(q.shape[1] // x.shape[1], 1)                # (B, H, T, D)
        logits = (q @ k.mT / q.shape[-1] ** 0.5)[..., 1:, :]                        # (B, H, T-1, T)
        seen = torch.ones(T, T, dtype=torch.bool, device=x.device).tril()[1:, 1:]   # (T-1, T-1)
        first, rest = logits[..., 0], logits[..., 1:]
        gap = first - (rest * seen).sum(-1) / seen.sum(-1)                          # (B, H, T-1)
        best = first - rest.masked_fill(~seen, -math.inf).amax(-1)                  # (B, H, T-1)
        for key, value in (("gap", gap), ("square", gap.double().square()), ("best", best)):
            self.mean.add((key, l), value, over=(0, 2))                             # (H)

    def looks(self, l, p):
        """Mean attention that the keys of a group get from later queries, position 0 aside."""
        later = p.tril(-1).sum(-2) / (p.shape[-1] - 1 -                             # (B, H, T)
                                      torch.arange(p.shape[-1], device=p.device)).clamp(min=1)
        for group, mask in self.groups.items():
            mask = mask[:, :p.shape[-1]].to(p.device).clone()
            mask[:, 0] = mask[:, -1] = False
            self.mean.add((group, l), later.mean(1)[mask])                          # (n)


def measure_geometry(model, rows, groups: dict, singles, wide: int, batch_size: int):
    """One pass over the text, one over first tokens that spike alone -> Geometry, Gaps."""
    geometry, gaps, device = Geometry(model.config), Gaps(), model.embed.weight.device
    for at in torch.arange(len(rows)).split(batch_size):
        x = rows[at].to(device)
        geometry.groups = gaps.groups = {name: mask[at] for name, mask in groups.items()}
        model(x, record=geometry)
        model(x[:, :SINK_TOKENS], record=gaps)
    for x in singles[:, None].split(wide):
        geometry.groups = {"spike": torch.ones(len(x), 1, dtype=torch.bool)}
        model(x.to(device), record=geometry)
    return geometry, gaps


class Edited(StandardResidual):
    """A plain residual in which, after sublayer l, entries of the stream are given other values.

    choose(stream) -> mask (B, T, d), bool, and values, the same. The write becomes what puts them
    there, so that the sum stays a sum, and with an empty mask every bit stays what it was.
    """

    def __init__(self, l: int, choose):
        super().__init__(None)
        self.l, self.choose = l, choose

    def write(self, state, l: int, u, y, null):
        if l == self.l:
            mask, values = self.choose(state + y)                                   # (B, T, d) x 2
            y = torch.where(mask, values - state, y)                                # (B, T, d)
        return state + y                                                            # (B, T, d)


@contextlib.contextmanager
def edited(model, l: int, choose):
    """The model with `Edited` in the place of its residual; afterwards its own again."""
    own, model.residual = model.residual, Edited(l, choose)
    try:
        yield model
    finally:
        model.residual = own


def interventions(life: dict, width: int, seed: int = 0) -> dict:
    """name -> choose, for the spike channels of the spike tokens: zero, their mean over the spike
    tokens, and a control that zeroes as many other channels of as many other tokens of each row."""
    channels, bar = list(life["channels"]), life["bar"]
    order = torch.randperm(width, generator=torch.Generator().manual_seed(seed)).tolist()
    others = [c for c in order if c not in channels][:len(channels)]

    def elsewhere(tokens):
        draw = torch.rand(tokens.shape, generator=torch.Generator().manual_seed(seed))
        rank = draw.to(tokens.device).masked_fill(tokens, 2.0).argsort(1).argsort(1)    # (B, T)
        return (rank < tokens.sum(1, keepdim=True)) & ~tokens                       # (B, T)

    def edit(x, tokens, channels, new):
        mask, values = torch.zeros_like(x, dtype=torch.bool), torch.zeros_like(x)   # (B, T, d) x 2
        mask[..., channels], values[..., channels] = tokens[..., None], torch.tensor(new).to(x)
        return mask, values

    return {"zero": lambda x: edit(x, spiking(x, bar), channels, 0.0),
            "mean": lambda x: edit(x, spiking(x, bar), channels, list(life["channels"].values())),
            "control": lambda x: edit(x, elsewhere(spiking(x, bar)), others, 0.0)}


def measure_interventions(model, windows, lives: list[dict], batch_size: int, untouched: dict):
    """Loss and sinks with each life's spikes edited right after its last step up."""
    found = []
    for life in lives:
        arms = {"untouched": untouched}
        for name, choose in interventions(life, model.config.d_model).items():
            sinks = Sinks()
            with edited(model, life["step_up"][-1], choose):
                nll, *_ = run_passes(model, windows, [sinks], batch_size)
            arms[name] = {"loss": nll / windows.n_targets, **sinks.brief()}
        found.append({"after": life["step_up"][-1], "n_tokens": life["n_tokens"],
                      "channels": list(life["channels"]), **arms})
    return found


def sink_table(sinks: Sinks, gaps: Gaps) -> dict:
    """`sinks` of metrics.json; heads: all of them, the strongest sink first. mass: attention to
    position 0 (queries >= 1); gap: lead of the first key's logit over the mean of the other keys'
    (gap_best: over the largest of them), gap_sd its standard deviation over queries and sequences.
    received: by layer, what one key of a group, position 0 aside, gets from each later query."""
    heads, layers = [], sinks.mean.depth("first")
    for i, l in enumerate(layers):
        gap, square, best = (gaps.mean[key, l] for key in ("gap", "square", "best"))    # (H) each
        spread = (square - gap.square()).clamp(min=0).sqrt()                        # (H)
        heads += [{"layer": i, "head": h, "mass": mass, "gap": gap[h].item(),
                   "gap_sd": spread[h].item(), "gap_best": best[h].item()}
                  for h, mass in enumerate(sinks.mean["first", l].tolist())]
    received = {group: [gaps.mean[group, l].item() if gaps.mean.count[group, l] else None
                        for l in layers] for group in ("minor", "ordinary")}
    return sinks.result() | {"heads": sorted(heads, key=lambda head: -head["mass"]),
                             "received": received}


def absent(model, main: dict) -> list[str]:
    """What this model has not, a line each."""
    c, l = model.config, main["step_up"][-1]
    lines = {
        f"No entry reaches {SPIKE_RATIO} times the median of its hidden state: there is no spike, "
        "and what follows describes the first token and the rise of its largest entry":
            main["young"],
        "No feed-forward layer is a SwiGLU, so there is no quadratic form": c.ffn != "swiglu",
        f"The largest step up, {block_name(model.kinds, l)}, is no SwiGLU":
            c.ffn == "swiglu" and not is_swiglu(model, l),
        "Feed-forward outputs pass a norm before they are added; the quadratic form predicts them "
        "before it": c.norm in ("sandwich", "sandwich-qk"),
        f"The residual ({c.residual}) is no plain sum: sizes are of what the sublayers read, the "
        "last of what is decoded, and nothing can be edited": not plain_sum(model),
        "Heads are not grouped: every head has keys of its own": c.n_kv_head == c.n_head}
    return [line for line, holds in lines.items() if holds]


def plain_sum(model) -> bool:
    return type(model.residual) is StandardResidual


def dissect(model, tokens, *, T: int | None = None, n_sequences: int = 8, batch_size: int = 8,
            bos_policy: str = "none", tokenizer=None, vocabulary: int = 8192, singles: int = 512,
            epsilon: float = EPSILON, protocol: dict | None = None, progress: bool = False,
            **about) -> tuple[dict, dict]:
    """The anatomy of a model's spikes and sinks -> (what metrics.json holds, points for a figure).

    model, tokens and most options as for `evaluate`; T is at most 256 unless given. tokenizer: its
    name, to show tokens as text. vocabulary: ids tried as first token, drawn with a fixed seed;
    singles: how many of them are also followed through the network. What a model has not (a spike,
    a SwiGLU, a stream that is a plain sum) is said in `notes` and left out.
    """
    model, started = unwrap(model), time.time()
    windows = open_windows(
        model, tokens, T=T or min(256, model.config.block_size), n_sequences=n_sequences,
        batch_size=batch_size, bos_policy=bos_policy, tokenizer=tokenizer, **about)
    reader = None if tokenizer is None else \
        tokens.reader(tokenizer) if is_source(tokens) else get_tokenizer(tokenizer)
    text = lambda token: reader.decode([int(token)]) if reader else f"id {int(token)}"
    known = min(model.config.vocab_size, reader.vocab_size if reader else math.inf)
    probe, sinks = Sizes(), Sinks(epsilon)
    stages = tqdm(desc="lives", total=5, disable=None if progress else True, leave=False)
    with evaluating(model), stages:
        def stage(name):
            stages.update()
            stages.set_description(name)

        nll, rows, _ = run_passes(model, windows, [probe, sinks], batch_size)
        if rows.shape[1] < 4:
            raise EvalError("an anatomy needs windows of at least 4 tokens")
        size, _, median = sizes = probe.result()
        lives = measure_lives(model, sizes, rows, text, batch_size)
        main = max(lives, key=lambda life: life["peak"])
        stage("vocabulary")
        order = torch.randperm(known, generator=torch.Generator().manual_seed(0))
        ids, wide = order[:vocabulary], batch_size * rows.shape[1]
        words, first = measure_vocabulary(model, main, median[main["step_up"][-1] + 1].item(), ids,
                                          text, wide)
        stage("quadratic forms")
        forms, clouds = measure_forms(model, lives, rows, ids[:singles], batch_size)
        stage("norms and keys")
        spikes = torch.stack([life.pop("mask") for life in lives])                  # (lives, n, T)
        spike, any_spike = spikes[lives.index(main)], spikes.any(0)                 # (n, T)
        groups = {"spike": spike, "minor": any_spike & ~spike, "ordinary": ~any_spike}
        alone = ids if main["young"] else ids[first >= main["bar"]]
        geometry, gaps = measure_geometry(model, rows, groups, alone[:singles], wide, batch_size)
        stage("edits")
        untouched = {"loss": nll / windows.n_targets, **sinks.brief()}
        edits = measure_interventions(model, windows, lives, batch_size, untouched) \
            if plain_sum(model) else []
    about = {"spike_ratio": SPIKE_RATIO, "step_share": 0.25, "seconds": time.time() - started}
    anatomy = {
        "protocol": describe(model, tokens, rows, bos_policy, None) | about | (protocol or {}),
        "kinds": model.kinds, "notes": absent(model, main), "main": lives.index(main),
        "lives": lives, "vocabulary": words, "forms": forms,
        "norms": norm_table(geometry, model.kinds), "keys": key_table(geometry, model.kinds),
        "sinks": sink_table(sinks, gaps), "interventions": edits}
    return anatomy, {"size": size, "median": median, "groups": groups, "first": first,
                     "forms": clouds}


def norm_table(geometry: Geometry, kinds: list[str]) -> list[dict]:
    """Per sublayer: effective channels before the gain and after it, cosines after it."""
    at = lambda name, group, l: geometry.mean[name, group, l].item() \
        if (name, group, l) in geometry.mean else None
    groups = ("spike", "minor", "ordinary")
    return [{"sublayer": l,
             "channels_raw": {g: at("stream", g, l - 1) for g in groups},
             "channels": {g: at("norm_out", g, l) for g in groups},
             "cosine": {g: geometry.cosine(g, g, l) for g in groups}
             | {"spike_ordinary": geometry.cosine("spike", "ordinary", l),
                "spike_minor": geometry.cosine("spike", "minor", l)}} for l in range(len(kinds))]


def key_table(geometry: Geometry, kinds: list[str]) -> list[dict]:
    """Per attention layer, mean over key heads: effective dimension, and axes for 99 % energy."""
    table = []
    for l, kind in enumerate(kinds):
        if kind == "attn":
            entry = {"sublayer": l, "head_dim": geometry.config.head_dim}
            for group in ("spike", "ordinary"):
                dims = geometry.dimension(group, l) if (group, l) in geometry.gram else None
                entry[group] = dims and {"effective": float(np.mean(dims[0])),
                                         "axes_99": float(np.mean(dims[1]))}
            table.append(entry)
    return table


def block_name(kinds: list[str], l: int) -> str:
    """Sublayer 23 -> "block 24 (feed-forward of layer 11)": the papers count blocks from 1."""
    layer = kinds[:l + 1].count("attn") - 1
    return f"block {l + 1} ({ {'attn': 'attention', 'ffn': 'feed-forward'}[kinds[l]]} of layer " \
           f"{layer})"


GREEN, GREY = "#009E73", "#888888"
SPIKE, MINOR, OTHER = ("spike tokens", RED), ("smaller spikes", GREEN), ("other tokens", BLUE)


def draw_anatomy(anatomy: dict, points: dict, title: str):
    """One page, twelve panels; blocks as the papers count them: from 1, attention odd."""
    fig, axes = new_figure(13.5, 13, 4, 3)
    fig.suptitle(title, fontsize=15, weight="bold")
    main = anatomy["lives"][anatomy["main"]]
    for ax, panel in zip(axes, (panel_life, panel_channels, panel_vocabulary, panel_forms,
                                panel_prediction, panel_alignment, panel_effective, panel_cosine,
                                panel_keys, panel_heads, panel_received, panel_edits)):
        panel(ax, anatomy, points)
        if not ax.has_data():
            ax.text(0.5, 0.5, "this model has none", ha="center", color=GREY,
                    transform=ax.transAxes)
        ax.set_title(ax.get_title(), fontsize=11)
        if ax.get_xlabel() == "block":
            for life in anatomy["lives"]:
                end = min(life["step_down"] or [len(anatomy["kinds"]) - 1])
                ax.axvspan(life["step_up"][-1] + 1, end + 1, color=RED, alpha=0.06, lw=0)
            ax.xaxis.get_major_locator().set_params(integer=True)
        handles, labels = ax.get_legend_handles_labels()
        if handles:
            who = "first token" if main["young"] else "spike token"
            ax.legend(handles, [label.replace("spike token", who) for label in labels],
                      frameon=False, fontsize=8)
    return fig


def by_block(ax, values: list, label: str, color: str, at=None, **style):
    """A line over blocks; None where there is nothing to show."""
    if any(v is not None for v in values):
        at = range(len(values)) if at is None else at
        ax.plot([l + 1 for l in at], [np.nan if v is None else v for v in values], color=color,
                label=label, **{"lw": 1.6, **style})


def panel_life(ax, anatomy, points):
    size, groups = points["size"], points["groups"]                                 # (L + 1, n, T)
    for group, (label, color) in zip(("spike", "minor", "ordinary"), (SPIKE, MINOR, OTHER)):
        if groups[group].any():
            by_block(ax, size[:, groups[group]].median(1).values.tolist(), label, color,
                     at=range(-1, len(size) - 1))
    by_block(ax, points["median"].tolist(), "median |entry|", GREY, at=range(-1, len(size) - 1),
             ls=":")
    for life in anatomy["lives"]:
        for key, mark in (("step_up", "^"), ("step_down", "v")):
            at = life[key]
            ax.plot([l + 1 for l in at], size.amax((1, 2))[[l + 1 for l in at]], mark,
                    color="black", ms=7)
    ax.set(title="Life of the spikes", xlabel="block", ylabel="largest |entry| of a token",
           yscale="log")


def panel_channels(ax, anatomy, points):
    channels = anatomy["lives"][anatomy["main"]]["channels"]
    ax.bar(range(len(channels)), [abs(v) for v in channels.values()],
           color=[RED if v > 0 else BLUE for v in channels.values()])
    ax.set_xticks(range(len(channels)), channels, rotation=60, fontsize=8)
    ax.set(title="Spike channels after the step up", xlabel="channel (blue: negative)",
           ylabel="|mean| over spike tokens", yscale="log",
           ylim=(min(map(abs, channels.values())) / 3, None))


def panel_vocabulary(ax, anatomy, points):
    v = anatomy["vocabulary"]
    first = points["first"].clamp(min=TINY).numpy()
    ax.hist(first, np.geomspace(first.min() * 0.9, first.max() * 1.1, 60), color=RED)
    if v["threshold"]:
        ax.axvline(v["threshold"], color="black", ls="--")
    share = f": {v['share']:.2%} spike" if v["share"] is not None else ""
    ax.set(title=f"{v['n']:,} tokens, each alone{share}", xscale="log", yscale="log",
           xlabel="largest |entry| after the step up", ylabel="tokens")


def panel_forms(ax, anatomy, points):
    forms = anatomy["forms"]
    by_block(ax, forms["largest"], "largest channel", RED, at=forms["sublayers"], marker="o", ms=3)
    by_block(ax, forms["median"], "median channel", BLUE, at=forms["sublayers"])
    for life in anatomy["lives"]:
        for l in life["step_up"] + life["step_down"]:
            if l in forms["sublayers"]:
                mark = "^" if l in life["step_up"] else "v"
                ax.plot(l + 1, forms["largest"][forms["sublayers"].index(l)], mark, color="black",
                        ms=9)
    ax.set(title="Size of the quadratic forms", xlabel="block", ylabel=r"$\|U_k\|_F$",
           yscale="log")


def main_form(anatomy, points):
    """The form of the main step up and its cloud of points, or None twice."""
    l = anatomy["lives"][anatomy["main"]]["step_up"][-1]
    return next((form for form in anatomy["forms"]["blocks"] if form["sublayer"] == l), None), \
        points["forms"].get(l)


def panel_prediction(ax, anatomy, points):
    form, x = main_form(anatomy, points)
    ax.set(title=r"Output against $\lambda^* d\,\cos^2(h, s^*)$", xlabel="predicted",
           ylabel="written by the feed-forward")
    if form is None:
        return
    k, sign = form["channels"][0], math.copysign(1, form["eigenvalue"][0])
    for mask, (label, color) in ((~x["spike"], OTHER), (x["spike"], SPIKE)):
        ax.plot((sign * x["leading"][mask, 0]).clamp(min=TINY), sign * x["actual"][mask, 0], ".",
                color=color, label=label, ms=4, alpha=0.5)
    low, high = (sign * x["leading"][:, 0]).quantile(torch.tensor([0.02, 1]).double()).tolist()
    ends = [max(1e-2, low), 1.5 * high]
    ax.plot(ends, ends, color="black", lw=0.8, ls="--")
    ax.set_yscale("symlog", linthresh=10)
    ax.set(xscale="log", xlim=ends,
           title=rf"Channel {k}: output against $\lambda^* d\,\cos^2(h, s^*)$")


def panel_alignment(ax, anatomy, points):
    form, x = main_form(anatomy, points)
    ax.set(title=r"Alignment with the amplifier's axis", xlabel=r"$\cos^2(h, s^*)$",
           ylabel="share of tokens")
    if form is None:
        return
    bins = np.geomspace(1e-7, 1, 50)
    for mask, (label, color) in ((~x["spike"], OTHER), (x["spike"], SPIKE)):
        if mask.any():
            values = x["cos2"][mask, 0].clamp(min=1e-7).numpy()
            ax.hist(values, bins, weights=np.full(len(values), 1 / len(values)), color=color,
                    alpha=0.7, label=label)
    ax.axvline(form["chance"], color="black", ls="--", label="chance, 1 / d")
    ax.set(xscale="log")


def panel_effective(ax, anatomy, points):
    for group, (label, color) in zip(("spike", "minor", "ordinary"), (SPIKE, MINOR, OTHER)):
        by_block(ax, [entry["channels_raw"][group] for entry in anatomy["norms"]], label, color)
    ax.set(title="Effective channels that a norm sees", xlabel="block", yscale="log",
           ylabel=r"$(\sum x^2)^2 / \sum x^4$")


def panel_cosine(ax, anatomy, points):
    norms = [entry for entry, kind in zip(anatomy["norms"], anatomy["kinds"]) if kind == "attn"]
    for key, label, color in (("spike", "spike - spike", RED),
                              ("minor", "smaller - smaller", GREEN),
                              ("ordinary", "other - other", BLUE),
                              ("spike_ordinary", "spike - other", GREY)):
        by_block(ax, [entry["cosine"][key] for entry in norms], label, color,
                 at=[entry["sublayer"] for entry in norms])
    ax.set(title="Cosine of two tokens, as attention reads them", xlabel="block", ylabel="cosine",
           ylim=(-1.05, 1.05))


def panel_keys(ax, anatomy, points):
    keys = anatomy["keys"]
    for group, (label, color) in (("spike", SPIKE), ("ordinary", OTHER)):
        by_block(ax, [entry[group] and entry[group]["axes_99"] for entry in keys], label, color,
                 at=[entry["sublayer"] for entry in keys], marker="o", ms=3)
    ax.set(title=f"Axes that hold 99 % of the keys, of {keys[0]['head_dim']}", xlabel="block",
           ylabel="axes, mean over key heads", yscale="log")


def panel_heads(ax, anatomy, points):
    per_head = np.array(anatomy["sinks"]["per_head"]).T                             # (H, layers)
    image = ax.imshow(per_head, cmap="cividis", vmin=0, vmax=1, aspect="auto")
    heads = sum(head["mass"] > anatomy["sinks"]["epsilon"] for head in anatomy["sinks"]["heads"])
    ax.set(title=f"Attention to the first token: {heads} sink heads of {per_head.size}",
           xlabel="attention layer", ylabel="head")
    for axis in (ax.xaxis, ax.yaxis):
        axis.get_major_locator().set_params(integer=True)
    ax.figure.colorbar(image, ax=ax)


def panel_received(ax, anatomy, points):
    sinks = anatomy["sinks"]
    mean = [float(np.mean(row)) for row in sinks["per_head"]]
    minor, ordinary = sinks["received"]["minor"], sinks["received"]["ordinary"]
    for values, (label, color) in ((mean, ("first token", RED)), (minor, MINOR), (ordinary, OTHER)):
        by_block(ax, values, label, color, at=sinks["layers"], marker="o", ms=3)
    ax.set(title="Attention that one key gets from later queries", xlabel="block",
           ylabel="mean over heads")


def panel_edits(ax, anatomy, points):
    ax.set(title="Loss when spikes are edited after the step up", ylabel="added loss, nats")
    edits, arms = anatomy["interventions"], (("zero", RED), ("mean", GREEN), ("control", BLUE))
    for j, (arm, color) in enumerate(arms if edits else ()):
        added = [edit[arm]["loss"] - edit["untouched"]["loss"] for edit in edits]
        bars = ax.bar(np.arange(len(edits)) + 0.27 * (j - 1), added, 0.25, color=color, label=arm)
        ax.bar_label(bars, [f"{v:+.3f}" for v in added], fontsize=8, padding=2)
    if edits:
        ax.set_xticks(range(len(edits)), [f"block {edit['after'] + 1}\n{edit['n_tokens']} tokens"
                                          for edit in edits])


# The report: a heading, two sentences and at most one table for each measurement.

def number(x) -> str:
    return "–" if x is None else f"{x:,.0f}" if abs(x) >= 1000 else f"{x:.3g}"


def flow(text: str) -> str:
    """A paragraph from lines that were broken for the eye of whoever reads this file."""
    return " ".join(text.split())


def blocks(a: dict, sublayers: list[int]) -> str:
    return " and ".join(block_name(a["kinds"], l) for l in sublayers) or "no block"


def report_life(a: dict) -> str:
    parts, main = [], a["lives"][a["main"]]
    for life in a["lives"]:
        words = ", ".join(f"`{word['text']!r}` x {word['count']}" for word in life["words"][:5])
        massive = "massive" if life["massive"] else "not massive"
        what = "The largest entry of a first token," if life["young"] else "A spike of"
        who = f"After the step up {life['n_tokens']} tokens reach a quarter of the largest"
        who = f"It is measured on {life['n_tokens']} tokens" if life["young"] else who
        parts.append(flow(f"""
            {what} {number(life['peak'])}, {number(life['ratio'])} medians ({massive} by Sun et
            al.: over 100 and 1000 medians), in channel {life['channel']} of `{life['text']!r}` at
            position {life['position']} steps up in {blocks(a, life['step_up'])} and down in
            {blocks(a, life['step_down'])}. {who}, {life['at_first']} of them at position 0:
            {words}."""))
    parts.append(markdown([f"channel after block {main['step_up'][-1] + 1}", "mean, spike tokens"],
                          [[str(c), number(v)] for c, v in main["channels"].items()]))
    return "\n\n".join(parts)


def report_vocabulary(a: dict) -> str:
    v = a["vocabulary"]
    spike = "there is no threshold, for nothing spikes in the text"
    if v["threshold"]:
        spike = f"{v['share']:.2%} reach {number(v['threshold'])}, a quarter of the text's largest"
    if v["exceptions"]:
        spike += f" (not so {', '.join(f'`{text!r}`' for text in v['exceptions'])})"
    return flow(f"""
        {v['n']:,} of the {v['of']:,} ids, each alone as the first and only token of its sequence:
        after {block_name(a['kinds'], v['sublayer'])} {spike}. Their largest entries run from
        {number(v['smallest'])} over {number(v['middle'])} (median) to {number(v['largest'])}.""")


FORM_COLUMNS = (    # header, key, of which tokens
    ("norm of U", "frobenius", None), ("λ*", "eigenvalue", None), ("next", "runner_up", None),
    ("share", "share", None), ("same s*", "same_direction", None), ("cos²", "cos2", "spike"),
    ("cos², others", "cos2", "others"), ("λ* d cos²", "leading", "spike"),
    ("h'Uh", "quadratic", "spike"), ("output", "actual", "spike"), ("open", "linear", "spike"))


def report_forms(a: dict) -> str:
    forms = a["forms"]["blocks"]
    if not forms:
        return "There is no SwiGLU in which anything steps up or down."
    cell = lambda form, key, who, i: \
        number(form[key][i] if who is None else form[who] and form[who][key][i])
    rows = [[str(form["sublayer"] + 1), str(k)] + [cell(form, key, who, i) for _, key, who
                                                   in FORM_COLUMNS]
            for form in forms for i, k in enumerate(form["channels"])]
    medians = ", ".join(f"{number(form['frobenius_median'])} in block {form['sublayer'] + 1}"
                        for form in forms)
    return flow(f"""
        With h = x / rms(x), so that |h|² = d, and the norm's gain folded into the weights, a SwiGLU
        with open gates is F_k(h) ≈ h'U_k h; where the symmetric part of U_k has one large
        eigenvalue λ* with vector s*, F_k ≈ λ* d cos²(h, s*). Medians over spike tokens of that
        prediction, the form and the output; a random direction has cos² =
        {number(forms[0]['chance'])}, a median channel a norm of {medians}, 'share' is λ*² of the
        squared norm of the symmetric part, 'same s*' the |cosine| with the first channel's s*,
        'open' the share of the output from gates above 4, where SiLU(z) > 0.98 z.
        """) + "\n\n" + markdown(["block", "channel"] + [c[0] for c in FORM_COLUMNS], rows)


def report_norms(a: dict) -> str:
    after = a["lives"][a["main"]]["step_up"][-1] + 1
    if after >= len(a["norms"]):
        return "No sublayer follows the step up."
    entry = a["norms"][after]
    pick = lambda key, group: number(entry[key][group])
    return flow(f"""
        At {block_name(a['kinds'], after)}, the first to read it, a spike token has
        {pick('channels_raw', 'spike')} effective channels, and {pick('channels', 'spike')} after
        the norm's gain (other tokens: {pick('channels_raw', 'ordinary')} and
        {pick('channels', 'ordinary')}). The norm leaves two spike tokens at a cosine of
        {pick('cosine', 'spike')}, two others at {pick('cosine', 'ordinary')}, and one of each at
        {pick('cosine', 'spike_ordinary')}.""")


def report_sinks(a: dict) -> str:
    s, up = a["sinks"], a["lives"][a["main"]]["step_up"][-1]
    found = [head for head in s["heads"] if head["mass"] > s["epsilon"]]
    rest = [head for head in s["heads"] if head["mass"] <= s["epsilon"]]
    mean = lambda heads, key: number(float(np.mean([h[key] for h in heads])))
    keys = [k for k in a["keys"] if k["sublayer"] > up and k["spike"] and k["ordinary"]]
    axes = lambda group, key: number(float(np.mean([k[group][key] for k in keys]))
                                     if keys else None)
    rows = [[f"{h['layer']}.{h['head']}"] + [number(h[key]) for key in
            ("mass", "gap", "gap_sd", "gap_best")] for h in found[:8]]
    table = markdown(["layer.head", "mass", "logit gap", "sd", "gap to the best"], rows) + "\n"
    lead = lambda heads: f"{mean(heads, 'gap')} ± {mean(heads, 'gap_sd')}" if heads else "nothing"
    layers = {layer: sorted(h["head"] for h in found if h["layer"] == layer)
              for layer in sorted({h["layer"] for h in found})}
    names = "; ".join(f"{layer}: {' '.join(map(str, row))}" for layer, row in layers.items())
    return flow(f"""
        {len(found)} of {len(s['heads'])} heads give position 0 more than {s['epsilon']:g} of their
        attention; the sink ratio is {s['ratio_gu']:.1%} by Gu et al. and {s['ratio_spike']:.1%} by
        the Spike paper (T = {s['T']}). In these heads the first key's logit leads the mean of the
        others by {lead(found)} over queries, in the rest by
        {lead(rest)}; above the step up the keys of spike tokens
        have {axes('spike', 'effective')} effective dimensions, and {axes('spike', 'axes_99')} axes
        hold 99 % of them, against {axes('ordinary', 'effective')} and
        {axes('ordinary', 'axes_99')} of {a['keys'][0]['head_dim']} for other tokens (rotation
        undone, mean over key heads).""") + "\n\n" + (table if found else "") + (
            f"Sink heads by layer: {names or 'none'}.")


def report_edits(a: dict) -> str:
    if not a["interventions"]:
        return "Nothing was edited, because the residual is no plain sum."
    arms, keys = ("untouched", "zero", "mean", "control"), ("loss", "first_token_mass", "ratio_gu")
    rows = [[f"{edit['after'] + 1}: {edit['n_tokens']} tokens, {len(edit['channels'])} channels",
             arm] + [f"{edit[arm][key]:.4f}" for key in keys]
            for edit in a["interventions"] for arm in arms]
    main = a["interventions"][a["main"]]
    zero, mean, control = (f"{main[arm]['loss'] - main['untouched']['loss']:+.4f}"
                           for arm in arms[1:])
    return flow(f"""
        Right after the step up the spike channels of the spike tokens are set to zero ({zero} nats
        for the largest spike), to their mean over the spike tokens ({mean}), or, as a control, as
        many other channels of as many other tokens to zero ({control}). Where a mean costs little
        and zero much, the network needs the spike and not what it says of its token.
        """) + "\n\n" + markdown(["after block", "edit", "loss", "first-token mass",
                                  "sink ratio (Gu)"], rows)


def anatomy_report(anatomy: dict, name: str) -> str:
    """Everything in words, two sentences a measurement, and what the model has not."""
    parts = {"The life of the spikes": report_life,
             "Which tokens spike when they are first": report_vocabulary,
             "The feed-forward layer as an amplifier": report_forms,
             "What the norm makes of a spike token": report_norms,
             "Sinks: heads, keys and logits": report_sinks, "What the loss says": report_edits}
    text = [f"# Anatomy of {name}",
            flow(f"""{anatomy['protocol']['text']}. Blocks are counted from 1, attention and
                 feed-forward separately."""), "![the anatomy on one page](figures/anatomy.png)",
            "\n".join(f"- {note}." for note in anatomy["notes"])]
    text += [f"## {heading}\n\n{write(anatomy).rstrip()}" for heading, write in parts.items()]
    return "\n\n".join(part for part in text if part) + "\n"


# --------------------------------------------------------------------------------------- program

PRETRAINED_T = 512      # default context for pretrained folders: Llama's own would take hours here


def results_folder(path: str) -> str:
    """Where results go: the run's own folder, or runs/NAME for a pretrained one (only read)."""
    if find_pretrained(path):
        return os.path.join("runs", os.path.basename(os.path.abspath(path)))
    return path if os.path.isdir(path) else os.path.dirname(path) or "."


def open_run(path: str, device: str | None = None, download: bool = False):
    """Whatever load_model reads -> model, what its checkpoint says of the run, folder for results.

    A pretrained folder says nothing, so: a BOS at the start of each window if its tokenizer.json
    puts one before a text, windows of at most 512 tokens. Raises CheckpointError, DataError, or
    EvalError if there is no such device.
    """
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise EvalError(f"device {device!r}: {str(error).splitlines()[0]}") from None
    model, payload = load_model(path, download=download)
    run = payload.get("run") or {}
    if find_pretrained(path):
        if "tokenizer" not in run:
            raise EvalError(f"{path} has no tokenizer.json")
        run = {"bos": "window" if get_tokenizer(run["tokenizer"]).adds_bos else "none",
               "T": min(PRETRAINED_T, model.config.block_size), **run}
    return model.to(device), run, results_folder(path)


def with_defaults(run: dict, bos: str | None, options: dict) -> dict:
    """evaluate's options, with what was not given taken from the run."""
    T = options.get("T")
    return {"bos_policy": bos or run.get("bos") or "none", **options,
            "T": run.get("T") if T is None else T}


def text_of(run: dict, data: str | None):
    """The validation split of the run's own corpus or of `data`, in the run's tokenizer; a token
    file that is named is taken as it is. Raises DataError, EvalError."""
    tokenizer = run.get("tokenizer")
    if data is None or not data.endswith(".bin"):
        return open_source(data or run.get("data") or "stdlib", "val", tokenizer=tokenizer)
    if not tokenizer:
        return TokenFile.open(data)
    own = get_tokenizer(tokenizer)
    file = opened(data, own)
    if own.name != file.tokenizer:
        raise EvalError(f"{data} holds ids of the tokenizer {file.tokenizer}, the run's is "
                        f"{tokenizer}")
    return file


def summary(metrics: dict) -> str:
    """COLUMNS of one run, one a line, with the key under which metrics.json holds each."""
    rows = [[header, as_text(lookup(metrics, path), spec), f"`{path}`"]
            for header, path, spec in COLUMNS if lookup(metrics, path) is not None]
    return markdown(["measure", "value", "key"], rows)


def report_run(path: str, model=None, *, data: str | None = None, bos: str | None = None,
               device: str | None = None, draw: bool = True, brief: bool = False,
               out: str | None = None, download: bool = False, **options) -> dict:
    """Measure a run, write metrics.json and figures/ into its folder (or `out`), print a summary
    (brief: only where things are). Returns the metrics.

    model: the run's, if it is in memory. data, bos: by default the run's own. options: evaluate's.
    """
    if model is None:
        model, run, folder = open_run(path, device, download)
    else:
        run, folder = load_checkpoint(path).get("run") or {}, path
    folder, tokens = out or folder, text_of(run, data)
    options = with_defaults(run, bos, options)
    about = {key: run.get(key) for key in ("git", "arch", "size", "seed", "steps", "tokens")}
    metrics = evaluate(model, tokens, progress=True, protocol=about, **options)
    saved = save_metrics(folder, metrics)
    print(f"{metrics['protocol']['text']}\n" + ("" if brief else f"\n{summary(metrics)}\n")
          + f"metrics  {saved}")
    if draw:
        drawn = figures(model, tokens, os.path.join(folder, "figures"), metrics=metrics, **options)
        print("figures  " + " ".join(drawn))
    return metrics


@contextlib.contextmanager
def widened(model, context: int):
    """Rotary positions reach as far as the pretrained model's, however short the windows that it
    was fine-tuned on: a prompt with eight examples is longer than those."""
    config, block = model.config, model.config.block_size
    if not has_table(config):
        config.block_size = max(block, context)
    try:
        yield
    finally:
        config.block_size = block


def report_gsm8k(model, run: dict, folder: str, source: str, *, limit: int | None = None,
                 download: bool = False, label: str = "", **options) -> dict:
    """Pass@1 on GSM8K: print it, leave every answer in FOLDER/gsm8k.jsonl -> for metrics.json.

    source, download: of gsm8k.load_problems. limit: the first so many problems. label: a name for
    this version of the model (gsm8k-LABEL.jsonl). options: gsm8k.answer's shots, chat, ...
    """
    problems = gsm8k.load_problems(source, download)[:limit]
    path = os.path.join(folder, f"gsm8k{'-' if label else ''}{label}.jsonl")
    tokenizer = get_tokenizer(run.get("tokenizer") or "bytes")
    bos = (run.get("bos") or "none") != "none"
    with evaluating(unwrap(model)), widened(unwrap(model), run.get("context", 0)):
        records = gsm8k.answer(unwrap(model), tokenizer, problems, bos=bos, label=label, path=path,
                               progress=True, **options)
    result = gsm8k.score(records) | {"protocol": {"data": os.path.basename(source), "bos": bos,
                                                  **options}}
    for kind in ("strict", "flexible"):
        low, high = result[f"{kind}_interval"]
        print(f"GSM8K {kind:8s} {result[kind]:6.1%}   95 % between {low:.1%} and {high:.1%}, "
              f"n = {result['n']}")
    print(f"{result['truncated']} answers ran out of tokens, {result['no_strict_answer']} without "
          f"a number after ####, {result['tokens_per_answer']:.0f} tokens each\nanswers  {path}")
    return result


def add_gsm8k_flags(parser: argparse.ArgumentParser):
    group = parser.add_argument_group("GSM8K")
    group.add_argument("--gsm8k", metavar="FILE|test", help="Pass@1 on these problems (.jsonl or "
                       ".parquet); test: the split, fetched once with --download")
    group.add_argument("--limit", type=int, help="the first so many problems (default: all)")
    group.add_argument("--shots", type=int, default=8, help="worked examples (default 8; 0: none)")
    group.add_argument("--chat", action="store_true", help="ask in the model's chat format (ChatML "
                       "or Llama-3; thinking off) instead of plain text")
    group.add_argument("--max-new-tokens", type=int, default=256,
                       help="longest answer (default 256)")


def gsm8k_options(args) -> dict:
    """report_gsm8k's options from the flags, checked."""
    for name in ("limit", "max_new_tokens", "batch_size"):
        if getattr(args, name) is not None and getattr(args, name) < 1:
            raise EvalError(f"--{name.replace('_', '-')} must be at least 1")
    return dict(limit=args.limit, shots=args.shots, chat=args.chat, download=args.download,
                max_new_tokens=args.max_new_tokens, batch_size=args.batch_size)


def report_stream(model, run: dict, folder: str, specs: list[tuple], *, data=None, bos=None,
                  draw: bool = True, **options) -> dict:
    """Loss with a sliding cache: print it, draw figures/stream.png -> for metrics.json."""
    options["bos_policy"] = bos or run.get("bos") or "none"
    found = measure_stream(model, text_of(run, data), specs, progress=True, **options)
    rows = [[*key.split(":"), f"{entry['loss_before']:.4f}", f"{entry['loss']:.4f}"]
            for key, entry in found.items() if ":" in key]
    print(markdown(["window", "kept", "loss before it is full", "after"], rows))
    if draw:
        path = os.path.join(folder, "figures", "stream.png")
        print(f"figure   {save_figure(draw_stream(found), path)}")
    return found


def report_anatomy(model, run: dict, folder: str, name: str, *, data: str | None = None,
                   bos: str | None = None, draw: bool = True, T: int | None = None,
                   **options) -> dict:
    """Dissect a model: FOLDER/anatomy.md and figures/anatomy.png -> for metrics.json."""
    T = min(256, model.config.block_size) if T is None else T
    about = {key: run.get(key) for key in ("git", "arch", "size", "seed", "steps", "tokens")}
    anatomy, points = dissect(
        model, text_of(run, data), tokenizer=run.get("tokenizer") or "bytes", protocol=about,
        progress=True, **with_defaults(run, bos, {"T": T, **options}))
    report = anatomy_report(anatomy, name)
    print("\n".join([anatomy["protocol"]["text"], *(f"note     {n}" for n in anatomy["notes"])]))
    print(f"report   {write_text(os.path.join(folder, 'anatomy.md'), report)}")
    if draw:
        fig = draw_anatomy(anatomy, points, f"{name}: from the spike to the sink")
        print("figure   " + save_figure(fig, os.path.join(folder, "figures", "anatomy.png")))
    return anatomy


def measure_apart(path: str, name: str, args, out: str | None):
    """The measurements that replace the usual ones when their flag is given."""
    model, run, folder = open_run(path, args.device, args.download)
    folder, asked = out or folder, {}
    shared = dict(data=args.data, bos=args.bos, draw=not args.no_figures)
    if args.stream:
        specs = [parse_stream(spec) for spec in args.stream]
        asked["stream"] = lambda: report_stream(
            model, run, folder, specs, n_tokens=args.stream_tokens, n_streams=args.batch_size,
            **shared)
    if args.anatomy:
        asked["anatomy"] = lambda: report_anatomy(
            model, run, folder, name, T=args.T, batch_size=args.batch_size, epsilon=args.eps,
            n_sequences=8 if args.n_sequences is None else args.n_sequences, **shared)
    if args.gsm8k:
        options = gsm8k_options(args)
        asked["gsm8k"] = lambda: report_gsm8k(model, run, folder, args.gsm8k, **options)
    for key, measure in asked.items():      # saved one by one: a later one may fail
        print(f"metrics  {save_metrics(folder, {key: measure()})}")


def places(args) -> list[tuple[str, str, str | None]]:
    """(path, a name that no other has, folder for its results or None: its own) of args.paths."""
    folders = [os.path.dirname(path) if os.path.isfile(path) else path
               for path in map(os.path.abspath, args.paths)]
    if len(set(folders)) < len(folders):
        raise EvalError("the same run is given twice")
    parts = 1
    while len({tuple(folder.split(os.sep)[-parts:]) for folder in folders}) < len(folders):
        parts += 1                          # a/m and b/m
    found = []
    for path, folder in zip(args.paths, folders):
        name, out = "-".join(folder.split(os.sep)[-parts:]).strip("-"), args.out
        if out and len(folders) > 1:
            out = os.path.join(out, name)
        elif parts > 1 and find_pretrained(path, args.download):
            out = os.path.join("runs", name)            # else both would be runs/m
        found.append((path, name, out))
    return found


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        epilog="Results: metrics.json and figures/ in each run's folder; for several paths also "
               "comparison.md, .csv and .png in --out (default: the folder that holds the runs).")
    parser.add_argument("paths", nargs="+", metavar="RUN",
                        help="run folder, checkpoint file, Llama or Qwen3 folder, or hub id")
    text = parser.add_argument_group("text")
    text.add_argument("--data", "--text", metavar="NAME|FILE", help="corpus name, text or token "
                      "file, or backcopy (default: the run's own)")
    text.add_argument("--bos", choices=("none", "document", "window"),
                      help="where a BOS id is shown (default: as in training)")
    text.add_argument("--T", type=int, help="tokens per window (default: the model's block_size; "
                      f"{PRETRAINED_T} for pretrained folders)")
    text.add_argument("--n-sequences", type=int,
                      help="windows to evaluate (default 64; 8 for --anatomy)")
    parser.add_argument("--anatomy", action="store_true", help="dissect instead: the life of the "
                        "spikes, the SwiGLU that makes them, norms, keys, sinks, edits; writes "
                        "anatomy.md, figures/anatomy.png and the key anatomy of metrics.json "
                        "(windows of at most 256 tokens unless --T says otherwise)")
    run = parser.add_argument_group("running")
    run.add_argument("--batch-size", type=int, default=8, help="windows at a time (default 8)")
    run.add_argument("--device", help="cpu, cuda, ... (default: cuda where there is one)")
    run.add_argument("--eps", type=float, default=EPSILON,
                     help=f"a head is a sink head above this mean attention (default {EPSILON})")
    run.add_argument("--out", help="folder for the results (default: each run's own; runs/NAME for "
                     "a pretrained folder)")
    run.add_argument("--download", action="store_true", help="a hub id may be fetched")
    run.add_argument("--no-figures", action="store_true", help="numbers only")
    stream = parser.add_argument_group("streaming")
    stream.add_argument("--stream", action="append", metavar="WINDOW[:KEEP]",
                        help="loss over a long text with a cache of WINDOW tokens that never "
                        "forgets the first KEEP (may be given several times)")
    stream.add_argument("--stream-tokens", type=int, metavar="N",
                        help="length of each of --batch-size streams (default: 8 windows)")
    add_gsm8k_flags(parser)
    return parser


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    several, runs = len(args.paths) > 1, []
    try:
        if not 0 < args.eps < 1:
            raise EvalError(f"--eps {args.eps:g} must lie between 0 and 1")
        for path, name, out in places(args):
            if args.gsm8k or args.stream or args.anatomy:
                measure_apart(path, name, args, out)
                continue
            runs.append((name, report_run(
                path, data=args.data, bos=args.bos, device=args.device, draw=not args.no_figures,
                out=out, T=args.T, n_sequences=64 if args.n_sequences is None else args.n_sequences,
                batch_size=args.batch_size, epsilon=args.eps, brief=several,
                download=args.download)))
        if several and runs:
            place = args.out or os.path.dirname(os.path.abspath(results_folder(args.paths[0])))
            table, _, figure = compare(runs, out_dir=place)
            print(f"\n{table}\ncomparison  {figure} (and .md, .csv)")
    except FAILURES as error:
        print(f"eval.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("eval.py: stopped; what was measured before is kept", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
