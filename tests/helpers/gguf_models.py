"""Models in GGUF files as transformers' classes, for comparisons."""

import torch
from torch import nn

from picompile.frontend.gguf.model import GgufModel
from picompile.frontend.gguf.model_config import model_classes


def loaded(opened: GgufModel) -> nn.Module:
    """The model that the config describes, with the weights of the file."""
    config_class, model_class = model_classes(opened.config)
    model: nn.Module = model_class(config_class.from_dict(dict(opened.config))).eval()
    state = {name: opened.load(name) for name in opened.tensors}
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and all(name == "lm_head.weight" or ".act_fn." in name for name in missing)
    model.tie_weights()
    return model


def check_logits(model: nn.Module, opened: GgufModel) -> None:
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        expected, found = model(input_ids=ids).logits, loaded(opened)(input_ids=ids).logits
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-6)
