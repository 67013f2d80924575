"""benchmarks/evaluate.py: the estimators against hand-worked numbers and enumeration, and one evaluation for real."""

import importlib.util
import itertools
import json
import random
import subprocess
import sys

import pytest
from conftest import ROOT, TINY, environment, run_forked, succeeded

from common.launch import UserError

spec = importlib.util.spec_from_file_location("evaluate", ROOT / "benchmarks" / "evaluate.py")
evaluate = importlib.util.module_from_spec(spec)
sys.modules["evaluate"] = evaluate  # dataclasses look their module up
spec.loader.exec_module(evaluate)


# -- the estimators ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("n", "c", "k", "expected"),
    [
        (1, 0, 1, 0.0),
        (1, 1, 1, 1.0),
        (4, 1, 1, 1 / 4),
        (4, 1, 2, 1 / 2),  # 3 of the 6 pairs hold the right one
        (4, 2, 2, 5 / 6),  # one pair of 6 holds none
        (10, 3, 5, 1 - 21 / 252),
        (5, 3, 3, 1.0),  # only 2 are wrong, so 3 cannot all be
        (8, 0, 8, 0.0),
    ],
)
def test_pass_at_k_by_hand(n, c, k, expected):
    assert evaluate.pass_at_k(n, c, k) == pytest.approx(expected, abs=1e-15)


def test_pass_at_k_is_the_share_of_subsets_with_a_right_one():
    for n in range(1, 8):
        for c in range(n + 1):
            verdicts = [True] * c + [False] * (n - c)
            for k in range(1, n + 1):
                subsets = [any(subset) for subset in itertools.combinations(verdicts, k)]
                assert evaluate.pass_at_k(n, c, k) == pytest.approx(sum(subsets) / len(subsets), abs=1e-12)


def test_pass_at_k_is_unbiased():
    """Its mean over the binomial number of right ones is 1 - (1 - p)^k; 1 - (1 - c/n)^k is too low."""
    n, k, p = 6, 3, 0.3
    chances = [evaluate.math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    mean = sum(chance * evaluate.pass_at_k(n, c, k) for c, chance in enumerate(chances))
    naive = sum(chance * (1 - (1 - c / n) ** k) for c, chance in enumerate(chances))
    assert mean == pytest.approx(1 - (1 - p) ** k, abs=1e-12)
    assert naive < mean - 0.01


def test_pass_at_k_of_many_samples_neither_overflows_nor_goes_wrong():
    assert evaluate.pass_at_k(10_000, 1, 5_000) == pytest.approx(0.5, abs=1e-12)
    assert evaluate.pass_at_k(10_000, 10_000, 1) == 1.0


@pytest.mark.parametrize(("n", "c", "k"), [(4, 5, 1), (4, -1, 1), (4, 1, 5), (4, 1, 0)])
def test_pass_at_k_refuses_what_has_no_meaning(n, c, k):
    with pytest.raises(ValueError, match=f"n={n}, c={c}"):
        evaluate.pass_at_k(n, c, k)


@pytest.mark.parametrize(
    ("answers", "is_right", "expected"),
    [
        (["7", "7", "8"], [True, True, False], 1.0),
        (["7", "8", "8"], [True, False, False], 0.0),
        (["7", "8"], [True, False], 0.5),  # a tie
        (["7", "8", "9"], [True, False, False], 1 / 3),
        ([None, None, "7"], [False, False, True], 1.0),  # who states nothing does not vote
        ([None, None], [False, False], 0.0),
        (["7", "7"], [True, False], 0.5),  # the rule looks at more than the answer
    ],
)
def test_majority(answers, is_right, expected):
    assert evaluate.majority(answers, is_right) == pytest.approx(expected)


def test_maj_at_k_is_the_mean_over_blocks():
    answers, right = ["7", "8", "8", "7", "7", "8", "9"], [True, False, False, True, True, False, False]
    assert evaluate.maj_at_k(answers, right, 1) == pytest.approx(3 / 7)
    assert evaluate.maj_at_k(answers, right, 3) == pytest.approx((0 + 1) / 2)  # 7 8 8, then 7 7 8; the 9 is left over
    assert evaluate.maj_at_k(answers, right, 7) == pytest.approx(1 / 2)  # 7 and 8 three times each
    with pytest.raises(ValueError, match="k=8"):
        evaluate.maj_at_k(answers, right, 8)


def test_maj_at_k_agrees_with_enumeration():
    """Over random samples its mean is that of every way to draw k answers."""
    chances = {"7": 0.5, "8": 0.3, "9": 0.2}
    expected = sum(
        evaluate.math.prod(chances[a] for a in drawn) * evaluate.majority(drawn, [a == "7" for a in drawn])
        for drawn in itertools.product(chances, repeat=3)
    )
    generator = random.Random(0)
    answers = generator.choices(list(chances), list(chances.values()), k=30_000)
    assert evaluate.maj_at_k(answers, [a == "7" for a in answers], 3) == pytest.approx(expected, abs=0.015)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("6 times 12\n#### 72", "72"),
        ("#### 1,234.0", "1234"),
        ("so <answer> 42 </answer>", "42"),
        (r"hence \boxed{x + 1}", "x + 1"),
        ("#### Blue  Whale", "blue whale"),
        ("it is 72", None),
        ("####", None),
        ("", None),
    ],
)
def test_stated_answer(text, answer):
    assert evaluate.stated_answer(text) == answer


def test_mean_and_error():
    assert evaluate.mean_and_error([1.0, 0.0, 0.0, 1.0]) == pytest.approx((0.5, (1 / 3 / 4) ** 0.5))
    assert evaluate.mean_and_error([0.3]) == (0.3, 0.0)


# -- arguments --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"samples": 4, "k": (1, 8)}, "--k 8.*--samples, which is 4"),
        ({"samples": 0, "greedy": False}, "nothing to evaluate"),
        ({"temperature": 0.0}, "--samples 0"),
        ({"limit": 0}, "--limit 0"),
        ({"top_p": 0.0}, "--top-p"),
        ({"rollout_tp": 2}, "--rollout-tp 2 does not divide 1"),
        ({"max_response_length": 0}, "--max-response-length"),
    ],
)
def test_bad_arguments_are_refused_with_their_numbers(monkeypatch, changed, message):
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(UserError, match=message):
        evaluate.check(evaluate.Args(**changed))


@pytest.mark.parametrize(
    ("samples", "k", "expected"), [(0, None, []), (1, None, [1]), (6, None, [1, 2, 4, 6]), (8, (4, 1), [1, 4])]
)
def test_the_default_k_are_powers_of_two_and_the_number_of_samples(samples, k, expected):
    assert evaluate.check(evaluate.Args(samples=samples, k=k)) == expected


def test_a_missing_file_gets_one_line_and_exit_code_2():
    command = [sys.executable, str(ROOT / "benchmarks/evaluate.py"), "--files", "nowhere.parquet"]
    run = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 2
    assert "nowhere.parquet" in run.stderr and "Traceback" not in run.stderr


# -- one evaluation, by two ranks with the real engine ----------------------------------------------------------------


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    """(what was printed, results.json, the lines of responses.jsonl) of the embedded model on 24 problems."""
    folder = tmp_path_factory.mktemp("evaluate")
    settings = ["--limit", 24, "--samples", 4, "--max-response-length", 48, "--max-prompt-length", 64]
    run = run_forked("benchmarks/evaluate.py", *settings, "--dtype", "fp32", "--out-dir", folder / "out", nproc=2)
    succeeded(run)
    results = json.loads((folder / "out" / "results.json").read_text())
    lines = (folder / "out" / "responses.jsonl").read_text().splitlines()
    return run.stdout, results, [json.loads(line) for line in lines]


def test_the_numbers_follow_from_the_responses_that_were_written(outcome):
    _, results, problems = outcome
    [(source, metrics)] = results["metrics"].items()
    assert results["problems"] == {source: 24}
    right = [[response["reward"] >= 1 for response in problem["samples"]] for problem in problems]
    assert metrics["mean@4"]["mean"] == pytest.approx(sum(map(sum, right)) / 96)
    assert metrics["pass@1"]["mean"] == pytest.approx(metrics["mean@4"]["mean"])
    assert metrics["pass@4"]["mean"] == pytest.approx(sum(map(any, right)) / 24)
    greedy = [problem["greedy"][0]["reward"] >= 1 for problem in problems]
    assert metrics["greedy"]["mean"] == pytest.approx(sum(greedy) / 24)
    assert 0 < metrics["mean@4"]["mean"] < 1  # neither a model that knows nothing nor a rule that says yes to all


def test_every_problem_is_there_once_whichever_rank_had_it(outcome):
    _, _, problems = outcome
    assert [problem["index"] for problem in problems] == list(range(24))
    assert all(len(problem["greedy"]) == 1 and len(problem["samples"]) == 4 for problem in problems)


def test_samples_of_a_problem_differ(outcome):
    _, _, problems = outcome
    assert any(len({response["text"] for response in problem["samples"]}) > 1 for problem in problems)


def test_the_table_and_the_papers_are_complete(outcome):
    printed, results, _ = outcome
    for metric in ("greedy", "mean@4", "pass@1", "pass@2", "pass@4", "maj@2", "maj@4"):
        assert metric in printed
    assert results["seed"] == 1
    assert results["hardware"]["ranks"] == 2
    assert {"python", "torch", "transformers", "git_commit"} <= set(results["versions"])
    assert results["command"][0] == "benchmarks/evaluate.py"
    assert str(TINY / "model") in printed or "tiny-arith" in printed
