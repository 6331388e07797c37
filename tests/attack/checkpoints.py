"""Mutated checkpoints through the command line: refused in one line, or compiled as transformers computes them.

    python tests/attack/checkpoints.py [--number 300] [--seconds 600] [--seed 0]

Each case damages a copy of a small good checkpoint (mutations.py) and compiles or plans it in a forked child, with a
limit of time. A refusal is exit code 2 or 3, one line, nothing left behind, and no more than 10 s of processor time and
1 GiB beyond what the good checkpoint takes. What is not refused must be what eager transformers makes of the folder.
"""

import importlib
import json
import os
import random
import resource
import shutil
import signal
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from attack_report import Report, attack, options
from mutations import mutate

MORE_S = 10.0
MORE_BYTES = 1 << 30
LIMIT_S = 120.0
LIMIT_BYTES = 16 << 30
_POLL_S = 0.01
# Fields that say nothing of a model's logits, and that transformers refuses for some values.
EFFECTLESS = ("auto_map", "dtype", "id2label", "num_labels", "attn_implementation", "to_dict", "__class__")
_IMPORTED = (
    "transformers.models.llama.modeling_llama",
    "picompile.cli.app",
    "picompile.compile",
    "picompile.placement.planning",
    "picompile_codegen.lowering.lower",
)
_COMPILE = (
    "compile",
    "MODEL",
    "-o",
    "OUT",
    "--target",
    "cpu",
    "--quant",
    "f16",
    "--predictor",
    "none",
    "--context",
    "16",
)
_RUN = ("run", "OUT", "-p", "ab", "-n", "2")
_PLAN = ("plan", "MODEL", "--firing", "opt", "--target", "cpu", "--context", "16")


@dataclass(frozen=True)
class Ended:
    """How a child ended. `code` is None for one that was killed after `LIMIT_S`."""

    code: int | None
    stderr: str
    processor_s: float
    peak_bytes: int


def save_good_checkpoint(folder: Path, shard: str = "1GB") -> None:
    """A Llama of two layers with random weights in float32, a tokenizer of bytes, and its generation defaults."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=260,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        hidden_act="relu",
        max_position_embeddings=64,
        bos_token_id=256,
        eos_token_id=257,
        initializer_range=0.2,
    )
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size=shard)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 257}))


def mutated(good: Path, sharded: Path, folder: Path, seed: int) -> str:
    """Makes the checkpoint of a case in `folder`; what was done to it."""
    shutil.copytree(random.Random(f"shards {seed}").choice((good, good, sharded)), folder)
    return mutate(folder, seed)


def refusal_fault(code: int | None, stderr: str) -> str | None:
    """Return the fault in a command's refusal of a checkpoint; None if the refusal is right."""
    if code not in (2, 3):
        return f"ended with {code}"
    if not stderr.startswith("error: ") or stderr.count("\n") != 1:
        return "is not refused in one line"
    return "says internal error" if "internal error" in stderr else None


def accepted_fault(folder: Path, compiled: bool) -> str | None:
    """Return why a mutated checkpoint should have been refused: transformers refuses it, or computes other logits.

    A plan reads no weights, and cannot refuse what is in them.
    """
    import torch

    from picompile.errors import UnsupportedModelError
    from picompile.frontend import load_model
    from picompile.frontend.config import quiet_transformers
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


# ------------------------------------------------------------------------------------------------------ one process


def import_once() -> None:
    """Import what takes seconds. Nothing is computed: torch's threads would not outlive the fork."""
    for name in _IMPORTED:
        importlib.import_module(name)
    import transformers

    transformers.utils.logging.disable_progress_bar()


def run_child(work: Path, body: Callable[[], int]) -> Ended:
    """Runs `body` in a forked child, with its streams in files under `work`."""
    child = os.fork()
    if not child:
        code = 70
        try:
            os.setsid()
            for number, name in ((1, "stdout.txt"), (2, "stderr.txt")):
                os.dup2(os.open(work / name, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
            code = body()
            sys.stdout.flush()
            sys.stderr.flush()
        finally:
            os._exit(code)
    end = time.monotonic() + LIMIT_S
    while True:
        pid, status, used = os.wait4(child, os.WNOHANG)
        if pid:
            break
        if time.monotonic() > end:
            os.killpg(child, signal.SIGKILL)
            _, status, used = os.wait4(child, 0)
            return Ended(None, "", used.ru_utime + used.ru_stime, used.ru_maxrss << 10)
        time.sleep(_POLL_S)
    stderr = (work / "stderr.txt").read_text(errors="replace")
    return Ended(os.waitstatus_to_exitcode(status), stderr, used.ru_utime + used.ru_stime, used.ru_maxrss << 10)


def run_command(work: Path, words: Sequence[str], folder: Path) -> Ended:
    """Runs `picompile` with `words` in a child."""
    named = {"MODEL": str(folder), "OUT": str(work / "out" / "artifact")}
    (work / "out").mkdir(exist_ok=True)

    def body() -> int:
        import torch

        from picompile.cli import main

        # Keeps the machine alive; what is used below it is measured. Files that are mapped do not count.
        resource.setrlimit(resource.RLIMIT_DATA, (LIMIT_BYTES, LIMIT_BYTES))
        torch.set_num_threads(1)
        return main([named.get(word, word) for word in words])

    return run_child(work, body)


# ---------------------------------------------------------------------------------------------------------- attack


class Attack:
    """Good checkpoints in a folder, and what commands take on them."""

    def __init__(self, work: Path) -> None:
        self.work, self.good, self.sharded = work, work / "good", work / "sharded"
        os.environ["PICOMPILE_CACHE"] = str(work / "cache")
        # In a child, for what torch computes leaves threads behind.
        for folder, shard in ((self.good, "1GB"), (self.sharded, "20KB")):
            made = run_child(work, lambda folder=folder, shard=shard: save_good_checkpoint(folder, shard) or 0)
            if made.code != 0:
                raise RuntimeError(f"no good checkpoint: {made.stderr}")
        self.usual: dict[str, Ended] = {}
        for words in (_COMPILE, _PLAN):
            # Twice: the first fills the cache of kernels.
            for _ in range(2):
                ended = run_command(work, words, self.good)
                shutil.rmtree(work / "out")
            if ended.code != 0:
                raise RuntimeError(f"the good checkpoint is refused: {ended.stderr}")
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
            if ended.code == 0:
                way, wrong = "accepted", self._accepted(folder, compiled=words is _COMPILE)
            else:
                way = "refused"
                wrong = refusal_fault(ended.code, ended.stderr) or (f"left {left}" if left else None)
            wrong = wrong or self._expense(words[0], ended)
        finally:
            _discard(folder)
            shutil.rmtree(self.work / "out", ignore_errors=True)
        print(f"{seed}: {name}: {way} in {ended.processor_s:.1f} s: {ended.stderr.strip()[:140]}", flush=True)
        return way, None if wrong is None else f"{name}, {words[0]}: {wrong}: {ended.stderr.strip()[:300]!r}"

    def _accepted(self, folder: Path, compiled: bool) -> str | None:
        if compiled:
            ran = run_command(self.work, _RUN, folder)
            # A tokenizer may make no tokens of the prompt.
            if ran.code not in (0, 2):
                return f"compiled into what does not run: {ran.stderr}"

        def body() -> int:
            wrong = accepted_fault(folder, compiled)
            print(wrong or "", file=sys.stderr, end="")
            return 1 if wrong else 0

        ended = run_child(self.work, body)
        return None if ended.code == 0 else f"accepted, but {ended.stderr or f'comparing ended with {ended.code}'}"

    def _expense(self, command: str, ended: Ended) -> str | None:
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


def run(seconds: float | None, number: int | None, seed: int | None) -> Report:
    """Cases until `number` or the time is up."""
    os.environ["OMP_NUM_THREADS"] = "1"
    import_once()
    with tempfile.TemporaryDirectory(prefix="picompile-attack-") as name:
        found = Attack(Path(name))
        report = attack(found.case, seconds, number, seed, "tests/attack/checkpoints.py")
    more = f"{max(found.most_s, 0.0):.1f} s and {max(found.most_bytes, 0) / 2**20:.0f} MiB"
    print(f"at most {more} beyond a good checkpoint")
    return report


if __name__ == "__main__":
    chosen = options(__doc__)
    sys.exit(1 if run(chosen.seconds, chosen.number, chosen.seed).failures else 0)
