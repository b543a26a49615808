"""Bigram-Backcopy: the rule at every position, the statistics of the table, the exact oracle; then
the task as a source of batches: what eval.py measures on it, and train.py trains on."""
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import eval as evaluation  # noqa: E402
import train  # noqa: E402
from data import backcopy  # noqa: E402
from data.backcopy import Backcopy, bigram_table  # noqa: E402
from data.prepare import DataError, open_source  # noqa: E402
from model import Config, Transformer, load_checkpoint  # noqa: E402


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
    a, b = list(task.sequential(100)), list(task.sequential(100))
    assert [len(x) for x, _ in a] == [64, 36] and len(task.sequential(100)) == 100
    assert all((p[0] == q[0]).all() for p, q in zip(a, b))
    assert (a[0][0] != task.batch(0)[0]).any() and (a[1][0] != a[0][0][:36]).any()
    by_eight = torch.cat([x for x, _ in task.windows(40, 8, seed=3).sequential(70)])
    assert (by_eight == torch.cat([x for x, _ in a])[:70]).all()    # whatever the batch, the number


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


# ------------------------------------------------------------------------- as a source of batches

@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "t.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 100)
    return f"backcopy:{path}"


def test_the_toy_and_a_token_file_are_one_kind_of_source(corpus):
    """Same names, same calls; and the fixed streams of the two splits are not one."""
    toy = open_source(corpus, "train")
    file = open_source(corpus.partition(":")[2], "train")
    for source in (toy, file):
        windows = source.windows(16, 4, seed=2, bos_policy="window", tokenizer=None)
        x, y = windows.batch(3, rank=1, world=2, micro=0)
        assert x.shape == y.shape == (4, 16) and (x[:, 0] == source.bos).all()
        held = windows.sequential(6)
        assert len(held) == 6 and held.n_targets == 96
        assert [len(x) for x, _ in held] == [4, 2]
        assert windows.bos_policy == "window" and len(source.sha256) == 64
        reader = source.reader("bytes")
        assert reader.decode([reader.bos]) == "<|bos|>"
        assert source.split == "train" and source.about and source.source
    assert toy.seq_len == 256                   # asking for windows has not changed the source
    val = open_source(corpus, "val").windows(16, 4)
    a, b = (next(iter(s.sequential(4)))[0] for s in (toy.windows(16, 4), val))
    assert (a != b).any() and toy.sha256 == val.sha256
    with pytest.raises(DataError, match="no bytes"):
        val.sequential(4).n_bytes


def test_the_measures_of_the_toy_on_planted_tensors(task):
    """Sink and null on non-trigger queries, drain and peak as ratios of norms, both losses."""
    x, y = task.batch(0)
    trigger, plain = task.masks(x)
    toy = evaluation.Toy(task)
    toy.see(x, y)
    probs = torch.zeros(64, 2, 40, 40)
    probs[..., 0] = torch.where(plain, 0.75, 0.125)[:, None]        # elsewhere the mass is 1/8
    probs[:, 1, :, 0] /= 3
    size = torch.ones(40)
    size[0] = 0.2
    for l in (0, 2):
        toy("attn_probs", l, probs * (1 - l / 4))
        toy("null", l, torch.where(plain, 0.0625 * l, 9.0)[:, None].expand(64, 2, 40))
        toy("v", l, torch.full((64, 2, 40, 4), 1.5) * (size if l == 0 else 1 / size)[:, None])
    for l in range(4):
        toy("stream", l, torch.ones(64, 40, 8) / size[:, None] ** (l / 3))
    toy.score(torch.where(trigger, 0.5, 2.0).double())
    found = toy.result()
    assert np.allclose(found["bos_mass"], [[0.75, 0.25], [0.375, 0.125]])
    assert np.allclose(found["null_mass"], [[0, 0], [0.125, 0.125]])
    assert found["value_drain"] == pytest.approx([0.2, 5.0])
    assert found["residual_peak"] == pytest.approx([1, 5 ** (1 / 3), 5 ** (2 / 3), 5])
    assert (found["sink"], found["null"], found["drain"], found["peak"]) == pytest.approx(
        (0.75, 0.125, 0.2, 5))
    assert (found["markov_loss"], found["copy_loss"]) == pytest.approx((2.0, 0.5))
    law = -torch.from_numpy(task.bigram)[x, y].log()[plain].mean().item()   # of these very draws
    assert found["markov_excess"] == pytest.approx(2 - law)
    assert law == pytest.approx(task.oracle()["markov"], abs=0.1)


def test_the_losses_of_the_toy_are_parts_of_the_loss(task):
    """loss = (first + markov + copy, each by its number of queries) / all queries."""
    model = Transformer(Config(vocab_size=9, n_layer=1, n_head=1, d_model=16, block_size=40))
    metrics = evaluation.evaluate(model, task, n_sequences=16)
    toy, val = metrics["backcopy"], metrics["val"]
    x, y = next(iter(task.windows(40, 16).sequential(16)))
    trigger, plain = task.masks(x)
    with torch.no_grad():
        first = torch.nn.functional.cross_entropy(model(x)[0][:, 0], y[:, 0], reduction="sum")
    total = first + toy["markov_loss"] * plain.sum() + toy["copy_loss"] * trigger.sum()
    assert val["loss"] == pytest.approx((total / x.numel()).item(), rel=1e-5)
    assert val["byte_ppl"] is None and val["word_ppl"] is None
    assert metrics["protocol"]["bos_policy"] == "window"
    assert toy["sink"] == pytest.approx(2 * metrics["sinks"]["first_token_mass"], rel=1)
    assert evaluation.evaluate(model, np.arange(200) % 9, T=16)["backcopy"] is None


def test_bad_requests_of_the_script_are_one_line(corpus, capsys):
    name = corpus.partition(":")[2]
    for flags, words in ((["--seed", "-1"], "--seed must not be negative"),
                         (["--triggers", "99"], "99 triggers leave nothing")):
        assert backcopy.main([name, *flags]) == 2
        error = capsys.readouterr().err
        assert words in error and error.count("\n") == 1
    assert backcopy.main(["x" * 5000]) == 2             # no file can have this name: an OSError
    assert capsys.readouterr().err.startswith("backcopy.py: ")


SMALL = ["--n-layer", "1", "--d-model", "32", "--block-size", "32", "--batch-size", "4", "--steps",
         "8", "--device", "cpu"]


def test_a_run_on_the_toy_is_resumable_and_measured(corpus, tmp_path, capsys):
    """4 steps + resume + 4 equal 8; probes and metrics.json carry the measures of the toy."""
    flags = [*SMALL, "--data", corpus, "--probe-every", "4"]
    assert train.main([*flags, "--out", str(tmp_path / "a")]) == 0
    out = capsys.readouterr().out
    assert "toy: value drain" in out and "drawn on the fly" in out
    assert train.main([*flags, "--out", str(tmp_path / "b"), "--stop-after", "4"]) == 0
    assert train.main(["--resume", "--out", str(tmp_path / "b"), "--no-eval"]) == 0
    a, b = (load_checkpoint(str(tmp_path / run)) for run in "ab")
    assert all(torch.equal(a["model"][name], b["model"][name]) for name in a["model"])
    assert a["run"]["size"] == "toy" and a["config"]["n_head"] == 1
    rows = [[row for row in train.read_log(str(tmp_path / run)) if "val_loss" not in row]
            for run in "ab"]                        # stopping adds a validation loss
    assert rows[0] == rows[1]
    probes = [row["probe"]["backcopy"] for row in rows[0] if "probe" in row]
    assert len(probes) == 3 and probes[0]["markov_loss"] != probes[1]["markov_loss"]
    metrics = json.loads((tmp_path / "a" / "metrics.json").read_text())
    assert metrics["backcopy"]["oracle"]["copy"] == 0 and metrics["val"]["byte_ppl"] is None


def test_requests_that_the_toy_cannot_meet_are_one_line(corpus, tmp_path, capsys):
    for flags, words in ((["--bos", "none"], "BOS at position 0"), (["--data", "backcopy:nowhere"],
                                                                    "no corpus or file")):
        assert train.main([*SMALL, "--data", corpus, "--out", str(tmp_path / "x"), *flags]) == 2
        assert words in capsys.readouterr().err
