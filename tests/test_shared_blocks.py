"""The scripts of algos/ are in step with grpo.py, small, and free of what belongs elsewhere."""

import io
import re
import subprocess
import sys
import textwrap
import tokenize
from pathlib import Path

import pytest
from conftest import ROOT, environment
from shared_blocks import ALGOS, SOURCE, blocks, carry_over, differences, needless_markers, scripts

# Lines that `diff algos/grpo.py algos/<name>.py` may show, removed and added ones together.
DIFF_BOUNDS = {"rloo": 60, "gspo": 60, "remax": 80, "distill": 400, "spin": 400, "ppo": 500}
DIFF_BOUNDS |= {"sft": 660, "reward_model": 720}
# Lines of code, without comments, docstrings, help strings and blank lines.
LINE_BUDGET = {"ppo": 600}
DEFAULT_LINE_BUDGET = 500

# -- the tool ---------------------------------------------------------------------------------------------------------

ORIGINAL = '''\
"""The original."""
LIMIT = 3


@dataclass
class Args:
    lr: float = 1.0
    """Learning rate."""
    seed: int = 1
    """Seed."""


@decorate
def shared(x):
    return x


def changed(x):
    return x + 1
'''


def edited(*replacements: tuple[str, str]) -> str:
    text = ORIGINAL
    for old, new in replacements:
        assert text.count(old) == 1
        text = text.replace(old, new)
    return text


def test_blocks_are_named_and_whole():
    found = blocks(ORIGINAL)
    assert set(found) == {"LIMIT", "Args.lr", "Args.seed", "shared", "changed"}
    assert found["Args.lr"].text == '    lr: float = 1.0\n    """Learning rate."""\n'
    assert found["shared"].text == "@decorate\ndef shared(x):\n    return x\n"
    assert not any(block.marked for block in found.values())


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("LIMIT = 3", "LIMIT = 4", "LIMIT"),
        ("lr: float = 1.0", "lr: float = 2.0", "Args.lr"),
        ('"""Learning rate."""', '"""Rate of learning."""', "Args.lr"),
        ("@decorate\ndef shared", "@other\ndef shared", "shared"),
        ("@decorate\ndef shared", "def shared", "shared"),
        ("return x + 1", "return x  + 1", "changed"),
        ("return x + 1", "return x + 1  # why", "changed"),
    ],
)
def test_every_difference_is_found_and_carried_over(old, new, name):
    other = edited((old, new))
    assert differences(ORIGINAL, other) == [name]
    assert carry_over(ORIGINAL, other) == ORIGINAL


def test_a_marked_block_is_left_alone():
    other = edited(
        (
            "def changed(x):\n    return x + 1",
            "# Differs from algos/grpo.py: by two.\ndef changed(x):\n    return x + 2",
        ),
        ("    seed: int = 1", "    # Differs from algos/grpo.py: another seed.\n    seed: int = 2"),
        ("@decorate\n", "# Differs from algos/grpo.py: not decorated alike.\n@decorated\n"),
    )
    assert differences(ORIGINAL, other) == []
    assert needless_markers(ORIGINAL, other) == []
    assert carry_over(ORIGINAL, other) == other


def test_a_marker_needs_a_reason_and_the_line_above():
    for marker in ("# Differs from algos/grpo.py:", "# Differs from algos/ppo.py: two", "# Differs"):
        other = edited(("def changed(x):\n    return x + 1", f"{marker}\ndef changed(x):\n    return x + 2"))
        assert differences(ORIGINAL, other) == ["changed"]
    far = edited(
        ("def changed(x):\n    return x + 1", "# Differs from algos/grpo.py: x\n\ndef changed(x):\n    return 2")
    )
    assert differences(ORIGINAL, far) == ["changed"]


def test_needless_markers_are_found():
    same = edited(("def changed", "# Differs from algos/grpo.py: it does not.\ndef changed"))
    assert needless_markers(ORIGINAL, same) == ["changed"]
    alone = ORIGINAL + "\n\n# Differs from algos/grpo.py: there is none.\ndef new(x):\n    return x\n"
    assert needless_markers(ORIGINAL, alone) == ["new"]


def test_blocks_of_one_script_alone_are_free():
    other = edited(('    """Seed."""\n', '    """Seed."""\n    more: int = 1\n    """More."""\n')) + "\n\nNEW = 1\n"
    assert differences(ORIGINAL, other) == []
    assert carry_over(ORIGINAL, other) == other
    fewer = edited(("LIMIT = 3\n", ""))
    assert differences(ORIGINAL, fewer) == []


def test_write_changes_files_and_the_check_fails_before_it(tmp_path):
    """The command itself, on a copy: exit code 1 and the names; --write; exit code 0."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "algos").mkdir()
    (tmp_path / "tests" / "shared_blocks.py").write_text((ROOT / "tests" / "shared_blocks.py").read_text())
    (tmp_path / "algos" / "grpo.py").write_text(ORIGINAL)
    (tmp_path / "algos" / "other.py").write_text(edited(("LIMIT = 3", "LIMIT = 4")))

    def run(*arguments: str) -> subprocess.CompletedProcess:
        command = [sys.executable, str(tmp_path / "tests" / "shared_blocks.py"), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    check = run()
    assert check.returncode == 1
    assert "other.py: LIMIT differs" in check.stdout
    assert "LIMIT" in run("--write").stdout
    assert (tmp_path / "algos" / "other.py").read_text() == ORIGINAL
    assert run().returncode == 0


# -- the scripts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", scripts(), ids=lambda path: path.name)
def test_in_step_with_grpo(path):
    source, other = SOURCE.read_text(), path.read_text()
    assert differences(source, other) == [], "python tests/shared_blocks.py --write, or say why above the block"
    assert needless_markers(source, other) == []


def changed_lines(old: list[str], new: list[str]) -> int:
    """Lines that a smallest diff removes and adds: those outside a longest common subsequence."""
    longest = [0] * (len(new) + 1)
    for line in old:
        diagonal = 0
        for j, other in enumerate(new, 1):
            diagonal, longest[j] = longest[j], diagonal + 1 if line == other else max(longest[j], longest[j - 1])
    return len(old) + len(new) - 2 * longest[-1]


def test_what_counts_as_a_changed_line():
    assert changed_lines(list("abcd"), list("abcd")) == 0
    assert changed_lines(list("abcd"), list("axcd")) == 2  # one removed, one added
    assert changed_lines(list("abcd"), list("acdye")) == 3
    assert changed_lines([], list("ab")) == 2


@pytest.mark.parametrize("name", sorted(DIFF_BOUNDS))
def test_the_diff_is_small(name):
    source, other = (path.read_text().splitlines() for path in (SOURCE, ALGOS / f"{name}.py"))
    assert changed_lines(source, other) <= DIFF_BOUNDS[name]


def code_lines(source: str) -> int:
    """Lines with a token that is neither comment, docstring, help string nor white space."""
    quiet = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    lines: set[int] = set()
    starts_statement = True
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type in quiet:
            starts_statement = starts_statement or token.type == tokenize.NEWLINE
            continue
        if not (token.type == tokenize.STRING and starts_statement):
            lines |= set(range(token.start[0], token.end[0] + 1))
        starts_statement = False
    return len(lines)


def test_what_counts_as_a_line_of_code():
    source = '''\
        """Docstring
        of two lines."""

        import a  # counts

        # does not
        x: int = 1
        """Help."""
        y = f(
            "counts",
        )
    '''
    assert code_lines(textwrap.dedent(source)) == 5


@pytest.mark.parametrize("path", [SOURCE, *scripts()], ids=lambda path: path.name)
def test_within_the_line_budget(path):
    assert code_lines(path.read_text()) <= LINE_BUDGET.get(path.stem, DEFAULT_LINE_BUDGET)


BANNERS = ["1. Rollout", "2. Rewards", "3. Advantages", "4. Old and reference logprobs", "5. Update", "6. Sync weights"]


@pytest.mark.parametrize("name", ["grpo", "rloo", "remax", "gspo", "distill"])
def test_the_banners_are_the_same_everywhere(name):
    found = re.findall(r"^        # ==== (\d\. .*) ====$", (ALGOS / f"{name}.py").read_text(), re.MULTILINE)
    assert found == [*BANNERS, "7. Log, evaluate, save"]


HELP_WITHOUT_ENGINE = """
import runpy, sys
sys.modules["vllm"] = None  # importing it raises
for script in sys.argv[1:]:
    print("script:", script)
    sys.argv = [script, "--help"]
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        assert end.code in (0, None), end.code
"""


def test_help_needs_neither_engine_nor_accelerator():
    paths = [str(path) for path in (SOURCE, *scripts())]
    run = subprocess.run(
        [sys.executable, "-c", HELP_WITHOUT_ENGINE, *paths],
        cwd=ROOT, env=environment(PYTHONPATH=str(ROOT), COLUMNS="200"), capture_output=True, text=True, check=False,
        timeout=240,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    parts = run.stdout.split("script: ")[1:]
    assert len(parts) == len(paths)
    for part in parts:
        assert "--model" in part and "--seed" in part, part[:300]


def test_every_argument_has_a_help_string():
    for path in (SOURCE, *scripts()):
        for name, block in blocks(path.read_text()).items():
            if name.startswith("Args."):
                assert block.text.count('"""') == 2, f"{path.name}: {name}"


DEVICE_WORDS = re.compile(r"\b(cuda|hip|npu|xla|nccl|hccl|gloo)\b", re.IGNORECASE)


def test_device_words_are_in_device_py_alone():
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for folder in (ALGOS, ROOT / "common")
        for path in sorted(folder.rglob("*.py"))
        if path != Path(ROOT / "common" / "device.py")
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if DEVICE_WORDS.search(line)
    ]
    assert found == []
