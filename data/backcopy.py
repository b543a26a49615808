"""Bigram-Backcopy: the smallest task that grows a sink, a value drain and a residual peak.

    x_0 = BOS,   x_1 ~ unigram without the triggers,   then

    x_{t+1} = x_{t-1}              if x_t is a trigger     (a copy: needs attention)
    x_{t+1} ~ P(. | x_t)           otherwise               (a bigram: attention has nothing to add)

Guo et al. 2024, "Active-Dormant Attention Heads" (arXiv 2410.13835). A head that
copies after triggers must do nothing elsewhere; a softmax that must spend its mass somewhere parks
it on BOS (the sink), whose value shrinks (the drain) while its residual grows (the peak). The paper
trains 1 to 3 layers of one head, d 256, for 10k steps of 512 x 256.

P and the unigram come from any text: its 65 most frequent bytes (the paper's tinyshakespeare has
exactly 65); the triggers are the 3 most frequent. All is drawn on the fly from (seed, step), like
`Windows.batch`, and the best possible losses are known exactly: see `oracle`.

Read first: `Backcopy.batch`, then `oracle`.    `python data/backcopy.py` shows a sample.
"""
from __future__ import annotations

import argparse
import copy
import hashlib
import sys
import time
from pathlib import Path

import numpy as np
import torch

if __package__ in (None, ""):       # run as a script: the package is one folder up
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from data import DataError, generator
from data.prepare import load

N_SYMBOLS = 65
# mixed into the seed of the fixed streams (of evaluation, of calibration): never a training batch
HELD_OUT = {"val": 0x5EED, "train": 0x7EA}


def bigram_table(corpus: str = "stdlib", n_symbols: int = N_SYMBOLS) -> tuple[bytes, np.ndarray]:
    """Count neighbours among a text's most frequent bytes -> symbols, counts (S, S).

    corpus: whatever `data.prepare.load` takes, as bytes. symbols are in falling frequency; pairs
    with a rarer byte or a document's end in them are left out. Raises DataError.
    """
    file = load(corpus, "train", tokenizer="bytes")
    file.verify()
    tokens = file.tokens
    frequency = np.bincount(tokens, minlength=256)[:256]
    symbols = np.argsort(-frequency, kind="stable")[:min(n_symbols, np.count_nonzero(frequency))]
    s = len(symbols)
    index = np.full(258, s)             # s: "some other byte", dropped below
    index[symbols] = np.arange(s)
    ids = index[tokens]
    pairs = np.bincount(ids[:-1] * (s + 1) + ids[1:], minlength=(s + 1) ** 2)
    return bytes(symbols.tolist()), pairs.reshape(s + 1, s + 1)[:s, :s]


class Backcopy:
    """The task as a stateless stream of batches: a source (`data.prepare.open_source`), and its own
    windows, with the interface of `data.Windows`.

    table: a corpus name, a text file, or the (symbols, counts) of `bigram_table`.
    Ids 0..S-1 are the symbols in falling frequency, so 0..n_triggers-1 are the triggers; S is BOS.
    bigram (V, V): row BOS is the first-token law, column BOS is zero. unigram (V,).
    Raises DataError when the table leaves nothing to draw.
    """

    tokenizer, eot, bos_policy, path = "backcopy", None, "window", "backcopy"
    spacing = "drawn for evaluation alone, "

    def __init__(self, table="stdlib", seq_len: int = 256, batch_size: int = 512, *,
                 n_triggers: int = 3, seed: int = 0, split: str = "val"):
        self.symbols, counts = bigram_table(table) if isinstance(table, (str, Path)) else table
        s = len(self.symbols)
        if not 0 <= n_triggers < s:
            raise DataError(f"{n_triggers} triggers leave nothing of an alphabet of {s} symbols")
        self.seq_len, self.batch_size, self.seed, self.split = seq_len, batch_size, seed, split
        self.source = f"backcopy of {table}" if isinstance(table, (str, Path)) else "backcopy"
        self.vocab_size, self.bos = s + 1, s
        self.triggers = np.arange(n_triggers)

        counts = np.asarray(counts, dtype=np.float64)
        frequency = counts.sum(axis=0) + counts.sum(axis=1)
        if frequency[n_triggers:].sum() == 0:
            raise DataError("the bigram table is empty outside the triggers: take a longer text")
        self.unigram = np.append(frequency, 0.0) / frequency.sum()  # (V,)
        rows = counts.sum(axis=1, keepdims=True)  # (S, 1)
        law = np.where(rows > 0, counts / np.maximum(rows, 1), self.unigram[:s])  # (S, S)
        first = np.where(np.arange(s) < n_triggers, 0.0, frequency)  # (S,)
        law = np.vstack([law, first / first.sum()])  # (V, S)
        self.bigram = np.hstack([law, np.zeros((s + 1, 1))])  # (V, V)
        self.sha256 = hashlib.sha256(self.bigram.tobytes()).hexdigest()

        # All rows' cumulative laws end to end: row i climbs from i to i + 1, so that one sorted
        # search of i + u draws from row i. Dividing by the last entry makes the end exactly i + 1.
        cdf = np.cumsum(self.bigram, axis=1)
        self._cdf = (cdf / cdf[:, -1:] + np.arange(s + 1)[:, None]).reshape(-1)  # (V * V,)

    def windows(self, block_size: int, batch_size: int, *, seed: int = 0, **_) -> "Backcopy":
        """The same law in other sizes. BOS is position 0, and nowhere else, whatever is asked."""
        task = copy.copy(self)
        task.seq_len, task.batch_size, task.seed = block_size, batch_size, seed
        return task

    @property
    def about(self) -> str:
        return f"{self.vocab_size} ids, drawn on the fly"

    def reader(self, tokenizer: str) -> "Backcopy":
        return self

    def batch(self, step: int, rank: int = 0, world: int = 1, micro: int = 0):
        """[Backcopy 5.7] (x, y), int64 (B, T) each: a pure function of (seed, step, micro), of
        whose global batch the rank takes its rows. y[t] is the token after x[t]."""
        rows = slice(rank * self.batch_size, (rank + 1) * self.batch_size)
        return self._draw(generator(self.seed, step, micro), world * self.batch_size, rows)

    def sequential(self, n_sequences: int = 512) -> "HeldOut":
        """Held-out batches, always the same, from a stream training never draws."""
        return HeldOut(self, n_sequences)

    def _draw(self, rng: np.random.Generator, n: int, rows: slice):
        # 32-bit uniforms: i + u is then exact in float64 and cannot round up into row i + 1.
        u = rng.integers(2**32, size=(n, self.seq_len), dtype=np.uint32)[rows] / 2**32  # (B, T)
        u = np.ascontiguousarray(u.T)  # (T, B)
        seq = np.empty((self.seq_len + 1, u.shape[1]), dtype=np.int64)  # (T + 1, B)
        seq[0] = self.bos
        copies = len(self.triggers)
        for t in range(self.seq_len):
            now = seq[t]  # (B,)
            drawn = np.searchsorted(self._cdf, now + u[t], side="right") - now * self.vocab_size
            seq[t + 1] = np.where(now < copies, seq[t - 1], drawn)  # ids below `copies` trigger
        seq = torch.from_numpy(np.ascontiguousarray(seq.T))  # (B, T + 1)
        return seq[:, :-1].contiguous(), seq[:, 1:].contiguous()

    def masks(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x (B, T) -> trigger queries, non-trigger queries (B, T) bool.

        After a trigger the next token is a copy; after a non-trigger it is a bigram draw. BOS at
        position 0 is neither: it can attend to nothing but itself.
        """
        trigger = x < len(self.triggers)  # (B, T)
        return trigger, ~trigger & (x != self.bos)

    def oracle(self) -> dict[str, float]:
        """The losses (nats) of the model that knows the rule, exact for this length T.

        markov           mean entropy of P(. | x_t) over non-trigger queries
        copy             0: the answer is in the context
        copy_no_context  entropy of a copy given its trigger alone: a model without attention
        first            entropy of the first token
        loss             mean over all T targets, copies at 0
        trigger_share    expected share of targets that are copies

        With plain_t(c) = Pr[x_t = c, no trigger] and held_t(c) = Pr[x_t a trigger, x_{t-1} = c],
        a copy restores c, hence   plain_{t+1} = plain_t P + held_t,   held_{t+1} = plain_t P(trig).
        Two triggers never stand in a row, because a copy is never a trigger.
        """
        k, s = len(self.triggers), self.bos
        p, first = self.bigram[k:s, :s], self.bigram[s, k:s]  # (S - k, S), (S - k,)
        row_entropy = entropy(p)  # (S - k,)
        plain, held = first, np.zeros(s - k)
        queries, held_total = np.zeros(s - k), np.zeros(s - k)
        for _ in range(self.seq_len - 1):          # queries at positions 1 .. T - 1
            queries, held_total = queries + plain, held_total + held
            plain, held = plain @ p[:, k:] + held, plain * p[:, :k].sum(axis=1)
        copies = held_total.sum()
        joint = (queries[:, None] * p[:, :k]).T  # (k, S - k): copied symbol by trigger
        of_trigger = joint.sum(axis=1)  # (k,)
        blind = entropy(joint / np.maximum(of_trigger, 1e-300)[:, None]) @ of_trigger
        return dict(
            markov=float(queries @ row_entropy / max(queries.sum(), 1e-300)), copy=0.0,
            copy_no_context=float(blind / max(of_trigger.sum(), 1e-300)),
            first=float(entropy(first)),
            loss=float((queries @ row_entropy + entropy(first)) / self.seq_len),
            trigger_share=float(copies / self.seq_len))

    def decode(self, ids) -> str:
        """Ids -> text; BOS is shown as <|bos|>. Raises DataError for other ids."""
        ids = np.asarray(ids).reshape(-1)
        if ids.size and (ids.min() < 0 or ids.max() > self.bos):
            raise DataError(f"cannot decode ids {ids.min()}..{ids.max()}: they are 0..{self.bos}")
        return "".join("<|bos|>" if i == self.bos else chr(self.symbols[i]) for i in ids)


class HeldOut:
    """Fixed sequences of the task: iterate for batches (x, y); len() = sequences. What is counted
    in other texts, bytes and words, the toy does not have: DataError."""

    def __init__(self, task: Backcopy, n_sequences: int):
        self.task, self.n_sequences = task, n_sequences
        self.n_targets = n_sequences * task.seq_len

    def __len__(self) -> int:
        return self.n_sequences

    def __iter__(self):
        t = self.task
        for start in range(0, self.n_sequences, t.batch_size):     # the same, however they are cut
            rows = slice(start, start + t.batch_size)
            yield t._draw(generator(t.seed, HELD_OUT[t.split]), self.n_sequences, rows)

    @property
    def n_bytes(self) -> int:
        raise DataError("the symbols of the toy are no text: no bytes, no words")

    n_words = n_bytes


def entropy(p: np.ndarray) -> np.ndarray:
    """Entropy in nats along the last axis; 0 log 0 = 0."""
    return -(p * np.log(np.where(p > 0, p, 1.0))).sum(axis=-1)


def annotate(task: Backcopy, x: torch.Tensor, y: torch.Tensor, width: int = 76) -> str:
    """One sequence as text; under it, ^ marks a trigger and = the copy that answers it."""
    shown = {ord("\n"): "¶", ord(" "): "·", ord("\t"): "→"}
    symbols = [shown.get(c, chr(c) if 32 < c < 127 else "?") for c in task.symbols] + ["█"]
    trigger = task.masks(x[None])[0][0].tolist()
    line = "".join(symbols[i] for i in x.tolist())
    marks = "".join("^" if now else "=" if before else " "
                    for now, before in zip(trigger, [False, *trigger]))
    cut = range(0, len(line), width)
    return "\n".join(line[i:i + width] + "\n" + marks[i:i + width] for i in cut)


def main(argv: list[str] | None = None) -> int:
    """Print a sample, the rate and the oracle losses. Exit status 2 for a bad corpus."""
    p = argparse.ArgumentParser(description="Bigram-Backcopy: show the task.")
    p.add_argument("corpus", nargs="?", default="stdlib", help="where the bigrams come from: "
                   "stdlib (default), a text file or a token file of bytes")
    p.add_argument("--triggers", type=int, default=3, help="how many symbols trigger a copy")
    p.add_argument("--seed", type=int, default=0)
    args = p.parse_args(argv)
    try:
        if args.seed < 0:
            raise DataError("--seed must not be negative")
        task = Backcopy(args.corpus, n_triggers=args.triggers, seed=args.seed)
    except (DataError, OSError) as error:
        print(f"backcopy.py: {error}", file=sys.stderr)
        return 2
    x, y = task.batch(0)
    print(f"{task.vocab_size} ids: {task.vocab_size - 1} symbols and BOS (█); "
          f"triggers {[chr(task.symbols[i]) for i in task.triggers]}")
    print("^ is a trigger, = the copy of what stood before it\n\n" + annotate(task, x[0], y[0]))
    start, n = time.perf_counter(), 20
    for step in range(n):
        task.batch(step)
    rate = n * x.numel() / (time.perf_counter() - start)
    print(f"\n{rate / 1e6:.1f} M tokens/s at batch {len(x)} x {task.seq_len}")
    print("best possible losses, in nats:")
    for name, value in task.oracle().items():
        print(f"  {name:16} {value:.4f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
