r"""Pre-tokenizers of byte-level vocabularies: the split of a text before merging, by its `tokenizer.ggml.pre`.

The names are those of llama.cpp's src/llama-vocab.cpp. The expressions are those of the published tokenizer.json files,
most of which stand there too, beside rewritings that C++ can run; where they differ, the published one counts, since
the model was trained with it. Normalizers, which GGUF files and llama.cpp lack, are the published ones too.
"""

from dataclasses import dataclass
from typing import Any

_Part = dict[str, Any]


@dataclass(frozen=True)
class PreTokenizer:
    """The split of one kind of byte-level vocabulary.

    Attributes:
        parts: pre-tokenizers in tokenizer.json's form, in order; without the last one, which writes bytes as letters.
        gpt2: whether GPT-2's expression splits what `parts` leave. The last pre-tokenizer, ByteLevel, has it.
        behind: pre-tokenizers that see the text after its bytes were written as letters.
        normalizer: the normalizer's type in tokenizer.json, None for none.
        ignore_merges: whether a whole piece that is a token becomes it, though no merges lead there.
        add_bos: whether a text begins with the bos token where the file does not say, as llama.cpp has it.
    """

    parts: tuple[_Part, ...] = ()
    gpt2: bool = False
    behind: tuple[_Part, ...] = ()
    normalizer: str | None = None
    ignore_merges: bool = False
    add_bos: bool = False

    def to_json(self) -> dict[str, Any]:
        """Return the pre-tokenizer of a tokenizer.json."""
        last = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": self.gpt2}
        return {"type": "Sequence", "pretokenizers": [*self.parts, last, *self.behind]}


def _split(expression: str) -> _Part:
    return {"type": "Split", "pattern": {"Regex": expression}, "behavior": "Isolated", "invert": False}


def _digits(single: bool = True) -> _Part:
    return {"type": "Digits", "individual_digits": single}


# English contractions, as almost all expressions since GPT-4's have them, and the rest of such an expression.
_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# GPT-4's, with up to three digits (https://github.com/openai/tiktoken, cl100k_base): Llama 3's. Qwen's has one digit.
_LLAMA3 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_MARKS}|{_SPACES}"
_QWEN2 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}|{_MARKS}|{_SPACES}"
_QWEN35 = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
# GPT-4o's (o200k_base): words end where a capital follows small letters. Mistral's Tekken has it without contractions.
_UPPER, _LOWER = r"\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}", r"\p{Ll}\p{Lm}\p{Lo}\p{M}"
_CASED = (
    rf"[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]*[{_LOWER}]+{{end}}|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}]+[{_LOWER}]*{{end}}"
).replace("{end}", "%s")
_CASED_MARKS = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
_GPT4O = rf"{_CASED % (f'{_CONTRACTIONS}?', f'{_CONTRACTIONS}?')}|\p{{N}}{{1,3}}|{_CASED_MARKS}"
_TEKKEN = rf"{_CASED % ('', '')}|\p{{N}}|{_CASED_MARKS}"
_YOUTU = rf"{_CASED % (f'{_CONTRACTIONS}?', f'{_CONTRACTIONS}?')}|\p{{N}}|{_CASED_MARKS}"
# Kimi K2's (moonshotai/Kimi-K2-Base, tokenization_kimi.py): GPT-4o's, with Chinese characters apart.
_KIMI_K2 = (
    r"[\p{Han}]+"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}&&[^\p{{Han}}]]*[{_LOWER}&&[^\p{{Han}}]]+{_CONTRACTIONS}?"
    rf"|[^\r\n\p{{L}}\p{{N}}]?[{_UPPER}&&[^\p{{Han}}]]+[{_LOWER}&&[^\p{{Han}}]]*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{_MARKS}|{_SPACES}"
)
# DeepSeek V3's: numbers and Chinese or Japanese characters first, then a mark with a word, words, marks, spaces.
_THREE_DIGITS = _split(r"\p{N}{1,3}")
_HAN_AND_KANA = _split("[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+")
_MARK_AND_WORD = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+"""
_DEEPSEEK_WORDS = rf"{_MARK_AND_WORD}|[^\r\n\p{{L}}\p{{P}}\p{{S}}]?[\p{{L}}\p{{M}}]+| ?[\p{{P}}\p{{S}}]+"
_DEEPSEEK_V3 = (_THREE_DIGITS, _HAN_AND_KANA, _split(rf"{_DEEPSEEK_WORDS}[\r\n]*|{_SPACES}"))
_SPARK = (_THREE_DIGITS, _HAN_AND_KANA, _split(rf"{_DEEPSEEK_WORDS}|[\r\n]|\s+(?!\S)|\s+"), _split(r"\p{N}"))
# DeepSeek LLM lists the letters of all alphabets that have capitals.
_ALPHABETS = (
    "A-Za-z\xb5\xc0-\xd6\xd8-\xf6\xf8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373\u0376\u0377"
    "\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_DEEPSEEK_HAN = _split("[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+")
_DEEPSEEK_LLM = (
    _split(r"[\r\n]"),
    _split(rf"\s?[{_ALPHABETS}]+"),
    _split("\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3000-\u3002]+"),
    _split(r"\s+$"),
    _DEEPSEEK_HAN,
    _digits(),
)
_DEEPSEEK_CODER = (_split(r"[\r\n]"), _split(r"\s?\p{L}+"), _split(r"\s?\p{P}+"), _DEEPSEEK_HAN, _digits())
_YOUTU_SCRIPTS = _split(
    "[\uac00-\ud7a3\u3131-\u318e]+|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
    "|[\u3105-\u312f]+|[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
)
# Arcee's Trinity: digits in threes from the right; scripts that write no spaces; then as DeepSeek V3.
_TRINITY_SCRIPTS = _split(
    "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf\u0e40-\u0e7f\u0e80-\u0eff"
    "\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+"
)
_THREES_FROM_RIGHT = _split(r"\p{N}{1,3}(?=(?:\p{N}{3})*(?:\P{N}|\z))")
_BLOOM = _split(" ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+")
_CHAMELEON = (
    _split("<sentinel:[0-9]+>"),
    _split("(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z"),
    _split(r"([\t\n]|    |  )"),
    _digits(),
    {"type": "Punctuation", "behavior": "Isolated"},
)
_LINES = _split(r"[^\n]+|[\n]+")

_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_SEED = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
_UFAKZEKA = rf"{_WORD}|\p{{N}}|{_MARKS}|{_SPACES}"
_EXAONE_MOE = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
)
_MINICPM5 = rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}+|{_MARKS}|{_SPACES}"
# Jais 2: runs of spaces in powers of two.
_JAIS2 = (
    rf"{_CONTRACTIONS}|{_WORD}|\p{{N}}{{1,3}}|{_MARKS}|\s*[\r\n]+"
    + "".join(rf"|\s{{{count}}}(?!\S)" for count in (512, 256, 128, 64, 32, 16, 8, 4))
    + r"|\s{1,2}(?!\S)|\s{1}"
)
_FALCON_MARKS: _Part = {"type": "Punctuation", "behavior": "Contiguous"}
# llama.cpp's for files that name none: it was Falcon's for a while.
_DEFAULT = (_split(r"[\p{P}\$\+<=>\^~\|]+"), _split(_GPT2), _split(r"\p{N}+"), _split("[0-9][0-9][0-9]"))

_Names = tuple[PreTokenizer, str]
_BY_NAME: tuple[_Names, ...] = (
    (PreTokenizer(_DEFAULT), "default"),
    # GPT-2 and those whose vocabulary was made with its expression.
    (PreTokenizer(gpt2=True), "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de a.x-4.0 mellum exaone4"),
    (PreTokenizer(gpt2=True), "jina-v1-en jina-v2-code roberta-bpe jais trillion granite-docling"),
    (PreTokenizer(gpt2=True, normalizer="NFC"), "mpt olmo modern-bert"),  # GPT-NeoX's
    (PreTokenizer((_digits(),), gpt2=True), "starcoder refact smollm codeshell exaone minerva-7b mellum2"),
    (PreTokenizer((_digits(),), gpt2=True, normalizer="NFC"), "command-r"),
    (
        PreTokenizer((_FALCON_MARKS,), gpt2=True, behind=(_digits(single=False), _split("[0-9][0-9][0-9]"))),
        "falcon",
    ),
    (PreTokenizer((_BLOOM,)), "bloom poro-chat gpt3-finnish"),
    (PreTokenizer((_BLOOM, _digits())), "viking"),
    (PreTokenizer(_CHAMELEON, gpt2=True, add_bos=True), "chameleon"),
    # GPT-4's.
    (
        PreTokenizer((_split(_LLAMA3),), ignore_merges=True, add_bos=True),
        "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano",
    ),
    (PreTokenizer((_split(_LLAMA3),), ignore_merges=True), "glm4 glm5"),
    (PreTokenizer((_split(_LLAMA3),)), "dbrx smaug-bpe chatglm-bpe"),
    (PreTokenizer((_split(_JAIS2),)), "jais-2"),
    (PreTokenizer((_split(_QWEN2),), normalizer="NFC"), "qwen2 deepseek-r1-qwen f2llmv2 stablelm2"),
    (PreTokenizer((_split(_QWEN2),)), "megrez kormo hunyuan solar-open grok-2"),
    (PreTokenizer((_split(_QWEN35),), normalizer="NFC"), "qwen35"),
    (PreTokenizer((_LINES, _split(_QWEN2))), "laguna"),
    (PreTokenizer((_split(_BAILING),)), "bailingmoe bailingmoe2 llada-moe"),
    (PreTokenizer((_split(_SEED),)), "seed-coder"),
    (PreTokenizer((_split(_UFAKZEKA),)), "ufakzeka"),
    (PreTokenizer((_split(_EXAONE_MOE),)), "exaone-moe"),
    (PreTokenizer((_THREE_DIGITS, _split(_MINICPM5)), ignore_merges=True), "minicpm5"),
    # GPT-4o's.
    (PreTokenizer((_split(_GPT4O),), ignore_merges=True), "gpt-4o llama4 granite-embed-multi-97m"),
    (PreTokenizer((_split(_GPT4O),)), "kanana2 talkie minimax-m2"),
    (PreTokenizer((_split(_TEKKEN),), ignore_merges=True, add_bos=True), "tekken"),
    (PreTokenizer((_YOUTU_SCRIPTS, _split(_YOUTU)), ignore_merges=True), "youtu"),
    (PreTokenizer((_split(r"\d{1,3}(?=(?:\d{3})*\b)"), _split(_GPT4O)), normalizer="NFC"), "tiny_aya cohere2moe"),
    (PreTokenizer((_split(_KIMI_K2),), ignore_merges=True), "kimi-k2"),
    # DeepSeek's.
    (PreTokenizer(_DEEPSEEK_LLM), "deepseek-llm"),
    (PreTokenizer(_DEEPSEEK_CODER), "deepseek-coder"),
    (PreTokenizer(_DEEPSEEK_V3), "deepseek-v3 hunyuan-dense joyai-llm hy_v4"),
    (PreTokenizer(_SPARK), "spark2_5"),
    (PreTokenizer((_THREES_FROM_RIGHT, _TRINITY_SCRIPTS, _DEEPSEEK_V3[-1])), "afmoe"),
    # SuperBPE: merges reach over words.
    (PreTokenizer((_split(r"\p{N}+"), _split(r"(?=(\d{3})+(?!\d))"))), "superbpe"),
)
PRE_TOKENIZERS = {name: found for found, names in _BY_NAME for name in names.split()}
# Files from before May 2024 name none. These architectures have one split each.
_OF_ARCHITECTURES = {
    **dict.fromkeys(("gpt2", "opt"), "gpt-2"),
    **dict.fromkeys(("gptneox", "olmo"), "olmo"),
    **dict.fromkeys(("qwen", "qwen2", "qwen2moe"), "qwen2"),
    **dict.fromkeys(("starcoder", "starcoder2"), "starcoder"),
    **{name: name for name in ("falcon", "mpt", "refact", "codeshell", "bloom", "command-r", "dbrx", "jais")},
    "phi2": "phi-2",
}


def pre_of_architecture(architecture: str) -> str | None:
    """Return the name of the split that all models of an architecture have, None where they differ."""
    return _OF_ARCHITECTURES.get(architecture)
