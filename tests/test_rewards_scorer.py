"""The scorer: what fails is counted and said, what hangs is killed, and users' functions run beside, not inside."""

import logging
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import ROOT

from common.launch import UserError
from common.rewards import RewardError, RewardFn, Scorer, load_reward_fn, penalise_length

MATH = "lighteval/MATH"
BOMB = r"\boxed{(10^9)!}"
"""Not caught by the check for powers; SymPy computes on it for ever."""


@pytest.fixture
def scorer() -> Iterator[Scorer]:
    with Scorer(load_reward_fn(None), timeout_s=20.0) as scorer:
        yield scorer


def score_math(scorer: Scorer, responses: list[str], truth: str = "x+1") -> tuple[list[float], dict[str, float]]:
    count = len(responses)
    return scorer([MATH] * count, responses, [truth] * count, [{}] * count)


# -- the built-in rules -----------------------------------------------------------------------------------------------


def test_scores_are_those_of_the_rules_in_order(scorer: Scorer) -> None:
    sources = ["openai/gsm8k", MATH, "countdown", MATH, "openai/gsm8k"]
    responses = ["#### 5", r"\boxed{1+x}", "<answer>2*3</answer>", r"\boxed{x+2}", "#### 6"]
    truths = [5, "x+1", {"target": 6, "numbers": [2, 3]}, "x+1", "5"]
    scores, metrics = scorer(sources, responses, truths, [{}] * 5)
    assert scores == [1.0, 1.0, 1.0, 0.0, 0.0]
    assert metrics == {"rewards/errors": 0.0, "rewards/timeouts": 0.0}


def test_nothing_to_score(scorer: Scorer) -> None:
    assert scorer([], [], [], []) == ([], {"rewards/errors": 0.0, "rewards/timeouts": 0.0})


def test_a_failure_is_counted_and_said_and_costs_only_its_own_row(
    scorer: Scorer, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        scores, metrics = scorer(["openai/gsm8k"] * 3, ["#### 5"] * 3, ["5", None, "5"], [{}] * 3)
    assert scores == [1.0, 0.0, 1.0]
    assert metrics["rewards/errors"] == 1.0
    assert "1 of 3 responses" in caplog.text
    assert "ground truth is empty" in caplog.text


def test_strict_stops_at_the_first_failure() -> None:
    with (
        Scorer(load_reward_fn(None), strict=True) as scorer,
        pytest.raises(RewardError, match="ground truth is empty"),
    ):
        scorer(["openai/gsm8k"], ["#### 5"], [""], [{}])


def test_a_hanging_answer_costs_at_most_the_wall_limit_each_time() -> None:
    with Scorer(load_reward_fn(None), timeout_s=2.0) as scorer:
        scorer.pool.start()
        for _ in range(3):
            start = time.monotonic()
            scores, metrics = score_math(scorer, [r"\boxed{1+x}", BOMB, r"\boxed{2+x-1}"])
            assert time.monotonic() - start < 30  # the limit, and the start of a new process on a busy machine
            assert scores == [1.0, 0.0, 1.0]
            assert metrics["rewards/timeouts"] == 1.0
            assert metrics["rewards/errors"] == 0.0
        assert score_math(scorer, [r"\boxed{1+x}"])[0] == [1.0]


def test_a_lone_hanging_answer_takes_no_longer_than_the_limit() -> None:
    with Scorer(load_reward_fn(None), timeout_s=1.0) as scorer:
        scorer.pool.start()
        start = time.monotonic()
        assert score_math(scorer, [BOMB])[0] == [0.0]
        assert 1.0 <= time.monotonic() - start < 3.0


def test_equal_answers_are_compared_once(scorer: Scorer, monkeypatch: pytest.MonkeyPatch) -> None:
    tasks = []
    run = scorer.pool.run
    monkeypatch.setattr(scorer.pool, "run", lambda pairs, **settings: tasks.extend(pairs) or run(pairs, **settings))
    scores, _ = score_math(scorer, [r"\boxed{1+x}", r"\boxed{2+x}", r"\boxed{1+x}"])
    assert scores == [1.0, 0.0, 1.0]
    assert len(tasks) == 2


def test_processes_are_started_once(scorer: Scorer) -> None:
    score_math(scorer, [r"\boxed{1+x}"])
    before = [worker.process.pid for worker in scorer.pool.workers]
    score_math(scorer, [r"\boxed{1+x}", r"\boxed{2+x}"])
    assert [worker.process.pid for worker in scorer.pool.workers] == before


def test_a_killed_process_is_replaced(scorer: Scorer) -> None:
    score_math(scorer, [r"\boxed{1+x}"])
    os.kill(scorer.pool.workers[0].process.pid, signal.SIGKILL)
    scores, metrics = score_math(scorer, [r"\boxed{1+x}", r"\boxed{2+x-1}"])
    assert scores == [0.0, 1.0]
    assert metrics["rewards/errors"] == 1.0


def test_close_ends_the_processes(scorer: Scorer) -> None:
    score_math(scorer, [r"\boxed{1+x}"])
    process = scorer.pool.workers[0].process
    scorer.close()
    assert process.returncode is not None


def test_a_stuck_process_dies_with_the_trainer(tmp_path: Path) -> None:
    program = tmp_path / "trainer.py"
    program.write_text(
        "from common.rewards import Scorer, load_reward_fn\n"
        "scorer = Scorer(load_reward_fn(None), timeout_s=1000)\n"
        "scorer.pool.start()\n"
        "print(scorer.pool.workers[0].process.pid, flush=True)\n"
        f"scorer(['{MATH}'], [{BOMB!r}], ['5'], [{{}}])\n"
    )
    environment = dict(os.environ, PYTHONPATH=str(ROOT))
    with subprocess.Popen([sys.executable, program], stdout=subprocess.PIPE, env=environment, text=True) as trainer:
        worker = int(trainer.stdout.readline())
        time.sleep(0.5)
        trainer.kill()
    deadline = time.monotonic() + 10
    while _alive(worker) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _alive(worker)


def _alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def test_rules_and_workers_do_without_torch() -> None:
    """A worker must start fast and small: the rules may not pull in what the trainer is made of."""
    code = "import sys, common.rewards.worker; print(sorted({'torch', 'transformers', 'vllm'} & set(sys.modules)))"
    output = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env=dict(os.environ, PYTHONPATH=str(ROOT)),
    )
    assert output.stdout.strip() == "[]"


# -- the overlong penalty ---------------------------------------------------------------------------------------------


def test_the_overlong_penalty_lowers_the_reward_and_not_the_score() -> None:
    samples = [SimpleNamespace(response_ids=[0] * n, score=1.0, reward=1.0) for n in (90, 10, 100)]
    args = SimpleNamespace(max_response_length=100, overlong_buffer=20, overlong_penalty=0.5)
    assert penalise_length(samples, args) == {"rewards/overlong": -0.25}
    assert [sample.reward for sample in samples] == [0.75, 1.0, 0.5]
    assert [sample.score for sample in samples] == [1.0] * 3


def test_without_a_buffer_there_is_no_penalty_and_no_metric() -> None:
    sample = SimpleNamespace(response_ids=[0] * 100, score=1.0, reward=1.0)
    args = SimpleNamespace(max_response_length=100, overlong_buffer=0, overlong_penalty=1.0)
    assert penalise_length([sample], args) == {}
    assert sample.reward == 1.0


# -- users' functions -------------------------------------------------------------------------------------------------


def write(folder: Path, text: str) -> Path:
    path = folder / "my_reward.py"
    path.write_text(text)
    return path


def run_function(path: Path, count: int = 2, name: str = "reward", **settings: object) -> tuple[list[float], dict]:
    with Scorer(load_reward_fn(f"{path}:{name}"), **settings) as scorer:
        responses = [str(number) for number in range(count)]
        return scorer(["mine"] * count, responses, ["1"] * count, [{"k": 1}] * count)


def test_a_plain_function(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "def reward(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    print('chatter must not break anything')\n"
        "    assert data_source == 'mine' and extra_info == {'k': 1}\n"
        "    return solution_str == ground_truth\n",
    )
    scores, metrics = run_function(path)
    assert scores == [0.0, 1.0]
    assert metrics["rewards/errors"] == 0.0


def test_several_processes_share_the_work_and_keep_the_order(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "import os, time\n"
        "def reward(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    time.sleep(0.05 if solution_str == '0' else 0.0)\n"
        "    return {'score': float(solution_str), 'process': os.getpid()}\n",
    )
    with Scorer(load_reward_fn(f"{path}:reward"), num_workers=3) as scorer:
        pids = {worker.process.pid for worker in scorer.pool.workers}
        for _ in range(3):
            scores, metrics = scorer(["mine"] * 20, [str(n) for n in range(20)], [None] * 20, [{}] * 20)
            assert scores == list(range(20))
        assert {worker.process.pid for worker in scorer.pool.workers} == pids
        assert len(pids) == 3


def test_a_batched_function(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "def reward(data_sources, solution_strs, ground_truths, extra_infos):\n"
        "    assert len(data_sources) == len(solution_strs) == len(ground_truths) == len(extra_infos) == 3\n"
        "    return [float(text) for text in solution_strs]\n",
    )
    assert run_function(path, count=3)[0] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    "head",
    [
        "def reward(solution_str, ground_truth):",
        "def reward(*, ground_truth, solution_str, **rest):",
        "async def reward(data_source, solution_str, ground_truth, extra_info=None):",
        "def reward(source, text, truth, extra):\n    solution_str, ground_truth = text, truth",
    ],
)
def test_functions_as_verl_lets_people_write_them(tmp_path: Path, head: str) -> None:
    path = write(tmp_path, f"{head}\n    return float(solution_str == ground_truth)\n")
    assert run_function(path)[0] == [0.0, 1.0]


def test_a_batched_function_that_returns_too_few_scores(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = write(tmp_path, "def reward(data_sources, solution_strs, ground_truths, extra_infos): return [1.0]\n")
    scores, metrics = run_function(path, count=3)
    assert scores == [0.0, 0.0, 0.0]
    assert metrics["rewards/errors"] == 3.0
    assert "1 scores for 3 responses" in caplog.text


def test_the_means_of_a_dict_are_logged(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "import numpy as np\n"
        "def reward(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    return {'score': np.float32(solution_str) / 2, 'acc': solution_str == '1', 'pred': solution_str}\n",
    )
    scores, metrics = run_function(path)
    assert scores == [0.0, 0.5]
    assert metrics["rewards/acc"] == 0.5
    assert "rewards/pred" not in metrics


def test_a_function_may_import_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "helper.py").write_text("VALUE = 0.25\n")
    path = write(tmp_path, "import helper\ndef reward(a, b, c, d=None):\n    return helper.VALUE\n")
    assert run_function(path)[0] == [0.25, 0.25]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ("    return 1 / 0", r"my_reward\.py:2: ZeroDivisionError"),
        ("    return None", "not a number"),
        ("    return input()", "EOFError"),
        ("    return 'high'", "not a number"),
        ("    return {'acc': 1.0}", "no 'score'"),
        ("    raise SystemExit(3)", r"my_reward\.py:2: SystemExit"),
        ("    import os; os._exit(7)", "ended with code 7"),
        ("    return (lambda: undefined)()", r"my_reward\.py:2: NameError"),
    ],
)
def test_a_failing_function_is_counted_with_file_and_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, body: str, said: str
) -> None:
    path = write(tmp_path, f"def reward(data_source, solution_str, ground_truth, extra_info=None):\n{body}\n")
    scores, metrics = run_function(path, count=2)
    assert scores == [0.0, 0.0]
    assert metrics["rewards/errors"] == 2.0

    assert re.search(said, caplog.text), caplog.text


@pytest.mark.parametrize("value", ["nan", "inf", "-inf"])
@pytest.mark.parametrize("form", ["{}", "{{'score': {}, 'acc': 1.0}}", "[{}] * len(solution_strs)"])
def test_a_score_that_is_not_finite_is_counted_and_left_for_the_trainer_to_refuse(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, value: str, form: str
) -> None:
    names = "data_source, solution_str, ground_truth, extra_info=None"
    if "solution_strs" in form:
        names = "data_sources, solution_strs, ground_truths, extra_infos"
    returned = form.format(f"float('{value}')")
    path = write(tmp_path, f"def reward({names}):\n    return {returned}\n")
    scores, metrics = run_function(path, count=2)
    assert [str(score) for score in scores] == [value, value]
    assert metrics["rewards/errors"] == 2.0
    assert f"the score is {value}" in caplog.text
    with pytest.raises(RewardError, match=f"the score is {value}"):
        run_function(path, strict=True)


def test_a_failing_function_stops_a_strict_run(tmp_path: Path) -> None:
    path = write(tmp_path, "def reward(a, b, c, d=None):\n    return 1 / 0\n")
    with pytest.raises(RewardError, match=r"my_reward\.py:2: ZeroDivisionError"):
        run_function(path, strict=True)


def test_a_function_that_never_returns_scores_0(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        "def reward(data_source, solution_str, ground_truth, extra_info=None):\n"
        "    while solution_str == '1': pass\n"
        "    return 1.0\n",
    )
    scores, metrics = run_function(path, count=3, timeout_s=1.0)
    assert scores == [1.0, 0.0, 1.0]
    assert metrics["rewards/timeouts"] == 1.0


@pytest.mark.parametrize(
    ("text", "name", "said"),
    [
        ("def other(): pass\n", "reward", "defines no 'reward'"),
        ("def reward(:\n", "reward", r"my_reward\.py:1: SyntaxError"),
        ("x = 1\n\ndef reward(\n", "reward", r"my_reward\.py:3: SyntaxError"),
    ],
)
def test_a_file_that_cannot_work_is_found_without_running_it(tmp_path: Path, text: str, name: str, said: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UserError, match=said):
        load_reward_fn(f"{path}:{name}")


@pytest.mark.parametrize(
    "text",
    [
        "from math import sqrt as reward\n",
        "reward = lambda a, b, c, d=None: 1.0\n",
        "try:\n    import no_such_module\nexcept ImportError:\n    def reward(a, b, c, d=None): return 1.0\n",
        "if True:\n    def reward(a, b, c, d=None): return 1.0\n",
    ],
)
def test_a_name_may_be_bound_in_any_way(tmp_path: Path, text: str) -> None:
    assert load_reward_fn(f"{write(tmp_path, text)}:reward").name == "reward"


@pytest.mark.parametrize("spec", ["nofile.py:reward", "reward", "file.py:", ":reward", "file.py:not a name"])
def test_a_spec_that_names_nothing(spec: str) -> None:
    with pytest.raises(UserError, match=r"--reward-fn"):
        load_reward_fn(spec)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("import no_such_module\ndef reward(a, b, c, d=None): return 1.0\n", r"my_reward\.py:1: ModuleNotFoundError"),
        ("reward = 3\n", "is not a function"),
        ("raise SystemExit('no')\ndef reward(a, b, c, d=None): return 1.0\n", r"my_reward\.py:1: SystemExit"),
    ],
)
def test_a_file_that_fails_to_load_is_said_at_the_start(tmp_path: Path, text: str, said: str) -> None:
    path = write(tmp_path, text)
    with pytest.raises(UserError, match=said):
        Scorer(load_reward_fn(f"{path}:reward"))


def test_the_builtin_rules_are_no_file() -> None:
    assert load_reward_fn(None) == RewardFn()
    assert load_reward_fn(None).knows("openai/gsm8k")
    assert not load_reward_fn(None).knows("mine")
    assert RewardFn("f.py", "g").knows("mine")
