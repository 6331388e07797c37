"""Mutated checkpoints through the command line: refused in one line, or compiled as transformers computes them.

    python tests/attack/checkpoints.py [--number 300] [--seconds 600] [--seed 0]

Each case damages a copy of a small good checkpoint (mutations.py) and compiles or plans it in a forked child, with a
limit of time. A refusal is exit code 2 or 3, one line, nothing left behind, and no more than 10 s of processor time and
1 GiB beyond what the good checkpoint takes. What is not refused must be what eager transformers makes of the folder.
"""

import json
import os
import random
import resource
import shutil
import stat
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mutations import mutate

sys.path.insert(0, str(Path(__file__).parents[1]))

from helpers.attacks import Outcome, Report, attack, command, import_once, options, refusal_fault, run_case
from helpers.support import save_byte_tokenizer

MORE_S = 10.0
MORE_BYTES = 1 << 30
LIMIT_S = 120.0
LIMIT_BYTES = 16 << 30
# Fields that say nothing of a model's logits, and that transformers refuses for some values.
EFFECTLESS = ("auto_map", "dtype", "id2label", "num_labels", "attn_implementation", "to_dict", "__class__")
_OPTIONS = ("--target", "cpu", "--context", "16")
_COMPILE = ("compile", "MODEL", "-o", "OUT", "--quant", "f16", "--predictor", "none", *_OPTIONS)
_RUN = ("run", "OUT", "-p", "ab", "-n", "2")
_PLAN = ("plan", "MODEL", "--firing", "opt", *_OPTIONS)


def save_good_checkpoint(folder: Path, shard: str = "1GB") -> None:
    """A Llama of two layers with random weights in float32, a tokenizer of bytes, and its generation defaults."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 260, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    tokens = {"bos_token_id": 256, "eos_token_id": 257}
    config = LlamaConfig(**sizes, **heads, **tokens, hidden_act="relu", initializer_range=0.2)
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size=shard)
    save_byte_tokenizer(folder, vocabulary=260)
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 257}))


def mutated(good: Path, sharded: Path, folder: Path, seed: int) -> str:
    """Makes the checkpoint of a case in `folder`; what was done to it."""
    shutil.copytree(random.Random(f"shards {seed}").choice((good, good, sharded)), folder)
    return mutate(folder, seed)


def accepted_fault(folder: Path, compiled: bool) -> str | None:
    """Return why a mutated checkpoint should have been refused: transformers refuses it, or computes other logits.

    A plan reads no weights, and cannot refuse what is in them.
    """
    import torch

    from picompile.errors import UnsupportedModelError
    from picompile.frontend.config import quiet_transformers
    from picompile.frontend.hf import load_model
    from picompile_passes.graph.materialize import materialize

    ids = torch.arange(20) * 7 % 256
    with quiet_transformers(), torch.no_grad():
        try:
            expected = _eager(folder)(input_ids=ids.unsqueeze(0), use_cache=False).logits[0]
        except Exception as error:
            return f"transformers refuses it: {type(error).__name__}: {' '.join(str(error).split())[:120]}"
        captured = load_model(folder)
        try:
            logits = materialize(captured.graph_module, captured.weights)(ids, torch.arange(len(ids)))
        except UnsupportedModelError:
            if compiled:
                raise
            return None
    error = float((logits - expected).abs().max() / expected.abs().max())
    return None if error < 1e-4 else f"the logits are off by {error:.1e}"


def _eager(folder: Path) -> Any:
    """transformers' model of `folder`. What it lacks, sparse Llamas and FATReLU, is put in by hand."""
    import torch
    from transformers import AutoModelForCausalLM

    config = json.loads((folder / "config.json").read_text())
    threshold = config.get("hidden_act_param") if config.get("hidden_act") == "fatrelu" else None
    if config.get("model_type") in ("sparsellama", "llama_sparse_relu", None):
        config["model_type"] = "llama"
    if threshold is not None:
        config["hidden_act"] = "relu"
    plain = folder.with_name(f"{folder.name}-plain")
    plain.mkdir()
    for path in folder.iterdir():
        if "safetensors" in path.name and path.is_file():
            shutil.copyfile(path, plain / path.name)
    (plain / "config.json").write_text(json.dumps({key: config[key] for key in config if key not in EFFECTLESS}))
    eager = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32, attn_implementation="eager").eval()
    for layer in eager.model.layers if threshold is not None else ():
        layer.mlp.act_fn = torch.nn.Threshold(float(threshold), 0.0)
    shutil.rmtree(plain)
    return eager


def run_command(work: Path, words: Sequence[str], folder: Path) -> Outcome:
    """Run `picompile` with `words` in a child."""
    named = {"MODEL": str(folder), "OUT": str(work / "out" / "artifact")}
    (work / "out").mkdir(exist_ok=True)

    def case() -> str:
        import torch

        # Keeps the machine alive; what is used below it is measured. Files that are mapped do not count.
        resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_BYTES, LIMIT_BYTES))
        torch.set_num_threads(1)
        return command([named.get(word, word) for word in words], work)

    return run_case(case, LIMIT_S)


class Attack:
    """Good checkpoints in a folder, and what commands take on them."""

    def __init__(self, work: Path) -> None:
        self.work, self.good, self.sharded = work, work / "good", work / "sharded"
        os.environ["PICOMPILE_CACHE"] = str(work / "cache")
        # In a child, for what torch computes leaves threads behind.
        for folder, shard in ((self.good, "1GB"), (self.sharded, "20KB")):
            made = run_case(lambda folder=folder, shard=shard: f"made{save_good_checkpoint(folder, shard)}", LIMIT_S)
            if made.is_fault:
                raise RuntimeError(f"no good checkpoint: {made.detail}")
        self.usual: dict[str, Outcome] = {}
        for words in (_COMPILE, _PLAN):
            # Twice: the first fills the cache of kernels.
            for _ in range(2):
                ended = run_command(work, words, self.good)
                shutil.rmtree(work / "out")
            if ended.word != "0":
                raise RuntimeError(f"the good checkpoint is refused: {ended.detail}")
            self.usual[words[0]] = ended
        self.most_s, self.most_bytes = 0.0, 0

    def case(self, seed: int) -> tuple[str, str | None]:
        """One mutated checkpoint."""
        words = _PLAN if seed % 5 == 4 else _COMPILE
        folder = self.work / f"model-{seed}"
        try:
            name = mutated(self.good, self.sharded, folder, seed)
            ended = run_command(self.work, words, folder)
            left = sorted(path.name for path in (self.work / "out").iterdir())
            if ended.word == "0":
                way, wrong = "accepted", self._accepted(folder, compiled=words is _COMPILE)
            else:
                way = "refused"
                wrong = refusal_fault(ended.word, ended.detail) or (f"left {left}" if left else None)
            wrong = wrong or self._expense(words[0], ended)
        finally:
            _discard(folder)
            shutil.rmtree(self.work / "out", ignore_errors=True)
        print(f"{seed}: {name}: {way} in {ended.processor_s:.1f} s: {ended.detail.strip()[:140]}", flush=True)
        return way, None if wrong is None else f"{name}, {words[0]}: {wrong}: {ended.detail.strip()[:300]!r}"

    def _accepted(self, folder: Path, compiled: bool) -> str | None:
        if compiled:
            ran = run_command(self.work, _RUN, folder)
            # A tokenizer may make no tokens of the prompt.
            if ran.word not in ("0", "2"):
                return f"compiled into what does not run: {ran.word} {ran.detail}"
        ended = run_case(lambda: accepted_fault(folder, compiled) or "equal", LIMIT_S)
        return None if ended.word == "equal" else f"accepted, but {ended.word} {ended.detail}"

    def _expense(self, command: str, ended: Outcome) -> str | None:
        """Return what a case took beyond the good checkpoint, if that is too much; else None."""
        usual = self.usual[command]
        more_s, more_bytes = ended.processor_s - usual.processor_s, ended.peak_bytes - usual.peak_bytes
        self.most_s, self.most_bytes = max(self.most_s, more_s), max(self.most_bytes, more_bytes)
        if more_s > MORE_S:
            return f"took {more_s:.1f} s more than a good one"
        return f"took {more_bytes / 2**20:.0f} MiB more than a good one" if more_bytes > MORE_BYTES else None


def _discard(folder: Path) -> None:
    for path in folder.glob("*"):
        if not path.is_symlink() and stat.S_ISREG(path.stat().st_mode):
            path.chmod(0o644)
    shutil.rmtree(folder, ignore_errors=True)


def run(number: int | None, seconds: float | None, seed: int) -> Report:
    """Run cases until `number` or the time is up."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import_once()
    with tempfile.TemporaryDirectory(prefix="picompile-attack-") as name:
        found = Attack(Path(name))
        report = attack(found.case, number, seconds, seed)
    more = f"{max(found.most_s, 0.0):.1f} s and {max(found.most_bytes, 0) / 2**20:.0f} MiB"
    print(f"at most {more} beyond a good checkpoint")
    return report


if __name__ == "__main__":
    chosen = options(__doc__, 300)
    sys.exit(1 if run(chosen.number, chosen.seconds, chosen.seed).failures else 0)
