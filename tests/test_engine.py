"""The real engine, in the trainer's processes: it holds the trainer's weights after every sync, or the run stops."""

import json

import pytest
from conftest import TINY, run_forked, succeeded

CASES = {
    "tied": ("tied", 1, 1),
    "untied": ("untied", 1, 1),
    "two_ranks": ("tied", 2, 1),
    "tensor_parallel": ("untied", 2, 2),
}


@pytest.fixture(scope="module", params=CASES)
def results(request, tmp_path_factory, untied_model) -> dict:
    kind, nproc, tp = CASES[request.param]
    folder = TINY / "model" if kind == "tied" else untied_model
    out = tmp_path_factory.mktemp("engine") / "results.json"
    succeeded(run_forked("tests/workers/engine.py", folder, out, tp, nproc=nproc))
    return json.loads(out.read_text()) | {"case": request.param}


def test_logprobs_agree_at_the_start_and_after_every_sync(results):
    assert results["gap_start"] < 1e-4
    assert max(results["gaps_after_updates"]) < 1e-4
    assert results["gap_after_head"] < 1e-4
    assert all(results["moved"])  # else the agreement would prove nothing


def test_syncing_the_same_weights_again_changes_nothing(results):
    assert results["same_weights_same_samples"]


def test_a_changed_head_row_changes_what_is_sampled(results):
    assert results["greedy_before"] != [77]
    assert results["greedy_after"] == [77]


def test_responses_of_a_group_and_of_two_ranks_differ(results):
    assert len({tuple(ids) for ids in results["group"]}) > 1
    by_rank = [json.dumps(ids) for ids in results["by_rank"]]
    assert len(set(by_rank)) == results["world_size"]


def test_a_missing_or_unknown_weight_stops_the_run_and_is_named(results):
    assert results["fault"] in results["fault_message"]
    assert "weight sync" in results["fault_message"]


def test_an_engine_that_is_let_go_leaves_the_process_group(results):
    assert results["has_process_group"]
