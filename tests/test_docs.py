"""The documentation is true: every command in it runs, every link leads somewhere, and its Python works."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from helpers.powerinfer_files import Sizes, random_predictors, write_gguf
from helpers.support import BUNDLED_MODEL, ROOT

DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
    *sorted((ROOT / "docs").glob("*.md")),
]

# Architecture decision records have links, but no commands to run.
ADRS = ROOT / "docs" / "adr"
ADR_INDEX = ADRS / "README.md"
LINKED = [*DOCUMENTS, *sorted(ADRS.glob("*.md"))]

# Needs its files to be written first: a test of its own.
TUTORIAL = ROOT / "docs" / "write_a_pass.md"

# Starts servers for its commands: tests/deploy/test_serving_guide.py runs them.
SERVING = ROOT / "docs" / "serving.md"

# Not run here, and why.
EXEMPT = {
    "python benchmarks/prompt_counts.py --shape llama-70b --target 4090": "takes a minute; its parts run in "
    "tests/benchmarks/test_benchmarks_prompt_counts.py",
    "make demo": "makes a virtual environment and downloads torch; what it then runs is what the other commands run",
    "make test": "runs this test",
    "make test-slow": "runs this test",
    "make test-all": "runs this test",
    "make fuzz": "runs the tests for long",
    "make format": "rewrites the sources",
    "make lint": "a part of `make test`",
    "make coverage": "runs the tests, for longer",
    "make docs": "installs MkDocs; test_the_site_is_built builds the site where it is installed",
    "make constraints": "downloads every package",
    "make test CONSTRAINTS=": "downloads packages and runs this test",
    "make bench": "takes 7 GB of disk and some minutes",
    "pip install ./runtime": "downloads packages",
    "pip install 'picompile[testing]'": "downloads packages",
    "python benchmarks/passes.py --shape reglu-1.3b --layers 12,24,48,96": "takes minutes, and a quiet machine",
    "pip install .": "run, in a folder of its own, by the test of the tutorial",
    "picompile bench build/bench/reglu-1.3b-10.q4.learned -p 128 -n 32 -r 3": "needs an artifact of 800 MB",
    "python benchmarks/threads.py build/bench/reglu-1.3b-10.q4.learned --rounds 5": "needs an artifact of 800 MB",
    "pip install 'picompile[gguf]'": "downloads packages",
    "pip install './runtime[serve]'": "downloads packages",
    "pip install 'lm-eval[api]==0.4.13' transformers": "downloads packages",
    "pip install 'picompile[gguf,report]'": "downloads packages",
    "picompile compile SmolLM2-135M-Instruct.Q4_1.gguf -o build/smollm2 --quant q8": "needs a file of 93 MB",
    "picompile eval build/smollm2 --text tests/data/heldout.txt --window 512 -n 8192": "needs a file of 93 MB",
    "pip install 'picompile[cuda]'": "downloads packages",
    **dict.fromkeys(
        (
            "python benchmarks/peers.py --work build/bench --peer-python ~/peers/bin/python --sweeps prefill --quick",
            "python benchmarks/peers.py --work build/bench --peer-python ~/peers/bin/python --sweeps context batch "
            "--quick --rounds 3",
        ),
        "needs llama.cpp and OpenVINO; tests/benchmarks/ has all of its parts",
    ),
    "python benchmarks/peers.py --work build/bench --peer-python ~/peers/bin/python --powerinfer PowerInfer "
    "--sweeps decode prefill --quick": "needs the peers; test_benchmarks_models.py writes PowerInfer's file",
    "python benchmarks/peers.py --work build/bench --peer-python ~/peers-avx2/bin/python --powerinfer PowerInfer "
    "--target cpu-avx2 --sweeps prefill batch decode --quick": "needs the peers, and a quiet machine",
    "python benchmarks/idle_heads.py SmolLM2-135M-Instruct.Q4_1.gguf": "needs a file of 93 MB",
    "python benchmarks/idle_heads.py models/tiny-reglu": "run on fewer tokens by test_benchmarks_models.py",
    "python benchmarks/sparse_projections.py build/bench/reglu-1.3b-10 --share 0 0.4": (
        "takes minutes; test_benchmarks_models.py has a small model"
    ),
    "python benchmarks/peers.py --work build/bench --peer-python ~/peers/bin/python --sweeps decode prefill": (
        "takes 20 GB, the peers, and a quiet machine"
    ),
    "python benchmarks/sparsity.py --rounds 25 --plot docs/images/sparsity.png": "takes minutes, and a quiet machine",
    "python benchmarks/batch.py --tokens 1 4 8 32 --rounds 4": "takes minutes, and a quiet machine",
    "python benchmarks/kernels.py": "takes a minute, and a quiet machine",
    "python benchmarks/speculation.py build/smollm2": (
        "needs a file of 93 MB; test_runtime_speculation.py has the bundled model"
    ),
    "picompile bench build/bench/reglu-1.3b-10.q4.learned -p 16 -n 64 -d 4000 -r 3": "needs an artifact of 800 MB",
    "python benchmarks/serve_peers.py build/bench/reglu-1.3b-10.q4.learned --llama-server llama-server --gguf "
    "reglu-1.3b.q4_0.gguf": "needs llama.cpp's server",
    "python benchmarks/serve_load.py build/smollm2 --streams 64 --minutes 10": (
        "takes ten minutes; deploy/test_serve_benchmarks.py takes seconds"
    ),
    "python benchmarks/serve_prefix.py build/bench/reglu-1.3b-10.q4.learned": (
        "needs an artifact of 800 MB; deploy/test_serve_benchmarks.py has a small one"
    ),
    "python benchmarks/json_schemas.py --count 400": "takes two minutes; deploy/test_serve_benchmarks.py has fewer",
    "python benchmarks/json_schemas.py --count 300 --schemas jsonschemabench/maskbench/data": "needs their schemas",
    "make gpu-pack SM=89": "takes half an hour, as make gpu-pack does",
    "make gpu-pack": "takes half an hour; test_benchmarks_gpu.py packs less",
    "python benchmarks/gpu_pack.py -o build/gpu --sm 90 --llama build/llama.tar.xz --more": "takes ten minutes",
    **{
        f"python benchmarks/gpu.py {text}": "needs a GPU; test_benchmarks_gpu.py runs it on a stand-in"
        for text in (
            "first build/gpu --results build/found",
            "first build/gpu --results build/found --asked 1795762800 --shm 100G --memory 128",
            "ready build/gpu",
            "more build/gpu --results build/found --shm 100G --memory 128",
            "more build/gpu --results build/found --shm 100G --memory 128 --model bamboo-7b",
            "second build/gpu --results build/found",
            "second build/gpu --results build/found --memory 128",
            "more build/gpu --results build/found",
            "case build/gpu 'linear q4'",
            "tables build/found/first.json build/found/second.json",
        )
    },
    "python benchmarks/futex.py OLD NEW --threads 4 --rounds 3 --tokens 400": "needs artifacts of two versions",
    "python benchmarks/cuda_instructions.py --sm 89 90": "run, but for its printing, by test_cuda_nibbles.py",
    **{
        f"python examples/train_relu_lm.py --variant {variant} --out build/relu-lm/{variant} --steps 1800 --threads 1 "
        "--l1 1 --learning-rate 0.001": "takes an hour or two"
        for variant in ("reglu", "opt")
    },
    "python examples/relufy.py SmolLM2-135M-Instruct.Q4_1.gguf --out build/smollm2-relu --steps 600 --blocks 0 "
    "--l1 0.01 --plot build/relufication.png": "takes hours; examples/test_relufication.py trains a small model",
    "picompile compile build/smollm2-relu -o build/smollm2-relu.q8 --quant q8 --predictor exact": "needs that model",
    'picompile run build/smollm2-relu.q8 -p "The capital of France is" -n 32': "needs that model",
    "python benchmarks/predictors.py build/relu-lm/reglu": "takes a quarter of an hour, and a trained model",
    "python benchmarks/predictors.py models/tiny-reglu --ranks 48,64,80": "takes some minutes",
    "python benchmarks/predictor_formats.py models/tiny-reglu --rank 64 --learned-only --text tests/data/heldout.txt "
    "--tokens 16384": "takes some minutes; benchmarks/test_benchmarks_models.py reads less",
    "python examples/relufy.py SmolLM2-135M-Instruct.Q4_1.gguf --out build/smollm2-relu --minutes 12 --blocks 0 "
    "--l1 0.01 --threads 1 --solve-tokens 12288 --own-tokens 0 --probe-tokens 2048": "takes a quarter of an hour",
    "python benchmarks/predictor_formats.py build/smollm2-relu --rank 256 --learned-only --profile-tokens 16384 "
    "--samples 12288 --text CONTRIBUTING.md --quants f16 --formats q8,q6,q4": "needs that model",
    "python benchmarks/profile_memory.py": "takes 4 GB of disk and minutes",
    'python benchmarks/profile_memory.py --tokens 32768 --train ""': "takes 4 GB of disk and most of an hour",
    "python benchmarks/placement.py times --direct --direct-limit 30 --plot docs/images/solver_time.png": (
        "takes minutes, and a quiet machine"
    ),
    "python benchmarks/quantization.py models/tiny-reglu --plot build/quantization.png": "takes ten minutes",
    "python benchmarks/skipping.py SmolLM2-135M --tokens 4096 --skip-tokens 8192 --oracle 0.1 0.15 0.2 0.3 0.35 "
    "0.4 0.5 --speed --rounds 7": "takes an hour",
    "python benchmarks/rounding_memory.py --kill": "takes 5 GB of disk and most of an hour",
    "python benchmarks/placement.py prefixes": "takes half a minute",
    "python benchmarks/placement.py policies": "takes ten minutes",
    "python benchmarks/placement_paper.py": "takes a minute",
    "python benchmarks/placement.py safety --layers 2 --every 50": "takes ten minutes",
    "python benchmarks/compile_memory.py MODEL --quant q4 [--limit-gb 6]": "a synopsis; takes minutes",
    "picompile chat artifacts/relu-llama": "a conversation; cli/test_cli_chat.py has some",
    "picompile serve build/served": "runs until it is stopped; cli/test_cli_serve.py runs and stops it",
    "picompile serve artifacts/relu-llama": "runs until it is stopped; cli/test_cli_serve.py runs and stops it",
}

# What a reader has, and what stands for it here.
PLACEHOLDERS = {
    "~/models/ReluLLaMA-7B": "models/tiny-reglu",
    "reglu-1.3b": "tiny-reglu",
}

COMMAND = re.compile(r"```(?:console|bash)\n(.*?)```", re.DOTALL)
PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)
TITLED = re.compile(r'```\w+ title="([^"]+)"\n(.*?)```', re.DOTALL)
LINK = re.compile(r"\]\(([^)#]+?)(?:#[^)]*)?\)")


def commands(document: Path) -> list[str]:
    """The commands of a document, without prompts and comments; those that are indented blocks too."""
    text = document.read_text(encoding="utf-8")
    lines = [line.removeprefix("$ ") for block in COMMAND.findall(text) for line in block.splitlines()]
    lines += [line.strip() for line in text.splitlines() if re.match(r"    (make|picompile|pip|python) ", line)]
    return [line.partition(" # ")[0].strip() for line in lines if line.strip()]


def inline_commands(document: Path) -> list[str]:
    """Commands inside of sentences that could be run as they stand."""
    found = re.findall(r"`((?:make|pip|picompile) [^`]+)`", document.read_text(encoding="utf-8"))
    return [command for command in found if command.startswith(("make ", "pip "))]


def substituted(command: str) -> str:
    for placeholder, value in PLACEHOLDERS.items():
        command = command.replace(placeholder, value)
    return command


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """An empty folder with the models and the README, as after a clone."""
    (tmp_path / "models").symlink_to(BUNDLED_MODEL.parent)
    (tmp_path / "README.md").symlink_to(ROOT / "README.md")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "data").symlink_to(ROOT / "tests" / "data")
    return tmp_path


def make_predictors(folder: Path) -> None:
    """A file as PowerInfer's users have it, for the bundled model."""
    folder.mkdir()
    sizes = Sizes(hidden=192, neurons=704, ranks=[32] * 6)
    write_gguf(folder / "llama-7b-relu.powerinfer.gguf", random_predictors(sizes, seed=0))


@pytest.fixture
def environment(commands: Path) -> dict[str, str]:
    """The commands are those that were installed beside this Python; what names no target is made for this machine."""
    path = os.pathsep.join([str(commands), str(Path(sys.executable).parent), os.environ["PATH"]])
    return {**os.environ, "PATH": path, "PICOMPILE_TARGET": "native"}


@pytest.mark.slow("runs the commands of a document; what they call has fast tests")
@pytest.mark.parametrize(
    "document", [path for path in DOCUMENTS if path not in (TUTORIAL, SERVING)], ids=lambda path: path.name
)
def test_every_command_runs(document: Path, workplace: Path, environment: dict[str, str]) -> None:
    """In order, in one folder: later commands use what earlier ones made."""
    if document.name == "cli.md":
        make_predictors(workplace / "powerinfer")
    for command in commands(document):
        if command not in EXEMPT:
            done = run_command(substituted(command), workplace, environment)
            assert done.stdout, f"{document.name}: {command} printed nothing"


def run_command(command: str, folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Runs a command, which must succeed and say nothing on stderr."""
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    assert done.stderr == "", command
    return done


def test_commands_are_found() -> None:
    """The test above would pass on documents that it cannot read."""
    assert "make demo" in commands(ROOT / "README.md")
    assert sum("picompile" in command for command in commands(ROOT / "README.md")) >= 4
    programs = {
        shlex.split(command)[1] for command in commands(ROOT / "docs" / "cli.md") if command.startswith("picompile")
    }
    from picompile.cli.app import COMMANDS

    assert programs == set(COMMANDS)


def test_only_known_commands_are_exempt() -> None:
    everywhere = {command for document in DOCUMENTS for command in [*commands(document), *inline_commands(document)]}
    assert set(EXEMPT) <= everywhere
    assert {command for command in everywhere if command.startswith(("make ", "pip "))} <= set(EXEMPT)


@pytest.mark.parametrize("target", sorted({c.split()[1] for c in EXEMPT if c.startswith("make")}))
def test_make_targets_exist(target: str) -> None:
    done = subprocess.run(["make", "--dry-run", target], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout


@pytest.mark.parametrize("document", LINKED, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    links = [link for link in LINK.findall(document.read_text(encoding="utf-8")) if "://" not in link]
    missing = [link for link in links if not (document.parent / link).exists()]
    assert missing == []


def test_adr_links_and_index() -> None:
    """Records are numbered without gaps, have the template's sections, and are in the index with title and status."""
    records = sorted(ADRS.glob("[0-9]*.md"))
    rows = []
    for number, record in enumerate(records, start=1):
        text = record.read_text(encoding="utf-8")
        assert record.name.startswith(f"{number:04}-")
        assert re.findall("^## (.*)$", text, re.MULTILINE) == ["Status", "Context", "Decision", "Consequences"]
        heading = re.fullmatch(rf"# {number}\. (.+)", text.splitlines()[0])
        status = re.search(r"## Status\n\n(Accepted|Superseded)\b", text)
        assert heading and status, record.name
        rows.append(f"| {number:04} | [{heading[1]}]({record.name}) | {status[1].lower()} |")
    assert re.findall(r"^\| \d{4} .*$", ADR_INDEX.read_text(encoding="utf-8"), re.MULTILINE) == rows


@pytest.mark.slow("runs the Python of whole pages; what it calls has fast tests")
@pytest.mark.parametrize(("page", "shown"), [("README.md", "engine.vocab"), ("docs/cli.md", "sum(hot)")])
def test_python_of_the_docs(workplace: Path, page: str, shown: str) -> None:
    (code,) = PYTHON.findall((ROOT / page).read_text(encoding="utf-8"))
    (workplace / "build").mkdir()
    code += f"\nprint({shown})\n"
    done = subprocess.run([sys.executable, "-c", code], cwd=workplace, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0


@pytest.mark.slow("follows the whole page; what it calls has fast tests")
def test_write_a_pass(workplace: Path, environment: dict[str, str]) -> None:
    """As a reader would: the files as they stand, the commands in order, then the Python of the last sections."""
    text = TUTORIAL.read_text(encoding="utf-8")
    files = dict(TITLED.findall(text))
    assert set(files) == {"merge_duplicates.py", "test_merge_duplicates.py", "pyproject.toml"}
    for name, content in files.items():
        (workplace / name).write_text(content, encoding="utf-8")
    site = workplace / "site"
    # Into a folder of its own, and without the network.
    install = f"python -m pip install --quiet --no-deps --no-build-isolation --target {site} ."
    environment_ = environment | {"PYTHONPATH": str(site), "PICOMPILE_HYPOTHESIS": "ci"}
    ran = [command.replace("pip install .", install) for command in commands(TUTORIAL)]
    assert install in ran
    for command in ran:
        run_command(command, workplace, environment_)
    dumps = [
        (workplace / "build" / "merged-ir" / name).read_text() for name in ("000_input.txt", "001_merge-duplicates.txt")
    ]
    assert len(dumps[1].splitlines()) < len(dumps[0].splitlines())
    code = "\n".join(PYTHON.findall(text))
    script = f"from merge_duplicates import MergeDuplicates\n{code}"
    subprocess.run([sys.executable, "-c", script], cwd=workplace, env=environment_, check=True, timeout=300)


def test_the_site_is_built(tmp_path: Path) -> None:
    """Every page is in the navigation, and no link of the site leads nowhere."""
    pytest.importorskip("mkdocs", reason="needs mkdocs: `make docs` installs it")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "site" / "index.html").exists()


OPTION = re.compile(r"(?<![\w-])(--[a-z][a-z0-9-]+)")


def test_options_in_the_documentation_exist() -> None:
    from typer.main import get_command

    from picompile.cli.app import app

    known = {"--help", "--version"}
    for command in get_command(app).commands.values():  # type: ignore[attr-defined]
        known |= {text for parameter in command.params for text in [*parameter.opts, *parameter.secondary_opts]}
    for document in (ROOT / "README.md", ROOT / "docs" / "cli.md"):
        mentioned = set(OPTION.findall(document.read_text(encoding="utf-8")))
        assert mentioned <= known, f"{document.name}: {mentioned - known}"


def test_option_tables_are_those_of_the_command_line() -> None:
    """`python docs/option_tables.py` writes them."""
    code = "import option_tables as o; text = o.PAGE.read_text(); print(o.with_tables(text) == text)"
    ran = subprocess.run([sys.executable, "-c", code], cwd=ROOT / "docs", capture_output=True, text=True, check=True)
    assert ran.stdout == "True\n"
