"""The speed benchmarks: equal work on both sides, turns, phases, and the table of targets."""

import importlib
import json
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
import tyro
from conftest import ROOT, TINY, environment, run_script, succeeded
from transformers import AutoModelForCausalLM

from common import packing
from common.data import Prompt
from common.device import get_device
from common.launch import UserError

sys.path.insert(0, str(ROOT / "benchmarks"))
limits, run_trl, targets, throughput, vs_trl, workload = (
    importlib.import_module(name) for name in ("limits", "run_trl", "targets", "throughput", "vs_trl", "workload")
)
run_script_py: ModuleType = importlib.import_module("run_script")
MODEL = str(TINY / "model")


# -- the work ---------------------------------------------------------------------------------------------------------


def test_prompts_differ_and_are_about_equally_long() -> None:
    ids = workload.prompt_ids(MODEL, 64)
    assert len({tuple(prompt) for prompt in ids}) == 64
    lengths = [len(prompt) for prompt in ids]
    assert max(lengths) <= workload.MAX_PROMPT_LENGTH and max(lengths) - min(lengths) <= 4


def test_the_head_is_counted_for_response_tokens_only(tied_model: Path, untied_model: Path) -> None:
    body, head = workload.parameter_counts(str(tied_model))
    assert (body, head) == workload.parameter_counts(str(untied_model))  # looking tokens up is no arithmetic
    model = AutoModelForCausalLM.from_pretrained(tied_model)
    assert body + head == sum(p.numel() for p in model.parameters())
    assert workload.model_flops((10, 3), tokens=5, response_tokens=2) == 6 * (10 * 5 + 3 * 2)


def test_a_missing_model_is_named_with_the_command() -> None:
    with pytest.raises(UserError, match="--model nowhere: no such model folder; .*data_prep/smollm2.py"):
        workload.check_model("nowhere")


# -- turns ------------------------------------------------------------------------------------------------------------


def side(tmp_path: Path, name: str, body: str) -> "workload.Side":
    program = f"import sys, time\nfrom pathlib import Path\nfolder = Path({str(tmp_path / name)!r})\n"
    program += f"sys.path.insert(0, {str(ROOT / 'benchmarks')!r})\nimport workload\n" + textwrap.dedent(body)
    return workload.Side(name, [sys.executable, "-c", program], tmp_path / name, threads=1)


STEPS = """
    for step in range(1, 4):
        workload.wait_for_turn(folder, step)
        start = time.time()
        time.sleep(0.1)
        workload.write_step(folder, step, {"start": start, "end": time.time()})
"""


def test_sides_take_turns_and_the_first_step_does_not_count(tmp_path: Path) -> None:
    with side(tmp_path, "a", STEPS) as a, side(tmp_path, "b", STEPS) as b:
        records = workload.take_turns([a, b], steps=2)
    assert [len(taken) for taken in records] == [2, 2]
    spans = [(one["start"], one["end"]) for pair in zip(*records, strict=True) for one in pair]
    assert all(earlier[1] <= later[0] for earlier, later in zip(spans, spans[1:], strict=False))
    assert workload.medians([{"x": 1.0}, {"x": 5.0}, {"x": 2.0}]) == {"x": 2.0}


def test_a_side_that_fails_shows_its_log(tmp_path: Path) -> None:
    with side(tmp_path, "a", "raise SystemExit('the weights are gone')") as broken:
        with pytest.raises(UserError, match="(?s)a ended with code 1 in step 1:.*the weights are gone"):
            broken.step()


def test_a_side_is_ended_when_the_benchmark_fails(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(ValueError), side(tmp_path, "a", "time.sleep(600)") as sleeping:
        raise ValueError
    assert sleeping.process.returncode is not None and time.monotonic() - start < 30


def test_processor_time_leaves_waiting_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(workload.CLOCK, "processor")
    start = workload.now()
    time.sleep(0.3)
    assert workload.now() - start < 0.2
    assert workload.threads_for("processor") == 1
    monkeypatch.setenv(workload.CLOCK, "wall")
    start = workload.now()
    time.sleep(0.3)
    assert workload.now() - start >= 0.3


@pytest.mark.parametrize(("ranks", "threads", "expected"), [(1, 3, 3), (2, 2, 4)])
def test_the_matmul_rate_is_that_of_all_threads(
    ranks: int, threads: int, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where OMP_NUM_THREADS is 1, as `make bench` has it."""
    used = []
    monkeypatch.setattr(throughput.limits, "matmul_rate", lambda *_, **__: used.append(torch.get_num_threads()) or 5.0)
    before = torch.get_num_threads()
    try:
        args = throughput.Args(model=MODEL, ranks=ranks, threads=threads, dtype="fp32")
        assert throughput.matmul_peak(args, SimpleNamespace(is_accelerator=False)) == 5.0
    finally:
        torch.set_num_threads(before)
    assert used == [expected]


# -- what the sides run -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("script", ["grpo", "rloo", "remax", "gspo", "ppo"])
def test_the_scripts_know_the_flags(script: str, tmp_path: Path) -> None:
    module = importlib.import_module(f"algos.{script}")
    args = throughput.Args(script=f"algos/{script}.py", model=MODEL, dtype="fp32", script_args="--kl-coef 0.1")
    command = throughput.script_command(args, tmp_path)
    flags = command[command.index(str(ROOT / "benchmarks" / "run_script.py")) + 1 :]
    own = {"--script", "--folder"}
    rest = [text for i, text in enumerate(flags) if text not in own | {"--engine"} and flags[i - 1] not in own]
    parsed = tyro.cli(module.Args, args=rest)
    assert parsed.prompts_per_step == 8 and parsed.max_response_length == 64 and parsed.kl_coef == 0.1
    assert parsed.eval_every == 0 and not parsed.export


def test_a_turn_ends_when_nothing_is_left_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a script does after it has logged, drawing its curve for one, would go on in another side's turn."""
    monkeypatch.setattr(run_script_py, "dist", SimpleNamespace(get_rank=lambda: 0, barrier=lambda: None))
    monkeypatch.setattr(run_script_py.launch, "Phases", type("Phases", (), {"start_step": lambda self: None}))
    monkeypatch.setattr(run_script_py.tracking.Tracker, "log", lambda self, step, metrics: None)
    write_last = run_script_py.follow_turns(tmp_path, 8)
    phases = run_script_py.launch.Phases()
    for step in (1, 2):
        (tmp_path / f"go-{step}").touch()
    metrics = {"response_length": 8, "time/step": 2.0, "perf/tokens_per_s": 50.0, "perf/peak_memory_gib": 1.0}
    for step in (1, 2):
        phases.start_step()
        run_script_py.tracking.Tracker.log(None, step, metrics)
        assert not (tmp_path / f"step-{step}.json").exists()
    assert json.loads((tmp_path / "step-1.json").read_text()) == {"step": 2.0, "peak_memory_gib": 1.0, "tokens": 100.0}
    write_last()
    assert (tmp_path / "step-2.json").exists()


def test_no_response_ends_early(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [SimpleNamespace(ignore_eos=False) for _ in range(3)]
    llm = SimpleNamespace(generate=lambda inputs, params, use_tqdm: [(i, p.ignore_eos) for i, p in zip(inputs, params)])
    script = SimpleNamespace(build_engine=lambda *_args: llm)
    monkeypatch.setattr(run_script_py.engine, "stop_token_ids", run_script_py.engine.stop_token_ids)
    run_script_py.fix_lengths(script)
    assert script.build_engine("folder").generate([7, 8, 9], requests, use_tqdm=False) == [
        (7, True),
        (8, True),
        (9, True),
    ]
    assert run_script_py.engine.stop_token_ids("tokenizer", "folder") == []


def test_the_update_is_measured_without_the_engine(tmp_path: Path) -> None:
    """The whole benchmark, on the embedded model, where vLLM cannot be imported."""
    (tmp_path / "vllm.py").write_text("raise ImportError('there is no vLLM')")
    out = tmp_path / "out.json"
    flags = ["--no-engine", "--model", MODEL, "--prompts", "2", "--group-size", "2", "--response-length", "8"]
    flags += ["--steps", "1", "--threads", "1", "--out", out]
    command = [sys.executable, ROOT / "benchmarks" / "throughput.py", *flags]
    paths = f"{tmp_path}:{ROOT}"
    run = subprocess.run(
        list(map(str, command)),
        env=environment(PYTHONPATH=paths),
        cwd=ROOT,
        timeout=180,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    record = json.loads(out.read_text())
    assert record["shape"] == "2 x 2 x 8" and record["versions"]["torch"] and record["hardware"]["cpus"]
    figures = record["figures"]
    assert 0 < figures["update"] < figures["step"] and 0 < figures["update_utilisation"] < 1
    prompts = sum(map(len, workload.prompt_ids(MODEL, 2)))
    assert figures["tokens"] == pytest.approx(2 * prompts + 4 * 8)
    assert "update, of the matmul rate" in run.stdout


def test_scans_vary_one_thing() -> None:
    args = throughput.Args(prompts=32, group_size=8)
    lengths = throughput.scan_values("response-length", args)
    assert [run.response_length for run in lengths] == [64, 128, 256, 512, 1024, 2048]
    assert {throughput.shape_of(run).response_tokens for run in lengths} == {32 * 8 * 64}
    groups = throughput.scan_values("group-size", args)
    assert {throughput.shape_of(run).sequences for run in groups} == {256}
    assert [run.micro_batch_tokens for run in throughput.scan_values("micro-batch-tokens", args)][0] == 256
    assert [run.ranks for run in throughput.scan_values("ranks", args)][0] == 1


# -- the limits -------------------------------------------------------------------------------------------------------


def test_limits_measures_the_machine_and_the_trainer(capsys: pytest.CaptureFixture) -> None:
    args = limits.Args(model=MODEL, prompts=2, group_size=2, response_length=8, dtype="fp32", repeats=1, engine=False)
    figures = limits.measure(args, get_device())
    assert figures["matmul_fp32_flops"] > 1e8 and figures["copy_bytes_per_s"] > 1e7
    prompts = workload.prompt_ids(MODEL, 2)
    assert figures["trainer_tokens"] == 2 * sum(map(len, prompts)) + 4 * 8
    assert figures["weight_bytes"] == 4 * sum(workload.parameter_counts(MODEL))
    limits.show(figures, workload.Shape(2, 2, 8))
    assert "bare forward and backward, fp32" in capsys.readouterr().out


def test_the_rate_is_the_best_of_the_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    seconds = iter([1.0, 0.5])
    monkeypatch.setattr(limits, "timed", lambda work, **_: next(seconds))
    shapes = [(2, 3, 4), (2, 3, 4)]
    assert limits.matmul_rate(shapes, torch.float32, repeats=1, device=get_device()) == 2 * 2 * 3 * 4 / 0.5


# -- TRL --------------------------------------------------------------------------------------------------------------


def test_a_phase_inside_another_is_not_counted_twice() -> None:
    clock = run_trl.Clock()
    inner = clock.time("sync", lambda: time.sleep(0.1))

    def outer() -> None:
        inner()
        time.sleep(0.05)

    clock.time("rollout", outer)()
    time.sleep(0.02)
    record = clock.record()
    assert record["sync"] == pytest.approx(0.1, abs=0.03) and record["rollout"] == pytest.approx(0.05, abs=0.03)
    assert record["update"] == pytest.approx(0.02, abs=0.03) and record["logprobs"] == 0.0
    assert sum(value for name, value in record.items() if name != "step") == pytest.approx(record["step"])


def test_trls_requirements_are_pinned_and_agree_with_ours() -> None:
    def pins(path: Path) -> dict[str, str]:
        lines = [line for line in path.read_text().splitlines() if line and line[0] not in "#-"]
        assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.+]*", line) for line in lines), path
        return dict(line.lower().split("==") for line in lines)

    trl = pins(ROOT / "benchmarks" / "requirements-trl.txt")
    assert "trl" in trl
    for name in ("cpu.txt", "data.txt", "test.txt"):
        ours = pins(ROOT / "requirements" / name)
        assert {package: trl[package] for package in trl.keys() & ours} == {p: ours[p] for p in trl.keys() & ours}


@pytest.mark.parametrize(("sequences", "groups"), [(4, 1), (8, 1), (12, 2), (16, 2)])
def test_both_sides_compute_as_many_sequences_at_a_time(sequences: int, groups: int) -> None:
    args = vs_trl.Args(model=MODEL, prompts=4, group_size=8, response_length=64, micro_batch_sequences=sequences)
    longest = max(map(len, workload.prompt_ids(MODEL, 4)))
    assert vs_trl.micro_batch_tokens(args) == groups * longest + sequences * 64
    prompts = [Prompt(i, ids, "", None, {}, "rule", []) for i, ids in enumerate(workload.prompt_ids(MODEL, 4))]
    samples = [SimpleNamespace(prompt=p, num_tokens=len(p.prompt_ids) + 64) for p in prompts for _ in range(8)]
    micro_batches = packing.split(samples, vs_trl.micro_batch_tokens(args), is_packed=True)
    assert len(micro_batches[0]) == sequences


def test_a_missing_trl_is_named_with_the_command() -> None:
    run = run_script("benchmarks/vs_trl.py", "--trl-python", "nowhere/python", "--model", MODEL)
    assert run.returncode != 0 and "--trl-python nowhere/python: not found; `make bench` makes it" in run.stderr


def test_a_phase_that_one_side_does_not_have_has_no_ratio() -> None:
    solorl = {"update": 2.0, "logprobs": 1e-5, "sync": 0.5, "peak_memory_gib": 1.0}
    trl = {"update": 5.0, "logprobs": 1.0, "sync": 0.0, "peak_memory_gib": 3.0}
    assert vs_trl.ratios({"solorl": solorl, "trl": trl}) == {"update": 2.5, "peak_memory_gib": 3.0}


# -- the targets ------------------------------------------------------------------------------------------------------


def results(**changes: float) -> dict:
    """What the three benchmarks write, as far as the targets read it; everything reached unless changed."""
    ratios = {"update": 3.1, "step": 3.2, "peak_memory_gib": 2.0} | changes
    limit_figures = {
        "weight_bytes": 4e9,
        "copy_bytes_per_s": 8e9,
        "reload_s": 0.5,
        "generate_s": 9.6,
        "shape": "8 x 8 x 64",
    }
    limit_figures |= {"matmul_fp32_flops": 1.6e11, "matmul_bf16_flops": 1e10}
    figures = {"update_flops_per_s": 0.5 * 1.6e11, "rollout": 10.0, "sync": 1.4} | changes
    ranks = [{"ranks": 1, "step": 10.0}, {"ranks": 2, "step": changes.get("two_ranks", 11.0)}]
    about = {
        "date": "2026-01-01", "clock": "wall", "load_average": 0.5, "args": {"dtype": "fp32"},
        "hardware": {"cpus": 2, "cpu": "a processor", "instructions": "AVX2", "bf16_instructions": False},
    }  # fmt: skip
    return {
        "limits": about | {"figures": limit_figures},
        "throughput": about
        | {"shape": "8 x 8 x 64", "matmul_flops": 1.5e11, "figures": figures, "scans": {"ranks": ranks}},
        "vs_trl": about
        | {"shape": "8 x 8 x 64", "results": {name: {"ratios": ratios} for name in ("transformers", "vllm")}},
    }


def verdicts(found: dict) -> dict[str, str]:
    return {target.name: target.row(found)[3] for target in targets.TARGETS}


def test_targets_that_are_reached() -> None:
    assert set(verdicts(results()).values()) == {"reached"}


@pytest.mark.parametrize(
    "changes, missed",
    [
        ({"update": 2.9}, ["update, times as fast as TRL's (transformers)", "update, times as fast as TRL's (vLLM)"]),
        ({"step": 2.5}, ["step, times as fast as TRL with transformers"]),
        ({"step": 1.9}, ["step, times as fast as TRL with transformers", "step, times as fast as TRL with vLLM"]),
        ({"peak_memory_gib": 1.6}, ["peak memory, share of TRL's with vLLM"]),
        ({"update_flops_per_s": 0.39 * 1.6e11}, ["update, share of the matmul rate"]),
        ({"rollout": 10.2}, ["rollout, share of bare llm.generate's rate"]),
        ({"sync": 1.51}, ["sync: two copies and the engine's reload"]),
        ({"two_ranks": 11.6}, ["step of 2 ranks, times that of 1"]),
    ],
)
def test_targets_that_are_missed(changes: dict[str, float], missed: list[str]) -> None:
    assert [name for name, verdict in verdicts(results(**changes)).items() if verdict == "MISSED"] == missed


def test_the_bare_engine_that_took_turns_is_the_measure() -> None:
    """What limits.py measured minutes before counts only where nothing took turns."""
    assert verdicts(results(bare_rollout=9.4))["rollout, share of bare llm.generate's rate"] == "MISSED"
    assert verdicts(results(bare_rollout=9.6, rollout=10.1))["rollout, share of bare llm.generate's rate"] == "reached"


def test_what_was_not_measured_is_said(tmp_path: Path) -> None:
    found = results()
    del found["vs_trl"]
    for name, record in found.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
    run = succeeded(run_script("benchmarks/targets.py", "--folder", tmp_path))
    assert run.stdout.count("not measured") == 5 and run.stdout.count("reached") == 4
    assert "10.0 GFLOP/s against 160.0 in fp32" in run.stdout
