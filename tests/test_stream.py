"""A sliding cache: what it holds, what it computes, and what its loss is called."""
import json
import os

import pytest
import torch

import eval as evaluation
from model import PRESETS, Config, KVCache, Transformer, rope_table, rotate, save_checkpoint


def tiny(block=64, seed=0, **fields):
    shape = {"n_layer": 2, "n_head": 4, "n_kv_head": 2, "d_model": 32, "block_size": block}
    model = Transformer(Config(**{**shape, **fields}), seed=seed).eval()
    with torch.no_grad():       # away from the corners where a mechanism starts
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(seed)) * 0.2)
    return model


def stream(n=40, B=2, seed=0):
    x = torch.randint(258, (B, n + 1), generator=torch.Generator().manual_seed(seed))
    return x[:, :-1], x[:, 1:]


def slow_stream(model, x, y, window, keep, chunk):
    """The definition, spelled out for one sequence x (N,): every layer keeps a plain list of the
    keys before rotation; each call rotates those that are left by their place in the list."""
    c, past, losses, entered = model.config, [([], []) for _ in range(model.config.n_layer)], [], 0
    for start in range(0, len(x), chunk):
        part = x[start:start + chunk]
        while entered + len(part) > window:
            for keys, values in past:
                del keys[keep], values[keep]
            entered -= 1
        h = model.embed(part)                                                       # (T, d)
        if c.pos == "learned":
            h = h + model.pos_embed(torch.arange(entered, entered + len(part)))
        entered += len(part)
        for l, (norm, f) in enumerate(zip(model.norms, model.sublayers)):
            u = norm(h)                                                             # (T, d)
            if l % 2:
                h = h + f(u, evaluation_context)[0]
                continue
            keys, values = past[l // 2]
            keys += list(f.wk(u).unflatten(-1, (-1, c.head_dim)))                   # (G, D) each
            values += list(f.wv(u).unflatten(-1, (-1, c.head_dim)))
            q = f.wq(u).unflatten(-1, (-1, c.head_dim)).transpose(0, 1)             # (H, T, D)
            k, v = torch.stack(keys, 1), torch.stack(values, 1)                     # (G, S, D)
            S, T = k.shape[1], q.shape[1]
            if c.pos == "rope":
                cos, sin = rope_table(torch.arange(S), c)
                k, q = rotate(k, cos, sin), rotate(q, cos[-T:], sin[-T:])
            k, v = (t.repeat_interleave(c.n_head // c.n_kv_head, 0) for t in (k, v))
            logits = q @ k.transpose(1, 2) / c.head_dim ** 0.5                      # (H, T, S)
            logits.masked_fill_(~torch.ones(T, S, dtype=torch.bool).tril(S - T), -torch.inf)
            out = (logits.softmax(-1) @ v).transpose(0, 1).flatten(1)               # (T, H*D)
            h = h + f.wo(out)
        logits = model.head(model.final_norm(h))                                    # (T, V)
        losses.append(torch.nn.functional.cross_entropy(
            logits, y[start:start + chunk], reduction="none"))
    return torch.cat(losses).double()


class evaluation_context:       # all that a feed-forward asks of its context
    record = None


@pytest.mark.parametrize("window, keep, chunk", [(8, 0, 1), (8, 3, 1), (9, 2, 4), (12, 4, 8),
                                                 (16, 0, 16), (16, 1, 3)])
@pytest.mark.parametrize("pos", ["rope", "learned", "none"])
def test_streaming_is_its_definition(pos, window, keep, chunk):
    model, (x, y) = tiny(block=16, pos=pos), stream()
    found = evaluation.stream_nll(model, x, y, window, keep, chunk)
    for row in range(len(x)):
        with torch.no_grad():
            truth = slow_stream(model, x[row], y[row], window, keep, chunk)
        torch.testing.assert_close(found[row], truth, atol=2e-5, rtol=2e-5)


SCALING = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 16}
EVERY = {name: fields for name, fields in PRESETS.items() if "block" not in name}
EVERY["kv-bias"] = {**PRESETS["kv-bias"], "pos": "none"}    # its key stands still, at position 0


@pytest.mark.parametrize("preset", EVERY)
def test_without_kept_tokens_it_is_a_banded_mask(preset):
    """Rotary angles depend on differences alone, so one pass over the whole stream, in which each
    query sees `window` keys, is the sliding cache of every mechanism, tokens coming one by one."""
    model, (x, y) = tiny(rope_scaling=SCALING, **EVERY[preset]), stream()
    N, window = x.shape[1], 8
    band = torch.ones(N, N, dtype=torch.bool).tril().triu(1 - window)               # (N, N)
    with torch.no_grad():
        ctx = model.context(x, None, None, None)._replace(mask=band[None, None])
        state, null = model.residual.start(ctx.x0, None), None
        for l in range(len(model.sublayers)):
            h = model.residual.read(state, l)
            u, out, null = model.sublayer(l, h, ctx, null)
            state = model.residual.write(state, l, u, out, null)
        logits = model.head(model.final_norm(model.residual.finish(state)))         # (B, N, V)
    found = evaluation.stream_nll(model, x, y, window)
    torch.testing.assert_close(found, evaluation.token_nll(logits, y), atol=1e-4, rtol=1e-4)
    kept = evaluation.stream_nll(model, x, y, window, 2)
    assert (kept[:, window:] - found[:, window:]).abs().max() > 1e-3
    torch.testing.assert_close(kept[:, :window], found[:, :window])


def test_a_window_that_never_fills_changes_nothing():
    model, (x, y) = tiny(), stream()
    with torch.no_grad():
        truth = evaluation.token_nll(model(x)[0], y)
    for keep, chunk in ((0, 1), (4, 7), (0, 40)):
        found = evaluation.stream_nll(model, x, y, 40, keep, chunk)
        torch.testing.assert_close(found, truth, atol=1e-5, rtol=1e-5)


def test_what_slides_and_what_stays():
    """Kept tokens are not touched; the others are, bit for bit in v, what they would have been."""
    config = tiny().config
    cache = KVCache(config, 1, 6)
    raw, v = torch.randn(2, 1, 1, 2, 6, config.head_dim)                        # (1, 1, G, 6, D)
    turned = lambda at: rotate(raw[0], *rope_table(torch.tensor(at), config))
    for layer in range(config.n_layer):
        cache.append(layer, turned(range(6)), v[0])
    cache.length = 6
    before = cache.k.clone()
    cache.slide(config, 2, keep=1)
    assert cache.length == 4
    torch.testing.assert_close(cache.k[:, :, :, :1], before[:, :, :, :1], atol=0, rtol=0)
    moved = turned([0, 1, 1, 1, 2, 3])[:, :, 3:]                                    # (1, 2, 3, D)
    torch.testing.assert_close(cache.k[0, :, :, 1:4], moved, atol=1e-5, rtol=1e-5)
    assert torch.equal(cache.v[0, :, :, 1:4], v[0][:, :, 3:])
    with pytest.raises(ValueError, match="do not fit"):
        cache.slide(config, 6, keep=1)


# ------------------------------------------------------------------------------- measure, program

def test_measures():
    model = tiny()
    text = torch.randint(258, (900,), generator=torch.Generator().manual_seed(1))
    found = evaluation.measure_stream(model, text, [(16, 2), (8, 1)], n_tokens=100, n_streams=3)
    assert set(found) == {"protocol", "16:2", "8:1", "16:0", "16:4", "delta"}
    assert found["delta"] == found["16:0"]["loss"] - found["16:4"]["loss"] != 0
    assert found["16:0"]["loss_before"] == found["16:2"]["loss_before"]
    assert found["protocol"]["chunk"] == {16: 1, 8: 1} and found["protocol"]["n_streams"] == 3
    entry = found["16:2"]
    assert len(entry["curve"]) == 25 and entry["curve_step"] == 4
    assert sum(entry["curve"][4:]) / 21 == pytest.approx(entry["loss"])


@pytest.fixture
def run(tmp_path):
    def make(name="run", **fields):
        model, folder = tiny(**fields), tmp_path / name
        folder.mkdir()
        text = tmp_path / "text.txt"
        text.write_text("what a head does not need it leaves to the first token\n" * 400)
        save_checkpoint(str(folder / "checkpoint.pt"), {
            "config": vars(model.config), "model": model.state_dict(),
            "run": {"tokenizer": "bytes", "data": str(text), "bos": "window"}})
        return folder
    return make


def test_program(run, capsys):
    folder = run(pos="learned", block=32)               # 256 tokens: 8 x its learned positions
    assert evaluation.main([str(folder), "--stream", "32", "--stream", "32:1",
                            "--batch-size", "2"]) == 0
    metrics = json.loads((folder / "metrics.json").read_text())
    assert set(metrics) == {"stream"} and {"32:0", "32:1", "32:4"} < set(metrics["stream"])
    assert metrics["stream"]["protocol"]["n_tokens"] == 256
    assert metrics["stream"]["protocol"]["bos_policy"] == "window"
    printed = capsys.readouterr().out
    assert "| 32 | 1 |" in printed and os.path.exists(folder / "figures" / "stream.png")


def test_bad_requests_are_one_line(run, capsys):
    folder = run(pos="learned", block=32)
    for flags in (["--stream", "x"], ["--stream", "8:8"], ["--stream", "1"], ["--stream", "64"],
                  ["--stream", "32:-1"], ["--stream", "16", "--stream-tokens", "16"],
                  ["--stream", "16", "--stream-tokens", "999999"]):
        assert evaluation.main([str(folder), *flags]) == 2, flags
        err = capsys.readouterr().err
        assert err.startswith("eval.py: ") and err.count("\n") == 1, err
