"""Models of random weights for the suites: the suites' own are not at hand."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from helpers.chat_templates import CHATML
from helpers.gguf_files import EXAMPLES, write_example

# In llama.cpp's tree.
GPT2_VOCABULARY = "models/ggml-vocab-gpt-2.gguf"
LLAMA_VOCABULARY = "models/ggml-vocab-llama-spm.gguf"

# How much likelier than others the end token is, so that answers end sooner or later, as those of trained models do.
_END_LOGIT = 14.0
_LOGIT_DEVIATION = 4.0


def save_opt(folder: Path, gpt2_vocabulary: Path) -> None:
    """Write a Hugging Face folder: an OPT of random weights, whose tokenizer cuts texts as OPT's own does.

    That is GPT-2's with `</s>` before each text. The ids of its tokens are other ones.
    """
    import torch
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "word_embed_proj_dim": 256, "ffn_dim": 1024, "max_position_embeddings": 2048}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4}
    config = OPTConfig(vocab_size=50272, init_std=0.2, tie_word_embeddings=False, **sizes, **layers)
    model = OPTForCausalLM(config)
    with torch.no_grad():
        head = model.lm_head.weight
        head.normal_(0, _LOGIT_DEVIATION / config.hidden_size**0.5)
        # The layers end in a norm, whose bias is the part of its output that is always there.
        norm: Any = model.model.decoder.final_layer_norm
        norm.bias.zero_()
        norm.bias[0] = 16.0
        head[:, 0] = 0
        head[config.eos_token_id] = 0
        head[config.eos_token_id, 0] = _END_LOGIT / 16.0
    model.to(torch.float16).save_pretrained(folder)
    _save_opt_tokenizer(folder, gpt2_vocabulary)


def _save_opt_tokenizer(folder: Path, gpt2_vocabulary: Path) -> None:
    from gguf import GGUFReader
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

    fields = GGUFReader(gpt2_vocabulary).fields
    words = [word for word in fields["tokenizer.ggml.tokens"].contents() if word != "<|endoftext|>"]
    merges = [tuple(pair.split(" ")) for pair in fields["tokenizer.ggml.merges"].contents()]
    special = ["<s>", "<pad>", "</s>", "<unk>"]
    vocabulary = {word: number for number, word in enumerate([*special, *words])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True, normalized=False) for word in special])
    tokenizer.post_processor = processors.TemplateProcessing(single="</s> $A", special_tokens=[("</s>", 2)])
    tokenizer.save(str(folder / "tokenizer.json"))
    text = json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "</s>", "eos_token": "</s>"})
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def save_llama(folder: Path, llama_vocabulary: Path) -> None:
    """Write a Hugging Face folder: a Llama of random weights with Llama's tokenizer and a chat template.

    Its file llama.gguf is the same model for llama.cpp's own server.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from picompile.frontend.gguf.header import read_header
    from picompile.frontend.gguf.tokenizer import read_gguf_tokenizer

    torch.manual_seed(0)
    sizes = {"vocab_size": 32000, "hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 2**14}
    layers = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(initializer_range=0.3, **sizes, **layers)
    model = LlamaForCausalLM(config).to(torch.float16)
    model.save_pretrained(folder)
    # A file without tensors may end before its padding.
    padded = folder / "vocabulary.gguf"
    content = llama_vocabulary.read_bytes()
    padded.write_bytes(content + bytes(-len(content) % 32))
    read_gguf_tokenizer(read_header(padded)).write(folder)
    _save_gguf(folder / "llama.gguf", model, padded)
    padded.unlink()
    file = folder / "tokenizer_config.json"
    described = {**json.loads(file.read_text(encoding="utf-8")), "chat_template": CHATML}
    file.write_text(json.dumps(described), encoding="utf-8")


def _save_gguf(file: Path, model: Any, vocabulary: Path) -> None:
    """Write a Llama as a GGUF file in float16, with the vocabulary of another one."""
    from gguf import GGUFReader

    fields = GGUFReader(vocabulary).fields
    names = [f"tokenizer.ggml.{name}" for name in ("model", "tokens", "scores", "token_type")]
    ends = {f"tokenizer.ggml.{name}_token_id": getattr(model.config, f"{name}_token_id") for name in ("bos", "eos")}
    values = {name: fields[name].contents() for name in names} | ends
    write_example(file, EXAMPLES["llama"], model.float(), "F16", **values)


def main() -> None:
    """Write the models that the suites need to a folder."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--llama-cpp", type=Path, required=True, help="Llama.cpp's tree, for its vocabularies.")
    options = parser.parse_args()
    for name in ("opt", "llama"):
        (options.folder / name).mkdir(parents=True, exist_ok=True)
    save_opt(options.folder / "opt", options.llama_cpp / GPT2_VOCABULARY)
    save_llama(options.folder / "llama", options.llama_cpp / LLAMA_VOCABULARY)


if __name__ == "__main__":
    main()
