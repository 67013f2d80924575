"""Distillation's gradient through two sharded models is that of a dense reference, however the batch is cut."""

import dataclasses
from pathlib import Path

import pytest
import torch
from conftest import TINY, run_forked, succeeded
from workers.distill import ARGS, VARIANTS, make_samples

from algos.distill import compute_divergence


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, dict]:
    out = tmp_path_factory.mktemp("distill")
    succeeded(run_forked("tests/workers/distill.py", TINY / "student", TINY / "teacher", out, nproc=2))
    return {name: torch.load(out / f"{name}.pt", weights_only=True) for name in VARIANTS}


def dense_reference(student: Path, teacher: Path, changes: dict) -> tuple[float, dict[str, torch.Tensor]]:
    """As transformers and autograd give it: one sample at a time, all logits at once, nothing sharded."""
    from transformers import AutoModelForCausalLM

    args = dataclasses.replace(ARGS, **changes)
    models = [AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32) for folder in (student, teacher)]
    samples = make_samples()
    num_tokens, total = sum(len(sample.response_ids) for sample in samples), 0.0
    for sample in samples:
        ids = torch.tensor([sample.prompt.prompt_ids + sample.response_ids])
        first = len(sample.prompt.prompt_ids) - 1
        log_q, log_p = ((model(ids).logits[0, first:-1] / args.temperature).log_softmax(dim=1) for model in models)
        targets = ids[0, first + 1 :, None]
        new, theirs = log_q.gather(1, targets)[:, 0], log_p.detach().gather(1, targets)[:, 0]
        if args.policy_gradient:
            importance = (new.detach() - torch.tensor(sample.rollout_logprobs)).exp().clamp(max=args.tis_cap)
            pull = importance * (theirs - new.detach()).clamp(-20, 20)  # random tokens are that improbable
            total -= pull.sum().item() / num_tokens
            loss = -(pull * new).sum() / num_tokens
        else:
            loss = compute_divergence(log_p.detach(), log_q, args).sum() / num_tokens
            total += loss.item()
        loss.backward()
    return total, {name: p.grad for name, p in models[0].named_parameters()}


@pytest.mark.parametrize("variant", sorted(VARIANTS))
def test_equal_to_the_dense_reference(results, variant):
    loss, gradients = dense_reference(TINY / "student", TINY / "teacher", VARIANTS[variant])
    assert results[variant]["loss"] == pytest.approx(loss, rel=1e-5)
    assert set(results[variant]["gradients"]) == set(gradients)
    for name, gradient in gradients.items():
        torch.testing.assert_close(results[variant]["gradients"][name], gradient, atol=2e-5, rtol=1e-3, msg=name)


def test_the_variants_differ(results):
    losses = [round(results[name]["loss"], 4) for name in ("reverse-kl", "jsd", "policy_gradient")]
    assert len(set(losses)) == 3
