"""A model as users name it: a Hugging Face folder, or a GGUF file."""

from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from picompile.errors import UsageError
from picompile.frontend.activation import with_activation
from picompile.frontend.gguf.parts import models_in, part_files
from picompile.frontend.gguf.tensor_types import MAGICS
from picompile.frontend.json_file import read_json_object
from picompile.frontend.stand_ins import refuse_stand_in

if TYPE_CHECKING:
    from picompile.frontend.gguf.model import GgufModel
    from picompile.frontend.tokenizer_files import TokenizerFiles


_NAMED_FILES = 8
_MODEL = "MODEL is a Hugging Face folder with config.json and *.safetensors, a GGUF file, or a name as ORG/REPO"


def require_model(model: Path) -> None:
    """Raise `UsageError` unless `model` exists and is a Hugging Face checkpoint, or is or holds one GGUF file."""
    if not model.exists():
        raise UsageError(f"{model}: no such file or folder; {_MODEL}")
    if model.is_file():
        with model.open("rb") as opened:
            if opened.read(4) not in MAGICS:
                refuse_stand_in(model, UsageError)
                raise UsageError(f"{model}: neither a folder nor a GGUF file; {_MODEL}")
        return
    if not model.is_dir():
        raise UsageError(f"{model}: neither a folder nor a GGUF file; {_MODEL}")
    if not (model / "config.json").is_file():
        found = models_in(model)
        if len(found) > 1:
            names = ", ".join(file.name for file in found[:_NAMED_FILES])
            more = f" and {len(found) - _NAMED_FILES} more" if len(found) > _NAMED_FILES else ""
            raise UsageError(f"{model}: several GGUF files are in it; name one of {names}{more}")
        if found:
            return require_model(found[0])
        raise UsageError(f"{model}: no config.json in it; {_MODEL}")


def holds_model(folder: Path) -> bool:
    """Return whether a folder looks like a checkpoint, or holds GGUF files."""
    return (folder / "config.json").exists() or bool(models_in(folder))


def gguf_file(model: Path) -> Path | None:
    """Return the GGUF file that `model` is, or the one that a folder without config.json holds; None without one.

    Of a model in several files it is the first.
    """
    if model.is_file():
        return model
    if not model.is_dir() or (model / "config.json").exists():
        return None
    found = models_in(model)
    return found[0] if len(found) == 1 else None


def folder_name(folder: Path) -> str:
    """Return what a model in `folder` is called: the folder's name, or its repository's in a cache of the hub.

    There a model lies in `models--ORG--REPO/snapshots/COMMIT`.
    """
    found = folder.resolve()
    repository = found.parents[1].name if len(found.parents) > 1 else ""
    if found.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.rpartition("--")[2]
    return found.name


def is_gguf(model: Path) -> bool:
    """Return whether `model` is a GGUF file, or a folder that stands for one."""
    return gguf_file(model) is not None


def read_config(model: Path, activation: str | None = None) -> dict[str, Any]:
    """Return the contents of config.json, or what a GGUF file has in its place.

    With an `activation` they name that one: every reader of a model takes its config from here. A quantization config
    that stands in a file beside it is put in. Raises `UnsupportedModelError`, in one line, for what is damaged, and
    what `with_activation` raises.
    """
    raw = opened_gguf(model).config if is_gguf(model) else with_quantization(model, read_json_object(model / CONFIG))
    return with_activation(raw, activation)


def opened_gguf(model: Path) -> "GgufModel":
    """Return the model in a GGUF file, which is read once as long as it does not change; raises as `open_gguf` does."""
    file = gguf_file(model) or model
    # The links of a hub's cache point to files of other names: those of the parts stand beside the link.
    status = [part.stat() for part in part_files(file) if part.exists()]
    return _opened(file.absolute(), tuple((each.st_mtime_ns, each.st_size) for each in status))


CONFIG = "config.json"
# Files beside config.json that had the quantization config before it did, and the method that wrote each: AutoGPTQ's,
# AutoAWQ's and ModelOpt's. The last two have no `quant_method`.
QUANTIZATION_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq", "hf_quant_config.json": "modelopt"}


def with_quantization(folder: Path, raw: dict[str, Any]) -> dict[str, Any]:
    """Return `raw`, the contents of config.json, with the quantization config of its text or of a file beside it.

    Its own comes first. Raises `UnsupportedModelError` for a file that is damaged.
    """
    if raw.get("quantization_config") or raw.get("compression_config"):
        return raw
    text = raw.get("text_config")
    if isinstance(text, dict) and text.get("quantization_config"):
        return raw | {"quantization_config": text["quantization_config"]}
    for name, method in QUANTIZATION_FILES.items():
        if (folder / name).is_file():
            content = read_json_object(folder / name)
            inner = content.get("quantization")  # ModelOpt's stands beside the name of its program
            return raw | {
                "quantization_config": {"quant_method": method, **(inner if isinstance(inner, dict) else content)}
            }
    return raw


@lru_cache(maxsize=1)
def _opened(file: Path, changed: tuple[tuple[int, int], ...]) -> "GgufModel":
    from picompile.frontend.gguf.model import open_gguf

    return open_gguf(file)


@lru_cache(maxsize=1)
def gguf_tokenizer(opened: "GgufModel") -> "TokenizerFiles":
    """Return the tokenizer in a GGUF file; raises as `read_gguf_tokenizer` does."""
    from picompile.frontend.gguf.tokenizer import read_gguf_tokenizer

    return read_gguf_tokenizer(opened.header)
