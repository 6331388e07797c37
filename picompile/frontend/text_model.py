"""The text model in a model of several: what reads images or sound is left out, and text never asks for it."""

from typing import Any

from torch import nn

from picompile.frontend.families import text_config

# The attribute in which a model keeps the names of the modules that `keep_text` took from it.
_LEFT_OUT = "picompile_left_out"


def own_config(model_class: Any, config: Any) -> Any:
    """Return the config that `model_class` is made from: that of the text where the class is of the text alone.

    transformers' `AutoModelForCausalLM` does the same with the config of a model that reads images.
    """
    text = text_config(config)
    wanted = model_class.config_class
    is_texts = wanted is not None and isinstance(text, wanted) and not isinstance(config, wanted)
    return text if is_texts else config


def keep_text(model: nn.Module) -> None:
    """Take from a model of several, in place, all modules but its text model and its output head.

    The text model is the module whose config is the text's. A forward for text that reads another module ends with an
    error, so that nothing can be left out that text depends on.
    """
    config = vars(model)["config"]
    text = text_config(config)
    if text is config:
        return
    path = next((path for path, module in model.named_modules() if path and _config(module) is text), None)
    if path is None:
        # A copy of the config, say.
        same = (path for path, module in model.named_modules() if path and type(_config(module)) is type(text))
        path = next(same, None)
    if path is None:
        return
    head = getattr(model, "get_output_embeddings", lambda: None)()
    left_out: list[str] = []
    above, owner = "", model
    for name in path.split("."):
        for other, module in list(owner.named_children()):
            has_head = any(part is head for part in module.modules())
            if other != name and not has_head and next(module.parameters(), None) is not None:
                delattr(owner, other)
                left_out.append(f"{above}{other}")
        above, owner = f"{above}{name}.", owner.get_submodule(name)
    setattr(model, _LEFT_OUT, tuple(left_out))


def left_out_of(model: nn.Module) -> tuple[str, ...]:
    """Return the names of the modules that `keep_text` took from a model."""
    names: tuple[str, ...] = getattr(model, _LEFT_OUT, ())
    return names


def _config(module: nn.Module) -> Any:
    return getattr(module, "config", None)
