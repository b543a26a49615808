"""Speed and memory as ratios within one run: no number here is compared with another machine's.

    python tests/bench.py                    # every section, about 10 minutes on 2 cores
    python tests/bench.py arms depth         # some of them

    plain    the standard transformer against the same shape in torch's own modules and SDPA
    arms     architectures against vanilla at nano: training tokens/s, peak memory, FLOPs
    ledger   Ledger against vanilla at the 160M shape
    depth    Attention Residuals and the router against the plain residual, 12 blocks, d 384
    softmax1 the fused Softmax1 path against plain causal SDPA
    int8     the linear maps of a w8a8 model in int8 against float: error, time, bytes
    pretrained  a Llama or Qwen3 folder (--model DIR or $SMOLLM2) against transformers with SDPA
    plan     what the GPU recipes will need, computed: tokens, FLOPs, hours, memory

Times: rounds in which all contestants take turns, medians; ratios against the first of them.
Memory: the highest resident size of a process of its own over what it held before the first step.
"""
from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time

sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import torch
import torch.nn as nn
import torch.nn.functional as F

import quantize
import softmax1
from model import PRESETS, SIZES, Config, Transformer

WIDE = {"n_layer": 6, "n_head": 6, "d_model": 384, "block_size": 256, "vocab_size": 258}
DEPTH = {"n_layer": 12, "n_head": 6, "d_model": 384, "block_size": 256, "vocab_size": 258}
SHAPES = {"nano": (SIZES["nano"], 12, 256), "plain": (WIDE, 12, 256), "depth": (DEPTH, 8, 256),
          "160m": ({**SIZES["160m"], "vocab_size": 50257}, 1, 256)}
ARMS = ["vanilla", "suppress", "ledger", "hc2", "delta", "outeffhop", "sink", "clip", "gated",
        "attnres", "attnres-block", "attnres-oasis", "oasis"]


class TorchBlock(nn.Module):
    """The standard block in torch's own words: RMSNorm, Linear, SDPA, rotary positions, SwiGLU."""

    def __init__(self, d, n_head, d_ff):
        super().__init__()
        self.n_head, self.n1, self.n2 = n_head, nn.RMSNorm(d, 1e-6), nn.RMSNorm(d, 1e-6)
        self.qkv, self.out = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d, bias=False)
        self.gate, self.up = nn.Linear(d, d_ff, bias=False), nn.Linear(d, d_ff, bias=False)
        self.down = nn.Linear(d_ff, d, bias=False)

    def forward(self, x, cos, sin):
        q, k, v = (t.unflatten(-1, (self.n_head, -1)).transpose(1, 2)
                   for t in self.qkv(self.n1(x)).chunk(3, -1))                      # (B, H, T, D)
        turn = lambda t: t * cos + torch.cat((-t.chunk(2, -1)[1], t.chunk(2, -1)[0]), -1) * sin
        y = F.scaled_dot_product_attention(turn(q), turn(k), v, is_causal=True)     # (B, H, T, D)
        x = x + self.out(y.transpose(1, 2).flatten(-2))                             # (B, T, d)
        u = self.n2(x)                                                              # (B, T, d)
        return x + self.down(F.silu(self.gate(u)) * self.up(u))                     # (B, T, d)


class TorchModel(nn.Module):
    def __init__(self, c: Config):
        super().__init__()
        self.embed, self.head = nn.Embedding(c.vocab_size, c.d_model), \
            nn.Linear(c.d_model, c.vocab_size, bias=False)
        self.blocks = nn.ModuleList(TorchBlock(c.d_model, c.n_head, c.d_ff)
                                    for _ in range(c.n_layer))
        self.norm = nn.RMSNorm(c.d_model, 1e-6)
        freq = 10000.0 ** -(torch.arange(0, c.head_dim, 2) / c.head_dim)
        angle = torch.cat([torch.arange(c.block_size)[:, None] * freq] * 2, -1)     # (T, D)
        self.register_buffer("cos", angle.cos()), self.register_buffer("sin", angle.sin())

    def forward(self, tokens, targets):
        x, T = self.embed(tokens), tokens.shape[1]                                  # (B, T, d)
        for block in self.blocks:
            x = block(x, self.cos[:T], self.sin[:T])                                # (B, T, d)
        logits = self.head(self.norm(x))                                            # (B, T, V)
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def trainer(shape: str, arm: str):
    """A function that does one training step of an arm at one of SHAPES."""
    fields, B, T = SHAPES[shape]
    torch.manual_seed(0)
    config = Config(**{**fields, **PRESETS.get(arm, {})})
    model = TorchModel(config) if arm == "torch modules" else Transformer(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    x, y = torch.randint(config.vocab_size, (2, B, T))                              # (B, T)

    def step():
        model(x, y)[1].backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return step, model, B * T


def resident() -> float:
    """Highest resident size of this process so far, MiB. VmHWM, for ru_maxrss outlives exec and
    starts at the parent's."""
    with open("/proc/self/status", encoding="ascii") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 1024


def child(shape: str, arm: str):
    """In a process of its own: peak memory of two training steps over what was there before; or of
    loading a pretrained folder."""
    if shape == "pretrained":
        before = resident()
        Transformer.from_pretrained(arm)
        return print(json.dumps(resident() - before))
    step, _, _ = trainer(shape, arm)
    gc.collect()
    before = resident()
    step(), step()
    print(json.dumps(resident() - before))


def peak_memory(shape: str, arm: str) -> float:
    out = subprocess.run([sys.executable, __file__, "--child", shape, arm], capture_output=True,
                         text=True, check=True,
                         env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536"})
    return json.loads(out.stdout.splitlines()[-1])


def compare(shape: str, arms: list[str], rounds: int, memory: bool = True):
    """The table of one section: every arm against the first."""
    made = {arm: trainer(shape, arm) for arm in arms}
    times = {arm: [] for arm in arms}
    for step, _, _ in made.values():
        step()
    for _ in range(rounds):
        for arm, (step, _, _) in made.items():
            start = time.perf_counter()
            step()
            times[arm].append(time.perf_counter() - start)
    base = statistics.median(times[arms[0]])
    mib = {arm: peak_memory(shape, arm) for arm in arms} if memory else {}
    count = lambda m: sum(p.numel() for p in m.parameters())
    first = made[arms[0]][1]
    print("| arm | tokens/s | time | peak memory | parameters | FLOPs |\n|:--|--:|--:|--:|--:|--:|")
    for arm, (_, model, tokens) in made.items():
        t = statistics.median(times[arm])
        per_round = [a / b for a, b in zip(times[arm], times[arms[0]])]
        low, high = min(per_round), max(per_round)
        print(f"| {arm} | {tokens / t:,.0f} | {t / base:.2f} ({low:.2f} to {high:.2f}) | "
              + (f"{mib[arm] / mib[arms[0]]:.2f} ({mib[arm]:.0f} MiB)" if memory else "–")
              + f" | {count(model) / count(first):.3f} | {flops_ratio(model, first)} |", flush=True)


def flops_ratio(model, first) -> str:
    both = isinstance(model, Transformer) and isinstance(first, Transformer)
    return f"{model.flops_per_token() / first.flops_per_token():.3f}" if both else "–"


def section_softmax1(rounds: int = 7):
    """Softmax1's fused path on this device over plain causal SDPA, at shapes of real models."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    fused = functools.partial(softmax1.attend, normalizer="softmax1",
                              impl="triton" if device == "cuda" else "cpu")
    large = [(8, 16, 2048, 64), (4, 16, 4096, 128)]
    small = [(4, 8, 512, 64), (1, 12, 1024, 64), (1, 16, 2048, 128)]
    print("| (B, H, T, D) | dtype | forward | forward + backward | with a null gradient |\n"
          "|:--|:--|--:|--:|--:|")
    for dtype in (torch.bfloat16,) if device == "cuda" else (torch.float32, torch.bfloat16):
        for shape in large if device == "cuda" else small:
            ratios = softmax1.time_ratios({"": fused}, shape, dtype, device, rounds)[""]
            print(f"| {shape} | {str(dtype)[6:]} | "
                  + " | ".join(f"{r:.2f}" for r in ratios) + " |", flush=True)


def saved_bytes(model, T: int) -> int:
    """Bytes that autograd keeps for the backward pass of one sequence, under bfloat16 autocast;
    the fp32 weights themselves apart. A storage that several operations keep counts once."""
    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept = {}

    def pack(x):
        if x.untyped_storage().data_ptr() not in weights:
            kept[x.untyped_storage().data_ptr()] = x.untyped_storage()  # so no address comes twice
        return x

    tokens = torch.randint(model.config.vocab_size, (1, T))                         # (1, T)
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x)
    with hooks, torch.autocast("cpu", torch.bfloat16):
        model(tokens, tokens)
    return sum(storage.nbytes() for storage in kept.values())


def section_plan(peak: float = 312e12, share: float = 0.35):
    """Nothing here is timed. Memory: 16 bytes a parameter (fp32 weight, gradient, two AdamW
    moments) and what autograd keeps, a straight line in T through two short measurements, because
    no path keeps a T x T matrix. Hours: FLOPs at `share` of an A100's bf16 peak, an assumption."""
    import train
    print(f"hours: at {share:.0%} of {peak / 1e12:.0f} TFLOP/s. GB: weights and optimiser + "
          "activations of one sequence x sequences\n\n"
          "| size | arm | parameters | tokens | GFLOP/token | hours | GB |\n"
          "|:--|:--|--:|--:|--:|--:|:--|")
    for size in ("160m", "290m"):
        recipe = train.RECIPES[size]
        T, B = SIZES[size]["block_size"], recipe.get("micro_batch") or recipe["batch_size"]
        for arm in ("vanilla", "ledger", "attnres", "oasis"):
            model = Transformer(Config(**{**SIZES[size], "vocab_size": 50257, **PRESETS[arm]}))
            n, flops = model.count_params()["total"], model.flops_per_token()
            tokens = recipe["steps"] * recipe["batch_size"] * T
            short, long = saved_bytes(model, 32), saved_bytes(model, 64)
            slope = (long - short) / 32
            fixed, each = 16 * n + short - 32 * slope, slope * T
            print(f"| {size} | {arm} | {n / 1e6:.0f} M | {tokens / 1e6:.0f} M | {flops / 1e9:.2f}"
                  f" | {tokens * flops / peak / share / 3600:.1f} | {fixed / 1e9:.1f} + "
                  f"{each / 1e9:.2f} x {B} = {(fixed + each * B) / 1e9:.0f} |", flush=True)


def section_int8():
    """quantize.check_integers' table, as ratios to the float product: int8 is the whole map
    (inputs to codes, product, scales), product its integer matrix product alone."""
    model = Transformer(Config(**WIDE))
    ids = torch.randint(WIDE["vocab_size"], (4, 257))                               # (n, T + 1)
    fake, real, rows = quantize.check_integers(quantize.quantize(model, "w8a8"), ids)
    print(f"loss {fake:.6f} with rounded floats, {real:.6f} in int8\n\n"
          "| map, 1024 tokens | largest difference | int8 / float | product / float | bytes |\n"
          "|:--|--:|--:|--:|--:|")
    for shape, difference, plain, whole, product, full, small in rows:
        number = lambda text: float(text.replace(",", ""))
        print(f"| {shape} | {difference} | {number(whole) / number(plain):.2f} | "
              f"{number(product) / number(plain):.2f} | {number(small) / number(full):.2f} |")


def section_pretrained(rounds: int = 5, new: int = 32):
    """Forward at T 512 and greedy generation against transformers with SDPA, fp32, and the memory
    of loading. CPU time of this process, so that other jobs on the machine count for less."""
    folder = os.environ.get("SMOLLM2")
    if not folder:
        return print("skipped: give --model DIR or set SMOLLM2 to the folder of SmolLM2-135M")
    import transformers
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    ours = Transformer.from_pretrained(folder).eval()
    draw = lambda *shape: torch.randint(3, ours.config.vocab_size, shape)
    how = dict(do_sample=False, min_new_tokens=new, max_new_tokens=new, pad_token_id=0)
    whole, one, eight = draw(1, 512), draw(1, 64), draw(8, 64)
    tasks = {"forward, 1 x 512": (lambda: theirs(whole, use_cache=False), lambda: ours(whole)),
             f"generate 64 + {new}, batch 1": (lambda: theirs.generate(one, **how),
                                               lambda: ours.generate(one, new, temperature=0)),
             f"generate 64 + {new}, batch 8": (lambda: theirs.generate(eight, **how),
                                               lambda: ours.generate(eight, new, temperature=0))}
    print("| task | transformers, s | ours, s | ratio |\n|:--|--:|--:|--:|")
    with torch.inference_mode():
        for name, pair in tasks.items():
            times = alternate(pair, rounds)
            ratios = [b / a for a, b in zip(*times)]
            a, b = map(statistics.median, times)
            print(f"| {name} | {a:.3f} | {b:.3f} | {statistics.median(ratios):.2f} "
                  f"({min(ratios):.2f} to {max(ratios):.2f}) |", flush=True)
    files = sum(os.path.getsize(os.path.join(folder, name)) for name in os.listdir(folder)
                if name.endswith(".safetensors")) / 2 ** 20
    model = sum(p.numel() * p.element_size() for p in ours.parameters()) / 2 ** 20
    peak = peak_memory("pretrained", folder)
    print(f"\nloading: {peak:.0f} MiB at most = {peak / (files + model):.2f} of checkpoint "
          f"({files:.0f}) + model ({model:.0f})")


def alternate(functions, rounds: int) -> list[list[float]]:
    """CPU seconds of each function in rounds in which all take turns, after one to warm up."""
    times = [[] for _ in functions]
    for _ in range(rounds + 1):
        for seconds, f in zip(times, functions):
            start = time.process_time()
            f()
            seconds.append(time.process_time() - start)
    return [seconds[1:] for seconds in times]


SECTIONS = {
    "plain": lambda: compare("plain", ["torch modules", "vanilla"], 8),
    "arms": lambda: compare("nano", ARMS, 6),
    "ledger": lambda: compare("160m", ["vanilla", "ledger"], 3),
    "depth": lambda: compare("depth", ["vanilla", "attnres", "attnres-block", "attnres-oasis",
                                       "oasis"], 5),
    "softmax1": section_softmax1,
    "int8": section_int8,
    "pretrained": section_pretrained,
    "plan": section_plan,
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("sections", nargs="*", help=f"any of {', '.join(SECTIONS)} (default: all)")
    parser.add_argument("--model", help="folder for the section pretrained (default: $SMOLLM2)")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return child(*args.child)
    os.environ["SMOLLM2"] = args.model or os.environ.get("SMOLLM2", "")
    unknown = [s for s in args.sections if s not in SECTIONS]
    if unknown:
        parser.error(f"no section {', '.join(unknown)}: choose from {', '.join(SECTIONS)}")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {platform.processor()}"
          f" {platform.machine()}, python {platform.python_version()}")
    for name in args.sections or SECTIONS:
        fields, B, T = SHAPES.get({"arms": "nano", "ledger": "160m"}.get(name, name), ({}, 0, 0))
        shape = f": d {fields['d_model']}, {fields['n_layer']} blocks, {B} x {T} tokens, " \
            "forward, backward and AdamW" if fields else ""
        print(f"\n## {name}{shape}", flush=True)
        SECTIONS[name]()


if __name__ == "__main__":
    main()
