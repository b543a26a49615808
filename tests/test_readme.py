"""What README promises exists: its blocks, its presets, its tags; and what no file may hold."""
import ast
import json
import os
import pathlib
import re
import subprocess
import sys

import pytest
import torch

from model import PRESETS, SIZES, Config, Transformer
from train import STUDIES, build_parser

ROOT = pathlib.Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
SOURCES = [*ROOT.glob("*.py"), *(ROOT / "data").glob("*.py")]
NAMES = "OASIS|Ledger|AttnRes|Spike|Gu|Bondarenko|Backcopy|Sun|Streaming"
TAG = re.compile(rf"\[((?:{NAMES}) \d+(?:\.\d+)*(?:[,;] (?:(?:{NAMES}) )?\d+(?:\.\d+)*)*)\]")


def tags_in(text: str) -> set[str]:
    """[OASIS 1.3, 1.5] -> {"OASIS 1.3", "OASIS 1.5"}; [Gu 5.4, Spike 3.3] likewise."""
    found = set()
    for group in TAG.findall(text):
        name = None
        for part in re.split(r"[,;] ", group):
            if " " in part:
                name, part = part.split(" ")
            found.add(f"{name} {part}")
    return found


ROWS = re.findall(r"^\| `\[(.+?)\]` \| .+ \| `(.+?):(.+?)` \|$", README, re.M)


def test_every_tag_in_the_code_is_explained_and_every_explained_tag_is_used():
    used = set().union(*(tags_in(path.read_text(encoding="utf-8")) for path in SOURCES))
    explained = {tag for tag, _, _ in ROWS}
    assert used == explained, (used - explained, explained - used)


@pytest.mark.parametrize("tag, file, name", ROWS)
def test_the_index_points_at_what_exists(tag, file, name):
    body = ast.parse((ROOT / file).read_text(encoding="utf-8")).body
    for part in name.split("."):
        found = [n for n in body if isinstance(n, (ast.FunctionDef, ast.ClassDef))
                 and n.name == part]
        assert found, f"{file} has no {name}"
        body = found[0].body


def test_presets_sizes_studies_and_flags_that_readme_names_exist():
    added = set(re.findall(r'PRESETS\["(\w+)"\]', README))
    for name in re.findall(r"--arch ([\w-]+)", README):
        assert name in PRESETS or name in added, name
    for name in re.findall(r"--size ([\w-]+)", README):
        assert name in SIZES, name
    for name in re.findall(r"--study ([\w-]+)", README):
        assert name in STUDIES, name
    flags = {f for action in build_parser()._actions for f in action.option_strings}
    for line in re.findall(r"python train\.py (.*)", README):
        for flag in re.findall(r"--[\w-]+", line):
            assert flag in flags, flag


def test_the_first_two_blocks_are_the_main_job_and_the_tests():
    blocks = re.findall(r"```\w*\n(.*?)```", README, re.S)
    assert "train.py --arch ledger --sparsity high" in blocks[0]
    assert "pytest" in blocks[1] and "requirements-dev.txt" in blocks[1]
    assert "requirements.txt" in (ROOT / "requirements-dev.txt").read_text()


def test_the_catalogue_runs_as_printed():
    """Each mechanism has an equation, a block that runs, what came of it, and a source."""
    catalogue = README.partition("\n## The mechanisms\n")[2].partition("\n## ")[0]
    entries = catalogue.split("\n### ")[1:]
    assert len(entries) >= 6
    names = {"tokens": torch.arange(12)[None], "targets": torch.arange(1, 13)[None]}
    for entry in entries:
        title = entry.splitlines()[0]
        (block,) = re.findall(r"```python\n(.*?)```", entry, re.S)
        exec(compile(block, title, "exec"), names)
        assert "\n    " in entry, title
        assert re.search(r"^\*.*(arXiv|\d{4}\.\d{5}).*\*$", entry, re.M), title
        for word in ("*Sinks*", "*Spikes*", "*Quantisation*"):
            assert word in entry, (title, word)
    assert torch.isfinite(names["loss"]) and names["null"].shape == names["out"].shape[:3]


def test_every_picture_is_there_and_every_picture_is_shown():
    shown = re.findall(r"!\[[^\]]+\]\(([^)]+)\)", README)
    assert sorted(shown) == sorted(f"data/pictures/{path.name}"
                                   for path in (ROOT / "data" / "pictures").glob("*"))
    for path in shown:
        assert (ROOT / path).read_bytes().startswith(b"\x89PNG"), path


def test_the_mechanism_that_readme_adds_trains_forgets_and_has_its_limit(tmp_path):
    """The block runs as printed: through train.py, evaluation and quantisation included; with the
    gate shut it is the standard residual, as it starts it is nearly that, and it is causal."""
    block = next(b for b in re.findall(r"```python\n(.*?)```", README, re.S) if "class Forget" in b)
    script = tmp_path / "forget.py"
    script.write_text(block, encoding="utf-8")
    text, out = tmp_path / "text.txt", tmp_path / "run"
    text.write_text(README * 3, encoding="utf-8")
    small = "--steps 3 --batch-size 2 --block-size 32 --n-layer 2".split()
    done = subprocess.run([sys.executable, script, "--arch", "forget", *small, "--data", text,
                           "--out", out],
                          cwd=ROOT, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    assert json.loads((out / "metrics.json").read_text())["protocol"]["arch"] == "forget"
    done = subprocess.run([sys.executable, script, "--arch", "forget", *small, "--data", text,
                           "--study", "spike-norm", "--arms", "pre", "--seeds", "1", "--out",
                           tmp_path / "study"],
                          cwd=ROOT, capture_output=True, text=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0 and "| pre" in done.stdout, done.stderr
    names = {}
    exec(compile(block.partition("model.RESIDUALS")[0], "forget.py", "exec"), names)
    config = Config(vocab_size=31, n_layer=2, n_head=2, d_model=32, block_size=16)
    standard, forget = Transformer(config), Transformer(config)
    forget.residual = names["Forget"](config)
    tokens = torch.arange(12)[None] % 31
    with torch.no_grad():
        truth = standard(tokens)[0]
        forget.residual.init_special()
        near = (forget(tokens)[0] - truth).abs().max() / truth.abs().max()
        forget.residual.b.fill_(-1e4)
        assert torch.equal(forget(tokens)[0], truth) and 0 < near < 0.05
        forget.residual.b.zero_()
        changed = tokens.clone()
        changed[0, 8] = 3
        a, b = forget(tokens)[0], forget(changed)[0]
        assert torch.equal(a[:, :8], b[:, :8]) and not torch.equal(a[:, 8:], b[:, 8:])


def test_runtime_imports_are_the_promised_ones():
    """At import time: torch, numpy, tiktoken, matplotlib, tqdm, the standard library, ourselves."""
    import sys
    own = {p.stem for p in ROOT.glob("*.py")} | {"data"}
    allowed = own | {"torch", "numpy", "tiktoken", "matplotlib", "tqdm"} | set(
        sys.stdlib_module_names)
    for path in SOURCES:
        for node in ast.parse(path.read_text(encoding="utf-8")).body:    # module level alone
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else \
                [node.module] if isinstance(node, ast.ImportFrom) and not node.level else []
            for name in names:
                assert name.split(".")[0] in allowed, f"{path.name} imports {name}"


def test_lines_stay_within_100_columns():
    for path in [*SOURCES, *(ROOT / "tests").glob("*.py")]:
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            assert len(line) <= 100, f"{path.name}:{number}"


def test_no_generated_file_is_committed():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True)
    if listed.returncode:
        pytest.skip("not a git checkout")
    names = listed.stdout.split()
    assert not [n for n in names if n.startswith(("runs/", "figures/", "data/cache/"))
                or n.endswith((".pt", ".bin", ".pyc"))]
