"""Draw architecture.svg: the steps of a compilation with the types between them, the runtime, and the five packages.

python docs/images/draw_architecture.py > docs/images/architecture.svg
"""

from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 1120, 890
# The colour of a package: border, and fill.
COLOURS = {
    "picompile": ("#1f6feb", "#eaf2fe"),
    "passes": ("#1a7f37", "#e6f6ea"),
    "codegen": ("#bc4c00", "#fdf0e6"),
    "runtime": ("#8250df", "#f3ecfd"),
    "server": ("#bf3989", "#fdedf6"),
    "file": ("#6e7781", "#f6f8fa"),
}
TEXT, MUTED = "#1f2328", "#57606a"


@dataclass(frozen=True)
class Box:
    """A box with a title and lines below it; `package` gives its colour."""

    x: int
    y: int
    width: int
    height: int
    package: str
    title: str
    lines: tuple[str, ...] = ()

    @property
    def right(self) -> int:
        """The x of its right side."""
        return self.x + self.width

    @property
    def middle(self) -> int:
        """The y of its middle."""
        return self.y + self.height // 2

    def draw(self) -> str:
        """Return the box as SVG."""
        border, fill = COLOURS[self.package]
        shape = f'<rect x="{self.x}" y="{self.y}" width="{self.width}" height="{self.height}" rx="6" '
        parts = [shape + f'fill="{fill}" stroke="{border}" stroke-width="1.5"/>']
        parts.append(label(self.x + 12, self.y + 23, self.title, size=15, weight="bold", colour=border))
        for number, line in enumerate(self.lines):
            parts.append(label(self.x + 12, self.y + 43 + 17 * number, line, size=12.5))
        return "\n".join(parts)


def label(
    x: float,
    y: float,
    text: str,
    *,
    size: float = 13,
    weight: str = "normal",
    colour: str = TEXT,
    anchor: str = "start",
) -> str:
    """Return a line of text. Names in `backticks` are drawn in a fixed-width font."""
    parts = escape(text).split("`")
    code = f'<tspan font-family="Menlo, Consolas, DejaVu Sans Mono, monospace" font-size="{0.92 * size:.1f}">'
    spans = "".join(f"{code}{part}</tspan>" if number % 2 else part for number, part in enumerate(parts))
    style = f'font-size="{size}" font-weight="{weight}" fill="{colour}" text-anchor="{anchor}"'
    return f'<text x="{x}" y="{y}" {style}>{spans}</text>'


def arrow(points: list[tuple[int, int]], *, dashed: bool = False) -> str:
    """Return a line through `points` with a head at its end."""
    path = " ".join(f"{x},{y}" for x, y in points)
    dash = ' stroke-dasharray="5 4"' if dashed else ""
    return f'<polyline points="{path}" fill="none" stroke="{TEXT}" stroke-width="1.5"{dash} marker-end="url(#head)"/>'


def typed_arrow(left: Box, right: Box, *types: str) -> str:
    """Return an arrow between two boxes of one row: the type above it, what that holds below it."""
    middle, y = (left.right + right.x) / 2, left.middle
    parts = [arrow([(left.right, y), (right.x - 2, y)]), label(middle, y - 9, types[0], size=12.5, anchor="middle")]
    for number, line in enumerate(types[1:]):
        parts.append(label(middle, y + 18 + 15 * number, line, size=11.5, colour=MUTED, anchor="middle"))
    return "\n".join(parts)


def heading(y: int, text: str) -> str:
    """Return the heading of a part."""
    return label(24, y, text, size=16, weight="bold")


def compilation() -> list[str]:
    """Return the first part: the driver's steps in two rows."""
    width, height, gap = 184, 84, 104
    left = [24 + number * (width + gap) for number in range(4)]
    first, second = 104, 290
    capture = Box(left[0], first, width, height, "picompile", "1 capture", ("torch.export, no weights", "`frontend/`"))
    resolve = Box(left[1], first, width, height, "picompile", "2 resolve", ("options without None", "`config.py`"))
    predict = Box(
        left[2], first, width, height, "picompile", "3 predictors", ("profile, train, or load", "`predictors/`")
    )
    plan = Box(left[3], first, width, height, "picompile", "4 plan", ("which neurons are hot", "`placement/`"))
    rewrite = Box(
        left[0], second, width, height, "passes", "5 passes", ("canonical → predicted", "→ partitioned → quantized")
    )
    lower = Box(left[1], second, width, height, "codegen", "6 lower", ("calls, buffers, kernels", "`lowering/`"))
    write = Box(
        left[2],
        second,
        width,
        height,
        "picompile",
        "7 write",
        ("code, packed weights", "`artifact/`, `build/`"),
    )
    check = Box(
        left[3], second, width, height, "picompile", "8 accuracy check", ("perplexity, by running it", "`predictors/`")
    )
    boxes = [capture, resolve, predict, plan, rewrite, lower, write, check]
    turn = (plan.y + plan.height + rewrite.y) // 2 - 6
    return [
        heading(36, "A compilation: picompile/compile/"),
        label(
            24,
            60,
            "Each arrow carries one typed value. Boxes have the colour of the package that does the step.",
            colour=MUTED,
        ),
        arrow([(left[0] + width // 2, 74), (left[0] + width // 2, first - 2)]),
        label(left[0] + width // 2 + 10, 90, "checkpoint, or a torch.nn.Module", size=12.5, colour=MUTED),
        *(box.draw() for box in boxes),
        typed_arrow(capture, resolve, "`Captured`", "FX graph,", "`ModelFacts`"),
        typed_arrow(resolve, predict, "`CompileConfig`"),
        typed_arrow(predict, plan, "`PredictorSet`", "kind and weights", "for each layer"),
        arrow(
            [
                (plan.x + width // 2, plan.y + height),
                (plan.x + width // 2, turn),
                (rewrite.x + width // 2, turn),
                (rewrite.x + width // 2, second - 2),
            ]
        ),
        label(
            left[0] + width // 2 + 14,
            turn - 8,
            "`Plan`: the hot neurons of each layer, and what else goes to the accelerator",
            size=12.5,
        ),
        typed_arrow(rewrite, lower, "`GraphModule`", "at stage", "quantized"),
        typed_arrow(lower, write, "`Lowered`", "`Program`", "and kernels"),
        typed_arrow(write, check, "artifact", "a folder"),
        arrow(
            [
                (check.right, check.middle),
                (check.right + 24, check.middle),
                (check.right + 24, 416),
                (check.x + 152, 416),
            ]
        ),
        label(check.x + 146, 420, "`AccuracyReport`", size=12.5, anchor="end"),
        arrow(
            [
                (check.x + 120, second),
                (check.x + 120, turn + 34),
                (predict.x + 60, turn + 34),
                (predict.x + 60, first + height + 2),
            ],
            dashed=True,
        ),
        label(predict.x + 70, turn + 28, "beyond the bound: larger predictors", size=11.5, colour=MUTED),
    ]


def decoding() -> list[str]:
    """Return the second part: what the runtime does with an artifact."""
    y, width, height, gap = 500, 204, 76, 77
    left = [24 + number * (width + gap) for number in range(4)]
    artifact = Box(
        left[0], y, width, height, "file", "artifact", ("manifest, program, weights,", "machine code, tokenizer")
    )
    load = Box(left[1], y, width, height, "runtime", "load", ("checks hashes, maps the", "code, checks every call"))
    step = Box(
        left[2], y, width, height, "runtime", "step", ("calls of `decode`: on the host,", "and on the accelerator")
    )
    sample = Box(left[3], y, width, height, "runtime", "sample", ("from logits, or from the", "top logits alone"))
    loop = y + height + 24
    return [
        heading(474, "A run: picompile_runtime"),
        *(box.draw() for box in (artifact, load, step, sample)),
        typed_arrow(artifact, load, "files"),
        typed_arrow(load, step, "`Engine`"),
        typed_arrow(step, sample, "scores"),
        arrow(
            [
                (sample.x + width // 2, y + height),
                (sample.x + width // 2, loop),
                (step.x + width // 2, loop),
                (step.x + width // 2, y + height + 2),
            ]
        ),
        label((step.x + sample.x + width) // 2, loop - 7, "the next token", size=12.5, anchor="middle"),
    ]


def packages() -> list[str]:
    """Return the third part: who imports whom."""
    y, height, lower = 692, 128, 762
    driver = Box(
        24,
        y,
        230,
        height,
        "picompile",
        "picompile",
        ("driver, command line, plans,", "predictors, reports", "transformers, HiGHS, typer"),
    )
    codegen = Box(374, y, 230, 58, "codegen", "picompile_codegen", ("kernels, lowering; TVM",))
    passes = Box(724, y, 250, 58, "passes", "picompile_passes", ("dialect, passes, verifier; torch",))
    server = Box(374, lower, 230, 58, "server", "picompile_server", ("scheduler, HTTP server; starlette",))
    runtime = Box(724, lower, 250, 58, "runtime", "picompile_runtime", ("numpy, tokenizers, Jinja alone",))
    below = lower + 58 + 16
    note = "No arrow leads back: runtime and server need neither torch nor TVM, and passes know nothing of kernels."
    return [
        heading(666, "The packages: an arrow is an import"),
        *(box.draw() for box in (driver, codegen, passes, server, runtime)),
        arrow([(driver.right, codegen.middle), (codegen.x - 2, codegen.middle)]),
        arrow([(codegen.right, codegen.middle), (passes.x - 2, codegen.middle)]),
        arrow([(314, codegen.middle), (314, y - 12), (passes.x + 125, y - 12), (passes.x + 125, y - 2)]),
        arrow([(driver.right, server.middle), (server.x - 2, server.middle)]),
        arrow([(server.right, server.middle), (runtime.x - 2, server.middle)]),
        arrow([(314, server.middle), (314, below), (runtime.x + 125, below), (runtime.x + 125, lower + 60)]),
        label(24, below + 28, note, size=12.5, colour=MUTED),
    ]


def main() -> None:
    """Print the picture. Its background is its own, so it reads in light and dark pages alike."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" height="{HEIGHT}" '
        'font-family="Helvetica, Arial, sans-serif" role="img" aria-labelledby="title">',
        '<title id="title">The steps of a compilation, of a run, and the five packages</title>',
        '<defs><marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="8" markerHeight="8" orient="auto">'
        f'<path d="M0 0 L10 5 L0 10 z" fill="{TEXT}"/></marker></defs>',
        f'<rect x="0.5" y="0.5" width="{WIDTH - 1}" height="{HEIGHT - 1}" rx="8" fill="#ffffff" stroke="#d0d7de"/>',
        *compilation(),
        *decoding(),
        *packages(),
        "</svg>",
    ]
    print("\n".join(parts))


if __name__ == "__main__":
    main()
