"""Settings of all tests, and models and artifacts that are too expensive to make more than once a run."""

import fcntl
import gc
import os
import random
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, settings

from helpers.command_server import command_server
from helpers.compiled import FOLDER_VARIABLE as COMPILED
from helpers.share import add_options, draw_share
from helpers.slow_marks import settle_slow_marks
from helpers.support import (
    ALL_TARGETS,
    CPU_TARGET,
    HYPOTHESIS_PROFILE,
    BuildOnce,
    Cli,
    Ended,
    compile_for_test,
    save_tiny_llama,
)
from helpers.times import FOLDER_VARIABLE as TIMES
from helpers.times import Times

# The same examples in every run, so that a failure in CI can be had again; `make fuzz` looks for new ones.
# No deadline: the first example of a test pays for imports and compilations.
# Nor are failing examples made smaller there: with graphs that takes minutes.
settings.register_profile(
    "ci",
    derandomize=True,
    deadline=None,
    print_blob=True,
    phases=(Phase.explicit, Phase.generate),
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile("mutation", settings.get_profile("ci"))
settings.register_profile(
    "fuzz",
    settings.get_profile("ci"),
    derandomize=False,
    max_examples=60,
    phases=tuple(Phase),
    suppress_health_check=list(HealthCheck),
)
settings.load_profile(HYPOTHESIS_PROFILE)

# Whether the running test proves what it compiles.
_PROVES = pytest.StashKey[bool]()

# Every test process has its core; threads of torch would only take the others'.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Use a cache folder of this run instead of the user's; all test processes share compiled kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        patch.setenv("PICOMPILE_CACHE", str(_shared(tmp_path_factory) / "objects"))
        patch.setenv(COMPILED, str(_shared(tmp_path_factory) / "compiled"))
        for name in ("PICOMPILE_THREADS", "PICOMPILE_MODELS", "PICOMPILE_MODELS_BUDGET"):
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(scope="session", autouse=True)
def _code_for_this_machine() -> Iterator[None]:
    """Artifacts have the code that is used here, and no other: both take seconds a model, and show no more.

    Tests of several instruction sets ask for `every_isa`. Prompts in bfloat16 would be too far from eager PyTorch; they
    have tests of their own.
    """
    from picompile.machine.targets import TARGETS, find_native_target
    from picompile_codegen.build.isa import BF16_BASE, ISAS

    native = find_native_target()
    with pytest.MonkeyPatch.context() as patch:
        if native is not None:
            isas = tuple(BF16_BASE if ISAS[name].prompts_in_bf16 else name for name in native.isas)
            rows = [CPU_TARGET, *(row for row in TARGETS.values() if row.back_end)]
            for row in rows:
                patch.setitem(TARGETS, row.name, replace(row, isas=isas))
        yield


@pytest.fixture(scope="session", autouse=True)
def _few_proofs(request: pytest.FixtureRequest) -> Iterator[None]:
    """Compilations of fast tests prove no model: for a proof it is captured again, which takes as long as all else.

    Slow tests and those that ask for `proofs` have it; tests/frontend/test_proof.py has the proof itself.
    """
    from picompile.frontend import hf

    prove, stash = hf.prove, request.config.stash
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hf, "prove", lambda *model: prove(*model) if stash[_PROVES] else None)
        yield


@pytest.fixture
def proofs() -> None:
    """Every captured model is compared with its class, as users' are. Fixtures of all scopes see it: see the hook."""


@pytest.fixture
def every_isa(monkeypatch: pytest.MonkeyPatch) -> None:
    """The targets as users have them."""
    from picompile.machine.targets import TARGETS

    for name, row in ALL_TARGETS.items():
        monkeypatch.setitem(TARGETS, name, row)


def pytest_collection_finish() -> None:
    """Leave what the modules of tests hold, millions of objects, out of every later search for garbage.

    Searching less often as well would let engines pile up that only garbage refers to, until no code can be mapped.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Have a test draw the same in every run, but in `make fuzz`; and say whether it proves what it compiles."""
    import torch

    is_slow, asked = item.get_closest_marker("slow") is not None, "proofs" in getattr(item, "fixturenames", ())
    item.config.stash[_PROVES] = is_slow or asked
    if HYPOTHESIS_PROFILE != "fuzz":
        seed = zlib.crc32(item.nodeid.encode())
        random.seed(seed)
        torch.manual_seed(seed)


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options of the share of slow tests that is drawn."""
    add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    """Measure where the processor's time goes, if a folder for that is given."""
    if folder := os.environ.get(TIMES):
        config.pluginmanager.register(Times(Path(folder)))


# Before pytest chooses tests by marker.
@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Settle the slow marks, and begin with what takes minutes: no process is left alone with it at the end."""
    settle_slow_marks(config, items)
    draw_share(config, items)
    items.sort(key=lambda item: item.path.name not in ("test_docs.py", "test_plugin.py"))


def _shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of this run that all test processes share; of several runs, where `.ci/run` says so."""
    if given := os.environ.get("PICOMPILE_TEST_SHARED"):
        Path(given).mkdir(parents=True, exist_ok=True)
        return Path(given)
    base = tmp_path_factory.getbasetemp()
    # Each process of pytest-xdist has a base of its own, side by side.
    shared = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "shared"
    shared.mkdir(exist_ok=True)
    return shared


@pytest.fixture(scope="session")
def build_once(tmp_path_factory: pytest.TempPathFactory) -> BuildOnce:
    """`build_once(name, make)`: the folder that `make(folder)` filled, made by one test process and used by all."""
    shared = _shared(tmp_path_factory)

    def build(name: str, make: Callable[[Path], None]) -> Path:
        with (shared / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not (shared / f"{name}.done").exists():
                make(shared / name)
                (shared / f"{name}.done").touch()
        return shared / name

    return build


@pytest.fixture(scope="session")
def tiny_model(build_once: BuildOnce) -> Path:
    """A Hugging Face folder that takes seconds to compile. Tests must not change it."""
    return build_once("tiny-model", save_tiny_llama)


@pytest.fixture(scope="session")
def tiny_artifact(build_once: BuildOnce, tiny_model: Path) -> Path:
    """`tiny_model`, compiled with a context of 64 and f16 weights; predictor `exact`. Tests must not change it."""
    return build_once("tiny-artifact", lambda folder: compile_for_test(tiny_model, folder, quant="f16", context=64))


@pytest.fixture(scope="session")
def commands() -> Iterator[Path]:
    """A folder with the command `picompile`, which begins at once: see command_server.py."""
    with tempfile.TemporaryDirectory(prefix="picompile-commands-") as folder, command_server(Path(folder)) as found:
        yield found


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """`cli("run", artifact, "-p", "text", stdin="…")`: the command line in this process."""
    import io

    from picompile.cli import main

    def run(*arguments: object, stdin: str = "") -> Ended:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(stdin.encode()), encoding="utf-8"))
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Ended(code, captured.out, captured.err)

    return run
