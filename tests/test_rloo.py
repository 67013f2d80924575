"""The functions that hold RLOO, against hand-worked numbers and slow references in float64."""

import inspect
import math
import textwrap
from types import SimpleNamespace

import pytest
import torch

from algos import rloo
from algos.rloo import Args, compute_advantages, compute_loss, estimate_kl

# -- advantages -------------------------------------------------------------------------------------------------------


def slow_advantages(rewards: torch.Tensor) -> torch.Tensor:
    """Each reward minus the mean of the others, one at a time."""
    result = torch.zeros_like(rewards)
    for p, group in enumerate(rewards.tolist()):
        for i, reward in enumerate(group):
            others = group[:i] + group[i + 1 :]
            result[p, i] = reward - sum(others) / len(others)
    return result


def test_advantages_by_hand():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [3.0, 1.0, 1.0, 3.0]])
    # 1 - 0; 0 - 1/3. Then 3 - 5/3 and 1 - 7/3.
    expected = torch.tensor([[1.0, -1 / 3, -1 / 3, -1 / 3], [4 / 3, -4 / 3, -4 / 3, 4 / 3]])
    torch.testing.assert_close(compute_advantages(rewards), expected)


@pytest.mark.parametrize("size", [2, 3, 8])
def test_advantages_equal_the_slow_reference(size):
    rewards = torch.randn(5, size, generator=torch.Generator().manual_seed(size), dtype=torch.float64)
    torch.testing.assert_close(compute_advantages(rewards), slow_advantages(rewards))


def test_of_two_the_advantages_are_the_difference():
    assert compute_advantages(torch.tensor([[1.0, 0.25]])).tolist() == [[0.75, -0.75]]


@pytest.mark.parametrize("value", [0.0, 1.0, 0.95, 0.35, 1 / 3, -0.1, 1e6])
@pytest.mark.parametrize("size", [2, 3, 7, 64])
def test_equal_rewards_give_exactly_zero(value, size):
    assert (compute_advantages(torch.full((3, size), value)) == 0).all()


def test_advantages_are_linear_in_the_rewards():
    """What lets the KL's share be added once its log-probs are there: A(r - beta KL) = A(r) - beta A(KL)."""
    generator = torch.Generator().manual_seed(0)
    rewards, kl = (torch.randn(4, 8, generator=generator, dtype=torch.float64) for _ in range(2))
    together = compute_advantages(rewards - 0.05 * kl)
    torch.testing.assert_close(together, compute_advantages(rewards) - 0.05 * compute_advantages(kl))


def test_a_group_of_one_is_refused_at_the_start(monkeypatch):
    from algos.rloo import main
    from common.launch import UserError

    with pytest.raises(UserError, match="--group-size 1"):
        main(Args(group_size=1))


# -- the KL in the reward ---------------------------------------------------------------------------------------------


def test_kl_in_the_reward_has_the_gradient_of_the_kl():
    """Two actions, pi = (.7, .3), ref = (.5, .5), in expectation over pi: E[-k1 grad log pi] = -grad KL(pi || ref).

    The advantage subtracts beta k1, so the loss -A log pi gains beta k1 log pi, with k1 a number.
    """
    reference = torch.tensor([0.5, 0.5]).double().log()
    logits = torch.tensor([0.7, 0.3]).double().log().requires_grad_()
    logprobs = logits.log_softmax(0)
    k1 = estimate_kl(logprobs, reference, "k1").detach()
    (logprobs.exp().detach() * k1 * logprobs).sum().backward()
    assert logits.grad[0].item() == pytest.approx(0.1779, abs=1e-4)  # d KL / d z0, as in test_grpo.py


def test_main_subtracts_the_kl_of_each_response_from_its_reward():
    """The lines of main that do it, on 2 prompts x 3 responses of different lengths, against R = r - beta KL."""
    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand(2, 3, generator=generator, dtype=torch.float64)
    samples, penalised = [], rewards.clone()
    for i, advantage in enumerate(compute_advantages(rewards).flatten().tolist()):
        old, reference = (-torch.rand(1 + i, generator=generator, dtype=torch.float64) for _ in range(2))
        samples.append(SimpleNamespace(old_logprobs=old, ref_logprobs=reference, advantage=advantage))
        penalised[i // 3, i % 3] -= 0.05 * sum(a - b for a, b in zip(old.tolist(), reference.tolist()))
    source = inspect.getsource(rloo.main)
    lines = source[
        source.index("        if ref_model is not None:  # R = r") : source.index("        # ==== 5. Update")
    ]
    known = {"ref_model": object(), "samples": samples, "args": Args(kl_coef=0.05, group_size=3)}
    exec(textwrap.dedent(lines), vars(rloo) | known)
    found = torch.tensor([sample.advantage for sample in samples], dtype=torch.float64)
    torch.testing.assert_close(found.view(2, 3), slow_advantages(penalised))


def test_the_kl_is_a_metric_and_no_part_of_the_loss():
    new = torch.tensor([[-1.0, -2.0]]).double().requires_grad_()
    mask = torch.ones(1, 2).double()
    losses = []
    for reference in (None, torch.tensor([[-3.0, -1.0]]).double()):
        loss, metrics = loss_of(new, new.detach(), mask, torch.tensor([0.5]).double(), ref_logprobs=reference)
        losses.append((loss.item(), *torch.autograd.grad(loss, new)[0].flatten().tolist()))
    assert losses[0] == losses[1]
    assert metrics["kl_ref"].item() == pytest.approx(2.0 - 1.0)  # k1, summed


# -- the loss ---------------------------------------------------------------------------------------------------------


def loss_of(new: torch.Tensor, old: torch.Tensor, mask: torch.Tensor, advantages: torch.Tensor, **changes):
    arguments = {"rollout_logprobs": old, "ref_logprobs": None, "weights": mask / mask.sum().clamp(min=1)}
    arguments |= {"clip_low": 0.2, "clip_high": 0.2, "tis_cap": 0.0}
    return compute_loss(
        new_logprobs=new, old_logprobs=old, advantages=advantages, response_mask=mask, **(arguments | changes)
    )


def slow_loss(new, old, engine, advantages, lengths, clip_low, clip_high, tis_cap):
    """The docstring's objective, token by token."""
    total, count = 0.0, 0
    for i, length in enumerate(lengths):
        for t in range(length):
            ratio = torch.exp(new[i, t] - old[i, t])
            clipped = min(max(ratio, torch.tensor(1 - clip_low)), torch.tensor(1 + clip_high))
            objective = min(ratio * advantages[i], clipped * advantages[i])
            total = total - objective * min(math.exp(old[i, t] - engine[i, t]), tis_cap)
            count += 1
    return total / count


@pytest.mark.parametrize("seed", range(6))
def test_loss_and_gradient_equal_the_slow_reference(seed):
    """Ragged rows, one of them a single token."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [5, 1, 3]
    mask = torch.tensor([[1.0] * n + [0.0] * (5 - n) for n in lengths]).double()
    new, old, engine = (-torch.rand(3, 5, generator=generator, dtype=torch.float64) for _ in range(3))
    advantages = compute_advantages(torch.rand(1, 3, generator=generator, dtype=torch.float64))[0]
    fast, slow = new.clone().requires_grad_(), new.clone().requires_grad_()
    loss, _ = loss_of(fast, old, mask, advantages, rollout_logprobs=engine, clip_high=0.28, tis_cap=1.1)
    expected = slow_loss(slow, old, engine, advantages, lengths, 0.2, 0.28, 1.1)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected, atol=1e-9, rtol=1e-7)
    torch.testing.assert_close(fast.grad, slow.grad, atol=1e-9, rtol=1e-7)
    assert (fast.grad[mask == 0] == 0).all()


def test_the_first_update_is_reinforce():
    """With old = new the gradient is that of -mean_i A_i log pi(o_i), up to the responses' mean length."""
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0]]).double()
    new = torch.tensor([[-1.0, -2.0, -0.5], [-0.3, 0.0, 0.0]]).double().requires_grad_()
    advantages = compute_advantages(torch.tensor([[1.0, 0.0]]).double())[0]
    loss, metrics = loss_of(new, new.detach(), mask, advantages)
    (gradient,) = torch.autograd.grad(loss, new)
    reinforce = -(advantages * (new * mask).sum(dim=1)).mean()
    (expected,) = torch.autograd.grad(reinforce, new)
    torch.testing.assert_close(gradient * mask.sum() / len(mask), expected)
    assert metrics["clip_fraction"] == 0


def test_the_sum_over_micro_batches_is_the_whole():
    generator = torch.Generator().manual_seed(3)
    mask = torch.tensor([[1.0] * n + [0.0] * (5 - n) for n in (5, 1, 3, 4)]).double()
    old = -torch.rand(4, 5, generator=generator).double()
    new, advantages, weights = old + 0.3 * torch.randn(4, 5, generator=generator), torch.arange(-1.0, 3), mask / 13
    whole, _ = loss_of(new, old, mask, advantages, weights=weights)
    parts = [loss_of(new[i], old[i], mask[i], advantages[i], weights=weights[i])[0] for i in ([0, 2], [1], [3])]
    torch.testing.assert_close(sum(parts), whole)


def test_equal_rewards_move_nothing():
    new = torch.tensor([[-1.0, -2.0], [-0.5, -0.1]], requires_grad=True)
    advantages = compute_advantages(torch.full((1, 2), 0.35))[0]
    loss, _ = loss_of(new, new.detach(), torch.ones(2, 2), advantages)
    loss.backward()
    assert (new.grad == 0).all()


def test_an_all_masked_batch_costs_nothing():
    new = torch.zeros(2, 3, requires_grad=True)
    loss, metrics = loss_of(new, torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2))
    loss.backward()
    assert loss.item() == 0.0
    assert (new.grad == 0).all()
    assert all(value == 0 for value in metrics.values())
