"""Pretrained weights, converted and fine-tuned: the function is kept, and everything can learn.

The tiny Llama of these tests has what makes conversion hard: an embedding channel of 2,000 for some
tokens, which every layer carries along, beside ordinary channels of 0.1.
"""
import dataclasses
import json
from pathlib import Path

import pytest
import torch

import data.prepare
import train
from model import (CONVERSION, PRESETS, CheckpointError, Config, Transformer, load_checkpoint,
                   load_model)
from quantize import quantize

pytest.importorskip("safetensors")
from test_pretrained import LLAMA, gap, ids, write  # noqa: E402

SHAPE = {"vocab_size": 258, "num_hidden_layers": 4, "hidden_size": 64, "intermediate_size": 96,
         "num_attention_heads": 4, "head_dim": 16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("llama") / "tiny"
    place.mkdir()
    embed = 0.1 * torch.randn(258, 64, generator=torch.Generator().manual_seed(1))
    embed[::9, 5] = 2000.0
    return str(write(place, SHAPE, {"model.embed_tokens.weight": embed},
                     without=["model.embed_tokens.weight"]))


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    place = tmp_path_factory.mktemp("corpus")
    (place / "cubes.txt").write_text("".join(f"the cube of {i} is {i ** 3}.\n" for i in range(999)))
    return str(data.prepare.load(place / "cubes.txt", "train", folder=place).path)


def run(folder, corpus, out, *flags):
    return train.main(["--init-from", folder, "--tokenizer", "bytes", "--data", corpus, "--out",
                       str(out), "--block-size", "32", "--batch-size", "2", "--steps", "6",
                       "--warmup", "1", "--eval-sequences", "4", "--probe-sequences", "4",
                       "--device", "cpu", "--no-eval", *flags])


def convert(folder, arch, **fields):
    return load_model(folder, **{**CONVERSION, **PRESETS[arch], **fields})[0]


def start(folder, model) -> float:
    """max |delta logit| / max |logit| against the untouched model."""
    tokens = ids(2, 64, vocab=258)
    with torch.no_grad():
        return gap(model(tokens)[0], Transformer.from_pretrained(folder)(tokens)[0])


# ------------------------------------------------------------------------------- near the identity

PUBLISHED = {"near_identity": False, "router_init": "recent", "gate_init": 0.25, "null_start": 0.0,
             "null_init": 0.0}


@pytest.mark.parametrize("arch, fields, bound", [
    ("attnres", {}, 1e-5), ("attnres-block", {}, 1e-5), ("attnres", {"depth_block": 3}, 1e-5),
    ("attnres", {"depth_normalizer": "softmax1"}, 1e-5),
    ("attnres", {"depth_normalizer": "sparsemax"}, 1e-5),
    ("attnres-oasis", {}, 1e-4), ("oasis", {}, 1e-3), ("oasis", {"router_norm": True}, 1e-3),
    ("ledger", {}, 1e-3), ("hc2", {}, 1e-5), ("outeffhop", {}, 1e-6), ("sink", {}, 1e-4),
    ("gated", {}, 1e-3)])
def test_a_conversion_keeps_the_function_and_the_published_start_does_not(folder, arch, fields,
                                                                         bound):
    near = start(folder, convert(folder, arch, **fields))
    far = start(folder, convert(folder, arch, **{**PUBLISHED, **fields}))
    assert near < bound < far and far > 4 * near, (near, far)


def test_the_null_of_depth_is_negligible_at_the_start(folder):
    """exp(-IDENTITY_STEP) a site for the router; for AttnRes one share of n + 1, scaled away."""
    mass = []

    def keep(name, l, x):
        mass.append(x.max().item())
    keep.names = {"depth_null"}
    convert(folder, "oasis")(ids(2, 64, vocab=258), record=keep)
    assert len(mass) == 8 and max(mass) < 1e-5


@pytest.mark.parametrize("arch", ["attnres", "attnres-block", "attnres-oasis", "oasis", "ledger",
                                  "hc2", "gated", "sink"])
def test_every_new_parameter_learns_from_the_start(folder, arch):
    """A factor that starts at zero keeps its partner's gradient at zero for one step, no longer:
    W_k waits for W_q, key gains for queries, the maps down for the maps up. (Ledger's first
    sublayer reads a C that is still zero, whatever its gain.)"""
    model = convert(folder, arch)
    model.anneal_null(0.0)          # coupling has no gradient before there is a null mass
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens, moved = ids(2, 33, vocab=258), set()
    names = {n for n, _ in model.named_parameters()} & set(model.new_parameters)
    names.discard("residual.sites.0.read_gain")
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for step in range(3):
        model(tokens[:, :-1], tokens[:, 1:])[1].backward()
        for name in names:
            moved |= {name} if model.get_parameter(name).grad.abs().max() > 0 else set()
        optimizer.step()
        optimizer.zero_grad()
        if step == 0:
            first = set(moved)
    assert names == moved, names - moved
    changed = {n for n in names if not torch.equal(before[n], model.get_parameter(n))}
    assert names == changed, names - changed
    if "oasis" in arch:
        assert all(n in first for n in names if n.endswith(("wq.weight", "recency")))


def test_a_flag_overrides_the_start(folder, corpus, tmp_path, capsys):
    assert run(folder, corpus, tmp_path, "--arch", "attnres-oasis", "--router-init", "zero",
               "--steps", "1") == 0
    said = capsys.readouterr().out
    assert "attnres-oasis has no nearer start" not in said or "max |delta logit|" in said
    assert load_checkpoint(str(tmp_path))["config"]["router_init"] == "zero"
    assert load_checkpoint(str(tmp_path))["run"]["logit_gap"] > 1e-2


def test_the_measured_gap_is_printed_and_kept(folder, corpus, tmp_path, capsys):
    assert run(folder, corpus, tmp_path / "near", "--arch", "oasis") == 0
    near = capsys.readouterr().out
    assert run(folder, corpus, tmp_path / "far", "--arch", "sparsemax") == 0
    far = capsys.readouterr().out
    assert "max |delta logit| / max |logit|" in near and "no nearer start" not in near
    assert "sparsemax has no nearer start" in far
    for name, low, high in (("near", 0, 1e-3), ("far", 1e-2, 10)):
        kept = json.loads((tmp_path / name / "config.json").read_text())["run"]
        assert low < kept["logit_gap"] < high and kept["init_from"] == folder
        assert kept["context"] == LLAMA["max_position_embeddings"] > 32
    assert run(folder, corpus, tmp_path / "same", "--arch", "vanilla") == 0
    assert "max |delta" not in capsys.readouterr().out


def test_pretrained_weights_are_not_overwritten(folder, corpus, capsys):
    config = Path(folder, "config.json").read_text()
    assert run(folder, corpus, folder) == 2
    assert "has a config.json of something else" in capsys.readouterr().err
    assert Path(folder, "config.json").read_text() == config


def test_a_gap_of_nan_is_not_a_gap_of_zero(folder):
    model = Transformer.from_pretrained(folder)
    broken = Transformer.from_pretrained(folder)
    broken.final_norm.weight.data[0] = float("nan")
    for pair in ((model, broken), (broken, model)):
        with pytest.raises(train.UsageError, match="not finite"):
            train.relative_gap(*pair, ids(2, 8, vocab=258))


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """As Qwen3-0.6B: heads that together are wider than the stream."""
    return str(write(tmp_path_factory.mktemp("wide"), {**SHAPE, "head_dim": 32}))


def test_what_a_shape_does_not_allow_is_left_out_and_said(wide, corpus, tmp_path, capsys,
                                                         monkeypatch):
    few = ("AttnRes: the mean", "gate, opening 0.25")
    monkeypatch.setattr(train, "STARTS", {k: train.STARTS[k] for k in few})
    flags = ["--init-from", wide, "--tokenizer", "bytes", "--data", corpus]
    assert train.main(["--starts", *flags]) == 0
    said = capsys.readouterr().out
    assert "| gate, opening 0.25 | gated | impossible" in said and "d_model=64 must be" in said
    assert train.main(["--study", "finetune", "--seeds", "1", "--arms", "vanilla,gated", *flags,
                       "--out", str(tmp_path), "--block-size", "32", "--batch-size", "2",
                       "--steps", "2", "--warmup", "1", "--probe-every", "0", "--eval-sequences",
                       "2", "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "gated is left out: the bondarenko gate" in said and "| vanilla" in said
    assert "| gated" not in said
    assert train.main(["--study", "finetune", "--arms", "gated", *flags]) == 2


def test_all_arms_share_the_pretrained_weights(folder):
    plain = dict(Transformer.from_pretrained(folder).named_parameters())
    for arch in ("attnres", "oasis", "gated", "outeffhop"):
        own = dict(convert(folder, arch).named_parameters())
        assert all(torch.equal(own[n], p) for n, p in plain.items())


# ---------------------------------------------------------------------------------- the null logit

def test_the_null_logit_is_state_only_where_it_is_annealed(folder):
    assert not list(Transformer(Config(normalizer="softmax1")).named_buffers())
    model = convert(folder, "outeffhop")
    assert {n: b.item() for n, b in model.named_buffers()} \
        == {f"sublayers.{l}.null_logit": -30.0 for l in (0, 2, 4, 6)}
    assert not list(convert(folder, "attnres").named_buffers())
    model.anneal_null(0.0)
    assert gap(model(ids(1, 32))[0], Transformer.from_pretrained(
        folder, normalizer="softmax1")(ids(1, 32))[0]) == 0


def test_every_path_sees_the_current_null_logit(folder):
    """Halfway, cached decoding equals the full forward, and so does a quantised copy's attention;
    the recorded matrix is the one that was used."""
    model, tokens = convert(folder, "outeffhop"), ids(2, 24, vocab=258)
    with torch.no_grad():
        untouched = model(tokens)[0]
        model.anneal_null(0.1)
        full = model(tokens)[0]
        assert gap(full, untouched) > 1e-3
        text = model.generate(tokens, 4, temperature=0)
        for t in range(24, 28):
            assert torch.equal(model(text[:, :t])[0][:, -1].argmax(-1), text[:, t])
        twin = quantize(model, "w8a8", only={"sublayers.0:probs"}, head=False)
        assert gap(twin(tokens)[0], full) < 0.05 * gap(full, untouched) + 1e-3
        seen = {}

        def keep(name, l, x):
            seen[name, l] = x
        keep.names = {"attn_probs", "null"}
        model(tokens, record=keep)
        assert torch.allclose(1 - seen["attn_probs", 0].sum(-1), seen["null", 0], atol=1e-6)
        assert seen["null", 0].max() > 1e-3


def test_the_null_logit_rises_linearly_and_resumes_bit_equal(folder, corpus, tmp_path, monkeypatch):
    """Null logits at the steps: -30, -20, -10, 0, 0, 0; 6 steps equal 2 + resume + 4 bit by bit,
    and the resumed run needs the folder no more."""
    seen, step = [], train.Trainer.step

    def watch(self, number):
        row = step(self, number)
        seen.append(self.model.sublayers[0].null_logit.item())
        return row
    monkeypatch.setattr(train.Trainer, "step", watch)
    flags = ["--arch", "oasis", "--null-warmup", "3"]
    assert run(folder, corpus, tmp_path / "a", *flags) == 0
    assert seen == pytest.approx([-30, -20, -10, 0, 0, 0], abs=1e-5)
    assert run(folder, corpus, tmp_path / "b", *flags, "--stop-after", "2") == 0
    half = load_checkpoint(str(tmp_path / "b"))
    assert half["model"]["sublayers.2.null_logit"].item() == pytest.approx(-20)
    evaluated = Transformer.from_pretrained(str(tmp_path / "b"))
    assert evaluated.sublayers[0].null_logit.item() == pytest.approx(-20)
    monkeypatch.setattr(train, "load_model", lambda *a, **k: pytest.fail("the folder was read"))
    assert train.main(["--resume", "--out", str(tmp_path / "b"), "--no-eval"]) == 0
    a, b = (load_checkpoint(str(tmp_path / x)) for x in "ab")
    assert all(torch.equal(a["model"][n], b["model"][n]) for n in a["model"])
    assert a["run"]["logit_gap"] == b["run"]["logit_gap"] is not None


def test_the_share_of_the_steps_that_anneal(folder, corpus, tmp_path, capsys):
    """Half of the steps by default; 0: Softmax1 at once, without a buffer."""
    run(folder, corpus, tmp_path / "a", "--arch", "outeffhop", "--steps", "4")
    assert load_checkpoint(str(tmp_path / "a"))["run"]["null_warmup"] == 2
    run(folder, corpus, tmp_path / "b", "--arch", "outeffhop", "--null-warmup", "0")
    kept = load_checkpoint(str(tmp_path / "b"))
    assert kept["config"]["null_start"] == 0 and kept["run"]["logit_gap"] > 1e-2
    assert not [n for n in kept["model"] if n.endswith("null_logit")]
    assert run(folder, corpus, tmp_path / "c", "--null-warmup", "6") == 2
    assert "--null-warmup 6 must end before" in capsys.readouterr().err


# ------------------------------------------------------------------------------------- fine-tuning

def test_a_run_can_be_converted_too_and_a_converted_one_goes_on(folder, corpus, tmp_path, capsys):
    small = ["--data", corpus, "--n-layer", "2", "--d-model", "32", "--block-size", "32",
             "--batch-size", "2", "--steps", "3", "--warmup", "1", "--no-eval", "--device", "cpu"]
    scratch, turned = str(tmp_path / "scratch"), str(tmp_path / "turned")
    assert train.main([*small, "--out", scratch]) == 0
    assert run(scratch, corpus, turned, "--arch", "attnres") == 0
    assert "of the untouched" not in capsys.readouterr().out
    kept = load_checkpoint(turned)
    assert kept["config"]["n_layer"] == 2 and kept["run"]["logit_gap"] < 1e-5
    assert run(turned, corpus, tmp_path / "on", "--steps", "2") == 0     # its own mechanism stays
    on = load_checkpoint(str(tmp_path / "on"))
    assert on["config"] == kept["config"] and on["run"]["logit_gap"] is None
    assert on["run"]["arch"] == "attnres"
    assert run(turned, corpus, tmp_path / "no", "--arch", "vanilla") == 2
    assert "residual=standard, not attnres" in capsys.readouterr().err


@pytest.mark.parametrize("flags, words", [
    (["--size", "nano"], ["--size nano"]),
    (["--n-layer", "3"], ["n_layer=3, not 4"]),
    (["--d-model", "32", "--qk-norm"], ["d_model=32, not 64", "qk_norm=True"]),
    (["--arch", "suppress"], ["qk_norm=True, not False"]),
    (["--block-size", "999"], ["--block-size 999", "256 positions"]),
    (["--tokenizer", "gpt2x"], ["no tokenizer 'gpt2x'"]),
    (["--arch", "gated", "--gate-init", "0.5", "--norm", "post"], ["norm=post"])])
def test_contradictions_are_one_line(folder, corpus, tmp_path, capsys, flags, words):
    assert run(folder, corpus, tmp_path / "x", *flags) == 2
    lines = capsys.readouterr().err.strip().splitlines()
    assert len([x for x in lines if x.startswith("train.py: ")]) == 1
    assert all(word in lines[-1] for word in words), lines[-1]


def test_a_folder_that_is_none_and_one_without_a_tokenizer(folder, corpus, tmp_path, capsys):
    assert train.main(["--init-from", str(tmp_path / "none"), "--data", corpus]) == 2
    assert "no checkpoint at" in capsys.readouterr().err
    assert train.main(["--init-from", folder, "--data", corpus]) == 2
    assert "no tokenizer.json: give --tokenizer" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="missing"):
        load_model(folder, norm="sandwich")


def test_the_folder_s_own_tokenizer_and_a_padded_vocabulary(folder, tmp_path):
    """tokenizer.json beside the weights is found; the model may have more rows than it has ids."""
    tokenizers = pytest.importorskip("tokenizers")
    place = tmp_path / "with"
    place.mkdir()
    for name in ("config.json", "model.safetensors"):
        (place / name).symlink_to(f"{folder}/{name}")
    words = ["<|endoftext|>", "[UNK]", *map(str, range(100)), "the", "cube", "of", "is", "."]
    tk = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(words)},
                                                          unk_token="[UNK]"))
    tk.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tk.add_special_tokens(["<|endoftext|>"])
    tk.save(str(place / "tokenizer.json"))
    text = tmp_path / "cubes.txt"
    text.write_text("".join(f"the cube of {i} is {i ** 3}.\n" for i in range(400)))
    assert train.main(["--init-from", str(place), "--data", str(text), "--block-size", "32",
                       "--batch-size", "2", "--steps", "2", "--warmup", "1", "--out",
                       str(tmp_path / "run"), "--eval-sequences", "2", "--device", "cpu"]) == 0
    kept = load_checkpoint(str(tmp_path / "run"))
    assert kept["config"]["vocab_size"] == 258 > len(words)
    assert kept["run"]["tokenizer"] == str(place / "tokenizer.json")


def test_the_default_recipe_is_gentle_and_flags_override_it(folder):
    def of(*flags):
        args = train.build_parser().parse_args(["--init-from", folder, "--tokenizer", "bytes",
                                                *flags])
        return train.resolve(args)
    recipe, shape = of("--arch", "oasis")
    assert recipe.lr <= 1e-4 and recipe.steps <= 500 and shape["block_size"] == 256 < 512
    assert recipe.size == "tiny" and recipe.null_warmup == recipe.steps // 2
    recipe, shape = of("--lr", "1e-3", "--block-size", "64", "--null-warmup", "7")
    assert (recipe.lr, shape["block_size"], recipe.null_warmup) == (1e-3, 64, 7)


def test_the_study_of_fine_tuning(folder, corpus, tmp_path, capsys):
    """Every arm from the same weights on the same batches; one table of the end, one over steps."""
    flags = ["--study", "finetune", "--seeds", "1", "--arms", "vanilla,oasis", "--init-from",
             folder, "--tokenizer", "bytes", "--data", corpus, "--out", str(tmp_path),
             "--block-size", "32", "--batch-size", "2", "--steps", "4", "--warmup", "1",
             "--probe-every", "2", "--probe-sequences", "2", "--eval-sequences", "2",
             "--device", "cpu"]
    assert train.main(flags) == 0
    said = capsys.readouterr().out
    assert "over training steps" in said
    rows = {arm: {r["step"]: r for r in train.read_log(str(tmp_path / f"{arm}-s0")) if key in r}
            for arm in ("vanilla", "oasis") for key in ["batch"]}
    assert [r["batch"] for r in rows["vanilla"].values()] \
        == [r["batch"] for r in rows["oasis"].values()]
    table = (tmp_path / "table.md").read_text()
    for step in (0, 2, 4):
        assert f"oasis, step {step}" in table and f"vanilla, step {step}" in table
    probes = [r["probe"] for r in train.read_log(str(tmp_path / "oasis-s0")) if "probe" in r]
    assert all(train.evaluation.lookup(p, path) is not None for p in probes
               for _, path, _ in train.OVER_TIME)
    null = [p["null"]["token_mass"] for p in probes]
    assert null[0] < 1e-6 < 1e-3 < null[-1]
    assert train.main(flags) == 0                       # finished: the table again, no training
    assert "runs to do" not in capsys.readouterr().out
    assert train.main(["--study", "finetune", "--seeds", "1"]) == 2
    assert "needs --init-from" in capsys.readouterr().err
    assert train.main(["--study", "ledger", "--init-from", folder]) == 2


# -------------------------------------------------------------------------- memory, recipes, mixes

def head_loss(x, weight, targets, rows):
    from model import HeadLoss
    return HeadLoss.apply(x, weight, targets, rows, torch.is_grad_enabled())


@pytest.mark.parametrize("rows", [1, 7, 40, 1000])
def test_the_loss_in_pieces_is_the_loss(rows):
    """fp64, ignored targets in every piece, one piece of nothing else; both gradients, scaled."""
    g = torch.Generator().manual_seed(0)
    x, w = (torch.randn(*s, generator=g, dtype=torch.float64, requires_grad=True)
            for s in ((40, 12), (97, 12)))
    targets = ids(40)
    targets[::3] = -1
    targets[7:14] = -1
    truth = torch.nn.functional.cross_entropy(x @ w.T, targets, ignore_index=-1)
    expected = torch.autograd.grad(truth / 3, (x, w))
    loss = head_loss(x, w, targets, rows)
    found = torch.autograd.grad(loss / 3, (x, w))
    assert torch.allclose(loss, truth, rtol=1e-12, atol=0)
    for a, b in zip(found, expected):
        assert torch.allclose(a, b, rtol=1e-11, atol=1e-15)
    assert (found[0][targets == -1] == 0).all()
    with torch.no_grad():
        assert torch.allclose(head_loss(x, w, targets, rows), truth, rtol=1e-12, atol=0)


def test_the_loss_in_pieces_in_bf16():
    """Under autocast the products are bf16, sums and softmax fp32: as near the fp64 truth as the
    plain loss under the same autocast."""
    g = torch.Generator().manual_seed(0)
    x, w = (torch.randn(*s, generator=g, requires_grad=True) for s in ((64, 32), (500, 32)))
    targets = ids(64, vocab=500)

    def grads(f, *inputs):
        return torch.autograd.grad(f(*inputs), inputs)
    plain = lambda x, w: torch.nn.functional.cross_entropy(  # noqa: E731
        torch.nn.functional.linear(x, w), targets)
    truth = grads(plain, *(t.detach().double().requires_grad_() for t in (x, w)))
    with torch.autocast("cpu", torch.bfloat16):
        for f, bound in ((plain, 0.02), (lambda x, w: head_loss(x, w, targets, 10), 0.02)):
            for a, b in zip(grads(f, x, w), truth):
                assert a.dtype == torch.float32 and gap(a.double(), b) < bound


@pytest.mark.parametrize("arch, checkpointed", [("vanilla", True), ("ledger", False)])
def test_a_model_learns_the_same_in_pieces(folder, arch, checkpointed):
    """Tied head, padded vocabulary, penalty, loss window, gradient checkpointing."""
    tokens = ids(2, 33, vocab=258)
    y = tokens[:, 1:].clone()
    y[:, :5] = -1
    found = []
    for rows in (0, 16):
        model = convert(folder, arch).double()
        model.loss_rows, model.grad_checkpoint = rows, checkpointed
        logits, loss = model(tokens[:, :-1], y)
        loss.backward()
        assert (logits is None) == bool(rows)
        found.append([loss.detach(), *(p.grad for p in model.parameters())])
    for a, b in zip(*found):
        assert torch.allclose(a, b, rtol=1e-9, atol=1e-12)


def test_pieces_only_where_the_logits_are_many_and_compiled_too(folder):
    model = Transformer(Config(vocab_size=128256, n_layer=1, d_model=8, n_head=1))
    assert model.rows_at_a_time(torch.empty(12, 256, device="meta")) == 2 ** 25 // 128256
    assert model.rows_at_a_time(torch.empty(4, 256, device="meta")) == 0        # 2^17 numbers
    nano = Transformer(Config())
    assert nano.rows_at_a_time(torch.empty(12, 256, device="meta")) == 0
    tokens, losses = ids(2, 33, vocab=258), []
    model = Transformer.from_pretrained(folder)
    model.loss_rows = 16
    for f in (model, torch.compile(model, backend="aot_eager")):
        model.zero_grad()
        loss = f(tokens[:, :-1], tokens[:, 1:])[1]
        loss.backward()
        losses.append((loss.item(), model.embed.weight.grad.norm().item()))
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_training_in_pieces(folder, corpus, tmp_path):
    """The flag reaches the model, and 6 steps end where they end without it, to rounding."""
    for name, flags in (("a", ["--loss-rows", "0"]), ("b", ["--loss-rows", "9"])):
        assert run(folder, corpus, tmp_path / name, "--arch", "attnres", "--dtype", "float32",
                   *flags) == 0
    a, b = ([r["loss"] for r in train.read_log(str(tmp_path / x)) if "loss" in r] for x in "ab")
    assert a == pytest.approx(b, rel=1e-4)
    values = [[r["val_loss"] for r in train.read_log(str(tmp_path / x)) if "val_loss" in r]
              for x in "ab"]
    assert values[0] == pytest.approx(values[1], rel=1e-4)


def test_the_recipe_of_oasis(folder):
    """papers: 100,000 steps, 2,000 of warmup, linear to 0, 4e-4, (0.9, 0.95), 0.1, clip 1, 6 x 32
    windows of 512 tokens, seed 1000; and a flag overrides it."""
    recipe, _ = train.resolve(train.build_parser().parse_args(
        ["--init-from", folder, "--tokenizer", "bytes", "--recipe", "oasis", "--lr", "7e-4"]))
    assert recipe.lr == 7e-4 and recipe.steps == 100000 and recipe.null_warmup == 50000
    recipe, _ = train.resolve(train.build_parser().parse_args(["--recipe", "oasis"]))
    assert (recipe.steps, recipe.warmup, recipe.schedule, recipe.min_lr, recipe.lr) \
        == (100000, 2000, "linear", 0.0, 4e-4)
    assert (recipe.beta1, recipe.beta2, recipe.weight_decay, recipe.clip, recipe.seed) \
        == (0.9, 0.95, 0.1, 1.0, 1000)
    assert recipe.batch_size == 6 * 32 and recipe.micro_batch == 6
    assert recipe.data == "bookcorpus+wiki40b"
    assert train.resolve(train.build_parser().parse_args(["--recipe", "oasis"]))[1]["block_size"] \
        == 512
    assert train.learning_rate(99999, recipe) == 0 < train.learning_rate(51000, recipe) < 2.1e-4


def test_two_corpora_in_one(tmp_path):
    """a+b: every token of both, counted; built once; two tokenizers are an error."""
    texts = [tmp_path / "a.txt", tmp_path / "b.txt"]
    for i, text in enumerate(texts):
        text.write_text(f"line of {'ab'[i]}\n" * 400)
    parts = [data.prepare.load(t, "train", folder=tmp_path) for t in texts]
    both = data.prepare.load(f"{texts[0]}+{texts[1]}", "train", folder=tmp_path)
    assert both.tokens.tolist() == [*parts[0].tokens, *parts[1].tokens]
    assert (both.n_bytes, both.n_words) == tuple(
        sum(getattr(p, k) for p in parts) for k in ("n_bytes", "n_words"))
    before = both.path.stat().st_mtime_ns
    assert data.prepare.load(f"{texts[0]}+{texts[1]}", folder=tmp_path).path == both.path
    assert both.path.stat().st_mtime_ns == before and both.split == "train"
    assert data.prepare.load(f"{texts[0]}+{texts[1]}", "val", folder=tmp_path).split == "val"
    other = data.prepare.write_tokens(tmp_path / "c.bin", [[0, 1]], vocab_size=9, tokenizer="x",
                                      eot=0, bos=0)
    with pytest.raises(data.prepare.DataError, match="a mix needs one"):
        data.prepare.mixed([both, data.prepare.TokenFile.open(other)], tmp_path)
    with pytest.raises(data.prepare.DataError, match="no corpus or file"):
        data.prepare.load(f"{texts[0]}+nowhere", folder=tmp_path)


def test_the_table_of_published_starts(folder, corpus, capsys, monkeypatch):
    few = ("AttnRes: the mean", "OASIS, r = 8, nulls at 0", "Ledger", "delta", "clipped softmax")
    monkeypatch.setattr(train, "STARTS", {k: train.STARTS[k] for k in few})
    assert train.main(["--starts", "--init-from", folder, "--tokenizer", "bytes", "--data",
                       corpus]) == 0
    rows = {line.split(" | ")[0].strip("| "): line.strip("| ").split(" | ")
            for line in capsys.readouterr().out.splitlines() if line.startswith("| ")}
    assert set(few) < set(rows)
    for label in few:
        published, near = rows[label][2:]
        if label in ("delta", "clipped softmax"):
            assert near == "none" and float(published) > 1e-3
        else:
            assert float(near) < 1e-3 < float(published)
    assert train.main(["--starts"]) == 2
    assert all(set(fields) <= {f.name for f in dataclasses.fields(Config)} and arch in PRESETS
               for arch, fields in train.STARTS.values())
