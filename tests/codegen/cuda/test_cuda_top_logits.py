"""The highest logits of a row on a GPU: the same order for all orders of threads."""

import pytest

from helpers.kernels.cuda_workbench import CudaWorkbench
from helpers.kernels.top_logits_cases import KINDS, check, logits_of
from picompile_codegen import cuda
from picompile_codegen.specs import TopLogitsSpec

ROWS = 3
# Part of a run, one run and a key more, runs that are no power of two, a slice and a token more; many slices; and more
# slices than a block merges at once.
VOCABS = (37, 65, 300, 2049)
LARGE = (50257, 70001)


@pytest.fixture(scope="module")
def workbench(tmp_path_factory: pytest.TempPathFactory) -> CudaWorkbench:
    built = [cuda.write_kernel(TopLogitsSpec(vocab=vocab, rows=rows)) for vocab in VOCABS for rows in (1, ROWS)]
    built += [cuda.write_kernel(TopLogitsSpec(vocab=vocab, rows=1)) for vocab in LARGE]
    return CudaWorkbench(tmp_path_factory.mktemp("top-logits") / "device.so", built)


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize("kind", KINDS)
def test_highest_come_first(workbench: CudaWorkbench, kind: str, vocab: int) -> None:
    logits = logits_of(kind, 1, vocab)
    check(workbench.run(cuda.write_kernel(TopLogitsSpec(vocab=vocab, rows=1)), {"logits": logits}), logits)


@pytest.mark.parametrize(("kind", "vocab"), [("normal", 50257), ("ties", 70001)])
def test_large_vocabularies(workbench: CudaWorkbench, kind: str, vocab: int) -> None:
    logits = logits_of(kind, 1, vocab)
    check(workbench.run(cuda.write_kernel(TopLogitsSpec(vocab=vocab, rows=1)), {"logits": logits}), logits)


@pytest.mark.parametrize("vocab", VOCABS)
@pytest.mark.parametrize(("kind", "tokens"), [("normal", 3), ("nan", 2)])
def test_several_rows(workbench: CudaWorkbench, kind: str, vocab: int, tokens: int) -> None:
    logits, kernel = logits_of(kind, tokens, vocab), cuda.write_kernel(TopLogitsSpec(vocab=vocab, rows=ROWS))
    check(workbench.run(kernel, {"logits": logits}, tokens=tokens), logits)
