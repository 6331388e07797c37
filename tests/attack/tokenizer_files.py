"""Damaged tokenizer files and chat templates of a folder, each read in a process with little memory and time.

    python tests/attack/tokenizer_files.py [--number 300] [--seconds 600] [--seed 0]

A folder must be refused in one line, or give a tokenizer that reads and writes texts, has no id beyond the model, and
agrees with transformers' AutoTokenizer wherever no line says otherwise. Nothing may take more than 5 seconds of its
own, or a template more than its limit.
"""

import json
import resource
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers import damage
from helpers.attacks import attack, damage_file, import_once, options, run_case
from helpers.sentencepiece_files import save_model
from helpers.tokenizer_folders import CHATML, LINES, save_folder, train_byte_level

ROWS = 1000
BOUND_S, BOUND_BYTES = 8, 1 << 30
TEXTS = (*LINES, "", "  a  b ", "<|im_start|>user\nhi<|im_end|>\n", "1234 12", "<s>x</s><unk>")
TEMPLATES = (
    "{% for m in messages %}",
    "{{ messages[0] }",
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
    "{{ 'a' * 10 ** 10 }}",
    "{{ messages[0].content * 9999999 }}",
    "{{ 10 ** 10 ** 8 }}",
    "{{ messages.__class__.__mro__ }}",
    "{% set x = namespace(__class__=1) %}",
    "{{ " + "(" * 300 + "1" + ")" * 300 + " }}",
    "{{ " + "[" * 5000 + "]" * 5000 + " }}",
    "{% if true %}" * 200 + "{% endif %}" * 200,
    "{% include 'x' %}{% import 'os' as os %}",
    "{{ raise_exception('no\nline') }}",
    "{{ strftime_now(messages) }}",
    "{{ messages | tojson(indent=10 ** 9) }}",
    "{{ undefined.name }}",
    "{{ '\ud800' }}",
    "\x1b[2J{{ messages[0].content }}<|im_end|>",
    "{{ messages[0].content }}<|im_end|>" * 2000,
    CHATML.replace("<|im_end|>", "<|nothing|>"),
    CHATML.replace("m.content", "m['content'] | upper"),
    "",
)
# Parts of a tokenizer.json that take long, take much, or contradict the others.
PARTS: tuple[tuple[str, Any], ...] = (
    ("pre_tokenizer", {"type": "Split", "pattern": {"Regex": "(a+)+(b+)+$"}, "behavior": "Isolated", "invert": False}),
    ("pre_tokenizer", {"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated", "invert": False}),
    (
        "pre_tokenizer",
        {"type": "Split", "pattern": {"Regex": "(x?){1000}{1000}"}, "behavior": "Removed", "invert": True},
    ),
    ("pre_tokenizer", {"type": "Sequence", "pretokenizers": []}),
    ("pre_tokenizer", None),
    ("normalizer", {"type": "Replace", "pattern": {"String": ""}, "content": "y" * 10_000}),
    ("normalizer", {"type": "Replace", "pattern": {"Regex": "."}, "content": "y" * 100_000}),
    ("normalizer", {"type": "Prepend", "prepend": "z" * 1_000_000}),
    ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "AAAA"}),
    ("normalizer", {"type": "Precompiled", "precompiled_charsmap": "/////wAAAAA="}),
    ("normalizer", {"type": "Lowercase"}),
    ("decoder", {"type": "Replace", "pattern": {"String": ""}, "content": "w" * 10_000}),
    ("decoder", {"type": "Strip", "content": "a", "start": 2**40, "stop": 2**40}),
    ("decoder", None),
    ("post_processor", {"type": "BertProcessing", "sep": ["</s>", 10**6], "cls": ["<s>", 10**6]}),
    ("post_processor", {"type": "RobertaProcessing", "sep": ["x", 1], "cls": ["y", 2]}),
    ("truncation", {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 9}),
    ("truncation", {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}),
    ("padding", {"strategy": {"Fixed": 2**62}, "direction": "Right", "pad_id": 0, "pad_type_id": 0, "pad_token": "a"}),
    ("added_tokens", []),
    ("version", "9.9"),
)


def save_bases(folder: Path) -> list[Path]:
    """Write folders of all kinds: with every file that is read, of pieces, without tokenizer.json."""
    config = {"eos_token": "<|im_end|>", "chat_template": CHATML}
    tokenizer = train_byte_level()
    more: dict[str, Any] = {
        "tokenizer_config__json": {
            **config,
            "additional_special_tokens": ["<tool>"],
            "tokenizer_class": "GPT2Tokenizer",
        },
        "special_tokens_map__json": {"bos_token": {"content": "<|endoftext|>"}, "eos_token": "<|im_end|>"},
        "added_tokens__json": {"<tool>": tokenizer.get_vocab_size()},
        "generation_config__json": {"eos_token_id": [0], "temperature": 0.5},
        "chat_template__jinja": CHATML,
    }
    bases = [save_folder(folder / "all", tokenizer, **more)]
    (bases[0] / "additional_chat_templates").mkdir()
    (bases[0] / "additional_chat_templates" / "tool_use.jinja").write_text(CHATML)
    listed = {"0": {"content": "<|endoftext|>", "special": True}, "2": {"content": "<|im_end|>", "special": True}}
    new = {**config, "added_tokens_decoder": listed, "clean_up_tokenization_spaces": True, "add_bos_token": True}
    bases.append(save_folder(folder / "new", tokenizer, tokenizer_config__json=new))
    model = json.loads(tokenizer.to_str())["model"]
    merges = "\n".join(" ".join(pair) for pair in model["merges"])
    files = {"vocab__json": model["vocab"], "merges__txt": merges, "tokenizer_config__json": config}
    bases.append(save_folder(folder / "old", None, config__json={"model_type": "gpt2"}, **files))
    bases.append(save_folder(folder / "sentencepiece", None, tokenizer_config__json=config))
    save_model(bases[-1] / "tokenizer.model")
    return [*bases, *_pieces(folder)]


def _pieces(folder: Path) -> list[Path]:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
    from transformers import LlamaTokenizer

    words = ("<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdehlorw", "▁h", "he", "ll")
    vocabulary = {word: number for number, word in enumerate(words)}
    LlamaTokenizer(vocab=vocabulary, merges=[("▁", "h"), ("h", "e"), ("l", "l")], chat_template=CHATML).save_pretrained(
        folder / "llama"
    )
    unigram = Tokenizer(models.Unigram())
    unigram.normalizer = normalizers.Sequence([normalizers.NFKC(), normalizers.Replace(" {2,}", " ")])
    unigram.pre_tokenizer, unigram.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=80, special_tokens=["<unk>", "<s>", "</s>"], unk_token="<unk>", show_progress=False
    )
    unigram.train_from_iterator(LINES * 9, trainer)
    config = {"eos_token": "</s>", "bos_token": "<s>", "unk_token": "<unk>", "chat_template": CHATML}
    return [
        save_folder(folder / "llama", None),
        save_folder(folder / "unigram", unigram, tokenizer_config__json=config),
    ]


def any_file(draw: Random, folder: Path) -> str:
    """Damage the bytes of a file."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return damage_file(draw.choice(files), files, draw)


def any_value(draw: Random, folder: Path) -> str:
    """Put a strange value into a file of JSON."""
    path = draw.choice(sorted(folder.glob("*.json")))
    content, what = damage.spoiled(json.loads(path.read_text()), draw)
    path.write_text(json.dumps(content))
    return f"{path.name} {what}"


def template(draw: Random, folder: Path) -> str:
    """Put a bad template where one is read."""
    text = draw.choice(TEMPLATES)
    if draw.random() < 0.3:
        at = draw.randrange(len(CHATML))
        text = CHATML[:at] + draw.choice(("", "{%", "}}", "{#", "'", "\0")) + CHATML[at + draw.randrange(4) :]
    (folder / "chat_template.jinja").write_text(text, encoding="utf-8", errors="surrogatepass")
    return f"template {text[:40]!r}"


def part(draw: Random, folder: Path) -> str:
    """Put a part into tokenizer.json that takes long, or contradicts the others."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return any_value(draw, folder)
    content, (name, value) = json.loads(path.read_text()), draw.choice(PARTS)
    if draw.random() < 0.3:
        name, value = "added_tokens", [*content["added_tokens"], *_tokens(draw)]
    path.write_text(json.dumps({**content, name: value}))
    return f"{name} {json.dumps(value)[:60]}"


def _tokens(draw: Random) -> list[dict[str, Any]]:
    names = draw.choice((["", " "], ["a"], ["<s>", "<s>"], ["x" * 100_000], [f"<{n}>" for n in range(3000)], ["\n\n"]))
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), draw.random() < 0.5)
    first = draw.choice((400, 0, 2**31, 2**32 - 1))
    return [{"id": first + number, "content": name, **flags} for number, name in enumerate(names)]


def option(draw: Random, folder: Path) -> str:
    """Give tokenizer_config.json or generation_config.json a value that decides something, or should not."""
    path = folder / draw.choice(("tokenizer_config.json", "tokenizer_config.json", "generation_config.json"))
    content = json.loads(path.read_text()) if path.is_file() else {}
    classes = ("LlamaTokenizer", "GPT2Tokenizer", "T5Tokenizer", "Qwen2Tokenizer", "BertTokenizer", "X", "list", "", 3)
    name = draw.choice(
        (
            *(
                "tokenizer_class",
                "tokenizer_class",
                "add_prefix_space",
                "legacy",
                "bos_token",
                "eos_token",
                "pad_token",
            ),
            *("added_tokens_decoder", "extra_special_tokens", "additional_special_tokens", "chat_template", "auto_map"),
            *(
                "split_special_tokens",
                "model_max_length",
                "eos_token_id",
                "from_pretrained",
                "init_inputs",
                "vocab_file",
            ),
            *("tokenizer_file", "fast_tokenizer_files", "padding_side", "post_processor", "tokenizer_object", "unk_id"),
        )
    )
    values = (
        *damage.STRANGE,
        *classes,
        "<|pad|>",
        {"content": "<|pad|>", "__type": "AddedToken"},
        ["<|pad|>"],
        "/etc/passwd",
    )
    content[name] = draw.choice(classes if name == "tokenizer_class" else values)
    path.write_text(json.dumps(content))
    return f"{path.name} {name} {repr(content[name])[:40]}"


MUTATIONS: tuple[Callable[[Random, Path], str], ...] = (any_file, any_value, any_value, template, part, option, option)


def read(folder: Path) -> str:
    """Read a folder with little memory and time: a case for `run_case`."""
    from picompile.errors import PicompileError
    from picompile.frontend.tokenizer.read import read_tokenizer

    pages = int(Path("/proc/self/statm").read_text().split()[0])
    most_bytes = pages * resource.getpagesize() + BOUND_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (most_bytes, most_bytes))
    resource.setrlimit(resource.RLIMIT_CPU, (BOUND_S, BOUND_S + 1))
    try:
        files = read_tokenizer(folder, ROWS)
    except PicompileError as error:
        return f"refused\n{error}" if str(error).isprintable() else f"internal error\nnot one line: {error}"
    if files.tokenizer_json is None:
        return "none"
    strange = [note for note in files.notes if not note.isprintable()]
    return f"internal error\nnot one line: {strange}" if strange else _tried(folder, files)


def _tried(folder: Path, files: Any) -> str:
    """Use the tokenizer as the runtime does, and compare it with transformers'."""
    from transformers import AutoTokenizer

    from picompile.frontend.tokenizer.library import plain_backend
    from picompile_runtime.errors import RequestError
    from picompile_runtime.sampling.tokenizer import Tokenizer

    written = folder.with_name(f"{folder.name}-written")
    written.mkdir()
    files.write(written)
    ours = Tokenizer(
        (written / "tokenizer.json").read_text(), json.loads((written / "tokenizer_config.json").read_text())
    )
    # Without tokenizer.json, transformers needs packages for a model of sentencepiece, and reads it otherwise.
    alone = (folder / "tokenizer.model").exists() and not (folder / "tokenizer.json").exists()
    theirs = None if files.notes or alone else plain_backend(AutoTokenizer.from_pretrained(folder))
    for text in TEXTS:
        try:
            ids = ours.encode(text)
            ours.decode(ids)
        except RequestError:
            continue
        if any(number >= ROWS for number in ids):
            return f"internal error\n{text!r} has the id {max(ids)}"
        if theirs is not None and (expected := theirs.encode(text).ids) != ids:
            return f"internal error\n{text!r} is {ids[:9]}, in transformers {expected[:9]}"
    return "\n".join(("read with a line" if files.notes else "read", *files.notes))


class Attack:
    """Good folders in `work`, and what becomes of damaged copies."""

    def __init__(self, work: Path) -> None:
        self.work = work
        made = run_case(lambda: "\n".join(("made", *map(str, save_bases(work / "good")))), 60)
        if made.word != "made":
            raise RuntimeError(f"no good folders: {made.detail}")
        self.bases = [Path(line) for line in made.detail.splitlines()]

    def case(self, seed: int) -> tuple[str, str | None]:
        """Read one damaged folder."""
        draw, base = Random(seed), self.bases[seed % len(self.bases)]
        folder = self.work / f"folder-{seed}"
        shutil.copytree(base, folder)
        what = MUTATIONS[seed // len(self.bases) % len(MUTATIONS)](draw, folder)
        ended = run_case(lambda: read(folder), 6 * BOUND_S)
        shutil.rmtree(folder)
        shutil.rmtree(folder.with_name(f"{folder.name}-written"), ignore_errors=True)
        is_wrong = ended.is_fault or ended.processor_s > BOUND_S + 12
        told = f"{base.name}, {what}: {ended.word} in {ended.seconds:.1f} s: {ended.detail[-600:]}"
        return ended.word, told if is_wrong else None


def main() -> int:
    found = options(__doc__, 300)
    torch.set_num_threads(1)
    import_once()
    with tempfile.TemporaryDirectory(prefix="picompile-attack-") as folder:
        report = attack(Attack(Path(folder)).case, found.number, found.seconds, found.seed)
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
