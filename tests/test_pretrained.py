"""Pretrained folders: transformers' logits and greedy text, every form of the files, every refusal.

The tiny models are random, but not as initialised: gains differ from one and scores spread, so that
a gain in the wrong place, a pair rotated the wrong way or a head served by the wrong keys shows.
"""
import dataclasses
import json
import os
import subprocess
import sys
from fnmatch import fnmatch
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from data import get_tokenizer
from model import (PRESETS, CheckpointError, Config, Transformer, find_tokenizer, hf_config,
                   is_mechanism, load_model, save_checkpoint)

st = pytest.importorskip("safetensors.torch")

LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 32.0,
               "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64}
SHAPE = dict(vocab_size=97, hidden_size=48, intermediate_size=80, num_hidden_layers=3,
             num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256,
             rms_norm_eps=1e-5)
# name -> model_type and config.json; hidden / heads is 12, so every head_dim here is unusual
MODELS = {
    "llama-3.2": ("llama", dict(SHAPE, head_dim=24, rope_parameters=LLAMA3_ROPE,
                                tie_word_embeddings=True)),
    "llama-80": ("llama", dict(SHAPE, head_dim=80, num_key_value_heads=1, mlp_bias=True,
                               rope_parameters={"rope_type": "default", "rope_theta": 10000.0})),
    "qwen3": ("qwen3", dict(SHAPE, head_dim=20, rms_norm_eps=1e-6, tie_word_embeddings=True,
                            rope_parameters={"rope_type": "default", "rope_theta": 1e6})),
    "qwen3-untied": ("qwen3", dict(SHAPE, head_dim=16, num_key_value_heads=4,
                                   rope_parameters={"rope_type": "default", "rope_theta": 1e6})),
}


def ids(*shape, seed=0, vocab=97):
    return torch.randint(vocab, shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def shake(model, seed=0):
    """Random weights of a size at which attention is peaked and gains and biases matter."""
    g = torch.Generator().manual_seed(seed)
    for p in {id(p): p for p in model.parameters()}.values():
        draw = torch.randn(p.shape, generator=g)
        p.copy_(draw * 1.5 / p.shape[-1] ** 0.5 if p.ndim > 1 else 1 + 0.3 * draw)
    return model


def gap(ours, truth) -> float:
    """Largest difference, as a share of the largest logit."""
    return ((ours - truth).abs().max() / truth.abs().max()).item()


# ------------------------------------------------------------------- against transformers itself

@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    """name -> a random model of transformers and the folder that its save_pretrained wrote."""
    made = {}

    def make(name):
        if name not in made:
            import transformers
            kind, fields = MODELS[name]
            config = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}[kind]
            model = {"llama": transformers.LlamaForCausalLM,
                     "qwen3": transformers.Qwen3ForCausalLM}[kind](config(**fields))
            folder = tmp_path_factory.mktemp(name)
            shake(model.eval()).save_pretrained(folder)
            made[name] = model, folder
        return made[name]
    return make


@pytest.mark.hf
@pytest.mark.parametrize("name", MODELS)
def test_logits_equal_transformers(reference, name):
    """200 positions, far past the 64 that the scaled rope knew; parameters counted alike."""
    theirs, folder = reference(name)
    model, tokens = Transformer.from_pretrained(folder), ids(2, 200)
    with torch.no_grad():
        truth, ours = theirs(tokens).logits, model(tokens)[0]
    assert ours.dtype == torch.float32
    assert gap(ours, truth) < 1e-5
    assert model.count_params()["total"] == theirs.num_parameters()
    assert model.count_params()["mechanism"] == 0 and model.new_parameters == ()


@pytest.mark.hf
@pytest.mark.parametrize("name, field, value", [
    ("llama-3.2", "rope_scaling", None), ("llama-3.2", "rope_theta", 10000.0),
    ("llama-3.2", "rope_scaling", dict(LLAMA3_ROPE, factor=8.0)), ("qwen3", "rope_theta", 10000.0),
    ("qwen3", "norm_eps", 1e-2), ("llama-3.2", "norm_eps", 1e-2)])
def test_what_the_config_says_matters(reference, name, field, value):
    """The equality above is no accident: each of these fields, read wrongly, breaks it."""
    theirs, folder = reference(name)
    wrong = Transformer.from_pretrained(folder, **{field: value})
    with torch.no_grad():
        assert gap(wrong(ids(2, 200))[0], theirs(ids(2, 200)).logits) > 1e-3


@pytest.mark.hf
@pytest.mark.parametrize("name", MODELS)
def test_greedy_text_equals_transformers_left_padded(reference, name):
    """Prompts of 1, 7 and 32 tokens in one padded batch, with a key/value cache; and each alone."""
    theirs, folder = reference(name)
    model, lengths, new = Transformer.from_pretrained(folder), (1, 7, 32), 16
    prompts = [ids(n, seed=n) for n in lengths]
    rows = torch.stack([torch.cat((torch.full((32 - n,), 5), p)) for n, p in zip(lengths, prompts)])
    mask = torch.arange(32) >= 32 - torch.tensor(lengths)[:, None]
    truth = theirs.generate(rows, attention_mask=mask.long(), max_new_tokens=new, do_sample=False,
                            eos_token_id=None, pad_token_id=5)
    ours = model.generate(rows, new, temperature=0, pad_mask=mask)
    assert torch.equal(ours, truth)
    assert len(set(ours[2, 32:].tolist())) > 3              # no text of one token, equal by luck
    for row, prompt in zip(ours, prompts):
        alone = model.generate(prompt[None], new, temperature=0)[0, len(prompt):]
        assert torch.equal(alone, row[32:])


@pytest.mark.hf
def test_shards_equal_the_single_file(reference, tmp_path):
    theirs, folder = reference("llama-3.2")
    theirs.save_pretrained(tmp_path, max_shard_size="40KB")
    shards = sorted(tmp_path.glob("*.safetensors"))
    assert len(shards) > 2 and not (tmp_path / "model.safetensors").exists()
    whole, pieces = Transformer.from_pretrained(folder), Transformer.from_pretrained(tmp_path)
    for (name, a), (_, b) in zip(whole.named_parameters(), pieces.named_parameters()):
        assert torch.equal(a, b), name
    shards[1].write_bytes(shards[1].read_bytes()[:-10])
    with pytest.raises(CheckpointError, match=f"{shards[1].name} is missing, truncated"):
        Transformer.from_pretrained(tmp_path)
    shards[1].unlink()
    with pytest.raises(CheckpointError, match=f"{shards[1].name} is missing"):
        Transformer.from_pretrained(tmp_path)


@pytest.mark.hf
def test_bf16(reference, tmp_path):
    """bf16 files widen exactly by default; dtype=bf16 keeps them and agrees to bf16's precision."""
    import transformers
    reference("qwen3")[0].to(torch.bfloat16).save_pretrained(tmp_path)
    reference("qwen3")[0].float()
    load = transformers.AutoModelForCausalLM.from_pretrained
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.bfloat16, 5e-2)):
        model = Transformer.from_pretrained(tmp_path, dtype=dtype)
        theirs = load(tmp_path, dtype=dtype)
        assert {p.dtype for p in model.parameters()} == {dtype}
        with torch.no_grad():
            assert gap(model(ids(2, 50))[0].float(), theirs(ids(2, 50)).logits.float()) < tolerance


# --------------------------------------------------------------------------- forms of the files

LLAMA = {"model_type": "llama", "hidden_act": "silu", "attention_bias": False,
         **MODELS["llama-3.2"][1]}


def sizes(config: dict) -> dict:
    """Tensor name -> shape of a Llama or Qwen3, written out by hand."""
    d, f, D = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    H, G = config["num_attention_heads"], config["num_key_value_heads"]
    block = {"input_layernorm": (d,), "post_attention_layernorm": (d,),
             "self_attn.q_proj": (H * D, d), "self_attn.k_proj": (G * D, d),
             "self_attn.v_proj": (G * D, d), "self_attn.o_proj": (d, H * D),
             "mlp.gate_proj": (f, d), "mlp.up_proj": (f, d), "mlp.down_proj": (d, f)}
    found = {f"model.layers.{i}.{part}.weight": shape for part, shape in block.items()
             for i in range(config["num_hidden_layers"])}
    return found | {"model.embed_tokens.weight": (config["vocab_size"], d),
                    "model.norm.weight": (d,)}


def write(folder, config=LLAMA, tensors=(), without=(), dtype=torch.float32) -> Path:
    """A random folder; `tensors` are added, `without` left out. In a config, ... drops a field."""
    g = torch.Generator().manual_seed(0)
    made = {name: (torch.randn(shape, generator=g) / shape[-1] ** 0.5).to(dtype)
            for name, shape in sizes(LLAMA | config).items()}
    made = {name: tensor for name, tensor in made.items() if name not in without}
    st.save_file({**made, **dict(tensors)}, Path(folder, "model.safetensors"))
    Path(folder, "config.json").write_text(json.dumps(
        {key: value for key, value in (LLAMA | config).items() if value is not ...}))
    return folder


def refused(folder, match, **options):
    with pytest.raises(CheckpointError, match=match) as error:
        Transformer.from_pretrained(folder, **options)
    assert "\n" not in str(error.value)


def test_old_and_new_config_are_one_model(tmp_path):
    """rope_theta beside rope_scaling, as until 2025, or both inside rope_parameters."""
    new = hf_config(write(tmp_path))
    scaling = {key: value for key, value in LLAMA3_ROPE.items() if key != "rope_theta"}
    old = {"rope_parameters": ..., "rope_theta": 500000.0, "rope_scaling": scaling}
    assert hf_config(write(tmp_path, old)) == new
    assert new.rope_theta == 500000.0 and new.rope_scaling["factor"] == 32.0
    plain = {"rope_parameters": ..., "rope_theta": 1000.0, "rope_scaling": None}
    assert hf_config(write(tmp_path, plain)).rope_scaling is None


@pytest.mark.parametrize("change, match", [
    ({"rope_parameters": ...}, "lacks rope_theta"),
    ({"rope_parameters": {"rope_type": "default"}}, "lacks rope_theta"),
    ({"rope_parameters": {**LLAMA3_ROPE, "factor": None}}, "lacks factor"),
    ({"rope_parameters": {**LLAMA3_ROPE, "rope_type": "yarn"}}, "rope 'yarn'"),
    ({"rope_parameters": {**LLAMA3_ROPE, "partial_rotary_factor": 0.5}}, "whole heads"),
    ({"rms_norm_eps": ...}, "lacks rms_norm_eps"),
    ({"num_hidden_layers": ..., "hidden_size": None}, "lacks num_hidden_layers, hidden_size"),
    ({"model_type": "gpt_neox"}, "model_type 'gpt_neox' is not one of llama, qwen3"),
    ({"attention_bias": True}, "attention_bias=True"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu'"),
    ({"use_sliding_window": True}, "use_sliding_window=True"),
    ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types"),
    ({"quantization_config": {"bits": 4}}, "quantization_config"),
    ({"rope_scaling": {**LLAMA3_ROPE, "factor": 2.0}}, "rope_scaling and another rope_parameters"),
    ({"rope_parameters": {**LLAMA3_ROPE, "factor": "8"}}, "lacks factor"),
    ({"rope_parameters": "llama3"}, "wrong type"),
    ({"layer_types": 5}, "wrong type"),
    ({"model_type": ["llama"]}, "wrong type"),
])
def test_a_config_we_cannot_honour_is_an_error(tmp_path, change, match):
    """Above all a missing rope_theta, which is 10000 nowhere that matters."""
    write(tmp_path)
    config = {key: value for key, value in (LLAMA | change).items() if value is not ...}
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused(tmp_path, match)


@pytest.mark.parametrize("change, match", [
    ({"vocab_size": "96"}, "vocab_size='96' must be a whole number"),
    ({"num_hidden_layers": 2.0}, "n_layer=2.0 must be a whole number"),
    ({"num_attention_heads": 0, "head_dim": None}, "n_head=0 must be at least 1"),
    ({"rms_norm_eps": "1e-6"}, "norm_eps='1e-6' must be a finite number"),
    ({"rms_norm_eps": -1.0}, "norm_eps=-1.0 not negative"),
    ({"rope_parameters": {**LLAMA3_ROPE, "rope_theta": 0}}, "rope_theta=0 must be positive"),
])
def test_a_config_of_impossible_values_is_an_error(tmp_path, change, match):
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **change}))
    with pytest.raises(ValueError, match=match):
        hf_config(tmp_path)


@pytest.mark.parametrize("shards", [
    "model.safetensors", ["model.safetensors"], None, {"a": 1},
    {"model.norm.weight": "../model-00001-of-00002.safetensors"},
    {"model.norm.weight": "/tmp/model-00001-of-00002.safetensors"}])
def test_an_index_names_files_of_its_own_folder(tmp_path, shards):
    write(tmp_path)
    os.remove(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    refused(tmp_path, "weight_map must name files of this folder")


def test_an_override_supplies_what_the_config_lacks(tmp_path):
    write(tmp_path, {"rope_parameters": ..., "max_position_embeddings": ...})
    refused(tmp_path, "lacks max_position_embeddings, rope_theta")
    model = Transformer.from_pretrained(tmp_path, rope_theta=10000.0, block_size=32)
    assert (model.config.rope_theta, model.config.block_size) == (10000.0, 32)
    refused(tmp_path, "unknown Config fields: colour", rope_theta=1.0, block_size=9, colour=3)
    with pytest.raises(ValueError, match="residual='highway'"):
        Transformer.from_pretrained(tmp_path, rope_theta=1.0, block_size=9, residual="highway")


def test_head_dim_is_read_or_the_architecture_s_own(tmp_path):
    """Absent or null, it is d / heads in a Llama and 128 in a Qwen3, whatever its width."""
    def of(**change):
        (tmp_path / "config.json").write_text(json.dumps(LLAMA | change))
        return hf_config(tmp_path)
    assert of().head_dim == 24 and of(head_dim=None).head_dim == 12
    assert of().n_kv_head == 2 and of(num_key_value_heads=None).n_kv_head == 4
    qwen = of(head_dim=None, model_type="qwen3")
    assert qwen.head_dim == 128 and qwen.qk_norm


REAL = {    # (config.json's facts, parameters with a tied head counted once)
    "Llama-3.2-1B": (dict(
        model_type="llama", vocab_size=128256, hidden_size=2048, intermediate_size=8192,
        num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8, head_dim=64,
        max_position_embeddings=131072, rms_norm_eps=1e-5, tie_word_embeddings=True,
        rope_theta=500000.0,
        rope_scaling={**LLAMA3_ROPE, "original_max_position_embeddings": 8192}),
        1_235_814_400),
    "Qwen3-0.6B": (dict(
        model_type="qwen3", vocab_size=151936, hidden_size=1024, intermediate_size=3072,
        num_hidden_layers=28, num_attention_heads=16, num_key_value_heads=8, head_dim=128,
        max_position_embeddings=40960, rms_norm_eps=1e-6, tie_word_embeddings=True,
        rope_theta=1000000, rope_scaling=None, use_sliding_window=False, sliding_window=None),
        596_049_920)}


@pytest.mark.parametrize("name", REAL)
def test_true_sizes(tmp_path, name):
    config, count = REAL[name]
    (tmp_path / "config.json").write_text(json.dumps(config))
    with torch.device("meta"):
        assert Transformer(hf_config(tmp_path)).count_params()["total"] == count


def test_missing_unexpected_and_misshapen_tensors_are_named(tmp_path):
    gone, k = "model.layers.1.mlp.up_proj.weight", "model.layers.0.self_attn.k_proj.weight"
    extra = {"model.layers.2.self_attn.q_proj.bias": torch.zeros(96), k: torch.zeros(47, 48)}
    write(tmp_path, tensors=extra, without=(gone, k))
    refused(tmp_path, rf"missing {gone}; unexpected model.layers.2.self_attn.q_proj.bias; {k} is "
                      r"\(47, 48\), not \(48, 48\)")
    write(tmp_path, {"num_hidden_layers": 3})
    refused(tmp_path, "unexpected model.layers.2.input_layernorm.weight.*; and 1 more", n_layer=2)
    refused(tmp_path, "missing pos_embed.weight", pos="learned")
    refused(tmp_path, "missing lm_head.weight", tied_head=False)
    write(tmp_path, tensors={k: torch.zeros(48, 48, dtype=torch.int8)}, without=(k,))
    refused(tmp_path, f"{k} is I8: quantised")
    inverse = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(12)}
    write(tmp_path, tensors=inverse)
    assert Transformer.from_pretrained(tmp_path).config.n_layer == 3


def test_a_tied_head_stored_twice_or_alone(tmp_path):
    """lm_head beside the embedding: equal, it is tied and counted once; unequal, an error."""
    write(tmp_path)
    once = Transformer.from_pretrained(tmp_path)
    embedding = st.load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    write(tmp_path, tensors={"lm_head.weight": embedding.clone()})
    twice = Transformer.from_pretrained(tmp_path)
    write(tmp_path, tensors={"lm_head.weight": embedding}, without=["model.embed_tokens.weight"])
    for model in (once, twice, Transformer.from_pretrained(tmp_path)):
        assert model.head.weight is model.embed.weight
        assert model.count_params() == once.count_params()
        assert torch.equal(model(ids(1, 9))[0], once(ids(1, 9))[0])
    embedding[-1, -1] += 1e-3               # the very last number
    write(tmp_path, tensors={"lm_head.weight": embedding})
    refused(tmp_path, "lm_head.weight is not the embedding, though config.json ties them")
    both = Transformer.from_pretrained(tmp_path, tied_head=False)
    assert both.count_params()["total"] == once.count_params()["total"] + embedding.numel()


def test_ties_survive_saving_and_loading(tmp_path):
    model, _ = load_model(write(tmp_path), block_size=64)
    run = tmp_path / "run"
    run.mkdir()
    save_checkpoint(str(run / "checkpoint.pt"),
                    {"config": dataclasses.asdict(model.config), "model": model.state_dict()})
    again = Transformer.from_pretrained(run)
    assert again.config == model.config and again.head.weight is again.embed.weight
    assert torch.equal(again(ids(1, 9))[0], model(ids(1, 9))[0])
    assert next(Transformer.from_pretrained(run, dtype=torch.bfloat16).parameters()).dtype \
        == torch.bfloat16
    wide = model.to(torch.float64)
    assert wide.head.weight is wide.embed.weight


def test_damaged_or_foreign_folders(tmp_path):
    path = write(tmp_path) / "model.safetensors"
    whole = path.read_bytes()
    for size in (0, 4, 100, len(whole) - 1):
        path.write_bytes(whole[:size])
        refused(tmp_path, "model.safetensors is missing, truncated")
    path.unlink()

    class Bomb:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "exploded"),)
    torch.save({"model.norm.weight": Bomb()}, tmp_path / "pytorch_model.bin")
    refused(tmp_path, "model.safetensors is missing")
    assert not (tmp_path / "exploded").exists()
    (tmp_path / "config.json").write_text('{"model_type": "lla')
    refused(tmp_path, "cannot read .*config.json")
    (tmp_path / "config.json").unlink()
    refused(tmp_path, "no checkpoint at")


# ----------------------------------------------------------------------- mechanisms and overrides

def test_block_size_may_be_cut(tmp_path):
    """A model of 256 positions run at 16: same logits there, and generation rolls on past it."""
    long = Transformer.from_pretrained(write(tmp_path))
    short = Transformer.from_pretrained(tmp_path, block_size=16)
    assert torch.equal(long(ids(1, 16))[0], short(ids(1, 16))[0])
    assert short.generate(ids(1, 4), 30, temperature=0).shape == (1, 34)


@pytest.mark.parametrize("preset", [p for p in PRESETS if p != "suppress"])
def test_a_mechanism_keeps_its_own_initial_values(tmp_path, preset):
    """Backbone weights are the file's, added ones those of a fresh model, and they are listed."""
    fields = dict(PRESETS[preset])
    if "gate" in fields:
        fields["gate"] = "head"             # bondarenko's wants d = H D
    write(tmp_path)
    plain = dict(Transformer.from_pretrained(tmp_path).named_parameters())
    model = Transformer.from_pretrained(tmp_path, seed=3, **fields)
    fresh = dict(Transformer(model.config, seed=3).named_parameters())
    own = dict(model.named_parameters())
    assert set(own) == set(fresh) and set(model.new_parameters) == set(own) - set(plain)
    for name in own:
        expected = fresh[name] if is_mechanism(name) else plain[name]
        assert torch.equal(own[name], expected), name
    assert model(ids(1, 9))[0].isfinite().all()


def test_a_backbone_is_never_completed_by_random_weights(tmp_path):
    write(tmp_path)
    refused(tmp_path, "missing model.layers.0.self_attn.q_norm.weight", **PRESETS["suppress"])
    refused(tmp_path, "missing out_norms.0.weight", norm="sandwich")


def test_a_learned_null_logit_starts_where_told(tmp_path):
    """normalizer=sink with null_init -30 is the softmax that the backbone was trained with."""
    plain = Transformer.from_pretrained(write(tmp_path))
    model = Transformer.from_pretrained(tmp_path, normalizer="sink", null_init=-30.0)
    assert sorted(model.new_parameters) == [f"sublayers.{l}.null_logit" for l in (0, 2, 4)]
    with torch.no_grad():
        assert gap(model(ids(2, 40))[0], plain(ids(2, 40))[0]) < 1e-5


# ------------------------------------------------------------------------------ tokenizer, memory

def test_the_folder_s_tokenizer_is_found(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    write(tmp_path)
    assert find_tokenizer(tmp_path) is None and load_model(tmp_path)[1]["run"] == {}
    tk = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tk.add_special_tokens(["</s>"])
    tk.save(str(tmp_path / "tokenizer.json"))
    model, checkpoint = load_model(tmp_path)
    tokenizer = get_tokenizer(checkpoint["run"]["tokenizer"])
    assert checkpoint["run"]["tokenizer"] == find_tokenizer(tmp_path)
    assert tokenizer.vocab_size == 3 < model.config.vocab_size      # rows may outnumber ids
    assert checkpoint["config"] == dataclasses.asdict(model.config)
    assert checkpoint["model"].keys() == model.state_dict().keys()


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="reads /proc")
def test_loading_takes_the_checkpoint_and_the_model(tmp_path):
    """Peak memory of a bf16 file widened to fp32: at most 1.2 times the file plus the model."""
    big = dict(vocab_size=20000, hidden_size=512, intermediate_size=2048, num_hidden_layers=4,
               head_dim=64, num_attention_heads=8, num_key_value_heads=8)
    (tmp_path / "small").mkdir(), (tmp_path / "big").mkdir()
    write(tmp_path / "small"), write(tmp_path / "big", big, dtype=torch.bfloat16)
    code = f"""
import sys
sys.path.insert(0, {str(Path(__file__).resolve().parent.parent)!r})
from model import Transformer
def kib(key):
    return int(next(l for l in open("/proc/self/status") if l.startswith(key)).split()[1])
Transformer.from_pretrained({str(tmp_path / "small")!r})
before = kib("VmRSS")
model = Transformer.from_pretrained({str(tmp_path / "big")!r})
print(1024 * (kib("VmHWM") - before), 4 * model.count_params()["total"])
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    used, size = map(int, out.stdout.split())
    file = (tmp_path / "big" / "model.safetensors").stat().st_size
    assert size < used < 1.2 * file + size, (used / 1e6, file / 1e6, size / 1e6)


# -------------------------------------------------------------------------------------- hub ids

@pytest.fixture
def hub(monkeypatch):
    """huggingface_hub whose snapshot_download does what `hub.answer` does, and keeps the calls."""
    module = pytest.importorskip("huggingface_hub")

    fake = SimpleNamespace(calls=[], answer=None)

    def snapshot_download(repo, **options):
        fake.calls.append((repo, options))
        return fake.answer()
    monkeypatch.setattr(module, "snapshot_download", snapshot_download)
    return fake


def test_nothing_is_downloaded_unless_asked(tmp_path, hub):
    def absent():
        raise FileNotFoundError("not in the cache\nsecond line")
    hub.answer = absent
    refused("owner/model-1.5B", "no such model in the Hugging Face cache .*download=True")
    assert hub.calls[0][1]["local_files_only"] is True
    refused("owner/model-1.5B", "could not download owner/model-1.5B: not in the cache$",
            download=True)
    hub.answer = lambda: str(write(tmp_path))
    assert Transformer.from_pretrained("owner/model-1.5B", download=True).config.d_model == 48
    repo, options = hub.calls[-1]
    assert repo == "owner/model-1.5B" and options.pop("local_files_only") is False
    assert options.keys() == {"allow_patterns"}             # above all, no token
    wanted = ["config.json", "model.safetensors", "model-00001-of-00002.safetensors",
              "model.safetensors.index.json", "tokenizer.json", "tokenizer_config.json"]
    others = ["pytorch_model.bin", "original/consolidated.00.pth", "onnx/model.onnx", "run.py"]
    assert [name for name in wanted + others
            if any(fnmatch(name, pattern) for pattern in options["allow_patterns"])] == wanted


def test_paths_are_no_hub_ids(tmp_path, hub, monkeypatch):
    hub.answer = lambda: pytest.fail("asked the hub")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "model").mkdir(parents=True)
    write(tmp_path / "owner" / "model")
    assert Transformer.from_pretrained("owner/model").config.d_model == 48
    for path in ("nowhere", "../owner", "./owner", "a/b/c", str(tmp_path / "none")):
        refused(path, "no checkpoint at", download=True)


def test_a_gated_model_names_the_page(hub):
    from huggingface_hub.errors import GatedRepoError
    error = GatedRepoError.__new__(GatedRepoError)          # its own __init__ wants a response
    Exception.__init__(error, "403 Client Error\nAccess to model is restricted")

    def gated():
        raise error
    hub.answer = gated
    refused("owner/gated", "accept its licence at https://huggingface.co/owner/gated, log in",
            download=True)


def test_without_the_optional_packages_a_line_says_what_to_install(tmp_path, monkeypatch):
    write(tmp_path)
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    refused(tmp_path, "pip install safetensors")
    refused("owner/model", "pip install huggingface_hub")


@pytest.mark.parametrize("bos", [False, True])
def test_eval_measures_a_pretrained_folder_and_leaves_it_alone(tmp_path, monkeypatch, bos):
    """Results go to runs/NAME; BOS is shown if the folder's tokenizer puts one before a text."""
    tokenizers = pytest.importorskip("tokenizers")
    import eval as evaluation
    vocabulary = {"<s>": 0, "a": 1, "b": 2, "<unk>": 3}
    tk = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    tk.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tk.add_special_tokens(["<s>", "<eos>"])
    if bos:
        tk.post_processor = tokenizers.processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 0)])
    folder = tmp_path / "tiny-llama"
    folder.mkdir()
    write(folder)
    tk.save(str(folder / "tokenizer.json"))
    before = {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}
    (tmp_path / "text.txt").write_text("a b b a\n" * 12000)
    monkeypatch.chdir(tmp_path)
    command = [str(folder), "--text", "text.txt", "--n-sequences", "2", "--no-figures"]
    assert evaluation.main(command) == 0
    protocol = json.loads(Path("runs/tiny-llama/metrics.json").read_text())["protocol"]
    assert protocol["T"] == min(512, LLAMA["max_position_embeddings"])
    assert protocol["bos_policy"] == ("window" if bos else "none")
    assert protocol["first_ids"][0] == (0 if bos else tk.token_to_id("<eos>"))
    assert {path.name: path.stat().st_mtime_ns for path in folder.iterdir()} == before


# --------------------------------------------------------------------------- the real SmolLM2-135M

@pytest.fixture(scope="module")
def smollm2():
    folder = os.environ.get("SMOLLM2")
    if not folder:
        pytest.skip("SMOLLM2 does not name the folder of SmolLM2-135M")
    transformers = pytest.importorskip("transformers")
    return (folder, Transformer.from_pretrained(folder, block_size=512),
            transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval())


@pytest.mark.hf
def test_smollm2_logits(smollm2):
    folder, model, theirs = smollm2
    tokenizer = get_tokenizer(find_tokenizer(folder))
    text = tokenizer.encode("Attention sinks hold the mass that a head does not need. " * 20)
    tokens = torch.stack((torch.from_numpy(text[:200].astype("int64")), ids(200, vocab=49152)))
    with torch.no_grad():
        assert gap(model(tokens)[0], theirs(tokens).logits) < 1e-5
    assert model.count_params()["total"] == theirs.num_parameters() == 134_515_008


@pytest.mark.hf
def test_smollm2_greedy_text(smollm2):
    folder, model, theirs = smollm2
    tokenizer = get_tokenizer(find_tokenizer(folder))
    texts = ("The", "The capital of France is", "One day a small robot found " * 5)
    prompts = [torch.from_numpy(tokenizer.encode(t).astype("int64")) for t in texts]
    width = max(map(len, prompts))
    rows = torch.stack([torch.cat((torch.full((width - len(p),), 2), p)) for p in prompts])
    mask = torch.stack([torch.arange(width) >= width - len(p) for p in prompts])
    truth = theirs.generate(rows, attention_mask=mask.long(), max_new_tokens=16, do_sample=False,
                            eos_token_id=None, pad_token_id=2)
    ours = model.generate(rows, 16, temperature=0, pad_mask=mask)
    assert torch.equal(ours, truth)
    assert "Paris" in tokenizer.decode(ours[1])
