"""The gradient is that of the whole batch, however it is cut into micro-batches, chunks and ranks."""

import pytest
import torch
import torch.nn.functional as F
from conftest import run_forked, succeeded
from workers.gradients import VARIANTS, make_samples

from algos.grpo import compute_loss


@pytest.fixture(scope="module", params=["tied", "untied"])
def results(request, tmp_path_factory, tied_model, untied_model):
    """Every variant on 1 and on 2 ranks, and the folder of the model."""
    folder = tied_model if request.param == "tied" else untied_model
    found = {}
    for nproc in (1, 2):
        out = tmp_path_factory.mktemp(f"{request.param}{nproc}")
        succeeded(run_forked("tests/workers/gradients.py", folder, out, nproc=nproc))
        found |= {(nproc, name): torch.load(out / f"{name}.pt", weights_only=True) for name in VARIANTS}
    return folder, found


def dense_reference(folder) -> tuple[float, dict[str, torch.Tensor]]:
    """The loss as transformers and autograd give it: one sample at a time, all logits at once, nothing sharded."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    samples = make_samples()
    num_tokens = sum(len(s.response_ids) for s in samples)
    total = 0.0
    for sample in samples:
        ids = torch.tensor([sample.prompt.prompt_ids + sample.response_ids])
        logprobs = F.log_softmax(model(ids).logits[0, :-1] / 0.8, dim=-1).gather(1, ids[0, 1:, None])[:, 0]
        logprobs = logprobs[len(sample.prompt.prompt_ids) - 1 :][None]
        mask = torch.ones_like(logprobs)
        loss, _ = compute_loss(
            new_logprobs=logprobs,
            old_logprobs=sample.old_logprobs[None],
            rollout_logprobs=torch.tensor([sample.rollout_logprobs]),
            ref_logprobs=sample.ref_logprobs[None],
            advantages=torch.tensor([sample.advantage]),
            response_mask=mask,
            weights=mask / num_tokens,
            clip_low=0.2,
            clip_high=0.2,
            kl_coef=0.1,
            kl_estimator="k3",
            tis_cap=2.0,
        )
        loss.backward()
        total += loss.item()
    return total, {name: p.grad for name, p in model.named_parameters()}


def test_equal_to_the_dense_reference(results):
    folder, found = results
    loss, grads = dense_reference(folder)
    for nproc in (1, 2):
        result = found[nproc, "plain"]
        assert result["sums"]["loss"] == pytest.approx(loss, abs=1e-5)
        assert set(result["grads"]) == set(grads)
        for name, grad in grads.items():
            torch.testing.assert_close(result["grads"][name], grad, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize(
    ("variant", "plain"),
    [
        ("one_sample", "plain"),
        ("two_samples", "plain"),
        ("delayed", "plain"),
        ("checkpointing", "plain"),
        ("small_chunks", "plain"),
        ("sequence_mean", "sequence_mean_plain"),
        ("constant", "constant_plain"),
    ],
)
def test_independent_of_micro_batches_chunks_and_ranks(results, variant, plain):
    _, found = results
    expected = found[1, plain]
    for nproc in (1, 2):
        result = found[nproc, variant]
        for name, value in expected["sums"].items():
            assert result["sums"][name] == pytest.approx(value, rel=1e-5, abs=1e-5), name
        for name, grad in expected["grads"].items():
            torch.testing.assert_close(result["grads"][name], grad, atol=1e-5, rtol=1e-4, msg=name)


def test_the_variants_really_differ_in_their_micro_batches(results):
    _, found = results
    assert found[1, "plain"]["micro_batches"] == 1
    assert found[1, "one_sample"]["micro_batches"] > found[1, "two_samples"]["micro_batches"] > 1
    assert found[2, "two_samples"]["micro_batches"] >= 2  # of rank 0, which has 5 samples: rank 1 ran empty ones too
    assert found[1, "plain"]["sums"]["loss"] != found[1, "sequence_mean_plain"]["sums"]["loss"]
