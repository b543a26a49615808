"""The Triton kernels without a GPU: arithmetic from the interpreter, code from the compiler.

Each needs its own process: an environment variable that triton reads once chooses the interpreter,
which takes code that the compiler would refuse. `python tests/test_triton.py MODE CASES` is that
process; it answers in JSON, a line for each case. (bf16 is left to the compiler and to a card: the
interpreter's own bf16 product is broken.)
"""
import functools
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent))

import pytest  # noqa: E402
import torch  # noqa: E402

import softmax1 as S  # noqa: E402
from test_softmax1 import NAMES, assert_close, everything, padding, tensors  # noqa: E402

pytestmark = pytest.mark.skipif(not S.TRITON, reason="triton is not installed (pip install triton)")

# dtype, (H, Hkv), (T, S), D, causal, mask, normalizer
INTERPRET = [
    ("float32", (2, 2), (1, 1), 16, True, None, "softmax1"),
    ("float32", (2, 1), (2, 2), 48, True, None, "sink"),
    ("float32", (1, 1), (63, 63), 32, True, None, "softmax1"),
    ("float16", (2, 1), (64, 64), 64, True, None, "sink"),
    ("float16", (1, 1), (65, 65), 80, True, "left", "softmax1"),
    ("float16", (1, 1), (127, 127), 128, True, None, "softmax1"),
    ("float16", (1, 1), (130, 150), 96, False, "left", "sink"),
    ("float32", (1, 1), (20, 37), 128, True, None, "softmax1"),
    ("float32", (4, 2), (40, 70), 16, True, "left", "sink"),
    ("float32", (2, 1), (1, 33), 24, True, "left", "sink"),
]
INTERPRET_SLOW = [("float16", (2, 1), (T, T), D, True, "left" if T > 2 else None, "sink")
                  for D in (16, 32, 48, 64, 80, 96, 128) for T in (1, 2, 63, 64, 65, 127)]
INTERPRET_SLOW += [("float32", (1, 1), (1000, 1000), 64, True, None, "softmax1")]

KERNELS = ("_triton_forward", "_triton_dq", "_triton_dkv")
# dtype, D, causal, mask, sm, sizes that are 1 (triton compiles those as constants)
COMPILE = [("bf16", 64, True, False, 90, ""), ("fp16", 80, True, True, 80, ""),
           ("bf16", 128, True, False, 90, ""), ("fp32", 64, True, False, 80, "")]
COMPILE_SLOW = [(dtype, D, causal, mask, sm, ones)
                for sm in (80, 90) for dtype in ("bf16", "fp16", "fp32")
                for D, causal, mask, ones in (
                    (16, False, True, "T"), (64, True, False, ""), (80, True, True, ""),
                    (96, False, False, "HTS"), (128, True, False, ""))]


# ---------------------------------------------------------------------------- in the child process

def interpret(case):
    dtype, (H, Hkv), (T, S_), D, causal, mask, normalizer = case
    dtype = getattr(torch, dtype)
    q, k, v = tensors((2, H, T, D), (2, Hkv, S_, D), dtype, layout="heads last")
    options = dict(causal=causal, mask=padding(2, S_, S_ // 2 + 1) if mask else None)
    want = everything(q, k, v, normalizer, "eager", wide=torch.float64, **options)
    assert_close(everything(q, k, v, normalizer, "triton", **options), want, dtype)


def interpret_corners(case):
    if case == "null dominates":
        path = functools.partial(S.attend, normalizer="softmax1", impl="triton")
        for shift in (-10.0, 8.0):
            assert S.max_relative_error(path, (1, 1, 40, 16), shift=shift) < 1e-5
    elif case == "null gradient alone":
        q, k, v = (x.requires_grad_() for x in tensors((1, 2, 9, 16), (1, 2, 9, 16)))
        null = {impl: S.attend(q, k, v, "softmax1", impl=impl)[1] for impl in ("triton", "eager")}
        got, want = (torch.autograd.grad(x.mean(), (q, k, v), allow_unused=True)
                     for x in null.values())
        torch.testing.assert_close(got[:2], want[:2], rtol=1e-5, atol=1e-8)
        assert got[0].abs().max() > 0 and (got[2] == 0).all()
    elif case == "rows that see nothing":
        q, k, v = (x.requires_grad_() for x in tensors((1, 2, 5, 16), (1, 2, 5, 16)))
        out, null = S.attend(q, k, v, "softmax1", impl="triton", mask=padding(1, 5, 5))
        assert (out == 0).all() and (null == 1).all()
        assert all((g == 0).all() for g in torch.autograd.grad(out.sum() + null.sum(), (q, k, v)))
    elif case == "any strides":
        x = torch.randn(1, 8, 33, 16)
        q, k, v = x.mT.contiguous().mT, x[:, :2].expand(1, 2, 33, 16), torch.randn(1, 2, 16, 33).mT
        want = everything(q, k, v, "softmax1", "eager", wide=torch.float64)
        assert_close(everything(q, k, v, "softmax1", "triton"), want, torch.float32)
    else:
        raise ValueError(case)


CORNERS = ["null dominates", "null gradient alone", "rows that see nothing", "any strides"]


def compile_kernel(kernel, dtype, D, causal, mask, sm, ones):
    """Build one kernel for a GPU that is not here -> its shared memory, spills, tensor cores."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    fn, block_d = S._kernels()[kernel], max(16, 1 << (D - 1).bit_length())
    block_t, block_s, warps, stages = S._blocks(kernel, block_d, 4 if dtype == "fp32" else 2)
    fixed = dict(GROUP=1 if "H" in ones else 2, D=D, CAUSAL=causal, MASKED=mask, BLOCK_D=block_d,
                 BLOCK_T=block_t, BLOCK_S=block_s, **dict.fromkeys(ones, 1),
                 **({} if mask else {"SEEN": None}))
    kinds = {**dict.fromkeys(("NULL", "LSE", "DLSE", "DELTA"), "*fp32"), "SEEN": "*i8",
             "scale": "fp32", **dict.fromkeys("HTS", "i32"), **dict.fromkeys(fixed, "constexpr")}
    names = fn.arg_names
    signature = {name: kinds.get(name, "i32" if "_" in name else f"*{dtype}") for name in names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(names)
               if signature[name][0] == "*" or re.match("[qkvog]_", name)}
    constants = {(names.index(name),): x for name, x in fixed.items() if name in names}
    built = triton.compile(ASTSource(fn, signature, constants, aligned), GPUTarget("cuda", sm, 32),
                           dict(num_warps=warps, num_stages=stages))
    tool = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(built.asm["cubin"])
        cubin.flush()
        usage = subprocess.run([tool, "-res-usage", cubin.name], capture_output=True, text=True,
                               check=True).stdout
    return dict(shared=built.metadata.shared, registers=int(re.search(r"REG:(\d+)", usage)[1]),
                spilled=int(re.search(r"STACK:(\d+)", usage)[1])
                + int(re.search(r"LOCAL:(\d+)", usage)[1]),
                tensor_cores=len(re.findall(r"mma\.sync|wgmma\.mma", built.asm["ptx"])))


def child(mode, cases):
    for case in cases:
        try:
            if mode == "compile":
                answer = {kernel: compile_kernel(kernel, *case) for kernel in KERNELS}
            else:
                answer = (interpret_corners if isinstance(case, str) else interpret)(case) or "good"
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        print(json.dumps(answer), flush=True)


# ---------------------------------------------------------------------------- the tests

@functools.cache
def answers(mode, slow=False):
    """One child for all cases of a mode -> {case: answer}; a crash names the case it died in."""
    cases = {"interpret": INTERPRET_SLOW if slow else INTERPRET + CORNERS,
             "compile": COMPILE_SLOW if slow else COMPILE}[mode]
    env = {**os.environ, "TRITON_INTERPRET": str(int(mode == "interpret")), "OMP_NUM_THREADS": "1"}
    run = subprocess.run([sys.executable, __file__, mode, json.dumps(cases)], env=env,
                         capture_output=True, text=True)
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    lines += [f"the child died: {run.stderr[-2000:]}"] * (len(cases) - len(lines))
    return dict(zip(cases, lines))


@pytest.mark.parametrize("case", INTERPRET + CORNERS, ids=str)
def test_interpreted(case):
    assert answers("interpret")[case] == "good"


@pytest.mark.slow
def test_interpreted_everywhere():
    assert {k: v for k, v in answers("interpret", slow=True).items() if v != "good"} == {}


def assert_lean(case, answer):
    assert isinstance(answer, dict), (case, answer)
    for kernel, built in answer.items():
        assert built["shared"] <= 99 * 1024, (kernel, case, built)
        assert built["spilled"] == 0 and built["registers"] <= 255, (kernel, case, built)
        assert built["tensor_cores"] >= 2, (kernel, case, built)


@pytest.mark.parametrize("case", COMPILE, ids=str)
def test_compiled_without_a_gpu(case):
    assert_lean(case, answers("compile")[case])


@pytest.mark.slow
def test_compiled_for_every_size():
    for case, answer in answers("compile", slow=True).items():
        assert_lean(case, answer)


def test_a_card_with_less_shared_memory_gets_smaller_tiles(monkeypatch, capsys):
    from triton.runtime.errors import OutOfResources
    tried = []

    class Kernel:
        def __getitem__(self, grid):
            def launch(*args, BLOCK_T, BLOCK_S, **meta):
                tried.append((BLOCK_T, BLOCK_S, grid))
                if BLOCK_T * BLOCK_S > 32 * 16:
                    raise OutOfResources(100_000, 64_000, "shared memory")
            return launch
    monkeypatch.setattr(S, "_kernels", lambda: {"_triton_forward": Kernel()})
    monkeypatch.setattr(S, "_fitted", {})
    S.say_once.cache_clear()
    q = torch.zeros(1, 2, 100, 64, dtype=torch.float16)
    for _ in range(2):  # the second call knows
        S._launch("_triton_forward", 100, 2, (), q, 1, True, False)
    assert [t[:2] for t in tried] == [(128, 64), (64, 32), (32, 16), (32, 16)]
    assert tried[-1][2] == (4, 2)  # 100 rows in tiles of 32, for two heads
    assert capsys.readouterr().out.count("do not fit") == 2
    monkeypatch.setattr(Kernel, "__getitem__", lambda self, grid: self.refuse)
    Kernel.refuse = lambda self, *a, **k: (_ for _ in ()).throw(OutOfResources(9, 1, "registers"))
    with pytest.raises(OutOfResources):  # nothing smaller left
        S._launch("_triton_forward", 100, 2, (), q, 1, True, False)


@pytest.mark.parametrize("change, reason", [
    (dict(normalizer="softmax"), "SDPA"), (dict(D=160), "above"), (dict(B=40000), "65535"),
    (dict(dtype=torch.float64), "float64"), (dict(), "need CUDA")])
def test_what_the_kernels_refuse(monkeypatch, change, reason):
    if "CUDA" not in reason:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    q = torch.zeros(change.get("B", 1), 2, 1, change.get("D", 8), dtype=change.get("dtype"))
    q = q if "dtype" in change else q.float()
    assert reason in S._triton_refusal(change.get("normalizer", "softmax1"), q)


if __name__ == "__main__":
    child(sys.argv[1], [c if isinstance(c, str) else tuple(c) for c in json.loads(sys.argv[2])])
