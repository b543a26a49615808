"""train.py end to end on a tiny text: exact resume, every way to die, and what must survive it."""
import json
import math
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest
import torch

import data.prepare
import train
from model import PRESETS, Config, Transformer, load_checkpoint

ROOT = pathlib.Path(__file__).resolve().parent.parent
SMALL = ["--n-layer", "1", "--d-model", "32", "--block-size", "32", "--batch-size", "4",
         "--warmup", "2", "--device", "cpu"]
ENV = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    """A token file of 40 kB of text; its val sibling lies beside it."""
    folder = tmp_path_factory.mktemp("corpus")
    text = "".join(f"line {i}: the square of {i} is {i * i}.\n" for i in range(1500))
    (folder / "squares.txt").write_text(text)
    return str(data.prepare.load(folder / "squares.txt", "train", folder=folder).path)


def run(corpus, out, *flags):
    return train.main([*SMALL, "--data", corpus, "--out", str(out), "--steps", "8",
                       "--eval-every", "4", "--no-eval", *flags])


def process(corpus, out, *flags, prelude=""):
    """The same in a real process, which may be killed."""
    arguments = [*SMALL, "--data", corpus, "--out", str(out), "--steps", "8", "--eval-every", "2",
                 "--no-eval", *flags]
    code = f"import os, sys, train\n{prelude}\nsys.exit(train.main({arguments!r}))"
    return subprocess.run([sys.executable, "-c", code], env=ENV, cwd=ROOT, capture_output=True,
                          text=True, timeout=240)


def losses(out):
    return {r["step"]: (r["loss"], r["batch"]) for r in train.read_log(str(out)) if "loss" in r}


def weights(out):
    return load_checkpoint(str(out))["model"]


def one_line(captured, *words):
    lines = [line for line in captured.strip().splitlines() if line.startswith("train.py: ")]
    assert len(lines) == 1, captured
    assert all(word in lines[0] for word in words), lines[0]


# ------------------------------------------------------------------------------- exact resumption

EVERY_FLAG = ["--norm", "dyt", "--ffn", "gelu", "--gate", "token", "--attn-bias",
              "--head-dim", "12", "--loss-min", "3", "--loss-max", "20",
              "--beta2", "0.9", "--min-lr", "0.5"]


@pytest.mark.parametrize("flags", [[], ["--arch", "ledger"], ["--arch", "oasis", *EVERY_FLAG]])
def test_two_pieces_equal_one_run(corpus, tmp_path, flags):
    """8 steps straight = 4 + resume + 4: losses, batches and weights bit-equal."""
    assert run(corpus, tmp_path / "a", *flags) == 0
    assert run(corpus, tmp_path / "b", *flags, "--stop-after", "4") == 0
    assert max(losses(tmp_path / "b")) == 3
    assert train.main(["--resume", "--out", str(tmp_path / "b"), "--no-eval"]) == 0
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    a, b = weights(tmp_path / "a"), weights(tmp_path / "b")
    assert all(torch.equal(a[name], b[name]) for name in a)
    assert len({batch for _, batch in losses(tmp_path / "a").values()}) == 8    # no batch twice


def test_evaluation_does_not_disturb_training(corpus, tmp_path):
    run(corpus, tmp_path / "a")
    run(corpus, tmp_path / "b", "--eval-every", "1", "--probe-every", "3")
    assert losses(tmp_path / "a") == losses(tmp_path / "b")
    probes = [r for r in train.read_log(str(tmp_path / "b")) if "probe" in r]
    assert [r["step"] for r in probes] == [-1, 2, 5, 7]      # at the start, and at the end
    assert 0 <= probes[0]["probe"]["sinks"]["first_token_mass"] <= 1


def test_arms_see_the_same_batches_and_accumulation_changes_nothing(corpus, tmp_path):
    run(corpus, tmp_path / "a"), run(corpus, tmp_path / "b", "--arch", "suppress")
    batches = [[b for _, b in losses(tmp_path / x).values()] for x in "ab"]
    assert batches[0] == batches[1]
    recipe = train.Recipe(data=corpus, steps=3, batch_size=4)
    args = train.build_parser().parse_args(["--device", "cpu"])
    machine = train.Machine(torch.device("cpu"), torch.float32)
    shape, gradients = {"n_layer": 1, "d_model": 32, "block_size": 32}, []
    for micro in (0, 2):    # 2 x 2 rows: the average of the micro-batches' gradients
        recipe.micro_batch = micro
        t = train.Trainer(recipe, shape, "", machine, args)
        t.wrapped = t.model
        rows = [t.windows.batch(0, micro=m) for m in range(t.accumulate)]
        t.windows.batch = lambda step, rank, world, m, rows=rows: rows[m]
        t.optimizer.step = lambda: None
        t.optimizer.zero_grad = lambda set_to_none: None
        t.step(0)
        gradients.append({n: p.grad.clone() for n, p in t.model.named_parameters()})
        assert t.accumulate == (2 if micro else 1)
    again = train.Trainer(recipe, shape, "", machine, args)
    x, y = (torch.cat(parts) for parts in zip(*rows))
    again.model(x, y)[1].backward()
    torch.nn.utils.clip_grad_norm_(again.model.parameters(), recipe.clip)
    for name, p in again.model.named_parameters():
        assert torch.allclose(p.grad, gradients[1][name], atol=1e-6), name


def test_distributed_equals_single(corpus, tmp_path):
    """Two gloo processes through torchrun, in half batches each, end where one process ends: to
    fp32's rounding, so not in the bfloat16 that a processor with units for it would choose."""
    run(corpus, tmp_path / "one", "--arch", "ledger", "--dtype", "float32")
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2",
               "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(ROOT / "train.py"),
               *SMALL, "--data", corpus, "--out", str(tmp_path / "two"), "--steps", "8",
               "--eval-every", "4", "--no-eval", "--arch", "ledger", "--dtype", "float32"]
    out = subprocess.run(command, env=ENV, cwd=tmp_path, capture_output=True, text=True,
                         timeout=240)
    assert out.returncode == 0, out.stderr[-2000:]
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert not [n for n in two if n.startswith(("module.", "_orig_mod."))]
    for name in one:
        assert torch.allclose(one[name], two[name], atol=1e-5), name
    logged = [[row[0] for row in losses(tmp_path / name).values()] for name in ("one", "two")]
    assert logged[0] == pytest.approx(logged[1], rel=1e-5)      # of the batch, not of one's half


# ------------------------------------------------------------------------------------ ways to die

def test_kill_9_in_the_middle_of_a_checkpoint(corpus, tmp_path):
    """The process kills itself between writing the second checkpoint and renaming it."""
    prelude = ("sync, calls = os.fsync, []\n"
               "def fsync(fd):\n"
               "    sync(fd)\n"
               "    if os.readlink(f'/proc/self/fd/{fd}').endswith('checkpoint.pt.tmp'):\n"
               "        calls.append(fd)\n"
               "        if len(calls) == 2: os.kill(os.getpid(), 9)\n"
               "os.fsync = fsync\n")
    done = process(corpus, tmp_path, prelude=prelude)
    assert done.returncode == -signal.SIGKILL
    assert (tmp_path / "checkpoint.pt.tmp").exists()
    assert load_checkpoint(str(tmp_path))["steps_done"] == 2
    assert train.main(["--resume", "--out", str(tmp_path), "--no-eval"]) == 0
    assert sorted(losses(tmp_path)) == list(range(8))
    assert not (tmp_path / "checkpoint.pt.tmp").exists()


def test_full_disk_keeps_the_last_checkpoint(corpus, tmp_path):
    """A file size limit, set after the first checkpoint, stands for the full disk."""
    prelude = ("import resource\n"
               "save, calls = train.save_checkpoint, []\n"
               "def limited(*a):\n"
               "    calls.append(a)\n"
               "    if len(calls) == 2: resource.setrlimit(resource.RLIMIT_FSIZE, (50000, 50000))\n"
               "    save(*a)\n"
               "train.save_checkpoint = limited\n")
    done = process(corpus, tmp_path, prelude=prelude)
    assert done.returncode == 2
    one_line(done.stderr, "could not write", "previous checkpoint is kept")
    assert load_checkpoint(str(tmp_path))["steps_done"] == 2


def test_sigterm_saves_and_stops(corpus, tmp_path, capsys, monkeypatch):
    step = train.Trainer.step

    def interrupted(self, number):
        if number == 2:
            signal.raise_signal(signal.SIGTERM)
        return step(self, number)
    monkeypatch.setattr(train.Trainer, "step", interrupted)
    assert run(corpus, tmp_path) == 130
    assert load_checkpoint(str(tmp_path))["steps_done"] == 3
    assert "--resume" in capsys.readouterr().err


def test_ctrl_c_during_a_probe_saves_too(corpus, tmp_path, monkeypatch):
    def interrupted(self):
        signal.raise_signal(signal.SIGINT)
        return {}
    monkeypatch.setattr(train.Trainer, "probe", interrupted)
    assert run(corpus, tmp_path, "--eval-every", "99", "--probe-every", "3") == 130
    assert load_checkpoint(str(tmp_path))["steps_done"] == 1     # asked for by the probe before


def test_nan_is_named_and_the_last_checkpoint_survives(corpus, tmp_path, capsys, monkeypatch):
    step = train.Trainer.step

    def poisoned(self, number):
        if number == 5:
            self.model.sublayers[0].wq.weight.data[0, 0] = math.nan
        return step(self, number)
    monkeypatch.setattr(train.Trainer, "step", poisoned)
    assert run(corpus, tmp_path) == 2
    one_line(capsys.readouterr().err, "nan", "step 5")
    kept = load_checkpoint(str(tmp_path))
    assert kept["steps_done"] == 4 and all(w.isfinite().all() for w in kept["model"].values())


def test_truncated_checkpoint_is_refused(corpus, tmp_path, capsys):
    run(corpus, tmp_path)
    path = tmp_path / "checkpoint.pt"
    path.write_bytes(path.read_bytes()[:-1000])
    assert train.main(["--resume", "--out", str(tmp_path)]) == 2
    one_line(capsys.readouterr().err, "truncated")


@pytest.mark.parametrize("flags, words", [
    (["--n-layer", "3"], ["--n-layer 3", "has 1"]), (["--lr", "0.1"], ["--lr"]),
    (["--sparsity", "high"], ["--sparsity"]), (["--seed", "7"], ["--seed"])])
def test_resume_with_other_settings_is_refused(corpus, tmp_path_factory, capsys, flags, words):
    out = tmp_path_factory.getbasetemp() / "resumed"
    if not out.exists():
        run(corpus, out, "--stop-after", "4")
    capsys.readouterr()
    assert train.main(["--resume", "--out", str(out), *flags]) == 2
    one_line(capsys.readouterr().err, *words)


def test_resume_on_other_data_is_refused(corpus, tmp_path, capsys):
    run(corpus, tmp_path, "--stop-after", "4")
    checkpoint = load_checkpoint(str(tmp_path))
    checkpoint["run"]["data_sha256"] = "0" * 64
    train.save_checkpoint(str(tmp_path / "checkpoint.pt"), checkpoint)
    capsys.readouterr()
    assert train.main(["--resume", "--out", str(tmp_path)]) == 2
    one_line(capsys.readouterr().err, "hash differs")


@pytest.mark.parametrize("flags, words", [
    (["--sparsity", "high"], ["no ledger"]),
    (["--arch", "ledger", "--sparsity", "lots"], ["none, low, high"]),
    (["--micro-batch", "3"], ["no multiple"]), (["--lr", "-1"], ["--lr"]),
    (["--coupling"], ["depth softmax"]), (["--n-head", "3", "--n-kv-head", "2"], ["multiple"]),
    (["--normalizer", "softmax2"], ["choose from"]), (["--data", "nowhere.txt"], ["nowhere.txt"]),
    (["--tokenizer", "gpt2"], ["gpt2"]), (["--block-size", "90000"], ["tokens"]),
    (["--loss-min", "9", "--loss-max", "4"], ["--loss-max"]), (["--device", "cuda"], ["CUDA"]),
    (["--resume"], ["no checkpoint"]),
    (["--lr", "nan"], ["--lr"]), (["--seed", "-1"], ["--seed"]),
    (["--micro-batch", "-1"], ["--micro-batch"]), (["--eval-sequences", "-1"], ["--eval-seq"]),
    (["--loss-min", "32"], ["--loss-min", "context of 32"]),
    (["--n-head", "0"], ["n_head=0"]), (["--arch", "ledger", "--ledger-rank", "-3"], ["rank=-3"]),
    (["--arch", "gated", "--gate-init", "1"], ["gate_init=1"]),
    (["--arch", "gated", "--head-dim", "8"], ["bondarenko"]),
    (["--arch", "oasis", "--router-init", "bogus"], ["bogus"]),
    (["--arch", "attnres", "--depth-block", "-1"], ["depth_block=-1"]),
    (["--arch", "ledger", "--ledger-cap", "-1"], ["ledger_cap=-1"]), (["--warmup", "-5"], ["warm"]),
    (["--arch", "clip", "--clip-gamma", "0.5"], ["clip_gamma=0.5"]),
    (["--seed", str(2 ** 64)], ["63 bits"]), (["--device", "foo"], ["--device foo"]),
    (["--device", "meta"], ["--device meta"]), (["--d-model", "100000000"], ["memory"])])
def test_bad_requests_are_one_line_and_status_2(corpus, tmp_path, capsys, flags, words):
    if "cuda" in flags and torch.cuda.is_available():
        pytest.skip("this machine has CUDA")
    assert train.main([*SMALL, "--data", corpus, "--out", str(tmp_path / "x"), *flags]) == 2
    one_line(capsys.readouterr().err, *words)
    assert not (tmp_path / "x").exists()


def test_unknown_flags_exit_2(capsys):
    with pytest.raises(SystemExit) as stop:
        train.main(["--archh", "ledger"])
    assert stop.value.code == 2
    with pytest.raises(SystemExit) as stop:
        train.main(["--help"])
    assert stop.value.code == 0 and "--sparsity" in capsys.readouterr().out


def test_truncated_token_file_is_refused(corpus, tmp_path, capsys):
    bad = tmp_path / "squares-bytes-train.bin"
    bad.write_bytes(pathlib.Path(corpus).read_bytes()[:-7])
    assert run(str(bad), tmp_path / "x") == 2
    one_line(capsys.readouterr().err, "squares-bytes-train.bin")


def test_an_old_run_is_never_overwritten(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    recipe = train.Recipe(arch="ledger", data="x/y.txt", seed=3)
    first = train.fresh_folder(recipe)
    assert first == os.path.join("runs", "ledger-nano-y-s3")
    os.makedirs(first)
    assert train.fresh_folder(recipe) == first + "-2"
    os.makedirs(first + "-2")
    assert train.newest_folder(recipe) == first + "-2"
    assert [train.claim(recipe) for _ in "ab"] == [first + "-3", first + "-4"]


def test_a_folder_that_was_named_is_not_overwritten_either(corpus, tmp_path, capsys):
    assert run(corpus, tmp_path, "--stop-after", "4") == 0
    assert train.main(["--resume", "--out", str(tmp_path), "--stop-after", "2"]) == 2
    for name, text in (("config.json", '{"a": 1}'), ("metrics.json", "{}"), ("log.jsonl", "")):
        (tmp_path / name[:3]).mkdir()
        (tmp_path / name[:3] / name).write_text(text)
        assert run(corpus, tmp_path / name[:3]) == 2
        assert (tmp_path / name[:3] / name).read_text() == text
    before, log = weights(tmp_path), (tmp_path / "log.jsonl").read_text()
    capsys.readouterr()
    assert run(corpus, tmp_path) == 2
    one_line(capsys.readouterr().err, "holds a run", "--resume")
    assert (tmp_path / "log.jsonl").read_text() == log
    assert all(torch.equal(w, before[name]) for name, w in weights(tmp_path).items())


def test_a_run_that_died_before_its_first_checkpoint_starts_anew(corpus, tmp_path):
    """Its half log, probes included, would otherwise stand before the new one for good."""
    whole = tmp_path / "whole"
    assert run(corpus, whole, "--probe-every", "4") == 0
    (tmp_path / "died").mkdir()
    (tmp_path / "died" / "config.json").write_text((whole / "config.json").read_text())
    head = (whole / "log.jsonl").read_text().splitlines(keepends=True)[:3]
    (tmp_path / "died" / "log.jsonl").write_text("".join(head))
    assert run(corpus, tmp_path / "died", "--probe-every", "4") == 0
    steps = [[row["step"] for row in train.read_log(str(out))]
             for out in (whole, tmp_path / "died")]
    assert steps[0] == steps[1]


# --------------------------------------------------------------------------------- what is learnt

def test_learning_rate_schedule():
    r = train.Recipe(steps=100, warmup=10, lr=1.0, min_lr=0.1)
    assert train.learning_rate(0, r) == pytest.approx(0.1)
    assert train.learning_rate(9, r) == train.learning_rate(10, r) == pytest.approx(1.0)
    assert train.learning_rate(99, r) == pytest.approx(0.1)
    middle = [train.learning_rate(s, r) for s in range(10, 100)]
    assert middle == sorted(middle, reverse=True)
    r.schedule = "linear"
    assert train.learning_rate(10 + 89 // 2, r) == pytest.approx(0.55, abs=0.01)


def test_loss_window_counts_only_its_positions(corpus):
    args = train.build_parser().parse_args(["--device", "cpu"])
    t = train.Trainer(train.Recipe(data=corpus, loss_min=3, loss_max=7, batch_size=2),
                      {"n_layer": 1, "d_model": 32, "block_size": 12}, "",
                      train.Machine(torch.device("cpu"), torch.float32), args)
    y = t.restrict(torch.ones(2, 12, dtype=torch.long))
    assert (y == 1).nonzero()[:, 1].unique().tolist() == [3, 4, 5, 6]


def test_decay_reaches_the_optimizer_by_name(corpus):
    model = Transformer(Config(d_model=32, n_layer=1, **PRESETS["ledger"]))
    groups = train.optimizer_for(model, train.Recipe(weight_decay=0.5),
                                 torch.device("cpu")).param_groups
    decays = {name: g["weight_decay"] for g in groups for name in g["names"]}
    assert decays["sublayers.0.wq.weight"] == 0.5
    assert decays["residual.sites.0.commit.bias"] == decays["norms.0.weight"] == 0.0
    assert len(decays) == len(list(model.parameters()))


def test_the_main_job_learns_and_reports(corpus, tmp_path, capsys):
    """A run learns, prints its table, and leaves every file that a run consists of."""
    assert train.main([*SMALL, "--data", corpus, "--out", str(tmp_path), "--steps", "60",
                       "--arch", "ledger", "--sparsity", "high"]) == 0
    rows = losses(tmp_path)
    assert rows[59][0] < rows[0][0] - 1
    out = capsys.readouterr().out
    assert "parameters" in out and "first-token mass" in out and "sample:" in out
    metrics = json.loads((tmp_path / "metrics.json").read_text())
    assert metrics["protocol"]["arch"] == "ledger"
    assert metrics["protocol"]["config"]["sparsity"] == 0.3
    for name in ("config.json", "log.jsonl", "checkpoint.pt", "figures/loss.png",
                 "figures/commits.png"):
        assert (tmp_path / name).stat().st_size > 100, name


def test_a_small_study_runs_skips_and_refuses_mixtures(corpus, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(os.environ, "OMP_NUM_THREADS", "1")
    flags = ["--study", "ledger", "--arms", "vanilla,ledger-hs", "--seeds", "1", "--jobs", "2",
             "--data", corpus, "--n-layer", "1", "--d-model", "32", "--block-size", "64",
             "--batch-size", "2", "--steps", "3", "--device", "cpu", "--out", str(tmp_path)]
    assert train.main(flags) == 0
    out = capsys.readouterr().out
    assert "2 of 2 runs to do" in out and "| vanilla" in out and "| ledger-hs" in out
    table = (tmp_path / "table.md").read_text()
    assert "persistence" in table and "position-0 norm ratio" in table
    before = (tmp_path / "vanilla-s0" / "checkpoint.pt").stat().st_mtime_ns
    assert train.main(flags) == 0               # nothing is trained twice
    assert "runs to do" not in capsys.readouterr().out
    assert (tmp_path / "vanilla-s0" / "checkpoint.pt").stat().st_mtime_ns == before
    assert train.main([*flags, "--lr", "0.5"]) == 2     # nor are two recipes mixed in one table
    one_line(capsys.readouterr().err, "another lr")
    assert train.main(["--study", "ledger", "--arms", "nobody"]) == 2


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_study_keeps_its_runs_and_goes_on(corpus, tmp_path, number):
    """The terminal sends Ctrl-C to the whole process group; the run in progress saves itself once.
    SIGTERM reaches the study alone, which passes it on. (What a shell starts in the background
    ignores Ctrl-C, and so would the study: hence preexec_fn.)"""
    flags = ["--study", "ledger", "--arms", "vanilla", "--seeds", "1", "--data", corpus,
             "--n-layer", "1", "--d-model", "32", "--block-size", "64", "--batch-size", "2",
             "--steps", "100000", "--eval-every", "100000", "--device", "cpu", "--out",
             str(tmp_path)]
    study = subprocess.Popen([sys.executable, str(ROOT / "train.py"), *flags], env=ENV,
                             cwd=tmp_path, stderr=subprocess.PIPE, text=True,
                             start_new_session=True,
                             preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    log = tmp_path / "vanilla-s0" / "log.jsonl"
    for _ in range(600):
        if log.exists() and len(log.read_text().splitlines()) > 9:
            break
        time.sleep(0.1)
    (os.killpg if number == signal.SIGINT else os.kill)(study.pid, number)
    said = study.communicate(timeout=60)[1]
    assert study.returncode == 130 and "the same command continues" in said
    assert load_checkpoint(str(log.parent))["steps_done"] > 9


def test_bfloat16_and_compile_flags_train(corpus, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(train.torch, "compile", lambda model: 1 / 0)
    assert run(corpus, tmp_path, "--dtype", "bfloat16", "--compile") == 0
    assert "not available" in capsys.readouterr().out
    rows = losses(tmp_path)
    assert rows[7][0] < rows[0][0]
    assert all(w.dtype == torch.float32 for w in weights(tmp_path).values())


def test_probes_are_drawn_as_growth(corpus, tmp_path, capsys):
    """--probe-every leaves growth.png; without probes there is none."""
    run(corpus, tmp_path, "--probe-every", "4")
    assert (tmp_path / "figures" / "growth.png").stat().st_size > 10_000
    (tmp_path / "empty").mkdir()
    assert train.draw_growth({"a": [str(tmp_path / "empty")]}, str(tmp_path / "empty")) == []


def test_growth_is_the_mean_over_seeds_with_its_band():
    rows = lambda shift: [{"step": s, "probe": {"val": {"loss": s + shift}, "backcopy": None}}
                          for s in (9, 19, 29)]
    fig = train.evaluation.draw_growth({"a": [rows(0), rows(2)], "b": [rows(1)[:2]]})
    lines = {line.get_label(): line for line in fig.axes[0].get_lines()}
    assert lines["a"].get_xdata().tolist() == [10, 20, 30]
    assert lines["a"].get_ydata().tolist() == [10, 20, 30] and len(lines["b"].get_xdata()) == 2
    band = fig.axes[0].collections[0].get_paths()[0].vertices[:, 1]
    assert band.min() == pytest.approx(10 - 2 ** 0.5) and len(fig.axes[0].collections) == 1


@pytest.mark.parametrize("name", ["spike-norm", "spike-ffn", "spike-heads", "spike-gate",
                                  "spike-context", "spike-optim", "backcopy"])
def test_arms_of_every_study_are_models_and_bear_the_papers_numbers(name):
    """At each size: every arm is a valid, different configuration; a paper's row for each."""
    study, parser = train.STUDIES[name], train.build_parser()
    for size in ("toy",) if name == "backcopy" else ("nano", "micro", "60m", "160m"):
        args = parser.parse_args(["--study", name, "--size", size])
        seen = set()
        for arm, flags in study.arms_for(args).items():
            recipe, shape = train.resolve(parser.parse_args(["--size", size, *flags]))
            seen.add(str((recipe, Config(**{**shape, "vocab_size": 99}))))
            assert "," not in arm and "/" not in arm
            assert name == "backcopy" or arm in study.rows_for(args)
        assert len(seen) == len(study.arms_for(args)), name
        assert len(study.paper_rows) in (0, len(study.all_arms(args)))
    assert len(set(study.paper_rows) - {"–"}) == sum(row != "–" for row in study.paper_rows)


def test_the_papers_numbers_follow_an_arms_place_not_its_name():
    """4x32 is half-size heads at one size and the base at another; no head has a size of 0."""
    rows = {}
    for size in ("nano", "micro", "toy"):
        args = train.build_parser().parse_args(["--study", "spike-heads", "--size", size])
        study = train.STUDIES["spike-heads"]
        rows[size] = study.rows_for(args)
        assert list(rows[size].values()) == study.paper_rows
        assert all(int(flags[-1]) >= 1 for flags in study.arms_for(args).values())
    base = train.STUDIES["spike-heads"].paper_rows[0]
    assert rows["nano"]["4x32"] == rows["micro"]["4x64"] == rows["toy"]["4x16"] == base
    narrow = train.head_arms(None, {"n_head": 2, "d_model": 32})
    assert narrow["4x1:2"] is None and narrow["4x1"] == ["--n-head", "4", "--head-dim", "1"]


def test_a_foreign_file_in_a_studys_folder_is_one_line(corpus, tmp_path, capsys):
    flags = ["--study", "ledger", "--arms", "vanilla", "--data", corpus, "--out", str(tmp_path)]
    (tmp_path / "vanilla-s0").mkdir()
    for text in ('{"a": 1}', "no json"):
        (tmp_path / "vanilla-s0" / "config.json").write_text(text)
        assert train.main(flags) == 2
        one_line(capsys.readouterr().err, "config.json")


def test_without_warmup_the_null_is_there_at_once(corpus, tmp_path):
    """A null_start of -30 that nothing anneals would be softmax under another name."""
    assert run(corpus, tmp_path, "--arch", "outeffhop", "--null-start", "-30") == 0
    assert weights(tmp_path)["sublayers.0.null_logit"] == 0


def test_an_arms_own_flag_wins_over_the_shared_one(corpus, tmp_path, monkeypatch):
    """2x-tokens is twice the steps asked for; and a study with curves asks for its probes."""
    seen = []
    monkeypatch.setattr(train, "print_estimate", lambda *_: None)
    monkeypatch.setattr(train, "run_all", lambda todo, *_: seen.extend(todo) or ["all"])
    assert train.main(["--study", "spike-optim", "--arms", "base,2x-tokens", "--seeds", "1",
                       "--data", corpus, "--steps", "40", "--out", str(tmp_path)]) == 1
    recipes = [train.resolve(train.build_parser().parse_args(command))[0] for _, command in seen]
    assert [(r.steps, r.probe_every, r.beta2) for r in recipes] == [(40, 5, 0.95), (80, 5, 0.95)]


def test_the_papers_numbers_stand_in_the_table():
    results = [{"arm": a, "seed": 0, "metrics": {"val": {"loss": 1.0}}} for a in ("base", "mine")]
    table = train.evaluation.study_table(results, train.VAL, ("paper", {"base": "10.1 / 46.0"}))
    assert table.splitlines()[0].endswith("| val loss | paper |")
    assert [line.split("|")[-2].strip() for line in table.splitlines()[2:]] == ["10.1 / 46.0", "–"]


def test_a_study_prints_the_columns_that_its_runs_have(tmp_path):
    """The toy's measures stand in a spike study's table at --size toy, and nowhere else."""
    measured = {"val": {"loss": 1.0, "token_ppl": 2.7}}
    for size, metrics in (("nano", measured), ("toy", measured | {"backcopy": {"sink": 0.3}})):
        os.makedirs(tmp_path / size / "pre-s0")
        train.evaluation.save_metrics(str(tmp_path / size / "pre-s0"), metrics)
        train.report_study(train.STUDIES["spike-norm"], {"pre": []}, 1, str(tmp_path / size),
                           {"pre": "10.1 / 46.0 / 3818"})
        header = (tmp_path / size / "table.md").read_text().splitlines()[0]
        assert ("BOS mass" in header) == (size == "toy")
        assert "perplexity" in header and "paper: ppl" in header and "first-token" not in header
