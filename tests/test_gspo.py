"""The loss of GSPO, against hand-worked numbers and the sequence form of the paper in float64."""

import math

import pytest
import torch

from algos import grpo
from algos.gspo import Args, compute_loss, token_weights


def loss_of(new: torch.Tensor, old: torch.Tensor, mask: torch.Tensor, advantages: torch.Tensor, **changes):
    weights = token_weights(
        mask, "sequence-mean", num_tokens=float(mask.sum()), num_sequences=len(mask), max_length=mask.shape[1]
    )
    arguments = {"rollout_logprobs": old, "ref_logprobs": None, "weights": weights}
    arguments |= {"clip_low": 3e-4, "clip_high": 4e-4, "kl_coef": 0.0, "kl_estimator": "k3", "tis_cap": 0.0}
    return compute_loss(
        new_logprobs=new, old_logprobs=old, advantages=advantages, response_mask=mask, **(arguments | changes)
    )


def slow_loss(new, old, advantages, lengths, clip_low, clip_high):
    """Equation 5: one ratio for each response, clipped as a whole, no stop-gradient anywhere."""
    total = 0.0
    for i, length in enumerate(lengths):
        log_ratio = 0.0
        for t in range(length):
            log_ratio = log_ratio + (new[i, t] - old[i, t])
        ratio = torch.exp(log_ratio / length)
        clipped = ratio.clamp(1 - clip_low, 1 + clip_high)
        total = total - min(ratio * advantages[i], clipped * advantages[i])
    return total / len(lengths)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("scale", [1e-4, 1e-3, 0.3])
def test_loss_and_gradient_equal_the_sequence_form(seed, scale):
    """Ragged rows, one of them a single token; ratios inside the clip range, around it and far outside."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [5, 1, 3, 4]
    mask = torch.tensor([[1.0] * n + [0.0] * (5 - n) for n in lengths]).double()
    old = -torch.rand(4, 5, generator=generator).double()
    new = old + scale * torch.randn(4, 5, generator=generator).double()
    advantages = torch.tensor([1.0, -2.0, 0.5, -0.1]).double()
    fast, slow = new.clone().requires_grad_(), new.clone().requires_grad_()
    loss, metrics = loss_of(fast, old, mask, advantages)
    expected = slow_loss(slow, old, advantages, lengths, 3e-4, 4e-4)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected, atol=1e-9, rtol=1e-7)
    torch.testing.assert_close(fast.grad, slow.grad, atol=1e-9, rtol=1e-7)
    assert (fast.grad[mask == 0] == 0).all()
    clipped_tokens = int(((slow.grad == 0) & (mask > 0)).sum())
    assert metrics["clip_fraction"] == clipped_tokens


def test_ratio_by_hand():
    """Two tokens with log-ratios 0.2 and -0.1: s = exp(0.05) = 1.0513; each token has s A / 2 as its gradient."""
    old = torch.zeros(1, 2).double()
    new = torch.tensor([[0.2, -0.1]]).double().requires_grad_()
    loss, metrics = loss_of(new, old, torch.ones(1, 2).double(), torch.tensor([2.0]), clip_low=0.1, clip_high=0.1)
    loss.backward()
    assert loss.item() == pytest.approx(-2 * math.exp(0.05))
    torch.testing.assert_close(new.grad, torch.full((1, 2), -math.exp(0.05)).double())
    assert metrics["clip_fraction"] == 0


def test_a_response_is_clipped_as_a_whole():
    """The same ratio at the paper's range: 1.0513 > 1.0004, so the loss is -1.0004 A and no token moves.

    GRPO with a clip range of 0.15 would clip the first token (1.22) and leave the second (0.90).
    """
    new = torch.tensor([[0.2, -0.1]]).double().requires_grad_()
    loss, metrics = loss_of(new, torch.zeros(1, 2).double(), torch.ones(1, 2).double(), torch.tensor([1.0]))
    loss.backward()
    assert loss.item() == pytest.approx(-1.0004)
    assert (new.grad == 0).all()
    assert metrics["clip_fraction"] == 2  # counted in tokens


def test_a_negative_advantage_is_clipped_below_only():
    new = torch.tensor([[0.1, 0.1]]).double().requires_grad_()
    loss, metrics = loss_of(new, torch.zeros(1, 2).double(), torch.ones(1, 2).double(), torch.tensor([-1.0]))
    assert loss.item() == pytest.approx(math.exp(0.1))
    assert metrics["clip_fraction"] == 0
    loss, metrics = loss_of(-new, torch.zeros(1, 2).double(), torch.ones(1, 2).double(), torch.tensor([-1.0]))
    assert loss.item() == pytest.approx(1 - 3e-4)
    assert metrics["clip_fraction"] == 2


def test_the_ratio_does_not_grow_with_the_length():
    for length in (1, 10, 1000):
        new, mask = torch.full((1, length), 1e-4, dtype=torch.float64), torch.ones(1, length).double()
        loss, _ = loss_of(new, torch.zeros(1, length).double(), mask, torch.tensor([1.0]))
        assert loss.item() == pytest.approx(-math.exp(1e-4), abs=1e-12)


def test_with_one_update_it_is_grpo_with_sequence_means():
    """old = new: every ratio is 1, whatever the clip range, and the gradients are the same."""
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]]).double()
    logprobs = torch.tensor([[-1.0, -2.0, -0.5], [-0.3, 0.0, 0.0]]).double()
    gradients = []
    for function in (compute_loss, grpo.compute_loss):
        new = logprobs.clone().requires_grad_()
        weights = token_weights(mask, "sequence-mean", num_tokens=4, num_sequences=2, max_length=3)
        loss, metrics = function(
            new_logprobs=new, old_logprobs=logprobs, rollout_logprobs=logprobs, ref_logprobs=None,
            advantages=torch.tensor([1.0, -1.0]).double(), response_mask=mask, weights=weights,
            clip_low=3e-4, clip_high=4e-4, kl_coef=0.0, kl_estimator="k3", tis_cap=2.0,
        )  # fmt: skip
        loss.backward()
        gradients.append(new.grad)
        assert metrics["clip_fraction"] == 0
    torch.testing.assert_close(*gradients)


def test_the_sum_over_micro_batches_is_the_whole():
    generator = torch.Generator().manual_seed(3)
    mask = torch.tensor([[1.0] * n + [0.0] * (5 - n) for n in (5, 1, 3, 4)]).double()
    old = -torch.rand(4, 5, generator=generator).double()
    new, advantages = old + 1e-3 * torch.randn(4, 5, generator=generator), torch.arange(-1.0, 3)
    weights = token_weights(mask, "sequence-mean", num_tokens=13, num_sequences=4, max_length=5)
    whole, _ = loss_of(new, old, mask, advantages, weights=weights)
    parts = [loss_of(new[i], old[i], mask[i], advantages[i], weights=weights[i])[0] for i in ([0, 2], [1], [3])]
    torch.testing.assert_close(sum(parts), whole)


def test_padded_positions_do_not_matter_whatever_they_hold():
    mask = torch.tensor([[1.0, 0.0]])
    for junk in (0.0, -1e4, 1e4):
        new = torch.tensor([[-1.0, junk]], requires_grad=True)
        loss, metrics = loss_of(new, torch.tensor([[-1.5, 0.0]]), mask, torch.tensor([-1.0]))
        loss.backward()
        assert loss.item() == pytest.approx(math.exp(0.5))
        assert new.grad[0, 1] == 0
        assert all(value.isfinite() for value in metrics.values())


def test_all_masked_and_zero_advantage_batches_cost_nothing():
    for mask, advantages in ((torch.zeros(2, 3), torch.ones(2)), (torch.ones(2, 3), torch.zeros(2))):
        new = torch.full((2, 3), 0.1, requires_grad=True)
        loss, metrics = loss_of(new, torch.zeros(2, 3), mask, advantages)
        loss.backward()
        assert loss.item() == 0.0
        assert (new.grad == 0).all()
        assert metrics["clip_fraction"] == 0


def test_the_defaults_are_those_of_the_paper():
    args = Args()
    assert (args.clip_low, args.clip_high, args.num_minibatches, args.loss_denominator) == (
        3e-4,
        4e-4,
        4,
        "sequence-mean",
    )
