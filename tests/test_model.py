"""The backbone: its exact limits, its causality, its cache, its checkpoints. For every preset."""
import dataclasses
import math
import os
import subprocess
import sys

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

from model import (FFNS, GATES, NORMS, PRESETS, RESIDUALS, CheckpointError, Config, KVCache,
                   Transformer, clean_state_dict, config_from, load_checkpoint, load_model,
                   load_weights, make_norm, rope_table, rotate, sample, save_checkpoint)

TINY = dict(vocab_size=61, n_layer=2, n_head=2, d_model=32, head_dim=16, d_ff=48, block_size=24)
VARIANTS = {f"preset {name}": fields for name, fields in PRESETS.items()}
VARIANTS |= {f"norm {name}": {"norm": name} for name in NORMS}
VARIANTS |= {f"ffn {name}": {"ffn": name} for name in FFNS}
VARIANTS |= {f"gate {name}": {"gate": name} for name in GATES}
VARIANTS |= {f"pos {name}": {"pos": name} for name in ("rope", "learned", "none")}
VARIANTS |= {"grouped heads": {"n_kv_head": 1}, "tied": {"tied_head": True},
             "post ledger": {"norm": "post", "residual": "ledger"},
             "attention-only oasis": {"ffn": "none", **PRESETS["oasis"]}}


def build(seed=0, **fields) -> Transformer:
    """A tiny model in float64, its zero-initialised mechanism parameters shaken awake."""
    model = Transformer(Config(**{**TINY, **fields}), seed=seed).double()
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=g, dtype=p.dtype))
    return model


def ids(*shape, seed=0):
    return torch.randint(TINY["vocab_size"], shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("variant", VARIANTS)
def test_causality(variant):
    """Changing token t + 1 changes no logit at or before t, and changes some logit after."""
    model, tokens = build(**VARIANTS[variant]), ids(2, 12)
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % TINY["vocab_size"]
    with torch.no_grad():
        a, b = model(tokens)[0], model(changed)[0]
    assert torch.equal(a[:, :7], b[:, :7])
    assert (a[:, 7:] - b[:, 7:]).abs().max() > 1e-6


@pytest.mark.parametrize("variant", VARIANTS)
def test_recording_changes_nothing(variant):
    """Logits are bit-equal with and without a recorder, and what is recorded is causal."""
    model, tokens = build(**VARIANTS[variant]), ids(2, 9)
    seen = {}
    with torch.no_grad():
        plain = model(tokens)[0]
        recorded = model(tokens, record=lambda name, l, x: seen.__setitem__((name, l), x))[0]
    assert torch.equal(plain, recorded)
    assert {"embedding", "norm_out", "sublayer_out", "stream", "final_norm", "q", "k", "v",
            "attn_probs", "null", "head_out"} <= {name for name, _ in seen}
    probs, null = seen["attn_probs", 0], seen["null", 0]
    assert torch.equal(probs, probs.tril())
    if model.config.normalizer != "clipped":
        spent = probs.sum(-1) + null + seen.get(("bias_mass", 0), 0)
        assert torch.allclose(spent, torch.ones_like(null), atol=1e-6)
    last = max(l for name, l in seen if name == "stream")
    assert last == model.config.n_sublayer - 1
    normed = model.final_norm(seen["stream", last])
    assert torch.allclose(model.head(normed), plain)


@pytest.mark.parametrize("variant", VARIANTS)
def test_cache_equals_full_forward(variant):
    """Prefill then token by token, and left-padded batches, give the logits of one full pass."""
    model, tokens = build(**VARIANTS[variant]), ids(1, 11)
    with torch.no_grad():
        truth = model(tokens)[0]
        cache = KVCache(model.config, 1, 16, dtype=torch.float64)
        parts = [model(tokens[:, :6], cache=cache)[0]]
        parts += [model(tokens[:, i:i + 1], cache=cache)[0] for i in range(6, 11)]
        assert torch.allclose(torch.cat(parts, 1), truth, atol=1e-9)
        padded = F.pad(tokens, (4, 0), value=3)
        mask = torch.arange(15)[None] >= 4
        assert torch.allclose(model(padded, pad_mask=mask)[0][:, 4:], truth, atol=1e-9)


MECHANISMS = [{"norm": name} for name in NORMS if name != "pre"]
MECHANISMS += [{"ffn": name} for name in FFNS if name != "swiglu"]
MECHANISMS += [{"gate": name} for name in GATES if name != "none"]
MECHANISMS += [{"attn_bias": True}, {"qk_norm": True}, {"n_head": 4, "head_dim": 6}]


@pytest.mark.parametrize("residual", RESIDUALS)
def test_every_mechanism_composes_with_every_residual(residual):
    """It changes the model, looks at no later token, and decodes from a cache as it reads."""
    tokens, base = ids(1, 9), None
    changed = tokens.clone()
    changed[:, 6] = (changed[:, 6] + 1) % TINY["vocab_size"]
    for fields in [{}, *MECHANISMS]:
        model = build(residual=residual, **fields)
        with torch.no_grad():
            truth, other = model(tokens)[0], model(changed)[0]
            cache = KVCache(model.config, 1, 9, dtype=torch.float64)
            parts = [model(tokens[:, :5], cache=cache)[0], model(tokens[:, 5:], cache=cache)[0]]
        assert torch.equal(truth[:, :6], other[:, :6]), fields
        assert (truth[:, 6:] - other[:, 6:]).abs().max() > 1e-6, fields
        assert torch.allclose(torch.cat(parts, 1), truth, atol=1e-9), fields
        base = truth if base is None else base
        assert not fields or (truth - base).abs().max() > 1e-6, fields


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_parameter_learns(variant):
    """One backward pass reaches each parameter; gradient checkpointing gives the same gradients."""
    model, tokens = build(**VARIANTS[variant]), ids(2, 10)
    targets = ids(2, 10, seed=1)
    grads = []
    for flag in (False, True):
        model.grad_checkpoint = flag
        model.zero_grad(set_to_none=True)
        model(tokens, targets)[1].backward()
        grads.append({n: p.grad for n, p in model.named_parameters()})
    without = [n for n, g in grads[0].items() if g is None]
    assert not without, without
    zero = {n for n, g in grads[0].items() if not g.any()}
    # a committed stream is empty before the first sublayer, so nothing can be read from it there;
    # a sparse depth softmax at recency 8 sees the newest branch alone, so its router cannot learn
    stuck = {"residual.sites.0.read_gain"}
    if model.config.depth_normalizer in ("sparsemax", "entmax15"):
        stuck |= {n for n in zero if n.startswith("residual.")}
    assert zero <= stuck, zero - stuck
    for name in grads[0]:
        assert torch.allclose(grads[0][name], grads[1][name], atol=1e-10), name


def test_generate_is_greedy_argmax_and_survives_a_full_block():
    model = build()
    prompt = ids(2, 5)
    out = model.generate(prompt, 40, temperature=0)
    assert out.shape == (2, 45) and torch.equal(out[:, :5], prompt)
    with torch.no_grad():
        for t in range(5, 24):      # while the context fits, each token is the full model's argmax
            assert torch.equal(out[:, t], model(out[:, :t])[0][:, -1].argmax(-1))


def test_generate_left_padded_equals_unpadded():
    model = build()
    prompts = [ids(1, n, seed=n) for n in (1, 7, 14)]
    width = max(p.shape[1] for p in prompts)
    rows = torch.cat([F.pad(p, (width - p.shape[1], 0), value=9) for p in prompts])
    mask = torch.stack([torch.arange(width) >= width - p.shape[1] for p in prompts])
    together = model.generate(rows, 8, temperature=0, pad_mask=mask)
    for row, p in zip(together, prompts):
        alone = model.generate(p, 8, temperature=0)[0, p.shape[1]:]
        assert torch.equal(row[width:], alone)


def test_generate_stops_and_names_nan():
    model = build()
    first = model.generate(ids(1, 4), 3, temperature=0)[0, 4].item()
    stopped = model.generate(ids(1, 4), 9, temperature=0, stop_ids=(first,))
    assert stopped.shape == (1, 5) and stopped[0, -1] == first
    with torch.no_grad():
        model.head.weight[3] = math.nan
    with pytest.raises(FloatingPointError, match="generated token 0"):
        model.generate(ids(1, 4), 3)


def test_sampling_keeps_to_top_k():
    logits = torch.tensor([[0.0, 5.0, 4.0, -1.0]]).expand(200, 4)
    drawn = sample(logits, 1.0, 2, torch.Generator().manual_seed(0))
    assert set(drawn.tolist()) == {1, 2}
    drawn = sample(torch.zeros(200, 4), 1.0, 0, torch.Generator().manual_seed(0))
    assert set(drawn.tolist()) == {0, 1, 2, 3}
    assert sample(logits, 0.0, None)[0] == 1


def test_rope_is_relative_and_scales_as_llama3():
    config = Config(**TINY)
    q, k = torch.randn(16, dtype=torch.double), torch.randn(16, dtype=torch.double)

    def score(i, j):
        cos, sin = rope_table(torch.tensor([i, j]), config)
        q_i, k_j = rotate(q, cos[0].double(), sin[0].double()), rotate(k, cos[1].double(),
                                                                       sin[1].double())
        return (q_i @ k_j).item()
    assert score(3, 1) == pytest.approx(score(13, 11), abs=1e-5)
    assert abs(score(3, 1) - score(3, 2)) > 1e-3
    scaling = {"factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192}
    wide = Config(**{**TINY, "head_dim": 64}, rope_theta=500000.0, rope_scaling=scaling)
    base = dataclasses.replace(wide, rope_scaling=None)
    one = torch.tensor([1])
    scaled, plain = (torch.atan2(*rope_table(one, c)[::-1])[0].double() for c in (wide, base))
    wavelength = 2 * math.pi / plain
    assert torch.allclose(scaled[wavelength < 8192 / 4], plain[wavelength < 8192 / 4])
    long = wavelength > 8192
    assert long.any() and torch.allclose(scaled[long] * 32, plain[long], rtol=1e-4)


def test_shared_weights_start_equal_in_every_arm():
    vanilla = dict(Transformer(Config(**TINY)).named_parameters())
    for name, fields in PRESETS.items():
        other = dict(Transformer(Config(**TINY, **fields)).named_parameters())
        for key in vanilla.keys() & other.keys():
            assert torch.equal(vanilla[key], other[key]), (name, key)
        assert vanilla.keys() <= other.keys(), name
    again = dict(Transformer(Config(**TINY), seed=1).named_parameters())
    assert not torch.equal(vanilla["embed.weight"], again["embed.weight"])


def test_decay_groups_by_name():
    """Gates, queries, betas, norms, biases and everything of the residual keep their values."""
    for name, fields in PRESETS.items():
        model = Transformer(Config(**TINY, **fields))
        groups = model.decay_groups()
        assert sorted(groups["decay"] + groups["no_decay"]) == sorted(
            n for n, _ in model.named_parameters())
        for n in groups["decay"]:
            assert n.split(".")[-2] in ("wq", "wk", "wv", "wo", "w_gate", "w_up", "w_down", "embed",
                                        "head"), (name, n)
        assert not [n for n in groups["decay"] if "residual" in n or "norm" in n or "bias" in n]
    assert "sublayers.1.w_gate.weight" in groups["decay"]     # SwiGLU's gate is no output gate


def test_true_parameter_counts():
    model = Transformer(Config(**TINY, tied_head=True))
    count = model.count_params()
    assert count["total"] == sum(p.numel() for p in model.parameters())
    by_hand = 61 * 32 + 2 * (4 * 32 * 32 + 3 * 32 * 48) + 5 * 32     # tied head counts once
    assert count["total"] == by_hand and count["mechanism"] == 0
    assert count["embedding"] == 61 * 32


def test_loss_is_mean_cross_entropy_and_ignores_minus_one():
    model, tokens, targets = build(), ids(2, 8), ids(2, 8, seed=3)
    targets[:, :5] = -1
    logits, loss = model(tokens, targets)
    by_hand = -logits.log_softmax(-1).gather(-1, targets.clamp(min=0)[..., None])[:, 5:].mean()
    assert loss.item() == pytest.approx(by_hand.item())


@pytest.mark.parametrize("bad", [
    dict(n_head=3, n_kv_head=2), dict(normalizer="softmax2"), dict(residual="highway"),
    dict(head_dim=15), dict(coupling=True), dict(sparsity=-1.0), dict(n_layer=0)])
def test_contradictory_config_is_one_line(bad):
    with pytest.raises(ValueError) as error:
        Config(**{**TINY, **bad})
    assert "\n" not in str(error.value)


# ------------------------------------------------------------------------------------ checkpoints

def payload_of(model):
    return {"config": dataclasses.asdict(model.config), "model": model.state_dict()}


@pytest.mark.parametrize("arch", ["vanilla", "ledger", "oasis", "sink", "gated"])
def test_checkpoint_round_trip(tmp_path, arch):
    model = Transformer(Config(**TINY, **PRESETS[arch]), seed=5)
    save_checkpoint(str(tmp_path / "checkpoint.pt"), payload_of(model))
    again = Transformer.from_pretrained(str(tmp_path))
    assert again.config == model.config
    assert torch.equal(again(ids(1, 5))[0], model(ids(1, 5))[0])


def test_prefixes_of_wrappers_are_stripped():
    state = {"module._orig_mod.a.b": 1, "_orig_mod.module.c": 2, "d": 3}
    assert clean_state_dict(state) == {"a.b": 1, "c": 2, "d": 3}


def test_weights_that_do_not_fit_are_named():
    model = Transformer(Config(**TINY))
    state = model.state_dict()
    state["extra"] = state.pop("head.weight")
    state["embed.weight"] = state["embed.weight"][:, :3]
    words = "missing head.weight.*unexpected extra.*embed.weight"
    with pytest.raises(CheckpointError, match=words):
        load_weights(model, state)


def test_unknown_config_fields_are_named():
    with pytest.raises(CheckpointError, match="colour"):
        config_from({**TINY, "colour": 3})


def test_truncated_and_foreign_checkpoints(tmp_path):
    path = tmp_path / "checkpoint.pt"
    save_checkpoint(str(path), payload_of(Transformer(Config(**TINY))))
    whole = path.read_bytes()
    for size in (0, 1, 100, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError) as error:
            load_model(str(path))
        assert "\n" not in str(error.value)
    torch.save({"weights": 1}, path)
    with pytest.raises(CheckpointError, match="no config and model"):
        load_checkpoint(str(path))
    with pytest.raises(CheckpointError, match="no checkpoint at"):
        load_checkpoint(str(tmp_path / "nowhere"))


def test_no_pickle_is_executed(tmp_path):
    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "exploded"),)
    torch.save({"config": {}, "model": Bomb()}, tmp_path / "checkpoint.pt")
    with pytest.raises(CheckpointError):
        load_checkpoint(str(tmp_path))
    assert not (tmp_path / "exploded").exists()


def test_failed_save_keeps_the_last_checkpoint(tmp_path):
    """A file size limit stands for the full disk: the write fails half way, in a real process."""
    code = f"""
import resource, sys
sys.path.insert(0, {str(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))!r})
import torch
from model import save_checkpoint, CheckpointError
path = {str(tmp_path / "checkpoint.pt")!r}
save_checkpoint(path, {{"config": {{}}, "model": {{"a": torch.zeros(10)}}}})
resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
try:
    save_checkpoint(path, {{"config": {{}}, "model": {{"a": torch.zeros(100000)}}}})
except CheckpointError as error:
    print(error)
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert "the previous checkpoint is kept" in out.stdout, out.stderr
    assert load_checkpoint(str(tmp_path))["model"]["a"].numel() == 10
    assert os.listdir(tmp_path) == ["checkpoint.pt"]


def test_plain_torch_modules_compute_the_same():
    """The standard model written again with torch's own modules: same weights, same logits."""
    model = build(pos="learned", ffn="gelu", ffn_bias=True)
    c, x = model.config, model.embed(ids(2, 9)) + model.pos_embed.weight[:9]
    for l in range(0, 4, 2):
        a, f = model.sublayers[l], model.sublayers[l + 1]
        u = F.rms_norm(x, (32,), model.norms[l].weight, c.norm_eps)
        mha = nn.MultiheadAttention(32, 2, bias=False, batch_first=True).double()
        with torch.no_grad():
            mha.in_proj_weight.copy_(torch.cat((a.wq.weight, a.wk.weight, a.wv.weight)))
            mha.out_proj.weight.copy_(a.wo.weight)
        hide = torch.ones(9, 9, dtype=torch.bool).triu(1)
        x = x + mha(u, u, u, attn_mask=hide, need_weights=False)[0]
        u = F.rms_norm(x, (32,), model.norms[l + 1].weight, c.norm_eps)
        x = x + f.w_down(F.gelu(f.w_up(u)))
    logits = model.head(F.rms_norm(x, (32,), model.final_norm.weight, c.norm_eps))
    assert torch.allclose(model(ids(2, 9))[0], logits, atol=1e-10)


def test_dynamic_tanh_and_norm_placement():
    """Each --norm does what its name says."""
    post = build(norm="post", ffn="none", n_layer=1)
    x = post.embed(ids(1, 4))
    u = post.norms[0](x)
    y = post.sublayers[0].wo(torch.zeros(1, 4, 32, dtype=torch.double))
    with torch.no_grad():
        post.sublayers[0].wo.weight.zero_()
    assert torch.allclose(post(ids(1, 4))[0], post.head(post.final_norm(u + y)))
    sandwich = build(norm="sandwich")
    seen = {}
    sandwich(ids(1, 4), record=lambda n, l, x: seen.__setitem__((n, l), x))
    gain = sandwich.out_norms[1].weight
    rms = (seen["sublayer_out", 1] / gain).square().mean(-1)
    assert torch.allclose(rms, torch.ones_like(rms), atol=1e-2)
    assert (Transformer(Config(**TINY, norm="sandwich")).out_norms[1].weight == 0.1).all()
    qk = build(norm="sandwich-qk")
    qk(ids(1, 4), record=lambda n, l, x: seen.__setitem__((n, l), x))
    assert torch.equal(seen["norm_out", 0], seen["embedding", 0])
    dyt = build(norm="dyt")
    n = dyt.norms[0]
    assert torch.allclose(n(x), n.weight * torch.tanh(n.alpha * x) + n.bias)
    fresh = Transformer(Config(**TINY, norm="dyt"))
    fresh(ids(1, 4), record=lambda n, l, x: seen.__setitem__((n, l), x))
    assert torch.equal(seen["embedding", 0], 64 * fresh.embed(ids(1, 4)))
    starts = [make_norm(c, where).alpha.item() for where in ("attn", "ffn", "final")
              for c in (fresh.config, Config(d_model=4096, norm="dyt"))]   # narrow, and their 7B
    assert starts == pytest.approx([1.0, 0.8, 1.0, 0.2, 1.0, 0.2])


@pytest.mark.parametrize("kind", [g for g in GATES if g != "none"])
def test_gates_open_and_shut(kind):
    """An open gate changes nothing, a shut one leaves nothing of attention; where gates start."""
    model, tokens = Transformer(Config(**TINY, gate=kind)).double(), ids(1, 6)
    seen = {}
    model(tokens, record=lambda n, l, x: seen.__setitem__((n, l), x))
    opening = 0.25 if kind == "bondarenko" else 0.5
    assert seen["gate", 0].mean().item() == pytest.approx(opening, abs=0.05)
    gate = model.sublayers[0].gate
    for value, size in ((30.0, 1.0), (-30.0, 0.0)):
        gate.forward = lambda u, ctx: torch.tensor(value).double().sigmoid().expand(1, 6, 2, 16)
        out = model.sublayers[0](model.norms[0](model.embed(tokens)),
                                 model.context(tokens, None, None, None))[0]
        plain = Transformer(Config(**TINY)).double()
        truth = plain.sublayers[0](plain.norms[0](plain.embed(tokens)),
                                   plain.context(tokens, None, None, None))[0]
        assert torch.allclose(out, size * truth, atol=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["vanilla", "ledger", "attnres", "oasis", "sink"])
def test_compiled_equals_eager(arch):
    """Loss and gradients of the compiled model; its state loads into a plain one."""
    torch._dynamo.reset()
    model, x, y = build(**PRESETS[arch]).float(), ids(2, 12), ids(2, 12, seed=1)
    model(x, y)[1].backward()
    truth = {n: p.grad.clone() for n, p in model.named_parameters()}
    loss = model(x, y)[1]
    model.zero_grad(set_to_none=True)
    compiled = torch.compile(model)
    again = compiled(x, y)[1]
    again.backward()
    assert again.item() == pytest.approx(loss.item(), rel=1e-5)
    for name, p in model.named_parameters():
        assert torch.allclose(p.grad, truth[name], rtol=1e-3, atol=1e-5), name
    load_weights(Transformer(model.config), clean_state_dict(compiled.state_dict()))
