"""The files that contenders run: made when they are missing, kept in the work folder for the next run.

| file | made from |
| --- | --- |
| `reglu-1.3b-10` | `picompile synth`: shape and firing rate in percent |
| `reglu-1.3b-10.q4.learned` | `picompile compile`, again when the sources of the code generator have changed |
| `reglu-1.3b-10.q4_0.gguf` | gguf.py |
| `reglu-1.3b-10.q4_0.powerinfer.gguf` | the same, with predictors |
| `reglu-1.3b-10.q4.xml` | openvino_worker.py --export |
"""

import hashlib
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import ROOT, environment
from benchmarks.peers.engines import ENGINES
from benchmarks.peers.plan import Contender, Model

_CODEGEN = ROOT / "codegen" / "picompile_codegen"
# Tokens of a sequence in an artifact for many: their caches together are then those of one long sequence.
_BATCH_CONTEXT = 256


class LeftOutError(Exception):
    """A contender that cannot take part here; the text says why and what to do."""


@dataclass(frozen=True)
class Files:
    """A method for each kind of file that a record of `ENGINES` names.

    `target` is what picompile compiles for, `peer_python` where llama.cpp and OpenVINO are installed, and `programs`
    are the paths of built programs by the names of their engines. With `as_is`, artifacts that another state of the
    code generator made are taken.
    """

    work: Path
    target: str
    peer_python: str
    as_is: bool = False
    programs: Mapping[str, Path] = field(default_factory=dict)
    sources: str = field(default_factory=lambda: _sources())

    @property
    def options(self) -> dict[str, Any]:
        """The options that figures depend on, besides the sources."""
        programs = {name: str(path) for name, path in sorted(self.programs.items())}
        return {"target": self.target, "peer_python": self.peer_python, "programs": programs}

    def file(self, contender: Contender, model: Model) -> Path:
        """Return the file or folder that the contender runs; it is made if it is not there."""
        path: Path = getattr(self, ENGINES[contender.engine].file)(contender, model)
        return path

    def checkpoint(self, contender: Contender, model: Model) -> Path:
        folder = self.work / model.name
        if not folder.exists():
            _say(f"making {folder}")
            _picompile("synth", "--shape", model.shape, "--active", model.active, "--seed", 0, "-o", folder)
        return folder

    def artifact(self, contender: Contender, model: Model) -> Path:
        several = contender.sequences > 1
        suffix = f".s{contender.sequences}" if several else ""
        folder = self.work / f"{model.name}.{contender.format}.{contender.predictor}{suffix}"
        stamp, sources = folder.with_name(f"{folder.name}.sources"), f"{self.target} {self.sources}"
        if folder.exists() and (self.as_is or (stamp.exists() and stamp.read_text() == sources)):
            return folder
        _say(f"compiling {folder}")
        options = ["--context", _BATCH_CONTEXT, "--sequences", contender.sequences] if several else []
        _picompile(
            "compile", self.checkpoint(contender, model), "-o", folder, "--target", self.target,
            "--quant", contender.format, "--predictor", contender.predictor, "--accuracy-bound", "off",
            "--overwrite", *options,
        )  # fmt: skip
        stamp.write_text(sources)
        return folder

    def gguf(self, contender: Contender, model: Model, *kind: str) -> Path:
        file = self.work / ".".join((model.name, contender.format, *kind, "gguf"))
        if not file.exists():
            _say(f"making {file}")
            export = [self.checkpoint(contender, model), file, contender.format, *kind]
            _run(module(sys.executable, "gguf", *export))
        return file

    def powerinfer(self, contender: Contender, model: Model) -> Path:
        return self.gguf(contender, model, "powerinfer")

    def openvino(self, contender: Contender, model: Model) -> Path:
        file = self.work / f"{model.name}.{contender.format}.xml"
        if not file.exists():
            _say(f"making {file}")
            export = ["--export", self.checkpoint(contender, model), file, contender.format]
            _run(module(self.peer_python, "openvino_worker", *export))
        return file


def _sources() -> str:
    """Changes whenever the code generator does."""
    digest = hashlib.sha256()
    for path in sorted(path for path in _CODEGEN.rglob("*") if path.suffix in (".py", ".c")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def module(python: str, name: str, *arguments: object) -> list[str]:
    """Return the command of a module of this folder."""
    return [python, "-m", f"benchmarks.peers.{name}", *map(str, arguments)]


def _picompile(*arguments: object) -> None:
    _run([sys.executable, "-m", "picompile", *map(str, arguments)])


def _run(command: list[str]) -> None:
    finished = subprocess.run(command, capture_output=True, text=True, check=False, env=environment())
    if finished.returncode != 0:
        reason = (finished.stderr.strip().splitlines() or [f"ended with {finished.returncode}"])[-1]
        raise LeftOutError(f"{' '.join(command[1:3])}: {reason}")


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)
