"""Faults made from a module's syntax tree: one condition negated, one operand swapped, one rule left out.

Each `Mutant` changes one place of one file and leaves the rest of its text as it is. What stands in annotations,
docstrings, messages of errors and `if TYPE_CHECKING` is left alone: nothing there is computed. So is what guards
against a mistake in the source, and does not change what it does: `Literal[…]`, and how a dataclass is made.
"""

import ast
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

_OTHER_OPERATOR: dict[type[ast.operator], str] = {
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "+",
    ast.Div: "*",
    ast.FloorDiv: "*",
    ast.Mod: "//",
    ast.BitOr: "&",
    ast.BitAnd: "|",
    ast.LShift: ">>",
    ast.RShift: "<<",
}
_NOT_COMMUTATIVE = (ast.Sub, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow, ast.MatMult, ast.LShift, ast.RShift)
# The same limit, moved by one.
_NEXT_LIMIT: dict[type[ast.cmpop], str] = {ast.Lt: "<=", ast.LtE: "<", ast.Gt: ">=", ast.GtE: ">"}
_OPPOSITE: dict[type[ast.cmpop], str] = {
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Lt: ">=",
    ast.LtE: ">",
    ast.Gt: "<=",
    ast.GtE: "<",
}


@dataclass(frozen=True)
class Mutant:
    """A file with one fault.

    Attributes:
        file: relative to the root of the repository.
        line: where the fault begins, from 1.
        lines: all lines that the place spans.
        where: the function or class that has it, with dots; empty at a module's level.
        kind: what was done, such as "negates a condition".
        start, end: the place in the file's UTF-8 bytes.
        old, new: its text before and after.
    """

    file: str
    line: int
    lines: range
    where: str
    kind: str
    start: int
    end: int
    old: str
    new: str

    @property
    def name(self) -> str:
        """A name that stays while other parts of the file change."""
        return f"{self.where or 'module'}: {self.kind}: {_short(self.old)} → {_short(self.new)}"

    def applied(self, source: bytes) -> bytes:
        """Return the file's text with the fault."""
        return source[: self.start] + self.new.encode() + source[self.end :]


def _short(text: str, most: int = 60) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= most else f"{flat[: most - 1]}…"


def mutants_of(root: Path, file: Path) -> list[Mutant]:
    """Return every fault of a file. Some may be no Python: see `is_a_fault`."""
    source = file.read_bytes()
    return list(_Places(source, file.relative_to(root).as_posix()).visit(ast.parse(source), ""))


def is_a_fault(mutant: Mutant, source: bytes) -> bool:
    """Return whether the file with the fault is Python, and another program than `source`."""
    try:
        changed = ast.parse(mutant.applied(source))
    except SyntaxError:
        return False
    return ast.dump(changed) != ast.dump(ast.parse(source))


def draw(root: Path, folders: Iterable[str], number: int | None, seed: int) -> list[Mutant]:
    """Return `number` faults (None: all) of the modules in folders, or of files, each as likely as any other.

    They are in the order of their places.
    """
    paths = [root / folder for folder in folders]
    files = sorted({file for path in paths for file in ([path] if path.is_file() else path.rglob("*.py"))})
    known = [mutant for file in files for mutant in mutants_of(root, file)]
    random.Random(seed).shuffle(known)
    drawn: list[Mutant] = []
    for mutant in known:
        if len(drawn) == number:
            break
        if is_a_fault(mutant, (root / mutant.file).read_bytes()):
            drawn.append(mutant)
    return sorted(drawn, key=lambda each: (each.file, each.start))


class _Places:
    """Walks over a syntax tree and yields the faults of each node."""

    def __init__(self, source: bytes, file: str) -> None:
        self.source, self.file = source, file
        self.line_starts = [0]
        for line in source.splitlines(keepends=True):
            self.line_starts.append(self.line_starts[-1] + len(line))

    def visit(self, node: ast.AST, where: str) -> Iterator[Mutant]:
        """Yield the faults of a node and of what it holds."""
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.AsyncFunctionDef):
            where = f"{where}.{node.name}" if where else node.name
        for kind, place, new in self._faults(node, where):
            start, end = self._span(place)
            old = self.source[start:end].decode()
            lines = range(place.lineno, (place.end_lineno or place.lineno) + 1)
            yield Mutant(self.file, place.lineno, lines, where, kind, start, end, old, new)
        for child in _computed(node):
            yield from self.visit(child, where)

    def _faults(self, node: ast.AST, where: str) -> Iterator[tuple[str, ast.expr | ast.stmt, str]]:
        """Yield what is done, to which node, and the text that takes its place."""
        if isinstance(node, ast.If | ast.IfExp | ast.While) and not isinstance(node.test, ast.Compare | ast.UnaryOp):
            yield "negates a condition", node.test, f"(not {self._operand(node.test)})"
        elif isinstance(node, ast.comprehension):
            for test in node.ifs:
                yield "drops a filter", test, "True"
        elif isinstance(node, ast.Compare) and len(node.ops) == 1:
            yield from self._comparison(node)
        elif isinstance(node, ast.BoolOp):
            word, other = (" and ", " or ") if isinstance(node.op, ast.And) else (" or ", " and ")
            texts = [self._operand(value) for value in node.values]
            yield "and for or", node, f"({other.join(texts)})"
            for index in range(len(texts)):
                yield "drops a condition", node, f"({word.join(texts[:index] + texts[index + 1 :])})"
        elif isinstance(node, ast.BinOp):
            yield from self._arithmetic(node)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.Not):
            yield "drops a sign", node, self._operand(node.operand)
        elif isinstance(node, ast.Constant):
            yield from self._constant(node)
        elif isinstance(node, ast.Call):
            yield from self._call(node)
        elif isinstance(node, ast.Tuple | ast.List | ast.Set | ast.Dict) and not where:
            yield from self._rules(node)
        elif isinstance(node, ast.stmt):
            yield from self._statement(node)

    def _comparison(self, node: ast.Compare) -> Iterator[tuple[str, ast.expr, str]]:
        left, right, kind = self._operand(node.left), self._operand(node.comparators[0]), type(node.ops[0])
        yield "turns a comparison round", node, f"({left} {_OPPOSITE[kind]} {right})"
        if kind in _NEXT_LIMIT:
            yield "moves a limit by one", node, f"({left} {_NEXT_LIMIT[kind]} {right})"

    def _arithmetic(self, node: ast.BinOp) -> Iterator[tuple[str, ast.expr, str]]:
        left, right = self._operand(node.left), self._operand(node.right)
        if any(_is_text(side) for side in (node.left, node.right)):
            return
        if other := _OTHER_OPERATOR.get(type(node.op)):
            yield "takes another operator", node, f"({left} {other} {right})"
        if isinstance(node.op, _NOT_COMMUTATIVE):
            between = self.source[self._span(node.left)[1] : self._span(node.right)[0]].decode().strip(" ()\n")
            yield "swaps operands", node, f"({right} {between} {left})"

    def _constant(self, node: ast.Constant) -> Iterator[tuple[str, ast.expr, str]]:
        if isinstance(node.value, bool):
            yield "says the opposite", node, repr(not node.value)
        elif isinstance(node.value, int):
            yield "is off by one", node, repr(node.value + 1)
        elif isinstance(node.value, float):
            yield "doubles a number", node, repr(2 * node.value or 1.0)

    def _call(self, node: ast.Call) -> Iterator[tuple[str, ast.expr, str]]:
        texts = [self._text(each) for each in node.args]
        given = [self._text_of_keyword(each) for each in node.keywords]
        called = self._text(node.func)
        if len(texts) > 1 and not any(isinstance(each, ast.Starred) for each in node.args[:2]):
            yield "swaps arguments", node, f"{called}({', '.join([texts[1], texts[0], *texts[2:], *given])})"
        for index, keyword in enumerate(node.keywords):
            if keyword.arg is not None:
                yield "drops an argument", node, f"{called}({', '.join(texts + given[:index] + given[index + 1 :])})"

    def _rules(self, node: ast.Tuple | ast.List | ast.Set | ast.Dict) -> Iterator[tuple[str, ast.expr, str]]:
        """Yield tables of a module that have one entry less."""
        if isinstance(node, ast.Dict):
            texts = [
                f"{self._text(key)}: {self._text(value)}" if key is not None else f"**{self._text(value)}"
                for key, value in zip(node.keys, node.values, strict=True)
            ]
        else:
            texts = [self._text(each) for each in node.elts]
        left, right = {ast.Tuple: "()", ast.List: "[]"}.get(type(node), "{}")
        for index in range(len(texts) if len(texts) > 1 else 0):
            rest = ", ".join(texts[:index] + texts[index + 1 :])
            yield "drops a rule", node, f"{left}{rest},{right}"

    def _statement(self, node: ast.stmt) -> Iterator[tuple[str, ast.stmt, str]]:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            yield "drops a call", node, "pass"
        elif isinstance(node, ast.AugAssign | ast.Continue) or _writes_into(node):
            yield "drops a statement", node, "pass"
        elif isinstance(node, ast.Raise):
            yield "drops an error", node, "pass"
        elif isinstance(node, ast.Return) and node.value is not None and not _is_none(node.value):
            yield "returns nothing", node, "return None"

    def _text_of_keyword(self, keyword: ast.keyword) -> str:
        return f"{keyword.arg}={self._text(keyword.value)}" if keyword.arg else f"**{self._text(keyword.value)}"

    def _text(self, node: ast.expr) -> str:
        start, end = self._span(node)
        return self.source[start:end].decode()

    def _operand(self, node: ast.expr) -> str:
        text = self._text(node)
        simple = ast.Name | ast.Attribute | ast.Subscript | ast.Call | ast.Constant
        return text if isinstance(node, simple) else f"({text})"

    def _span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        first, last = self.line_starts[node.lineno - 1], self.line_starts[node.end_lineno - 1]
        return first + node.col_offset, last + node.end_col_offset


def _writes_into(node: ast.stmt) -> bool:
    return isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Subscript | ast.Attribute)


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_text(node: ast.expr) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _computed(node: ast.AST) -> Sequence[ast.AST]:
    """Return a node's children, but for what only readers, type checkers and users read."""
    if isinstance(node, ast.Raise | ast.Import | ast.ImportFrom | ast.JoinedStr | ast.Assert):
        return ()
    if isinstance(node, ast.AnnAssign):
        return () if node.value is None else (node.value,)
    if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
        return ()
    if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
        return node.orelse
    if isinstance(node, ast.Subscript) and ast.unparse(node.value) == "Literal":
        return ()
    if isinstance(node, ast.ClassDef):
        decorators = [each for each in node.decorator_list if not ast.unparse(each).startswith("dataclass")]
        return (*decorators, *node.bases, *node.keywords, *node.body)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        defaults = [each for each in (*node.args.defaults, *node.args.kw_defaults) if each is not None]
        return (*node.decorator_list, *defaults, *node.body)
    return tuple(ast.iter_child_nodes(node))
