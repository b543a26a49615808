"""Train one model, or a whole study of them, and print what became of its outliers.

    python train.py --arch ledger --sparsity high         # nano, offline, a few minutes on a CPU
    python train.py --arch oasis --size 160m --data fineweb-edu
    python train.py --study ledger --seeds 3              # every arm x seed, then the table
    python train.py --init-from FOLDER --arch oasis       # from pretrained weights, kept as such
    torchrun --nproc-per-node 8 train.py ...              # the same batches on 8 GPUs

A preset (--arch) is a named set of the mechanism flags, and each flag overrides it. A run is a
folder: config.json, log.jsonl, checkpoint.pt, metrics.json, figures/. Nothing in it is ever half
written: Ctrl-C saves and stops, `--resume` continues, and since every batch is a pure function of
(seed, step) a run in two pieces equals the run in one, bit by bit on a CPU.

Read first: `Trainer.step` and `Trainer.run`, the loop; then RECIPES; then `run_study`.
"""
from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import json
import math
import os
import signal
import subprocess
import sys
import time
import zlib
from dataclasses import dataclass
from typing import Callable

import torch
from tqdm import tqdm

import eval as evaluation
import quantize
from data.prepare import DataError, open_source
from model import (CONVERSION, PRESETS, SIZES, CheckpointError, Config, Transformer, config_from,
                   find_pretrained, find_tokenizer, first_line, hf_config, is_mechanism,
                   load_checkpoint, load_model, load_weights, read_json, save_checkpoint)
from softmax1 import describe


class UsageError(ValueError):
    """A request that cannot be carried out, in one line."""


# -------------------------------------------------------------------------------------- settings

@dataclass
class Recipe:
    """How to train, beside what to train (model.Config). Saved with every run."""
    arch: str = "vanilla"
    size: str = "nano"
    init_from: str = ""           # pretrained folder, hub id or run; "": from scratch
    data: str = "stdlib"
    tokenizer: str = "bytes"
    bos: str = "window"           # none | document | window
    seed: int = 0
    steps: int = 400
    batch_size: int = 12          # sequences per optimiser step, over all devices
    micro_batch: int = 0          # sequences per forward pass and device; 0: all of them
    lr: float = 3e-3
    min_lr: float = 0.1           # share of lr at the end
    warmup: int = 50
    schedule: str = "cosine"      # cosine | linear
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.1
    clip: float = 1.0
    null_warmup: int = 0          # steps in which softmax1's null logit goes from null_start to 0
    loss_min: int = 0             # positions of the context that the loss counts, [min, max)
    loss_max: int = 0             # 0: all
    eval_every: int = 200
    eval_sequences: int = 0       # 0: 48 in training, 64 at the end
    probe_every: int = 0
    probe_sequences: int = 0      # 0: 16, or more where they are short
    dtype: str = "auto"           # auto | float32 | bfloat16


# nano, micro, toy are ours; toy-paper is Guo et al.'s (arXiv 2410.13835), 60m Gu et al.'s (arXiv
# 2410.10781), 160m and 290m [Ledger 2.7]
RECIPES = {
    "nano": {},
    "micro": {"steps": 2000, "lr": 2e-3, "warmup": 100, "eval_every": 500},
    "toy": {"data": "backcopy", "steps": 600, "batch_size": 16, "warmup": 100, "beta2": 0.99,
            "weight_decay": 0.01, "eval_every": 500},
    "toy-paper": {"data": "backcopy", "steps": 10000, "batch_size": 512, "micro_batch": 64,
                  "lr": 3e-4, "min_lr": 1.0, "warmup": 0, "beta2": 0.99, "weight_decay": 1e-4,
                  "eval_every": 500},
    "60m": {"data": "fineweb-edu", "tokenizer": "gpt2", "bos": "none", "steps": 20000,
            "batch_size": 1024, "micro_batch": 32, "lr": 4e-4, "warmup": 100, "eval_every": 500},
    "160m": {"data": "fineweb-edu", "tokenizer": "gpt2", "bos": "none", "steps": 14000,
             "batch_size": 24, "lr": 3e-4, "warmup": 300, "beta2": 0.999, "eval_every": 500},
    "290m": {"data": "fineweb-edu", "tokenizer": "gpt2", "bos": "none", "steps": 8000,
             "batch_size": 16, "lr": 3e-4, "warmup": 300, "beta2": 0.999, "eval_every": 500},
}
# for --init-from, or asked for by name; block_size is the training context
FINETUNING = {
    "short": {"steps": 200, "batch_size": 4, "block_size": 512, "lr": 5e-5, "warmup": 20,
              "bos": "none", "eval_every": 100, "probe_every": 25},
    # OASIS' own [OASIS 1.6], for Llama-3.2-1B; theirs also decays norm gains, and runs in fp16
    "oasis": {"data": "bookcorpus+wiki40b", "bos": "document", "block_size": 512, "steps": 100000,
              "batch_size": 192, "micro_batch": 6, "lr": 4e-4, "min_lr": 0.0, "warmup": 2000,
              "schedule": "linear", "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "clip": 1.0,
              "seed": 1000, "eval_every": 1000, "probe_every": 1000},
}
SPARSITY = {"none": 0.0, "low": 0.05, "high": 0.3}
WHAT = ("arch", "size", "init_from", "data", "tokenizer", "bos", "seed")
CHOICES = {"arch": list(PRESETS), "size": list(SIZES), "bos": ["none", "document", "window"],
           "schedule": ["cosine", "linear"], "dtype": ["auto", "float32", "bfloat16"]}
# what --resume may change: nothing that changes the numbers
FREE_ON_RESUME = {"micro_batch", "eval_every", "eval_sequences", "probe_every",
                  "probe_sequences"}
FIELDS = [f.name for f in dataclasses.fields(Config)]
MECHANISM = FIELDS[FIELDS.index("normalizer"):]     # the fields before it are the backbone's

RECIPE_HELP = {
    "arch": "preset of mechanism flags", "size": "shape and recipe",
    "init_from": "start from the weights of a Llama or Qwen3 folder, hub id or run; a mechanism "
                 "that they lack is added in such a way that the function stays (published starts: "
                 "--no-near-identity, --router-init recent, --gate-init 0.25, --null-warmup 0)",
    "data": "corpus name, text or token file (see data/prepare.py), several as a+b, or "
            "backcopy[:CORPUS], the toy task, which brings --size toy",
    "tokenizer": "bytes, gpt2, or the path of a tokenizer.json",
    "bos": "none: windows of the stream as it is; document: one BOS before each document; window: "
           "BOS is position 0 of every window",
    "seed": "seed of the initial weights and of the order of the data",
    "steps": "optimiser steps, and the length of the schedule",
    "batch_size": "sequences per optimiser step, over all devices together",
    "micro_batch": "sequences per forward pass and device; gradients accumulate (0: all at once)",
    "lr": "peak learning rate", "min_lr": "final learning rate as a share of the peak",
    "warmup": "steps of linear warmup", "schedule": "decay after warmup",
    "beta1": "AdamW's first moment", "beta2": "AdamW's second moment",
    "weight_decay": "on the backbone's matrices; gains, biases, gates, queries never decay",
    "clip": "largest gradient norm",
    "null_warmup": "steps in which softmax1's null logit rises from --null-start to 0: our "
                   "extension, for pretrained weights (half of --steps there; 0: at 0 at once)",
    "loss_min": "first context position that the loss counts",
    "loss_max": "position from which the loss counts no more (0: all)",
    "eval_every": "steps between validation losses and checkpoints",
    "eval_sequences": "windows of a validation loss and of the final evaluation (0: 48 and 64)",
    "probe_every": "steps between measurements of sinks and spikes (0: never)",
    "probe_sequences": "windows of such a measurement (0: 4096 tokens, at least 16 windows)",
    "dtype": "auto: bfloat16 where the machine has it in hardware, else float32",
}
MODEL_HELP = {
    "n_layer": "transformer blocks", "n_head": "attention heads",
    "n_kv_head": "key/value heads (0: as many as heads)", "head_dim": "head size (0: d / heads)",
    "d_model": "width", "d_ff": "feed-forward width (0: 8/3 d for SwiGLU, else 4 d)",
    "block_size": "context length in tokens", "pos": "rope | learned | none",
    "norm": "pre | sandwich | sandwich-qk | dyt | post", "qk_norm": "RMSNorm on queries and keys",
    "ffn": "swiglu | gelu | linear | none", "tied_head": "head shares the embedding's weight",
    "normalizer": "token softmax: softmax | softmax1 | clipped | sparsemax | entmax15 | sink",
    "null_init": "first value of the learned null logit (sink)",
    "null_start": "softmax1's null logit before --null-warmup brings it to 0",
    "clip_gamma": "lower stretch of the clipped softmax", "clip_zeta": "its upper stretch",
    "attn_bias": "one learned key and value more per head, for all queries (Sun et al.)",
    "gate": "gate on head outputs: none | channel | head | single (-static) | position | token | "
            "bondarenko", "gate_init": "initial opening of the bondarenko gate",
    "residual": "standard | ledger | hc2 | delta | attnres | oasis",
    "depth_normalizer": "depth softmax of attnres and oasis, as --normalizer",
    "depth_block": "sublayers per block of attnres (0: full)",
    "coupling": "a branch's token null mass lowers its routing logit (OASIS)",
    "coupling_detach": "no gradient through that null mass (ablation)",
    "router_init": "oasis router: zero | recent | index | identity",
    "router_norm": "oasis router: queries and keys of streams over their rms (our extension)",
    "near_identity": "attnres, ledger and hc2 start as the plain residual (set by --init-from)",
    "ledger_rank": "rank of ledger's maps (0: d/8, at most 64)",
    "ledger_gamma": "share of the scratch stream that is decoded",
    "ledger_cap": "largest token norm of the committed stream (0: none)",
}


def build_parser() -> argparse.ArgumentParser:
    """Every flag is None unless given, so that presets, recipes and --resume can fill the rest."""
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0], formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="sizes: " + ", ".join(SIZES) + "\npresets: " + ", ".join(PRESETS)
        + "\nstudies: " + ", ".join(STUDIES) + "\n\nMechanism flags override the preset. "
        "See README.md for what each one does.")
    what = parser.add_argument_group("what to train")
    how = parser.add_argument_group("how to train (defaults: nano; other sizes bring their recipe)")
    mechanism = parser.add_argument_group("shape and mechanisms (each overrides the preset)")
    running = parser.add_argument_group("running")
    study = parser.add_argument_group("studies")
    how.add_argument("--recipe", choices=list(FINETUNING), help="a named set of these flags; each "
                     "overrides it (default with --init-from: short)")
    for field in dataclasses.fields(Recipe):
        choices = CHOICES.get(field.name)
        group = what if field.name in WHAT else how
        add_flag(group, field, f"{RECIPE_HELP[field.name]} (default {field.default})", choices)
    what.add_argument("--sparsity", help="weight of ledger's commit penalty: none (0), low (0.05), "
                      "high (0.3), or a number; the released code's arm is 0.02")
    for field in dataclasses.fields(Config):
        if field.name in MODEL_HELP:
            add_flag(mechanism, field, MODEL_HELP[field.name])
    running.add_argument("--out", help="run folder (default runs/ARCH-SIZE-DATA-sSEED)")
    running.add_argument("--resume", action="store_true", help="continue the run in --out; other "
                         "flags come from its checkpoint")
    running.add_argument("--stop-after", type=int, metavar="N", help="stop after step N of "
                         "--steps, with a checkpoint")
    running.add_argument("--device", help="cpu, cuda, cuda:1, ... (default: cuda if there is one)")
    running.add_argument("--compile", action="store_true", help="torch.compile: worth its minutes "
                         "on a GPU and on long runs")
    running.add_argument("--grad-checkpoint", action="store_true", help="recompute sublayers in "
                         "the backward pass: less memory, more time")
    running.add_argument("--loss-rows", type=int, metavar="N", help="rows of logits that the loss "
                         "holds at a time (0: all; default: all, unless they are 2^27 numbers)")
    running.add_argument("--starts", action="store_true", help="train nothing: print what each "
                         "published start does to the logits of --init-from, beside its own")
    running.add_argument("--download", action="store_true", help="fetch the hub id of --init-from")
    running.add_argument("--no-eval", action="store_true", help="train only; eval.py can measure "
                         "later")
    study.add_argument("--study", choices=list(STUDIES), help="train every arm of a comparison")
    study.add_argument("--seeds", type=int, default=3, help="seeds per arm (default 3)")
    study.add_argument("--arms", help="only these arms of the study, separated by commas")
    study.add_argument("--jobs", type=int, default=1, help="runs at a time; they share the cores")
    return parser


def add_flag(group, field: dataclasses.Field, text: str, choices=None):
    """One dataclass field as a flag: --n-layer 6, --coupling / --no-coupling."""
    flag = "--" + field.name.replace("_", "-")
    if isinstance(field.default, bool):
        group.add_argument(flag, action=argparse.BooleanOptionalAction, help=text)
    else:
        group.add_argument(flag, type=type(field.default), choices=choices, help=text,
                           metavar=None if choices is None else field.name.upper())


def given(args, cls) -> dict:
    """The fields of a dataclass that the command line sets."""
    return {f.name: getattr(args, f.name) for f in dataclasses.fields(cls)
            if getattr(args, f.name, None) is not None}


def resolve(args) -> tuple[Recipe, dict]:
    """Command line -> recipe and Config fields: defaults < size < recipe < preset < flags."""
    size, named = args.size or size_for(args.data), dict(FINETUNING.get(args.recipe, {}))
    context = {"block_size": named.pop("block_size")} if named else {}
    if args.init_from:
        recipe, shape = resolve_pretrained(args)
    else:
        recipe = Recipe(**{**RECIPES[size], **named, "size": size, **given(args, Recipe)})
        shape = {**SIZES[size], **context, **PRESETS[recipe.arch], **given(args, Config)}
    if args.sparsity is not None:
        if shape.get("residual") != "ledger":
            raise UsageError(f"--sparsity is the ledger's penalty, and {recipe.arch} has no ledger")
        shape["sparsity"] = number(args.sparsity)
    check_recipe(recipe)
    if recipe.loss_min >= shape["block_size"]:
        raise UsageError(f"--loss-min {recipe.loss_min} leaves nothing of a context of "
                         f"{shape['block_size']}")
    return recipe, shape


def size_for(data: str | None) -> str:
    """The size that goes without saying: the toy task has its own."""
    return "toy" if data and data.partition(":")[0] == "backcopy" else "nano"


@functools.cache
def source_of(path: str, download: bool = False) -> tuple[dict, dict]:
    """Config fields of pretrained weights, and what is known of how they were made."""
    folder = find_pretrained(path, download)
    if folder is None:
        payload = load_checkpoint(path)
        return dataclasses.asdict(config_from(payload["config"])), payload.get("run") or {}
    return dataclasses.asdict(hf_config(folder)), {"tokenizer": find_tokenizer(folder)}


def is_plain(fields: dict) -> bool:
    """Has this Config no mechanism yet?"""
    return all(fields[name] == getattr(Config, name)
               for name in ("normalizer", "attn_bias", "gate", "residual"))


def resolve_pretrained(args) -> tuple[Recipe, dict]:
    """--init-from: source < conversion < preset < flags. The backbone is the source's, and so is
    its mechanism, if it has one: only what is plain can be converted."""
    if args.size:
        raise UsageError(f"--size {args.size} does not go with --init-from, whose weights have one")
    source, run = source_of(args.init_from, args.download)
    plain, asked = is_plain(source), given(args, Recipe)
    recipe = {"arch": run.get("arch", "vanilla"), **FINETUNING[args.recipe or "short"]}
    recipe |= {"size": os.path.basename(os.path.normpath(args.init_from)), **asked}
    context = min(recipe.pop("block_size"), source["block_size"])
    recipe["tokenizer"] = asked.get("tokenizer") or run.get("tokenizer")
    if not recipe["tokenizer"]:
        raise UsageError(f"{args.init_from} has no tokenizer.json: give --tokenizer")
    preset = {}
    if plain or args.arch:      # vanilla is a preset of nothing: what it leaves out is said here
        said = {name: getattr(Config, name) for preset in PRESETS.values() for name in preset
                if name in MECHANISM}
        preset = {**(CONVERSION if plain else said), **PRESETS[recipe["arch"]]}
    shape = {**source, "block_size": context, **preset, **given(args, Config)}
    recipe.setdefault("null_warmup", recipe.get("steps", Recipe.steps) // 2 if plain else 0)
    if plain and not recipe["null_warmup"] and args.null_start is None:
        shape["null_start"] = 0.0
    fixed = [name for name in FIELDS if name not in ("block_size", "sparsity")
             and not (plain and name in MECHANISM)]
    differ = [f"{name}={shape[name]}, not {source[name]}" for name in fixed
              if shape[name] != source[name]]
    if differ:
        raise UsageError(f"{args.init_from} cannot become {', '.join(differ)}: the shape of the "
                         "weights, and a mechanism that they have, stay")
    if shape["block_size"] > source["block_size"]:
        raise UsageError(f"--block-size {shape['block_size']}: {args.init_from} was made for "
                         f"{source['block_size']} positions")
    return Recipe(**recipe), shape


def number(text: str) -> float:
    """--sparsity: a word of SPARSITY, or a number."""
    try:
        return SPARSITY[text] if text in SPARSITY else float(text)
    except ValueError:
        raise UsageError(f"--sparsity {text!r}: none, low, high or a number") from None


def check_recipe(r: Recipe):
    for name in ("steps", "batch_size", "eval_every"):
        if getattr(r, name) < 1:
            raise UsageError(f"--{name.replace('_', '-')} must be at least 1")
    if r.seed >= 2 ** 63:
        raise UsageError(f"--seed {r.seed} has more than 63 bits")
    for name in ("seed", "warmup", "micro_batch", "eval_sequences", "probe_every",
                 "probe_sequences", "loss_min"):
        if getattr(r, name) < 0:
            raise UsageError(f"--{name.replace('_', '-')} must not be negative")
    if r.micro_batch and r.batch_size % r.micro_batch:
        raise UsageError(f"--batch-size {r.batch_size} is no multiple of --micro-batch "
                         f"{r.micro_batch}")
    if not (0 < r.lr < math.inf and r.clip > 0 and r.weight_decay >= 0 and 0 <= r.min_lr <= 1):
        raise UsageError("--lr and --clip must be positive, --weight-decay at least 0, --min-lr in "
                         "[0, 1]")
    if not 0 <= r.null_warmup < r.steps:
        raise UsageError(f"--null-warmup {r.null_warmup} must end before --steps {r.steps}")
    if r.loss_max and r.loss_max <= r.loss_min:
        raise UsageError(f"--loss-max {r.loss_max} must exceed --loss-min {r.loss_min}")


def check_vocabulary(r: Recipe, source, rows: int):
    """source: of ids below source.vocab_size, for a model with `rows` embeddings."""
    if source.vocab_size > rows:
        raise UsageError(f"{r.data} has a vocabulary of {source.vocab_size}, {r.init_from} one of "
                         f"{rows}")


# ---------------------------------------------------------------------------------- the machine

@dataclass
class Machine:
    """Where the run happens: device, rank among the processes of torchrun, arithmetic."""
    device: torch.device
    dtype: torch.dtype
    rank: int = 0
    world: int = 1

    @property
    def main(self) -> bool:
        return self.rank == 0

    def autocast(self):
        return torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32)


def find_machine(device: str | None, dtype: str) -> Machine:
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    cuda = torch.cuda.is_available() if device is None else device.startswith("cuda")
    if cuda and not torch.cuda.is_available():
        raise UsageError(f"--device {device}: this machine has no CUDA device")
    name = device or (f"cuda:{os.environ.get('LOCAL_RANK', 0)}" if cuda else "cpu")
    try:
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise UsageError(f"--device {device}: {str(error).splitlines()[0]}") from None
    if cuda:
        torch.cuda.set_device(name)
    native = torch.cuda.is_bf16_supported() if cuda else torch.cpu._is_avx512_bf16_supported()
    low = dtype == "bfloat16" or dtype == "auto" and native
    if world > 1 and not torch.distributed.is_initialized():
        torch.distributed.init_process_group("nccl" if cuda else "gloo")
    return Machine(torch.device(name), torch.bfloat16 if low else torch.float32, rank, world)


# --------------------------------------------------------------------------------------- the loop

def optimizer_for(model: Transformer, recipe: Recipe, device: torch.device):
    """AdamW over the model's named decay groups."""
    params = dict(model.named_parameters())
    groups = [{"params": [params[n] for n in names], "names": names,
               "weight_decay": recipe.weight_decay if kind == "decay" else 0.0}
              for kind, names in model.decay_groups().items() if names]
    return torch.optim.AdamW(groups, lr=recipe.lr, betas=(recipe.beta1, recipe.beta2),
                             fused=device.type in ("cuda", "cpu"))


@torch.no_grad()
def relative_gap(plain: Transformer, model: Transformer, tokens) -> float:
    """max |delta logit| / max |logit| of two models on tokens (B, T), a row at a time."""
    sizes = []
    for row in tokens[:, None].to(model.embed.weight.device):                       # (1, T)
        truth, logits = plain(row)[0], model(row)[0]                                # (1, T, V)
        sizes.append([(logits - truth).abs().max().item(), truth.abs().max().item()])
    apart, largest = torch.tensor(sizes).amax(0).tolist()       # a NaN stays one, unlike in max()
    if not (math.isfinite(apart) and largest > 0):
        raise UsageError("the converted model's logits, or the pretrained one's, are not finite")
    return apart / largest


def learning_rate(step: int, r: Recipe) -> float:
    """Linear warmup, then cosine or linear to min_lr * lr at the last step."""
    if step < r.warmup:
        return r.lr * (step + 1) / r.warmup
    t = (step - r.warmup) / max(1, r.steps - 1 - r.warmup)
    fall = 0.5 * (1 + math.cos(math.pi * min(t, 1))) if r.schedule == "cosine" else 1 - min(t, 1)
    return r.lr * (r.min_lr + (1 - r.min_lr) * fall)


class Trainer:
    """One run: model, optimiser, data and folder. `step` is what is learnt, `run` what is done."""

    def __init__(self, recipe: Recipe, shape: dict, out: str, machine: Machine, args):
        self.recipe, self.out, self.machine, self.args = recipe, out, machine, args
        self.source, self.val_source = (
            open_source(recipe.data, split, tokenizer=recipe.tokenizer)
            for split in ("train", "val"))
        vocab = shape["vocab_size"] if recipe.init_from else self.source.vocab_size
        check_vocabulary(recipe, self.source, vocab)
        self.config = Config(**{**shape, "vocab_size": vocab})
        share = recipe.micro_batch * machine.world or recipe.batch_size
        if recipe.batch_size % share or share % machine.world:
            raise UsageError(f"--batch-size {recipe.batch_size} does not divide into "
                             f"{machine.world} devices x --micro-batch")
        self.accumulate, self.rows = recipe.batch_size // share, share // machine.world
        block = self.config.block_size
        self.windows = self.source.windows(block, self.rows, bos_policy=recipe.bos,
                                           seed=recipe.seed)
        self.val_windows = self.val_source.windows(block, self.rows, bos_policy=recipe.bos)
        if self.windows.bos_policy != recipe.bos:
            raise UsageError(f"--bos {recipe.bos}: {self.source.source} has BOS at position 0 of "
                             f"every sequence, --bos {self.windows.bos_policy}")
        self.model = self.first_model().to(machine.device)
        self.model.grad_checkpoint, self.model.loss_rows = args.grad_checkpoint, args.loss_rows
        self.optimizer = optimizer_for(self.model, recipe, machine.device)
        self.begin, self.data_sha256, self.wrapped = 0, self.source.sha256, None
        self.logit_gap = None       # of a conversion: see `measure_gap`
        self.context = block        # longest that the weights know: of pretrained ones, theirs

    def first_model(self) -> Transformer:
        """The model before its first step: fresh, or converted from pretrained weights. A resumed
        run takes its weights from its own checkpoint and does not ask for the others again."""
        r = self.recipe
        if not r.init_from or self.args.resume:
            return Transformer(self.config, seed=r.seed)
        return load_model(r.init_from, download=self.args.download, seed=r.seed,
                          **dataclasses.asdict(self.config))[0]

    @torch.no_grad()
    def measure_gap(self) -> float | None:
        """max |delta logit| / max |logit| of the converted model against the untouched one, in fp32
        on two windows of at most 256 tokens. None where nothing was converted. The untouched model
        is made of the same tensors, so this takes two forward passes and no second copy."""
        source = source_of(self.recipe.init_from, self.args.download)[0]
        if not is_plain(source) or is_plain(dataclasses.asdict(self.config)):
            return None
        with torch.device("meta"):
            plain = Transformer(Config(**source))
        shared = {n: t for n, t in self.model.state_dict().items() if not is_mechanism(n)}
        plain.load_state_dict(shared, assign=True)
        return relative_gap(plain, self.model, self.windows.batch(0)[0][:2, :256])

    # ----------------------------------------------------------------------------- learning

    def step(self, step: int) -> dict:
        """One optimiser step over batch_size sequences; returns what to log."""
        lr = learning_rate(step, self.recipe)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        warmup = self.recipe.null_warmup
        self.model.anneal_null(max(0.0, 1 - step / warmup) if warmup else 0.0)
        total = penalty = 0.0
        for micro in range(self.accumulate):
            x, y = self.windows.batch(step, self.machine.rank, self.machine.world, micro)  # (B, T)
            y = self.restrict(y)                                                    # (B, T)
            last = micro == self.accumulate - 1
            sync = contextlib.nullcontext() if last or self.machine.world == 1 \
                else self.wrapped.no_sync()
            with sync:
                with self.machine.autocast():
                    _, loss = self.wrapped(x.to(self.machine.device), y.to(self.machine.device))
                (loss / self.accumulate).backward()
            total += loss.detach() / self.accumulate
            penalty += self.model.aux / self.accumulate
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.recipe.clip)
        total, penalty = self.over_ranks(total, penalty)
        if not math.isfinite(total) or not math.isfinite(float(norm)):
            raise UsageError(f"loss {total}, gradient norm {float(norm)} at step {step}: lower "
                             f"--lr; the last checkpoint in {self.out}, if any, is from before")
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return {"step": step, "loss": total - penalty, "penalty": penalty, "lr": lr,
                "grad_norm": float(norm), "batch": zlib.crc32(x.numpy().tobytes())}

    def over_ranks(self, *numbers) -> list[float]:
        """Each number's mean over the processes: what is logged is of the whole batch."""
        both = torch.tensor([float(x) for x in numbers], device=self.machine.device)
        if self.machine.world > 1:
            torch.distributed.all_reduce(both)
        return (both / self.machine.world).tolist()

    def restrict(self, y):
        """Targets outside context positions [loss_min, loss_max) do not count. [Spike 3.7]"""
        low, high = self.recipe.loss_min, self.recipe.loss_max or y.shape[1]
        if low == 0 and high >= y.shape[1]:
            return y
        y = y.clone()
        y[:, :low] = -1
        y[:, high:] = -1
        return y                                                                    # (B, T)

    @torch.no_grad()
    def validate(self) -> float:
        """Mean cross-entropy in nats per token over fixed windows of the held-out split."""
        total, count, n_sequences = 0, 0, self.recipe.eval_sequences or 48
        for x, y in self.val_windows.sequential(n_sequences):
            with self.machine.autocast():
                _, loss = self.model(x.to(self.machine.device), y.to(self.machine.device))
            total += float(loss - self.model.aux) * y.numel()
            count += y.numel()
        return total / count

    def run(self):
        """The loop. Whatever ends it, the folder holds the last complete checkpoint."""
        r, end = self.recipe, min(self.recipe.steps, self.args.stop_after or self.recipe.steps)
        self.wrapped = self.wrap()
        log = Log(self.out, self.begin) if self.machine.main else None
        tokens, saved = r.batch_size * self.config.block_size, self.begin
        bar = tqdm(range(self.begin, end), initial=self.begin, total=end, unit="step",
                   disable=not self.machine.main or None, dynamic_ncols=True)
        start = time.perf_counter()
        with StopRequest() as stop:
            if log and r.probe_every and not self.begin:
                log.write({"step": -1, "probe": self.probe()})
            for step in bar:
                row, done = self.step(step), step + 1
                rate = tokens * (done - self.begin) / (time.perf_counter() - start)
                bar.set_postfix(loss=f"{row['loss']:.3f}", tok_s=f"{rate:,.0f}", refresh=False)
                if log:
                    log.write({**row, "tokens": tokens * done})
                    if done == self.begin + 5 < end:
                        minutes = tokens * (end - done) / rate / 60
                        tqdm.write(f"  about {minutes:.1f} minutes to step {end}, then evaluation")
                    if done % r.eval_every == 0 or done == end or stop.asked:
                        self.save(done)      # before evaluating: a run killed there resumes here
                        saved = done
                        log.write({"step": step, "val_loss": self.validate()})
                    if r.probe_every and (done % r.probe_every == 0 or done == r.steps):
                        log.write({"step": step, "probe": self.probe()})
                if stop.asked:
                    if log and saved != done:       # asked for while it was probed
                        self.save(done)
                    raise KeyboardInterrupt
        self.speed = tokens * (end - self.begin) / max(1e-9, time.perf_counter() - start)
        return end

    def wrap(self):
        """The model, compiled and distributed as asked; falls back in one line."""
        model = self.model
        if self.args.compile:
            model = try_compile(model, self.windows.batch(0), self.machine)
        if self.machine.world > 1:
            model = torch.nn.parallel.DistributedDataParallel(model)
        return model

    def probe(self) -> dict:
        """Sinks and spikes of the model as it is now, cheaply. See eval.evaluate(light=True)."""
        block = self.config.block_size
        return evaluation.evaluate(
            self.model, self.val_source, light=True, T=block, bos_policy=self.recipe.bos,
            batch_size=min(8, self.rows) if self.recipe.init_from else max(8, 2048 // block),
            n_sequences=self.recipe.probe_sequences or max(16, 4096 // block))

    # ------------------------------------------------------------------------ keeping and resuming

    def describe(self) -> dict:
        """Plain Python that says what this run is: stored in config.json and in the checkpoint."""
        return {**dataclasses.asdict(self.recipe), "data_sha256": self.data_sha256,
                "torch": str(torch.__version__), "device": str(self.machine.device),
                "arithmetic": str(self.machine.dtype).removeprefix("torch."),
                "logit_gap": self.logit_gap, "context": self.context, "git": git_revision()}

    def save(self, steps_done: int):
        save_checkpoint(os.path.join(self.out, "checkpoint.pt"), {
            "config": dataclasses.asdict(self.config), "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(), "steps_done": steps_done,
            "run": {**self.describe(), "steps_done": steps_done,
                    "tokens": steps_done * self.recipe.batch_size * self.config.block_size}})

    def restore(self, payload: dict):
        """Take up a checkpoint; another Config or other data are errors that say what differs."""
        mine, theirs = map(dataclasses.asdict, (self.config, config_from(payload["config"])))
        differ = [f"{k} {theirs[k]!r} -> {mine[k]!r}" for k in mine if theirs[k] != mine[k]]
        if differ:
            raise CheckpointError(f"the checkpoint has another Config: {', '.join(differ)}")
        if payload["run"]["data_sha256"] != self.data_sha256:
            raise CheckpointError(f"the run saw another {self.recipe.data} (its hash differs): "
                                  "prepare the same data or start anew")
        load_weights(self.model, payload["model"], self.out)
        self.optimizer.load_state_dict(payload["optimizer"])
        self.logit_gap = payload["run"].get("logit_gap")
        self.context = payload["run"].get("context", self.context)
        self.begin = payload["steps_done"]

    def write_config(self):
        text = json.dumps({"config": dataclasses.asdict(self.config), "run": self.describe()},
                          indent=2)
        evaluation.write_text(os.path.join(self.out, "config.json"), text + "\n")


class Log:
    """log.jsonl, a line at a time. Lines from beyond the checkpoint are dropped on resume, and all
    of a run that died before its first."""

    def __init__(self, out: str, begin: int):
        self.path = os.path.join(out, "log.jsonl")
        kept = [row for row in read_log(out) if begin and row["step"] < begin]
        evaluation.write_text(self.path, "".join(json.dumps(row) + "\n" for row in kept))

    def write(self, row: dict):
        with open(self.path, "a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def read_log(out: str) -> list[dict]:
    """The complete lines of a run's log (a killed process can leave half a line)."""
    rows = []
    with contextlib.suppress(FileNotFoundError), open(os.path.join(out, "log.jsonl")) as file:
        for line in file:
            with contextlib.suppress(json.JSONDecodeError):
                rows.append(json.loads(line))
    return rows


class StopRequest:
    """Ctrl-C and SIGTERM end the run after the step in progress, saved; a second ends it now."""

    def __enter__(self):
        self.asked, self.before = False, {}
        with contextlib.suppress(ValueError):       # only the main thread may handle signals
            for number in (signal.SIGINT, signal.SIGTERM):
                self.before[number] = signal.signal(number, self.ask)
        return self

    def ask(self, *_):
        if self.asked:
            raise KeyboardInterrupt
        self.asked = True

    def __exit__(self, *_):
        for number, handler in self.before.items():
            signal.signal(number, handler)


def try_compile(model: Transformer, batch, machine: Machine):
    """torch.compile, tried on one batch; without a working compiler, one line, then eager."""
    try:
        compiled = torch.compile(model)
        with machine.autocast():
            compiled(*(t.to(machine.device) for t in batch))
        return compiled
    except Exception as error:
        if machine.main:
            print(f"torch.compile is not available ({type(error).__name__}): training uncompiled")
        return model


def git_revision() -> str:
    here = os.path.dirname(os.path.abspath(__file__))
    try:
        return subprocess.run(["git", "describe", "--always", "--dirty"], cwd=here, text=True,
                              capture_output=True, timeout=10).stdout.strip() or "unknown"
    except (OSError, subprocess.SubprocessError):
        return "unknown"


# ---------------------------------------------------------------------------------------- one run

def train(args) -> int:
    recipe, shape, out, payload = plan(args)
    machine = find_machine(args.device, recipe.dtype)
    trainer = Trainer(recipe, shape, out, machine, args)
    if payload:
        trainer.restore(payload)
    elif recipe.init_from and machine.main:
        trainer.logit_gap = trainer.measure_gap()
        source, run = source_of(recipe.init_from, args.download)
        trainer.context = run.get("context", source["block_size"])
    if machine.main:
        trainer.out = out or claim(recipe)
        os.makedirs(trainer.out, exist_ok=True)
        trainer.write_config()
        print_header(trainer)
    end = trainer.run()
    if machine.main:
        report(trainer, end)
    if machine.world > 1:
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()
    return 0


# arch and Config fields of every start that a paper, its code or a plain flag would take instead
STARTS = {
    "AttnRes: the mean": ("attnres", {"near_identity": False}),
    "AttnRes, blocks of 4: the mean": ("attnres-block", {"near_identity": False}),
    "AttnRes, softmax1 over depth": ("attnres", {"near_identity": False,
                                                 "depth_normalizer": "softmax1"}),
    "router, r = 0 (Llama file)": ("attnres-oasis", {"router_init": "zero"}),
    "router, r = 8 (Qwen, Phi files)": ("attnres-oasis", {"router_init": "recent"}),
    "router, 8 a candidate, random q": ("attnres-oasis", {"router_init": "index"}),
    "OASIS, r = 0, nulls at 0": ("oasis", {"router_init": "zero", "null_start": 0.0}),
    "OASIS, r = 8, nulls at 0": ("oasis", {"router_init": "recent", "null_start": 0.0}),
    "Ledger": ("ledger", {"near_identity": False}),
    "hc2": ("hc2", {"near_identity": False}),
    "delta": ("delta", {}),
    "Softmax1, null at 0": ("outeffhop", {"null_start": 0.0}),
    "sink, learned null at 0": ("sink", {"null_init": 0.0}),
    "gate, opening 0.25": ("gated", {"gate_init": 0.25}),
    "clipped softmax": ("clip", {}), "sparsemax": ("sparsemax", {}), "1.5-entmax": ("entmax15", {}),
}


def print_starts(args) -> int:
    """--starts: what each published start does to the logits of pretrained weights, and ours."""
    if not args.init_from:
        raise UsageError("--starts needs --init-from")
    recipe, _ = resolve(args)
    source, _ = source_of(args.init_from, args.download)
    if not is_plain(source):
        raise UsageError(f"{args.init_from} has a mechanism already: there is nothing to convert")
    plain, ours, rows, reasons = load_model(args.init_from)[0], {}, [], []
    text = open_source(recipe.data, "val", tokenizer=recipe.tokenizer)
    check_vocabulary(recipe, text, source["vocab_size"])
    tokens = text.windows(
        min(256, source["block_size"]), 2, bos_policy=recipe.bos).batch(0)[0]       # (2, T)
    for label, (arch, fields) in tqdm(STARTS.items(), "starts", disable=None, leave=False):
        try:
            Config(**{**source, **CONVERSION, **PRESETS[arch]})
        except ValueError as error:
            rows.append([label, arch, "impossible", "impossible"])
            reasons.append(f"\n{arch}: {error}")
            continue

        def gap(**changed):
            return relative_gap(plain, load_model(
                args.init_from, **{**CONVERSION, **PRESETS[arch], **changed})[0], tokens)
        kind = arch, fields.get("depth_normalizer")
        if kind not in ours:
            ours[kind] = gap(**{k: v for k, v in fields.items() if k == "depth_normalizer"})
        same = all(CONVERSION.get(k, v) == v for k, v in fields.items())
        near = f"{ours[kind]:.1e}" if ours[kind] < 1e-3 else "none"
        rows.append([label, arch, f"{ours[kind] if same else gap(**fields):.1e}", near])
    print(f"max |delta logit| / max |logit| of {args.init_from}, {tokens.shape[0]} x "
          f"{tokens.shape[1]} tokens of {recipe.data}\n")
    print(evaluation.markdown(["published start", "--arch", "of it", "of --init-from"], rows),
          *reasons)
    return 0


def plan(args):
    """Recipe, Config fields, folder (None: a fresh one) and, when resuming, the checkpoint."""
    if not args.resume:
        recipe, shape = resolve(args)
        return recipe, shape, unused(args.out) if args.out else None, None
    if args.recipe:
        raise UsageError("--recipe does not go with --resume: the run has its own")
    out = args.out or newest_folder(resolve(args)[0])
    payload = load_checkpoint(out)
    if not {"run", "optimizer", "steps_done"} <= payload.keys():
        raise CheckpointError(f"{out} cannot be resumed: it holds no optimiser state")
    names = {f.name for f in dataclasses.fields(Recipe)}
    recipe = Recipe(**{k: v for k, v in payload["run"].items() if k in names})
    asked = {**given(args, Recipe), **given(args, Config)}
    if args.sparsity is not None:
        asked["sparsity"] = number(args.sparsity)
    config = dataclasses.asdict(config_from(payload["config"]))
    saved = {**config, **dataclasses.asdict(recipe)}
    differ = [f"--{k.replace('_', '-')} {v} (the run has {saved[k]})" for k, v in asked.items()
              if saved[k] != v and k not in FREE_ON_RESUME]
    if differ:
        raise CheckpointError(f"cannot resume {out} with {', '.join(differ)}")
    if (args.stop_after or math.inf) < payload["steps_done"]:
        raise UsageError(f"{out} is beyond --stop-after {args.stop_after}: it has made "
                         f"{payload['steps_done']} steps")
    recipe = dataclasses.replace(recipe, **{k: asked[k] for k in FREE_ON_RESUME & asked.keys()})
    return recipe, config, out, payload


def stem(recipe: Recipe) -> str:
    data = os.path.splitext(os.path.basename(recipe.data))[0]
    return os.path.join("runs", f"{recipe.arch}-{recipe.size}-{data}-s{recipe.seed}")


def unused(out: str) -> str:
    """A folder that was named: neither a run, nor pretrained weights, nor another program's files
    are ever written over. What a run left that died before its first checkpoint is."""
    here = lambda name: os.path.join(out, name)
    if os.path.exists(here("checkpoint.pt")):
        raise UsageError(f"{out} holds a run: --resume continues it, another --out leaves it alone")
    died = os.path.exists(here("config.json")) and "run" in read_json(here("config.json"))
    for name in ("metrics.json", *(() if died else ("config.json", "log.jsonl"))):
        if os.path.exists(here(name)):
            raise UsageError(f"--out {out} has a {name} of something else: choose another folder")
    return out


def fresh_folder(recipe: Recipe) -> str:
    """A folder that is not there yet: an old run is never overwritten."""
    base, n = stem(recipe), 1
    while os.path.exists(base if n == 1 else f"{base}-{n}"):
        n += 1
    return base if n == 1 else f"{base}-{n}"


def claim(recipe: Recipe) -> str:
    """The same, made at once: of two runs that start together each has its own."""
    while True:
        out = fresh_folder(recipe)
        with contextlib.suppress(FileExistsError):
            os.makedirs(out)
            return out


def newest_folder(recipe: Recipe) -> str:
    base, n = stem(recipe), 1
    while os.path.exists(f"{base}-{n + 1}"):
        n += 1
    return base if n == 1 else f"{base}-{n}"


def print_header(t: Trainer):
    """What is about to be trained, resolved, in a few lines."""
    r, c, n = t.recipe, t.config, t.model.count_params()
    changed = {k: v for k, v in dataclasses.asdict(c).items()
               if v != getattr(Config(), k) or k in ("residual", "normalizer")}
    print(f"{r.arch}: {n['total']:,} parameters ({n['mechanism']:,} of the mechanism, "
          f"{n['embedding']:,} of embeddings), {t.model.flops_per_token() / 1e6:.1f} MFLOP a token")
    print("  model  " + ", ".join(f"{k}={v}" for k, v in changed.items()))
    print(f"  data   {r.data} ({t.source.tokenizer}), {t.source.about}, bos={r.bos}")
    print(f"  recipe {r.steps} steps x {r.batch_size} x {c.block_size} tokens, lr {r.lr:g}, "
          f"weight decay {r.weight_decay:g}, seed {r.seed}")
    print(f"  device {t.machine.device} x {t.machine.world}, "
          f"{str(t.machine.dtype).removeprefix('torch.')}, {torch.get_num_threads()} threads, "
          f"attention: {describe(c.normalizer, t.machine.device.type)}")
    if r.init_from:
        print_start(t)
    print(f"  folder {t.out}" + (f", resumed at step {t.begin}" if t.begin else ""), flush=True)


def print_start(t: Trainer):
    """Where a fine-tuning starts: how near to the pretrained function."""
    gap = "" if t.logit_gap is None else (
        f": max |delta logit| / max |logit| = {t.logit_gap:.1e} against the untouched model"
        + (f"; {t.recipe.arch} has no nearer start" if t.logit_gap > 1e-3 else ""))
    print(f"  start  {t.recipe.init_from}{gap}")
    n, V = t.model.count_params()["total"], t.config.vocab_size
    held = t.rows * t.config.block_size
    rows = t.model.rows_at_a_time(torch.empty(held, device="meta")) or held
    print(f"  memory {n * 16 / 1e9:.1f} GB for weights, gradients and AdamW's moments (16 bytes a "
          f"parameter), {min(rows, held) * V * 8 / 1e9:.1f} GB for logits and their gradient; "
          "activations come on top (--micro-batch, --grad-checkpoint)")


def report(t: Trainer, end: int):
    """After training: loss figure, a sample, and, of a finished run, the table of its outliers."""
    figures = [draw_loss(t.out), *draw_growth({t.recipe.arch: [t.out]}, t.out + "/figures")]
    print(f"trained to step {end} of {t.recipe.steps} at {t.speed:,.0f} tokens/s; "
          + " ".join(figures))
    print("sample: " + repr(sample_text(t)))
    if end < t.recipe.steps:
        print(f"continue with: python train.py --resume --out {t.out}")
    elif not t.args.no_eval:
        evaluation.report_run(t.out, t.model, n_sequences=t.recipe.eval_sequences or 64,
                              batch_size=min(8, t.rows) if t.recipe.init_from else 8)
        if t.logit_gap is not None:
            evaluation.save_metrics(t.out, {"conversion": {"logit_gap": t.logit_gap}})


def sample_text(t: Trainer, n_tokens: int = 120) -> str:
    """The model's own text after a BOS, at temperature 0.8."""
    g = torch.Generator(t.machine.device).manual_seed(t.recipe.seed)
    reader = t.source.reader(t.recipe.tokenizer)
    start = torch.tensor([[reader.bos]], device=t.machine.device)                   # (1, 1)
    n = min(n_tokens, t.config.block_size - 1)
    ids = t.model.generate(start, n, temperature=0.8, generator=g,
                           n_ids=reader.vocab_size)[0, 1:]                          # (n)
    return reader.decode(ids.tolist())


def draw_loss(out: str) -> str:
    """figures/loss.png: training loss (smoothed over 20 steps), validation loss, learning rate."""
    rows = read_log(out)
    train_rows = [r for r in rows if "loss" in r]
    val_rows = [r for r in rows if "val_loss" in r]
    fig, (ax,) = evaluation.new_figure(6, 3.6)
    steps, losses = [r["step"] for r in train_rows], [r["loss"] for r in train_rows]
    smooth = [sum(losses[max(0, i - 19):i + 1]) / min(i + 1, 20) for i in range(len(losses))]
    ax.plot(steps, losses, color="0.8", lw=0.7, label="each batch")
    ax.plot(steps, smooth, label="mean of 20")
    ax.plot([r["step"] for r in val_rows], [r["val_loss"] for r in val_rows], "o-",
            label="validation")
    ax.set(xlabel="step", ylabel="loss, nats per token", title=os.path.basename(out))
    if losses:
        ax.set_ylim(min(losses) * 0.9, smooth[min(20, len(smooth) - 1)] * 1.05)
    ax.legend()
    return evaluation.save_figure(fig, os.path.join(out, "figures", "loss.png"))


def draw_growth(folders: dict[str, list[str]], where: str) -> list[str]:
    """growth.png from the probes of runs (name -> a folder for each seed); [] if there are none."""
    curves = {name: [[row for row in read_log(out) if "probe" in row] for out in seeds]
              for name, seeds in folders.items()}
    if not all(rows for seeds in curves.values() for rows in seeds):
        return []
    return [evaluation.save_figure(evaluation.draw_growth(curves), f"{where}/growth.png")]


# ---------------------------------------------------------------------------------------- studies

@dataclass
class Study:
    """Arms that differ in their flags alone, the columns of their table, and what a paper says."""
    arms: dict[str, list[str]] | Callable    # or how they follow from (Recipe, shape) of the size
    columns: list[tuple[str, str, str]]      # header, path in metrics.json, format
    schemes: list[str]                       # of quantize.py, measured on every run
    paper: str                               # what its table is to be read beside
    reference: str = ""                      # arm for the table of relative changes
    pretrained: bool = False                 # its arms start from --init-from
    size: str = "nano"                       # unless --size says otherwise
    probes: int = 0                          # measurements during training, for growth.png
    paper_rows: list[str] = dataclasses.field(default_factory=list)     # of its arms, in order

    def arms_for(self, args) -> dict[str, list[str]]:
        """The arms at the size (and with the shared flags) of a command line."""
        return {arm: flags for arm, flags in self.all_arms(args).items() if flags is not None}

    def rows_for(self, args) -> dict[str, str]:
        """The paper's numbers for each of them: by place, since names tell sizes."""
        return dict(zip(self.all_arms(args), self.paper_rows))

    def all_arms(self, args) -> dict[str, list[str] | None]:
        """None: this arm has no such thing at this size, as half of a head size of 1."""
        return self.arms if isinstance(self.arms, dict) else self.arms(*resolve(args))


CONTINUOUS = [("first-token mass", "sinks.first_token_mass", ".3f"),
              ("position-0 norm ratio", "massive.position0_peak", ".2f"),
              ("max / median", "massive.ratio", ".0f")]
THRESHOLD = [("sink ratio (Gu)", "sinks.ratio_gu", ".1%"),
             ("sink ratio (Spike)", "sinks.ratio_spike", ".1%")]
SIZE_OF_OUTLIERS = [("max inf norm, all", "outliers.max_inf_norm.all_hooks", ".1f"),
                    ("max inf norm, layers", "outliers.max_inf_norm.layer_outputs", ".1f"),
                    ("kurtosis", "outliers.kurtosis.sequence", ".1f")]
VAL = [("val loss", "val.loss", ".4f")]
STREAM = [("stream Δ", "stream.delta", "+.3f")]     # cost of losing the first tokens, in nats
TOY = [(header.removeprefix("toy: "), path, spec) for header, path, spec in evaluation.COLUMNS
       if path.startswith("backcopy.")]

STUDIES = {
    "ledger": Study(
        arms={"vanilla": ["--arch", "vanilla"], "suppress": ["--arch", "suppress"],
              "ledger-0.02": ["--arch", "ledger", "--sparsity", "0.02"],
              "ledger": ["--arch", "ledger"], "ledger-hs": ["--arch", "ledger-hs"]},
        columns=VAL + [
            ("persistence", "structure.decoded.persistence", ".2f"),
            ("persistence, unit rms", "structure.decoded.persistence_unit_rms", ".2f"),
            ("BOS concentration", "structure.decoded.bos_concentration", ".2f"),
            ("BOS conc., unit rms", "structure.decoded.bos_concentration_unit_rms", ".2f"),
            ("mean c", "structure.commit.mean", ".3f"),
            ("commit entropy", "structure.commit.entropy", ".2f")]
        + CONTINUOUS + THRESHOLD + STREAM + SIZE_OF_OUTLIERS + [
            ("w8 Δ loss", "quant.w8.delta_loss", "+.4f"),
            ("w4 Δ loss", "quant.w4.delta_loss", "+.4f")],
        schemes=["w8", "w4", "w8a8", "w4a4"],
        paper="Ledger (arXiv 2606.20743) reports persistence 0.58 -> 0.96 and BOS concentration "
              "3.36 -> 4.69 from ledger to ledger-HS (very likely at 290M, one seed), at equal "
              "validation perplexity and equal 8- and 4-bit behaviour in all arms."),
    "oasis": Study(
        arms={name: ["--arch", name] for name in (
            "attnres-oasis", "oasis-token", "oasis-depth", "oasis-both", "oasis", "oasis-clip",
            "oasis-gated", "oasis-sparsemax", "oasis-entmax15", "attnres", "attnres-block",
            "vanilla", "outeffhop")},
        columns=VAL + SIZE_OF_OUTLIERS + CONTINUOUS + THRESHOLD + STREAM + [
            ("token null mass", "null.token_mass", ".3f"),
            ("depth max weight", "depth.max_weight", ".3f"),
            ("depth entropy", "depth.entropy", ".2f"), ("depth null", "depth.null_mass", ".3f"),
            ("W8A8 Δ loss", "quant.w8a8-static.delta_loss", "+.4f"),
            ("W4A4 Δ loss", "quant.w4a4-static.delta_loss", "+.4f"),
            ("parameters", "protocol.n_params", ",.0f"),
            ("MFLOP/token", "protocol.mflop_per_token", ".2f")],
        schemes=["w8a8-static", "w4a4-static"], reference="attnres-oasis",
        paper="OASIS (arXiv 2605.17887) against vanilla AttnResidual (attnres-oasis here): max "
              "infinity norm -9.26 % (v1) or -84.14 % (later version), average kurtosis -2.60 % or "
              "-96.77 %, W8A8 perplexity -75.85 % or -73.55 %."),
    "finetune": Study(
        arms={name: ["--arch", name] for name in (
            "vanilla", "attnres", "attnres-oasis", "oasis", "outeffhop", "gated")}
        | {f"{name}-norm": ["--arch", name, "--router-norm"]
           for name in ("attnres-oasis", "oasis")},
        columns=VAL + SIZE_OF_OUTLIERS + CONTINUOUS + THRESHOLD + [
            ("spike", "massive.max", ".1f"), ("token null mass", "null.token_mass", ".3f"),
            ("depth max weight", "depth.max_weight", ".3f"),
            ("start, max rel. Δ logit", "conversion.logit_gap", ".1e")],
        schemes=[], reference="vanilla", pretrained=True,
        paper="OASIS fine-tunes Llama-3.2-1B and Qwen3-0.6B for 100,000 steps of 192 x 512 tokens; "
              "vanilla here is the same training of the untouched architecture."),
}
OVER_TIME = [("loss", "val.loss", ".4f"), ("spike", "massive.max", ".1f"),
             ("kurtosis", "outliers.kurtosis.sequence", ".1f"), *THRESHOLD,
             ("first-token mass", "sinks.first_token_mass", ".3f"),
             ("null mass", "null.token_mass", ".3f"), ("depth max", "depth.max_weight", ".3f"),
             ("beta", "depth.beta_mean", ".4f")]


def spike_study(arms, rows: str, note: str) -> Study:
    """A table of The Spike, the Sparse and the Sink. arms: {name: flags}, or what makes them; rows:
    the paper's numbers, "ppl / sink ratio % / spike" for each arm in order. [Spike 3.6]"""
    return Study(
        arms, [("perplexity", "val.token_ppl", ".2f")] + THRESHOLD
        + [("spike", "massive.max", ".1f")] + CONTINUOUS + STREAM
        + [("W4A4 Δ loss", "quant.w4a4-static.delta_loss", "+.3f"),
           ("loss, 4th quarter", "val.loss_by_quarter.3", ".4f")] + TOY,
        schemes=["w4a4-static"], probes=8,
        paper="Last column: the ablations of arXiv 2603.05498, a 7B Llama on 100B tokens, one "
              "seed. Its sink ratio is the column \"sink ratio (Spike)\", its spike the largest "
              f"|residual|. {note}",
        paper_rows=[row.strip() for row in rows.split(";")])


def head_arms(recipe: Recipe, shape: dict) -> dict[str, list[str]]:
    """The paper's 32 heads of 128 in proportion: N heads of d / N, N at least 4 so that a quarter
    of them is a head; then fewer heads, smaller heads, and both against each other."""
    N = max(4, shape["n_head"])
    D = shape["d_model"] // N
    trios = [(N, D, 1), (N // 4, D, 1), (N // 2, D, 1), *((N, D, s) for s in (16, 8, 4, 2)),
             *((N * s, D, s) for s in (16, 8, 4, 2)), (N // 2, D * 2, 1)]
    return {f"{n}x{size // s}" if size >= s else f"{n}x1:{s // size}":      # no size below 1
            ["--n-head", str(n), "--head-dim", str(size // s)] if size >= s else None
            for n, size, s in trios}


def context_arms(recipe: Recipe, shape: dict) -> dict[str, list[str]]:
    """The loss on a stretch of the context, in the paper's fractions of its 4096."""
    T = shape["block_size"]
    stretch = lambda low, high: ["--loss-min", str(low), "--loss-max", str(high), "--block-size",
                                 str(max(T, high))]
    ends = [(0, T), (0, T // 16), (0, T // 4), (T // 4, T), (T // 4, 5 * T // 4), (T // 2, T),
            (T // 2, 3 * T // 2)]
    return {f"{low}-{high}": stretch(low, high) for low, high in ends}


def optim_arms(recipe: Recipe, shape: dict) -> dict[str, list[str]]:
    """One knob of the paper's AdamW at a time; learning rates in its multiples of the size's own.
    """
    base = ["--beta2", "0.95", "--weight-decay", "0.1", "--min-lr", "0.1"]
    knobs = {"base": [], **{f"lr-x{m:g}": ["--lr", f"{recipe.lr * m:g}"] for m in (.25, .5, 2, 4)},
             "no-lr-decay": ["--min-lr", "1"], "no-weight-decay": ["--weight-decay", "0"],
             "beta2-0.9": ["--beta2", "0.9"], "beta2-0.999": ["--beta2", "0.999"],
             "2x-tokens": ["--steps", str(2 * recipe.steps)]}
    return {name: base + flags for name, flags in knobs.items()}


def toy_arms(recipe: Recipe, shape: dict) -> dict[str, list[str]]:
    """Which mechanisms remove sink, drain and peak? A null logit of log T starts with half of the
    mass, one of 0 with 1 / (T + 1), as Softmax1."""
    log_T = f"{math.log(shape['block_size']):.4f}"
    arms = {"softmax": [], "softmax1": ["--arch", "outeffhop"], "sink-0": ["--arch", "sink"],
            "sink-logT": ["--arch", "sink", "--null-init", log_T],
            "kv-bias": ["--arch", "kv-bias"], "gate": ["--gate", "channel"],
            "sandwich": ["--norm", "sandwich"], "dyt": ["--norm", "dyt"]}
    in_depth = ("attnres", "attnres-oasis", "oasis", "ledger")
    return arms | {name: ["--arch", name] for name in in_depth}


STUDIES |= {
    "backcopy": Study(
        toy_arms, TOY + [("spike", "massive.max", ".1f"),
                         ("parameters", "protocol.n_params", ",.0f")],
        schemes=[], size="toy", probes=15,
        paper="Bigram-Backcopy (arXiv 2410.13835): softmax and AdamW grow all three; ReLU "
              "attention and SGD remove or soften them; 3 layers suffice for the peak. Its models: "
              "1 to 3 layers, d 256, 256 tokens, 10,000 steps of 512 (--size toy-paper)."),
    "spike-norm": spike_study(
        {"pre": [], "sandwich": ["--norm", "sandwich"], "sandwich-qk": ["--norm", "sandwich-qk"],
         "dyt": ["--norm", "dyt"], "post": ["--norm", "post"], "qk-norm": ["--qk-norm"]},
        "10.1 / 46.0 / 3818; 9.8 / 44.7 / 520; 10.0 / 42.0 / 92; 10.0 / 61.0 / 153; –; –",
        "post and qk-norm are ours."),
    "spike-ffn": spike_study(
        {"swiglu": ["--ffn", "swiglu"], "gelu": ["--ffn", "gelu"], "linear": ["--ffn", "linear"],
         "attention-only": ["--ffn", "none"]},
        "10.1 / 46.0 / 3818; 10.1 / 69.3 / 3369; 12.5 / 58.9 / 688; 10.8 / 73.9 / 637",
        "Widths: 8/3 d for SwiGLU, 4 d for the others."),
    "spike-heads": spike_study(
        head_arms,
        "10.1 / 46.0 / 3818 (32 x 128); 10.4 / 37.1 / 1253 (8 x 128);"
        "10.3 / 41.7 / 1936 (16 x 128);"
        "11.3 / 4.1 / 291 (32 x 8); 10.8 / 9.8 / 315 (32 x 16); 10.5 / 27.9 / 829 (32 x 32);"
        "10.3 / 37.7 / 2112 (32 x 64); 10.7 / 11.0 / 1205 (512 x 8); 10.4 / 30.8 / 1750 (256 x 16);"
        "10.3 / 41.1 / 1916 (128 x 32); 10.2 / 44.1 / 2523 (64 x 64);"
        "10.1 / 52.1 / 3429 (16 x 256)",
        "Arms are named heads x size, in parentheses the paper's."),
    "spike-gate": spike_study(
        {"none": [], **{kind: ["--gate", kind] for kind in (
            "channel", "head", "single", "channel-static", "head-static", "single-static",
            "position", "token")}},
        "10.1 / 46.0 / 3818; 10.0 / 4.5 / 202; 10.1 / 6.4 / 186; 10.2 / 31.2 / 316;"
        "10.1 / 42.2 / 1922; 10.1 / 41.3 / 1884; 10.2 / 44.3 / 1797; 10.1 / 41.1 / 1755;"
        "10.0 / 31.1 / 1966", "-static is the paper's \"unconditional\"."),
    "spike-context": spike_study(
        context_arms,
        "10.1 / 46.0 / 3818 (1-4096); 12.4 / 42.1 / 5411 (1-256); 10.6 / 46.3 / 4442 (1-1024);"
        "10.1 / 13.0 / 38470 (1024-4096); 10.1 / 8.0 / 42365 (1024-5120);"
        "10.6 / 1.2 / 7193 (2048-4096); 10.0 / 5.8 / 30634 (2048-6144)",
        "Arms are named by the positions that the loss counts, the paper's in parentheses. Our "
        "perplexity is over all positions, trained on or not; the last quarter is one that all but "
        "the first two short arms train on."),
    "spike-optim": spike_study(
        optim_arms,
        "10.1 / 46.0 / 3818 (lr 3e-4); 11.8 / 18.6 / 1447 (7.5e-5); 10.7 / 31.8 / 2251 (1.5e-4);"
        "10.0 / 51.5 / 3773 (6e-4); 10.2 / 39.2 / 2723 (1.2e-3); 10.7 / 56.8 / 2870;"
        "10.4 / 33.8 / 12275; 10.1 / 49.0 / 2832; 10.7 / 20.9 / 1855; 9.5 / 63.3 / 1848", ""),
}
RELATIVE = SIZE_OF_OUTLIERS + [("W8A8 ppl", "quant.w8a8-static.ppl", ""),
                               ("W4A4 ppl", "quant.w4a4-static.ppl", "")]


def run_study(args, program: str = __file__) -> int:
    """Train every arm x seed that is not finished, then print and save the table."""
    study = STUDIES[args.study]
    if study.pretrained != bool(args.init_from):
        raise UsageError(f"--study {args.study} " + ("needs --init-from" if study.pretrained else
                                                     "trains from scratch: no --init-from"))
    if not study.pretrained:
        args.size = args.size or study.size
    model = os.path.basename(os.path.normpath(args.init_from or args.size))
    out = args.out or f"runs/study-{args.study}-{model}"
    arms = study.arms_for(args) if args.arms is None else pick_arms(study.arms_for(args), args.arms)
    shared = passed_on(args)
    if study.probes and args.probe_every is None:
        shared += ["--probe-every", str(max(1, resolve(args)[0].steps // study.probes))]
    arms = possible(arms, shared)
    todo = []
    for seed in range(args.seeds):
        for arm, flags in arms.items():
            folder = os.path.join(out, f"{arm}-s{seed}")
            command = [*shared, *flags, "--seed", str(seed), "--out", folder]
            if not finished(folder, command):
                todo.append((f"{arm}-s{seed}", command))
    if todo:
        print_estimate(todo, args, len(arms) * args.seeds)
        failed = run_all(todo, out, args.jobs, program)
        if failed:
            print(f"failed: {', '.join(failed)}; see train.log in their folders", file=sys.stderr)
            return 1
    folders = {arm: [os.path.join(out, f"{arm}-s{seed}") for seed in range(args.seeds)]
               for arm in arms}
    for folder in tqdm(sum(folders.values(), []), "measure", disable=None, leave=False):
        measure_quantized(folder, study.schemes)
        if STREAM[0] in study.columns:
            measure_streamed(folder)
    report_study(study, arms, args.seeds, out, study.rows_for(args))
    print(*draw_growth(folders, out))
    return 0


def possible(arms: dict, shared: list[str]) -> dict:
    """The arms that a Config allows; of the others, one line says why. All refused is an error."""
    fit, reasons = {}, {}
    for arm, flags in arms.items():
        try:
            Config(**resolve(build_parser().parse_args([*shared, *flags]))[1])
            fit[arm] = flags
        except ValueError as error:
            reasons[arm] = error
    if not fit:
        raise UsageError(f"no arm is possible: {next(iter(reasons.values()))}")
    for arm, reason in reasons.items():
        print(f"{arm} is left out: {reason}")
    return fit


def measure_quantized(folder: str, schemes: list[str]):
    """The study's quantisation schemes on one run, into its metrics.json, once."""
    missing = set(schemes) - evaluation.read_metrics(folder).get("quant", {}).keys()
    if missing:
        model, run, _ = evaluation.open_run(folder)
        text = evaluation.text_of(run, None)
        results = quantize.measure(model, text, sorted(missing), n_sequences=32,
                                   calibration=quantize.calibration_batches(model, run),
                                   bos_policy=run["bos"])
        evaluation.save_metrics(folder, {"quant": results})


def measure_streamed(folder: str):
    """The loss with a cache of half a context, first tokens forgotten or kept, once."""
    if "stream" not in evaluation.read_metrics(folder):
        model, run, _ = evaluation.open_run(folder)
        found = evaluation.measure_stream(model, evaluation.text_of(run, None),
                                          [(model.config.block_size // 2, 0)],
                                          bos_policy=run["bos"])
        evaluation.save_metrics(folder, {"stream": found})


def report_study(study: Study, arms, seeds: int, out: str, rows: dict[str, str] | None = None):
    """Mean and spread over seeds (table.md), every run (comparison.csv) and their figure. rows:
    what the paper has for each arm."""
    runs = [{"arm": arm, "seed": seed, "metrics": evaluation.read_metrics(
                os.path.join(out, f"{arm}-s{seed}"))} for arm in arms for seed in range(seeds)]
    beside = ("paper: ppl / sink % / spike", rows) if rows else ()
    columns = [column for column in study.columns if any(
        evaluation.lookup(run["metrics"], column[1]) is not None for run in runs)]
    table = evaluation.study_table(runs, columns, beside)
    if study.reference in arms:
        table += f"\nchange against {study.reference}, percent, paired by seed\n\n"
        table += evaluation.relative_table(runs, RELATIVE, study.reference)
    over_time = table_over_time(arms, seeds, out) if study.pretrained else ""   # else growth.png
    if over_time:
        table += f"\nover training steps\n\n{over_time}"
    evaluation.write_text(os.path.join(out, "table.md"), f"{table}\n{study.paper}\n")
    named = [(f"{run['arm']}-s{run['seed']}", run["metrics"]) for run in runs]
    figure = evaluation.compare(named, study.columns, out_dir=out)[2]
    print(f"\n{table}\n{study.paper}\n\ntable {out}/table.md, runs {out}/comparison.csv, {figure}")


def table_over_time(arms, seeds: int, out: str) -> str:
    """The rows that --probe-every left in each log, by arm and step, averaged over seeds."""
    rows = [{"arm": f"{arm}, step {row['step'] + 1}", "seed": seed, "metrics": row["probe"]}
            for arm in arms for seed in range(seeds)
            for row in read_log(os.path.join(out, f"{arm}-s{seed}")) if "probe" in row]
    return evaluation.study_table(rows, OVER_TIME) if rows else ""


def pick_arms(arms: dict, names: str) -> dict:
    wanted = [n.strip() for n in names.split(",")]
    unknown = [n for n in wanted if n not in arms]
    if unknown:
        raise UsageError(f"no arm {', '.join(unknown)}: choose from {', '.join(arms)}")
    return {n: arms[n] for n in wanted}


def passed_on(args) -> list[str]:
    """The flags of the study's own command line that every arm shares."""
    for name in ("seed", "resume", "stop_after", "no_eval"):
        if getattr(args, name):
            raise UsageError(f"--{name.replace('_', '-')} does not go with --study")
    flags = []
    for name, value in {**given(args, Recipe), **given(args, Config)}.items():
        flag = "--" + name.replace("_", "-")
        flags += ([flag if value else flag.replace("--", "--no-", 1)] if isinstance(value, bool)
                  else [flag, str(value)])
    if args.recipe:
        flags += ["--recipe", args.recipe]
    if args.device:
        flags += ["--device", args.device]
    if args.loss_rows is not None:
        flags += ["--loss-rows", str(args.loss_rows)]
    return flags + [flag for flag, on in (("--compile", args.compile),
                                          ("--grad-checkpoint", args.grad_checkpoint),
                                          ("--download", args.download)) if on]


def finished(folder: str, command: list[str]) -> bool:
    """Is this very run there, measured? A folder with other settings is an error, not a result."""
    path = os.path.join(folder, "config.json")
    if not os.path.exists(path):
        return False
    there = read_json(path)
    if not all(isinstance(there.get(part), dict) for part in ("config", "run")):
        raise UsageError(f"{path} is of no run: choose another --out")
    recipe, shape = resolve(build_parser().parse_args(command))
    asked, found = dataclasses.asdict(recipe), {**dataclasses.asdict(Recipe()), **there["run"]}
    differ = [k for k in asked if found[k] != asked[k] and k not in FREE_ON_RESUME]
    found = dataclasses.asdict(config_from(there["config"]))
    wanted = dataclasses.asdict(Config(**{**shape, "vocab_size": found["vocab_size"]}))
    differ += [k for k in wanted if found[k] != wanted[k]]
    if differ:
        raise UsageError(f"{folder} holds a run with another {', '.join(differ)}: choose another "
                         "--out")
    return os.path.exists(os.path.join(folder, "metrics.json"))


def print_estimate(todo, args, total: int):
    """Time three steps of every arm in question, and say what all of it will take."""
    threads, seconds, timed = torch.get_num_threads(), 0.0, {}
    torch.set_num_threads(share_of_cores(args.jobs))
    for name, command in todo:
        arm = name.rsplit("-s", 1)[0]
        if arm not in timed:
            a = build_parser().parse_args(command)
            recipe, shape = resolve(a)
            trainer = Trainer(recipe, shape, a.out, find_machine(a.device, recipe.dtype), a)
            trainer.wrapped = trainer.model
            for step in range(3):           # the first is slower: it counts only if it is long
                start = time.perf_counter()
                trainer.step(step)
                timed[arm] = recipe.steps * (time.perf_counter() - start)
                if timed[arm] > 5 * recipe.steps:
                    break
            del trainer
        seconds += timed[arm]
    torch.set_num_threads(threads)
    print(f"{len(todo)} of {total} runs to do, {args.jobs} at a time: about "
          f"{seconds / args.jobs / 60:.0f} minutes, evaluation apart. Finished runs are kept, so "
          "this can be interrupted.", flush=True)


def share_of_cores(jobs: int) -> int:
    return max(1, (os.cpu_count() or 1) // jobs)


def run_all(todo, out: str, jobs: int, program: str = __file__) -> list[str]:
    """Run commands, `jobs` at a time, each with its share of the cores -> those that failed.
    program: what runs them, this file or one that adds a mechanism to it."""
    threads = str(share_of_cores(jobs))
    queue, running, failed = list(todo), {}, []
    bar = tqdm(total=len(todo), unit="run", disable=None)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)      # as Ctrl-C
    try:
        while queue or running:
            while queue and len(running) < jobs:
                name, command = queue.pop(0)
                running[name] = launch(name, command, out, threads, program)
            time.sleep(0.5)
            for name, (process, log) in list(running.items()):
                if process.poll() is not None:
                    log.close()
                    del running[name]
                    bar.update()
                    bar.set_postfix_str(name)
                    failed += [name] * (process.returncode != 0)
    finally:
        for process, _ in running.values():
            process.terminate()             # SIGTERM: the run saves itself and can be resumed
        for process, _ in running.values():
            process.wait()
        signal.signal(signal.SIGTERM, before)
    return failed


def launch(name: str, command: list[str], out: str, threads: str, program: str):
    folder = os.path.join(out, name)
    os.makedirs(folder, exist_ok=True)
    log = open(os.path.join(folder, "train.log"), "a", encoding="utf-8")
    resume = ["--resume"] * os.path.exists(os.path.join(folder, "checkpoint.pt"))
    process = subprocess.Popen([sys.executable, os.path.abspath(program), *command, *resume],
                               stdout=log, stderr=subprocess.STDOUT,
                               start_new_session=True,      # the terminal's Ctrl-C is ours to pass
                               env={**os.environ, "OMP_NUM_THREADS": threads})
    return process, log


# ------------------------------------------------------------------------------------------- main

def main(argv: list[str] | None = None, program: str = __file__) -> int:
    """Exit status: 0 done, 1 arms of a study failed, 2 bad request or data, 130 interrupted.
    program: the file that a study runs for each arm; give yours if it adds a mechanism."""
    args = build_parser().parse_args(argv)
    if args.init_from:
        args.init_from = os.path.normpath(args.init_from)       # FOLDER/ is FOLDER
    try:
        if args.seeds < 1 or args.jobs < 1 or (args.stop_after or 1) < 1:
            raise UsageError("--seeds, --jobs and --stop-after must be at least 1")
        if (args.loss_rows or 0) < 0:
            raise UsageError("--loss-rows must not be negative")
        if args.starts:
            return print_starts(args)
        return run_study(args, program) if args.study else train(args)
    except ValueError as error:     # UsageError, DataError, CheckpointError, EvalError, Config's
        print(f"train.py: {error}", file=sys.stderr)
        return 2
    except (torch.OutOfMemoryError, MemoryError):
        print("train.py: out of memory: lower --micro-batch, or give --grad-checkpoint",
              file=sys.stderr)
        return 2
    except (OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "can't allocate memory" not in str(error):
            raise                       # a fault of ours
        print(f"train.py: {first_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("train.py: stopped; the same command "
              + ("" if args.study else "with --resume --out FOLDER ") + "continues",
              file=sys.stderr)
        return 130


if __name__ == "__main__":
    sys.exit(main())
