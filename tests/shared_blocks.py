"""The blocks that the scripts of algos/ have in common are duplicated on purpose; this keeps the copies in step.

Two blocks of the same name (a function, a class, a constant, a field of Args) must be textually identical in every
script, unless the line above says

    # Differs from algos/grpo.py: <reason>

    python tests/shared_blocks.py            # list what differs from algos/grpo.py; exit code 1 if anything does
    python tests/shared_blocks.py --write    # copy the blocks of algos/grpo.py into the other scripts
"""

import ast
import sys
from dataclasses import dataclass
from pathlib import Path

ALGOS = Path(__file__).resolve().parents[1] / "algos"
SOURCE = ALGOS / "grpo.py"
MARKER = "# Differs from algos/grpo.py: "


@dataclass(frozen=True)
class Block:
    """A named piece of a script: lines[start:end], decorators and a field's help string included."""

    name: str
    start: int
    end: int
    text: str
    marked: bool


def blocks(source: str) -> dict[str, Block]:
    """Every named block of a script; fields of Args are called "Args.<field>"."""
    lines = source.splitlines(keepends=True)
    found: dict[str, Block] = {}

    def add(name: str, first: ast.AST, last: ast.AST) -> None:
        decorators = getattr(first, "decorator_list", [])
        start = min([first.lineno, *(d.lineno for d in decorators)]) - 1
        text = "".join(lines[start : last.end_lineno])
        marked = start > 0 and lines[start - 1].strip().startswith(MARKER)
        found[name] = Block(name, start, last.end_lineno, text, marked)

    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and node.name == "Args":
            fields = [n for n in node.body if isinstance(n, ast.AnnAssign)]
            for field in fields:
                after = node.body[node.body.index(field) + 1 : node.body.index(field) + 2]
                has_help = after and isinstance(after[0], ast.Expr)
                add(f"Args.{field.target.id}", field, after[0] if has_help else field)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            add(node.name, node, node)
        elif isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            add(node.targets[0].id, node, node)
    return found


def differences(source: str, other: str) -> list[str]:
    """Names of the unmarked blocks of `other` that are not what `source` has under that name."""
    theirs = blocks(source)
    return [
        b.name for b in blocks(other).values() if b.name in theirs and not b.marked and b.text != theirs[b.name].text
    ]


def needless_markers(source: str, other: str) -> list[str]:
    """Names of the blocks that are marked as different but are the same, or exist in `other` alone."""
    theirs = blocks(source)
    return [
        b.name for b in blocks(other).values() if b.marked and (b.name not in theirs or b.text == theirs[b.name].text)
    ]


def carry_over(source: str, other: str) -> str:
    """`other` with its unmarked blocks replaced by those of `source`."""
    theirs = blocks(source)
    lines = other.splitlines(keepends=True)
    for block in sorted(blocks(other).values(), key=lambda block: -block.start):
        if block.name in theirs and not block.marked:
            lines[block.start : block.end] = [theirs[block.name].text]
    return "".join(lines)


def scripts() -> list[Path]:
    return [path for path in sorted(ALGOS.glob("*.py")) if path != SOURCE]


def main() -> int:
    source = SOURCE.read_text()
    failed = False
    for path in scripts():
        other = path.read_text()
        if "--write" in sys.argv[1:]:
            new = carry_over(source, other)
            if new != other:
                path.write_text(new)
                print(f"{path.name}: copied {', '.join(differences(source, other))}")
            continue
        for name in differences(source, other):
            failed = True
            print(f"{path.name}: {name} differs from algos/grpo.py; copy it with --write, or say why above it")
        for name in needless_markers(source, other):
            failed = True
            print(f"{path.name}: {name} is marked as different but is not")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
