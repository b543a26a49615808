"""Every measure of eval.py against a closed form or a planted outlier; the program end to end."""
import csv
import dataclasses
import io
import json
import math
import os
import sys
import warnings

import numpy as np
import pytest
import torch

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import eval as evaluation  # noqa: E402
from data.prepare import DataError, TokenFile, write_tokens  # noqa: E402
from eval import EvalError, evaluate  # noqa: E402
from model import PRESETS, Config, Transformer, load_checkpoint, save_checkpoint  # noqa: E402

TINY = dict(vocab_size=258, n_layer=2, n_head=2, d_model=32, block_size=32, ledger_rank=4)


def tiny(preset="vanilla", seed=0, **fields):
    return Transformer(Config(**{**TINY, **PRESETS[preset], **fields}), seed)


def ids(n, seed=0, vocab=256):
    return torch.from_numpy(np.random.default_rng(seed).integers(vocab, size=n))


# ----------------------------------------------------------------------------------- closed forms

@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sequence_kurtosis_of_a_planted_outlier(dtype):
    """N - 1 zeros and one value: mu = v/N, m4 and the unbiased sigma in closed form."""
    N, v = 64 * 32, 9984.0                      # 9984 is a bf16 number near 1e4
    x = torch.zeros(2, 64, 32, dtype=dtype)
    x[0, 3, 5] = v
    mu = v / N
    m4 = ((N - 1) * mu**4 + (v - mu) ** 4) / N
    variance = ((N - 1) * mu**2 + (v - mu) ** 2) / (N - 1)
    expected = m4 / (variance**2 + 1e-6)
    assert expected > 1000
    kurtosis = evaluation.sequence_kurtosis(x)
    assert kurtosis[0].item() == pytest.approx(expected, rel=1e-5)
    assert kurtosis[1].item() == 0


def test_kurtosis_is_non_excess_for_sequences_and_excess_for_tokens():
    x = torch.randn(4, 100, 400, generator=torch.Generator().manual_seed(0)) * 10 + 5
    assert evaluation.sequence_kurtosis(x).mean().item() == pytest.approx(3, abs=0.05)
    assert evaluation.token_kurtosis(x).mean().item() == pytest.approx(0, abs=0.05)


def test_token_kurtosis_of_one_hot_channels():
    """One channel of d: m4 / m2^2 = (d^2 - 3 d + 3) / (d - 1), whatever its height."""
    d = 50
    x = torch.zeros(3, d, dtype=torch.bfloat16)
    x[0, 7], x[1, 0], x[2, 4] = 9984.0, -3.0, 1.0
    expected = (d * d - 3 * d + 3) / (d - 1) - 3
    assert evaluation.token_kurtosis(x).tolist() == pytest.approx([expected] * 3, rel=1e-3)


def test_the_papers_epsilons_make_kurtosis_depend_on_scale():
    """At sigma 0.001 the printed formulas return about 0 and -3 for any shape; scale-free ones do
    not move. (A ledger's first commits are that small.)"""
    x = torch.randn(2, 64, 64, generator=torch.Generator().manual_seed(0)).exp()
    for measure in (evaluation.sequence_kurtosis, evaluation.token_kurtosis):
        tiny_scale, scale = measure(x * 1e-3, evaluation.TINY), measure(x, evaluation.TINY)
        assert torch.allclose(tiny_scale, scale, rtol=1e-3)
        assert torch.allclose(measure(x), scale, rtol=1e-3)
    assert evaluation.sequence_kurtosis(x * 1e-3).max() < 0.01
    assert evaluation.token_kurtosis(x * 1e-3).mean() < -2.5


def test_sink_ratios_differ_on_a_late_sink():
    """T = 8; every query from t = 2 on looks at the third key. Gu's k = 1 sees no sink in it, the
    Spike paper does; for k = 3, Gu divides by the queries that can see it: 6/6, not 6/8."""
    T = 8
    A = torch.zeros(1, 1, T, T)
    A[..., 0, 0] = A[..., 1, 1] = 1
    A[..., 2:, 2] = 1
    assert evaluation.ratio_gu(A).item() == 0                   # 1/8 on key 1
    assert evaluation.ratio_gu(A, k=3, epsilon=0.99).item() == 1
    assert evaluation.ratio_spike(A).item() == 1                # 6/8 on key 3
    assert evaluation.ratio_spike(A, epsilon=0.8).item() == 0
    assert evaluation.first_token_mass(A).item() == 0
    late = A.roll(3, -1)                                        # key 6 is in the second half
    assert evaluation.ratio_spike(late).item() == 0


def test_sink_ratios_on_a_first_token_sink():
    """Query t >= 1 gives mass m to key 0: Gu and Spike both see (1 + 7 m) / 8."""
    m, T = 0.25, 8
    A = torch.eye(T) * (1 - m)
    A[:, 0] += m
    A = A[None, None].repeat(2, 3, 1, 1)                        # (B, H, T, T)
    assert evaluation.first_token_mass(A).flatten().tolist() == pytest.approx([m] * 6)
    alpha = (1 + 7 * m) / 8
    for ratio in (evaluation.ratio_gu, evaluation.ratio_spike):
        assert ratio(A, epsilon=alpha - 1e-4).shape == (2, 3)
        assert ratio(A, epsilon=alpha - 1e-4).min() == 1
        assert ratio(A, epsilon=alpha + 1e-4).max() == 0


def test_sinks_probe_averages_over_layers_heads_and_sequences():
    probe = evaluation.Sinks(epsilon=0.3)
    sink, none = torch.zeros(4, 4), torch.eye(4)
    sink[:, 0] = 1
    probe("attn_probs", 0, torch.stack([torch.stack([sink, none])]))        # 1 of 2 heads
    probe("attn_probs", 2, torch.stack([torch.stack([none, none])]))        # none
    result = probe.result()
    assert result["ratio_gu"] == pytest.approx(1 / 4)
    assert result["ratio_spike"] == pytest.approx(1 / 4)
    assert result["first_token_mass"] == pytest.approx(1 / 4)
    assert result["per_head"] == [[1, 0], [0, 0]] and result["layers"] == [0, 2]


def test_structure_of_a_planted_channel():
    """Channel 3 leads in 3 of 4 sublayers, peaks after the third; position 0 has 5 x its mean."""
    M = torch.ones(4, 6, dtype=torch.float64)
    M[:, 3] = torch.tensor([0.5, 8.0, 20.0, 4.0])
    M0 = 5 * M
    s = evaluation.structure_of(M, M0)
    assert (s["dominant_dim"], s["peak_layer"], s["persistence"]) == (3, 2, 0.75)
    assert s["peak_ratio"] == pytest.approx(20, rel=1e-5)
    assert s["margin"] == pytest.approx((0.5 + 8 + 20 + 4) / 4, rel=1e-5)
    assert s["bos_concentration"] == pytest.approx(5, rel=1e-5)


def test_unit_rms_structure_is_blind_to_token_scale():
    """Scaling a token by any factor (the free gauge of a scale-free norm) changes the raw measure
    and not the unit-rms one."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(2, 16, 8, generator=g)
    x[..., 5] = 4
    scaled = x.clone()
    scaled[:, 0] *= 30
    results = []
    for stream in (x, scaled):
        probe = evaluation.Channels()
        probe("stream", 0, stream)
        results.append(probe.structure("stream"))
    plain, gauged = results
    assert gauged["bos_concentration"] > 5 * plain["bos_concentration"]
    assert gauged["bos_concentration_unit_rms"] == pytest.approx(
        plain["bos_concentration_unit_rms"], rel=1e-5)
    assert plain["dominant_dim"] == 5


def test_running_sum_control_shows_built_in_persistence():
    """The stream's leading channel changes at every sublayer; that of its running sum stays the
    first, larger one: persistence from accumulation alone."""
    probe = evaluation.Channels()
    for l in range(4):
        x = torch.ones(1, 3, 6)
        x[..., l] = 20 if l == 0 else 3
        probe("stream", l, x)
    assert probe.structure("stream")["persistence"] == 0.25
    assert probe.structure("running")["persistence"] == 1


def test_steps_of_a_spike():
    trace = [0.1, 0.2, 0.3, -50, -110, -111, -108, -60, 0.5]
    assert evaluation.find_steps(trace) == ([2, 3], [6, 7])
    assert evaluation.find_steps([0.0, 0.0, 0.0]) == ([], [])


def test_spikes_find_the_planted_activation():
    """Entries 5000 and 150 against a median of 0.1: Sun's rule counts both; not a third of 90
    (|x| > 100 fails), nor one of 150 in a hidden state whose median is 1 (the ratio fails)."""
    probe = evaluation.Spikes()
    x = torch.full((2, 4, 8), 0.1, dtype=torch.bfloat16)
    x[1, 2, 3], x[1, 0, 6], x[1, 3, 3] = -5000, 150, 90
    probe("stream", 0, torch.full((2, 4, 8), 0.1))
    probe("stream", 1, x)
    quiet = torch.ones(1, 4, 8)
    quiet[0, 0, 6] = 150
    probe("stream", 1, quiet)
    tokens = torch.arange(12).view(3, 4)
    r = probe.result(tokens)
    assert (r["layer"], r["sequence"], r["position"], r["dim"], r["token"]) == (1, 1, 2, 3, 6)
    assert r["max"] == pytest.approx(5000, rel=4e-3) and r["median"] == pytest.approx(0.1, rel=4e-3)
    assert r["ratio"] == pytest.approx(r["max"] / r["median"])
    assert r["count_sun"] == pytest.approx(2 / 3)
    assert [(t["position"], t["dim"]) for t in r["top"][:3]] == [(2, 3), (0, 6), (3, 3)]
    assert r["position0_ratio"][0] == pytest.approx(1, rel=1e-5)


def test_the_median_beside_the_maximum_does_not_depend_on_batches():
    """A first token that is the same in all windows is the maximum of all of them."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(6, 9, 8, generator=g) * torch.arange(1, 7)[:, None, None]
    x[:, 0, 3] = 500.0
    found = []
    for size in (1, 2, 4, 6):
        probe = evaluation.Spikes()
        for part in x.split(size):
            probe("stream", 0, part)
        found.append(probe.result(torch.zeros(6, 9, dtype=torch.long)))
    median = x.abs().flatten(1).median(1).values.mean().item()
    assert all(one["median"] == pytest.approx(median) and one["max"] == 500
               and one["sequence"] == 0 for one in found)


def test_position0_ratio():
    probe = evaluation.Spikes()
    x = torch.ones(2, 5, 4)
    x[:, 0] = 3
    probe("stream", 0, x)
    r = probe.result(torch.zeros(2, 5))
    assert r["position0_ratio"] == pytest.approx([3]) and r["position0_peak"] == pytest.approx(3)


def test_max_inf_norm_has_three_readings():
    """Per sequence, averaged over sequences, then the maximum over hooks; attention's stream is no
    decoder-layer output."""
    probe = evaluation.Outliers(["attn", "ffn"])
    base = torch.zeros(2, 3, 4)

    def hook(name, l, a, b):
        x = base.clone()
        x[0, 1, 2], x[1, 0, 0] = a, b
        probe(name, l, x)

    hook("stream", 0, 1000, 1000)           # after attention: not a layer output
    hook("stream", 1, 10, -30)              # (10 + 30) / 2
    hook("sublayer_out", 0, 70, 50)         # o_proj: 60
    hook("sublayer_out", 1, -3, 5)          # feed-forward: 4
    hook("norm_out", 0, 1, 1)
    hook("final_norm", 2, 2, 2)
    inf, kurtosis = probe.result()
    assert (inf["all_hooks"], inf["layer_outputs"], inf["ffn_outputs"]) == (60, 20, 4)
    assert inf["at"] == ["sublayer_out", 0]
    one = evaluation.sequence_kurtosis(torch.tensor([[1.0] + [0.0] * 11])).item()
    assert kurtosis["sequence"] == pytest.approx(one, rel=0.01)


def test_commit_profile_is_blind_to_a_common_factor():
    """Gates 0.1, 0.1, 0.2 per token, or the same halved: one profile (1/4, 1/4, 1/2), entropy
    1.5 log 2; the mean gate halves."""
    results = []
    for factor in (1.0, 0.5):
        probe = evaluation.Commits(3)
        for l, c in enumerate((0.1, 0.1, 0.2)):
            probe("commit_gate", l, torch.full((2, 5), c * factor))
        results.append(probe.result())
    for r in results:
        assert r["relative_profile"] == pytest.approx([0.25, 0.25, 0.5])
        assert r["entropy"] == pytest.approx(1.5 * math.log(2))
        assert r["last_share"] == pytest.approx(0.5)
    assert results[1]["mean"] == pytest.approx(results[0]["mean"] / 2)


def test_depth_measures_of_known_weights():
    """Half, a quarter, and a quarter on the null: entropy 1.5 log 2. A site without a choice is no
    evidence of collapse."""
    probe = evaluation.Depth()
    probe("depth_weights", 0, torch.ones(1, 2, 3))
    probe("depth_null", 0, torch.zeros(2, 3))
    probe("depth_weights", 1, torch.tensor([0.25, 0.5])[:, None, None].expand(2, 2, 3))
    probe("depth_null", 1, torch.full((2, 3), 0.25))
    probe("depth_beta", 1, torch.tensor(0.5))
    r = probe.result()
    assert r["max_weight"] == 0.5 and r["null_mass"] == 0.25
    assert r["entropy"] == pytest.approx(1.5 * math.log(2))
    assert r["weights"] == [[1], [0.25, 0.5]] and r["beta"] == [0.5] and r["recency"] is None


def test_no_op_probe_separates_quiet_heads():
    """Two heads: one is silent and attends to key 0, the other is loud and attends to itself."""
    B, T = 2, 12
    A = torch.zeros(B, 2, T, T)
    A[:, 0, :, 0] = 0.75
    A[:, 1] = torch.eye(T)
    out = torch.zeros(B, 2, T, 4)
    out[:, 1] = 1
    null = torch.zeros(B, 2, T)
    null[:, 0] = 0.25
    probe = evaluation.NoOps(quantile=0.5)
    for name, x in (("head_out", out), ("null", null), ("attn_probs", A)):
        probe(name, 0, x)
    r = probe.result()
    assert (r["sink_noop"], r["sink_rest"]) == (0.75, 0)
    assert (r["sink4_noop"], r["sink4_rest"]) == (0.75, 0)
    assert (r["null_noop"], r["null_rest"]) == (0.25, 0)


@pytest.mark.parametrize("preset", ["attnres", "oasis"])
def test_posterior_entropy_by_brute_force(preset):
    """E = sum over candidates i and tokens j of q log q, q = alpha_i p_i(j), written out as loops.
    """
    model, x = tiny(preset, n_layer=3), ids(2 * 6).view(2, 6)
    kept = {}
    with torch.no_grad():
        for p in model.residual.parameters():
            p.add_(0.3 * torch.randn(p.shape, generator=torch.Generator().manual_seed(1)))
        probe = evaluation.Posteriors(model.kinds)

        def record(name, l, t):
            kept[name, l] = t.double()
            probe(name, l, t)

        record.names = probe.names
        model(x, record=record)
    sites = []
    for (name, l), w in kept.items():
        if name != "depth_weights" or len(w) < 2:
            continue
        if preset == "oasis":           # embedding, finished layers, this layer's sources
            own = [None] + [2 * a for a in range(l // 2)] + [l - l % 2] * (1 + l % 2)
        else:                           # embedding, then a source for every sublayer below l
            own = [None] + [i - i % 2 for i in range(l)]
        assert len(own) == len(w)
        E = torch.zeros(2, 6, dtype=torch.float64)
        for b in range(2):
            for t in range(6):
                for i, a in enumerate(own):
                    rows = torch.ones(1, 1) if a is None else kept["attn_probs", a][b, :, t]
                    q = w[i, b, t] * rows.double()                      # (H, S)
                    E[b, t] += sum(v * math.log(v) for v in q.flatten().tolist() if v) / len(rows)
        sites.append(E.mean())
    assert len(sites) == 6
    assert probe.result() == pytest.approx(torch.stack(sites).mean().item(), rel=1e-4)


# -------------------------------------------------------------------------------------- evaluation

def uniform(vocab):
    model = tiny(vocab_size=vocab)
    with torch.no_grad():
        model.head.weight.zero_()
    return model


def test_a_uniform_byte_model_has_eight_bits_per_byte():
    r = evaluate(uniform(256), ids(33 * 8), tokenizer="bytes")["val"]
    assert r["bits_per_byte"] == pytest.approx(8, abs=1e-6)
    assert r["byte_ppl"] == pytest.approx(256, rel=1e-6) == r["token_ppl"]


def byte_file(tmp_path, text, name="t.bin", split="val", tokenizer="bytes", vocab=258):
    path = tmp_path / name
    array = np.frombuffer(text.encode(), np.uint8).astype(np.uint16)
    write_tokens(path, [[256], array, [256]], vocab_size=vocab, tokenizer=tokenizer, eot=256,
                 bos=257, n_bytes=len(array), n_words=len(text.split()), split=split, source="test")
    return TokenFile.open(path)


def test_special_targets_count_for_the_loss_and_not_for_the_bytes(tmp_path):
    """63 bytes and a closing end-of-text fill two windows: 64 targets, 63 bytes, 32 words."""
    file = byte_file(tmp_path, ("a " * 32)[:63])
    r = evaluate(uniform(258), file)["val"]
    assert (r["n_targets"], r["n_bytes"], r["n_words"]) == (64, 63, 32)
    nats = 64 * math.log(258)
    assert r["loss"] == pytest.approx(math.log(258), rel=1e-6)
    assert r["bits_per_byte"] == pytest.approx(nats / 63 / math.log(2), rel=1e-6)
    assert r["word_ppl"] == pytest.approx(math.exp(nats / 32), rel=1e-5)


def test_loss_is_the_models_own(tmp_path):
    """sum(nll) / count over ragged batches equals the model's cross-entropy over all windows."""
    model, rows = tiny(), ids(7 * 33).view(7, 33)
    with torch.no_grad():
        _, loss = model(rows[:, :-1], rows[:, 1:])
    for batch_size in (1, 3, 8):
        r = evaluate(model, rows, batch_size=batch_size)
        assert r["val"]["loss"] == pytest.approx(loss.item(), rel=1e-6)
        assert r["val"]["n_targets"] == 7 * 32 and r["val"]["bits_per_byte"] is None


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_is_measured(preset):
    """All keys of metrics.json, strict JSON, for every mechanism; a mechanism's own part is there
    exactly when the mechanism is."""
    r = evaluate(tiny(preset), ids(33 * 4), n_sequences=4, batch_size=3)
    json.dumps(r, allow_nan=False)
    for path in ("val.loss", "outliers.max_inf_norm.all_hooks", "outliers.feat_maxmed",
                 "outliers.max_inf_norm.layer_outputs", "outliers.max_inf_norm.ffn_outputs",
                 "outliers.kurtosis.sequence", "outliers.kurtosis.token_excess", "massive.max",
                 "massive.count_sun", "massive.position0_ratio.3", "sinks.ratio_gu",
                 "sinks.ratio_spike", "sinks.first_token_mass", "structure.decoded.persistence",
                 "structure.decoded.bos_concentration_unit_rms", "null.token_mass"):
        assert evaluation.lookup(r, path) is not None, path
    config = Config(**{**TINY, **PRESETS[preset]})
    assert len(r["outliers"]["per_layer"]) == 4
    assert (r["depth"] is not None) == (config.residual in ("attnres", "oasis"))
    assert (r["structure"]["commit"] is not None) == (config.residual == "ledger")
    assert (r["structure"]["scratch"] is not None) == (r["structure"]["channel"] == "committed")
    if config.normalizer in ("softmax", "softmax1", "sink"):
        assert (r["null"]["token_mass"] > 1e-3) == (config.normalizer != "softmax")


def test_ledger_decodes_the_committed_stream():
    """Measures of what the head reads are C's; C starts empty; D is reported beside it."""
    r = evaluate(tiny("ledger"), ids(33 * 2))
    assert r["structure"]["channel"] == r["massive"]["channel"] == "committed"
    assert r["massive"]["trace"][0] == 0.0
    assert r["massive"]["scratch"]["channel"] == "scratch"
    bare = evaluate(tiny(), ids(33 * 2))
    assert bare["structure"]["channel"] == "stream" and bare["structure"]["scratch"] is None
    assert bare["massive"]["scratch"] is None


def test_a_planted_spike_is_found_in_a_model():
    """Sublayer 1's output bias writes 500 to channel 9 and sublayer 3's takes it away again: the
    spike is at the right channel, steps up at 1 and down at 3."""
    model = tiny(ffn="gelu", ffn_bias=True)
    with torch.no_grad():
        model.sublayers[1].w_down.bias[9] = 500
        model.sublayers[3].w_down.bias[9] = -500
    r = evaluate(model, ids(33 * 2))
    m = r["massive"]
    assert m["max"] == pytest.approx(500, rel=1e-3) and m["dim"] == 9 and m["layer"] in (1, 2)
    assert (m["step_up"], m["step_down"]) == ([1], [3])
    assert m["trace"][2] == pytest.approx(500, rel=1e-3) and len(m["trace"]) == 5
    assert r["outliers"]["feat_maxmed"] > 1000 and r["structure"]["decoded"]["dominant_dim"] == 9
    assert r["outliers"]["per_layer"][1]["dims_massive"] == 1
    assert r["outliers"]["per_layer"][0]["dims_massive"] == 0
    assert r["outliers"]["max_inf_norm"]["ffn_outputs"] == pytest.approx(500, rel=1e-3)


def test_evaluation_leaves_no_trace():
    """Modes of every module, the global generators, gradients: as before; two calls are equal."""
    model = tiny("oasis")
    model.train()
    model.sublayers[0].eval()
    torch.manual_seed(5)
    np.random.seed(5)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()
    first = evaluate(model, ids(400), n_sequences=4)
    second = evaluate(model, ids(400), n_sequences=4)
    assert first == second
    assert torch.equal(before[0], torch.get_rng_state())
    assert np.array_equal(before[1], np.random.get_state()[1])
    assert model.training and model.sublayers[1].training and not model.sublayers[0].training
    assert all(p.grad is None for p in model.parameters())


def test_light_is_a_part_of_the_whole():
    model, tokens = tiny("ledger"), ids(400)
    whole, light = evaluate(model, tokens), evaluate(model, tokens, light=True)
    assert light.keys() == {"protocol", "val", "massive", "sinks", "outliers", "null", "depth",
                            "backcopy"}
    assert light["outliers"]["kurtosis"].items() <= whole["outliers"]["kurtosis"].items()
    assert light["null"] == {key: whole["null"][key] for key in light["null"]}
    assert light["val"] == whole["val"] and light["sinks"] == whole["sinks"]
    assert light["massive"] == {key: whole["massive"][key] for key in light["massive"]}


def test_compiled_and_distributed_wrappers_do_not_change_the_numbers():
    model, tokens = tiny(), ids(200)

    class DDP(torch.nn.Module):
        def __init__(self, module):
            super().__init__()
            self.module = module

    wrapped = DDP(torch.compile(model, backend="eager"))
    assert evaluate(wrapped, tokens) == evaluate(model, tokens)


def test_sinks_use_the_first_64_tokens_of_longer_windows():
    model = tiny(block_size=96)
    rows = ids(3 * 97).view(3, 97)
    long, short = evaluate(model, rows)["sinks"], evaluate(model, rows, T=64)["sinks"]
    assert long["T"] == 64
    assert long["first_token_mass"] == pytest.approx(short["first_token_mass"], rel=1e-5)


def test_double_bos_warns_and_the_protocol_shows_the_first_ids():
    model, stream = tiny(), torch.cat([torch.tensor([257]), ids(64)])
    with pytest.warns(UserWarning, match="1 of 2 windows begin with two BOS"):
        r = evaluate(model, stream, bos_policy="window", bos=257)
    assert r["protocol"]["first_ids"][:2] == [257, 257] and r["protocol"]["double_bos"] == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        r = evaluate(model, stream[1:], bos_policy="window", bos=257)
    assert r["protocol"]["first_ids"][0] == 257 and "BOS window" in r["protocol"]["text"]


def test_requests_that_cannot_be_measured():
    model = tiny()
    with pytest.raises(DataError, match="window"):
        evaluate(model, ids(20))
    with pytest.raises(EvalError, match="257"):
        evaluate(tiny(vocab_size=200), torch.full((100,), 257))
    with pytest.raises(EvalError, match="at least 1"):
        evaluate(model, ids(100), n_sequences=0)
    with pytest.raises(EvalError, match="positions"):
        evaluate(tiny(pos="learned"), ids(100), T=64)
    with torch.no_grad():
        model.head.weight[0, 0] = math.nan
    with pytest.raises(EvalError, match="not finite"):
        evaluate(model, ids(100))


# -------------------------------------------------------------------------------- files and tables

def test_metrics_merge_and_survive(tmp_path):
    evaluation.save_metrics(tmp_path, {"val": {"loss": 1.0}, "quant": {"w8": {"loss": 2.0}}})
    evaluation.save_metrics(tmp_path, {"val": {"loss": np.float32(3)},
                                       "quant": {"w4": {"loss": math.inf}}})
    saved = json.loads((tmp_path / "metrics.json").read_text())
    assert saved == {"val": {"loss": 3.0}, "quant": {"w8": {"loss": 2.0}, "w4": {"loss": None}}}
    assert os.listdir(tmp_path) == ["metrics.json"]
    (tmp_path / "metrics.json").write_text("{ torn")
    with pytest.raises(EvalError, match="cannot be read"):
        evaluation.save_metrics(tmp_path, {"val": {}})
    assert (tmp_path / "metrics.json").read_text() == "{ torn"


def test_study_table_has_mean_and_sample_deviation():
    columns = [("loss", "val.loss", ".2f"), ("depth", "depth.max_weight", ".1f"),
               ("first", "list.0", "+.0%")]
    results = [{"arm": "a", "seed": s, "metrics": {"val": {"loss": v}, "depth": None, "list": [v]}}
               for s, v in enumerate((1.0, 2.0, 3.0))]
    results.append({"arm": "b", "seed": 0, "metrics": {"val": {"loss": 5.0}}})
    lines = evaluation.study_table(results, columns).splitlines()
    assert lines[0] == "| arm | seeds | loss | depth | first |"
    assert lines[2] == "| a | 3 | 2.00 ± 1.00 | – | +200% ± 100% |"     # a spread has no sign
    assert lines[3] == "| b | 1 | 5.00 | – | – |"


def test_comparison_table_and_figure(tmp_path):
    runs = [("a|b", evaluate(tiny(), ids(99))), ("oasis", evaluate(tiny("oasis"), ids(99)))]
    table, text, figure = evaluation.compare(runs, out_dir=str(tmp_path))
    rows = list(csv.reader(io.StringIO(text)))
    assert rows[0][0] == "run" and len(rows) == 3
    assert float(rows[1][rows[0].index("val.loss")]) == runs[0][1]["val"]["loss"]
    assert rows[1][rows[0].index("depth.max_weight")] == ""
    lines = table.splitlines()
    assert len(lines) == 4 and len({line.replace("\\|", "").count("|") for line in lines}) == 1
    assert (tmp_path / "comparison.md").read_text(encoding="utf-8") == table
    assert open(figure, "rb").read(4) == b"\x89PNG"


# -------------------------------------------------------------------------------------- the program

@pytest.fixture
def make_run(tmp_path):
    """Writes a run folder with its checkpoint, and the token file that it names as its data."""
    def make(name, preset="vanilla", run=(), **fields):
        file = tmp_path / "corpus-bytes-val.bin"
        if not file.exists():
            byte_file(tmp_path, "attention is a softmax over tokens. " * 40, file.name)
        model = tiny(preset, **fields)
        os.makedirs(tmp_path / name)
        save_checkpoint(str(tmp_path / name / "checkpoint.pt"), {
            "config": dataclasses.asdict(model.config), "model": model.state_dict(),
            "run": {"arch": preset, "seed": 0, "data": str(file), "tokenizer": "bytes",
                    "bos": "window", **dict(run)}})
        return str(tmp_path / name)
    return make


EXPECTED = {"vanilla": {"layers", "surface", "attention", "first_token"}}
EXPECTED["ledger"] = EXPECTED["vanilla"] | {"commits"}
EXPECTED["oasis"] = EXPECTED["vanilla"] | {"depth", "null"}


@pytest.mark.parametrize("preset", EXPECTED)
def test_program_writes_metrics_and_figures(make_run, capsys, preset):
    run = make_run("run", preset)
    assert evaluation.main([run, "--n-sequences", "4"]) == 0
    metrics = json.load(open(os.path.join(run, "metrics.json")))
    assert metrics["protocol"]["arch"] == preset and metrics["protocol"]["bos_policy"] == "window"
    assert metrics["protocol"]["first_ids"][0] == 257
    drawn = {name.removesuffix(".png") for name in os.listdir(os.path.join(run, "figures"))}
    assert drawn == EXPECTED[preset]
    printed = capsys.readouterr().out
    assert "metrics.json" in printed and "| first-token mass |" in printed


def test_program_compares_runs(make_run, tmp_path, capsys):
    a, b = make_run("a"), make_run("b", "ledger")
    paths = [a, os.path.join(b, "checkpoint.pt")]
    assert evaluation.main([*paths, "--no-figures", "--n-sequences", "2", "--eps", "0.01"]) == 0
    assert {"comparison.md", "comparison.csv", "comparison.png"} <= set(os.listdir(tmp_path))
    printed = capsys.readouterr().out
    assert "| a |" in printed and "| measure |" not in printed
    assert json.load(open(os.path.join(b, "metrics.json")))["sinks"]["epsilon"] == 0.01
    assert not os.path.exists(os.path.join(a, "figures"))


def test_runs_of_one_name_do_not_share_a_folder(make_run, tmp_path, capsys):
    os.mkdir(tmp_path / "left"), os.mkdir(tmp_path / "right")
    paths = [make_run(os.path.join(side, "m")) for side in ("left", "right")]
    flags = ["--no-figures", "--n-sequences", "2", "--out", str(tmp_path / "out")]
    assert evaluation.main([*paths, *flags]) == 0
    for name in ("left-m", "right-m"):
        assert (tmp_path / "out" / name / "metrics.json").exists()
    assert "| left-m |" in capsys.readouterr().out
    assert all(os.listdir(path) == ["checkpoint.pt"] for path in paths)
    assert evaluation.main([paths[0], paths[0], *flags]) == 2
    assert "twice" in capsys.readouterr().err


def test_what_was_measured_before_a_failure_is_kept(make_run, capsys, monkeypatch):
    """Two measurements in one call: the first is on the disk when the second one fails."""
    run = make_run("run")
    for error, status in ((KeyboardInterrupt, 130), (FloatingPointError("NaN logits"), 2)):
        def fails(*_, **__):
            raise error
        monkeypatch.setattr(evaluation, "report_anatomy", fails)
        path = os.path.join(run, "metrics.json")
        assert not os.path.exists(path)
        flags = ["--stream", "16", "--stream-tokens", "40", "--anatomy", "--no-figures"]
        assert evaluation.main([run, *flags]) == status
        assert capsys.readouterr().err.count("\n") == 1
        assert "delta" in json.load(open(path))["stream"]
        os.remove(path)


@pytest.mark.parametrize("flags", [["--T", "64"], ["--stream", "48", "--stream-tokens", "99"],
                                   ["--anatomy", "--T", "64"]])
def test_a_table_of_positions_ends_where_it_ends(make_run, capsys, flags):
    run = make_run("run", gate="position")
    assert evaluation.main([run, "--no-figures", *flags]) == 2
    assert "learned positions" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [[], ["--anatomy"], ["--stream", "16", "--stream-tokens", "40"]])
def test_a_model_of_nan_is_one_line(make_run, capsys, flags):
    run = make_run("run")
    path = os.path.join(run, "checkpoint.pt")
    payload = load_checkpoint(path)
    payload["model"]["embed.weight"][101] = math.nan        # "e"
    save_checkpoint(path, payload)
    assert evaluation.main([run, "--no-figures", *flags]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("eval.py: ") and captured.err.count("\n") == 1, captured.err


def test_bad_input_is_one_line_and_status_two(make_run, tmp_path, capsys):
    run = make_run("run")
    other = byte_file(tmp_path, "x" * 200, "other.bin", tokenizer="gpt2", vocab=50257)
    short = byte_file(tmp_path, "x", "short.bin")
    torn = tmp_path / "torn.pt"
    torn.write_bytes(open(os.path.join(run, "checkpoint.pt"), "rb").read()[:1000])
    for args in (["nowhere"], [str(torn)], [run, "--data", str(other.path)],
                 [run, "--data", str(short.path)], [run, "--data", str(tmp_path / "missing.bin")],
                 [run, "--T", "0"], [run, "--eps", "2"], [run, "--device", "nonsense"]):
        assert evaluation.main(args) == 2, args
        captured = capsys.readouterr()
        assert captured.err.startswith("eval.py: ") and captured.err.count("\n") == 1, captured.err
    assert os.listdir(run) == ["checkpoint.pt"]
