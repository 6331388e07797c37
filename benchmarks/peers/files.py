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
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks import ROOT
from benchmarks.peers.plan import Contender, Model
from benchmarks.peers.powerinfer_build import build

_CODEGEN = ROOT / "codegen" / "picompile_codegen"
# Tokens of a sequence in an artifact for many: their caches together are then those of one long sequence.
_BATCH_CONTEXT = 256


class LeftOutError(Exception):
    """A contender that cannot take part here; the text says why and what to do."""


@dataclass(frozen=True)
class Files:
    """`target` is what picompile compiles for, `peer_python` where llama.cpp and OpenVINO are installed, `powerinfer`
    the folder of PowerInfer's sources.

    With `as_is`, artifacts that another state of the code generator made are taken.
    """

    work: Path
    target: str
    peer_python: str
    as_is: bool = False
    powerinfer: Path | None = None
    sources: str = field(default_factory=lambda: _sources())

    @property
    def options(self) -> dict[str, str | None]:
        """The options that figures depend on, besides the sources."""
        powerinfer = None if self.powerinfer is None else str(self.powerinfer.resolve())
        return {"target": self.target, "peer_python": self.peer_python, "powerinfer": powerinfer}

    def command(self, contender: Contender, model: Model) -> list[str]:
        """The command of the contender's worker. Its files are there when this returns."""
        if contender.engine == "picompile":
            return [*_module(sys.executable, "picompile_worker"), str(self._artifact(contender, model))]
        if contender.engine == "llama.cpp":
            return [*_module(self.peer_python, "llama_worker"), str(self._gguf(contender, model))]
        if contender.engine == "PowerInfer":
            # The library first: who has none need not wait for the file.
            command = [*_module(self.peer_python, "powerinfer_worker"), str(self._powerinfer_library())]
            return [*command, str(self._gguf(contender, model, "powerinfer"))]
        if contender.engine == "OpenVINO":
            return [*_module(self.peer_python, "openvino_worker"), str(self._openvino(contender, model))]
        return [*_module(sys.executable, "torch_worker"), str(self.checkpoint(model)), contender.format]

    def checkpoint(self, model: Model) -> Path:
        folder = self.work / model.name
        if not folder.exists():
            _say(f"making {folder}")
            _picompile("synth", "--shape", model.shape, "--active", model.active, "--seed", 0, "-o", folder)
        return folder

    def _artifact(self, contender: Contender, model: Model) -> Path:
        several = contender.sequences > 1
        suffix = f".s{contender.sequences}" if several else ""
        folder = self.work / f"{model.name}.{contender.format}.{contender.predictor}{suffix}"
        stamp, sources = folder.with_name(f"{folder.name}.sources"), f"{self.target} {self.sources}"
        if folder.exists() and (self.as_is or (stamp.exists() and stamp.read_text() == sources)):
            return folder
        _say(f"compiling {folder}")
        options = ["--context", _BATCH_CONTEXT, "--sequences", contender.sequences] if several else []
        _picompile(
            "compile", self.checkpoint(model), "-o", folder, "--target", self.target, "--quant", contender.format,
            "--predictor", contender.predictor, "--gate", "off", "--force", *options,
        )  # fmt: skip
        stamp.write_text(sources)
        return folder

    def _gguf(self, contender: Contender, model: Model, *kind: str) -> Path:
        file = self.work / ".".join((model.name, contender.format, *kind, "gguf"))
        if not file.exists():
            _say(f"making {file}")
            export = [*_module(sys.executable, "gguf"), str(self.checkpoint(model)), str(file)]
            _run([*export, contender.format, *kind])
        return file

    def _powerinfer_library(self) -> Path:
        if self.powerinfer is None:
            raise LeftOutError("name the folder of its sources with --powerinfer")
        try:
            return build(self.powerinfer, "avx2" if self.target == "cpu-avx2" else "native")
        except (OSError, subprocess.CalledProcessError) as error:
            raise LeftOutError(f"it cannot be built: {error}") from error

    def _openvino(self, contender: Contender, model: Model) -> Path:
        file = self.work / f"{model.name}.{contender.format}.xml"
        if not file.exists():
            _say(f"making {file}")
            export = ["--export", str(self.checkpoint(model)), str(file), contender.format]
            _run([*_module(self.peer_python, "openvino_worker"), *export])
        return file

    def remove(self, model: Model) -> None:
        """All files of a model."""
        for path in [self.work / model.name, *self.work.glob(f"{model.name}.*")]:
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def _sources() -> str:
    """Changes whenever the code generator does."""
    digest = hashlib.sha256()
    for path in sorted(path for path in _CODEGEN.rglob("*") if path.suffix in (".py", ".c")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def _module(python: str, name: str) -> list[str]:
    return [python, "-m", f"benchmarks.peers.{name}"]


def _picompile(*arguments: object) -> None:
    _run([sys.executable, "-m", "picompile", *map(str, arguments)])


def _run(command: list[str]) -> None:
    finished = subprocess.run(command, capture_output=True, text=True, check=False)
    if finished.returncode != 0:
        reason = (finished.stderr.strip().splitlines() or [f"ended with {finished.returncode}"])[-1]
        raise LeftOutError(f"{' '.join(command[1:3])}: {reason}")


def _say(what: str) -> None:
    print(what, file=sys.stderr, flush=True)
