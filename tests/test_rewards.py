"""The reward rules: the table of cases, inputs made to break parsers, and properties that hold for any text."""

import importlib
import math
import random
import re
import sys
import threading
import time
from fractions import Fraction
from importlib.util import find_spec
from types import ModuleType

import numpy as np
import pytest
import reward_cases
from hypothesis import given, settings
from hypothesis import strategies as st
from reward_cases import FAMILIES, Case

from common import rewards
from common.launch import UserError
from common.rewards import boxed, countdown, numbers, overlong_penalty
from common.rewards.numbers import read_number

TRUTHS = {"countdown": {"target": 5, "numbers": [1, 4]}}
"""A ground truth for each family whose truth is not just "5"."""


def score(family: str, response: str, ground_truth: object = None) -> float:
    source = FAMILIES[family][0]
    return rewards.compute_score(source, response, TRUTHS.get(family, "5") if ground_truth is None else ground_truth)


# -- the table --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "case"),
    [pytest.param(name, case, id=f"{name}-{n}") for name, entry in FAMILIES.items() for n, case in enumerate(entry[2])],
)
def test_case(family: str, case: Case) -> None:
    assert rewards.compute_score(FAMILIES[family][0], case.response, case.ground_truth) == case.score, case.why


def test_the_table_in_the_docs_is_this_one() -> None:
    document = reward_cases.DOCS.read_text(encoding="utf-8")
    assert document == reward_cases.updated(document), "run: python tests/reward_cases.py --write"


def test_every_rule_is_in_the_docs() -> None:
    document = reward_cases.DOCS.read_text(encoding="utf-8")
    for names in (rewards.RULES, rewards.MATH_TASKS, rewards.RULES_BY_PART, rewards.MATH_TASKS_BY_PART):
        for name in names:
            assert f"`{name}" in document, f"docs/rewards.md does not mention data_source {name}"


# -- names ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "response", "truth"),
    [
        ("openai/gsm8k", "#### 5", "5"),
        ("lighteval/MATH", r"\boxed{5}", "5"),
        ("DigitalLearningGmbH/MATH-lighteval", r"\boxed{5}", "5"),
        ("HuggingFaceH4/MATH-500", r"\boxed{5}", "5"),
        ("math_dapo", "Answer: 5", "5"),
        ("math", "Answer: 5", "5"),
        ("math_dapo_reasoning", "Answer: 5", "5"),
        ("aime2024", "Answer: 5", "5"),
        ("numina_olympiads", r"\boxed{5}", "5"),
        ("countdown", "<answer>5</answer>", {"target": 5, "numbers": [5]}),
        ("yolo/arithmetic-3_digit", "<answer>5</answer>", "5"),
        ("multiply-3_digit", "<answer>5</answer>", "5"),
        ("searchR1_nq", "<answer>Five</answer>", {"target": ["five"]}),
        ("tiny-arith", "#### 5", "5"),
        ("solorl/tiny-arith", "#### 5", "5"),
    ],
)
def test_the_names_of_verl_and_tinyzero(source: str, response: str, truth: object) -> None:
    assert rewards.knows(source)
    assert rewards.compute_score(source, response, truth) == 1.0


def test_an_unknown_data_source_is_an_error_that_names_it() -> None:
    assert not rewards.knows("my/data")
    with pytest.raises(UserError, match=r"my/data.*--reward-fn"):
        rewards.compute_score("my/data", "#### 5", "5")
    with pytest.raises(UserError, match="my/data"), rewards.Scorer(rewards.load_reward_fn(None)) as scorer:
        scorer(["my/data"], ["#### 5"], ["5"], [{}])


@pytest.mark.parametrize("truth", [np.int64(5), np.float32(5.0), Fraction(5), "5", 5, 5.0])
def test_number_types_of_the_ground_truth(truth: object) -> None:
    assert score("gsm8k", "#### 5", truth) == 1.0
    assert score("gsm8k", "#### 6", truth) == 0.0
    assert score("countdown", "<answer>1+4</answer>", {"target": truth, "numbers": np.array([1, 4])}) == 1.0


@pytest.mark.parametrize(
    ("family", "truth"),
    [("gsm8k", ""), ("math", " "), ("countdown", "24"), ("countdown", {"target": 5}), ("arithmetic", "five")]
    + [("countdown", {"target": "x", "numbers": [1]}), ("exact_match", []), ("math_dapo", r"\boxed{")],
)
def test_a_broken_ground_truth_is_an_error_and_no_zero(family: str, truth: object) -> None:
    with pytest.raises(ValueError, match="ground truth"):
        score(family, r"<answer>5</answer> #### 5 \boxed{5}", truth)


# -- inputs made to break parsers -------------------------------------------------------------------------------------

MEGA = 10**6
HOSTILE = [
    "#" * MEGA,
    "#### " * (MEGA // 5),
    "#### " + "1" * MEGA,
    "#### " + "1," * MEGA,
    "#### " + "-" * MEGA,
    "#### " + " " * MEGA + "6",
    "#### " + "(1" * 140,
    "#### 1" + ",22" * 95,
    "#### 6" + " or" * 90,
    "#### " + "a =" * 95,
    "<think>" * (MEGA // 7),
    "<answer>" * (MEGA // 8),
    "<answer></answer>" * (MEGA // 17),
    "<" + " " * MEGA,
    "<answer>" + "(" * MEGA + "</answer>",
    "<answer>" + "-" * 400 + "6</answer>",
    "<answer>" + r"\frac{1}{" * 50 + "</answer>",
    r"\boxed{" * (MEGA // 7),
    r"\boxed" + " " * MEGA,
    r"\boxed{" + "(" * MEGA + "}",
    r"\boxed{" + "2^" * 300 + "2}",
    "Answer:" * (MEGA // 7),
    "Answer: " + "\n" * MEGA,
    "answer" + "*" * MEGA,
    "1 " * MEGA,
    "\0" * MEGA,
    "\ud800" * 1000,
    "\u0667" * MEGA,
    "#### " + "\u00bd" * 300,
    "#### " + "\u00b2" * 300,
]


@pytest.mark.parametrize("family", [name for name in FAMILIES if not name.startswith("math")])
@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_hostile_text_costs_little_and_scores_nothing(family: str, number: int) -> None:
    start = time.process_time()
    assert score(family, HOSTILE[number]) == 0.0
    assert time.process_time() - start < 1.0


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_hostile_text_to_the_mathematics_rules(number: int) -> None:
    """What happens in the trainer's own process; what follows in the workers has a wall limit."""
    start = time.process_time()
    for task in (boxed.math_task, boxed.dapo_task):
        answer, gold = task(HOSTILE[number], "5")
        assert boxed.decide(answer, gold) in (0.0, None)
    assert time.process_time() - start < 1.0


# -- properties -------------------------------------------------------------------------------------------------------

PIECES = st.sampled_from(
    [
        "####",
        "<answer>",
        "</answer>",
        "<think>",
        "</think>",
        r"\boxed{",
        "}",
        "{",
        r"\frac",
        "Answer:",
        "1,000",
        "-",
        "=",
        "%",
    ]
    + [
        "(",
        ")",
        "+",
        "*",
        "/",
        "5",
        "\n",
        " ",
        "^",
        ".",
        ",",
        "e9",
        "\u2212",
        "\u00bd",
        "\u00b2",
        "$",
        "\\",
        "nan",
        "inf",
    ]
)
TEXTS = st.one_of(st.text(max_size=80), st.lists(PIECES | st.text(max_size=5), max_size=20).map("".join))


@pytest.mark.parametrize("family", [name for name in FAMILIES if not name.startswith("math")])
@settings(max_examples=120, deadline=None)
@given(text=TEXTS)
def test_no_text_raises_and_every_score_is_0_or_1(family: str, text: str) -> None:
    assert score(family, text) in (0.0, 1.0)


@settings(max_examples=200, deadline=None)
@given(text=TEXTS, truth=st.sampled_from(["5", "-0.5", r"\frac{1}{2}", "x+1", "(1,2)", "Evelyn"]))
def test_no_text_makes_the_mathematics_rules_raise(text: str, truth: str) -> None:
    for response in (text, rf"\boxed{{{text}}}", f"Answer: {text}"):
        answer, gold = boxed.dapo_task(response, truth)
        assert boxed.decide(answer, gold) in (0.0, 1.0, None)


@settings(max_examples=200, deadline=None)
@given(text=TEXTS)
def test_a_number_that_is_read_is_finite_and_not_huge(text: str) -> None:
    for value in read_number(text):
        assert isinstance(value, Fraction)
        assert abs(value) < 10 ** (3 * numbers.MAX_EXPONENT)


def test_exponents_have_a_limit() -> None:
    for text in ("1e300", "1e-300", "3 x 10^300"):
        assert read_number(text), text
    for text in ("1e301", "1e-301", "3 x 10^301", "1e99999", "1e" + "9" * 50):
        assert read_number(text) == (), text


DECIMALS = st.decimals(min_value=-(10**9), max_value=10**9, places=2, allow_nan=False)
INTEGERS = st.integers(min_value=-(10**12), max_value=10**12)
STYLES = [
    "{}",
    "**{}**",
    "$ {} $",
    "{}.",
    "({})",
    "x = {}",
    r"\boxed{{{}}}",
    r"\text{{{}}}",
    "{} apples",
    "{} %",
    "The answer is {}",
]


def written(value: object, generator: random.Random) -> str:
    """A number in one of the ways that people write it."""
    text = generator.choice(["{}", "{:,}"]).format(value)
    if generator.random() < 0.3:
        text = text.replace("-", "\u2212")
    if generator.random() < 0.2:
        text = text.replace(",", "{,}")
    if generator.random() < 0.2:
        text = text.translate({ord(str(digit)): 0xFF10 + digit for digit in range(10)})
    return generator.choice(STYLES).format(text)


@settings(max_examples=200, deadline=None)
@given(value=INTEGERS | DECIMALS, seed=st.integers(0, 2**32))
def test_gsm8k_reads_what_it_formats_itself(value: object, seed: int) -> None:
    text = written(value, random.Random(seed))
    assert score("gsm8k", f"Thus\n#### {text}", str(value)) == 1.0, text
    assert score("gsm8k", f"Thus\n#### {text}", str(value + 1)) == 0.0, text


@settings(max_examples=120, deadline=None)
@given(numerator=INTEGERS, denominator=st.integers(1, 10**6), seed=st.integers(0, 2**32))
def test_fractions_are_read_in_every_style(numerator: int, denominator: int, seed: int) -> None:
    style = random.Random(seed).choice(["{}/{}", r"\frac{{{}}}{{{}}}", r"$\dfrac{{{}}}{{{}}}$", "**{} / {}**"])
    text = style.format(numerator, denominator)
    assert Fraction(numerator, denominator) in read_number(text)
    assert score("gsm8k", f"#### {text}", f"{numerator}/{denominator}") == 1.0
    assert score("math", rf"\boxed{{{text}}}", rf"\frac{{{numerator}}}{{{denominator}}}") == 1.0


@settings(max_examples=120, deadline=None)
@given(value=INTEGERS | DECIMALS, seed=st.integers(0, 2**32))
def test_other_rules_read_numbers_too(value: object, seed: int) -> None:
    text = written(value, random.Random(seed))
    assert score("arithmetic", f"<answer>\n{text}\n</answer>", str(value)) == 1.0, text
    assert score("math", rf"\boxed{{{value:,}}}", str(value)) == 1.0
    assert score("math_dapo", f"**Answer:** {value}", str(value)) == 1.0


@st.composite
def expressions(draw: st.DrawFn) -> tuple[str, list[int], Fraction]:
    """A random expression, the numbers in it, and its value, worked out beside it."""
    values = draw(st.lists(st.integers(1, 99), min_size=1, max_size=6))
    terms = [(Fraction(value), str(value)) for value in values]
    while len(terms) > 1:
        (a, left), (b, right) = terms.pop(), terms.pop(draw(st.integers(0, len(terms) - 1)))
        operator = draw(st.sampled_from("+-*/" if b else "+-*"))
        result = {"+": a + b, "-": a - b, "*": a * b}.get(operator) if operator != "/" else a / b
        space = draw(st.sampled_from(["", " ", "\n"]))
        terms.append((result, f"({left}{space}{operator}{space}{right})"))
    value, text = terms[0]
    return text, values, value


@settings(max_examples=200, deadline=None)
@given(problem=expressions(), seed=st.integers(0, 2**32))
def test_countdown_agrees_with_an_evaluation_beside_it(problem: tuple[str, list[int], Fraction], seed: int) -> None:
    text, values, value = problem
    shuffled = random.Random(seed).sample(values, len(values))
    assert score("countdown", f"<answer>{text}</answer>", {"target": str(value), "numbers": shuffled}) == 1.0
    assert score("countdown", f"<answer>{text}</answer>", {"target": str(value + 1), "numbers": shuffled}) == 0.0
    assert score("countdown", f"<answer>{text}</answer>", {"target": str(value), "numbers": [*values, 7]}) == 0.0
    assert score("countdown", f"<answer>{text}+0</answer>", {"target": str(value), "numbers": values}) == 0.0


@settings(max_examples=120, deadline=None)
@given(text=st.text(alphabet="0123456789+-*/() .", max_size=30))
def test_countdown_evaluates_like_python_where_python_does(text: str) -> None:
    """Python evaluates strings of these characters as the oracle; a test may, a reward never does."""
    try:
        # Fractions in place of the literals make its arithmetic exact.
        source = re.sub(r"\d+(?:\.\d+)?", lambda m: f"Fraction('{m[0]}')", text)
        expected = eval(source, {"Fraction": Fraction}) if "**" not in text and "//" not in text else None
    except (SyntaxError, ZeroDivisionError, TypeError, AttributeError):
        expected = None
    parsed = countdown.evaluate(text)
    assert (parsed and parsed[0]) == (expected if isinstance(expected, Fraction) else None)


def countdown_oracle() -> ModuleType:
    """reasoning-gym's countdown module, without the package's other games and what they depend on."""
    folder = find_spec("reasoning_gym").submodule_search_locations[0]
    for name, path in (("reasoning_gym", folder), ("reasoning_gym.games", f"{folder}/games")):
        package = ModuleType(name)
        package.__path__ = [path]
        sys.modules[name] = package
    return importlib.import_module("reasoning_gym.games.countdown")


def test_reasoning_gyms_solutions_score_1_and_its_wrong_answers_0() -> None:
    oracle = countdown_oracle()
    problems = oracle.CountdownDataset(oracle.CountdownConfig(seed=7, size=40, min_numbers=3, max_numbers=6))
    generator = random.Random(0)
    for entry in problems:
        data = entry["metadata"]
        truth = {"target": data["target"], "numbers": data["numbers"]}
        assert problems.score_answer(data["expression"], entry) == 1.0
        assert score("countdown", f"<answer>{data['expression']}</answer>", truth) == 1.0, data
        operators = [place for place, sign in enumerate(data["expression"]) if sign in "+-*/"]
        place = generator.choice(operators)
        for sign in "+-*":
            changed = data["expression"][:place] + sign + data["expression"][place + 1 :]
            right = problems.score_answer(changed, entry) == 1.0
            assert score("countdown", f"<answer>{changed}</answer>", truth) == float(right), (changed, data)


# -- mathematics through Math-Verify ----------------------------------------------------------------------------------


def test_math_verify_works_off_the_main_thread() -> None:
    """And the process that one thread started outlives it."""
    scores, processes = [], []

    def work(number: int) -> None:
        scores.append(score("math", rf"\boxed{{x + \frac{{{number}}}3}}", rf"\frac{{{number}}}{{3}} + x"))
        processes.append(rewards._default_pool.workers[0].process.pid)

    rewards._default_pool.close()
    for number in (1, 2, 4):
        thread = threading.Thread(target=work, args=(number,))
        thread.start()
        thread.join()
        time.sleep(0.1)
    assert scores == [1.0] * 3
    assert len(set(processes)) == 1


def test_math_answers_agree_with_another_way_to_write_them() -> None:
    generator = random.Random(3)
    for _ in range(10):
        a, b, c = (generator.randint(2, 9) for _ in range(3))
        gold = f"{a}x^2 + {b}x + {c}"
        assert score("math", rf"\boxed{{{c} + {b}x + {a}x^2}}", gold) == 1.0
        assert score("math", rf"\boxed{{{c} + {b}x + {a + 1}x^2}}", gold) == 0.0


# -- the overlong penalty ---------------------------------------------------------------------------------------------


def test_overlong_penalty_by_hand() -> None:
    def penalty(length: int) -> float:
        return overlong_penalty(length, max_response_length=100, buffer=20)

    assert [penalty(length) for length in (0, 79, 80, 85, 90, 100)] == [0, 0, 0, -0.25, -0.5, -1.0]
    assert penalty(1000) == -1.0
    assert overlong_penalty(100, max_response_length=100, buffer=0) == 0.0
    assert overlong_penalty(90, max_response_length=100, buffer=20, factor=0.5) == -0.25


@given(length=st.integers(0, 10**6), limit=st.integers(1, 10**5), data=st.data())
def test_overlong_penalty_is_between_minus_factor_and_0(length: int, limit: int, data: st.DataObject) -> None:
    buffer = data.draw(st.integers(0, limit))
    value = overlong_penalty(length, max_response_length=limit, buffer=buffer)
    assert math.isfinite(value)
    assert -1.0 <= value <= 0.0
