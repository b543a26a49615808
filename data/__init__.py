"""Token files, tokenizers and windows: from ids on disk to batches. (Corpora: data/prepare.py.)

    stream     EOT d1 EOT d2 EOT ...             the ids of a split's documents, one long array
    token file header + uint16 | uint32 ids      the header says which tokenizer, and the sha256
    window     (x, y), y[t] = the token after x[t], each (B, T)

Two words are kept apart here that this field often mixes up. *Position 0* is a place: the first
slot of a window, whatever token lies there. *BOS* is a token: it may lie at position 0, anywhere,
or nowhere. Ledger (arXiv 2606.20743) cuts random windows and prepends nothing, so its "BOS" is
position 0; Llama always shows BOS at position 0. `Windows(bos_policy=...)` makes it a flag.

Perplexity per token, word and byte are three numbers for one model. So the header counts the UTF-8
bytes and the whitespace-separated words of the text, and `Windows.sequential()` counts those that
its targets cover:

    bits per byte = sum(nll) / (n_bytes ln 2)        word perplexity = exp(sum(nll) / n_words)

Read first: `Windows`, then `TokenFile`; a tokenizer is any object with the members of
`BytesTokenizer`. Shapes: B windows, T positions.
"""
from __future__ import annotations

import functools
import hashlib
import json
import os
import re
import struct
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch

MAGIC, VERSION, HEADER_BYTES = b"TOKENS\r\n", 1, 4096   # \r\n: a text-mode copy breaks the magic
PREFIX = struct.Struct("<8sIII")                        # magic, version, JSON length, JSON crc32


class DataError(ValueError):
    """Bad data or a bad request, told in one line that says what to do."""


def read_object(path: Path) -> dict:
    """A small JSON file that is one object. DataError names a file that is not."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):    # RecursionError: thousands of open brackets
        found = None
    if not isinstance(found, dict):
        raise DataError(f"{path} is not a JSON object: mend it or delete it")
    return found


# ---------------------------------------------------------------------------------------------
# Tokenizers: .name .vocab_size .eot .bos .encode .decode .token_bytes

def _decode(ids, vocab_size: int, specials: dict[int, str], plain: Callable, show: bool) -> str:
    """Shared `decode`: runs of ordinary ids go through `plain` (ids -> UTF-8), specials by name."""
    ids = np.asarray(ids, dtype=np.int64).reshape(-1)
    if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
        bad = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise DataError(f"cannot decode id {bad}: the vocabulary is 0..{vocab_size - 1}")
    cuts = np.flatnonzero(np.isin(ids, list(specials)))
    text, start = [], 0
    for cut in [*cuts, len(ids)]:
        text.append(plain(ids[start:cut]).decode("utf-8", "replace"))
        if cut < len(ids):
            text.append(specials[int(ids[cut])] if show else "\n")
        start = cut + 1
    return "".join(text)


class BytesTokenizer:
    """One id per UTF-8 byte, then EOT and BOS: no vocabulary to fetch, bits per byte for free."""

    name, vocab_size, eot, bos = "bytes", 258, 256, 257

    def encode(self, text: str) -> np.ndarray:
        """Text -> uint16 ids; text is data, so no substring ever becomes a special id."""
        return np.frombuffer(text.encode("utf-8", "replace"), dtype=np.uint8).astype(np.uint16)

    def decode(self, ids, show_specials: bool = True) -> str:
        """Ids -> text. Broken UTF-8 becomes U+FFFD; specials are shown, or made newlines."""
        specials = {self.eot: "<|endoftext|>", self.bos: "<|bos|>"}
        return _decode(ids, self.vocab_size, specials, lambda run: bytes(run.tolist()),
                       show_specials)

    def token_bytes(self) -> np.ndarray:
        """(vocab,) UTF-8 bytes behind each id, 0 for specials."""
        return np.array([1] * 256 + [0, 0])


class Gpt2Tokenizer:
    """GPT-2's byte-pair encoding through tiktoken; its one special id serves as EOT and as BOS."""

    name, vocab_size, eot, bos = "gpt2", 50257, 50256, 50256

    def __init__(self, download: bool = False):
        folder, need = self.cached()
        if not download and not all(Path(folder, name).is_file() for name in need):
            raise DataError(
                "the gpt2 tokenizer is not on this machine: `python data/prepare.py stdlib "
                "--tokenizer gpt2 --download` fetches it once; or set TIKTOKEN_CACHE_DIR to a "
                f"folder holding tiktoken's files {need[0]} and {need[1]}")
        try:
            import tiktoken
            self.bpe = tiktoken.get_encoding("gpt2")
        except ImportError:
            raise DataError("the gpt2 tokenizer needs tiktoken: pip install tiktoken") from None
        except Exception as error:  # a download fails in many ways: requests, OSError, a bad hash
            raise DataError("the gpt2 tokenizer could not be read or fetched "
                            f"({type(error).__name__}); its files belong in {folder}") from None

    @staticmethod
    def cached() -> tuple[str, list[str]]:
        """Where tiktoken keeps its downloads, and the names of the two that gpt2 needs: it would
        fetch what is missing without asking, so we look first."""
        folder = os.environ.get("TIKTOKEN_CACHE_DIR") or os.environ.get("DATA_GYM_CACHE_DIR") \
            or os.path.join(tempfile.gettempdir(), "data-gym-cache")
        base = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
        return folder, [hashlib.sha1((base + name).encode()).hexdigest()
                        for name in ("vocab.bpe", "encoder.json")]

    def encode(self, text: str) -> np.ndarray:
        """Text -> uint16 ids; '<|endoftext|>' inside a text is text, not the special id."""
        return np.array(self.bpe.encode_ordinary(text), dtype=np.uint16)

    def decode(self, ids, show_specials: bool = True) -> str:
        """Ids -> text, as for bytes."""
        return _decode(ids, self.vocab_size, {self.eot: "<|endoftext|>"},
                       lambda run: self.bpe.decode_bytes(run.tolist()), show_specials)

    @functools.cache
    def token_bytes(self) -> np.ndarray:
        """(vocab,) UTF-8 bytes behind each id, 0 for specials."""
        table = [len(self.bpe.decode_single_token_bytes(i)) for i in range(self.eot)]
        return np.array([*table, 0])


class HfTokenizer:
    """A Hugging Face tokenizer.json; its name is "hf:" and the start of the file's sha256.

    BOS is tokenizer_config.json's bos_token where that file lies beside it, else a well-known name
    among the special tokens, else EOT. Truncation, padding and templates of the file are ignored.
    """

    EOTS = ("<|endoftext|>", "<|end_of_text|>", "</s>", "<eos>", "<|im_end|>")
    BOSES = ("<|begin_of_text|>", "<s>", "<bos>", "<|endoftext|>", "<|im_start|>")

    def __init__(self, path: Path):
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise DataError(f"{path} needs tokenizers: pip install tokenizers") from None
        try:
            text = path.read_bytes()
            self.tk = Tokenizer.from_str(text.decode("utf-8"))
        except Exception as error:      # the library raises bare Exception for a malformed file
            raise DataError(f"{path} is not a readable tokenizer.json: {error}") from None
        self.tk.no_truncation()
        self.tk.no_padding()
        self.tk.encode_special_tokens = True        # '<s>' in a text is text
        self.name = "hf:" + hashlib.sha256(text).hexdigest()[:16]
        self.vocab_size = max(self.tk.get_vocab().values(), default=-1) + 1
        added = self.tk.get_added_tokens_decoder()
        self.specials = {i: t.content for i, t in added.items() if t.special}
        config = path.with_name("tokenizer_config.json")
        wish = read_object(config).get("bos_token") if config.exists() else None
        wish = wish.get("content") if isinstance(wish, dict) else wish
        if not isinstance(wish, str | None):
            raise DataError(f"{config}: its bos_token is not the name of a token")
        ids = {content: i for i, content in self.specials.items()}
        self.eot = next((ids[c] for c in self.EOTS if c in ids), None)
        self.bos = next((ids[c] for c in (wish, *self.BOSES) if c in ids), self.eot)
        if self.eot is None:
            raise DataError(f"{path} has no end-of-text token among its specials {sorted(ids)}")
        self.byte_level = b'"ByteLevel"' in text
        self.adds_bos = self.tk.encode("a").ids[:1] == [self.bos]   # before every text, by itself

    def encode(self, text: str) -> np.ndarray:
        """Text -> ids, no BOS or EOS added."""
        ids = self.tk.encode(text, add_special_tokens=False).ids
        return np.array(ids, dtype=token_dtype(self.vocab_size))

    def decode(self, ids, show_specials: bool = True) -> str:
        """Ids -> text, as for bytes."""
        return _decode(ids, self.vocab_size, self.specials, lambda run: self.tk.decode(
            run.tolist(), skip_special_tokens=False).encode(), show_specials)

    @functools.cache
    def token_bytes(self) -> np.ndarray:
        """(vocab,) UTF-8 bytes behind each id. Byte-level BPE writes one character per byte;
        SentencePiece writes a space as U+2581 and a raw byte as <0xNN>."""
        added, table = self.tk.get_added_tokens_decoder(), np.zeros(self.vocab_size, dtype=np.int64)
        for token, i in self.tk.get_vocab().items():
            if self.byte_level and i not in added:
                table[i] = len(token)
            elif i not in self.specials:
                raw_byte = re.fullmatch(r"<0x[0-9A-F]{2}>", token)
                table[i] = 1 if raw_byte else len(token.replace("\u2581", " ").encode())
        return table


@functools.cache
def get_tokenizer(name: str, download: bool = False):
    """"bytes", "gpt2" or the path of a tokenizer.json -> tokenizer. Raises DataError.

    download: gpt2's vocabulary may be fetched if it is not on this machine."""
    name = str(name)
    if name in ("bytes", "gpt2"):
        return BytesTokenizer() if name == "bytes" else Gpt2Tokenizer(download)
    if name.startswith("hf:"):
        raise DataError(f"the tokens were made by the tokenizer.json with sha256 {name[3:]}...: "
                        "give its path as --tokenizer")
    path = Path(name, "tokenizer.json") if Path(name).is_dir() else Path(name)
    if path.suffix == ".json" and path.exists():
        return HfTokenizer(path)
    raise DataError(f"no tokenizer {name!r}: give bytes, gpt2 or the path of a tokenizer.json")


# ---------------------------------------------------------------------------------------------
# Token files

def token_dtype(vocab_size: int) -> np.dtype:
    """uint16 while every id fits, else uint32: a 128k vocabulary would wrap silently in uint16."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


@dataclass(frozen=True)
class TokenFile:
    """A token file opened for reading; the fields are its header, `tokens` a read-only memmap."""

    path: Path
    vocab_size: int
    tokenizer: str      # "bytes" | "gpt2" | "hf:<sha256 of tokenizer.json>"
    eot: int            # separates documents
    bos: int
    n_tokens: int
    n_bytes: int        # UTF-8 bytes of the text encoded, separators not counted
    n_words: int        # whitespace-separated words of the text
    sha256: str         # of the ids as stored
    dtype: str          # "uint16" | "uint32"
    split: str
    source: str
    tokens: np.ndarray

    def __len__(self) -> int:
        return self.n_tokens

    def windows(self, block_size: int, batch_size: int, **options) -> "Windows":
        """What every source of batches has: see `data.prepare.open_source`."""
        return Windows(self, block_size, batch_size, **options)

    @property
    def about(self) -> str:
        return f"{self.n_tokens:,} tokens"

    def reader(self, tokenizer: str):
        """What turns its ids into text; tokenizer: the name or path they were made with."""
        return get_tokenizer(tokenizer)

    @classmethod
    def open(cls, path: str | Path) -> "TokenFile":
        """Check the header, map the ids. DataError if missing, foreign, damaged or cut short."""
        path = Path(path)
        try:
            with path.open("rb") as file:
                head, size = file.read(HEADER_BYTES), os.fstat(file.fileno()).st_size
        except OSError as error:
            raise DataError(f"cannot open token file {path}: {error.strerror}") from None
        header = _parse_header(path, head)
        dtype, n = np.dtype(header["dtype"]), header["n_tokens"]
        if size != HEADER_BYTES + n * dtype.itemsize:
            raise DataError(f"{path} is truncated or padded: {size} bytes, "
                            f"its header promises {HEADER_BYTES + n * dtype.itemsize}")
        tokens = (np.memmap(path, dtype, "r", HEADER_BYTES, (n,)) if n else np.zeros(0, dtype))
        return cls(path=path, tokens=tokens, **header)

    def verify(self) -> None:
        """Read every id: DataError if the sha256 differs or an id is outside the vocabulary."""
        digest, top = hashlib.sha256(), 0
        for start in range(0, len(self), 1 << 22):
            part = np.ascontiguousarray(self.tokens[start:start + (1 << 22)])
            digest.update(part)
            top = max(top, int(part.max()))
        if digest.hexdigest() != self.sha256:
            raise DataError(f"{self.path} is damaged: its sha256 is not the one in its header")
        if top >= self.vocab_size:
            raise DataError(f"{self.path} holds id {top}, its vocabulary is {self.vocab_size}")


HEADER_FIELDS = {f.name: {"int": int, "str": str}[f.type] for f in fields(TokenFile)
                 if f.name not in ("path", "tokens")}


def _parse_header(path: Path, head: bytes) -> dict:
    if head[:len(MAGIC)] != MAGIC:
        raise DataError(f"{path} is not a token file (make one: python data/prepare.py FILE)")
    if len(head) < HEADER_BYTES:
        raise DataError(f"{path} is truncated inside its header")
    _, version, length, crc = PREFIX.unpack_from(head)
    if version != VERSION:
        raise DataError(f"{path} has token file version {version}, this program reads {VERSION}: "
                        "prepare the corpus again")
    text = head[PREFIX.size:PREFIX.size + length]
    try:
        header = json.loads(text) if zlib.crc32(text) == crc else None
    except ValueError:
        header = None
    if not isinstance(header, dict) or header.keys() != HEADER_FIELDS.keys() or not all(
            isinstance(header[key], kind) for key, kind in HEADER_FIELDS.items()):
        raise DataError(f"{path} has a damaged header")
    if header["dtype"] != token_dtype(header["vocab_size"]).name or header["n_tokens"] < 0:
        raise DataError(f"{path}: {header['dtype']} is the wrong type for a vocabulary of "
                        f"{header['vocab_size']}")
    return header


class TokenWriter:
    """Streams ids into a token file that appears under its name only when complete.

    `resume=None`: a temporary name of this process's own, so racing writers never meet.
    `resume={}`  : the fixed name PATH.part, kept when interrupted; `resume=state()` goes on there.
    """

    def __init__(self, path, *, vocab_size, tokenizer, eot, bos, split="train", source="",
                 resume: dict | None = None):
        self.path = Path(path)
        self.header = dict(vocab_size=vocab_size, tokenizer=tokenizer, eot=eot, bos=bos,
                           dtype=token_dtype(vocab_size).name, split=split, source=source)
        self.counts = dict(n_tokens=0, n_bytes=0, n_words=0)
        self.digest, self.keep = hashlib.sha256(), resume is not None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.keep:
            self.temporary = self.path.with_name(self.path.name + ".part")
            if resume and not self.temporary.exists():
                os.replace(self.path, self.temporary)   # killed just after this file was finished
            self.file = self.temporary.open("r+b" if resume else "w+b")
            self.counts.update(resume)
        else:
            handle, name = tempfile.mkstemp(".tmp", self.path.name + ".", self.path.parent)
            self.temporary, self.file = Path(name), os.fdopen(handle, "w+b")
        # What lies beyond the last saved state is dropped; the rest is read again for the hash.
        end = HEADER_BYTES + self.counts["n_tokens"] * token_dtype(vocab_size).itemsize
        if resume and os.fstat(self.file.fileno()).st_size < end:
            raise DataError(f"{self.temporary} is shorter than when it was saved: delete it and "
                            "its .progress.json to begin anew")
        self.file.truncate(end)
        self.file.seek(HEADER_BYTES)
        while part := self.file.read(1 << 22):
            self.digest.update(part)

    def append(self, ids, n_bytes: int = 0, n_words: int = 0) -> None:
        """Add ids (any unsigned array or list); DataError if one is outside the vocabulary."""
        ids = np.asarray(ids)
        if ids.size and (ids.min() < 0 or ids.max() >= self.header["vocab_size"]):
            raise DataError(f"{self.path}: ids {ids.min()}..{ids.max()} do not fit a vocabulary of "
                            f"{self.header['vocab_size']}")
        data = ids.astype(token_dtype(self.header["vocab_size"])).tobytes()
        self.file.write(data)
        self.digest.update(data)
        for key, more in zip(self.counts, (ids.size, n_bytes, n_words)):
            self.counts[key] += int(more)

    def state(self) -> dict:
        """Push everything to the disk and return what `resume=` needs."""
        self.file.flush()
        os.fsync(self.file.fileno())
        return dict(self.counts)

    def close(self) -> Path:
        """Write the header, then give the file its name."""
        header = self.header | self.counts | {"sha256": self.digest.hexdigest()}
        text = json.dumps({key: header[key] for key in HEADER_FIELDS}).encode()
        prefix = PREFIX.pack(MAGIC, VERSION, len(text), zlib.crc32(text))
        if len(prefix) + len(text) > HEADER_BYTES:
            raise DataError(f"{self.path}: the source description is too long for the header")
        self.file.seek(0)
        self.file.write((prefix + text).ljust(HEADER_BYTES, b"\0"))
        self.state()
        self.file.close()
        self.temporary.chmod(0o644)     # mkstemp's 0600 would hide the corpus from other users
        os.replace(self.temporary, self.path)
        return self.path

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if kind is None:
            self.close()
            return
        self.file.close()
        if not self.keep:
            self.temporary.unlink(missing_ok=True)


def write_tokens(path, arrays: Iterable, *, vocab_size: int, tokenizer: str, eot: int, bos: int,
                 n_bytes: int = 0, n_words: int = 0, split="train", source="") -> Path:
    """Stream arrays of ids into a token file, atomically. Returns its path; raises DataError."""
    with TokenWriter(path, vocab_size=vocab_size, tokenizer=tokenizer, eot=eot, bos=bos,
                     split=split, source=source) as writer:
        writer.append([], n_bytes, n_words)
        for ids in arrays:
            writer.append(ids)
    return writer.path


# ---------------------------------------------------------------------------------------------
# Windows

def generator(*numbers: int) -> np.random.Generator:
    """A generator that is a pure function of the numbers: nothing to save, nothing to restore."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(numbers)))


class Windows:
    """Windows of T tokens and their next tokens, without state: batch(step) is a pure function.

    Resuming at step n needs no sampler state and evaluation cannot disturb training, because
    every batch has its own generator, seeded by (seed, step, micro). That generator draws the
    offsets of the global batch and each rank takes its slice, so 2 ranks x 4 see what 1 x 8 sees.

    bos_policy         position 0 of x                 where BOS is
      "none"           whatever token the window hit   nowhere (x holds the stream as it is)
      "document"       whatever token the window hit   at each document's start: separators (EOT)
                                                       are shown as BOS; targets still say EOT
      "window"         BOS, always                     position 0, then T-1 contiguous tokens

    With GPT-2, EOT and BOS are one id, so "none" and "document" coincide.

    tokens: TokenFile or 1-d array. bos, eot: by default the file's. tokenizer: object from
    `get_tokenizer`, by default the file's; needed only to count bytes and words.
    Raises DataError when the text is shorter than one window.
    """

    def __init__(self, tokens, block_size: int, batch_size: int, *, bos_policy: str = "none",
                 bos: int | None = None, eot: int | None = None, seed: int = 0, tokenizer=None):
        is_file = isinstance(tokens, TokenFile)
        self.tokens = tokens.tokens if is_file else np.asarray(tokens)
        self.block_size, self.batch_size, self.seed = block_size, batch_size, seed
        self.bos_policy = bos_policy
        self.bos = tokens.bos if bos is None and is_file else bos
        self.eot = tokens.eot if eot is None and is_file else eot
        self.tokenizer = tokens.tokenizer if tokenizer is None and is_file else tokenizer
        if bos_policy not in ("none", "document", "window"):
            raise DataError(f"bos_policy {bos_policy!r}: choose none, document or window")
        if bos_policy != "none" and self.bos is None:
            raise DataError(f"bos_policy {bos_policy!r} needs a bos id")
        if bos_policy == "document" and self.eot is None:
            raise DataError("bos_policy 'document' needs the eot id that separates documents")
        self.lead = 0 if bos_policy == "window" else 1      # tokens of the stream before target 0
        self.file = tokens if is_file else None
        if len(self.tokens) < block_size + 1:
            where = tokens.path if is_file else "the text"
            raise DataError(f"{where} has {len(self.tokens)} tokens, a window of {block_size} "
                            f"needs {block_size + 1}: take a longer text or a smaller block size")

    def batch(self, step: int, rank: int = 0, world: int = 1, micro: int = 0):
        """(x, y), int64 (B, T) each: the rank's share of random windows of (seed, step, micro)."""
        high = len(self.tokens) - self.block_size - self.lead + 1
        offsets = generator(self.seed, step, micro).integers(high, size=world * self.batch_size)
        return self._cut(offsets[rank * self.batch_size:(rank + 1) * self.batch_size])

    def sequential(self, n_sequences: int | None = None) -> "Sequential":
        """Windows whose targets do not overlap, in order; n_sequences are spread over the file."""
        total = (len(self.tokens) - self.lead) // self.block_size
        n = total if n_sequences is None else min(n_sequences, total)
        return Sequential(self, np.arange(n) * total // max(n, 1) * self.block_size)

    def _cut(self, offsets: np.ndarray):
        span = self.block_size + self.lead
        rows = self.tokens[offsets[:, None] + np.arange(span)].astype(np.int64)  # (B, T + lead)
        if self.file and rows.max(initial=0) >= self.file.vocab_size:
            self.file.verify()      # says what is wrong
        if self.bos_policy == "window":
            rows = np.concatenate([np.full((len(rows), 1), self.bos), rows], axis=1)  # (B, T + 1)
        x, y = rows[:, :-1].copy(), rows[:, 1:].copy()  # (B, T), (B, T)
        if self.bos_policy == "document":
            x[x == self.eot] = self.bos
        return torch.from_numpy(x), torch.from_numpy(y)


class Sequential:
    """Evaluation windows: iterate for (x, y) batches of at most batch_size rows; len() = windows.

    n_targets, n_bytes and n_words describe the targets, i.e. what a summed loss is spread over.
    Bytes: the UTF-8 bytes behind the target ids (specials have none). Words: whitespace-separated,
    a word counted in the window that predicts its first character, so no word is counted twice.
    """

    def __init__(self, windows: Windows, offsets: np.ndarray):
        self.windows, self.offsets = windows, offsets
        self.n_targets = len(offsets) * windows.block_size

    def __len__(self) -> int:
        return len(self.offsets)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for start in range(0, len(self), self.windows.batch_size):
            yield self.windows._cut(self.offsets[start:start + self.windows.batch_size])

    @functools.cached_property
    def _tokenizer(self):
        tokenizer = self.windows.tokenizer
        if tokenizer is None:
            raise DataError("counting bytes or words needs Windows(..., tokenizer=)")
        return get_tokenizer(tokenizer) if isinstance(tokenizer, str) else tokenizer

    @functools.cached_property
    def n_bytes(self) -> int:
        """UTF-8 bytes behind the targets."""
        table = self._tokenizer.token_bytes()
        return sum(int(table[self._targets(o)].sum()) for o in self.offsets)

    @functools.cached_property
    def n_words(self) -> int:
        """Whitespace-separated words that begin inside the targets."""
        decode, words = self._tokenizer.decode, 0
        for offset in self.offsets:
            text = decode(self._targets(offset), show_specials=False)
            before = max(offset + self.windows.lead - 1, 0)
            previous = decode(self.windows.tokens[before:offset + self.windows.lead],
                              show_specials=False)
            begun = bool(previous) and not previous[-1].isspace() and not text[:1].isspace()
            words += len(text.split()) - (begun and bool(text))
        return words

    def _targets(self, offset: int) -> np.ndarray:
        start = offset + self.windows.lead
        return self.windows.tokens[start:start + self.windows.block_size]
