"""Each algorithm's script as a user starts it: 2 steps on 2 ranks, saved, a third on 1 rank, exported."""

import json
import re
from pathlib import Path

import pytest
from conftest import run_forked, run_script, samples_of, succeeded

from docs.generate import documented_metrics

# What makes a script go through all of its phases: a reference model, and old log-probs where they are not the default.
SCRIPTS = {
    "rloo": ("--group-size", 4, "--kl-coef", "0.05"),
    "remax": ("--kl-coef", "0.05"),
    "gspo": ("--group-size", 4),
}
SMALL = (
    *("--prompts-per-step", 4, "--eval-every", 0, "--save-every", 1, "--lr", "1e-3", "--warmup-steps", 1),
    *("--dtype", "fp32"),
)


def rows_of(run_dir: Path) -> list[dict]:
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module", params=sorted(SCRIPTS))
def run(request, tmp_path_factory) -> tuple[str, Path, str]:
    """(script, its run folder, its output): 2 steps on 2 ranks, then resumed on 1 rank for a third, and exported."""
    name = request.param
    script, run_dir = f"algos/{name}.py", tmp_path_factory.mktemp("runs") / name
    common = (*SMALL, *SCRIPTS[name], "--run-dir", run_dir)
    first = succeeded(run_script(script, *common, "--steps", 2, "--no-export", nproc=2))
    assert first.stderr.strip() == ""
    second = succeeded(run_forked(script, *common, "--steps", 3, "--resume", nproc=1))
    return name, run_dir, first.stdout + second.stdout


def test_it_trains_and_goes_on(run):
    name, run_dir, output = run
    assert "engine and trainer agree" in output
    assert "resumed after step 2" in output
    rows = rows_of(run_dir)
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert any(row["grad_norm"] > 0 for row in rows)
    for row in rows:
        assert 0 < row["entropy"] < 5
        assert row["mismatch_abs"] < 1e-4
        assert 0 <= row["accuracy"] <= 1
        assert row["bad_updates"] == 0
    assert {path.name for path in (run_dir / "checkpoints").iterdir()} >= {"step_3"}
    assert (run_dir / f"{name}.py").exists()
    assert (run_dir / "curve.png").exists()


def test_the_metrics_are_those_of_the_documentation(run):
    name, run_dir, _ = run
    logged = {key for row in rows_of(run_dir) for key in row} - {"step"}
    always = {entry["key"] for entry in documented_metrics(name) if "when" not in entry}
    sometimes = {entry["key"] for entry in documented_metrics(name) if "when" in entry}
    patterns = [re.sub(r"<\w+>", r"\\w+", key) for key in always | sometimes]
    assert {key for key in logged if not any(re.fullmatch(pattern, key) for pattern in patterns)} == set()
    assert always - logged == set()
    if "--kl-coef" in SCRIPTS[name]:
        assert "kl_ref" in logged


def test_the_algorithm_shows_in_the_metrics(run):
    name, run_dir, _ = run
    rows = rows_of(run_dir)
    if name == "gspo":  # several updates for each rollout, and narrow ranges
        assert any(row["clip_fraction"] > 0 for row in rows)
        assert any(row["approx_kl"] != 0 for row in rows)
    else:  # one update: ratio 1
        assert all(row["clip_fraction"] == 0 and abs(row["approx_kl"]) < 1e-6 for row in rows)
    if name == "remax":
        assert all(0 <= row["greedy/accuracy"] <= 1 and row["greedy/response_length"] > 0 for row in rows)
        by_step = [[s for s in samples_of(run_dir) if s["step"] == step] for step in (1, 2, 3)]
        assert [len(samples) for samples in by_step] == [1, 1, 1]  # the samples, and not their greedy companions
    else:
        assert len(samples_of(run_dir)) == 3 * 4


def test_the_export_loads_and_generates(run):
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _, run_dir, _ = run
    model = AutoModelForCausalLM.from_pretrained(run_dir / "hf")
    tokenizer = AutoTokenizer.from_pretrained(run_dir / "hf")
    ids = tokenizer.apply_chat_template(
        [{"role": "user", "content": "123+456=?"}], add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    with torch.no_grad():
        response = model.generate(ids, max_new_tokens=40, do_sample=False)[0, ids.shape[1] :]
    assert len(tokenizer.decode(response)) > 0
