"""Token files, tokenizers, windows and corpora: what must never go wrong silently."""
import hashlib
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import types
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import data  # noqa: E402
import eval as evaluation  # noqa: E402
from data import prepare  # noqa: E402
from data.prepare import (DataError, TokenFile, TokenWriter, Windows, get_tokenizer,  # noqa: E402
                          load, write_tokens)

BYTES = dict(vocab_size=258, tokenizer="bytes", eot=256, bos=257)


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """Nothing here may open a connection."""
    def refuse(*_, **__):
        raise OSError("a test tried to use the network")
    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "create_connection", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture(scope="module")
def stdlib(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stdlib")
    return {split: load("stdlib", split, folder=folder) for split in ("train", "val")}


def token_file(path, ids=range(100), **header):
    return TokenFile.open(write_tokens(path, [np.array(ids)], **(BYTES | header)))


# ------------------------------------------------------------------------------ token files

def test_a_token_file_returns_what_was_written(tmp_path):
    parts = [np.arange(5), np.array([], dtype=np.uint16), np.array([257, 0, 256])]
    file = TokenFile.open(write_tokens(tmp_path / "a.bin", iter(parts), **BYTES, n_bytes=6,
                                       n_words=2, split="val", source="here"))
    assert file.tokens.tolist() == [0, 1, 2, 3, 4, 257, 0, 256] and len(file) == 8
    assert (file.vocab_size, file.tokenizer, file.eot, file.bos) == (258, "bytes", 256, 257)
    assert (file.n_bytes, file.n_words, file.split, file.source) == (6, 2, "val", "here")
    assert file.sha256 == hashlib.sha256(file.tokens.astype("<u2").tobytes()).hexdigest()
    assert isinstance(file.tokens, np.memmap) and not file.tokens.flags.writeable
    file.verify()
    assert list(tmp_path.iterdir()) == [tmp_path / "a.bin"]     # no temporary file is left


@pytest.mark.parametrize("vocab, dtype", [(258, "uint16"), (65536, "uint16"), (65537, "uint32"),
                                          (128256, "uint32")])
def test_dtype_follows_the_vocabulary(tmp_path, vocab, dtype):
    file = token_file(tmp_path / "a.bin", [0, vocab - 1], vocab_size=vocab)
    assert file.dtype == dtype and file.tokens.dtype == dtype
    assert file.tokens.tolist() == [0, vocab - 1]       # nothing wrapped
    x, y = Windows(file, 1, 4).batch(0)
    assert x.unique().tolist() == [0] and y.unique().tolist() == [vocab - 1]


@pytest.mark.parametrize("bad", [[258], [-1], [3, 70000]])
def test_ids_outside_the_vocabulary_are_refused_and_leave_no_file(tmp_path, bad):
    with pytest.raises(DataError, match="do not fit a vocabulary of 258"):
        write_tokens(tmp_path / "a.bin", [np.arange(10), np.array(bad)], **BYTES)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_the_old_file(tmp_path):
    token_file(tmp_path / "a.bin", [1, 2, 3])

    def full_disk():
        yield np.arange(4)
        raise OSError(28, "No space left on device")
    with pytest.raises(OSError):
        write_tokens(tmp_path / "a.bin", full_disk(), **BYTES)
    assert TokenFile.open(tmp_path / "a.bin").tokens.tolist() == [1, 2, 3]
    assert [p.name for p in tmp_path.iterdir()] == ["a.bin"]


@pytest.mark.parametrize("keep, message", [
    (0, "not a token file"), (5, "not a token file"), (8, "truncated inside its header"),
    (15, "truncated"), (60, "truncated"), (4095, "truncated"), (4096, "truncated or padded"),
    (4097, "truncated or padded"), (4295, "truncated or padded")])
def test_truncated_anywhere(tmp_path, keep, message):
    path = token_file(tmp_path / "a.bin").path
    whole = path.read_bytes()
    assert len(whole) == 4096 + 200
    path.write_bytes(whole[:keep])
    with pytest.raises(DataError, match=message) as error:
        TokenFile.open(path)
    assert "\n" not in str(error.value) and str(path) in str(error.value)


def test_damage_is_named(tmp_path):
    path = token_file(tmp_path / "a.bin").path
    whole = path.read_bytes()
    cases = {"not a token file": b"\x93NUMPY" + whole[6:],
             "truncated or padded": whole + b"\0",
             "version 2, this program reads 1": whole[:8] + b"\2\0\0\0" + whole[12:],
             "damaged header": whole.replace(b'"n_tokens": 100', b'"n_tokens": 900'),
             "not a token file ": whole[:6] + b"\n\n" + whole[8:]}   # after a text-mode copy
    for message, content in cases.items():
        path.write_bytes(content)
        with pytest.raises(DataError, match=message.strip()):
            TokenFile.open(path)
    path.write_bytes(whole[:-1] + b"\1")        # a flipped bit: only the hash can tell
    with pytest.raises(DataError, match="damaged"):
        TokenFile.open(path).verify()
    for missing in (tmp_path / "none.bin", tmp_path):
        with pytest.raises(DataError, match="cannot open"):
            TokenFile.open(missing)


def rewrite_header(path, **changes):
    """Forge a header whose checksum is right."""
    import zlib
    head = path.read_bytes()
    _, _, length, _ = data.PREFIX.unpack_from(head)
    header = json.loads(head[data.PREFIX.size:data.PREFIX.size + length]) | changes
    text = json.dumps({k: v for k, v in header.items() if v is not None}).encode()
    prefix = data.PREFIX.pack(data.MAGIC, data.VERSION, len(text), zlib.crc32(text))
    path.write_bytes((prefix + text).ljust(4096, b"\0") + head[4096:])


def test_a_wrong_vocabulary_is_found(tmp_path):
    path = token_file(tmp_path / "a.bin").path
    rewrite_header(path, vocab_size=50)
    with pytest.raises(DataError, match="holds id 99, its vocabulary is 50"):
        TokenFile.open(path).verify()
    windows = Windows(TokenFile.open(path), 98, 2)
    with pytest.raises(DataError, match="holds id 99, its vocabulary is 50"):
        windows.batch(0)
    rewrite_header(path, vocab_size=128256)
    with pytest.raises(DataError, match="uint16 is the wrong type"):
        TokenFile.open(path)
    for change in ({"eot": None}, {"n_tokens": "100"}, {"n_tokens": -1, "vocab_size": 258}):
        rewrite_header(path, **change)
        with pytest.raises(DataError):
            TokenFile.open(path)


def test_load_refuses_another_tokenizer_and_finds_the_other_split(tmp_path):
    train = token_file(tmp_path / "c-bytes-train.bin", split="train")
    with pytest.raises(DataError, match="no val file lies beside it"):
        load(train.path, "val")
    token_file(tmp_path / "c-bytes-val.bin", [7], split="val")
    assert load(train.path, "val").tokens.tolist() == [7]
    assert load(train.path).split == "train"
    other = token_file(tmp_path / "d.bin", tokenizer="gpt2", vocab_size=50257, eot=1, bos=1)
    with pytest.raises(DataError, match="made with the tokenizer gpt2"):
        load(other.path, tokenizer="bytes")


# ------------------------------------------------------------------------------ tokenizers

TEXT = "naïve café – 日本語 🙂\tend\r\n<|endoftext|> <s>"


def test_bytes_round_trip_and_decode_never_fails():
    tok = get_tokenizer("bytes")
    ids = tok.encode(TEXT)
    assert ids.tolist() == list(TEXT.encode()) and tok.decode(ids) == TEXT
    assert tok.decode([256, 65, 257]) == "<|endoftext|>A<|bos|>"
    assert tok.decode([0xE6, 65]) == "\ufffdA" and tok.decode([]) == ""
    assert tok.decode(tok.encode("\ud800")) == "?"          # a lone surrogate has no UTF-8
    assert tok.token_bytes()[ids].sum() == len(TEXT.encode())
    assert tok.token_bytes()[[256, 257]].tolist() == [0, 0]
    for bad in (258, -1):
        with pytest.raises(DataError, match=f"cannot decode id {bad}"):
            tok.decode([65, bad])


def test_unknown_tokenizers_say_what_to_give(tmp_path):
    for name, message in {"bert": "no tokenizer 'bert'", "hf:0123": "give its path",
                          str(tmp_path / "tokenizer.json"): "no tokenizer"}.items():
        with pytest.raises(DataError, match=message):
            get_tokenizer(name)
    (tmp_path / "tokenizer.json").write_text("{}")
    pytest.importorskip("tokenizers")
    with pytest.raises(DataError, match="not a readable tokenizer.json"):
        get_tokenizer(str(tmp_path / "tokenizer.json"))


def test_gpt2_offline_names_the_folder_and_the_files(tmp_path, monkeypatch):
    tiktoken = pytest.importorskip("tiktoken")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})
    data.get_tokenizer.cache_clear()
    monkeypatch.setattr(tiktoken, "get_encoding", lambda name: pytest.fail("would go online"))
    with pytest.raises(DataError) as error:
        get_tokenizer("gpt2")
    message = str(error.value)
    assert "TIKTOKEN_CACHE_DIR" in message and "--download" in message and "\n" not in message
    assert "6d1cbeee0f20b3d9449abfede4726ed8212e3aee" in message
    assert "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6" in message


def test_gpt2_encoding(tmp_path):
    folder = Path(os.environ.get("TIKTOKEN_CACHE_DIR", "/nonexistent"))
    if not (folder / "6d1cbeee0f20b3d9449abfede4726ed8212e3aee").exists():
        pytest.skip("TIKTOKEN_CACHE_DIR does not hold the gpt2 files")
    tok = get_tokenizer("gpt2")
    assert (tok.vocab_size, tok.eot, tok.bos) == (50257, 50256, 50256)
    assert tok.encode("hello world").tolist() == [31373, 995]
    ids = tok.encode(TEXT)
    assert tok.decode(ids) == TEXT and tok.eot not in ids       # a special in the text is text
    assert tok.token_bytes()[ids].sum() == len(TEXT.encode()) and tok.token_bytes()[50256] == 0
    assert tok.decode([50256]) == "<|endoftext|>"
    with pytest.raises(DataError, match="0..50256"):
        tok.decode([50257])
    path = tmp_path / "t.txt"
    path.write_text("one two three\n" * 400)
    file = load(path, "train", tokenizer="gpt2", folder=tmp_path)
    windows = Windows(file, 8, 4).sequential()
    assert file.dtype == "uint16" and windows.n_bytes == len(tok.decode(
        file.tokens[1:1 + windows.n_targets]).encode())


@pytest.fixture
def hf_folder(tmp_path):
    """A byte-level BPE of our own, with Llama-like specials."""
    tokenizers = pytest.importorskip("tokenizers")
    tk = tokenizers.Tokenizer(tokenizers.models.BPE())
    tk.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tk.decoder = tokenizers.decoders.ByteLevel()
    tk.train_from_iterator([TEXT, "the cat and the other cat"] * 5, tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["<|begin_of_text|>", "<|end_of_text|>", "<s>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(), show_progress=False))
    tk.enable_truncation(4)                     # must be ignored: it would cut every document
    tk.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


def test_a_tokenizer_json_round_trips(hf_folder):
    tok = get_tokenizer(str(hf_folder / "tokenizer.json"))
    ids = tok.encode(TEXT)
    assert tok.decode(ids) == TEXT and len(ids) > 4
    assert not set(ids.tolist()) & set(tok.specials)        # "<s>" in the text stays text
    assert tok.token_bytes()[ids].sum() == len(TEXT.encode())
    shown = tok.decode([tok.bos, *tok.encode("the"), tok.eot])
    assert shown == "<|begin_of_text|>the<|end_of_text|>"
    assert tok.name.startswith("hf:") and tok.token_bytes()[tok.bos] == 0
    text = hf_folder / "t.txt"
    text.write_text("the cat and the other cat\n" * 50)
    file = load(text, "val", tokenizer=str(hf_folder), folder=hf_folder)
    assert file.tokenizer == tok.name and file.bos == tok.bos and file.tokens[0] == tok.eot
    with pytest.raises(DataError, match="give its path"):    # the file alone cannot decode
        Windows(file, 4, 2).sequential().n_bytes
    assert Windows(file, 4, 2, tokenizer=tok).sequential().n_bytes > 0


def test_bos_comes_from_the_tokenizer_config(hf_folder):
    (hf_folder / "tokenizer_config.json").write_text('{"bos_token": {"content": "<s>"}}')
    data.get_tokenizer.cache_clear()
    tok = get_tokenizer(str(hf_folder / "tokenizer.json"))
    assert tok.specials[tok.bos] == "<s>" and tok.specials[tok.eot] == "<|end_of_text|>"


def test_bos_is_the_current_tokenizers_whoever_built_the_file(hf_folder):
    """The token file's name and ids follow tokenizer.json alone; BOS is in none of its ids."""
    for name in ("t.txt", "u.txt"):
        (hf_folder / name).write_text(f"the cat and the other cat of {name}\n" * 50)
    given = [hf_folder / "t.txt", f"{hf_folder / 't.txt'}+{hf_folder / 'u.txt'}"]
    paths = set()
    for bos in ("<s>", "<|begin_of_text|>"):
        (hf_folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": bos}))
        data.get_tokenizer.cache_clear()
        tok = get_tokenizer(str(hf_folder))
        files = [load(name, tokenizer=str(hf_folder), folder=hf_folder) for name in given]
        files += [load(file.path, split, tokenizer=str(hf_folder))
                  for file in files[:1] for split in ("train", "val")]
        files += [evaluation.text_of({"tokenizer": str(hf_folder)}, str(files[0].path))]
        assert [tok.specials[file.bos] for file in files] == [bos] * 5
        assert all((file.tokens == tok.eot).any() for file in files)
        paths |= {file.path for file in files}
    assert len(paths) == 3                      # nothing was built twice
    x, _ = files[0].windows(8, 2, bos_policy="window").batch(0)
    assert (x[:, 0] == tok.bos).all()


@pytest.mark.parametrize("content", [b"[]", b'{"bos_token": ', b"\xff\xfe", b"[" * 100_000,
                                     b'{"bos_token": ["<s>"]}'])
def test_a_bad_tokenizer_config_is_named(hf_folder, content):
    (hf_folder / "tokenizer_config.json").write_bytes(content)
    data.get_tokenizer.cache_clear()
    with pytest.raises(DataError, match=r"tokenizer_config\.json\b") as error:
        get_tokenizer(str(hf_folder / "tokenizer.json"))
    assert "\n" not in str(error.value)


def test_a_tokenizer_without_a_vocabulary_is_named(tmp_path):
    pytest.importorskip("tokenizers")
    empty = {"model": {"type": "BPE", "vocab": {}, "merges": []}}
    (tmp_path / "tokenizer.json").write_text(json.dumps(empty))
    with pytest.raises(DataError, match="tokenizer.json has no end-of-text token"):
        get_tokenizer(str(tmp_path / "tokenizer.json"))


# ------------------------------------------------------------------------------ windows

STREAM = np.array([99, 1, 2, 3, 99, 4, 5, 6, 7, 99])        # eot d1 eot d2 eot; eot 99, bos 98


def windows(policy, block=3, batch=64, **options):
    return Windows(STREAM, block, batch, bos_policy=policy, bos=98, eot=99, **options)


def find(x, y, first):
    """The target row whose x starts with `first`."""
    row = next(i for i, r in enumerate(x.tolist()) if r[:len(first)] == first)
    return x[row].tolist(), y[row].tolist()


def test_bos_none_shows_the_stream_as_it_is():
    x, y = windows("none").batch(0)
    assert find(x, y, [2, 3]) == ([2, 3, 99], [3, 99, 4])
    assert {r[0] for r in x.tolist()} == {99, 1, 2, 3, 4, 5}        # every start occurs,
    assert find(x, y, [5, 6]) == ([5, 6, 7], [6, 7, 99])            # the last one too
    assert 98 not in x and 98 not in y


def test_bos_document_introduces_each_document_once():
    x, y = windows("document").batch(0)
    assert find(x, y, [2, 3]) == ([2, 3, 98], [3, 99, 4])           # shown as BOS, predicted as EOT
    assert find(x, y, [98, 4]) == ([98, 4, 5], [4, 5, 6])
    assert 99 not in x and 98 not in y


def test_bos_window_puts_it_at_position_0_and_nowhere_else():
    x, y = windows("window").batch(0)
    assert (x[:, 0] == 98).all() and (x[:, 1:] != 98).all()
    assert find(x, y, [98, 2]) == ([98, 2, 3], [2, 3, 99])
    assert find(x, y, [98, 6]) == ([98, 6, 7], [6, 7, 99])          # the last window is reached


@pytest.mark.parametrize("policy", ["none", "document", "window"])
def test_targets_are_the_next_tokens_and_types_are_int64(policy):
    x, y = windows(policy).batch(3)
    assert str(x.dtype) == str(y.dtype) == "torch.int64" and x.shape == y.shape == (64, 3)
    shown = np.where(y[:, :-1] == 99, 98, y[:, :-1]) if policy == "document" else y[:, :-1].numpy()
    assert (x[:, 1:].numpy() == shown).all()
    assert x.is_contiguous() and y.is_contiguous()


def test_batches_have_no_state(stdlib):
    def make(**o):
        return Windows(stdlib["val"], 32, 8, **({"seed": 5} | o))
    one = make()
    x7, y7 = one.batch(7)
    np.random.seed(0)                                    # the global generator plays no part
    for step in (0, 9, 3):
        one.batch(step)
    assert (one.batch(7)[0] == x7).all() and (make().batch(7)[1] == y7).all()
    others = [one.batch(8), one.batch(7, micro=1), one.batch(7, rank=1, world=2),
              make(seed=6).batch(7)]
    assert all((x != x7).any() for x, _ in others)


def test_the_global_batch_does_not_depend_on_the_number_of_ranks(stdlib):
    whole = Windows(stdlib["val"], 16, 8).batch(4, micro=2)[0]
    for world in (2, 4):
        part = Windows(stdlib["val"], 16, 8 // world)
        ranks = [part.batch(4, rank, world, micro=2)[0] for rank in range(world)]
        assert (np.concatenate(ranks) == whole.numpy()).all()


def test_too_short_a_text_is_one_line():
    assert windows("none", block=9).batch(0)[0].shape == (64, 9)
    for policy in ("none", "window"):
        with pytest.raises(DataError, match="has 10 tokens, a window of 10 needs 11"):
            windows(policy, block=10)
    with pytest.raises(DataError, match="choose none, document or window"):
        windows("always")
    for policy in ("document", "window"):
        with pytest.raises(DataError, match="bos"):
            Windows(STREAM, 3, 4, bos_policy=policy)


# ------------------------------------------------------------------------------ evaluation windows

@pytest.mark.parametrize("policy", ["none", "document", "window"])
def test_sequential_targets_cover_the_stream_once(policy):
    w = Windows(np.arange(23), 4, 2, bos_policy=policy, bos=98, eot=99)
    batches = list(w.sequential())
    targets = np.concatenate([y.numpy().ravel() for _, y in batches])
    assert targets.tolist() == list(range(w.lead, w.lead + 20))
    assert [len(x) for x, _ in batches] == [2, 2, 1] and len(w.sequential()) == 5
    assert w.sequential().n_targets == 20


def test_sequential_spreads_a_few_windows_over_the_file():
    w = Windows(np.arange(1001), 10, 8)
    assert w.sequential(4).offsets.tolist() == [0, 250, 500, 750]
    assert len(w.sequential(1000)) == 100 and len(w.sequential(100)) == 100


@pytest.mark.parametrize("policy", ["none", "window"])
@pytest.mark.parametrize("block", [1, 3, 7, 33])
def test_words_and_bytes_of_the_targets(tmp_path, policy, block):
    tok = get_tokenizer("bytes")
    text = "the  cat\nsat on\ta naïve mat "
    ids = np.concatenate([[256], tok.encode(text), [256], tok.encode("twice 日本 over"), [256]])
    w = Windows(ids, block, 4, bos_policy=policy, bos=257, eot=256, tokenizer=tok)
    found = w.sequential()
    covered = ids[w.lead:w.lead + found.n_targets]
    assert found.n_bytes == (covered < 256).sum()
    # Word starts, counted byte by byte: a non-space after a space or a separator.
    space = np.isin(ids, [32, 9, 10, 256])
    starts = ~space & np.concatenate([[True], space[:-1]])
    assert found.n_words == starts[w.lead:w.lead + found.n_targets].sum()


def test_a_uniform_byte_model_has_eight_bits_per_byte(stdlib):
    windows = Windows(stdlib["val"], 256, 8).sequential(20)
    nll = windows.n_bytes * np.log(256)
    assert nll / (windows.n_bytes * np.log(2)) == pytest.approx(8.0)
    assert 0.99 * windows.n_targets < windows.n_bytes <= windows.n_targets == 20 * 256
    assert len(stdlib["val"].tokens) > windows.n_targets > 5 * windows.n_words > 0


def test_counting_needs_a_tokenizer():
    with pytest.raises(DataError, match="tokenizer="):
        Windows(STREAM, 3, 4).sequential().n_words


# ------------------------------------------------------------------------------ corpora

def test_stdlib_is_reproducible_and_its_splits_share_no_file(stdlib, tmp_path):
    again = {split: load("stdlib", split, folder=tmp_path) for split in stdlib}
    assert {s: f.sha256 for s, f in again.items()} == {s: f.sha256 for s, f in stdlib.items()}
    assert 5e6 < len(stdlib["train"]) < 4e7
    assert 0.02 < len(stdlib["val"]) / len(stdlib["train"]) < 0.12
    documents = {}
    for split, file in stdlib.items():
        file.verify()
        cuts = np.flatnonzero(file.tokens == 256)
        assert cuts[0] == 0 and cuts[-1] == len(file) - 1 and 257 not in file.tokens
        documents[split] = [bytes(file.tokens[a + 1:b].astype(np.uint8))
                            for a, b in zip(cuts, cuts[1:])]
        assert file.n_bytes == sum(map(len, documents[split])) == len(file) - len(cuts)
        assert file.n_words == sum(len(d.decode().split()) for d in documents[split])
    assert not {d for d in documents["val"] if len(d) > 500} & set(documents["train"])
    assert len(documents["train"]) + len(documents["val"]) == len(prepare.stdlib_documents())


def test_stdlib_leaves_out_tests_and_shuffles():
    names = [name for name, _ in prepare.stdlib_documents()]
    assert "argparse.py" in names and names != sorted(names)
    assert not any("_sysconfigdata" in name for name in names)      # it holds this machine's paths
    for folder in ("test", "tests", "site-packages", "idle_test"):
        assert not any(folder in name.split("/") for name in names)



def test_two_processes_may_build_at_once(stdlib, tmp_path):
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=load, args=("stdlib", split), kwargs={"folder": tmp_path})
               for split in ("train", "val", "train")]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [0, 0, 0]
    for split, file in stdlib.items():
        built = load("stdlib", split, folder=tmp_path, build=False)
        built.verify()
        assert built.sha256 == file.sha256
    assert len(list(tmp_path.iterdir())) == 2           # no temporary file is left


def test_a_damaged_cache_is_rebuilt_but_a_given_file_is_an_error(tmp_path):
    (tmp_path / "t.txt").write_text("a line of text\n" * 100)
    path = load(tmp_path / "t.txt", folder=tmp_path).path
    sha = TokenFile.open(path).sha256
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(DataError, match="truncated"):
        load(path)
    with pytest.raises(DataError, match="truncated"):
        load(tmp_path / "t.txt", folder=tmp_path, build=False)
    assert load(tmp_path / "t.txt", folder=tmp_path).sha256 == sha


def test_a_text_file_is_cut_into_head_and_tail_and_follows_its_content(tmp_path):
    path, tok = tmp_path / "t.txt", get_tokenizer("bytes")
    lines = [f"line number {i}\r\n" for i in range(1000)]
    path.write_bytes("".join(lines).encode())
    parts = [tok.decode(load(path, s, folder=tmp_path).tokens[1:-1]) for s in ("train", "val")]
    assert "".join(parts) == "".join(lines).replace("\r\n", "\n")
    assert parts[1].startswith("line number") and 0.03 < len(parts[1]) / len(parts[0]) < 0.07
    path.write_text("other\n" * 400)                    # the cache must not answer the old text
    assert "other" in tok.decode(load(path, folder=tmp_path).tokens[:20])


@pytest.mark.parametrize("content, message", [(b"\xff\xfe\x00", "not UTF-8"), (b" \n", "no text")])
def test_bad_text_files(tmp_path, content, message):
    (tmp_path / "t.txt").write_bytes(content)
    with pytest.raises(DataError, match=message):
        load(tmp_path / "t.txt", folder=tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["t.txt"]


@pytest.mark.parametrize("lines, message", [
    ('{"text": "a"}\n\n{"text": \n', "line 3: not a JSON object"), ("[1]\n", "line 1: not a JSON"),
    ('{"title": "a"}\n', "no field 'text', only title"), ('{"text": 3}\n', "no field 'text'"),
    ("[" * 100_000 + "\n", "d.jsonl, line 1: not a JSON"),
    ('{"text": "' + r"\ud83d\ude42 \ud83d" + '"}\n', "d.jsonl, line 1: half of a surrogate pair")])
def test_bad_rows_are_named(tmp_path, lines, message):
    (tmp_path / "d.jsonl").write_text(lines)
    with pytest.raises(DataError, match=message):
        load(tmp_path / "d.jsonl", folder=tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["d.jsonl"]


@pytest.mark.parametrize("mark", ["\u2028", "\u2029", "\x85", "\x0c"])
def test_a_line_ends_at_a_newline_and_nowhere_else(tmp_path, mark):
    """Unicode knows more line ends than a file of lines does, and JSON strings may hold some."""
    text = f"one{mark}two"
    assert len(text.splitlines()) == 2
    dumped = json.dumps({"text": text}, ensure_ascii=False)
    (tmp_path / "d.jsonl").write_bytes(f"{dumped}\r\n{dumped}\n".encode())
    (tmp_path / "d.raw").write_bytes(f" {text} \n".encode())
    rows = {name: list(prepare.file_rows(tmp_path / name, by_line=True)(0))
            for name in ("d.jsonl", "d.raw")}
    assert rows == {"d.jsonl": [{"text": text}] * 2, "d.raw": [{"text": f" {text} \n"}]}
    assert list(prepare.articles(rows["d.raw"])) == [f" {text} \n"]


def test_what_is_written_is_utf_8_in_every_locale(tmp_path):
    code = ("import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path; "
            "from data import prepare; prepare.replace_text(Path(sys.argv[2]), chr(0xe9))")
    subprocess.run([sys.executable, "-X", "utf8=0", "-c", code, str(ROOT), str(tmp_path / "t")],
                   check=True, env=os.environ | {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"})
    assert (tmp_path / "t").read_bytes() == "é".encode()


def test_parquet_rows(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet
    table = pyarrow.table({"text": [f"document {i}" for i in range(200)]})
    pyarrow.parquet.write_table(table, tmp_path / "d.parquet")
    found = [load(tmp_path / "d.parquet", s, folder=tmp_path) for s in ("train", "val")]
    assert sum((f.tokens == 256).sum() - 1 for f in found) == 200
    (tmp_path / "e.parquet").write_text("not parquet")
    latin = pyarrow.Array.from_buffers(pyarrow.string(), 1, pyarrow.array([b"\xe9"]).buffers())
    pyarrow.parquet.write_table(pyarrow.table({"text": latin}), tmp_path / "f.parquet")
    for name in ("e.parquet", "f.parquet"):
        with pytest.raises(DataError, match=f"{name} is not a readable parquet"):
            load(tmp_path / name, folder=tmp_path)


def test_jsonl_documents_are_split_by_hash_so_duplicates_stay_together(tmp_path):
    path = tmp_path / "d.jsonl"
    texts = [f"document {i % 300} is here" for i in range(600)]
    path.write_text("".join(json.dumps({"text": t}) + "\n" for t in texts))
    decoded = {s: get_tokenizer("bytes").decode(load(path, s, folder=tmp_path).tokens)
               for s in ("train", "val")}
    found = {s: t.strip("<|endoftext|>").split("<|endoftext|>") for s, t in decoded.items()}
    assert not set(found["train"]) & set(found["val"]) and found["val"]
    assert len(found["train"]) + len(found["val"]) == 600


@pytest.mark.parametrize("name", sorted(prepare.HUB))
def test_a_missing_data_set_names_the_command(name, tmp_path):
    with pytest.raises(DataError) as error:
        load(name, folder=tmp_path)
    assert str(error.value).endswith(f"python data/prepare.py {name} --download")


def test_unknown_names_and_splits(tmp_path):
    with pytest.raises(DataError, match="no corpus or file 'wikitex'"):
        load("wikitex")
    with pytest.raises(DataError, match="not prepared"):
        load("stdlib", "test", folder=tmp_path)
    with pytest.raises(DataError, match="not prepared.*prepare.py stdlib"):
        load("stdlib", folder=tmp_path, build=False)


def test_rows_become_text():
    assert prepare.row_text({"question": "1+1?", "answer": "2\n#### 2"}) == (
        "Question: 1+1?\nAnswer: 2\n#### 2")
    wiki = "\n_START_ARTICLE_\nTitle\n_START_PARAGRAPH_\nOne._NEWLINE_Two."
    assert prepare.row_text({"text": wiki}) == "Title\n\nOne.\nTwo."
    assert prepare.row_text({"text": repr("日".encode())}) == "日"
    for text in ("b'cause it is so", "b'a', 'b'", "b'é'", 'b"'):       # not the repr of bytes
        assert prepare.row_text({"text": text}) == text
    rows = [{"text": t} for t in ("\n", " = A = \n", " x \n", " = = S = = \n", " = B = \n", " y")]
    assert list(prepare.articles(rows)) == ["\n = A = \n x \n = = S = = \n", " = B = \n y\n"]
    assert list(prepare.bundles([{"text": f"s{i}\n"} for i in range(5)], 2)) == [
        "s0\ns1", "s2\ns3", "s4"]


# ------------------------------------------------------------------------------ streaming, resume

def stream(skip, stop=None, seen=None):
    """A fake endless data set: 2000 documents, an exception or a kill at document `stop`."""
    for i in range(skip, 2000):
        if seen is not None:
            seen.append(i)
        if i == stop:
            raise ConnectionError("the line went dead")
        text = "" if i % 50 == 7 else f"document {i} says {'word ' * (i % 17)}"
        yield text, text


def streamed(folder, documents, budget=20_000):
    paths = {s: folder / f"f-{s}.bin" for s in ("train", "val")}
    prepare.write_splits(documents, get_tokenizer("bytes"), paths, prepare.by_hash(0.1),
                         source="fake", budget=budget, resumable=True, save_every=3000)
    return {s: path.read_bytes() for s, path in paths.items()}


def test_an_interrupted_download_continues_to_the_same_bytes(tmp_path):
    straight = streamed(tmp_path / "a", stream)
    assert 20_000 <= sum(len(b) - 4096 for b in straight.values()) / 2 < 20_200
    seen = []
    for stop in (2, 150, 151, 300):         # before the first save, after it, at once again, later
        with pytest.raises(ConnectionError):
            streamed(tmp_path / "b", lambda skip: stream(skip, stop, seen))
        assert not (tmp_path / "b/f-train.bin").exists()    # incomplete: not under its name
    seen.clear()
    assert streamed(tmp_path / "b", lambda skip: stream(skip, None, seen)) == straight
    assert seen[0] > 200                                    # it continued, it did not start anew
    assert sorted(p.name for p in (tmp_path / "b").iterdir()) == ["f-train.bin", "f-val.bin"]
    for split in straight:
        TokenFile.open(tmp_path / f"b/f-{split}.bin").verify()


def test_kill_9_in_the_middle(tmp_path):
    code = ("import os, signal, sys; sys.path[:0] = sys.argv[2:]\n"
            "import test_data as t; from pathlib import Path\n"
            "def die(skip):\n"
            "    for i, item in enumerate(t.stream(skip)):\n"
            "        if i == 250: os.kill(os.getpid(), signal.SIGKILL)\n"
            "        yield item\n"
            "t.streamed(Path(sys.argv[1]), die)\n")
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "b"), str(ROOT),
                           str(ROOT / "tests")], capture_output=True, text=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    state = json.loads((tmp_path / "b/f-train.bin.progress.json").read_text())
    assert 0 < state["documents"] < 250
    assert streamed(tmp_path / "b", stream) == streamed(tmp_path / "a", stream)


def test_killed_between_the_two_last_renames(tmp_path):
    straight = streamed(tmp_path / "a", stream)
    with pytest.raises(ConnectionError):
        streamed(tmp_path / "b", lambda skip: stream(skip, 300))
    os.replace(tmp_path / "b/f-train.bin.part", tmp_path / "b/f-train.bin")
    assert streamed(tmp_path / "b", stream) == straight


def test_a_partial_file_that_shrank_is_not_filled_with_zeros(tmp_path):
    with pytest.raises(ConnectionError):
        streamed(tmp_path, lambda skip: stream(skip, 300))
    part = tmp_path / "f-train.bin.part"
    part.write_bytes(part.read_bytes()[:5000])
    with pytest.raises(DataError, match="shorter than when it was saved"):
        streamed(tmp_path, stream)


def test_another_preparation_is_not_mixed_in(tmp_path):
    with pytest.raises(ConnectionError):
        streamed(tmp_path, lambda skip: stream(skip, 300))
    paths = {s: tmp_path / f"f-{s}.bin" for s in ("train", "val")}
    with pytest.raises(DataError, match="belongs to another preparation"):
        prepare.write_splits(stream, get_tokenizer("bytes"), paths, prepare.by_hash(0.1),
                             source="other", resumable=True)
    note = tmp_path / "f-train.bin.progress.json"
    for content in ("", "[]"):              # what a power cut may leave of it
        note.write_text(content)
        with pytest.raises(DataError, match=f"{note.name} is not a JSON object"):
            streamed(tmp_path, stream)


def test_fineweb_streams_through_the_hub_and_resumes(tmp_path, monkeypatch, capsys):
    """The hub is a stand-in with the three calls that are used: load_dataset, skip, iteration."""
    calls, skipped = [], []

    class Stream(list):
        fail = True

        def skip(self, n):
            skipped.append(n)
            rest = Stream(self[n:])
            rest.fail = False
            return rest

        def __iter__(self):
            for i, row in enumerate(list.__iter__(self)):
                if self.fail and i == 400:
                    raise ConnectionError("the line went dead")
                yield row

    rows = Stream({"text": f"page {i} " + "lorem ipsum " * 400} for i in range(600))

    def load_dataset(*where, **how):
        calls.append((where, how))
        return rows
    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    command = ["fineweb-edu", "--download", "--tokens", "2_500_000", "--out", str(tmp_path)]
    assert prepare.main(command) == 2
    assert "the line went dead" in capsys.readouterr().err
    assert prepare.main(command) == 0
    assert calls[0] == (("HuggingFaceFW/fineweb-edu", "sample-10BT"),
                        {"split": "train", "streaming": True})
    assert len(skipped) == 1 and 0 < skipped[0] <= 400
    train, val = (load("fineweb-edu", s, folder=tmp_path) for s in ("train", "val"))
    assert 2_500_000 <= len(train) + len(val) < 2_510_000 and len(val) > 0
    text = get_tokenizer("bytes").decode(train.tokens) + get_tokenizer("bytes").decode(val.tokens)
    assert sorted(int(p.split()[1]) for p in text.split("<|endoftext|>") if p) == list(range(520))


# ------------------------------------------------------------------------------ command line

def run(*arguments, **environment):
    return subprocess.run([sys.executable, str(ROOT / "data/prepare.py"), *map(str, arguments)],
                          capture_output=True, text=True, cwd="/", env=os.environ | environment)


def test_the_script_runs_from_anywhere(tmp_path):
    (tmp_path / "t.txt").write_text("some words here\n" * 100)
    done = run(tmp_path / "t.txt", "--out", tmp_path, "--val-fraction", "0.2")
    assert done.returncode == 0, done.stderr
    assert "1,280 bytes" in done.stdout and "320 bytes" in done.stdout and "words" in done.stdout


def test_bad_requests_are_one_line_and_status_2(tmp_path, capsys):
    (tmp_path / "a.txt").write_text("text\n")
    for request, message in [
            (["wikitext2"], "add --download"),
            (["nowhere.txt"], "no corpus or file"),
            (["stdlib", "--download"], "--download and --from-file go with"),
            (["stdlib", "--tokens", "0"], "must be positive"),
            (["stdlib", "--tokens", "inf"], "must be positive"),
            (["stdlib", "--tokens", "nan"], "must be positive"),
            (["stdlib", "--tokens", "100"], "read whole"),
            ([tmp_path / "a.txt", "--tokens", "100"], "read whole"),
            (["stdlib", "--val-fraction", "1"], "between 0 and 1"),
            (["stdlib", "--tokenizer", "klingon"], "no tokenizer"),
            (["wikitext2", "--from-file", tmp_path / "none.txt"], "cannot read"),
            (["gsm8k", "--from-file", *[tmp_path / "a.txt"] * 3], "give one file for each of")]:
        assert prepare.main([*map(str, request), "--out", str(tmp_path / "out")]) == 2
        error = capsys.readouterr().err
        assert message in error and error.count("\n") == 1


def test_wikitext_and_gsm8k_from_files(tmp_path):
    for split in ("train", "valid", "test"):
        text = f" \n = {split} one = \n body \n = Two = \n b\n"
        (tmp_path / f"wiki.{split}.raw").write_text(text)
    files = [str(tmp_path / f"wiki.{split}.raw") for split in ("test", "train", "valid")]
    assert prepare.main(["wikitext2", "--from-file", *files, "--out", str(tmp_path)]) == 0
    for split, name in {"train": "train", "val": "valid", "test": "test"}.items():
        file = load("wikitext2", split, folder=tmp_path)
        text = get_tokenizer("bytes").decode(file.tokens)
        assert f"= {name} one =" in text and text.count("<|endoftext|>") == 3
    rows = [{"question": f"{i} + 1?", "answer": f"#### {i + 1}"} for i in range(200)]
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    files = [str(tmp_path / f"{split}.jsonl") for split in ("train", "test")]
    assert prepare.main(["gsm8k", "--from-file", *files, "--out", str(tmp_path)]) == 0
    counts = [(load("gsm8k", s, folder=tmp_path).tokens == 256).sum() - 1
              for s in ("train", "val", "test")]
    assert counts[0] + counts[1] == counts[2] == 200 and counts[1] > 0


def test_writers_of_one_path_do_not_meet(tmp_path):
    with TokenWriter(tmp_path / "a.bin", **BYTES) as one, \
            TokenWriter(tmp_path / "a.bin", **BYTES) as two:
        one.append([1, 2])
        two.append([3])
    assert TokenFile.open(tmp_path / "a.bin").tokens.tolist() == [1, 2]     # `one` closes last
