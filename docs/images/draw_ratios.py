"""Draws docs/images/ratios.png from the first table of docs/benchmarks.md: `python docs/images/draw_ratios.py`.

A bar is the last number of a range, or the number of a list that `BARS` names.
"""

import re
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PAGE = Path(__file__).parents[1] / "benchmarks.md"
# Label, beginning of the row's task, peer, and which number of the ratio.
BARS = [
    ("ReGLU model, 10 % of the neurons fire: decode", "[decode](#decoding-and-prompts), reglu-1.3b", "llama.cpp", 0),
    ("the same: a prompt of 512 tokens", "[a prompt of 512 tokens]", "llama.cpp", 0),
    ("the same: 32 sequences together", "[32 sequences]", "llama.cpp", 0),
    ("the same predictors: decode", "[decode, the same predictors]", "PowerInfer", 0),
    ("SiLU model, Q4_K_M file: decode", "[a published file's numbers]", "llama.cpp", 0),
    ("SiLU model, IQ4_XS file: decode", "the same, IQ4_XS", "llama.cpp", 0),
    ("mixture of OLMoE's shape: decode", "[mixture]", "the better of llama.cpp and ik_llama.cpp", 0),
    ("the same, experts with ReLU, 10 % fire: decode", "[experts with ReLU]", "llama.cpp", 0),
    ("mixture of Qwen3-30B-A3B's shape: decode", "mixture, Qwen3-30B-A3B", "llama.cpp", 0),
    ("every neuron computed, float16: decode (Zen 4)", "decode, every neuron computed", "llama.cpp", 1),
]


def ratio(text: str, task: str, peer: str, which: int) -> float:
    """Return the number of the row whose task begins with `task`."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if len(cells) == 4 and cells[0].startswith(task) and cells[1] == peer:
            numbers = cells[2].replace("**", "").split(",")
            return float(re.findall(r"[\d.]+", numbers[which])[-1])
    raise SystemExit(f"{PAGE}: no row {task} against {peer}")


def main() -> None:
    """Draw the bars."""
    text = PAGE.read_text(encoding="utf-8")
    values = [ratio(text, task, peer, which) for _, task, peer, which in BARS]
    figure, axes = plt.subplots(figsize=(9, 3.9), dpi=110)
    positions = range(len(BARS))
    axes.barh(positions, values, color=["#2a78b5" if value >= 1 else "#b5512a" for value in values], height=0.66)
    axes.axvline(1, color="#555555", linewidth=1)
    for position, value, (_, _, peer, _) in zip(positions, values, BARS, strict=True):
        name = peer.replace("the better of ", "").replace(" and ", ", ")
        axes.text(value + 0.05, position, f"{value:.2g} × {name}", va="center", fontsize=8.5)
    axes.set_yticks(positions, [label for label, _, _, _ in BARS], fontsize=9)
    axes.invert_yaxis()
    axes.set_xlim(0, max(values) + 0.9)
    axes.set_xlabel("picompile's tokens/s over the peer's, two threads on two cores", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(Path(__file__).with_name("ratios.png"), metadata={"Software": None})


if __name__ == "__main__":
    main()
