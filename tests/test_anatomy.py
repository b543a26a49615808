"""The anatomy against planted spikes: a SwiGLU that amplifies one direction, found and measured."""
import json
import math
import os
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import eval as evaluation
from eval import (Amplifier, Edited, EvalError, Gaps, Geometry, Sinks, around, dissect, edited,
                  find_lives, folded, form_products, interventions, leading_eigen, participation)
from model import PRESETS, Config, Transformer, save_checkpoint

TINY = dict(vocab_size=258, n_layer=3, n_head=2, d_model=32, d_ff=24, block_size=64, ledger_rank=4)
LOUD, CHANNEL, UP, DOWN = 7, 5, 3, 5        # the token, the channel, the two sublayers


def ids(*shape, seed=0):
    """Bytes from 10 on, and LOUD where it is put."""
    tokens = torch.from_numpy(np.random.default_rng(seed).integers(10, 256, size=shape))
    tokens[..., ::16] = LOUD
    return tokens


@torch.no_grad()
def planted(**fields):
    """Layer 1's SwiGLU writes 6.4 d cos^2(h, axis) into CHANNEL, layer 2's takes it out again.

    The embedding of LOUD lies on the axis, all others are orthogonal to it. Gains differ from one:
    who folds them into the wrong place finds another axis. Noise keeps the form of full rank."""
    model = Transformer(Config(**{**TINY, **fields}))
    g = torch.Generator().manual_seed(1)
    for name, p in model.named_parameters():
        if name.startswith("norms"):
            p.copy_(1 + 0.3 * torch.rand(p.shape, generator=g))
        elif name.endswith(("wo.weight", "w_down.weight")):
            p.zero_()
    d, axis = model.config.d_model, F.normalize(torch.randn(32, generator=g), dim=0)
    axis[CHANNEL] = 0
    axis = F.normalize(axis, dim=0)
    E = torch.randn(model.embed.weight.shape, generator=g)
    E -= (E @ axis)[:, None] * axis
    E[LOUD] = axis * d ** 0.5
    model.embed.weight.copy_(0.1 * E)
    ffn, gain = model.sublayers[UP], model.norms[UP].weight
    for w in (ffn.w_gate.weight, ffn.w_up.weight):
        w.copy_(0.01 * torch.randn(w.shape, generator=g))
        w[:8] += 2 * axis / gain
    ffn.w_down.weight.copy_(1e-3 * torch.randn(ffn.w_down.weight.shape, generator=g))
    ffn.w_down.weight[CHANNEL, :8] += 0.2
    last = model.sublayers[DOWN]
    for w in (last.w_gate.weight, last.w_up.weight):
        w.zero_()
        w[0, CHANNEL] = 1
    last.w_down.weight[CHANNEL, 0] = -6.4 / 1.3 ** 2
    return model, axis


def explicit(Wg, Wu, w):
    U = torch.einsum("f,fi,fj->ij", w, Wg, Wu)
    return U, (U + U.T) / 2


# ------------------------------------------------------------------------------------- the pieces

def test_lives_of_a_spike_that_rises_twice():
    """Up in two steps, gone; then a far larger one: two lives, the two early steps are one rise."""
    size = [1, 1, 3, 3, 180, 175, 880, 870, 860, 400, 110, 100, 24000, 23900, 9000, 4000]
    lives = find_lives(size, [1.0] * len(size))
    assert lives == [{"step_up": [3, 5], "step_down": [8, 9]},
                     {"step_up": [11], "step_down": [13]}]
    assert find_lives(size, [3.0] * len(size))[0]["step_up"] == [5]     # 180 is no spike now
    assert find_lives([1, 5, 20, 60, 99], [1.0] * 5) == []
    assert find_lives([500, 500, 500], [1.0] * 3) == []                 # born in the embedding


@pytest.mark.parametrize("block", [5, 1024])
def test_norms_and_leading_axes_equal_those_of_the_explicit_forms(block):
    """Every channel of a random SwiGLU in fp64, eigenvalues of both signs, against eigh."""
    g = torch.Generator().manual_seed(0)
    Wg, Wu = torch.randn(2, 24, 16, generator=g).double()
    Wd = torch.randn(16, 24, generator=g).double()
    whole = form_products(Wd, Wg, Wg, Wu, Wu, block)
    symmetric = (whole + form_products(Wd, Wu, Wg, Wg, Wu, block)) / 2
    signs = set()
    for k in range(16):
        U, S = explicit(Wg, Wu, Wd[k])
        assert whole[k].item() == pytest.approx(U.square().sum().item(), rel=1e-10)
        assert symmetric[k].item() == pytest.approx(S.square().sum().item(), rel=1e-10)
        values, vectors = torch.linalg.eigh(S)
        order = values.abs().argsort(descending=True)
        value, vector, second = leading_eigen(Wg, Wu, Wd[k])
        assert value == pytest.approx(values[order[0]].item(), rel=1e-8)
        assert second == pytest.approx(values[order[1]].item(), rel=1e-2)
        assert (vector @ vectors[:, order[0]]).abs().item() == pytest.approx(1, abs=1e-8)
        signs.add(value > 0)
    assert signs == {True, False}


def test_a_form_with_equal_eigenvalues_of_opposite_sign():
    """g u' with g and u orthogonal: +a and -a. One vector alone would swing between them."""
    Wg, Wu = torch.zeros(1, 6).double(), torch.zeros(1, 6).double()
    Wg[0, 0], Wu[0, 1] = 2, 3
    value, vector, second = leading_eigen(Wg, Wu, torch.ones(1).double())
    assert abs(value) == pytest.approx(3) and value == pytest.approx(-second)
    U, S = explicit(Wg, Wu, torch.ones(1).double())
    assert torch.allclose(S @ vector, value * vector, atol=1e-8)


def test_participation_counts_equal_entries():
    x = torch.zeros(3, 50)
    x[0, 3], x[1, :7], x[2] = -4.0, 2.0, 0.5
    assert participation(x).tolist() == pytest.approx([1, 7, 50])


def test_a_pass_that_stops_early_sees_what_a_full_one_sees():
    model, tokens, full = Transformer(Config(**TINY)), ids(3, 20), {}
    record = lambda name, l, x: full.__setitem__(-1 if name == "embedding" else l, x)
    record.names = {"embedding", "stream"}
    with torch.no_grad():
        model(tokens, record=record)
        model.sublayers[4].wq.weight.fill_(math.nan)            # nobody may go there
        model.head.weight.fill_(math.nan)
        steps = list(around(model, tokens, [0, 3], batch_size=2))
    assert [len(step[3][0]) for step in steps] == [2, 1]
    for l in (0, 3):
        before, after = (torch.cat([step[l][i] for step in steps]) for i in (0, 1))
        assert torch.allclose(before, full[l - 1], atol=1e-6)
        assert torch.allclose(after, full[l], atol=1e-6)


def test_geometry_of_keys_and_norms_against_brute_force():
    model, tokens = Transformer(Config(**{**TINY, "n_head": 4, "n_kv_head": 2})), ids(2, 24)
    tokens[:, 1:] = tokens[:1, 1:]
    geometry, seen = Geometry(model.config), {}
    first = torch.zeros(2, 24, dtype=torch.bool)
    first[:, 0] = True
    geometry.groups = {"spike": first, "ordinary": ~first, "minor": torch.zeros_like(first)}
    record = lambda name, l, x: seen.__setitem__((name, l), x)
    record.names = {"norm_out"}
    with torch.no_grad():
        model(tokens, record=record)
        model(tokens, record=geometry)
    u = seen["norm_out", 4]
    flat = F.normalize(u[~first], dim=-1)
    pairs = flat @ flat.T
    expected = pairs[~torch.eye(len(flat), dtype=torch.bool)].mean().item()
    assert geometry.cosine("ordinary", "ordinary", 4) == pytest.approx(expected, abs=1e-5)
    mixed = (F.normalize(u[first], dim=-1) @ flat.T).mean().item()
    assert geometry.cosine("spike", "ordinary", 4) == pytest.approx(mixed, abs=1e-5)
    assert geometry.cosine("minor", "ordinary", 4) is None
    keys = model.sublayers[4].wk(u[~first]).detach().unflatten(-1, (2, -1)).double()  # no rotation
    for head, (effective, axes) in enumerate(zip(*geometry.dimension("ordinary", 4))):
        energy = torch.linalg.svdvals(keys[:, head]).square()
        assert effective == pytest.approx((energy.sum() ** 2 / energy.square().sum()).item(), 1e-3)
        assert axes == int((energy.cumsum(0) / energy.sum() < 0.99).sum()) + 1


def test_one_token_everywhere_has_one_key_whatever_its_position():
    """Layer 0 sees the embedding alone: undone rotation leaves one axis, rotation would not."""
    model, geometry = Transformer(Config(**TINY)), None
    geometry = Geometry(model.config)
    geometry.groups = {"ordinary": torch.ones(1, 40, dtype=torch.bool)}
    with torch.no_grad():
        model(torch.full((1, 40), 65), record=geometry)
    assert geometry.dimension("ordinary", 0)[0] == pytest.approx([1, 1], abs=1e-4)
    geometry.config = Config(**{**TINY, "pos": "none"})         # now it is not undone
    geometry.gram = {}
    with torch.no_grad():
        model(torch.full((1, 40), 65), record=geometry)
    assert min(geometry.dimension("ordinary", 0)[0]) > 1.05


def test_logit_gaps_equal_the_log_ratio_of_probabilities():
    """Softmax is blind to a common shift, so log p_0 - log p_j is the difference of the logits."""
    torch.manual_seed(0)
    model, probs = Transformer(Config(**{**TINY, "n_head": 4, "n_kv_head": 2})), {}
    for l in (0, 2, 4):
        model.sublayers[l].wq.weight.data *= 40
    gaps = Gaps()
    record = lambda name, l, x: probs.__setitem__(l, x)
    record.names = {"attn_probs"}
    with torch.no_grad():
        model(ids(2, 12), record=gaps)
        model(ids(2, 12), record=record)
    log = probs[2].log()
    mean = torch.stack([log[..., t, 0] - log[..., t, 1:t + 1].mean(-1) for t in range(1, 12)], -1)
    best = torch.stack([log[..., t, 0] - log[..., t, 1:t + 1].amax(-1) for t in range(1, 12)], -1)
    assert torch.allclose(gaps.mean["gap", 2].float(), mean.mean((0, 2)), atol=1e-3)
    assert torch.allclose(gaps.mean["best", 2].float(), best.mean((0, 2)), atol=1e-3)
    assert torch.allclose(gaps.mean["square", 2].float(), mean.square().mean((0, 2)), rtol=1e-2)


def test_attention_received_leaves_out_the_key_s_own_query():
    """Every query gives a third to key 2, if it sees it, and the rest to itself."""
    p = torch.eye(6) * 2 / 3
    p[2:, 2] += 1 / 3
    gaps, mask = Gaps(), torch.zeros(1, 6, dtype=torch.bool)
    mask[0, 2] = True
    gaps.groups = {"minor": mask, "ordinary": ~mask}
    gaps("attn_probs", 0, p[None, None])
    assert gaps.mean["minor", 0].item() == pytest.approx(1 / 3)
    assert gaps.mean["ordinary", 0].item() == 0


# ---------------------------------------------------------------------------------- the planted one

@pytest.fixture(scope="module")
def found():
    model, axis = planted()
    model.train()
    before, random_state = model.residual, torch.get_rng_state()
    anatomy, points = dissect(model, ids(6, 33), T=32, vocabulary=300, singles=64)
    assert model.residual is before and model.training and model.sublayers[3].training
    assert torch.equal(torch.get_rng_state(), random_state)
    return model, axis, anatomy, points


def test_the_planted_life_is_found(found):
    _, _, a, _ = found
    life, = a["lives"]
    assert not a["notes"] or a["notes"] == ["Heads are not grouped: every head has keys of its own"]
    assert (life["step_up"], life["step_down"], life["channel"]) == ([UP], [DOWN], CHANNEL)
    assert list(life["channels"]) == [CHANNEL] and life["text"] == f"id {LOUD}"
    assert life["n_tokens"] == 6 * 2 and life["at_first"] == 6      # positions 0 and 16
    assert life["words"] == [{"text": f"id {LOUD}", "count": 12,
                              "largest": pytest.approx(life["peak"])}]
    jump = np.diff(life["trace"])
    assert jump[UP] > 100 and jump[DOWN] < -100                     # the opposite sign


def test_the_share_of_the_vocabulary_is_exact(found):
    _, _, a, _ = found
    v = a["vocabulary"]
    assert v["n"] == v["of"] == 258 and v["share"] == pytest.approx(1 / 258)
    assert v["sublayer"] == UP and len(v["exceptions"]) == 8
    assert f"id {LOUD}" not in v["exceptions"]


def test_the_planted_axis_and_its_prediction(found):
    """Axis, eigenvalue, norm and alignment; the predicted output against what the layer wrote."""
    model, axis, a, points = found
    form = next(form for form in a["forms"]["blocks"] if form["sublayer"] == UP)
    Wg, Wu, Wd = folded(model, UP)
    U, S = explicit(Wg, Wu, Wd[CHANNEL])
    values = torch.linalg.eigvalsh(S)
    top = values[values.abs().argmax()].item()
    assert form["channels"][0] == CHANNEL and form["eigenvalue"][0] == pytest.approx(top, rel=1e-6)
    assert form["frobenius"][0] == pytest.approx(U.norm().item(), rel=1e-6)
    share = top ** 2 / S.square().sum().item()
    assert form["share"][0] == pytest.approx(share, rel=1e-6) and share > 0.9
    vector = Amplifier(model, UP, [CHANNEL]).vector[0]
    assert (vector.float() @ axis).abs().item() > 0.999
    assert form["spike"]["cos2"][0] > 0.99 and form["others"]["cos2"][0] < 0.01
    assert form["spike"]["linear"][0] > 0.99
    written = {}
    record = lambda name, l, x: written.__setitem__(l, x)
    record.names = {"sublayer_out"}
    with torch.no_grad():
        model(torch.tensor([[LOUD]]), record=record)
    actual = written[UP][0, 0, CHANNEL].item()
    for key, tolerance in (("actual", 1e-4), ("quadratic", 0.02), ("leading", 0.02)):
        assert form["spike"][key][0] == pytest.approx(actual, rel=tolerance), key
    down = next(form for form in a["forms"]["blocks"] if form["sublayer"] == DOWN)
    assert down["eigenvalue"][0] < 0


def test_what_the_norm_makes_of_the_planted_spike(found):
    _, _, a, _ = found
    entry = a["norms"][UP + 1]
    assert entry["channels_raw"]["spike"] < 1.1 < 5 < entry["channels_raw"]["ordinary"]
    assert entry["cosine"]["spike"] > 0.999 > 0.9 > entry["cosine"]["ordinary"]
    key = next(key for key in a["keys"] if key["sublayer"] == UP + 1)
    assert key["spike"]["axes_99"] == 1 < key["ordinary"]["axes_99"]


def test_actual_output_is_the_model_s_for_all_tokens_and_with_biases():
    model = Transformer(Config(**{**TINY, "ffn_bias": True}))
    ffn = model.sublayers[UP]
    with torch.no_grad():
        for linear in (ffn.w_gate, ffn.w_up):
            linear.bias.normal_(generator=torch.Generator().manual_seed(0))
        model.norms[UP].weight.uniform_(0.5, 2, generator=torch.Generator().manual_seed(0))
        x = torch.randn(9, 32, generator=torch.Generator().manual_seed(2))
        expected = ffn(model.norms[UP](x)[None], type("C", (), {"record": None}))[0][0]
        x = Amplifier(model, UP, [3, 8])(x)["actual"]
    assert torch.allclose(x.float(), expected[:, [3, 8]], atol=1e-5)    # w_down's bias is zero


# ------------------------------------------------------------------------------------ interventions

def test_edits_take_hold_and_an_empty_one_changes_nothing():
    model, _ = planted()
    tokens = ids(2, 20)
    with torch.no_grad():
        plain = model(tokens)[0]
        none = lambda x: (torch.zeros_like(x, dtype=torch.bool), torch.zeros_like(x))
        same = lambda x: (torch.ones_like(x, dtype=torch.bool), x)
        with edited(model, UP, none):
            assert torch.equal(model(tokens)[0], plain)
        with edited(model, UP, same):
            assert torch.allclose(model(tokens)[0], plain, atol=1e-4)
        life = {"bar": 50.0, "channels": {CHANNEL: 123.0}}
        for name, value in (("zero", 0.0), ("mean", 123.0)):
            with edited(model, UP, interventions(life, 32)[name]):
                (_, after), = (s[UP] for s in around(model, tokens, [UP], 2))
            (_, own), = (s[UP] for s in around(model, tokens, [UP], 2))
            spike = tokens == LOUD
            assert torch.allclose(after[spike][:, CHANNEL], torch.tensor(value), atol=1e-4)
            after[spike] = own[spike]
            assert torch.equal(after, own)                  # nothing else was touched
            with edited(model, UP, interventions(life, 32)[name]):
                assert not torch.allclose(model(tokens)[0], plain, atol=1e-2)
        with pytest.raises(ZeroDivisionError), edited(model, UP, lambda x: 1 / 0):
            model(tokens)
        assert not isinstance(model.residual, Edited)


def test_the_control_edits_as_much_elsewhere():
    x = torch.zeros(3, 12, 32)
    x[0, 0, 5] = x[0, 7, 5] = x[2, 3, 5] = 99.0
    life = {"bar": 50.0, "channels": {5: 99.0, 6: 1.0}}
    spike, _ = interventions(life, 32)["zero"](x)
    mask, _ = interventions(life, 32)["control"](x)
    assert torch.equal(mask.sum((1, 2)), torch.tensor([4, 0, 2]))
    assert torch.equal(mask.sum((1, 2)), spike.sum((1, 2)))
    assert not (mask.any(-1) & spike.any(-1)).any() and not mask[..., [5, 6]].any()
    again, _ = interventions(life, 32)["control"](x)
    assert torch.equal(mask, again)


def test_removing_the_planted_spike_costs_what_it_should(found):
    """The control and the mean leave the loss alone; zero is what a model without the layer has."""
    model, _, a, _ = found
    edit, = a["interventions"]
    with torch.no_grad():
        x, y = ids(6, 33)[:, :32], ids(6, 33)[:, 1:]
        model.sublayers[UP].w_down.weight[CHANNEL], kept = 0, model.sublayers[UP].w_down.weight[
            CHANNEL].clone()
        bare = model(x, y)[1].item()
        model.sublayers[UP].w_down.weight[CHANNEL] = kept
        assert edit["untouched"]["loss"] == pytest.approx(model(x, y)[1].item(), abs=1e-5)
    effect = abs(edit["zero"]["loss"] - edit["untouched"]["loss"])
    assert effect > 2e-4 and abs(edit["zero"]["loss"] - bare) < 0.25 * effect
    assert edit["mean"]["loss"] == pytest.approx(edit["untouched"]["loss"], abs=2e-5)


# --------------------------------------------------------------------------------- other models

@pytest.mark.parametrize("fields, note", [
    ({}, "there is no spike"), ({**PRESETS["ledger"], "ffn": "gelu"}, "is no plain sum"),
    (PRESETS["attnres"], "is no plain sum"), (PRESETS["oasis"], "is no plain sum"),
    (PRESETS["hc2"], "is no plain sum"), ({"ffn": "gelu"}, "No feed-forward layer is a SwiGLU"),
    ({"ffn": "none"}, "No feed-forward layer is a SwiGLU"), ({"norm": "sandwich"}, "pass a norm"),
    ({"norm": "dyt"}, "there is no spike"), ({"norm": "post", "pos": "learned"}, "not grouped"),
    ({**PRESETS["sink"], "qk_norm": True, "n_head": 4, "n_kv_head": 2}, "there is no spike")])
def test_what_a_model_has_not_is_said_and_the_rest_is_measured(fields, note, tmp_path):
    model = Transformer(Config(**{**TINY, **fields}))
    a, points = dissect(model, ids(2, 33), T=32, vocabulary=40, singles=8)
    assert any(note in line for line in a["notes"]), a["notes"]
    life, = a["lives"]
    assert life["young"] and life["n_tokens"] == life["at_first"] == 2 and life["position"] == 0
    assert bool(a["interventions"]) == (model.config.residual == "standard")
    json.dumps(evaluation.plain(a), allow_nan=False)
    report = evaluation.anatomy_report(a, "tiny")
    assert report.count("\n## ") == 6 and "nan" not in report.lower().replace("finance", "")
    if "sparsity" in fields:            # one with all that may be missing: a figure takes seconds
        evaluation.save_figure(evaluation.draw_anatomy(a, points, "tiny"), str(tmp_path / "a.png"))
        assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG"


# ------------------------------------------------------------------------------------- the program

def test_the_program_on_a_run(tmp_path, capsys):
    model, _ = planted()
    save_checkpoint(str(tmp_path / "checkpoint.pt"), {
        "config": {**model.config.__dict__}, "model": model.state_dict(),
        "run": {"tokenizer": "bytes", "bos": "none"}})
    (tmp_path / "metrics.json").write_text('{"val": {"loss": 1.5}}')
    (tmp_path / "text.txt").write_text("".join(chr(c) for c in ids(9000).tolist()))
    command = [str(tmp_path), "--text", str(tmp_path / "text.txt"), "--anatomy", "--T", "32",
               "--n-sequences", "3"]
    assert evaluation.main(command) == 0
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["val"] == {"loss": 1.5}
    assert metrics["anatomy"]["lives"][0]["step_up"] == [UP]
    assert metrics["anatomy"]["protocol"]["T"] == 32
    assert "block 4 (feed-forward of layer 1)" in (tmp_path / "anatomy.md").read_text()
    assert (tmp_path / "figures" / "anatomy.png").stat().st_size > 20_000
    capsys.readouterr()
    for wrong in (["--T", "3"], ["--T", "9000"], ["--n-sequences", "0"], ["--eps", "2"],
                  ["--text", str(tmp_path / "none.txt")]):
        assert evaluation.main(command + wrong) == 2, wrong
        error = capsys.readouterr().err.strip()
        assert error.startswith("eval.py:") and "\n" not in error, error
    assert evaluation.main([str(tmp_path / "nowhere"), "--anatomy"]) == 2


def test_the_program_on_a_pretrained_folder(tmp_path, monkeypatch):
    """A random Llama with grouped heads, its tokenizer; nothing is written beside its weights."""
    tokenizers = pytest.importorskip("tokenizers")
    from test_pretrained import LLAMA, write
    folder = tmp_path / "tiny-llama"
    folder.mkdir()
    write(folder)
    tk = tokenizers.Tokenizer(tokenizers.models.WordLevel(
        {"a": 0, "b": 1, "c": 2, "<unk>": 3}, unk_token="<unk>"))
    tk.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tk.add_special_tokens(["<eos>"])
    tk.save(str(folder / "tokenizer.json"))
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    (tmp_path / "text.txt").write_text("a b b c a\n" * 12000)
    monkeypatch.chdir(tmp_path)
    assert evaluation.main([str(folder), "--anatomy", "--text", "text.txt", "--no-figures"]) == 0
    a = json.loads(Path("runs/tiny-llama/metrics.json").read_text())["anatomy"]
    assert a["protocol"]["T"] == 256 and a["protocol"]["n_sequences"] == 8
    assert a["vocabulary"]["n"] == 5 < LLAMA["vocab_size"]      # of those that have an id
    assert len(a["sinks"]["heads"]) == 12 and not any("grouped" in note for note in a["notes"])
    assert a["lives"][0]["text"] in ("a", "b", "c", "<eos>")
    assert os.path.exists("runs/tiny-llama/anatomy.md")
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before
