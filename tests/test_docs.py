"""The documentation is true: every command in it runs, every link leads somewhere, and its Python works."""

import importlib
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.documented_models import ON_THE_HUB, hub_of_documents
from helpers.powerinfer_files import Sizes, random_predictors, write_gguf
from helpers.support import BUNDLED_MODEL, ROOT

DOCUMENTS = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "benchmarks").glob("*/README.md")),
]

# Architecture decision records have links, but no commands to run.
ADRS = ROOT / "docs" / "adr"
LINKED = [*DOCUMENTS, *sorted(ADRS.glob("*.md")), ROOT / "examples" / "picompile-silent" / "README.md"]

# Needs its files to be written first: a test of its own.
TUTORIAL = ROOT / "docs" / "write_a_pass.md"

# Starts servers for its commands: tests/deploy/test_serving_guide.py runs them.
SERVING = ROOT / "docs" / "serving.md"

# Not run here, and why: what a command begins with or names.
NOT_RUN = {
    r"make ": "downloads, or runs this test; test_make_targets_exist asks for each",
    r"pip install ": "downloads packages; test_write_a_pass has its own way",
    r"python (-m benchmarks\.|examples/)": "takes minutes or needs a GPU; tests of both folders have parts",
    r"picompile .*(smollm2|SmolLM2|build/bench/)": "needs a file of 93 MB or more, or an artifact of 800 MB",
    r"picompile serve ": "runs until it is stopped; cli/test_cli_serve.py runs and stops it",
    r"picompile chat \S+$": "a conversation; cli/test_cli_chat.py has some",
}

# What a reader has, and what stands for it here.
PLACEHOLDERS = {
    "~/models/ReluLLaMA-7B": "models/tiny-reglu",
    "reglu-1.3b": "tiny-reglu",
}

COMMAND = re.compile(r"```(?:console|bash)\n(.*?)```", re.DOTALL)
PYTHON = re.compile(r"```python\n(.*?)```", re.DOTALL)
TITLED = re.compile(r'```\w+ title="([^"]+)"\n(.*?)```', re.DOTALL)
OPTION = re.compile(r"(?<![\w-])(--[a-z][a-z0-9-]+)")
LINK = re.compile(r"\]\(([^)#]+?)(?:#[^)]*)?\)")


def commands(document: Path) -> list[str]:
    """The commands of a document, without prompts and comments; those that are indented blocks too."""
    text = document.read_text(encoding="utf-8")
    lines = [line.removeprefix("$ ") for block in COMMAND.findall(text) for line in block.splitlines()]
    lines += [line.strip() for line in text.splitlines() if re.match(r"    (make|picompile|pip|python) ", line)]
    return [line.partition(" # ")[0].strip() for line in lines if line.strip()]


def is_run(command: str) -> bool:
    return not any(re.match(pattern, command) for pattern in NOT_RUN)


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
def environment(commands: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """The commands are those that were installed beside this Python; what names no target is made for this machine.

    Models by name come from a hub of this test's.
    """
    path = os.pathsep.join([str(commands), str(Path(sys.executable).parent), os.environ["PATH"]])
    folder = tmp_path_factory.mktemp("hub")
    with hub_of_documents(folder) as hub:
        yield hub.environment(folder, PATH=path, PICOMPILE_TARGET="native")


@pytest.mark.slow("runs the commands of a document; what they call has fast tests")
@pytest.mark.parametrize(
    "document", [path for path in DOCUMENTS if path not in (TUTORIAL, SERVING)], ids=lambda path: path.name
)
def test_every_command_runs(document: Path, workplace: Path, environment: dict[str, str]) -> None:
    """In order, in one folder: later commands use what earlier ones made."""
    if document.name == "cli.md":
        make_predictors(workplace / "powerinfer")
    for command in commands(document):
        if is_run(command):
            done = run_command(substituted(command), workplace, environment)
            assert done.stdout, f"{document.name}: {command} printed nothing"


def run_command(command: str, folder: Path, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Runs a command, which must succeed and say nothing on stderr, unless it may compile a model on the hub."""
    started, is_named = command, any(name in command for name in ON_THE_HUB)
    if is_named:
        # `huggingface_hub` reads its environment when it is imported, which the server of `commands` has done.
        started = re.sub(r"^picompile ", f"{sys.executable} -m picompile ", command)
    done = subprocess.run(
        ["bash", "-c", started], cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    assert is_named or done.stderr == "", command
    return done


def test_commands_are_found() -> None:
    """The test above would pass on documents that it cannot read, or if it ran nothing in them."""
    from picompile.cli.app import COMMANDS

    assert sum(map(is_run, commands(ROOT / "README.md"))) >= 4
    programs = {
        shlex.split(command)[1] for command in commands(ROOT / "docs" / "cli.md") if command.startswith("picompile")
    }
    assert programs == set(COMMANDS)
    everywhere = [command for document in DOCUMENTS for command in commands(document)]
    assert [pattern for pattern in NOT_RUN if not any(re.match(pattern, command) for command in everywhere)] == []


def test_scripts_that_are_not_run_have_the_options() -> None:
    """A module of the folder of `python -m benchmarks.x` or `python examples/x.py` has the options of the command."""
    for document in DOCUMENTS:
        for command in commands(document):
            if script := re.match(r"python (?:-m (benchmarks\.\S+)|(examples/\S+)\.py)", command):
                path = ROOT / (script[2] or script[1].replace(".", "/"))
                path = path / "__main__.py" if path.is_dir() else path.with_suffix(".py")
                assert path.exists(), command
                text = "".join(near.read_text(encoding="utf-8") for near in path.parent.rglob("*.py"))
                options = {option for option in OPTION.findall(command) if option not in text}
                assert {o for o in options if o[2:].replace("-", "_") not in text} == set(), command


def test_make_targets_exist() -> None:
    text = "".join(document.read_text(encoding="utf-8") for document in DOCUMENTS)
    targets = sorted(set(re.findall(r"(?:^    |`)make ([\w-]+)", text, re.MULTILINE)))
    assert "test-slow" in targets
    done = subprocess.run(["make", "--dry-run", *targets], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("document", LINKED, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document: Path) -> None:
    links = [link for link in LINK.findall(document.read_text(encoding="utf-8")) if "://" not in link]
    assert [link for link in links if not (document.parent / link).exists()] == []


def test_the_index_has_every_decision() -> None:
    """With its number, title and status."""
    rows = []
    for record in sorted(ADRS.glob("[0-9]*.md")):
        number = int(record.name[:4])
        found = re.match(
            rf"# {number}\. (.+)\n+## Status\n\n(Accepted|Superseded)\b", record.read_text(encoding="utf-8")
        )
        assert found, record.name
        rows.append(f"| {number:04} | [{found[1]}]({record.name}) | {found[2].lower()} |")
    assert re.findall(r"^\| \d{4} .*$", (ADRS / "README.md").read_text(encoding="utf-8"), re.MULTILINE) == rows


@pytest.mark.slow("runs the Python of whole pages; what it calls has fast tests")
@pytest.mark.parametrize(("page", "shown"), [("README.md", "engine.vocab"), ("docs/cli.md", "sum(hot)")])
def test_python_of_the_docs(workplace: Path, page: str, shown: str) -> None:
    (code,) = PYTHON.findall((ROOT / page).read_text(encoding="utf-8"))
    (workplace / "build").mkdir()
    code += f"\nprint({shown})\n"
    done = subprocess.run([sys.executable, "-c", code], cwd=workplace, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 0


@pytest.mark.slow("starts a server, which compiles a model")
def test_python_of_the_tutorial(workplace: Path, environment: dict[str, str]) -> None:
    """A client of the server that the page starts, at another port."""
    text = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")
    (code,) = PYTHON.findall(text)
    (command,) = re.findall(r"^\$ picompile (serve .+)$", text, re.MULTILINE)
    server = subprocess.Popen(
        [sys.executable, "-m", "picompile", *command.replace("16384", "512").split(), "--port", "0"],
        cwd=workplace,
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert server.stderr is not None
        url = next(line for line in iter(server.stderr.readline, "") if line.startswith("serving ")).split()[-1]
        code = code.replace("http://127.0.0.1:8080", url)
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        assert done.stdout
    finally:
        server.terminate()
        server.communicate(timeout=60)


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


def test_the_table_of_operators_is_that_of_their_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """`python docs/operator_table.py` writes it."""
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    table = importlib.import_module("operator_table")
    assert table.with_table(text := TUTORIAL.read_text(encoding="utf-8")) == text
    assert "| `sparse_ffn` | block | sparse |" in text
