"""Text -> token files: every corpus of this project is prepared here. (Batches: data/__init__.py.)

    documents  (key, text), ...        a corpus name or a file, streamed
    split      hash(key) < fraction    by document: blind to order, alphabet and duplicates
    stream     EOT d1 EOT d2 EOT ...   one token file per split: FOLDER/CORPUS-TOKENIZER-SPLIT.bin

The default corpus is `stdlib`, the source of the Python that runs you: about 12 MB, no network, a
second to build. Nothing is ever downloaded without --download.

    corpus        documents                         paper that trains or tests on it
    stdlib        a module's source                 ours: the first command works offline
    wikitext2     an article                        OASIS (arXiv 2605.17887), evaluation
    fineweb-edu   a web page                        Ledger (arXiv 2606.20743), training
    bookcorpus    512 sentences                     OASIS, training
    wiki40b       an article                        OASIS, training and evaluation
    gsm8k         "Question: ... Answer: ..."       OASIS, capability
    FILE          text, .jsonl or .parquet          yours

Read first: `load`, then `stdlib_documents`, then `write_splits`, which a kill cannot corrupt.
"""
from __future__ import annotations

import argparse
import ast
import contextlib
import dataclasses
import hashlib
import io
import itertools
import json
import math
import os
import re
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace

from tqdm import tqdm

if __package__ in (None, ""):       # run as a script: the package is one folder up
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from data import (BytesTokenizer, DataError, Gpt2Tokenizer, HfTokenizer, Sequential, TokenFile,
                  TokenWriter, Windows, generator, get_tokenizer, read_object, token_dtype,
                  write_tokens)

__all__ = ["BytesTokenizer", "DataError", "Gpt2Tokenizer", "HfTokenizer", "Sequential", "TokenFile",
           "TokenWriter", "Windows", "generator", "get_tokenizer", "load", "token_dtype",
           "write_tokens"]

VAL_FRACTION = 0.05

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


def text_documents(path: Path, val_fraction: float) -> list[tuple[str, str]]:
    """One text file -> its head as "train" and its tail, from a line's start, as "val".

    The tail, because a text has no documents to draw from; nothing of it is seen in training.
    """
    try:
        text = path.read_bytes().decode("utf-8").replace("\r\n", "\n")
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start})") from None
    if not text.strip():
        raise DataError(f"{path} holds no text")
    cut = int(len(text) * (1 - val_fraction))
    cut = text.rfind("\n", 0, cut) + 1 or cut
    return [("train", text[:cut]), ("val", text[cut:])]


def row_text(row: dict) -> str:
    """A data set's row -> text: GSM8K's question and answer, or the field `text`."""
    if "question" in row and "answer" in row:
        return f"Question: {row['question']}\nAnswer: {row['answer']}"
    text = row.get("text")
    if not isinstance(text, str):
        raise DataError(f"a row has no field 'text', only {', '.join(map(str, row))[:80]}")
    if text.startswith(("b'", 'b"')):           # some Wiki40B exports hold the repr of bytes
        text = unquoted(text)
    if "_START_" in text:                       # Wiki40B marks its structure with words
        text = re.sub(r"\n_START_(ARTICLE|SECTION|PARAGRAPH)_\n", "\n\n", text).strip()
        text = text.replace("_NEWLINE_", "\n")
    return text


def unquoted(text: str) -> str:
    """The text behind the repr of bytes; "b'cause it is so" only begins like one and stays."""
    try:
        value = ast.literal_eval(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):      # all that it may raise
        return text
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else text


def whole(rows: Iterable[dict]) -> Iterator[str]:
    """One document per row."""
    return map(row_text, rows)


def articles(rows: Iterable[dict]) -> Iterator[str]:
    """WikiText's rows are lines; ' = Title = ' begins an article."""
    lines: list[str] = []
    for line in map(row_text, rows):
        if re.match(r" = [^=]+ = *$", line) and any(map(str.strip, lines)):
            yield "".join(lines)
            lines = []
        lines.append(line if line.endswith("\n") else line + "\n")
    yield "".join(lines)


def bundles(rows: Iterable[dict], size: int = 512) -> Iterator[str]:
    """BookCorpus's rows are sentences without book marks; 512 in a row make a document."""
    rows = iter(rows)
    while sentences := list(itertools.islice(map(row_text, rows), size)):
        yield "\n".join(map(str.strip, sentences))


HELD_OUT = {"train": "train", "val": "validation", "test": "test"}
HUB = {  # name: (data set, configuration, {our split: its split}, rows -> documents)
    "wikitext2": ("Salesforce/wikitext", "wikitext-2-raw-v1", HELD_OUT, articles),
    "fineweb-edu": ("HuggingFaceFW/fineweb-edu", "sample-10BT", {"train": "train"}, whole),
    "bookcorpus": ("rojagtap/bookcorpus", None, {"train": "train"}, bundles),
    "wiki40b": ("google/wiki40b", "en", HELD_OUT, whole),
    "gsm8k": ("openai/gsm8k", "main", {"train": "train", "test": "test"}, whole),
}
BUDGET = {name: 100_000_000 for name in ("fineweb-edu", "bookcorpus", "wiki40b")}


def hub_rows(name: str, split: str) -> Callable[[int], Iterable[dict]]:
    """Stream a Hugging Face data set: skip -> rows. Needs the network: only for --download."""
    try:
        from datasets import load_dataset
    except ImportError:
        raise DataError(f"{name} needs datasets: pip install datasets") from None
    data_set, configuration, splits, _ = HUB[name]
    try:
        stream = load_dataset(data_set, configuration, split=splits[split], streaming=True)
    except Exception as error:      # offline, moved, gated: the library has a type for each
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise DataError(f"cannot fetch {data_set}: {reason}") from None
    return lambda skip: stream.skip(skip) if skip else stream


def file_rows(path: Path, by_line: bool) -> Callable[[int], Iterable[dict]]:
    """skip -> the rows of a .jsonl, .parquet or text file (its lines, or all of it as one row)."""
    def rows(skip: int) -> Iterator[dict]:
        if path.suffix == ".parquet":
            found = parquet_rows(path)
        else:
            # not str.splitlines, which cuts at U+2028 or U+0085 too: a JSON string may hold those
            lines = io.StringIO(text_documents(path, 0.0)[0][1], newline="\n")
            found = (json_rows(path, lines) if path.suffix == ".jsonl" else
                     ({"text": line} for line in (lines if by_line else [lines.read()])))
        return itertools.islice(found, skip, None)
    return rows


def json_rows(path: Path, lines: Iterable[str]) -> Iterator[dict]:
    """Lines of JSON objects -> rows. DataError names a line that is none, or whose text has no
    UTF-8: JSON may escape one half of a surrogate pair, which is no character."""
    for number, line in enumerate(lines, 1):
        if line.strip():
            try:
                row = json.loads(line)
                escaped = json.dumps(row, ensure_ascii=False) if "\\u" in line else ""
            except (ValueError, RecursionError):    # RecursionError: thousands of open brackets
                row = None
            if not isinstance(row, dict):
                raise DataError(f"{path}, line {number}: not a JSON object")
            if re.search("[\ud800-\udfff]", escaped):
                raise DataError(f"{path}, line {number}: half of a surrogate pair is no text")
            yield row


def parquet_rows(path: Path) -> Iterator[dict]:
    """A parquet file -> rows, a batch at a time."""
    try:
        import pyarrow.parquet
    except ImportError:
        raise DataError(f"{path} needs pyarrow: pip install pyarrow") from None
    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
    except (pyarrow.ArrowException, UnicodeDecodeError) as error:
        raise DataError(f"{path} is not a readable parquet file: {error}") from None


def documents_of(rows: Callable, make: Callable) -> Callable[[int], Iterator[tuple[str, str]]]:
    """skip -> (key, text) of the documents after the first `skip`; a text is its own key."""
    if make is whole:       # one row is one document, so the stream itself can skip
        return lambda skip: ((text, text) for text in make(rows(skip)))
    return lambda skip: ((text, text) for text in itertools.islice(make(rows(0)), skip, None))


# ---------------------------------------------------------------------------------------------
# Building and loading

def by_hash(val_fraction: float) -> Callable[[str], str]:
    """Split by document, blind to order and alphabet; equal documents never straddle the splits."""
    return lambda key: "val" if hashed(key) < val_fraction else "train"


def write_splits(documents: Callable, tokenizer, paths: dict[str, Path], split_of: Callable, *,
                 source: str, budget: int | None = None, resumable: bool = False,
                 save_every: int = 1 << 20) -> None:
    """Documents -> one token file per split. `documents(skip)` yields (key, text).

    resumable: every `save_every` tokens the files are pushed to disk and their lengths noted in
    FIRST_PATH.progress.json; a later call cuts the files to those lengths and skips the documents
    already in them, so the result is the same byte for byte, however often it was killed.
    """
    first = next(iter(paths.values()))
    note = first.with_name(first.name + ".progress.json")
    settings = dict(source=source, tokenizer=tokenizer.name, splits=list(paths))
    state = dict(settings=settings, documents=0, counts={split: {} for split in paths})
    if resumable and note.exists():
        state = read_object(note)
        if state.get("settings") != settings:
            raise DataError(f"{note} belongs to another preparation: finish that one or delete it")
    with contextlib.ExitStack() as stack:
        writers = {split: stack.enter_context(TokenWriter(
            path, vocab_size=tokenizer.vocab_size, tokenizer=tokenizer.name, eot=tokenizer.eot,
            bos=tokenizer.bos, split=split, source=source,
            resume=state["counts"][split] if resumable else None)) for split, path in paths.items()}
        for writer in writers.values():
            if not writer.counts["n_tokens"]:
                writer.append([tokenizer.eot])
        total = lambda: sum(w.counts["n_tokens"] for w in writers.values())  # noqa: E731
        saved = total()
        bar = stack.enter_context(tqdm(total=budget, initial=saved, unit="tok", unit_scale=True,
                                       desc=first.stem, leave=False, disable=None))
        for key, text in documents(state["documents"]):
            if budget and total() >= budget:
                break
            if text:
                writer = writers[split_of(key)]
                writer.append(tokenizer.encode(text), len(text.encode("utf-8", "replace")),
                              len(text.split()))
                writer.append([tokenizer.eot])
            state["documents"] += 1
            bar.update(total() - bar.n)
            if resumable and total() - saved >= save_every:
                state["counts"] = {split: w.state() for split, w in writers.items()}
                replace_text(note, json.dumps(state))
                saved = total()
    note.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    """Write a small file so that a reader, or a crash, sees the old one or the new one."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")    # whatever the locale says
    os.replace(temporary, path)


def token_path(folder: Path, stem: str, tokenizer, split: str) -> Path:
    """Where `load` looks for a corpus: FOLDER/STEM-TOKENIZER-SPLIT.bin."""
    return Path(folder, f"{stem}-{tokenizer.name.replace(':', '-')}-{split}.bin")


def cache_folders() -> list[Path]:
    """data/cache beside this file; a user and a temporary folder for where that is read-only."""
    return [Path(__file__).resolve().parent / "cache", Path.home() / ".cache" / "attention-sinks",
            Path(tempfile.gettempdir(), "attention-sinks")]


def writable_folder() -> Path:
    """The first cache folder that can be written. DataError if none can."""
    for folder in cache_folders():
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            if os.access(folder, os.W_OK):
                return folder
    raise DataError("no folder for token files can be written: give --out DIR")


def corpus_stem(name: str) -> str:
    """The first part of a corpus's token file names; text files carry the hash of their content."""
    if name == "stdlib":
        return "stdlib-py" + sys.version.split()[0]
    if name in HUB:
        return name
    if not Path(name).is_file():
        raise DataError(f"no corpus or file {name!r}: give stdlib, {', '.join(HUB)}, a text file "
                        "or a token file (.bin)")
    return f"{Path(name).stem}-{hashlib.sha256(Path(name).read_bytes()).hexdigest()[:12]}"


def build_local(name: str, tokenizer, folder: Path,
                val_fraction: float = VAL_FRACTION) -> dict[str, Path]:
    """Build a corpus that needs no network (stdlib or a file). Returns {split: path}."""
    stem, split_of, path = corpus_stem(name), by_hash(val_fraction), Path(name)
    if name == "stdlib":
        found = stdlib_documents()
        documents = lambda skip: found[skip:]  # noqa: E731
    elif path.suffix in (".jsonl", ".parquet"):
        documents = documents_of(file_rows(path, by_line=False), whole)
    else:
        found, split_of = text_documents(path, val_fraction), str
        documents = lambda skip: found[skip:]  # noqa: E731
    paths = {split: token_path(folder, stem, tokenizer, split) for split in ("val", "train")}
    write_splits(documents, tokenizer, paths, split_of, source=stem)
    return paths


def load(name_or_path, split: str = "train", *, tokenizer: str | None = None, folder=None,
         build: bool = True) -> TokenFile:
    """A corpus by name, text file or token file -> its TokenFile. Never touches the network.

    name_or_path: stdlib, wikitext2, fineweb-edu, bookcorpus, wiki40b, gsm8k, a text, .jsonl or
    .parquet file, or a token file (.bin; for another split its sibling is taken). tokenizer: bytes
    (default), gpt2 or a tokenizer.json. stdlib and files are built on first use, atomically, so
    the ranks of a distributed run may race. "a+b" are several of these in one, see `mixed`.
    Raises DataError with the command that would help.
    """
    name = str(name_or_path)
    split = {"valid": "val", "validation": "val"}.get(split, split)
    if "+" in name and not Path(name).is_file():
        return mixed([load(part, split, tokenizer=tokenizer, folder=folder, build=build)
                      for part in name.split("+")], folder or writable_folder())
    if name.endswith(".bin"):
        return _open_split(Path(name), split, tokenizer)
    tok, stem = get_tokenizer(tokenizer or "bytes"), corpus_stem(name)
    at_hand = build and name not in HUB and split in ("train", "val")
    for place in [Path(folder)] if folder else cache_folders():
        path = token_path(place, stem, tok, split)
        if path.exists():
            try:
                return opened(path, tok)
            except DataError:
                if not at_hand:
                    raise
    if not at_hand:
        command = f"python data/prepare.py {name}" + (" --download" if name in HUB else "")
        command += f" --tokenizer {tokenizer}" if tok.name != "bytes" else ""
        raise DataError(f"{name} ({split}, {tok.name}) is not prepared on this machine: {command}")
    paths = build_local(name, tok, Path(folder) if folder else writable_folder())
    return opened(paths[split], tok)


def opened(path: Path, tokenizer) -> TokenFile:
    """A token file with the BOS of the tokenizer in use: tokenizer_config.json may have named
    another since it was built. The ids hold only EOTs, which tokenizer.json alone decides."""
    return dataclasses.replace(TokenFile.open(path), bos=tokenizer.bos)


def mixed(files: list[TokenFile], folder) -> TokenFile:
    """Corpora behind one another in one file, written once: random windows then show each by its
    share of the tokens. The name carries the hash of what is in it. DataError: two tokenizers."""
    first = files[0]
    if other := next((f for f in files if f.tokenizer != first.tokenizer), None):
        raise DataError(f"{first.path} has the tokenizer {first.tokenizer}, {other.path} has "
                        f"{other.tokenizer}: a mix needs one")
    digest = hashlib.sha256(" ".join(f.sha256 for f in files).encode()).hexdigest()[:12]
    path = token_path(folder, f"mix-{digest}", SimpleNamespace(name=first.tokenizer), first.split)
    if not path.exists():
        total = {key: sum(getattr(f, key) for f in files) for key in ("n_bytes", "n_words")}
        write_tokens(path, (f.tokens[i:i + 2**22] for f in files for i in range(0, len(f), 2**22)),
                     vocab_size=first.vocab_size, tokenizer=first.tokenizer, eot=first.eot,
                     bos=first.bos, split=first.split, source=" + ".join(f.source for f in files),
                     **total)
    return opened(path, first)


def open_source(name_or_path, split: str = "train", *, tokenizer: str | None = None):
    """Where batches come from: a token file, as `load` finds it, or the toy, "backcopy" or
    "backcopy:CORPUS", which draws them on the fly. Both know their vocab_size, bos, eot, tokenizer,
    sha256, split, source and path, and have

        windows(T, batch_size, seed=, bos_policy=, ...) -> .batch(step, rank, world, micro), (x, y)
                                                           .sequential(n), held-out windows in order
        reader(tokenizer) -> .bos, .decode(ids)            about -> a phrase on their size

    A batch is a pure function of (seed, step), whatever the source. Raises DataError.
    """
    name, _, corpus = str(name_or_path).partition(":")
    if name != "backcopy":
        return load(name_or_path, split, tokenizer=tokenizer)
    from data.backcopy import Backcopy      # which imports this module, for its bigrams
    return Backcopy(corpus or "stdlib", split=split)


def _open_split(path: Path, split: str, tokenizer: str | None) -> TokenFile:
    file, tok = TokenFile.open(path), get_tokenizer(tokenizer) if tokenizer else None
    if tok and tok.name != file.tokenizer:
        raise DataError(f"{path} was made with the tokenizer {file.tokenizer}, not {tokenizer}")
    if file.split == split:
        return opened(path, tok or file)
    sibling = path.with_name(path.name.replace(f"-{file.split}.bin", f"-{split}.bin"))
    if sibling == path or not sibling.exists():
        raise DataError(f"{path} holds the split {file.split}, and no {split} file lies beside it")
    return opened(sibling, tok or file)


# ---------------------------------------------------------------------------------------------
# Command line

def prepare(args) -> dict[str, Path]:
    """Do what the command line asks. Returns {split: path}; raises DataError."""
    tok = get_tokenizer(args.tokenizer, args.download)
    folder = Path(args.out) if args.out else writable_folder()
    budget = int(args.tokens) if args.tokens else BUDGET.get(args.corpus)
    if args.corpus not in HUB:
        if args.from_file or args.download and args.tokenizer != "gpt2":
            raise DataError("--download and --from-file go with: " + ", ".join(HUB))
        if args.tokens:
            raise DataError(f"--tokens is for corpora from a network: {args.corpus} is read whole")
        return build_local(args.corpus, tok, folder, args.val_fraction)
    if not args.download and not args.from_file:
        raise DataError(f"{args.corpus} is not part of Python: add --download to fetch it, or "
                        "--from-file FILE... if you have it")
    make, paths = HUB[args.corpus][3], {}
    if args.from_file:
        rows = {split: file_rows(path, make is not whole)
                for split, path in name_splits(args.corpus, args.from_file).items()}
    else:
        rows = {split: hub_rows(args.corpus, split) for split in HUB[args.corpus][2]}
    for split, source in rows.items():
        carve = split == "train" and "val" not in HUB[args.corpus][2]
        here = {s: token_path(folder, args.corpus, tok, s)
                for s in (("train", "val") if carve else (split,))}
        share = budget if split == "train" or not budget else int(budget * args.val_fraction)
        print(estimate(split, share, tok))
        write_splits(documents_of(source, make), tok, here,
                     by_hash(args.val_fraction) if carve else lambda key, split=split: split,
                     source=f"{args.corpus} {HUB[args.corpus][0]} {split} val={args.val_fraction}",
                     budget=share, resumable=True)
        paths |= here
    return paths


def name_splits(corpus: str, files: list[str]) -> dict[str, Path]:
    """Which file is which split: by its name where that says so, else by the order given."""
    splits, order = {}, [s for s in ("train", "val", "test") if s in HUB[corpus][2]]
    for position, path in enumerate(map(Path, files)):
        said = [s for s in ("train", "val", "test") if s in path.stem.lower()]
        split = said[-1] if said else order[min(position, len(order) - 1)]
        if split in splits or split not in order:
            raise DataError(f"--from-file: {path} would be the {split} split of {corpus}: "
                            f"give one file for each of {', '.join(order)}, in this order")
        splits[split] = path
    return splits


def estimate(split: str, budget: int | None, tokenizer) -> str:
    """One line on what is about to happen."""
    if not budget:
        return f"{split}: the whole split, as {tokenizer.name} tokens"
    size = budget * token_dtype(tokenizer.vocab_size).itemsize / 1e9
    return f"{split}: {budget:,} {tokenizer.name} tokens, {size:.2f} GB on disk; resumable"


def parser() -> argparse.ArgumentParser:
    """The command line, grouped."""
    p = argparse.ArgumentParser(
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Turn a corpus into token files, one per split, with a header that names the\n"
        "tokenizer and hashes the ids. train.py and eval.py take the corpus name or a file.",
        epilog="""examples
  python data/prepare.py stdlib                        a second, no network: the default corpus
  python data/prepare.py my.txt --tokenizer gpt2       head for training, tail for validation
  python data/prepare.py wikitext2 --download          fetch it once
  python data/prepare.py wikitext2 --from-file wiki.train.raw wiki.valid.raw wiki.test.raw
  python data/prepare.py fineweb-edu --tokenizer gpt2 --tokens 1e9 --download

Offline unless --download is given. Interrupted? The same command continues where it was.""")
    what = p.add_argument_group("what")
    what.add_argument("corpus", help="stdlib, " + ", ".join(HUB) + ", or a text, .jsonl (field "
                      "'text') or .parquet file")
    what.add_argument("--tokenizer", default="bytes", metavar="NAME", help="bytes (258 ids, the "
                      "default), gpt2 (50257, tiktoken) or the path of a tokenizer.json")
    what.add_argument("--tokens", type=float, metavar="N",
                      help="stop after about N tokens (default: all; 1e8 for fineweb-edu, "
                      "bookcorpus, wiki40b)")
    what.add_argument("--val-fraction", type=float, default=VAL_FRACTION, metavar="F",
                      help="share held out where the corpus has no val split (default "
                      "%(default)s): of documents by hash, or the tail of a text file")
    where = p.add_argument_group("where from, where to")
    where.add_argument("--download", action="store_true", help="fetch the data set from the "
                       "Hugging Face hub, streamed (pip install datasets), and gpt2's vocabulary")
    where.add_argument("--from-file", nargs="+", metavar="FILE", help="take the data set from "
                       "files at hand: train, valid and test in this order or named so")
    where.add_argument("--out", metavar="DIR", help="folder of the token files (default "
                       "data/cache, where train.py looks)")
    return p


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0 done, 2 a bad request or bad data (one line), 130 interrupted (resumable)."""
    args, start = parser().parse_args(argv), time.time()
    try:
        if args.tokens is not None and not 1 <= args.tokens < math.inf \
                or not 0 < args.val_fraction < 1:
            raise DataError("--tokens must be positive and --val-fraction between 0 and 1")
        paths = prepare(args)
        for path in paths.values():
            file = TokenFile.open(path)
            print(f"{file.split:5} {len(file):>13,} tokens {file.n_bytes:>13,} bytes "
                  f"{file.n_words:>11,} words  sha256 {file.sha256[:12]}  {os.path.relpath(path)}")
        print(f"vocabulary {file.vocab_size} ({file.dtype}), tokenizer {file.tokenizer}, "
              f"{time.time() - start:.1f} s")
    except (DataError, OSError) as error:
        print(f"prepare.py: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("prepare.py: interrupted; the same command continues", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
