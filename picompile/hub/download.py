"""The download of a model by its name, into the cache that all programs of Hugging Face share.

`huggingface_hub` asks the hub, takes up transfers that break off, and knows tokens, mirrors (HF_ENDPOINT) and folders
(HF_HOME). Added to that: only the files that are needed are loaded, the disk is checked before and every content
afterwards, and whatever goes wrong is one line.
"""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from picompile.errors import UsageError
from picompile.hub.listing import Choice, RepoFile, choose_files
from picompile.hub.names import ModelName
from picompile.output.place import require_disk_space
from picompile.progress import Progress
from picompile.quantities import format_bytes

if TYPE_CHECKING:
    from huggingface_hub.hf_api import RepoSibling

_CHUNK_BYTES = 2**22


@dataclass(frozen=True)
class Download:
    """A model whose files are on this machine.

    Attributes:
        name: what was asked for.
        commit: the commit that its revision stood for.
        path: the GGUF file, or the folder with config.json.
        files: the model's files on this machine.
    """

    name: ModelName
    commit: str
    path: Path
    files: tuple[Path, ...]


def download(name: ModelName, progress: Progress, memory_bytes: int) -> Download:
    """Return the model's files, after loading those that are missing.

    Where the hub cannot be reached, files of an earlier download are used, and the user is told.

    Args:
        name: the model.
        progress: shows the transfer in bytes.
        memory_bytes: this machine's memory, for the choice among several GGUF files.

    Raises:
        UsageError: the hub has no such model, or does not give it to this user, or cannot be reached; a file arrived
            damaged.
        UnsupportedModelError, DoesNotFitError: as `choose_files`; the disk is too small.
    """
    listed = _listing(name, progress)
    if isinstance(listed, Exception):
        return _downloaded_before(name, memory_bytes, listed, progress)
    commit, files = listed
    choice = choose_files(name, files, memory_bytes)
    missing = [file for file in choice.files if _cached(name, commit, file.path) is None]
    if missing:
        _load(name, commit, missing, progress)
    found = _made(name, commit, choice)
    _check_contents(name, choice.files, found.files, progress)
    return found


def download_config(name: ModelName, progress: Progress) -> Path | None:
    """Return config.json of the model, and nothing else of it; None if the repository has none, or no answer came.

    Raises:
        UsageError: the hub has no such model, or does not give it to this user.
    """
    listed = _listing(name, progress)
    if isinstance(listed, Exception):
        return None
    commit, files = listed
    for file in files:
        if file.path == "config.json":
            if _cached(name, commit, file.path) is None:
                _load(name, commit, [file], progress)
            found = _require_cached(name, commit, file.path)
            _check_contents(name, [file], [found], progress)
            return found
    return None


def _listing(name: ModelName, progress: Progress) -> tuple[str, list[RepoFile]] | Exception:
    """Return the commit of the revision and the repository's files; the error if the hub cannot be reached.

    Raises `UsageError` for what the hub refuses.
    """
    with _explained(name), progress.step(f"find {name}"):
        from huggingface_hub import HfApi

        try:
            info = HfApi().model_info(name.repo, revision=name.revision, files_metadata=True)
        except Exception as error:
            if _is_unreachable(error):
                return error
            raise
    return str(info.sha), [_repo_file(each) for each in info.siblings or ()]


def _repo_file(sibling: "RepoSibling") -> RepoFile:
    if sibling.lfs is not None:
        return RepoFile(sibling.rfilename, sibling.lfs.size, sha256=sibling.lfs.sha256)
    return RepoFile(sibling.rfilename, sibling.size or 0, sha1=sibling.blob_id)


def _downloaded_before(name: ModelName, memory_bytes: int, why: Exception, progress: Progress) -> Download:
    """Return the model from files that were downloaded before. Raise `UsageError` if they are not there."""
    from huggingface_hub import constants

    folder = Path(constants.HF_HUB_CACHE) / f"models--{name.repo.replace('/', '--')}"
    reference = folder / "refs" / name.revision
    commit = reference.read_text(encoding="utf-8").strip() if reference.is_file() else name.revision
    snapshot = folder / "snapshots" / commit
    files = [
        RepoFile(str(path.relative_to(snapshot)), path.stat().st_size)
        for path in sorted(snapshot.rglob("*"))
        if path.is_file()
    ]
    if not files:
        raise UsageError(f"{name}: {_hub()} cannot be reached ({_first_line(why)}), and it was not downloaded before")
    choice = choose_files(name, files, memory_bytes)
    progress.say(f"{name}: {_hub()} cannot be reached, so the files that were downloaded before are used")
    return _made(name, commit, choice)


def _load(name: ModelName, commit: str, files: Sequence[RepoFile], progress: Progress) -> None:
    """Load files from the hub."""
    from huggingface_hub import constants, hf_hub_download
    from huggingface_hub.utils import logging

    # Its warnings say that it takes up a transfer again.
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    total = sum(file.size_bytes for file in files)
    message = f"{name}: {{needed}} to download, and {{folder}} has {{free}} free; HF_HOME names another place"
    require_disk_space(Path(constants.HF_HUB_CACHE) / "models", total, message)
    progress.say(f"downloading {name}: {format_bytes(total)} in {len(files)} file{'s' if len(files) > 1 else ''}")
    with progress.step(f"download {name}", total) as advance:
        for file in files:
            with _explained(name):
                hf_hub_download(name.repo, file.path, revision=name.revision, tqdm_class=_bar(advance))
            if _cached(name, commit, file.path) is None:
                raise UsageError(f"{name}: the model changed on the hub while it was downloaded; run the command again")


def remove_downloads(paths: Iterable[Path]) -> int:
    """Remove downloaded files, and return how many bytes that freed. A file that is gone already counts nothing."""
    freed = 0
    for path in paths:
        with suppress(OSError):
            content = path.resolve()
            size = content.stat().st_size
            path.unlink()
            content.unlink(missing_ok=True)
            freed += size
    return freed


def _check_contents(name: ModelName, files: Sequence[RepoFile], paths: Sequence[Path], progress: Progress) -> None:
    """Remove a file and raise `UsageError` if its content is not what the hub says.

    Files of earlier downloads are read too: such a download may have ended before this.
    """
    with progress.step("check files", sum(file.size_bytes for file in files)) as advance:
        for file, path in zip(files, paths, strict=True):
            _check_content(name, file, path, advance)


def _check_content(name: ModelName, file: RepoFile, path: Path, advance: Callable[[int], None]) -> None:
    if file.sha256 is not None:
        expected, digest = file.sha256, hashlib.sha256()
    elif file.sha1 is not None:
        expected, digest = file.sha1, hashlib.sha1(f"blob {file.size_bytes}\0".encode(), usedforsecurity=False)
    else:
        return
    with path.open("rb") as opened:
        while chunk := opened.read(_CHUNK_BYTES):
            digest.update(chunk)
            advance(len(chunk))
    if digest.hexdigest() != expected:
        remove_downloads([path])
        raise UsageError(f"{name}: {file.path} arrived damaged and was removed; run the command again")


def _made(name: ModelName, commit: str, choice: Choice) -> Download:
    paths = tuple(_require_cached(name, commit, file.path) for file in choice.files)
    if choice.gguf is not None:
        return Download(name, commit, paths[0], paths)
    return Download(name, commit, next(path.parent for path in paths if path.name == "config.json"), paths)


def _require_cached(name: ModelName, commit: str, path: str) -> Path:
    found = _cached(name, commit, path)
    if found is None:
        raise UsageError(f"{name}: {path} is missing from the files that were downloaded; run the command again")
    return found


def _cached(name: ModelName, commit: str, path: str) -> Path | None:
    """Return where a file of the repository lies on this machine, None if it was not downloaded."""
    from huggingface_hub import try_to_load_from_cache

    found = try_to_load_from_cache(name.repo, path, revision=commit)
    return Path(found) if isinstance(found, str) else None


def _bar(advance: Callable[[int], None]) -> Any:
    """Return a class that `huggingface_hub` takes for a progress bar, and that counts towards a step of ours."""
    from huggingface_hub.utils.tqdm import tqdm

    base: Any = tqdm

    def begin(bar: Any, *values: Any, initial: int = 0, **facts: Any) -> None:
        base.__init__(bar, *values, **(facts | {"disable": True}))
        advance(initial)

    def update(bar: Any, n: float | None = 1) -> None:
        advance(int(n or 0))

    return type("Bar", (base,), {"__init__": begin, "update": update})


@contextmanager
def _explained(name: ModelName) -> Iterator[None]:
    """Raise `UsageError`, in one line, for what the hub or the network refuses."""
    from huggingface_hub import errors

    try:
        yield
    except errors.GatedRepoError as error:
        raise UsageError(
            f"{name}: the model is gated; ask for it at {_hub()}/{name.repo}, then run hf auth login or set HF_TOKEN"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise UsageError(
            f"{name}: no such file or folder here, and no such model at {_hub()}; check the name, and if the model is "
            "private, run hf auth login or set HF_TOKEN"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise UsageError(f"{name}: {name.repo} has no branch, tag or commit {name.revision}") from error
    except errors.HfHubHTTPError as error:
        raise UsageError(f"{name}: {_hub()} answers with an error: {_first_line(error)}") from error
    except Exception as error:
        if not _is_unreachable(error):
            raise
        raise UsageError(
            f"{name}: {_hub()} broke the connection: {_first_line(error)}; run the command again"
        ) from error


def _is_unreachable(error: Exception) -> bool:
    """Return whether an error means that no answer came: no network, no name server, offline mode, a cut connection."""
    from huggingface_hub import errors

    if isinstance(error, errors.HfHubHTTPError):
        return error.response is not None and error.response.status_code >= 500
    # The HTTP library differs between versions of huggingface_hub, and its root is a base of the hub's own error.
    roots = [base for base in errors.HfHubHTTPError.__mro__ if base.__name__ in ("HTTPError", "RequestException")]
    return isinstance(error, (*roots, ConnectionError, errors.LocalEntryNotFoundError))


def _hub() -> str:
    from huggingface_hub import constants

    return constants.ENDPOINT


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
