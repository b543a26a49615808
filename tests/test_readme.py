"""What README promises exists: its blocks, its presets, its tags; and what no file may hold."""
import ast
import pathlib
import re
import subprocess

import pytest

from model import PRESETS, SIZES
from train import STUDIES, build_parser

ROOT = pathlib.Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
SOURCES = [*ROOT.glob("*.py"), *(ROOT / "data").glob("*.py")]
NAMES = "OASIS|Ledger|AttnRes|Spike|Gu|Bondarenko|Backcopy|Sun"
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
    for name in re.findall(r"--arch ([\w-]+)", README):
        assert name in PRESETS, name
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
