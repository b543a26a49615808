"""GSM8K: what counts as an answer, what the model is shown, and what is left on the disk."""
import json
import re

import pytest
import torch

import eval as evaluation
import quantize
from data import DataError, get_tokenizer
from data import gsm8k
from model import Config, Transformer, load_checkpoint, save_checkpoint

BYTES = get_tokenizer("bytes")
PROBLEMS = [{"question": f"A box holds {n} pens. How many do 3 boxes hold?" + " Think." * (n % 3),
             "answer": f"3 * {n} = {3 * n}\n#### {3 * n:,}", "gold": str(3 * n)}
            for n in (7, 400, 20, 5, 1000)]


@pytest.mark.parametrize("text, strict, flexible", [
    ("so 18\n#### 18", "18", "18"), ("#### 18.", "18", "18"), ("#### 1,234", "1234", "1234"),
    ("#### $1,234.50 a week", "1234.5", "1234.5"), ("#### 18.00", "18", "18"),
    ("#### -3", "-3", "-3"), ("####7", "7", "7"),
    ("#### -$5", "-5", "-5"), ("#### $-5", "-5", "-5"),
    ("#### 18\nThat is 9 a day.", "18", "18"),              # nothing after the number counts
    ("#### 18\n#### 20", "18", "18"), ("#### \n12 pens", None, "12"),      # the first one wins
    ("#### \n#### 12", None, "12"), ("#### about 12", None, "12"), ("#### **12**", None, "12"),
    ("The answer is 12 pens.", None, "12"), ("10-3", None, "3"), ("10 - -3", None, "-3"),
    ("1,2,3", None, "3"), ("a share of .5", None, "0.5"), ("12,50", None, "50"),
    ("#### ", None, None), ("none", None, None), ("", None, None), ("#### -0", "0", "0"),
    ("#### -0.00", "0", "0"), ("#### 007", "7", "7"), ("#### " + "9" * 38, "9" * 38, "9" * 38),
    ("-" + "9" * 5000 + ".10", None, "-" + "9" * 5000 + ".1")])     # exact at any length
def test_extraction(text, strict, flexible):
    assert gsm8k.strict(text) == strict
    assert gsm8k.flexible(text) == flexible


@pytest.mark.parametrize("text, left, whole", [
    ("3 * 7 = 21\n#### 21\n\nQuestion: more", "3 * 7 = 21\n#### 21\n", True),
    ("21 pens.\n\nQuestion: How", "21 pens.\n\n", True), ("#### 2", "#### 2", False),
    ("#### \n21", "#### \n21", False), ("3 * 7", "3 * 7", False)])
def test_an_answer_ends_where_nothing_more_can_count(text, left, whole):
    """"#### 2" may still become 21: without its newline it is not complete."""
    assert gsm8k.cut(text) == (left, whole)


def test_worked_examples_are_right():
    for question, answer in gsm8k.EXAMPLES:
        sums = re.findall(r"((?:\d+ [-+*/] )+\d+) = (\d+)", answer)
        assert len(sums) >= 2
        for left, right in sums:
            assert eval(left) == int(right), left
        assert gsm8k.strict(answer) == sums[-1][1] and answer.count("####") == 1


def test_interval_and_counts():
    low, high = gsm8k.wilson(594, 1319)                    # 45 %
    assert high - low == pytest.approx(2 * 0.0268, abs=2e-4)
    assert gsm8k.wilson(0, 16)[0] == 0 and gsm8k.wilson(0, 16)[1] == pytest.approx(0.1936, abs=1e-4)
    records = [dict(gold="1", strict=s, flexible=f, truncated=t, n_tokens=10)
               for s, f, t in (("1", "1", False), (None, "1", False), (None, None, True),
                               ("2", "2", False))]
    found = gsm8k.score(records)
    assert (found["strict"], found["flexible"], found["n"]) == (0.25, 0.5, 4)
    assert (found["truncated"], found["no_strict_answer"]) == (1, 2)


# ---------------------------------------------------------------------------------------- prompts

def test_plain_prompt_is_the_corpus_s_own_form():
    text = BYTES.decode(gsm8k.prompt(BYTES, "How many?", shots=2))
    first, second, last = text.split("\n\n")
    assert first == "Question: {}\nAnswer: {}".format(*gsm8k.EXAMPLES[0])
    assert last == "Question: How many?\nAnswer:"
    assert gsm8k.prompt(BYTES, "How many?", bos=True)[0] == BYTES.bos
    assert gsm8k.INSTRUCTION in BYTES.decode(gsm8k.prompt(BYTES, "How many?", shots=0))
    with pytest.raises(DataError, match="worked examples"):
        gsm8k.prompt(BYTES, "How many?", shots=9)


def hf_tokenizer(folder, *specials):
    """A byte-level tokenizer.json without merges: one id a byte, and the given special tokens."""
    tokenizers = pytest.importorskip("tokenizers")
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {c: i for i, c in enumerate(alphabet)}
    tk = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tk.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tk.decoder = tokenizers.decoders.ByteLevel()
    tk.add_special_tokens([s for s in specials if s.startswith("<|")])
    tk.add_tokens([s for s in specials if not s.startswith("<|")])
    tk.save(str(folder / "tokenizer.json"))
    return get_tokenizer(str(folder / "tokenizer.json"))


CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
         "<|eot_id|>")


@pytest.mark.parametrize("specials, expected", [
    (CHATML, "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n"),
    (CHATML + ("<think>", "</think>"),
     "<|im_start|>user\nQ<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"),
    (LLAMA, "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nQ<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n")])
def test_chat_formats(tmp_path, specials, expected):
    """Special tokens are ids, once each; one that a question names is text."""
    tokenizer = hf_tokenizer(tmp_path, *specials)
    ids = gsm8k.chat_prompt(tokenizer, "Q", shots=0)
    expected = expected.replace("Q", f"Q\n{gsm8k.INSTRUCTION}")
    assert tokenizer.decode(ids) == expected
    marks = [tokenizer.tk.token_to_id(s) for s in specials]
    pattern = "|".join(map(re.escape, specials))
    assert [i for i in ids if i in marks] == \
        [tokenizer.tk.token_to_id(s) for s in re.findall(pattern, expected)]
    rude = gsm8k.chat_prompt(tokenizer, specials[1], shots=0)
    assert sum(i in marks for i in rude) == sum(i in marks for i in ids)
    turns = gsm8k.chat_prompt(tokenizer, "Q", shots=2)
    assert tokenizer.decode(turns).count("assistant") == 3


def test_a_tokenizer_without_chat_format_is_told_so():
    with pytest.raises(DataError, match="no chat format"):
        gsm8k.chat_prompt(BYTES, "Q")


# ------------------------------------------------------------------------------ prefix, stop, batch

def tiny(block=512, seed=0, **fields):
    torch.manual_seed(seed)
    config = Config(n_layer=2, n_head=2, n_kv_head=1, d_model=32, block_size=block, **fields)
    model = Transformer(config).eval()
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) * 0.3)
    return model


@pytest.mark.parametrize("fields", [{}, {"pos": "learned"}, {"residual": "oasis"},
                                    {"normalizer": "softmax1", "gate": "bondarenko"}])
def test_a_shared_prefix_changes_nothing(fields):
    """Rows of 1, 7 and 32 tokens after a cached prefix, padded between the two, say what each says
    alone when all is encoded at once."""
    model, g = tiny(128, **fields), torch.Generator().manual_seed(3)
    prefix = torch.randint(256, (20,), generator=g)
    rows = [torch.randint(256, (n,), generator=g).tolist() for n in (1, 7, 32)]
    tokens, mask = gsm8k.left_padded(rows, 0)
    out = model.generate(tokens, 12, temperature=0, pad_mask=mask, prefix=model.encode(prefix))
    for row, said in zip(rows, out[:, tokens.shape[1]:].tolist()):
        whole = torch.tensor([prefix.tolist() + row])
        assert model.generate(whole, 12, temperature=0)[0, whole.shape[1]:].tolist() == said
    with pytest.raises(ValueError, match="block_size"):
        model.generate(tokens, 100, prefix=model.encode(prefix), pad_mask=mask)


def test_stop_ends_rows_and_generation():
    model = tiny()
    tokens = torch.randint(256, (2, 5), generator=torch.Generator().manual_seed(0))
    free = model.generate(tokens, 9, temperature=0)
    seen = []

    def stop(new):
        seen.append(new.shape[1])
        return [new.shape[1] >= 3, new.shape[1] >= 6]
    out = model.generate(tokens, 9, temperature=0, stop=stop)
    assert seen == [1, 2, 3, 4, 5, 6] and out.shape[1] == 5 + 6
    assert torch.equal(out[1], free[1, :11])
    assert torch.equal(out[0, :8], free[0, :8]) and (out[0, 8:] == out[0, 7]).all()


def test_the_last_position_alone():
    model, tokens = tiny(), torch.randint(256, (2, 9))
    torch.testing.assert_close(model(tokens, last=True)[0], model(tokens)[0][:, -1:])


def test_shared_prefix_leaves_every_prompt_a_token():
    assert gsm8k.shared_prefix([[1, 2, 3], [1, 2, 4, 5]]) == 2
    assert gsm8k.shared_prefix([[1, 2], [1, 2, 3]]) == 1 and gsm8k.shared_prefix([[7]]) == 0
    assert gsm8k.shared_prefix([[1, 2], [3]]) == 0


class Pupil:
    """Answers every problem from a table, as a model would: ids, row by row, greedily."""

    def __init__(self, said):
        self.said, self.config, self.calls = said, Config(block_size=9999), 0
        self.weight = torch.nn.Parameter(torch.zeros(1))

    def state_dict(self):
        return {"weight": self.weight}

    def parameters(self):
        return iter([self.weight])

    def encode(self, tokens):
        return tokens

    def generate(self, tokens, max_new_tokens, *, prefix, pad_mask, stop, stop_ids, temperature):
        assert temperature == 0
        self.calls += 1
        rows = []
        for row, seen in zip(tokens, pad_mask):
            asked = BYTES.decode([*prefix, *row[seen].tolist()]).rpartition("Question: ")[2]
            said = next(text for question, text in self.said if asked.startswith(question))
            rows.append((list(said.encode()) + [BYTES.eot] * max_new_tokens)[:max_new_tokens])
        return torch.cat((tokens, torch.tensor(rows)), 1)


def test_scores_of_known_answers(tmp_path):
    tails = ["\n#### {}\n\nQuestion: 99", "\n#### {}.", " is {} pens", "\n#### 4{}\n",
             " {}" + "!" * 99]
    said = [(p["question"], "It" + tail.format(p["gold"])) for p, tail in zip(PROBLEMS, tails)]
    path = str(tmp_path / "answers.jsonl")
    records = gsm8k.answer(Pupil(said), BYTES, PROBLEMS, shots=1, max_new_tokens=60, batch_size=2,
                           path=path)
    assert [r["question"] for r in records] == [p["question"] for p in PROBLEMS]
    found = gsm8k.score(records)
    assert (found["strict"], found["flexible"]) == (2 / 5, 4 / 5)
    assert (found["truncated"], found["no_strict_answer"]) == (1, 2)
    assert "99" not in records[0]["text"]
    assert [json.loads(line) for line in open(path, encoding="utf-8")] == records


def test_an_interrupted_run_goes_on(tmp_path):
    """What is answered is not asked again: by the same model, and by it alone."""
    said, path = [(p["question"], "#### 1\n") for p in PROBLEMS], str(tmp_path / "a.jsonl")
    ask = lambda pupil, **how: gsm8k.answer(pupil, BYTES, PROBLEMS, shots=0, batch_size=2,
                                            path=path, **how)
    whole = ask(Pupil(said))
    lines = open(path, encoding="utf-8").read().splitlines(keepends=True)
    open(path, "w", encoding="utf-8").writelines(lines[:3])
    again = Pupil(said)
    assert ask(again) == whole and again.calls == 1
    assert ask(again) == whole and again.calls == 1
    ask(again, max_new_tokens=50), ask(again, label="w4")
    assert again.calls == 1 + 3 + 3
    other = Pupil(said)
    other.weight.data += 1
    ask(other)
    assert other.calls == 3
    other.config.rope_theta *= 2            # the same weights, turned by other angles
    ask(other)
    assert other.calls == 6
    (tmp_path / "a.jsonl").write_text("")
    ask(other)
    assert other.calls == 9
    (tmp_path / "a.jsonl").write_text('{"x": 1}\n')
    with pytest.raises(DataError, match="no file of GSM8K answers"):
        ask(other)


def test_answers_of_other_settings_stay(tmp_path):
    """Fewer problems, other shots: each call reports its own answers, and erases no others."""
    said, path = [(p["question"], "#### 1\n") for p in PROBLEMS], tmp_path / "a.jsonl"
    pupil = Pupil(said + [(q, "") for q, _ in gsm8k.EXAMPLES])

    def ask(n, **how):
        records = gsm8k.answer(pupil, BYTES, PROBLEMS[:n], batch_size=8, path=str(path), **how)
        lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        assert len(records) == n and lines[:n] == records
        return len(lines)
    assert [ask(5, shots=0), ask(4, shots=2), ask(2, shots=0), ask(1, shots=1)] == [5, 9, 9, 10]
    assert pupil.calls == 3
    assert [ask(5, shots=0), ask(4, shots=2), ask(1, shots=1)] == [10] * 3 and pupil.calls == 3
    shots = [json.loads(line)["shots"] for line in path.open(encoding="utf-8")]
    assert sorted(shots) == [0] * 5 + [1] + [2] * 4


def test_an_old_answer_is_judged_anew(tmp_path):
    """A mistake in the problems is mended: the text is kept, the score is not."""
    pupil, path = Pupil([(p["question"], "#### 1\n") for p in PROBLEMS]), str(tmp_path / "a.jsonl")
    ask = lambda problems: gsm8k.score(gsm8k.answer(pupil, BYTES, problems, shots=0, path=path))
    assert ask(PROBLEMS)["strict"] == 0
    assert ask([p | {"gold": "1"} for p in PROBLEMS])["strict"] == 1 and pupil.calls == 1
    assert {json.loads(line)["gold"] for line in open(path, encoding="utf-8")} == {"1"}


def test_batches_do_not_change_answers():
    model = tiny(512)
    one, three = (gsm8k.answer(model, BYTES, PROBLEMS, shots=0, max_new_tokens=8, batch_size=b)
                  for b in (1, 3))
    assert [r["text"] for r in one] == [r["text"] for r in three]
    assert len({r["text"] for r in one}) > 1        # and they are answers to different questions


def test_what_does_not_fit_the_model_is_one_line(tmp_path):
    tokenizer = hf_tokenizer(tmp_path, *CHATML)
    with pytest.raises(DataError, match="the tokenizer has 259 ids, the model 258 rows"):
        gsm8k.answer(tiny(), tokenizer, PROBLEMS, shots=0)
    ask = lambda block, **how: gsm8k.answer(tiny(block), BYTES, PROBLEMS[:1], **how)
    with pytest.raises(DataError, match="tokens of prompt and 256 .* of 512: fewer --shots$"):
        ask(512)
    with pytest.raises(DataError, match="fewer --shots or --max-new-tokens 2[0-9]{2}$"):
        ask(512, shots=1, max_new_tokens=500)
    with pytest.raises(DataError, match="context of 200: --max-new-tokens [0-9]+$") as error:
        ask(200, shots=0)
    ask(200, shots=0, max_new_tokens=int(str(error.value).split()[-1]))     # as it was told
    with pytest.raises(DataError, match="context of 20: nothing to shorten"):
        ask(20, shots=0)


def test_a_folder_named_test_is_not_the_split(tmp_path, monkeypatch):
    (tmp_path / "test").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gsm8k, "cache_folders", lambda: [])
    with pytest.raises(DataError, match="GSM8K's test split is not on this machine"):
        gsm8k.load_problems("test")


# ---------------------------------------------------------------------------------------- programs

@pytest.fixture
def run(tmp_path):
    folder, model = tmp_path / "run", tiny(512)
    folder.mkdir()
    save_checkpoint(str(folder / "checkpoint.pt"), {
        "config": vars(model.config), "model": model.state_dict(),
        "run": {"tokenizer": "bytes", "data": "stdlib", "bos": "window"}})
    with open(tmp_path / "problems.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps(p) + "\n" for p in PROBLEMS)
    return folder, str(tmp_path / "problems.jsonl")


def test_a_fine_tuned_model_answers_in_the_context_it_came_from(run, capsys):
    """block_size is what it was fine-tuned on; rotary positions reach as far as before."""
    folder, file = run
    path = str(folder / "checkpoint.pt")
    flags = [str(folder), "--gsm8k", file, "--limit", "1", "--shots", "0", "--max-new-tokens", "2"]
    payload = load_checkpoint(path)
    payload["config"]["block_size"] = 64
    save_checkpoint(path, payload)
    assert evaluation.main(flags) == 2 and "context of 64" in capsys.readouterr().err
    payload["run"]["context"] = 512
    save_checkpoint(path, payload)
    assert evaluation.main(flags) == 0
    payload["config"]["pos"] = "learned"            # a table has no rows beyond its end
    model = Transformer(Config(**payload["config"]))
    save_checkpoint(path, {**payload, "model": model.state_dict()})
    assert evaluation.main(flags) == 2


def test_programs(run, capsys, tmp_path):
    folder, file = run
    flags = ["--gsm8k", file, "--limit", "3", "--shots", "0", "--max-new-tokens", "6"]
    assert evaluation.main([str(folder), *flags]) == 0
    printed = capsys.readouterr().out
    found = json.loads((folder / "metrics.json").read_text())["gsm8k"]
    assert found["n"] == 3 and found["truncated"] == 3 and found["protocol"]["bos"] is True
    assert "95 % between" in printed and "3 answers ran out of tokens" in printed
    assert len((folder / "gsm8k.jsonl").read_text().splitlines()) == 3

    text = tmp_path / "t.txt"
    text.write_text("one two three\n" * 3000)
    assert quantize.main([str(folder), "--scheme", "w2", "--data", str(text), "--n-sequences", "1",
                          "--no-figures", *flags]) == 0
    metrics = json.loads((folder / "metrics.json").read_text())
    assert metrics["quant"]["w2"]["gsm8k"]["n"] == 3 and metrics["gsm8k"] == found
    plain, rounded = ([json.loads(line)["text"] for line in (folder / name).open()]
                      for name in ("gsm8k.jsonl", "gsm8k-w2.jsonl"))
    assert plain != rounded


def test_bad_requests_are_one_line(run, capsys, tmp_path):
    folder, file = run
    (tmp_path / "bad.jsonl").write_text('{"question": "q", "answer": "none"}\n')
    for flags in (["--gsm8k", file], ["--gsm8k", str(tmp_path / "missing.jsonl")],
                  ["--gsm8k", str(tmp_path / "bad.jsonl")], ["--gsm8k", file, "--limit", "0"],
                  ["--gsm8k", file, "--chat"], ["--gsm8k", file, "--shots", "-1"]):
        assert evaluation.main([str(folder), *flags]) == 2
        err = capsys.readouterr().err
        assert err.startswith("eval.py: ") and err.count("\n") == 1
