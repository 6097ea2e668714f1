"""Collects functions and classes of this project, with all definitions that they need, into one Python file.

They are copied from the modules' source, so there is no second version to maintain. Unneeded ones are left out."""

import ast
import functools
import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

OURS = ("dit", "rf", "routing_module", "tread")
Name = tuple[str, str]  # a module and a name in it


@dataclass
class Source:
    """A parsed module: dotted name, source lines, definitions, imports, and additions to dicts such as RULES |= …."""

    module: str
    lines: list[str]
    defined: dict[str, list[ast.stmt]] = field(default_factory=dict)  # name → statements that define it
    imported: dict[str, tuple[str, str]] = field(default_factory=dict)  # name → (module, statement that imports it)
    entered: list[tuple[str, ast.stmt]] = field(default_factory=list)  # (a dict's name, statement that adds to it)


@functools.cache
def read_source(module: str) -> Source:
    text = Path(importlib.util.find_spec(module).origin).read_text(encoding="utf-8")
    source = Source(module, text.splitlines())
    for statement in ast.parse(text).body:
        match statement:
            case ast.Import(names=items) | ast.ImportFrom(names=items):
                for item in items:
                    statement.names = [item]  # a line of its own for each name
                    origin, ours = getattr(statement, "module", item.name), getattr(statement, "level", 0)
                    if ours or item.asname and origin.partition(".")[0] in OURS:
                        raise ValueError(f"{module} has {ast.unparse(statement)!r}: state the module, without `as`")
                    source.imported[item.asname or item.name.partition(".")[0]] = origin, ast.unparse(statement)
            case (
                ast.FunctionDef(name=name)
                | ast.ClassDef(name=name)
                | ast.AnnAssign(target=ast.Name(id=name))
                | ast.Assign(targets=[ast.Name(id=name)])
            ):
                source.defined.setdefault(name, []).append(statement)
            case ast.Assign(targets=[ast.Tuple(elts=names)]):
                for target in names:
                    source.defined.setdefault(target.id, []).append(statement)
            case ast.AugAssign(target=ast.Name(id=name)):
                source.entered.append((name, statement))
    return source


class Bundle:
    """Collects definitions, each with all that it needs (`add`), and returns them as the text of one file (`text`).
    `instead` is {(module, name): source text to use in place of that name's own definition}."""

    def __init__(self, instead: Mapping[Name, str]) -> None:
        self.instead = instead
        self.sources: dict[str, Source] = {}  # by module, imported modules before those that import them
        self.wanted: dict[str, str] = {}  # name of a definition in the file → its module
        self.outside: dict[str, str] = {}  # name of another package's object → statement that imports it

    def add(self, module: str, name: str) -> None:
        """Add the definition of a module's `name`, and all that it needs. Raises ValueError if the module has no such
        name, or if the file already has this name from another module."""
        source = self._source(module)
        if name in source.imported:
            origin, statement = source.imported[name]
            if origin.partition(".")[0] in OURS:
                self.add(origin, name)
            elif self.outside.setdefault(name, statement) != statement:
                raise ValueError(f"{module} has {statement!r}, another module {self.outside[name]!r}")
            return
        if name not in source.defined:
            raise ValueError(f"{module} has no {name}")
        if self.wanted.get(name) == module:
            return
        if name in self.wanted:
            raise ValueError(f"{name} is defined in {self.wanted[name]} and in {module}: one file can hold only one")
        self.wanted[name] = module
        if (module, name) not in self.instead:
            self._add_used(source, source.defined[name])
        for other in list(self.sources.values()):
            self._add_used(other, [statement for table, statement in other.entered if self._is(other, table)])

    def _is(self, source: Source, table: str) -> bool:
        """Return whether the bundled file needs the statements by which the module `source` adds entries to the dict
        `table`: True if the file contains that dict and at least one definition from `source`."""
        return source.module in self.wanted.values() and table in self.wanted

    def _add_used(self, source: Source, statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            for node in ast.walk(statement):
                if isinstance(node, ast.Name) and (node.id in source.imported or node.id in source.defined):
                    self.add(source.module, node.id)

    def _source(self, module: str) -> Source:
        if module not in self.sources:
            source = read_source(module)
            for origin, _ in source.imported.values():
                if origin.partition(".")[0] in OURS:
                    self._source(origin)
            self.sources[module] = source
        return self.sources[module]

    def text(self, head: str) -> str:
        """Return the file's text: the docstring `head`, imports, then the definitions, module by module."""
        imports: dict[str, list[str]] = {}
        for statement in sorted(self.outside.values()):  # such as "from math import pi" or "import math"
            origin, word, name = statement.partition(" import ")
            imports.setdefault(origin + word, []).append(name)
        parts = [f'"""{head}"""', "\n".join(origin + ", ".join(names) for origin, names in imports.items())]
        for module, source in self.sources.items():
            chosen = {
                statement: self.instead.get((module, name))
                for name, home in self.wanted.items()
                if home == module
                for statement in source.defined[name]
            }
            chosen |= {statement: None for table, statement in source.entered if self._is(source, table)}
            for number, statement in enumerate(sorted(chosen, key=lambda statement: statement.lineno)):
                mark = "" if number else f"# {'-' * 12} {module}\n\n"
                parts.append(mark + (chosen[statement] or _segment(source.lines, statement)))
        return "\n\n\n".join(parts) + "\n"


def _segment(lines: Sequence[str], statement: ast.stmt) -> str:
    """Return a statement's lines, with its decorators and the comment right above it."""
    first = min([statement.lineno, *(item.lineno for item in getattr(statement, "decorator_list", ()))]) - 1
    while first and lines[first - 1].startswith("#"):
        first -= 1
    return "\n".join(lines[first : statement.end_lineno])
