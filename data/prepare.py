"""Text -> token file -> batches: the road every corpus of this project takes.

    documents  d1, d2, ...                       any text: a corpus name or a file
    stream     EOT d1 EOT d2 EOT ...             ids of one tokenizer, one long array per split
    token file header + uint16 | uint32 ids      the header says which tokenizer, and the sha256
    window     (x, y), y[t] = the token after x[t], each (B, T)

Two words are kept apart here that this field often mixes up. *Position 0* is a place: the first slot
of a window, whatever token lies there. *BOS* is a token: it may lie at position 0, anywhere, or
nowhere. Ledger (arXiv 2606.20743) cuts random windows and prepends nothing, so its "BOS" is position 0;
Llama always shows BOS at position 0. `Windows(bos_policy=...)` makes the choice a flag.

Perplexity per token, word and byte are three numbers for one model. So the header counts the UTF-8
bytes and the whitespace-separated words of the text, and `Windows.sequential()` counts those that its
targets cover: bits per byte = sum(nll) / (n_bytes ln 2); word perplexity = exp(sum(nll) / n_words).

Read first: `Windows`, then `TokenFile`, then `stdlib_documents` (the default corpus: the source of the
Python that runs you, about 12 MB, no network). Nothing is downloaded unless you say --download.

    python data/prepare.py stdlib                         a few seconds
    python data/prepare.py my.txt --tokenizer gpt2
    python data/prepare.py fineweb-edu --tokenizer gpt2 --tokens 100_000_000 --download
"""
from __future__ import annotations

import argparse
import functools
import hashlib
import itertools
import json
import os
import re
import struct
import sys
import sysconfig
import tempfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

VAL_FRACTION = 0.05
MAGIC, VERSION, HEADER_BYTES = b"TOKENS\r\n", 1, 4096   # \r\n: a text-mode copy breaks the magic
PREFIX = struct.Struct("<8sIII")                        # magic, version, JSON length, JSON crc32


class DataError(ValueError):
    """Bad data or a bad request, told in one line that says what to do."""


# ---------------------------------------------------------------------------------------------
# Tokenizers: .name .vocab_size .eot .bos .encode .decode .token_bytes

def _decode(ids, vocab_size: int, specials: dict[int, str], plain: Callable, show: bool) -> str:
    """Shared `decode`: runs of ordinary ids go through `plain`, special ids are shown by name."""
    ids = np.asarray(ids, dtype=np.int64).reshape(-1)
    if ids.size and (ids.min() < 0 or ids.max() >= vocab_size):
        bad = ids[(ids < 0) | (ids >= vocab_size)][0]
        raise DataError(f"cannot decode id {bad}: the vocabulary is 0..{vocab_size - 1}")
    cuts = np.flatnonzero(np.isin(ids, list(specials)))
    text, start = [], 0
    for cut in [*cuts, len(ids)]:
        text.append(plain(ids[start:cut]))
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
        """Ids -> text. Broken UTF-8 becomes U+FFFD; specials are shown, or newlines if not wanted."""
        specials = {self.eot: "<|endoftext|>", self.bos: "<|bos|>"}
        plain = lambda run: run.astype(np.uint8).tobytes().decode("utf-8", "replace")  # noqa: E731
        return _decode(ids, self.vocab_size, specials, plain, show_specials)

    def token_bytes(self) -> np.ndarray:
        """(vocab,) UTF-8 bytes behind each id, 0 for specials."""
        return np.array([1] * 256 + [0, 0])


class Gpt2Tokenizer:
    """GPT-2's byte-pair encoding through tiktoken; its one special id serves as EOT and as BOS."""

    name, vocab_size, eot, bos = "gpt2", 50257, 50256, 50256

    def __init__(self):
        try:
            import tiktoken
            self.bpe = tiktoken.get_encoding("gpt2")
        except ImportError:
            raise DataError("the gpt2 tokenizer needs tiktoken: pip install tiktoken") from None
        except Exception as error:  # tiktoken's download fails in many ways: requests, OSError, hash
            base = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
            need = [hashlib.sha1((base + f).encode()).hexdigest()
                    for f in ("vocab.bpe", "encoder.json")]
            raise DataError(
                "the gpt2 tokenizer is not on this machine and could not be fetched "
                f"({type(error).__name__}): run it once online, or set TIKTOKEN_CACHE_DIR to a "
                f"folder holding tiktoken's files {need[0]} and {need[1]}") from None

    def encode(self, text: str) -> np.ndarray:
        """Text -> uint16 ids; '<|endoftext|>' inside a text is text, not the special id."""
        return np.array(self.bpe.encode_ordinary(text), dtype=np.uint16)

    def decode(self, ids, show_specials: bool = True) -> str:
        """Ids -> text, as for bytes."""
        plain = lambda run: self.bpe.decode_bytes(run.tolist()).decode("utf-8", "replace")  # noqa: E731
        return _decode(ids, self.vocab_size, {self.eot: "<|endoftext|>"}, plain, show_specials)

    @functools.cache
    def token_bytes(self) -> np.ndarray:
        """(vocab,) UTF-8 bytes behind each id, 0 for specials."""
        table = [len(self.bpe.decode_single_token_bytes(i)) for i in range(self.eot)]
        return np.array([*table, 0])


def get_tokenizer(name: str):
    """"bytes", "gpt2" or the path of a tokenizer.json -> tokenizer. Raises DataError."""
    return _get_tokenizer(str(name))


@functools.cache
def _get_tokenizer(name: str):
    if name in ("bytes", "gpt2"):
        return BytesTokenizer() if name == "bytes" else Gpt2Tokenizer()
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

    @classmethod
    def open(cls, path: str | Path) -> "TokenFile":
        """Read and check the header, map the ids. DataError: missing, foreign, damaged, cut short."""
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
    `resume={}`  : the fixed name PATH.part, kept when interrupted; `resume=state()` continues there.
    """

    def __init__(self, path, *, vocab_size, tokenizer, eot, bos, split="train", source="",
                 resume: dict | None = None):
        self.path = Path(path)
        self.header = dict(vocab_size=vocab_size, tokenizer=tokenizer, eot=eot, bos=bos,
                           dtype=token_dtype(vocab_size).name, split=split, source=source)
        self.counts = dict(n_tokens=0, n_bytes=0, n_words=0)
        self.digest, self.keep = hashlib.sha256(), resume is not None
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if resume:
            self.temporary = self.path.with_name(self.path.name + ".part")
            self.counts.update(resume)
            self.file = self.temporary.open("r+b")
            end = HEADER_BYTES + self.counts["n_tokens"] * token_dtype(vocab_size).itemsize
            self.file.truncate(end)                # what came after the last saved state is dropped
            self.file.seek(HEADER_BYTES)
            while part := self.file.read(1 << 22):
                self.digest.update(part)
        elif self.keep:
            self.temporary = self.path.with_name(self.path.name + ".part")
            self.file = self.temporary.open("wb")
            self.file.seek(HEADER_BYTES)
        else:
            handle, name = tempfile.mkstemp(prefix=self.path.name + ".", suffix=".tmp",
                                            dir=self.path.parent)
            self.temporary, self.file = Path(name), os.fdopen(handle, "wb")
            self.file.seek(HEADER_BYTES)

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
        if len(self.tokens) < block_size + 1:
            where = tokens.path if is_file else "the text"
            raise DataError(f"{where} has {len(self.tokens)} tokens, a window of {block_size} needs "
                            f"{block_size + 1}: take a longer text or a smaller block size")

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


# ---------------------------------------------------------------------------------------------
# Corpora: each is an iterator of (key, text); the hash of the key decides the split

def hashed(key: str, salt: str = "split") -> float:
    """A fixed pseudo-random number in [0, 1) for a key: the same on every machine and every run."""
    return int.from_bytes(hashlib.sha256(f"{salt}:{key}".encode()).digest()[:7], "big") / 2**56


def stdlib_documents() -> list[tuple[str, str]]:
    """(path, source) of each module of the running Python's standard library, shuffled by hash.

    Left out: tests, installed packages, and files that differ between machines (_sysconfigdata).
    """
    root = Path(sysconfig.get_path("stdlib"))
    skip = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
    found = []
    for folder, folders, names in os.walk(root):
        folders[:] = [f for f in folders if f not in skip]
        for name in names:
            if not name.endswith(".py") or name.startswith("_sysconfigdata"):
                continue
            path = Path(folder, name)
            try:
                text = path.read_text(encoding="utf-8")     # universal newlines: \n everywhere
            except (UnicodeDecodeError, OSError):
                continue
            if text:
                found.append((path.relative_to(root).as_posix(), text))
    if not found:
        raise DataError(f"no standard library source under {root}: give a text file instead")
    return sorted(found, key=lambda item: hashed(item[0], "order"))


def write_splits(documents: Iterable[tuple[str, str]], tokenizer, folder: Path, stem: str, *,
                 val_fraction: float = VAL_FRACTION, source: str = "") -> dict[str, Path]:
    """Documents -> the train and val token files of `stem`. Returns {split: path}."""
    open_writer = functools.partial(
        TokenWriter, vocab_size=tokenizer.vocab_size, tokenizer=tokenizer.name, eot=tokenizer.eot,
        bos=tokenizer.bos, source=source)
    paths = {split: token_path(folder, stem, tokenizer, split) for split in ("train", "val")}
    with open_writer(paths["train"], split="train") as train, \
            open_writer(paths["val"], split="val") as val:
        for writer in (train, val):
            writer.append([tokenizer.eot])
        for key, text in documents:
            writer = val if hashed(key) < val_fraction else train
            writer.append(tokenizer.encode(text), len(text.encode()), len(text.split()))
            writer.append([tokenizer.eot])
    return paths


def token_path(folder: Path, stem: str, tokenizer, split: str) -> Path:
    """Where `load` looks for a corpus: FOLDER/STEM-TOKENIZER-SPLIT.bin."""
    return Path(folder, f"{stem}-{tokenizer.name.replace(':', '-')}-{split}.bin")


def cache_folder() -> Path:
    """data/cache beside this file; a user or temporary folder where that cannot be written."""
    for folder in (Path(__file__).resolve().parent / "cache",
                   Path.home() / ".cache" / "attention-sinks",
                   Path(tempfile.gettempdir(), "attention-sinks")):
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError:
            continue
        if os.access(folder, os.W_OK):
            return folder
    raise DataError("no folder for token files can be written: give --out DIR")


def load(name_or_path, split: str = "train", *, tokenizer: str | None = None, folder=None,
         build: bool = True) -> TokenFile:
    """A corpus by name, text file or token file -> its TokenFile. Raises DataError."""
    name = str(name_or_path)
    split = {"valid": "val", "validation": "val"}.get(split, split)
    if name.endswith(".bin"):
        return TokenFile.open(name)
    tok = get_tokenizer(tokenizer or "bytes")
    folder = Path(folder) if folder else cache_folder()
    stem = "stdlib-py" + sys.version.split()[0]
    path = token_path(folder, stem, tok, split)
    if not path.exists():
        write_splits(stdlib_documents(), tok, folder, stem, source=stem)
    return TokenFile.open(path)
