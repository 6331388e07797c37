"""Reads the text that `picompile_passes.graph.dump` writes. Imports no torch: a dump can be looked at without it."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

_HEADER = re.compile(r"# stage (?P<stage>\S+), (?P<count>\d+) nodes")
_LINE = re.compile(r"(?P<name>\S+) {2,}(?P<shape>.*?) {2,}= (?P<rest>.+)")
_QUOTED = r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\""
_NOTES = re.compile(rf"{_QUOTED}|(?P<mark>  # )")
# A dotted word (torch.float32) is one word, and the e of 1e-06 is none: neither can be a node.
_WORD = re.compile(rf"(?P<text>{_QUOTED})|(?<![\w.])(?P<word>[A-Za-z_][\w.]*)")
_ARGUMENT_PARTS = re.compile(rf"{_QUOTED}|[()\[\]{{}}]|, ")
_NAMED = re.compile(r"(?P<name>[A-Za-z_]\w*)=(?P<value>.+)", re.DOTALL)
_NOTE = re.compile(rf"(?:(?P<key>\w+) (?P<value>{_QUOTED}|[^,]+)|(?P<word>[^,]+))(?:, |$)")
_FROM = re.compile(r"(?:(?P<before>.*), )?from (?P<pass_name>[\w.-]+)\((?P<sources>[^()]*)\)")


class DumpError(ValueError):
    """A text is not a dump. It is no `PassesError`, because `errors` imports torch, but has a user's exit code."""

    exit_code = 2


@dataclass(frozen=True)
class DumpNode:
    """One line of a dump.

    `operator` is `weight`, `placeholder`, `output` or what is called; `weight` is the parameter's or buffer's name and
    empty for all others. `arguments` are names and values as text, `inputs` the nodes among them, each once. `notes`
    holds `layer`, `neurons` and whatever else was annotated; `origin` the pass that made the node, and its sources.
    """

    name: str
    shape: str
    operator: str
    weight: str = ""
    arguments: tuple[tuple[str, str], ...] = ()
    inputs: tuple[str, ...] = ()
    notes: Mapping[str, str] = field(default_factory=dict)
    origin: tuple[str, tuple[str, ...]] | None = None

    @property
    def expression(self) -> str:
        """The right side of the line, as the dump has it."""
        if self.operator in ("weight", "placeholder"):
            return f"weight {self.weight}" if self.weight else self.operator
        given = ", ".join(f"{name}={value}" if name else value for name, value in self.arguments)
        return f"{self.operator}({given})"


@dataclass(frozen=True)
class DumpGraph:
    """A dump: the stage of the graph, and its nodes by name, in order."""

    stage: str
    nodes: Mapping[str, DumpNode]


def read_dump(text: str) -> DumpGraph:
    """The graph that `text` describes. Raises `DumpError`, with the line, where it is not a dump."""
    first, *lines = text.splitlines() or [""]
    header = _HEADER.fullmatch(first)
    if header is None:
        raise DumpError("not a dump: its first line is not '# stage ..., ... nodes'")
    nodes: dict[str, DumpNode] = {}
    for number, line in enumerate(lines, start=2):
        node = _read_line(line, number, nodes)
        if node.name in nodes:
            raise DumpError(f"not a dump: line {number} has node {node.name} a second time")
        nodes[node.name] = node
    if len(nodes) != int(header["count"]):
        raise DumpError(f"not a whole dump: it says {header['count']} nodes and has {len(nodes)}")
    return DumpGraph(header["stage"], nodes)


def words_of(value: str) -> Iterator[str]:
    """The words in the text of an argument that may be names of nodes; quoted text has none."""
    return (match["word"] for match in _WORD.finditer(value) if match["word"])


def replace_nodes(value: str, replace: Callable[[str], str]) -> str:
    """The text of an argument with every word in it, node or not, put through `replace`; quoted text is left alone."""
    return _WORD.sub(lambda match: match["text"] or replace(match["word"]), value)


def _read_line(line: str, number: int, earlier: Mapping[str, DumpNode]) -> DumpNode:
    match = _LINE.fullmatch(line)
    if match is None:
        raise DumpError(f"not a dump: line {number} is not 'name  shape  = expression'")
    expression, notes = _split_notes(match["rest"])
    notes, origin = _split_origin(notes)
    operator, weight, arguments = _read_expression(expression, number)
    words = (word for _, value in arguments for word in words_of(value))
    inputs = tuple(dict.fromkeys(word for word in words if word in earlier))
    return DumpNode(
        match["name"],
        shape=match["shape"],
        operator=operator,
        weight=weight,
        arguments=arguments,
        inputs=inputs,
        notes=_read_notes(notes),
        origin=origin,
    )


def _split_notes(rest: str) -> tuple[str, str]:
    for match in _NOTES.finditer(rest):
        if match["mark"]:
            return rest[: match.start()], rest[match.end() :]
    return rest, ""


def _split_origin(notes: str) -> tuple[str, tuple[str, tuple[str, ...]] | None]:
    match = _FROM.fullmatch(notes)
    if match is None:
        return notes, None
    sources = tuple(filter(None, match["sources"].split(", ")))
    return match["before"] or "", (match["pass_name"], sources)


def _read_notes(text: str) -> dict[str, str]:
    """`layer 0, hot, bytes 4096, why 'rare, and large'` by keys, values as they stand; a word alone is `neurons`."""
    return {match["key"] or "neurons": match["value"] or match["word"] for match in _NOTE.finditer(text)}


def _read_expression(text: str, number: int) -> tuple[str, str, tuple[tuple[str, str], ...]]:
    """Operator, name of the weight, and arguments."""
    if text == "placeholder":
        return text, "", ()
    if text.startswith("weight "):
        return "weight", text.removeprefix("weight "), ()
    operator, opening, rest = text.partition("(")
    if not opening or not rest.endswith(")"):
        raise DumpError(f"not a dump: line {number} calls nothing and reads no weight: {text}")
    return operator, "", tuple(map(_read_argument, split_arguments(rest[:-1])))


def _read_argument(text: str) -> tuple[str, str]:
    match = _NAMED.fullmatch(text)
    return (match["name"], match["value"]) if match else ("", text)


def split_arguments(text: str) -> list[str]:
    """The parts of `text` between commas that lie in no brackets and no quotes."""
    parts, depth, start = [], 0, 0
    for match in _ARGUMENT_PARTS.finditer(text):
        if match[0] in "([{":
            depth += 1
        elif match[0] in ")]}":
            depth -= 1
        elif match[0] == ", " and depth == 0:
            parts.append(text[start : match.start()])
            start = match.end()
    return [*parts, text[start:]] if text else []
