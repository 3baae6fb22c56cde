"""Sample mutants of the source: small changes that a test should notice. Cosmic Ray makes them, this file selects.

A mutant's key is stable while its line is: file, operator, which of the equal changes of the line it is, and the line.
The sample orders all mutants by a hash of seed and key, so that a change of one file leaves the sample of the others.
"""

from __future__ import annotations

import ast
import hashlib
import tomllib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Cosmic Ray finds its operators only after parso's two modules, which import each other
import parso.python.tree  # noqa: F401
from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names

PACKAGES = ("losses", "data", "models", "training", "engines", "checkpoint", "reference")
_ARITHMETIC = {"Add", "Sub", "Mul", "Div", "FloorDiv", "Mod", "Pow"}
_BITWISE = {"RShift", "LShift", "BitOr", "BitAnd", "BitXor"}
_IDENTITY = {"Is", "IsNot"}
_LOGS = {"log", "logger", "logging", "warnings", "set_activity"}
# what the names of paths end with: another operator than / is a TypeError
_PATHS = ("dir", "directory", "path", "root", "content", "output", "parent", "location", "checkpoint", "new", "old")
_Position = tuple[int, int]
_Span = tuple[_Position, _Position]


@dataclass(frozen=True)
class Mutant:
    path: str  # below src/thresher
    operator: str
    occurrence: int
    position: _Position
    key: str

    @property
    def package(self) -> str:
        return self.path.split("/")[0]

    @property
    def site(self) -> tuple[str, _Position, str]:
        """Where the change is, and of which kind: only one mutant of a site is sampled."""
        return self.path, self.position, self.operator.split("_")[0]

    def mutate(self, code: str) -> str:
        return str(mutate_code(code, get_operator(f"core/{self.operator}")(), self.occurrence))


def sample(source: Path, num_mutants: int, seed: int, left_out: Sequence[str]) -> list[Mutant]:
    """Mutants of different sites: half of them divided equally among the packages, half by their numbers of sites."""
    by_package: dict[str, list[Mutant]] = {}
    for package in PACKAGES:
        mutants = [mutant for path in sorted((source / package).rglob("*.py")) for mutant in mutants_of(source, path)]
        mutants.sort(key=lambda mutant: hashlib.sha256(f"{seed} {mutant.key}".encode()).digest())
        first_of_site = {mutant.site: mutant for mutant in reversed(mutants)}
        by_package[package] = [mutant for mutant in mutants if first_of_site[mutant.site] is mutant]
    num_sites = sum(map(len, by_package.values()))
    chosen: list[Mutant] = []
    exact = 0.0
    for mutants in by_package.values():
        exact += num_mutants * (0.5 / len(PACKAGES) + 0.5 * len(mutants) / num_sites)
        chosen += [mutant for mutant in mutants if mutant.key not in left_out][: round(exact) - len(chosen)]
    return chosen


def mutants_of(source: Path, path: Path) -> Iterator[Mutant]:
    """Every mutant of a file that could change what the program does and is not a certain TypeError."""
    code = path.read_text()
    name, lines, tree = path.relative_to(source).as_posix(), code.splitlines(), ast.parse(code)
    excluded, binary_operators = list(_texts_and_types(tree)), list(_binary_operators(tree))
    nodes = list(ast_nodes(get_ast(code)))
    for operator_name in operator_names():
        operator_class = get_operator(operator_name)
        operator = operator_name.removeprefix("core/")
        if operator_class.arguments() or not _keeps_types(operator):
            continue
        find = operator_class().mutation_positions
        positions = (position for node in nodes for position, _ in find(node))
        seen: Counter[str] = Counter()
        for occurrence, position in enumerate(positions):
            line = lines[position[0] - 1].strip()
            seen[line] += 1
            if _is_inside(position, excluded):
                continue
            # Cosmic Ray also replaces the stars of arguments, which is a SyntaxError
            if not operator.startswith("ReplaceBinaryOperator") or _is_inside(position, binary_operators):
                yield Mutant(name, operator, occurrence, position, f"{name} {operator} {seen[line]}: {line}")


def _keeps_types(operator: str) -> bool:
    kind, _, change = operator.partition("_")
    old, _, new = change.partition("_")
    if kind == "ReplaceBinaryOperator":
        return {old, new} <= _ARITHMETIC or {old, new} <= _BITWISE
    if kind == "ReplaceComparisonOperator":
        return (old in _IDENTITY) == (new in _IDENTITY)
    return True


def _is_inside(position: _Position, spans: Iterable[_Span]) -> bool:
    return any(start <= position < end for start, end in spans)


def _binary_operators(tree: ast.Module) -> Iterator[_Span]:
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and not (isinstance(node.op, ast.Div) and _is_path(node.left)):
            yield (node.left.end_lineno or 0, node.left.end_col_offset or 0), (node.right.lineno, node.right.col_offset)


def _texts_and_types(tree: ast.Module) -> Iterator[_Span]:
    """Where a change is never executed, or changes only a text or what a type forbids.

    These are annotations, type aliases, arguments of `dataclass`, and messages of errors and of the log.
    """
    found: list[Any] = [node for node in tree.body if isinstance(node, ast.Assign) and _is_type(node.value)]
    for node in ast.walk(tree):
        if isinstance(node, (ast.arg, ast.AnnAssign)):
            found.append(node.annotation)
        elif isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found.append(node.returns)
        elif isinstance(node, ast.ClassDef):
            found += [value for call in node.decorator_list if isinstance(call, ast.Call) for value in call.keywords]
        elif isinstance(node, ast.Raise) or _is_log_call(node):
            found.append(node)
    for node in found:
        if node is not None:
            yield (node.lineno, node.col_offset), (node.end_lineno, node.end_col_offset)


def _is_type(node: ast.expr) -> bool:
    return isinstance(node, ast.Subscript) or (isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr))


def _is_path(node: ast.expr) -> bool:
    return ast.unparse(node).endswith((*_PATHS, ".expanduser()", "'thresher'"))


def _is_log_call(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[0] in _LOGS


def lines_of(code: str, position: _Position) -> range:
    """Lines whose tests depend on the statement at a position.

    These are its own without those of statements inside it, but for a statement that runs at import the body of the
    function that it decorates or defines, or the whole file.
    """
    everything = range(1, code.count("\n") + 2)
    found = everything
    for node in ast.walk(ast.parse(code)):  # outer nodes come first
        if not isinstance(node, ast.stmt):
            continue
        last = (node.end_lineno or 0) + 1
        if not min([node.lineno, *(each.lineno for each in getattr(node, "decorator_list", ()))]) <= position[0] < last:
            continue
        body = getattr(node, "body", None)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found = range(node.body[0].lineno, last)
        elif found is not everything:
            found = range(node.lineno, body[0].lineno if body else last)
    return found


def read_equivalent(file: Path) -> dict[str, str]:
    """Keys of mutants that no test can kill, with the reasons."""
    return {entry["key"]: entry["reason"] for entry in tomllib.loads(file.read_text())["equivalent"]}
