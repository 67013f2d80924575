"""Fills the generated parts of the Markdown pages in docs/ from the sources, so that they cannot go stale.

    python docs/generate.py            # rewrite what is out of date
    python docs/generate.py --check    # name what is out of date and exit with code 1 if anything is

A generated block stands between two comments; what is between them is replaced:

    <!-- generated: diff rloo -->
    <!-- end -->

    diff SCRIPT               the unified diff of algos/SCRIPT.py against algos/grpo.py
    flags SCRIPT              the arguments of a script, with defaults and help
    changed-flags SCRIPT      only those that differ from grpo.py's, and those that are missing
    metrics SCRIPT            what the script logs, from docs/metrics.toml
    results SCRIPT            the runs recorded in benchmarks/results/tiny_SCRIPT/

A line pointer is a link whose title is a piece of the line that is meant: its line number is looked up.

    [rloo.py:180](../../algos/rloo.py#L180 "centred = rewards")
"""

import ast
import difflib
import json
import re
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
ALGOS = ROOT / "algos"
TINY = "assets/tiny-arith"

BLOCK = re.compile(r"(<!-- generated: (?P<kind>[\w-]+) (?P<script>\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
POINTER = re.compile(r'\[(?P<name>[\w.]+):\d*\]\((?P<path>[\w./-]+)#L\d* "(?P<piece>[^"]+)"\)')


class DocsError(Exception):
    """A page asks for something that is not there."""


@dataclass(frozen=True)
class Flag:
    """One field of a script's Args."""

    name: str
    default: str
    help: str
    group: str

    @property
    def spelling(self) -> str:
        """The flag as it is typed; a bool has a form that turns it off."""
        flag = "--" + self.name.replace("_", "-")
        return f"`{flag}`, `--no-{flag[2:]}`" if self.default in ("True", "False") else f"`{flag}`"


def flags(script: Path) -> list[Flag]:
    """The fields of the class Args, in their order, without importing the script."""
    source = script.read_text()
    groups = {i: m[1] for i, line in enumerate(source.splitlines(), 1) if (m := re.match(r"    # -- (.*) --$", line))}
    (args,) = [n for n in ast.parse(source).body if isinstance(n, ast.ClassDef) and n.name == "Args"]
    found = []
    for field, after in zip(args.body, args.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(after, ast.Expr):
            default = str(eval(ast.unparse(field.value), {"TINY": TINY}))  # noqa: S307 (our own source)
            group = groups[max(line for line in groups if line < field.lineno)]
            found.append(Flag(field.target.id, default, after.value.value, group))
    return found


def flags_table(rows: list[Flag]) -> str:
    """A Markdown table; a default of None is explained by the help."""
    lines = ["| flag | default | |", "|---|---|---|"]
    for flag in rows:
        default = "" if flag.default in ("None", "") else f"`{flag.default}`"
        lines.append(f"| {flag.spelling} | {default} | {flag.help.replace('|', chr(92) + '|')} |")
    return "\n".join(lines)


def render_flags(script: str) -> str:
    rows = flags(ALGOS / f"{script}.py")
    groups = dict.fromkeys(flag.group for flag in rows)
    return "\n\n".join(f"**{group}**\n\n" + flags_table([f for f in rows if f.group == group]) for group in groups)


def render_changed_flags(script: str) -> str:
    theirs = {flag.name: flag for flag in flags(ALGOS / "grpo.py")}
    mine = flags(ALGOS / f"{script}.py")
    changed = [flag for flag in mine if flag != theirs.get(flag.name)]
    missing = sorted(theirs.keys() - {flag.name for flag in mine})
    text = flags_table(changed)
    if missing:
        text += "\n\nNot here: " + ", ".join(f"`--{name.replace('_', '-')}`" for name in missing) + "."
    return text


def render_diff(script: str) -> str:
    names = ("algos/grpo.py", f"algos/{script}.py")
    old, new = ((ROOT / name).read_text().splitlines() for name in names)
    lines = difflib.unified_diff(old, new, *names, n=1, lineterm="")
    # Hunk headers hold line numbers, which change whenever grpo.py does.
    return "```diff\n" + "\n".join("@@" if line.startswith("@@") else line for line in lines) + "\n```"


def documented_metrics(script: str) -> list[dict]:
    """The entries of metrics.toml that a script logs, in their order."""
    tables = tomllib.loads((DOCS / "metrics.toml").read_text())
    groups = tables["groups"]
    return [
        entry
        for entry in tables["metric"]
        if script in [s for name in entry["scripts"] for s in groups.get(name, [name])]
    ]


def render_metrics(script: str) -> str:
    lines = ["| metric | what it is | healthy |", "|---|---|---|"]
    for entry in documented_metrics(script):
        when = f" *({entry['when']})*" if "when" in entry else ""
        lines.append(f"| `{entry['key']}` | {entry['formula']}{when} | {entry['healthy']} |")
    return "\n".join(lines)


def render_results(script: str) -> str:
    """A row for each recorded run on the embedded task: the first evaluation and the last."""
    folder = ROOT / "benchmarks" / "results" / f"tiny_{script}"
    lines = ["| run | steps | accuracy before -> after | response length |", "|---|---|---|---|"]
    for path in sorted(folder.glob("*.metrics.jsonl")):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        first, last = rows[0], rows[-1]
        accuracy, length = (
            " -> ".join(f"{row[f'eval/{name}']:.{digits}f}" for row in (first, last))
            for name, digits in (("accuracy", 3), ("response_length", 1))
        )
        name = path.name.removesuffix(".metrics.jsonl")
        lines.append(f"| [{name}](../../{path.relative_to(ROOT)}) | {last['step']} | {accuracy} | {length} |")
    return "\n".join(lines) if len(lines) > 2 else "*Not yet measured.*"


RENDER = {
    "diff": render_diff,
    "flags": render_flags,
    "changed-flags": render_changed_flags,
    "metrics": render_metrics,
    "results": render_results,
}


def fill_blocks(text: str) -> str:
    """The page with its generated blocks filled."""

    def fill(match: re.Match) -> str:
        if match["kind"] not in RENDER:
            raise DocsError(f"no generated block is called '{match['kind']}'")
        return f"{match[1]}\n{RENDER[match['kind']](match['script'])}\n\n{match[4]}"

    if text.count("<!-- generated: ") != len(BLOCK.findall(text)):
        raise DocsError("a generated block has no <!-- end -->, or another form than <!-- generated: KIND SCRIPT -->")
    return BLOCK.sub(fill, text)


def point_at_lines(text: str, page: Path) -> str:
    """The page with the numbers of its line pointers looked up."""

    def point(match: re.Match) -> str:
        target = (page.parent / match["path"]).resolve()
        lines = target.read_text().splitlines() if target.exists() else []
        numbers = [number for number, line in enumerate(lines, 1) if match["piece"] in line]
        if len(numbers) != 1:
            raise DocsError(f'"{match["piece"]}" stands in {len(numbers)} lines of {match["path"]}, not in one')
        return f'[{match["name"]}:{numbers[0]}]({match["path"]}#L{numbers[0]} "{match["piece"]}")'

    if len(re.findall(r"\]\([\w./-]+#L\d+", text)) != len(POINTER.findall(text)):
        raise DocsError('a line pointer has another form than [name.py:1](path/name.py#L1 "piece of the line")')
    return POINTER.sub(point, text)


def generate(page: Path) -> str:
    """What the page should look like. Raises DocsError when it asks for what is not there."""
    try:
        return point_at_lines(fill_blocks(page.read_text()), page)
    except (DocsError, OSError) as error:
        raise DocsError(f"{page.name}: {error}") from error


def pages() -> list[Path]:
    return sorted(DOCS.rglob("*.md"))


def main() -> int:
    stale = []
    for page in pages():
        new = generate(page)
        if new != page.read_text():
            stale.append(page)
            if "--check" not in sys.argv[1:]:
                page.write_text(new)
    for page in stale:
        print(page.relative_to(ROOT))
    return int(bool(stale) and "--check" in sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
