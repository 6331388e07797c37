"""Replaces SiLU by ReLU in a SwiGLU model, and trains the copy until it answers nearly as before: ReLUfication.

    python examples/relufy.py SmolLM2-135M-Instruct.Q4_1.gguf --out build/smollm2-relu --minutes 60
    picompile compile build/smollm2-relu -o build/smollm2-relu.q8 --quant q8 --predictor exact

MODEL is a Hugging Face folder or a GGUF file. The text is that of the running Python's standard library, and some that
the model writes itself. About 3 % of the library's files, chosen by a hash of their names, measure the result.
docs/relufication.md describes the stages, and what they cost and bring. Ctrl-C and SIGTERM save the state; the same
command with `--resume` goes on from it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from relu_lm.training import say
from relufication.folder import MEASUREMENTS, check_output, save_folder, table
from relufication.pair import ACTIVATIONS, Pair, open_pair
from relufication.plot import plot
from relufication.texts import TextOptions, open_tokenizer, read_texts
from relufication.training import CHECKPOINT, Recipe, State, Trainer, require_checkpoint

from picompile.errors import PicompileError, UsageError
from picompile.frontend.checkpoint import fingerprint
from picompile.output.files import atomic_file, json_bytes


def main(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A Hugging Face folder, or a GGUF file.")],
    out: Annotated[Path, typer.Option(help="The new model's folder, which is replaced.")],
    activation: Annotated[str, typer.Option(help="relu on the gate, or drelu: on gate and up.")] = "relu",
    steps: Annotated[int, typer.Option(help="Train for so many steps; 0 for no bound.", min=0)] = 0,
    minutes: Annotated[float, typer.Option(help="Train for so long; 0 for no bound.", min=0)] = 0.0,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the checkpoint in the work folder.")] = False,
    work: Annotated[Path | None, typer.Option(help="Where the state is; build/relufy-NAME if not given.")] = None,
    seed: Annotated[
        int, typer.Option(help="Seed of the order of the text, and of the text that the model generates.", min=0)
    ] = 0,
    threads: Annotated[int, typer.Option(help="CPU threads.", min=1)] = 2,
    solve_tokens: Annotated[int, typer.Option(help="Tokens read for the least squares; 0 for none.", min=0)] = 32_768,
    blocks: Annotated[float, typer.Option(help="Share of the training block by block.", min=0, max=1)] = 0.1,
    l1: Annotated[float, typer.Option(help="Penalty on the neurons' contributions, for sparsity.", min=0)] = 0.0,
    block_learning_rate: Annotated[float, typer.Option(help="Peak learning rate, block by block.")] = 3e-4,
    learning_rate: Annotated[float, typer.Option(help="Peak learning rate, of the whole model.")] = 3e-4,
    window: Annotated[int, typer.Option(help="Tokens in a row of text.", min=2)] = 256,
    rows: Annotated[int, typer.Option(help="Rows in one update.", min=1)] = 2,
    tokens: Annotated[int, typer.Option(help="Of the library's text, before it is read again.", min=2)] = 1_000_000,
    own_tokens: Annotated[int, typer.Option(help="Of the model's own text; 0 for none.", min=0)] = 8192,
    probe_tokens: Annotated[int, typer.Option(help="Held out to measure on.", min=2)] = 4096,
    image: Annotated[Path | None, typer.Option("--plot", help="A picture of the measurements.")] = None,
) -> None:
    """Replace SiLU by ReLU in MODEL, and train the copy to give what MODEL gives."""
    if activation not in ACTIVATIONS:
        raise UsageError(f"unknown activation {activation!r}; known are {', '.join(ACTIVATIONS)}")
    if not steps and not minutes:
        raise UsageError("say how long to train, with --steps or --minutes")
    torch.set_num_threads(threads)
    torch.manual_seed(seed)
    check_output(out)
    work = work or Path("build") / f"relufy-{model.stem}"
    pair = open_pair(model, activation)
    if window > pair.positions:
        raise UsageError(f"a window of {window} tokens is more than the model's {pair.positions} positions")
    options = TextOptions(window, tokens, own_tokens, probe_tokens, seed)
    recipe = Recipe(steps, minutes, blocks, solve_tokens, rows, l1, block_learning_rate, learning_rate)
    inputs = _inputs(model, activation, options, recipe)
    if resume:
        require_checkpoint(work, inputs)
    work.mkdir(parents=True, exist_ok=True)
    if not resume:
        (work / CHECKPOINT).unlink(missing_ok=True)
    texts = read_texts(model, open_tokenizer(model, pair.vocabulary), options, work)
    say(f"{texts.library.numel():,} tokens of the library, {texts.own.numel():,} of the model's own")
    facts = {"activation": activation, "threads": threads, "l1": l1, "text": vars(options), "recipe": vars(recipe)}

    def note(state: State) -> None:
        with atomic_file(work / MEASUREMENTS) as file:
            file.write(json_bytes(_measurements(facts, pair, state)))

    trainer = Trainer(pair, texts, recipe, work, inputs, note)
    stopped = trainer.run()
    if stopped is not None:
        say(f"stopped at step {trainer.state.step}; --resume goes on")
        raise typer.Exit(128 + stopped)
    measurements = _measurements(facts, pair, trainer.state)
    save_folder(model, pair, measurements, out)
    if image is not None:
        plot(measurements, image)
    print(table(trainer.state.records, "library"))


def _inputs(model: Path, activation: str, options: TextOptions, recipe: Recipe) -> dict[str, Any]:
    """Return what a training depends on, besides how long it lasts, by the names of the options."""
    return {
        "MODEL": fingerprint(model),
        "--activation": activation,
        "--window": options.window,
        "--tokens": options.tokens,
        "--own-tokens": options.own,
        "--probe-tokens": options.probe,
        "--seed": options.seed,
        "--rows": recipe.rows,
        "--solve-tokens": recipe.solve_tokens,
        "--blocks": recipe.blocks,
        "--l1": recipe.l1,
        "--block-learning-rate": recipe.block_learning_rate,
        "--learning-rate": recipe.learning_rate,
    }


def _measurements(facts: dict[str, Any], pair: Pair, state: State) -> dict[str, Any]:
    trained = sum(parameter.numel() for parameter in pair.trained().values())
    whole = sum(parameter.numel() for parameter in pair.copy.parameters())
    counts = {"steps": state.step, "parameters": whole, "trained_parameters": trained}
    return {**facts, **counts, "records": state.records}


if __name__ == "__main__":
    try:
        typer.run(main)
    except PicompileError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
