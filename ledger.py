"""Ledger Residuals: a protected answer channel beside the scratch stream (arXiv 2606.20743).

The residual stream has two jobs: it is where sublayers scribble and it is what the head decodes.
Outliers, so the argument goes, are scratch work left on the page that is handed in. Ledger gives
the model two pages. Sublayers read and write a scratch stream D; a gate commits D, sublayer by
sublayer, to an append-only stream C, and only C is decoded. For each sublayer, from D = embedding
and C = 0:

    u = norm(D + lambda * C)              y = f(u)                            [Ledger 2.2.1]
    b_e = sigmoid(W_e u)                  b_w = sigmoid(W_w u)                [Ledger 2.2.2]
    k = W_k u / |W_k u|                   one direction per token
    D <- D - b_e * k (k.D) + b_w * (y + G y)      erase (delta rule), write   [Ledger 2.2.3]
    c = sigmoid(w_c.u + b_c)              one number per token
    C <- C + c (D + P D)                  commit the whole new D              [Ledger 2.2.4]
    logits = head(norm(C + gamma D)),     loss += sparsity * mean c           [Ledger 2.5]

Erase and write gates are vectors and decoupled, so that the model can be an ordinary pre-norm
transformer: erase shut, write open, commit shut and gamma = 1 (`vanilla_corner`). With gamma = 0
the same function is reached by committing at the last sublayer only (`last_commit_corner`).

What to watch for: the head reads norm(C), so scaling all of a token's commit gates by one factor
changes nothing but the penalty. "Sparse" commits may be small commits (papers call this a gauge);
eval.py therefore also reports the relative profile c_l / sum c.

Read first: `update`, the equations above; then `Site`, where the weights live; then `Ledger`.
`HyperConnection2` and `Delta` are the paper's controls. `python ledger.py [RUN]` checks the two
corners and draws the gates.

Shapes: B batch, T tokens, d width, r gate rank, L sublayers.
"""
from __future__ import annotations

from types import SimpleNamespace
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

OPEN, SHUT = 30.0, -30.0      # a sigmoid's bias for 1 and 0, up to 1e-13
NEAR = 12.0                   # for near_identity: 6e-6 from 0 and 1, where a gradient still flows
EPS = 1e-6                    # shortest erase direction that is divided by its length


class LowRank(nn.Module):
    """x -> up(down(x)) through r channels, d -> r -> d; the bias, if any, is on `up`."""

    def __init__(self, d: int, r: int, bias: bool):
        super().__init__()
        self.down = nn.Linear(d, r, bias=False)
        self.up = nn.Linear(r, d, bias=bias)

    def forward(self, x):
        return self.up(self.down(x))                                                # (B, T, d)


class Site(nn.Module):
    """The weights of one sublayer's ledger entry, and their initial values [Ledger 2.3].

    Gates depend on their input through a map that starts at zero, so at first they are constants:
    erase 0.047, write 0.953, commit rising with depth from 0.018 to 0.982; writes and commits are
    verbatim; the scratch stream is read alone. With near_identity the gates stand near the
    last-commit corner instead, at +-NEAR: a pretrained function is kept, and can be left.
    """

    def __init__(self, d: int, r: int, depth: float):
        super().__init__()
        self.gate_bias = 3.0
        self.commit_bias = -4.0 + 8.0 * depth       # depth: 0 at the first sublayer, 1 at the last
        self.read_gain = nn.Parameter(torch.zeros(d))          # lambda
        self.erase = LowRank(d, r, bias=True)                  # W_e
        self.write = LowRank(d, r, bias=True)                  # W_w
        self.key = LowRank(d, r, bias=False)                   # W_k
        self.write_delta = LowRank(d, r, bias=False)           # G
        self.commit_delta = LowRank(d, r, bias=False)          # P
        self.commit = nn.Linear(d, 1)                          # w_c, b_c

    def init_special(self):
        for map_ in (self.erase, self.write, self.write_delta, self.commit_delta):
            map_.up.weight.zero_()
        self.erase.up.bias.fill_(-self.gate_bias)
        self.write.up.bias.fill_(self.gate_bias)
        self.commit.weight.zero_()
        self.commit.bias.fill_(self.commit_bias)
        self.read_gain.zero_()


def gates(site: Site, u):
    """Erase, write gates, erase direction, commit gate: (B, T, d) -> (B, T, d) x 3, (B, T, 1)."""
    b_e = site.erase(u).sigmoid()                                                   # (B, T, d)
    b_w = site.write(u).sigmoid()                                                   # (B, T, d)
    k = F.normalize(site.key(u), dim=-1, eps=EPS)                                   # (B, T, d)
    c = site.commit(u).sigmoid()                                                    # (B, T, 1)
    return b_e, b_w, k, c


def update(site: Site, D, C, u, y):
    """One ledger entry, as in the equations. (B, T, d) x 4 -> D, C (B, T, d) and c (B, T, 1)."""
    b_e, b_w, k, c = gates(site, u)
    D = D - b_e * k * (k * D).sum(-1, keepdim=True) \
        + b_w * (y + site.write_delta(y))                                           # (B, T, d)
    C = C + c * (D + site.commit_delta(D))                                          # (B, T, d)
    return D, C, c


class Weights(NamedTuple):
    """A site's weights in the order in which FusedUpdate takes them."""
    e_down: torch.Tensor
    e_up: torch.Tensor
    e_bias: torch.Tensor
    w_down: torch.Tensor
    w_up: torch.Tensor
    w_bias: torch.Tensor
    k_down: torch.Tensor
    k_up: torch.Tensor
    g_down: torch.Tensor
    g_up: torch.Tensor
    p_down: torch.Tensor
    p_up: torch.Tensor
    c_weight: torch.Tensor
    c_bias: torch.Tensor

    @classmethod
    def of(cls, s: Site):
        return cls(s.erase.down.weight, s.erase.up.weight, s.erase.up.bias,
                   s.write.down.weight, s.write.up.weight, s.write.up.bias,
                   s.key.down.weight, s.key.up.weight,
                   s.write_delta.down.weight, s.write_delta.up.weight,
                   s.commit_delta.down.weight, s.commit_delta.up.weight,
                   s.commit.weight, s.commit.bias)


class FusedUpdate(torch.autograd.Function):
    """`update` with a hand-written backward, for less than half the memory (a test counts it):
    autograd would keep a dozen (B, T, d) tensors for each sublayer; this keeps u, y and D before
    and after, and rebuilds gates, direction and write from their maps of r channels.

    Matrix products run in `low` (autocast's dtype), the streams in their own. No second derivative.
    """

    @staticmethod
    def rebuild(w: Weights, u, h_u, h_y, y, low):
        """Gates, direction, its length, and the write, from the r-channel maps of u and y."""
        h_e, h_w, h_k = h_u.split((len(w.e_up.T), len(w.w_up.T), len(w.k_up.T)), dim=-1)
        b_e = F.linear(h_e, w.e_up, w.e_bias).to(y.dtype).sigmoid_()                # (B, T, d)
        b_w = F.linear(h_w, w.w_up, w.w_bias).to(y.dtype).sigmoid_()                # (B, T, d)
        k = F.linear(h_k, w.k_up).to(y.dtype)                                       # (B, T, d)
        length = torch.linalg.vector_norm(k, dim=-1, keepdim=True).clamp_(min=EPS)  # (B, T, 1)
        write = F.linear(h_y, w.g_up).to(y.dtype).add_(y)                           # (B, T, d)
        return b_e, b_w, k.div_(length), length, write

    @staticmethod
    def forward(ctx, D, C, u, y, low, *weights):
        with torch.autocast(u.device.type, enabled=False):
            w = Weights(*(p.to(low) for p in weights))
            ctx.dtypes, u, y = (u.dtype, y.dtype), u.to(low), y.to(D.dtype)
            h_u = F.linear(u, torch.cat((w.e_down, w.w_down, w.k_down)))            # (B, T, 3r)
            h_y = F.linear(y.to(low), w.g_down)                                     # (B, T, r)
            b_e, b_w, k, _, a = FusedUpdate.rebuild(w, u, h_u, h_y, y, low)
            along = (k * D).sum(-1, keepdim=True)                                   # (B, T, 1)
            new_D = torch.addcmul(D, b_w, a).addcmul_(b_e.mul_(k), along, value=-1)  # (B, T, d)
            c = F.linear(u, w.c_weight, w.c_bias).to(D.dtype).sigmoid_()            # (B, T, 1)
            h_p = F.linear(new_D.to(low), w.p_down)                                 # (B, T, r)
            m = F.linear(h_p, w.p_up).to(D.dtype).add_(new_D)                       # (B, T, d)
        ctx.low = low
        ctx.save_for_backward(D, new_D, u, y, c, h_u, h_y, h_p, *weights)
        return new_D, torch.addcmul(C, c, m), c                                     # (B, T, d) ..

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, grad_D, grad_C, grad_c):
        D, new_D, u, y, c, h_u, h_y, h_p, *weights = ctx.saved_tensors
        low, w = ctx.low, Weights(*(p.to(ctx.low) for p in weights))
        flat = lambda x: x.to(low).flatten(0, -2)                                   # (B T, .)
        outer = lambda dy, x: flat(dy).T @ flat(x)           # gradient of a weight (out, in)
        b_e, b_w, k, length, a = FusedUpdate.rebuild(w, u, h_u, h_y, y, low)
        # C = C + c m, m = D' + P D'
        m = F.linear(h_p, w.p_up).to(D.dtype).add_(new_D)                           # (B, T, d)
        d_c = (grad_C * m).sum(-1, keepdim=True) + grad_c                           # (B, T, 1)
        d_zc = d_c * c * (1 - c)                                                    # (B, T, 1)
        d_m = c * grad_C                                                            # (B, T, d)
        d_hp = d_m.to(low) @ w.p_up                                                 # (B, T, r)
        d_new = (d_hp @ w.p_down).to(D.dtype).add_(d_m).add_(grad_D)                # (B, T, d)
        # D' = D - b_e k (k.D) + b_w a, a = y + G y
        d_zw = (d_new * a).mul_(b_w).mul_(1 - b_w)                                  # (B, T, d)
        d_a = d_new * b_w                                                           # (B, T, d)
        d_hy = d_a.to(low) @ w.g_up                                                 # (B, T, r)
        d_y = (d_hy @ w.g_down).to(D.dtype).add_(d_a)                               # (B, T, d)
        along = (k * D).sum(-1, keepdim=True)                                       # (B, T, 1)
        d_erase = d_new * b_e                                                       # (B, T, d)
        d_along = -(d_erase * k).sum(-1, keepdim=True)                              # (B, T, 1)
        d_k = torch.addcmul(d_along * D, d_erase, along, value=-1)                  # (B, T, d)
        d_ze = d_erase.mul_(k).mul_(along).mul_(b_e - 1)                            # (B, T, d)
        d_k = d_k.addcmul_(k, (d_k * k).sum(-1, keepdim=True), value=-1).div_(length)
        d_D = d_new.addcmul_(d_along, k)                                            # (B, T, d)
        # back through the maps of u
        parts = [d_ze.to(low) @ w.e_up, d_zw.to(low) @ w.w_up, d_k.to(low) @ w.k_up]
        d_hu = torch.cat(parts, dim=-1)                                             # (B, T, 3r)
        d_u = d_hu @ torch.cat((w.e_down, w.w_down, w.k_down))                      # (B, T, d)
        d_u = d_u.addcmul_(d_zc.to(low), w.c_weight)                                # (B, T, d)
        r = [p.shape[-1] for p in parts]
        h_e, h_w, h_k = h_u.split(r, dim=-1)
        d_down = outer(d_hu, u).split(r)                                            # (r, d) x 3
        grads = Weights(d_down[0], outer(d_ze, h_e), flat(d_ze).sum(0),
                        d_down[1], outer(d_zw, h_w), flat(d_zw).sum(0),
                        d_down[2], outer(d_k, h_k), outer(d_hy, y), outer(d_a, h_y),
                        outer(d_hp, new_D), outer(d_m, h_p), outer(d_zc, u), flat(d_zc).sum(0))
        grads = (g.to(p.dtype) for g, p in zip(grads, weights))
        return d_D, grad_C, d_u.to(ctx.dtypes[0]), d_y.to(ctx.dtypes[1]), None, *grads


def fused_update(site: Site, D, C, u, y):
    """The same as `update`, through FusedUpdate."""
    device = u.device.type
    low = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else D.dtype
    return FusedUpdate.apply(D, C, u, y, low, *Weights.of(site))


class Ledger(nn.Module):
    """The residual with two streams. State: D, C (B, T, d), the gates opened so far, a recorder."""

    def __init__(self, config):
        super().__init__()
        self.gamma, self.cap, self.sparsity = (config.ledger_gamma, config.ledger_cap,
                                               config.sparsity)
        last = max(1, config.n_sublayer - 1)
        self.sites = nn.ModuleList(Site(config.d_model, config.ledger_rank, l / last)
                                   for l in range(config.n_sublayer))
        if config.near_identity:
            for site in self.sites:
                site.gate_bias, site.commit_bias = NEAR, -NEAR
            self.sites[-1].commit_bias = NEAR

    def start(self, x, record=None):
        return SimpleNamespace(D=x, C=torch.zeros_like(x), opened=[], record=record)

    def read(self, state, l: int):
        gain = self.sites[l].read_gain.to(state.C.dtype)                            # (d,)
        return torch.addcmul(state.D, gain, state.C)                                # (B, T, d)

    def write(self, state, l: int, u, y, null):
        site, before = self.sites[l], state.C
        # inductor fuses the plain equations itself; eager code wants the hand-written backward
        entry = update if torch.compiler.is_compiling() else fused_update
        D, C, c = entry(site, state.D, state.C, u, y)           # (B, T, d) x 2, (B, T, 1)
        if self.cap:
            norm = C.norm(dim=-1, keepdim=True)                                     # (B, T, 1)
            C = C * (self.cap / (norm + 1e-6)).clamp(max=1)                         # (B, T, d)
        if state.record is not None:
            self.tell(state.record, l, site, D, C, C - before, u)
        return SimpleNamespace(D=D, C=C, opened=state.opened + [c.mean()], record=state.record)

    def finish(self, state):
        return state.C + self.gamma * state.D if self.gamma else state.C            # (B, T, d)

    def penalty(self, state):
        """sparsity * mean opening of the commit gate over tokens and sublayers [Ledger 2.5]."""
        return self.sparsity * torch.stack(state.opened).mean()

    def tell(self, record, l: int, site: Site, D, C, increment, u):
        b_e, b_w, _, c = gates(site, u)
        for name, x in (("scratch", D), ("committed", C), ("commit_increment", increment),
                        ("commit_gate", c[..., 0]), ("erase_gate", b_e), ("write_gate", b_w)):
            if name in getattr(record, "names", (name,)):
                record(name, l, x)

    # ------------------------------------------------------------------------------ exact limits

    @torch.no_grad()
    def pin(self, commit_biases, gamma: float):
        """Nothing erased, all written verbatim, C read by nobody; commit gates at fixed biases."""
        self.gamma = gamma
        for site, bias in zip(self.sites, commit_biases, strict=True):
            site.init_special()
            site.erase.up.bias.fill_(SHUT)
            site.write.up.bias.fill_(OPEN)
            site.commit.bias.fill_(bias)

    def vanilla_corner(self):
        """Decode D and commit nothing: the standard pre-norm transformer [Ledger 2.4]."""
        self.pin([SHUT] * len(self.sites), gamma=1.0)

    def last_commit_corner(self):
        """Decode C, committed once, at the last sublayer: C = D, the same function at gamma 0."""
        self.pin([SHUT] * (len(self.sites) - 1) + [OPEN], gamma=0.0)


# ------------------------------------------------------------------------------------- controls

class HyperConnection2(nn.Module):
    """Two symmetric streams with static mixes and no gates: the control for "two streams help".

        h = r . (s_1, s_2)        s_i <- sum_j W_ij s_j + o_i y        decode s_1 + s_2

    Starts at r = o = (1/2, 1/2), W = 1 [Ledger 2.6]. Each stream starts at half the embedding,
    which is our choice: the model then starts as the standard one, up to the norms' epsilon. With
    near_identity r = (1, 1): what is read is the standard stream itself, not its half.
    """

    def __init__(self, config):
        super().__init__()
        L = config.n_sublayer
        self.first_read = 1.0 if config.near_identity else 0.5
        self.read_mix = nn.Parameter(torch.empty(L, 2))
        self.width_mix = nn.Parameter(torch.empty(L, 2, 2))
        self.out_mix = nn.Parameter(torch.empty(L, 2))

    def init_special(self):
        self.read_mix.fill_(self.first_read)
        self.width_mix.copy_(torch.eye(2).expand_as(self.width_mix))
        self.out_mix.fill_(0.5)

    def start(self, x, record=None):
        return (x / 2, x / 2)                                                       # (B, T, d) x 2

    def read(self, state, l: int):
        r = self.read_mix[l].to(state[0].dtype)                                     # (2)
        return r[0] * state[0] + r[1] * state[1]                                    # (B, T, d)

    def write(self, state, l: int, u, y, null):
        w, o = self.width_mix[l].to(y.dtype), self.out_mix[l].to(y.dtype)           # (2, 2), (2)
        return tuple(w[i, 0] * state[0] + w[i, 1] * state[1] + o[i] * y for i in (0, 1))

    def finish(self, state):
        return state[0] + state[1]                                                  # (B, T, d)

    def penalty(self, state):
        return 0.0


class Delta(nn.Module):
    """One stream with the erase rule and tied gates: the control for "erasing helps" [Ledger 2.6].

        D <- D + b * (y - k (k.D)),     b = sigmoid(W u)

    The gate starts open, at 0.953 as Ledger's write gate (our choice). Tied, it cannot be an
    ordinary residual unless k vanishes (`vanilla_corner`): this is why Ledger decouples the two.
    """

    def __init__(self, config):
        super().__init__()
        d, r = config.d_model, config.ledger_rank
        L = config.n_sublayer
        self.gate = nn.ModuleList(LowRank(d, r, bias=True) for _ in range(L))
        self.key = nn.ModuleList(LowRank(d, r, bias=False) for _ in range(L))

    def init_special(self):
        for gate in self.gate:
            gate.up.weight.zero_()
            gate.up.bias.fill_(3.0)

    def start(self, x, record=None):
        return x                                                                    # (B, T, d)

    def read(self, state, l: int):
        return state                                                                # (B, T, d)

    def write(self, state, l: int, u, y, null):
        b = self.gate[l](u).sigmoid()                                               # (B, T, d)
        k = F.normalize(self.key[l](u), dim=-1, eps=EPS)                            # (B, T, d)
        return state + b * (y - k * (k * state).sum(-1, keepdim=True))              # (B, T, d)

    def finish(self, state):
        return state                                                                # (B, T, d)

    def penalty(self, state):
        return 0.0

    @torch.no_grad()
    def vanilla_corner(self):
        for gate, key in zip(self.gate, self.key):
            gate.up.weight.zero_()
            gate.up.bias.fill_(OPEN)
            key.up.weight.zero_()


# ----------------------------------------------------------------------------------- self-check

def corner_gaps(config, tokens) -> dict[str, float]:
    """Largest |delta logit| between the standard transformer and Ledger in each of its corners."""
    from dataclasses import replace
    from model import Transformer
    vanilla = Transformer(replace(config, residual="standard")).double()
    ledger = Transformer(replace(config, residual="ledger")).double()
    with torch.no_grad():
        truth = vanilla(tokens)[0]                                                  # (B, T, V)
        gaps = {"as initialised": (ledger(tokens)[0] - truth).abs().max().item()}
        for corner in ("vanilla_corner", "last_commit_corner"):
            getattr(ledger.residual, corner)()
            gaps[corner] = (ledger(tokens)[0] - truth).abs().max().item()
    return gaps


class GateMeans:
    """A recorder that keeps the mean of each gate over tokens and channels, per sublayer."""
    names = {"commit_gate", "erase_gate", "write_gate"}

    def __init__(self):
        self.mean = {name: {} for name in self.names}

    def __call__(self, name, l, x):
        self.mean[name][l] = x.float().mean().item()


def draw_gates(models: dict, tokens, path: str):
    """Erase, write and commit gates of each model against depth, and the share of C each sublayer
    commits (c_l / sum c). models: label -> Transformer; tokens: label -> (B, T)."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    titles = {"erase_gate": "erase gate", "write_gate": "write gate",
              "commit_gate": "commit gate c"}
    fig, axes = plt.subplots(1, 4, figsize=(13, 3), layout="constrained")
    for marker, (label, model) in zip("osD^", models.items()):
        gate = GateMeans()
        with torch.no_grad():
            model(tokens[label], record=gate)
        rows = {titles[name]: list(gate.mean[name].values()) for name in titles}
        c = rows["commit gate c"]
        rows["share of the commits, c / sum c"] = [x / sum(c) for x in c]
        for ax, (title, values) in zip(axes, rows.items()):
            ax.plot(range(len(values)), values, marker=marker, label=label)
            ax.set(title=title, xlabel="sublayer (even: attention, odd: FFN)")
    for ax in axes[:3]:
        ax.set_ylim(-0.03, 1.03)
    axes[3].set_ylim(0, None)
    axes[0].legend()
    fig.savefig(path, dpi=130)
    plt.close(fig)


def main():
    import argparse
    import os
    from model import Config, Transformer
    parser = argparse.ArgumentParser(description="Check Ledger's two exact limits and draw its "
                                     "gates before and, given a run, after training.")
    parser.add_argument("run", nargs="?", help="run folder or checkpoint of a ledger model")
    parser.add_argument("--figure", default="figures/ledger_gates.png", help="where to draw")
    args = parser.parse_args()
    g = torch.Generator().manual_seed(0)
    config = Config(residual="ledger")
    tokens = torch.randint(config.vocab_size, (4, 64), generator=g)
    print("largest |logit difference| to the standard transformer, same weights, float64")
    for name, gap in corner_gaps(config, tokens).items():
        print(f"  {name:20s} {gap:.1e}")
    models, inputs = {"untrained": Transformer(config)}, {"untrained": tokens}
    if args.run:
        try:
            trained = Transformer.from_pretrained(args.run)
        except ValueError as error:         # CheckpointError
            parser.error(str(error))
        if trained.config.residual != "ledger":
            parser.error(f"{args.run} is no ledger model")
        models = {"untrained": Transformer(trained.config), "trained": trained}
        size = (4, min(256, trained.config.block_size))
        tokens = trained.generate(torch.randint(trained.config.vocab_size, (4, 1), generator=g),
                                  size[1] - 1, generator=g)      # the model's own text
        inputs = {label: tokens for label in models}
    try:
        os.makedirs(os.path.dirname(args.figure) or ".", exist_ok=True)
        draw_gates(models, inputs, args.figure)
    except OSError as error:
        parser.error(f"cannot write the figure: {error}")
    print(f"gates drawn in {args.figure}")


if __name__ == "__main__":
    main()
