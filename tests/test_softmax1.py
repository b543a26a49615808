"""Softmax1 and `attend`: the function, its relatives, and every path against the reference."""
import functools
import math
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st

import softmax1 as S
from conftest import ROOT
from softmax1 import NORMALIZERS, attend, attention_probs, softmax1

WITH_NULL = ("softmax1", "sink")
NAMES = ("out", "null", "dq", "dk", "dv", "ds")


def tensors(shape_q, shape_k, dtype=torch.float32, seed=0, layout="heads first"):
    """q, k, v: contiguous, or the transposed view that a projection leaves behind."""
    gen = torch.Generator().manual_seed(seed)

    def one(shape):
        B, H, T, D = shape
        x = torch.randn(B, T, H, D, generator=gen).transpose(1, 2)
        return (x if layout == "heads last" else x.contiguous()).to(dtype)
    return one(shape_q), one(shape_k), one(shape_k)


def padding(B, S_, left):
    mask = torch.ones(B, 1, 1, S_, dtype=torch.bool)
    mask[-1, ..., :left] = False
    return mask


def everything(q, k, v, normalizer, impl, wide=None, shift=0.0, **options):
    """[out, null, dq, dk, dv, ds] for a loss that reaches both outputs."""
    gen = torch.Generator().manual_seed(9)
    H = q.size(1)
    g, g_null = torch.randn(q.shape, generator=gen), torch.randn(q.shape[:3], generator=gen)
    g = g.to(q.dtype)
    inputs = [x.to(wide or x.dtype).requires_grad_() for x in (q, k, v)]
    if normalizer == "sink":
        s = torch.linspace(-1, 2, H) - shift
        options["null_logit"] = s.to(wide or torch.float32).requires_grad_()
        inputs.append(options["null_logit"])
    out, null = attend(*inputs[:3], normalizer, impl=impl, **options)
    loss = (out.to(g_null.dtype) * g.to(out)).sum() if wide is None else (out * g.to(out)).sum()
    loss = loss + (null * g_null.to(null)).sum()
    return [out, null, *torch.autograd.grad(loss, inputs)]


def assert_close(got, want, dtype, slack=16):
    """Relative to the largest entry, or to 1; for the null mass relative in each row by itself."""
    for name, a, b in zip(NAMES, got, want):
        b = b.double()
        size = torch.where(b == 0, 1, b) if name == "null" else b.abs().max().clamp(min=1)
        error = ((a.double() - b).abs() / size).max().item()
        assert error < slack * torch.finfo(dtype).eps, (name, error)


# ---- the function

def test_softmax1_against_hand():
    p = softmax1(torch.tensor([5.0, 5.0]))
    assert p.tolist() == pytest.approx([0.498321, 0.498321], abs=1e-6)
    assert softmax1(torch.zeros(3)).tolist() == pytest.approx([0.25] * 3)
    # exp(s) = 2 in the denominator
    assert softmax1(torch.zeros(3), null_logit=math.log(2)).tolist() == pytest.approx([0.2] * 3)
    assert softmax1(torch.zeros(2, 3), dim=0).flatten().tolist() == pytest.approx([1 / 3] * 6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("row, expected", [
    ([1e6, 0.0], [1.0, 0.0]), ([-1e6, -1e6], [0.0, 0.0]), ([1e6, 1e6], [0.5, 0.5]),
    ([1e6, -1e6], [1.0, 0.0]), ([-math.inf, 0.0], [0.0, 0.5]),
    ([-math.inf, -math.inf], [0.0, 0.0])])
def test_softmax1_extremes(dtype, row, expected):
    x = torch.tensor(row, dtype=dtype, requires_grad=True)
    p = softmax1(x)
    assert p.dtype == dtype and p.tolist() == expected
    assert torch.autograd.grad(p.sum(), x)[0].isfinite().all()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(-60, 60), min_size=1, max_size=9), st.floats(-20, 20))
def test_softmax1_is_softmax_with_a_dropped_logit(row, s):
    x = torch.tensor(row, dtype=torch.float64)
    whole = torch.softmax(torch.cat([x, x.new_tensor([s])]), 0)
    torch.testing.assert_close(softmax1(x, null_logit=s), whole[:-1], rtol=1e-12, atol=0)


def test_softmax1_gradient_in_logits_and_null_logit():
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    s = torch.randn(3, 1, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x, s: softmax1(x, -1, s), (x, s))


def test_null_logit_minus_inf_is_softmax():
    x = torch.randn(4, 7)
    torch.testing.assert_close(softmax1(x, null_logit=-math.inf), torch.softmax(x, -1))


@pytest.mark.parametrize("name", ["sparsemax", "entmax15"])
@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0, 1e4])
def test_sparse_normalizers_against_entmax(name, scale):
    entmax = pytest.importorskip("entmax")
    x = (torch.randn(40, 23, dtype=torch.float64) * scale).requires_grad_()
    ours, theirs = getattr(S, name)(x), getattr(entmax, name)(x, dim=-1)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    g = torch.randn_like(x)
    torch.testing.assert_close(torch.autograd.grad(ours, x, g), torch.autograd.grad(theirs, x, g),
                               rtol=1e-8, atol=1e-10)
    assert (ours == 0).any() or scale == 0.1  # it must be able to reach exact zeros


def test_clipped_softmax_by_hand():
    x = torch.tensor([math.log(0.9), math.log(0.09), math.log(0.01)], requires_grad=True)
    p = S.clipped_softmax(x, -0.025, 1.0)
    assert p.tolist() == pytest.approx([1.025 * 0.9 - 0.025, 1.025 * 0.09 - 0.025, 0.0], abs=1e-6)
    # the clipped entry asks for nothing
    assert torch.autograd.grad(p[2], x)[0].abs().max() == 0
    assert S.clipped_softmax(torch.tensor([9.0, 0.0]), -0.025, 1.1).tolist() == [1.0, 0.0]


# ---- attend, every normaliser

@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize("mask", [None, "left"])
def test_gradcheck_through_out_and_null(normalizer, mask):
    q, k, v = (x.requires_grad_() for x in tensors((2, 2, 5, 4), (2, 1, 6, 4), torch.float64))
    s = torch.tensor([0.3, -0.7], dtype=torch.float64, requires_grad=True)
    mask = padding(2, 6, 4) if mask else None

    def f(q, k, v, s):
        return attend(q, k, v, normalizer, null_logit=s if normalizer == "sink" else None,
                      mask=mask, gamma=-0.1)
    assert torch.autograd.gradcheck(f, (q, k, v, s))


@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_null_is_what_the_row_lacks(normalizer):
    q, k, _ = tensors((1, 4, 9, 8), (1, 2, 9, 8))
    s = torch.randn(4) if normalizer == "sink" else None
    p, null = attention_probs(q, k, normalizer, null_logit=s)
    assert p.dtype == null.dtype == torch.float32
    torch.testing.assert_close(null, 1 - p.sum(-1), atol=1e-5, rtol=0)
    assert (p.triu(1) == 0).all() and (p >= 0).all()
    assert (null.max() > 0.05) == (normalizer in ("softmax1", "sink", "clipped"))


@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_the_future_changes_nothing_before_it(normalizer):
    s = torch.randn(2) if normalizer == "sink" else None
    q, k, v = tensors((1, 2, 12, 8), (1, 2, 12, 8))
    for impl in ("auto", "eager"):
        before = attend(q, k, v, normalizer, null_logit=s, impl=impl)
        k2, v2 = k.clone(), v.clone()
        k2[:, :, 7:], v2[:, :, 7:] = 5, -5
        after = attend(q, k2, v2, normalizer, null_logit=s, impl=impl)
        for a, b in zip(before, after):
            torch.testing.assert_close(a[:, :, :7], b[:, :, :7], rtol=1e-6, atol=1e-6)
        assert (before[0] - after[0])[:, :, 7:].abs().max() > 0.1


@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_decoding_equals_the_full_forward(normalizer):
    """One query, then a chunk of five, behind a cache: aligned at the end."""
    s = torch.randn(4) if normalizer == "sink" else None
    q, k, v = tensors((2, 4, 20, 16), (2, 2, 20, 16))
    full, full_null = attend(q, k, v, normalizer, null_logit=s)
    for T in (1, 5):
        out, null = attend(q[:, :, -T:], k, v, normalizer, null_logit=s)
        torch.testing.assert_close(out, full[:, :, -T:], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(null, full_null[:, :, -T:], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("normalizer", NORMALIZERS)
@pytest.mark.parametrize("length", [1, 7, 32])
def test_left_padding_equals_no_padding(normalizer, length):
    s = torch.randn(4) if normalizer == "sink" else None
    q, k, v = tensors((2, 4, 32, 16), (2, 2, 32, 16))
    out, null = attend(q, k, v, normalizer, null_logit=s, mask=padding(2, 32, 32 - length))
    short = (x[1:, :, 32 - length:] for x in (q, k, v))
    alone, alone_null = attend(*short, normalizer, null_logit=s)
    torch.testing.assert_close(out[1:, :, 32 - length:], alone, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(null[1:, :, 32 - length:], alone_null, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("impl", ["eager", "sdpa", "cpu"])
@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_rows_that_see_nothing(normalizer, impl):
    if impl != "eager" and normalizer not in ("softmax", *WITH_NULL):
        pytest.skip("only the reference has it")
    q, k, v = (x.requires_grad_() for x in tensors((1, 2, 4, 8), (1, 2, 4, 8)))
    s = torch.randn(2) if normalizer == "sink" else None
    out, null = attend(q, k, v, normalizer, null_logit=s, impl=impl,
                       mask=torch.zeros(1, 1, 1, 4, dtype=torch.bool))
    assert (out == 0).all()
    assert (null == float(normalizer in ("softmax1", "sink", "clipped"))).all()
    grads = torch.autograd.grad(out.sum() + (null.sum() if null.requires_grad else 0), (q, k, v))
    assert all((g == 0).all() for g in grads)


@pytest.mark.parametrize("normalizer", ["softmax1", "sink"])
def test_rows_that_see_nothing_whatever_the_null_logit(normalizer):
    """A null key that lies as low as the hidden ones takes all of the mass even so."""
    q, k, v = tensors((2, 2, 4, 8), (2, 2, 4, 8))
    mask = torch.tensor([[True] * 4, [False] * 4])[:, None, None]
    for s in (-1e9, -math.inf):
        for impl in ("eager", "sdpa", "cpu"):
            out, null = attend(q, k, v, normalizer, null_logit=torch.full((2,), s), mask=mask,
                               impl=impl)
            assert (out[1] == 0).all() and (null[1] == 1).all() and (null[0] < 1e-6).all(), impl


def test_annealed_null_logit_joins_softmax_and_softmax1():
    q, k, v = tensors((1, 2, 6, 8), (1, 2, 6, 8))
    softmax, _ = attend(q, k, v, "softmax")
    for impl in ("eager", "sdpa", "cpu"):
        out, null = attend(q, k, v, "softmax1", null_logit=-math.inf, impl=impl)
        torch.testing.assert_close(out, softmax, rtol=1e-5, atol=1e-6)
        assert null.abs().max() < 1e-6
        half = attend(q, k, v, "softmax1", null_logit=torch.tensor(-2.0), impl=impl)
        same = attend(q, k, v, "sink", null_logit=torch.full((2,), -2.0), impl="eager")
        torch.testing.assert_close(half, same, rtol=1e-5, atol=1e-6)


# ---- every path against the fp64 reference

GRID = [  # (H, Hkv), (T, S), D, causal, mask
    ((2, 2), (1, 1), 16, True, None), ((4, 2), (2, 2), 32, True, None),
    ((2, 2), (63, 63), 48, True, None), ((2, 1), (64, 64), 64, True, None),
    ((2, 2), (65, 65), 80, True, "left"), ((4, 2), (127, 127), 96, False, "left"),
    ((2, 1), (1000, 1000), 128, True, None), ((4, 2), (1, 70), 32, True, "left"),
    ((4, 2), (40, 70), 16, True, None), ((4, 2), (40, 70), 16, True, "left"),
    ((2, 2), (33, 20), 24, False, None)]


@pytest.mark.parametrize("impl", ["sdpa", "cpu", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("normalizer", ["softmax1", "sink", "softmax"])
def test_every_path_over_the_grid(impl, dtype, normalizer):
    for i, ((H, Hkv), (T, S_), D, causal, mask) in enumerate(GRID):
        if T == 1000 and (dtype != torch.float32 or normalizer == "softmax"):
            continue
        q, k, v = tensors((2, H, T, D), (2, Hkv, S_, D), dtype, seed=i, layout="heads last")
        options = dict(causal=causal, mask=padding(2, S_, S_ // 2 + 1) if mask else None)
        want = everything(q, k, v, normalizer, "eager", wide=torch.float64, **options)
        assert_close(everything(q, k, v, normalizer, impl, **options), want, dtype)


@pytest.mark.parametrize("impl", ["sdpa", "cpu", "eager"])
@pytest.mark.parametrize("shift", [-10.0, -3.0, 8.0])
def test_where_the_null_dominates_and_where_it_vanishes(impl, shift):
    """Relative errors of null, per row, from 1 - 1e-4 down to 1e-5: the regime where "+1" added in
    the wrong place, or 1 - sum(p), goes wrong."""
    path = functools.partial(attend, normalizer="softmax1", impl=impl)
    assert S.max_relative_error(path, (1, 2, 50, 16), shift=shift) < 1e-5


def test_the_error_measure_sees_a_wrong_null():
    def misplaced_one(q, k, v):  # adds 1 after the shift by the row maximum
        x = (q @ k.mT / math.sqrt(q.size(-1))).masked_fill(
            torch.ones(q.size(2), k.size(2)).triu(1).bool(), -math.inf)
        e = torch.exp(x - x.amax(-1, keepdim=True))
        total = 1 + e.sum(-1, keepdim=True)
        return e / total @ v, 1 / total.squeeze(-1)
    assert S.max_relative_error(misplaced_one, (1, 2, 50, 16)) > 0.1


@pytest.mark.parametrize("impl", ["cpu", "sdpa", "eager"])
def test_a_mean_null_loss_reaches_q_and_k_and_not_v(impl):
    q, k, v = (x.requires_grad_() for x in tensors((1, 2, 9, 8), (1, 2, 9, 8)))
    want = torch.autograd.grad(attend(q, k, v, "softmax1", impl="eager")[1].mean(), (q, k))
    null = attend(q, k, v, "softmax1", impl=impl)[1]
    dq, dk, dv = torch.autograd.grad(null.mean(), (q, k, v), allow_unused=True)
    torch.testing.assert_close((dq, dk), want, rtol=1e-5, atol=1e-8)
    assert dq.abs().max() > 0 and dk.abs().max() > 0 and (dv is None or (dv == 0).all())


def test_rows_without_output_gradient_keep_their_null_gradient():
    """The CPU path folds the null's gradient along dO: here some rows have none to fold along."""
    q, k, v = (x.requires_grad_() for x in tensors((1, 2, 9, 8), (1, 2, 9, 8)))
    g, g_null = torch.randn(1, 2, 9, 8), torch.randn(1, 2, 9)
    g[:, :, ::2] = 0

    def grads(impl):
        out, null = attend(q, k, v, "softmax1", impl=impl)
        return torch.autograd.grad([out, null], (q, k, v), [g, g_null])
    torch.testing.assert_close(grads("cpu"), grads("eager"), rtol=1e-5, atol=1e-6)


def test_a_second_derivative_is_refused_not_wrong():
    q, k, v = (x.requires_grad_() for x in tensors((1, 2, 9, 8), (1, 2, 9, 8)))
    out, _ = attend(q, k, v, "softmax1", impl="cpu")
    dq, = torch.autograd.grad(out.sum(), q, create_graph=True)
    with pytest.raises(RuntimeError):
        dq.sum().backward()


@pytest.mark.parametrize("native", [True, False])
def test_bf16_backward_with_and_without_bf16_units(monkeypatch, native):
    monkeypatch.setattr(S, "CPU_HAS_BF16", native)
    path = functools.partial(attend, normalizer="softmax1", impl="cpu")
    assert S.max_relative_error(path, (1, 2, 60, 32), torch.bfloat16) < 0.03
    q, k, v = (x.requires_grad_() for x in tensors((1, 2, 9, 8), (1, 2, 9, 8), torch.bfloat16))
    got, want = (torch.autograd.grad(attend(q, k, v, "softmax1", impl=impl)[1].sum(), (q, k))
                 for impl in ("cpu", "eager"))  # dO is zero: the spare column
    torch.testing.assert_close(got, want, rtol=0.02, atol=2e-3)


def test_masks_by_head_and_query_on_the_cpu_path():
    q, k, v = tensors((2, 4, 30, 16), (2, 2, 30, 16))
    mask = torch.rand(2, 4, 30, 30, generator=torch.Generator().manual_seed(3)) > 0.5
    for m in (mask, mask[:, :1], mask[:1, :1, :, :]):
        want = everything(q, k, v, "sink", "eager", wide=torch.float64, mask=m)
        assert_close(everything(q, k, v, "sink", "cpu", mask=m), want, torch.float32)


def test_inputs_with_any_strides():
    x = torch.randn(2, 8, 33, 4)
    q, k, v = x.mT.contiguous().mT, x[:, :2].expand(2, 2, 33, 4), torch.randn(2, 2, 4, 33).mT
    want = everything(q, k, v, "softmax1", "eager", wide=torch.float64)
    assert_close(everything(q, k, v, "softmax1", "cpu"), want, torch.float32)
    # a gradient that is an expanded scalar
    q = q.clone().requires_grad_()
    a, b = (torch.autograd.grad(attend(q, k, v, "softmax1", impl=i)[0].sum(), q)[0]
            for i in ("cpu", "eager"))
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_huge_logits_in_bf16_and_fp32():
    for dtype in (torch.float32, torch.bfloat16):
        q, k, v = tensors((1, 2, 40, 16), (1, 2, 40, 16), dtype)
        want = everything(q * 1000, k * 1000, v, "softmax1", "eager", wide=torch.float64)
        for impl in ("cpu", "sdpa", "eager"):
            out, null, *grads = everything(q * 1000, k * 1000, v, "softmax1", impl)
            assert all(x.isfinite().all() for x in (out, null, *grads))
            torch.testing.assert_close(out.double(), want[0], rtol=0.02, atol=0.02)


# ---- dispatch, errors, surroundings

def test_auto_picks_the_fast_path(monkeypatch):
    taken = []
    for name in ("_attend_eager", "_attend_sdpa", "_attend_fused"):
        real = getattr(S, name)
        monkeypatch.setattr(S, name, functools.partial(
            lambda real, name, *a, **kw: (taken.append(name), real(*a, **kw))[1], real, name))
    q, k, v = tensors((1, 2, 8, 8), (1, 2, 8, 8))
    attend(q, k, v), attend(q, k, v, "softmax1"), attend(q, k, v, "entmax15")
    attend(q, k, v, mask=padding(1, 8, 2)), attend(q[:, :, :3], k, v)
    assert [name[8:] for name in taken] == ["sdpa", "fused", "eager", "fused", "fused"]


def test_a_missing_fast_path_is_one_printed_line(monkeypatch, capsys):
    """What auto does on CUDA without triton, played on the CPU."""
    monkeypatch.setattr(S, "_choices", lambda *_: ("triton", "sdpa", "eager"))
    monkeypatch.setattr(S, "TRITON", False)
    S.say_once.cache_clear()
    q, k, v = tensors((1, 2, 8, 8), (1, 2, 8, 8))
    for _ in range(3):
        out, _ = attend(q, k, v, "softmax1")
    torch.testing.assert_close(out, attend(q, k, v, "softmax1", impl="eager")[0])
    said = capsys.readouterr().out
    assert said.count("\n") == 1 and "triton is not installed" in said and "sdpa instead" in said


def test_describe_names_what_auto_takes():
    assert S.describe("softmax", "cpu") == "SDPA"
    assert "fused" in S.describe("softmax1", "cpu") and "fused" in S.describe("sink", "cpu")
    assert "eager" in S.describe("sparsemax", "cuda") and "eager" in S.describe("clipped", "cpu")
    assert ("Triton" if S.TRITON else "no triton") in S.describe("softmax1", "cuda")
    assert "zero key" in S.describe("sink", "mps")


@pytest.mark.parametrize("change, message", [
    (dict(normalizer="softmax2"), "normalizer is one of"),
    (dict(impl="fast"), "impl is one of"),
    (dict(normalizer="sink"), "sink needs"),
    (dict(null_logit=0.0), "softmax has no null_logit"),
    (dict(normalizer="softmax1", null_logit=torch.zeros(3)), "null_logit is"),
    (dict(mask=torch.ones(1, 1, 1, 8)), "boolean"),
    (dict(mask=torch.ones(1, 1, 1, 7, dtype=torch.bool)), "does not broadcast"),
    (dict(k=torch.zeros(1, 3, 8, 8), v=torch.zeros(1, 3, 8, 8)), "do not fit"),
    (dict(v=torch.zeros(1, 2, 7, 8)), "do not fit"),
    (dict(k=torch.zeros(1, 2, 8, 4), v=torch.zeros(1, 2, 8, 4)), "do not fit"),
    (dict(v=torch.zeros(1, 2, 8, 8, dtype=torch.bfloat16)), "dtypes differ"),
    (dict(k=torch.zeros(1, 2, 8, 8, device="meta")), "devices differ"),
    (dict(mask=torch.ones(1, 1, 1, 8, dtype=torch.bool, device="meta")), "mask is on"),
    (dict(k=torch.zeros(1, 2, 0, 8), v=torch.zeros(1, 2, 0, 8)), "nothing to attend"),
    (dict(q=torch.zeros(2, 8, 8)), "q, k and v are"),
    (dict(normalizer="clipped", gamma=0.1), "gamma <= 0"),
    (dict(normalizer="entmax15", impl="cpu"), "only eager"),
    (dict(normalizer="softmax1", impl="triton"), "triton|CUDA"),
    (dict(k=torch.zeros(1, 2, 6, 8), v=torch.zeros(1, 2, 6, 8), impl="sdpa"), "more causal"),
    (dict(mask=torch.ones(1, 2, 8, 8, dtype=torch.bool), impl="sdpa"), "differs by head"),
])
def test_bad_calls_are_one_clear_line(change, message):
    call = dict(q=torch.zeros(1, 2, 8, 8), k=torch.zeros(1, 2, 8, 8), v=torch.zeros(1, 2, 8, 8))
    with pytest.raises(ValueError, match=message) as error:
        attend(**(call | change))
    assert "\n" not in str(error.value)


def test_more_causal_queries_than_keys():
    q, k, v = tensors((1, 2, 5, 8), (1, 2, 3, 8))
    out, null = attend(q, k, v, "softmax1")  # the first two queries come before every key
    assert (out[:, :, :2] == 0).all() and (null[:, :, :2] == 1).all() and (null[:, :, 2:] < 1).all()


@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_under_autocast(normalizer):
    q, k, v = (x.requires_grad_() for x in tensors((1, 2, 33, 16), (1, 2, 33, 16)))
    s = torch.zeros(2, requires_grad=True) if normalizer == "sink" else None
    want = attend(q, k, v, normalizer, null_logit=s, impl="eager")
    with torch.autocast("cpu", torch.bfloat16):
        out, null = attend(q, k.bfloat16(), v, normalizer, null_logit=s)
    assert out.dtype == torch.bfloat16 and null.dtype == torch.float32
    (out.float().sum() + null.sum()).backward()
    assert q.grad.dtype == torch.float32 and (s is None or s.grad.abs().min() > 0)
    torch.testing.assert_close(out.float(), want[0], rtol=0.05, atol=0.05)
    torch.testing.assert_close(null, want[1], rtol=0.05, atol=0.01)


def test_under_activation_checkpointing():
    q, k, v = (x.requires_grad_() for x in tensors((1, 2, 33, 16), (1, 2, 33, 16)))
    f = functools.partial(attend, normalizer="softmax1")
    plain = torch.autograd.grad(sum(x.sum() for x in f(q, k, v)), (q, k, v))
    again = torch.utils.checkpoint.checkpoint(f, q, k, v, use_reentrant=False)
    assert all(torch.equal(a, b) for a, b in
               zip(plain, torch.autograd.grad(sum(x.sum() for x in again), (q, k, v))))


@pytest.mark.parametrize("normalizer, with_null", [("softmax1", True), ("sink", True),
                                                   ("softmax1", False)])
def test_under_compile(normalizer, with_null):
    """The whole call in one graph (aot_eager: tracing and autograd, without a C++ compiler)."""
    torch._dynamo.reset()
    q, k, v = (x.requires_grad_() for x in tensors((1, 4, 20, 16), (1, 2, 20, 16)))
    s = torch.tensor([0.5, 0.0, -1.0, 1.0], requires_grad=True)

    def f(q, k, v, s):
        out, null = attend(q * 2, k, v, normalizer, null_logit=s if normalizer == "sink" else None)
        return out.square().sum() + (null.sin().sum() if with_null else 0)
    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    inputs = (q, k, v, s) if normalizer == "sink" else (q, k, v)
    for a, b in zip(torch.autograd.grad(compiled(q, k, v, s), inputs),
                    torch.autograd.grad(f(q, k, v, s), inputs)):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_memory_is_linear_in_length():
    """No tensor of T x S anywhere on the fast paths, forward or backward."""
    from torch.utils._python_dispatch import TorchDispatchMode
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            for x in result if isinstance(result, (tuple, list)) else [result]:
                if isinstance(x, torch.Tensor) and x.numel():
                    largest = max(largest, x.untyped_storage().nbytes() // x.element_size())
            return result
    T = 700
    for impl, normalizer, mask in (("cpu", "softmax1", None), ("cpu", "sink", padding(1, T, 9)),
                                   ("sdpa", "softmax1", padding(1, T, 9)),
                                   ("cpu", "softmax", padding(1, T, 9))):
        q, k, v = tensors((1, 2, T, 16), (1, 2, T, 16))
        with Watch():
            everything(q, k, v, normalizer, impl, mask=mask)
        assert 2 * T * 16 <= largest <= 3 * T * 32 < T * T, (impl, largest)


def test_importing_asks_for_nothing():
    code = ("import sys; sys.modules['triton'] = None\nimport softmax1, torch\n"
            "assert not torch.cuda.is_initialized()\n"
            "assert 'matplotlib' not in sys.modules and 'triton.language' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)


def test_the_picture(tmp_path):
    S.draw(str(tmp_path / "new" / "softmax1.png"))
    assert [f.name for f in (tmp_path / "new").iterdir()] == ["softmax1.png"]
    assert (tmp_path / "new" / "softmax1.png").read_bytes()[:4] == b"\x89PNG"


def test_the_table_on_a_small_shape(monkeypatch, capsys):
    monkeypatch.setitem(S.SHAPES, "cpu", [((1, 2, 40, 16), torch.float32)])
    assert S.self_check("cpu")
    table = capsys.readouterr().out
    assert all(name in table for name in ("eager", "sdpa", "cpu")) and "WRONG" not in table
    monkeypatch.setattr(S, "_paths", lambda device: {
        "bad": lambda q, k, v: (F.scaled_dot_product_attention(q, k, v), (q * 0).sum(-1))})
    assert not S.self_check("cpu") and "WRONG" in capsys.readouterr().out


def test_cuda_without_a_card_is_one_line(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(sys, "argv", ["softmax1.py", "--device", "cuda"])
    with pytest.raises(SystemExit) as stop:
        S.main()
    assert stop.value.code == 2 and "no CUDA device" in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_card():
    for name, path in S._paths("cuda").items():
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            for D in (16, 32, 48, 64, 80, 96, 128):
                for T in (1, 2, 63, 64, 65, 127, 1000):
                    if name == "flex" and (D & (D - 1) or T < 64):
                        continue
                    error = S.max_relative_error(path, (1, 2, T, D), dtype, "cuda")
                    assert error < 32 * torch.finfo(dtype).eps, (name, dtype, D, T, error)
