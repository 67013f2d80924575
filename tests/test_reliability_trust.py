"""Nothing is trusted that need not be: files that are given to a run cannot make it execute what is in them.

Checkpoints that hold code are refused in tests/test_checkpoint.py, secrets in arguments in tests/test_tracking.py.
"""

import ast
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT, TINY, environment

SOURCES = [path for folder in ("algos", "common", "data_prep", "benchmarks") for path in (ROOT / folder).rglob("*.py")]

ALLOWED_PICKLES = {
    ("common/rewards/worker.py", "load"),  # from the pipe to the process that started it
    ("common/checkpoint.py", "Unpickler"),  # accepts a fixed list of classes
}


def calls(tree: ast.AST) -> Iterator[tuple[str, ast.Call]]:
    """Every call, with the name of what is called as it is written: "torch.load"."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield ast.unparse(node.func), node


def problems(source: str, name: str) -> list[str]:
    """Calls that could execute what they read."""
    found = []
    tree = ast.parse(source)
    for function, call in calls(tree):
        keywords = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords}
        if function in ("eval", "exec", "os.system", "yaml.load", "pd.read_pickle"):
            found.append(f"{name}: {function}")
        if function == "torch.load" and keywords.get("weights_only") != "True":
            found.append(f"{name}: torch.load without weights_only=True")
        if function in ("pickle.load", "pickle.loads") and (name, function.split(".")[1]) not in ALLOWED_PICKLES:
            found.append(f"{name}: {function}")
        if keywords.get("allow_pickle", "False") != "False":
            found.append(f"{name}: {function} with pickles")
        if keywords.get("shell") == "True":
            found.append(f"{name}: {function} through a shell")
        if keywords.get("trust_remote_code", "False") not in ("False", "args.trust_remote_code"):
            found.append(f"{name}: {function} trusts remote code")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "pickle.Unpickler":
            found += [] if (name, "Unpickler") in ALLOWED_PICKLES else [f"{name}: pickle.Unpickler"]
    return found


def test_no_source_executes_what_it_reads():
    assert [p for path in SOURCES for p in problems(path.read_text(), str(path.relative_to(ROOT)))] == []


@pytest.mark.parametrize(
    "line",
    [
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "pickle.load(file)",
        "class Mine(pickle.Unpickler): pass",
        "eval(text)",
        "np.load(path, allow_pickle=True)",
        "subprocess.run(text, shell=True)",
        "AutoConfig.from_pretrained(folder, trust_remote_code=True)",
    ],
)
def test_the_search_finds_what_it_looks_for(line):
    assert problems(line, "x.py") != []


def test_every_script_asks_before_it_runs_a_models_code():
    for path in (ROOT / "algos").glob("*.py"):
        assert "    trust_remote_code: bool = False\n" in path.read_text(), path


def test_a_models_own_code_is_not_run(tmp_path):
    """An architecture that transformers does not know, with the code for it in the folder."""
    folder, marker = tmp_path / "model", tmp_path / "marker"
    shutil.copytree(TINY / "model", folder)
    config = json.loads((folder / "config.json").read_text())
    config |= {"model_type": "mine", "auto_map": {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "mine.py").write_text(f"open({str(marker)!r}, 'w')\n")
    run = subprocess.run(
        [sys.executable, str(ROOT / "algos/grpo.py"), "--model", str(folder), "--dry-run", "1"],
        env=environment(), capture_output=True, text=True, timeout=120, stdin=subprocess.DEVNULL, check=False,
    )  # fmt: skip
    assert run.returncode != 0
    assert "trust_remote_code" in run.stderr
    assert not marker.exists()


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self.path),)


def test_a_parquet_file_cannot_run_code(tmp_path, tokenizer):
    """Old pyarrow unpickled a column's type when a file said that it was a Python class."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from common.data import load_prompts

    marker, path = tmp_path / "marker", tmp_path / "x.parquet"
    rows = pa.Table.from_pylist(
        [{"data_source": "x", "prompt": "1+1=?", "reward_model": {"style": "rule", "ground_truth": "2"}, "extra": 1}]
    )
    metadata = {
        b"ARROW:extension:name": b"arrow.py_extension_type",
        b"ARROW:extension:metadata": pickle.dumps(Bomb(marker)),
    }
    fields = [field.with_metadata(metadata) if field.name == "extra" else field for field in rows.schema]
    pq.write_table(rows.cast(pa.schema(fields)), path)
    dataset = load_prompts([str(path)], tokenizer=tokenizer, max_prompt_length=64)
    assert len(dataset) == 1
    assert not marker.exists()
    pickle.loads(pickle.dumps(Bomb(marker)))
    assert marker.exists()  # the bomb works
