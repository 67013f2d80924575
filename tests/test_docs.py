"""The pages tell the truth: generated parts are up to date, links lead somewhere, commands have the flags they use."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from docs import generate

PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")])
ALGORITHMS = sorted((ROOT / "docs" / "algorithms").glob("*.md"))


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


# -- generated parts --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", generate.pages(), ids=relative)
def test_generated_parts_are_up_to_date(page):
    assert generate.generate(page) == page.read_text(), "python docs/generate.py"


def test_a_stale_block_and_a_stale_pointer_are_mended(tmp_path):
    (tmp_path / "x.py").write_text("one = 1\ntwo = 2\n")
    page = tmp_path / "page.md"
    page.write_text(
        'See [x.py:1](x.py#L1 "two = ").\n<!-- generated: changed-flags rloo -->\nold\n<!-- end -->\nThe end.\n'
    )
    new = generate.generate(page)
    assert '[x.py:2](x.py#L2 "two = ")' in new
    assert "old" not in new
    assert "`--kl-coef`" in new
    assert "Not here: `--kl-estimator`, `--scale-by-std`." in new
    assert new.endswith("<!-- end -->\nThe end.\n")
    page.write_text(new)
    assert generate.generate(page) == new


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[x.py:1](x.py#L1 "three = ")', "0 lines"),
        ('[x.py:1](x.py#L1 " = ")', "2 lines"),
        ('[y.py:1](y.py#L1 "one")', "0 lines"),
        ("[x.py:1](x.py#L1)", "another form"),
        ("<!-- generated: poem rloo -->\n<!-- end -->", "poem"),
        ("<!-- generated: diff rloo -->\n", "no <!-- end -->"),
        ("<!-- generated: diff nothing -->\n<!-- end -->", "nothing.py"),
    ],
)
def test_what_is_not_there_is_refused(tmp_path, text, message):
    (tmp_path / "x.py").write_text("one = 1\ntwo = 2\n")
    page = tmp_path / "page.md"
    page.write_text(text + "\n")
    with pytest.raises(generate.DocsError, match=re.escape(message)) as error:
        generate.generate(page)
    assert "page.md" in str(error.value)


def test_the_check_names_what_is_stale_and_writes_nothing(tmp_path):
    """The command itself, on a copy of what it reads."""
    for name in ("docs/generate.py", "docs/metrics.toml", "algos/grpo.py", "algos/rloo.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text((ROOT / name).read_text())
    page = tmp_path / "docs" / "page.md"
    stale = "<!-- generated: changed-flags rloo -->\n<!-- end -->\n"
    page.write_text(stale)

    def run(*arguments: str) -> tuple[int, str]:
        command = [sys.executable, str(tmp_path / "docs" / "generate.py"), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout.strip()

    assert run("--check") == (1, "docs/page.md")
    assert page.read_text() == stale
    assert run() == (0, "docs/page.md")
    assert "--kl-coef" in page.read_text()
    assert run("--check") == (0, "")


def test_flags_are_read_without_importing():
    flags = {flag.name: flag for flag in generate.flags(ROOT / "algos" / "grpo.py")}
    assert flags["clip_low"].default == "0.2"
    assert flags["train_files"].default == "('assets/tiny-arith/train.parquet',)"
    assert flags["scale_by_std"].spelling == "`--scale-by-std`, `--no-scale-by-std`"
    assert flags["kl_coef"].group == "algorithm"
    from algos.grpo import Args

    assert set(flags) == set(Args.__dataclass_fields__)


# -- links ------------------------------------------------------------------------------------------------------------


def without_code(text: str) -> str:
    """The page without its fenced blocks and inline code, where brackets are no links."""
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE))


def anchors(page: Path) -> set[str]:
    """The names that a page's headings get."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)\s]+)(?: \"[^\"]*\")?\)", without_code(page.read_text())):
        if re.match(r"https?://|mailto:", target):
            continue
        path, _, anchor = target.partition("#")
        destination = (page.parent / path).resolve() if path else page
        assert destination.exists(), f"{page.name}: {target}"
        if anchor and destination.suffix == ".md":
            assert anchor in anchors(destination), f"{page.name}: {target}"
        elif match := re.fullmatch(r"L(\d+)", anchor):
            assert int(match[1]) <= len(destination.read_text().splitlines()), f"{page.name}: {target}"


def test_every_algorithm_has_a_page_with_the_same_parts():
    parts = ["Overview", "Objective and pseudocode", "Symbols", "Implementation details"]
    parts += ["Metrics", "Memory", "Results", "Questions"]
    for page in ALGORITHMS:
        assert (ROOT / "algos" / f"{page.stem}.py").exists(), page.name
        headings = re.findall(r"^## (.*)$", page.read_text(), re.MULTILINE)
        assert [heading for heading in headings if heading in parts] == parts, page.name
        if page.stem != "grpo":
            assert f"<!-- generated: diff {page.stem} -->" in page.read_text()


# -- commands ---------------------------------------------------------------------------------------------------------


def commands(text: str) -> list[str]:
    """The lines of indented and fenced code, with continued lines joined."""
    text = re.sub(r"\\\n\s*", " ", text)
    fenced = re.findall(r"^```(?!diff)\w*\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    indented = re.findall(r"^ {4}(.*)$", text, flags=re.MULTILINE)
    inline = re.findall(r"`([^`\n]+)`", text)
    return [line for line in [*"\n".join(fenced).splitlines(), *indented, *inline] if re.search(r"\w+\.py\b", line)]


def flags_of(script: Path) -> set[str]:
    """Every flag of a script, whether from a dataclass for tyro or from argparse."""
    flags = set()
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ClassDef):
            fields = [n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)]
            flags |= {f"--{name.replace('_', '-')}" for name in fields}
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            flags |= {a.value for a in node.args if isinstance(a, ast.Constant) and str(a.value).startswith("--")}
    return flags | {flag.replace("--", "--no-", 1) for flag in flags} | {"--help", "--write", "--check"}


def uses(command: str) -> tuple[Path, list[str]] | None:
    """(the script of the repository that a command starts, the flags after it)."""
    if match := re.search(r"(?<![\w/.])((?:algos|benchmarks|data_prep|docs|tests)/\w+\.py)\b(.*)", command):
        after = match[2].split("#")[0]
        return ROOT / match[1], re.findall(r"(?<![\w-])(--[a-z][\w-]*)", after)
    return None


@pytest.mark.parametrize("page", PAGES, ids=relative)
def test_commands_use_flags_that_exist(page):
    for command in commands(page.read_text()):
        found = uses(command)
        if found is None or found[0].name == "my_idea.py":
            continue
        script, flags = found
        assert script.exists(), f"{page.name}: {command}"
        missing = set(flags) - flags_of(script)
        assert not missing, f"{page.name}: {command}: {sorted(missing)}"


@pytest.mark.parametrize("page", ALGORITHMS, ids=relative)
def test_flags_named_in_the_text_exist(page):
    """A page may speak of its own script's flags and, in comparisons, of grpo.py's."""
    known = flags_of(ROOT / "algos" / f"{page.stem}.py") | flags_of(ROOT / "algos" / "grpo.py")
    for span in re.findall(r"`([^`\n]+)`", page.read_text()):
        if span.startswith("--"):
            missing = set(re.findall(r"(?<![\w-])(--[a-z][\w-]*)", span)) - known
            assert not missing, f"{page.name}: {span}"


@pytest.mark.parametrize("script", sorted((ROOT / "algos").glob("*.py")), ids=relative)
def test_commands_in_docstrings_use_flags_that_exist(script):
    docstring = ast.get_docstring(ast.parse(script.read_text()))
    found = [uses(line) for line in docstring.splitlines() if "torchrun" in line]
    assert found
    for path, flags in found:
        assert path == script
        assert set(flags) <= flags_of(script)


# -- metrics ----------------------------------------------------------------------------------------------------------


def test_metrics_that_nothing_logs_are_not_documented():
    """Each documented name stands in the script or in common/; which run logs what: tests/test_algorithm_runs.py."""
    common = "".join(path.read_text() for path in (ROOT / "common").rglob("*.py"))
    for page in ALGORITHMS:
        source = (ROOT / "algos" / f"{page.stem}.py").read_text() + common
        for entry in generate.documented_metrics(page.stem):
            *_, name = entry["key"].split("/")
            written = re.search(rf'["/]{re.escape(name)}"', source) or entry["key"] == "rewards/<key>"
            assert written, f"{page.stem}: {entry['key']}"
