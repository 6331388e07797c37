"""The highest logits of a row, by the CPU's kernel."""

import pytest

from helpers.kernels.top_logits_cases import KINDS, check, logits_of
from helpers.kernels.workbench import Workbench
from picompile_codegen import cpu
from picompile_codegen.specs import TopLogitsSpec

ROWS = 3
# Fewer than are wanted, as many, one more, and many.
VOCABS = (1, 37, 64, 65, 300, 50257)


@pytest.fixture(scope="module")
def workbench(tmp_path_factory: pytest.TempPathFactory) -> Workbench:
    built = [cpu.write_kernel(TopLogitsSpec(vocab=vocab, rows=rows)) for vocab in VOCABS for rows in (1, ROWS)]
    return Workbench(tmp_path_factory.mktemp("top-logits") / "host.so", built)


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("kind", KINDS)
def test_highest_come_first(workbench: Workbench, kind: str, vocab: int) -> None:
    logits = logits_of(kind, 1, vocab)
    check(workbench.run(cpu.write_kernel(TopLogitsSpec(vocab=vocab, rows=1)), {"logits": logits}), logits)


@pytest.mark.parametrize("vocab", VOCABS[1:])
@pytest.mark.parametrize(("kind", "tokens"), [("normal", 3), ("nan", 2), ("ties", 1)])
def test_several_rows(workbench: Workbench, kind: str, vocab: int, tokens: int) -> None:
    logits, kernel = logits_of(kind, tokens, vocab), cpu.write_kernel(TopLogitsSpec(vocab=vocab, rows=ROWS))
    for threads in (1, 2, 3):
        check(workbench.run(kernel, {"logits": logits}, tokens=tokens, threads=threads), logits)
