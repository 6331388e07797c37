"""`picompile eval`: how well an artifact predicts a text, and how far that is from the dense model."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from picompile.cli.checks import require_text_file
from picompile.cli.local_model import local_model
from picompile.cli.options import (
    ActivationOption,
    CompiledArgument,
    DebugOption,
    JsonOption,
    ReplanOption,
    ThreadsOption,
)
from picompile.cli.progress import progress
from picompile.library.options import LibraryOptions
from picompile.processes import uncollected


def eval_command(
    artifact: CompiledArgument,
    text: Annotated[Path, typer.Option(metavar="FILE", help="The text to predict.")],
    against: Annotated[
        str | None,
        typer.Option(metavar="MODEL", help="Compare with this checkpoint, dense and in float32."),
    ] = None,
    activation: ActivationOption = None,
    max_tokens: Annotated[
        int | None, typer.Option("-n", "--max-tokens", metavar="N", min=2, help="Read only the text's first N tokens.")
    ] = None,
    window: Annotated[
        int | None, typer.Option(metavar="N", min=1, help="Tokens that are read together. Default: the context.")
    ] = None,
    by_decode: Annotated[
        bool, typer.Option("--by-decode", help="Read as text is generated, with predicted neurons; slower.")
    ] = False,
    threads: ThreadsOption = None,
    replan: ReplanOption = False,
    *,
    library: LibraryOptions,
    json_output: JsonOption = False,
    debug: DebugOption = False,
) -> None:
    """Measure the perplexity of an artifact on a text.

    The text is cut into windows that do not overlap; each is read with nothing
    before it, by both models alike.

    \b
    Examples:
      picompile eval build/tiny --text README.md
      picompile eval build/tiny --text README.md --against models/tiny-reglu
    """
    content = require_text_file(text)
    checkpoint = None if against is None else local_model(against)

    with uncollected():
        from picompile.evaluate import evaluate
    from picompile.library import open_model

    with progress() as shown, open_model(artifact, library, shown) as opened:
        result = evaluate(
            opened.artifact,
            content,
            against=checkpoint,
            activation=activation,
            max_tokens=max_tokens,
            window=window,
            by_decode=by_decode,
            threads=threads,
            replan=replan,
            progress=shown,
        )
    print(json.dumps(result, indent=2)) if json_output else _show(result)


def _show(result: Mapping[str, Any]) -> None:
    print(f"perplexity  {result['perplexity']:.4f} over {result['tokens']} tokens")
    if result["dense_perplexity"] is not None:
        print(f"dense       {result['dense_perplexity']:.4f}")
        print(f"change      {result['relative_change']:+.4%}")
    for layer in result["layers"]:
        print(
            f"layer {layer['layer']:3d}  {layer['part']:4s}  {layer['kind']:12s}  "
            f"{layer['firing_share']:6.1%} fire, {layer['computed_share']:6.1%} computed{_recall(layer)}"
        )


def _recall(layer: Mapping[str, Any]) -> str:
    if layer["recall"] is None:
        return ""
    rank = "" if layer["rank"] is None else f", rank {layer['rank']}"
    return f", recall {layer['recall']:.1%}, by contribution {layer['weighted_recall']:.2%}{rank}"
