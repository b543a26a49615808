"""Bigram-Backcopy: the rule at every position, the statistics of the table, the exact oracle."""
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from data import backcopy  # noqa: E402
from data.backcopy import Backcopy, bigram_table  # noqa: E402
from data.prepare import DataError  # noqa: E402


def small_table():
    """Eight symbols with an unreachable pair, a one-way symbol and one that is never followed."""
    counts = np.random.default_rng(0).integers(1, 50, size=(8, 8))
    counts[4, 5], counts[6], counts[7] = 0, [0, 0, 0, 9, 0, 0, 0, 0], 0
    return b"abcdefgh", counts


TABLE = small_table()


@pytest.fixture(scope="module")
def task():
    return Backcopy(TABLE, seq_len=40, batch_size=64, n_triggers=2, seed=3)


@pytest.fixture(scope="module")
def sample(task):
    batches = [task.batch(step) for step in range(60)]
    return (torch.cat([x for x, _ in batches]), torch.cat([y for _, y in batches]))


def test_the_rule_holds_at_every_position(task, sample):
    x, y = sample
    assert x.shape == y.shape == (3840, 40) and x.dtype == y.dtype == torch.int64
    assert (x[:, 1:] == y[:, :-1]).all()
    assert (x[:, 0] == task.bos).all() and (y != task.bos).all() and y.max() < task.bos
    trigger, plain = task.masks(x)
    rows, cols = trigger.nonzero(as_tuple=True)
    assert len(rows) > 1000 and (y[rows, cols] == x[rows, cols - 1]).all()
    assert not trigger[:, :2].any()                        # neither BOS nor the first token
    assert not (trigger[:, 1:] & trigger[:, :-1]).any()    # a copy is never a trigger
    law = torch.from_numpy(task.bigram)
    assert (law[x[plain], y[plain]] > 0).all()             # nothing impossible is drawn
    assert (y[x == 6] == 3).all() and (x == 6).any()


def test_masks_split_the_queries(task, sample):
    x, _ = sample
    trigger, plain = task.masks(x)
    assert (trigger ^ plain)[:, 1:].all() and not (trigger | plain)[:, 0].any()
    assert trigger.sum() == sum((x == t).sum() for t in task.triggers)


def test_draws_follow_the_bigram(task, sample):
    """Chi-square of each row that the bigram answers, within 5 sigma of its mean."""
    x, y = sample
    rows = [c for c in range(len(task.triggers), task.bos)] + [task.bos]
    for c in rows:
        seen = np.bincount(y[x == c].numpy(), minlength=task.vocab_size)
        expected = task.bigram[c] * seen.sum()
        possible = expected > 0
        assert expected[possible].min() > 5 and seen[~possible].sum() == 0
        chi2 = ((seen - expected)[possible] ** 2 / expected[possible]).sum()
        freedom = possible.sum() - 1
        assert chi2 <= freedom + 5 * np.sqrt(2 * freedom) + 1e-9, (c, chi2)


@pytest.mark.parametrize("u", [0, 1, 2**31, 2**32 - 1])
def test_the_edges_of_the_uniform_stay_in_their_row(task, u):
    """u = 0 must not fall into the row before, nor u = 1 - 2^-32 into the one after."""
    class Fixed:
        def integers(self, high, size, dtype):
            return np.full(size, u, dtype=dtype)
    x, y = task._draw(Fixed(), 1, slice(None))
    _, plain = task.masks(x)
    assert (y >= 0).all() and (y < task.bos).all()
    assert (task.bigram[x[plain], y[plain]] > 0).all()
    possible = np.flatnonzero(task.bigram[task.bos])
    assert y[0, 0] == {0: possible[0], 2**32 - 1: possible[-1]}.get(u, y[0, 0])


def test_the_laws_are_the_counts(task):
    assert np.allclose(task.bigram.sum(axis=1), 1) and (task.bigram[:, task.bos] == 0).all()
    assert task.bigram[4, 5] == 0 and task.bigram[6, 3] == 1
    assert (task.bigram[task.bos, :2] == 0).all()
    assert np.allclose(task.bigram[7, :8], task.unigram[:8])    # never followed: the unigram
    first = task.unigram[2:8] / task.unigram[2:8].sum()
    assert np.allclose(task.bigram[task.bos, 2:8], first)


def test_batches_have_no_state(task):
    x, y = task.batch(5)
    np.random.seed(1)
    torch.manual_seed(1)
    task.batch(6)
    again = Backcopy(TABLE, seq_len=40, batch_size=64, n_triggers=2, seed=3)
    assert (task.batch(5)[0] == x).all() and (again.batch(5)[1] == y).all()
    for other in (task.batch(6), task.batch(5, micro=1), task.batch(5, rank=1, world=2)):
        assert (other[0] != x).any()


def test_ranks_share_one_global_batch(task):
    whole = task.batch(2)[0]
    half = Backcopy(TABLE, 40, 32, n_triggers=2, seed=3)
    assert (torch.cat([half.batch(2, r, 2)[0] for r in range(2)]) == whole).all()


def test_held_out_batches_are_fixed_and_not_training_ones(task):
    a, b = task.sequential(100), task.sequential(100)
    assert [len(x) for x, _ in a] == [64, 36]
    assert all((p[0] == q[0]).all() for p, q in zip(a, b))
    assert (a[0][0] != task.batch(0)[0]).any() and (a[1][0] != a[0][0][:36]).any()


@pytest.mark.parametrize("seq_len, n_triggers", [(1, 2), (2, 2), (40, 2), (40, 0), (40, 5)])
def test_the_oracle_is_what_the_true_law_scores(task, seq_len, n_triggers):
    t = Backcopy(TABLE, seq_len, 64, n_triggers=n_triggers)
    x, y = map(torch.cat, zip(*[t.batch(step) for step in range(400)]))
    nll = -torch.from_numpy(t.bigram)[x, y].log()
    trigger, plain = t.masks(x)
    nll[trigger] = 0.0                                      # a copy is certain
    oracle = t.oracle()
    for name, per_sequence in dict(first=nll[:, 0], loss=nll.mean(1),
                                   trigger_share=trigger.double().mean(1)).items():
        error = per_sequence.std().item() / len(per_sequence) ** 0.5
        assert oracle[name] == pytest.approx(per_sequence.mean().item(), abs=5 * error + 1e-9)
    assert oracle["copy"] == 0
    if plain.any():
        assert oracle["markov"] == pytest.approx(nll[plain].mean().item(), abs=0.02)
    if trigger.any():       # what the trigger alone tells about the copy: a plug-in estimate
        pairs = np.bincount((x[trigger] * t.vocab_size + y[trigger]).numpy(),
                            minlength=t.vocab_size ** 2).reshape(t.vocab_size, -1)
        blind = (backcopy.entropy(pairs / np.maximum(pairs.sum(1, keepdims=True), 1))
                 * pairs.sum(1)).sum() / pairs.sum()
        assert oracle["copy_no_context"] == pytest.approx(blind, abs=0.02)
    first = 1 / seq_len
    assert oracle["loss"] == pytest.approx(
        oracle["markov"] * (1 - oracle["trigger_share"] - first) + oracle["first"] * first)


def test_a_table_from_text(tmp_path):
    path = tmp_path / "t.txt"
    path.write_text(("aab" * 50 + "c" + "ab" * 30 + "\n") * 20)
    symbols, counts = bigram_table(str(path))
    assert symbols == b"ab\nc" or symbols == b"abc\n"
    index = {s: i for i, s in enumerate(symbols)}
    assert counts[index[ord("b")], index[ord("b")]] == 0
    text = path.read_text()[:int(20 * 212 * 0.95) // 212 * 212]
    assert counts[0, 0] == sum(text[i:i + 2] == "aa" for i in range(len(text)))
    small, fewer = bigram_table(str(path), n_symbols=2)
    assert small == b"ab" and fewer.shape == (2, 2)         # pairs across "c" are not joined up
    assert fewer.tolist() == counts[:2, :2].tolist()
    task = Backcopy(path, seq_len=16, batch_size=4, n_triggers=1)
    assert task.decode(task.batch(0)[0][0]).startswith("<|bos|>")
    with pytest.raises(DataError, match="0..4"):
        task.decode([9])


def test_impossible_tasks_are_one_line():
    with pytest.raises(DataError, match="3 triggers leave nothing of an alphabet of 3"):
        Backcopy((b"abc", np.ones((3, 3))))
    with pytest.raises(DataError, match="empty outside the triggers"):
        Backcopy((b"abcd", np.zeros((4, 4))))
    with pytest.raises(DataError, match="no corpus or file"):
        Backcopy("nowhere")


def test_the_default_task_is_the_papers_size():
    """65 symbols and BOS, 3 triggers, 256 targets."""
    task = Backcopy("stdlib", batch_size=8)
    assert (task.vocab_size, task.bos, task.seq_len) == (66, 65, 256)
    assert task.triggers.tolist() == [0, 1, 2] and b" " in task.symbols[:3]
    oracle = task.oracle()
    assert 0.5 < oracle["markov"] < 3 and 0.5 < oracle["copy_no_context"] < 3.5


def test_the_script_annotates_and_measures(tmp_path):
    path = tmp_path / "t.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 100)
    done = subprocess.run([sys.executable, str(ROOT / "data/backcopy.py"), str(path)],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "M tokens/s" in done.stdout and "markov" in done.stdout
    task = Backcopy(path)
    x, y = task.batch(0)
    text, marks = backcopy.annotate(task, x[0], y[0], width=1000).split("\n")
    assert len(text) == len(marks) == 256 and text[0] == "█"
    for i, mark in enumerate(marks[:-1]):
        if mark == "^":
            assert text[i + 1] == text[i - 1] and marks[i + 1] == "="
    assert marks.count("^") > 5
