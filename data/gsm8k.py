"""GSM8K: word problems whose answer is one number (Cobbe et al., arXiv 2110.14168), and Pass@1.

    prompt    8 worked examples, then    Question: ...        the model goes on, greedily, with
                                         Answer:              its steps and a line   #### 18
    strict    the number right after the first ####           Pass@1 is the share of problems
    flexible  the same; without one, the last number          whose number equals the solution's

The papers give no protocol, and a parser alone moves this score by tens of points: text after the
number, `1,234`, `18.`, an answer cut off. So both scores are reported, with a 95 % interval, the
number of answers that ran out of tokens, and every answer as a line of a JSONL file. The worked
examples are ours (no problem of the data set is among them); `shots=0` asks by an instruction.

Read first: `strict`, `flexible`, `prompt`; then `answer`, which needs of a model only `encode` and
`generate`. Run it as `python eval.py PATH --gsm8k FILE`.
"""
from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import math
import os
import re
import zlib
from decimal import Decimal
from pathlib import Path

import torch
from tqdm import tqdm

from data import DataError
from data.prepare import HUB, cache_folders, file_rows, hub_rows, replace_text, writable_folder

EXAMPLES = [
    ("A baker fills 6 trays with 12 rolls each and sells 50 rolls before noon. How many rolls are "
     "left?",
     "The baker has 6 * 12 = 72 rolls.\nAfter the sales 72 - 50 = 22 rolls are left.\n#### 22"),
    ("Mira reads 15 pages on each weekday and 25 pages on each day of the weekend. How many pages "
     "does she read in a week?",
     "On the 5 weekdays she reads 5 * 15 = 75 pages.\nOn the weekend she reads 2 * 25 = 50 pages.\n"
     "In the whole week she reads 75 + 50 = 125 pages.\n#### 125"),
    ("A bicycle costs $240. Its price falls by a quarter, and a helmet for $35 is added to the "
     "bill. How many dollars is the bill?",
     "A quarter of the price is 240 / 4 = 60 dollars.\nThe bicycle now costs 240 - 60 = 180 "
     "dollars.\nWith the helmet the bill is 180 + 35 = 215 dollars.\n#### 215"),
    ("Two trains carry 1,150 people together. The longer one carries 150 more than the other. How "
     "many people ride in the longer train?",
     "Without the extra people both carry the same, together 1150 - 150 = 1000.\nThe shorter train "
     "carries 1000 / 2 = 500 people.\nThe longer train carries 500 + 150 = 650 people.\n#### 650"),
    ("A tank holds 90 liters. A pump adds 8 liters a minute while a leak loses 2 liters a minute. "
     "After how many minutes is the empty tank full?",
     "Each minute the tank gains 8 - 2 = 6 liters.\nIt is full after 90 / 6 = 15 minutes.\n"
     "#### 15"),
    ("Omar is three times as old as his niece, who will be 12 in four years. How old is Omar now?",
     "The niece is 12 - 4 = 8 years old now.\nOmar is 3 * 8 = 24 years old.\n#### 24"),
    ("A class of 28 pupils goes on a trip. A ticket costs $9 for each pupil and the bus costs $168 "
     "for all. How many dollars does the trip cost each pupil?",
     "The bus costs each pupil 168 / 28 = 6 dollars.\nWith the ticket that is 6 + 9 = 15 dollars.\n"
     "#### 15"),
    ("Lena saves $20 a week for 9 weeks. She spends a third of her savings on shoes and $45 on a "
     "bag. How many dollars are left?",
     "She saves 20 * 9 = 180 dollars.\nThe shoes cost 180 / 3 = 60 dollars.\nAfter both purchases "
     "180 - 60 - 45 = 75 dollars are left.\n#### 75")]
INSTRUCTION = "Solve it step by step, then write a last line of #### and the number alone."
STOP = "Question:"      # a base model that has answered goes on to invent the next problem


# --------------------------------------------------------------------------- problems and answers

def load_problems(source: str, download: bool = False) -> list[dict]:
    """A .jsonl or .parquet file of questions and answers, or "test" or "train", which are fetched
    once, if download -> [{"question", "answer", "gold"}]. Raises DataError."""
    path, splits = Path(source), HUB["gsm8k"][2]
    if source in splits and not path.is_file():
        name = f"gsm8k-{source}.jsonl"
        path = next((p for p in (Path(f, name) for f in cache_folders()) if p.exists()), None)
        if path is None and not download:
            raise DataError(f"GSM8K's {source} split is not on this machine: --download fetches it "
                            "once, or give a .jsonl file")
        if path is None:
            rows, path = hub_rows("gsm8k", source)(0), writable_folder() / name
            replace_text(path, "".join(json.dumps(dict(row)) + "\n" for row in rows))
    problems = []
    for number, row in enumerate(file_rows(path, by_line=False)(0), 1):
        if not all(isinstance(row.get(key), str) for key in ("question", "answer")):
            raise DataError(f"{path}, row {number}: no question and answer")
        gold = strict(row["answer"])
        if gold is None:
            raise DataError(f"{path}, row {number}: the answer has no number after ####")
        problems.append({"question": row["question"], "answer": row["answer"], "gold": gold})
    if not problems:
        raise DataError(f"{path} holds no problem")
    return problems


# a sign belongs to a number unless something stands before it: 5-3 holds 5 and 3
NUMBER = re.compile(r"(?:(?<![\w)])-)?\$?((?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)")


def canonical(match: re.Match) -> str:
    """One spelling of a number: 1,234.50 and $1234.5 are 1234.5; 18.00 is 18; -0 is 0. Exact at
    any length: Decimal rounds in arithmetic alone, to 28 digits, and there is none here."""
    text = format(Decimal(match[1].replace(",", "")), "f")
    text = text.rstrip("0").rstrip(".") if "." in text else text
    return "-" + text if match[0].startswith("-") and text != "0" else text


def strict(text: str) -> str | None:
    """The number that follows the first ####, on its line and with nothing but $ before it."""
    line = re.search(r"####[ \t]*([^\n]*)", text)
    found = line and NUMBER.match(line[1].removeprefix("$").lstrip())
    return canonical(found) if found else None


def flexible(text: str) -> str | None:
    """The strict answer; in a text without one, the last number."""
    numbers = list(NUMBER.finditer(text))
    return strict(text) or (canonical(numbers[-1]) if numbers else None)


def cut(text: str) -> tuple[str, bool]:
    """An answer without what follows it, and whether it is complete: it ends before STOP, or with
    the first line of #### and a number, for nothing after that can count."""
    before, stop, _ = text.partition(STOP)
    end = re.search(r"####[^\n]*\n", before)
    if end and strict(before) is not None:
        return before[:end.end()], True
    return before, bool(stop)


def wilson(k: int, n: int, z: float = 1.96) -> list[float]:
    """95 % interval of a share of k in n (E. B. Wilson, 1927): sane at 0, at n and at small n."""
    p, q = k / n, z * z / n
    half = z * math.sqrt(p * (1 - p) / n + q / (4 * n))
    return [max(0.0, (p + q / 2 - half) / (1 + q)), min(1.0, (p + q / 2 + half) / (1 + q))]


def score(records: list[dict]) -> dict:
    """Pass@1 of answers: shares in [0, 1] with their 95 % intervals, and counts."""
    n = len(records)
    right = {kind: sum(r[kind] == r["gold"] for r in records) for kind in ("strict", "flexible")}
    return {"n": n, **{kind: k / n for kind, k in right.items()},
            **{f"{kind}_interval": wilson(k, n) for kind, k in right.items()},
            "no_strict_answer": sum(r["strict"] is None for r in records),
            "truncated": sum(r["truncated"] for r in records),
            "tokens_per_answer": sum(r["n_tokens"] for r in records) / n}


# ---------------------------------------------------------------------------------------- prompts

# the special token that gives a chat format away: what begins a text, opens and closes a turn
CHATS = {"<|im_start|>": ("", "<|im_start|>{role}\n", "<|im_end|>\n"),
         "<|start_header_id|>": ("<|begin_of_text|>",
                                 "<|start_header_id|>{role}<|end_header_id|>\n\n", "<|eot_id|>")}
NO_THOUGHT = "<think>\n\n</think>\n\n"      # Qwen3's way of switching its thinking off
SPECIAL = re.compile(r"(<\|\w+\|>|</?think>)")
ENDS = ("<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<|end_of_text|>", "</s>")


def turns(question: str, shots: int) -> list[str]:
    """What is said in turn: question, answer, ..., the question that is asked."""
    if not 0 <= shots <= len(EXAMPLES):
        raise DataError(f"shots={shots}: there are {len(EXAMPLES)} worked examples")
    asked = question if shots else f"{question}\n{INSTRUCTION}"
    return [part for example in EXAMPLES[:shots] for part in example] + [asked]


def prompt(tokenizer, question: str, shots: int = 8, bos: bool = False) -> list[int]:
    """Plain text for base models, as `data.prepare` writes the corpus -> ids."""
    said = turns(question, shots)
    pairs = [f"Question: {q}\nAnswer: {a}" for q, a in zip(said[:-1:2], said[1::2])]
    text = "\n\n".join([*pairs, f"Question: {said[-1]}\nAnswer:"])
    return [tokenizer.bos] * bos + tokenizer.encode(text).tolist()


def chat_prompt(tokenizer, question: str, shots: int = 8) -> list[int]:
    """The turns of ChatML (SmolLM2, Qwen3) or Llama-3, no system message, thinking off -> ids.

    Raises DataError for a tokenizer that knows neither format.
    """
    lookup = tokenizer.tk.token_to_id if hasattr(tokenizer, "tk") else lambda token: None
    mark = next((mark for mark in CHATS if lookup(mark) is not None), None)
    if mark is None:
        raise DataError(f"the tokenizer {tokenizer.name} has no chat format: none of "
                        + ", ".join(CHATS))
    # special tokens become ids in the template alone: their names inside a question stay text
    template = lambda text: [lookup(part) if SPECIAL.fullmatch(part) else part  # noqa: E731
                             for part in SPECIAL.split(text) if part]
    begin, opening, closing = CHATS[mark]
    pieces = template(begin)
    for i, said in enumerate(turns(question, shots)):
        role = "assistant" if i % 2 else "user"
        pieces += [*template(opening.format(role=role)), said, *template(closing)]
    think = NO_THOUGHT if lookup("<think>") is not None else ""
    pieces += template(opening.format(role="assistant") + think)
    if None in pieces:
        raise DataError(f"the tokenizer {tokenizer.name} lacks special tokens of the {mark} format")
    ids = []
    for kind, run in itertools.groupby(pieces, type):
        ids += run if kind is int else tokenizer.encode("".join(run)).tolist()
    return ids


def shared_prefix(prompts: list[list[int]]) -> int:
    """How many ids all prompts begin with; at least one id of each is left over."""
    low, high = min(prompts), max(prompts)      # in dictionary order: all others lie between
    same = itertools.takewhile(lambda pair: pair[0] == pair[1], zip(low, high))
    return min(sum(1 for _ in same), min(map(len, prompts)) - 1)


# --------------------------------------------------------------------------------------- answering

def fingerprint(model) -> int:
    """A checksum of the configuration, every weight and buffer: answers are reused for the same
    model only, and the same weights with another rope_theta are another model."""
    crc = zlib.crc32(repr(dataclasses.asdict(model.config)).encode())
    for tensor in model.state_dict().values():
        flat = tensor.detach().cpu().contiguous().reshape(-1)                       # (N)
        crc = zlib.crc32(flat.view(torch.uint8).numpy(), crc)
    return crc


def read_answers(path: str | None) -> dict[str, dict]:
    """Answers of an earlier, perhaps interrupted run, by key; {} if there are none, as in the empty
    file that a full disk leaves."""
    if not path or not os.path.exists(path) or os.path.getsize(path) == 0:
        return {}
    records = list(file_rows(Path(path), by_line=False)(0))
    if not all({"key", "text", "truncated", "n_tokens"} <= r.keys() for r in records):
        raise DataError(f"{path} is no file of GSM8K answers: move it away first")
    return {r["key"]: r for r in records}


def left_padded(rows: list[list[int]], pad: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of ids -> tokens (B, T), padded on the left, and the mask (B, T) of what is no pad."""
    T = max(map(len, rows))
    tokens = torch.tensor([[pad] * (T - len(row)) + row for row in rows])           # (B, T)
    lengths = torch.tensor([len(row) for row in rows])                              # (B)
    return tokens, torch.arange(T) >= T - lengths[:, None]                          # (B, T)


def complete(model, tokenizer, prefix, rows: list[list[int]], max_new_tokens: int) -> list[dict]:
    """Greedy answers to prompts that begin with the cached prefix: text, truncated, n_tokens."""
    ends = {i for i, name in getattr(tokenizer, "specials", {}).items() if name in ENDS}
    ends |= {tokenizer.eot}
    tokens, mask = left_padded(rows, tokenizer.eot)                                 # (B, T)

    def read(ids: list[int]) -> dict:
        stop = next((n for n, i in enumerate(ids) if i in ends), len(ids))
        known = [i for i in ids[:stop] if i < tokenizer.vocab_size]     # Qwen3 pads its vocabulary
        text, whole = cut(tokenizer.decode(known))
        ended = whole or stop < len(ids)
        while whole and stop > 1 and ids[stop - 1] == ids[stop - 2]:
            stop -= 1                       # a row that has ended repeats its last token
        return {"text": text, "truncated": not ended, "n_tokens": stop}

    device = next(model.parameters()).device
    new = model.generate(tokens.to(device), max_new_tokens, temperature=0, prefix=prefix,
                         pad_mask=mask.to(device), stop_ids=sorted(ends),
                         stop=lambda new: [not read(ids)["truncated"] for ids in new.tolist()])
    return [read(ids) for ids in new[:, tokens.shape[1]:].tolist()]


def answer(model, tokenizer, problems: list[dict], *, shots: int = 8, chat: bool = False,
           bos: bool = False, max_new_tokens: int = 256, batch_size: int = 8, label: str = "",
           path: str | None = None, progress: bool = False) -> list[dict]:
    """Ask a model every problem, greedily -> a record each, in the order of the problems.

    A batch holds prompts of similar length, left-padded; what all prompts begin with (the worked
    examples) is encoded once. chat, bos: `chat_prompt`, or `prompt` with or without BOS. path: a
    JSONL file of the records, rewritten after each batch; those of the same model, settings and
    label in it are not computed again, all others stay in it, after these. Raises DataError if a
    prompt does not fit the context.
    """
    make = functools.partial(chat_prompt, tokenizer, shots=shots) if chat else \
        functools.partial(prompt, tokenizer, shots=shots, bos=bos)
    if tokenizer.vocab_size > model.config.vocab_size:      # fewer is usual: models pad their rows
        raise DataError(f"the tokenizer has {tokenizer.vocab_size} ids, the model "
                        f"{model.config.vocab_size} rows: it is another model's")
    prompts = [make(problem["question"]) for problem in problems]
    longest, room = max(map(len, prompts)), model.config.block_size
    if longest + max_new_tokens > room:
        ways = ["fewer --shots"] * (shots > 0) \
            + [f"--max-new-tokens {room - longest}"] * (longest < room)
        raise DataError(f"{longest} tokens of prompt and {max_new_tokens} of answer do not fit the "
                        f"model's context of {room}: {' or '.join(ways) or 'nothing to shorten'}")
    setting = f"{fingerprint(model)} {label} {tokenizer.name} {max_new_tokens}"
    keys = [hashlib.sha256(f"{setting} {ids}".encode()).hexdigest()[:20] for ids in prompts]
    found = read_answers(path)
    todo = sorted((i for i, key in enumerate(keys) if key not in found),
                  key=lambda i: len(prompts[i]))
    P = shared_prefix(prompts)
    prefix = model.encode(prompts[0][:P]) if P and todo else None
    bar = tqdm(total=len(problems), initial=len(problems) - len(todo), desc="gsm8k", leave=False,
               disable=None if progress else True)
    for start in range(0, len(todo), batch_size):
        batch = todo[start:start + batch_size]
        answers = complete(model, tokenizer, prefix, [prompts[i][P:] for i in batch],
                           max_new_tokens)
        found |= {keys[i]: {"key": keys[i], "shots": shots, "chat": chat, **one}
                  for i, one in zip(batch, answers)}
        bar.update(len(batch))
        if path:
            save_answers(path, problems, keys, found)
    bar.close()
    if path and not todo:
        save_answers(path, problems, keys, found)       # this call's answers come first
    return [record(*pair, found) for pair in zip(problems, keys) if pair[1] in found]


def record(problem: dict, key: str, found: dict) -> dict:
    """One answered problem, as it stands in the JSONL file. Only the text is taken from an older
    file: what the right answer is, and what number the text gives, is looked up anew."""
    text = found[key]["text"]
    judged = {"question": problem["question"], "gold": problem["gold"], "strict": strict(text),
              "flexible": flexible(text)}
    return judged | found[key] | judged         # before and after: first in the line, last to say


def save_answers(path: str, problems: list[dict], keys: list[str], found: dict):
    """The records so far, one a line: these problems', then what else was found, the answers of
    other settings. A reader, or a crash, sees the old file or the new one."""
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    records = [record(*pair, found) for pair in zip(problems, keys) if pair[1] in found]
    ours = set(keys)
    records += [other for key, other in found.items() if key not in ours]
    replace_text(Path(path), "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in records))
