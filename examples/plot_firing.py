"""Measures how often the feed-forward neurons of a ReLU-family model fire, and draws it.

A neuron fires for a token when its activation is not zero. MODEL is a Hugging Face folder. The picture goes to a file,
the figures to stdout as JSON.

    python examples/plot_firing.py models/tiny-reglu
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.activations import ReLUSquaredActivation

ROOT = Path(__file__).resolve().parents[1]


def relu_modules(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The activation of each feed-forward block, in the order of the layers."""
    return [module for module in model.modules() if isinstance(module, torch.nn.ReLU | ReLUSquaredActivation)]


@torch.no_grad()
def count_firings(model: torch.nn.Module, tokens: torch.Tensor, context: int) -> torch.Tensor:
    """How many of the tokens each neuron fires for. `[tokens] → [layers, neurons]`

    The text is cut into windows of `context` tokens, each of which starts anew.
    """
    activations = relu_modules(model)
    counts: dict[torch.nn.Module, torch.Tensor] = {}

    def count(module: torch.nn.Module, _: tuple[Any, ...], output: torch.Tensor) -> None:
        fired = (output != 0).flatten(0, -2).sum(0)
        counts[module] = counts.get(module, 0) + fired

    hooks = [module.register_forward_hook(count) for module in activations]
    for window in torch.split(tokens, context):
        model(window[None], use_cache=False)
    for hook in hooks:
        hook.remove()
    return torch.stack([counts[module] for module in activations])


def firing_curve(counts: torch.Tensor) -> torch.Tensor:
    """The share of all firings that the most frequent neurons make, for 0, 1, 2, … of them. `[n] → [n + 1]`"""
    ordered = counts.flatten().sort(descending=True).values.double()
    return torch.cat([torch.zeros(1, dtype=torch.double), ordered.cumsum(0) / ordered.sum()])


def share_for(curve: torch.Tensor, firings: float) -> float:
    """The smallest share of the neurons that makes this share of the firings."""
    return int((curve < firings).sum()) / (len(curve) - 1)


def summarize(counts: torch.Tensor, tokens: int) -> dict[str, Any]:
    """The figures of each layer and of the whole model."""

    def figures(part: torch.Tensor) -> dict[str, Any]:
        return {
            "firing_share": round(float(part.double().mean()) / tokens, 4),
            "neurons_for_80_percent": round(share_for(firing_curve(part), 0.8), 4),
            "never_fired": int((part == 0).sum()),
        }

    layers = [{"layer": layer, **figures(part)} for layer, part in enumerate(counts)]
    return {"tokens": tokens, "neurons_per_layer": counts.shape[1], "model": figures(counts), "layers": layers}


def draw(counts: torch.Tensor, tokens: int, image: Path) -> None:
    """Two panels: who makes the firings, and how many neurons fire for a token."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False})
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.6), width_ratios=(1.35, 1), layout="constrained")
    colours = pyplot.get_cmap("viridis")(torch.linspace(0.05, 0.85, len(counts)).numpy())

    for layer, (part, colour) in enumerate(zip(counts, colours, strict=True)):
        curve = firing_curve(part)
        left.plot(torch.linspace(0, 100, len(curve)), 100 * curve, color=colour, linewidth=1, label=f"layer {layer}")
    curve = firing_curve(counts)
    left.plot(torch.linspace(0, 100, len(curve)), 100 * curve, color="black", linewidth=2.6, label="model")
    mark = 100 * share_for(curve, 0.8)
    left.plot([0, mark, mark], [80, 80, 0], color="grey", linewidth=1, linestyle=(0, (4, 3)))
    left.plot(mark, 80, "o", color="black", markersize=6)
    left.annotate(f"{mark:.0f} % of the neurons\nmake 80 % of the firings", (mark + 2, 5))
    left.set(xlim=(0, 100), ylim=(0, 101), xlabel="neurons, most frequent first (%)", ylabel="share of all firings (%)")
    left.legend(frameon=False, loc="lower right")

    shares = 100 * counts.double().mean(1) / tokens
    names = [str(layer) for layer in range(len(counts))]
    bars = right.bar(names, shares, color=colours, width=0.7)
    right.bar_label(bars, fmt="%.1f", padding=2)
    right.axhline(shares.mean().item(), color="grey", linewidth=1, linestyle=(0, (4, 3)), zorder=0)
    right.set(xlabel="layer", ylabel="neurons firing per token (%)")
    right.set_title(f"mean {shares.mean():.1f} %", loc="right", fontsize=11)

    image.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(image, dpi=100, facecolor="white", metadata={"Software": None})


def main(
    model_folder: Annotated[Path, typer.Argument(metavar="MODEL", help="A Hugging Face folder.")],
    text: Annotated[Path, typer.Option(help="What the model reads.")] = ROOT / "tests/data/heldout.txt",
    image: Annotated[Path, typer.Option(help="Where the picture goes.")] = ROOT / "docs/images/firing.png",
    context: Annotated[int, typer.Option(help="Tokens in a window.", min=1)] = 1024,
) -> None:
    """Measure and draw how often the neurons of MODEL fire."""
    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32).eval()
    if not relu_modules(model):
        raise typer.BadParameter(f"{model_folder}: no ReLU in this model, so none of its neurons is ever silent")
    tokens = torch.tensor(tokenizer(text.read_text("utf-8"), add_special_tokens=False, verbose=False)["input_ids"])
    counts = count_firings(model, tokens, min(context, model.config.max_position_embeddings))
    draw(counts, len(tokens), image)
    print(json.dumps(summarize(counts, len(tokens)), indent=2))


if __name__ == "__main__":
    typer.run(main)
