"""The functions that hold GRPO, against hand-worked numbers and slow references in float64."""

import math

import pytest
import torch

from algos.grpo import compute_advantages, compute_loss, estimate_kl, token_weights
from common import logprobs as logprobs_module
from common.logprobs import HeadLogprobs
from common.optim import lr_factor

# -- advantages -------------------------------------------------------------------------------------------------------


def test_advantages_by_hand():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [3.0, 1.0, 1.0, 3.0]])
    # Group 1: mean 1/4, unbiased std 1/2. Group 2: mean 2, unbiased std sqrt(4/3).
    expected = torch.tensor([[1.5, -0.5, -0.5, -0.5], [0.866025, -0.866025, -0.866025, 0.866025]])
    torch.testing.assert_close(compute_advantages(rewards, scale_by_std=True), expected, atol=1e-5, rtol=0)


def test_advantages_without_std_are_centred_rewards():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0]])
    expected = torch.tensor([[0.75, -0.25, -0.25, -0.25]])
    torch.testing.assert_close(compute_advantages(rewards, scale_by_std=False), expected)


@pytest.mark.parametrize("value", [0.0, 1.0, 0.95, 0.35, 1 / 3, -0.1, 1e6])
@pytest.mark.parametrize("size", [2, 3, 7, 8, 64])
@pytest.mark.parametrize("scale_by_std", [True, False])
def test_equal_rewards_give_exactly_zero(value, size, scale_by_std):
    # In fp32 the mean of eight 0.95 is not 0.95: dividing the residue by a tiny std would give up to 0.8.
    advantages = compute_advantages(torch.full((3, size), value), scale_by_std=scale_by_std)
    assert (advantages == 0).all()


def test_one_different_reward_is_found():
    advantages = compute_advantages(torch.tensor([[0.35] * 7 + [1.0]]), scale_by_std=True)[0]
    assert advantages[7] == pytest.approx(7 / math.sqrt(8), abs=1e-4)
    assert advantages[0] == pytest.approx(-1 / math.sqrt(8), abs=1e-4)


def test_group_of_one_has_no_advantage():
    assert compute_advantages(torch.tensor([[1.0], [0.0]]), scale_by_std=True).tolist() == [[0.0], [0.0]]


def test_groups_are_rows_whatever_their_prompts():
    # Two rows with the same prompt text stay two groups: [1, 1] and [0, 0] teach nothing.
    assert (compute_advantages(torch.tensor([[1.0, 1.0], [0.0, 0.0]]), scale_by_std=True) == 0).all()


# -- KL estimators ----------------------------------------------------------------------------------------------------


def exact_kl(policy: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    return (policy * (policy / reference).log()).sum()


def test_kl_estimators_have_the_exact_mean_far_from_zero():
    policy, reference = torch.tensor([0.7, 0.2, 0.1]).double(), torch.tensor([0.1, 0.3, 0.6]).double()
    exact = exact_kl(policy, reference)
    assert exact > 1.0  # where estimators that swap the two distributions are far off
    for name in ("k1", "k3"):
        mean = (policy * estimate_kl(policy.log(), reference.log(), name)).sum()
        torch.testing.assert_close(mean, exact)
    squares = (policy * 0.5 * (policy / reference).log() ** 2).sum()
    torch.testing.assert_close((policy * estimate_kl(policy.log(), reference.log(), "k2")).sum(), squares)


@pytest.mark.parametrize(("estimator", "expected"), [("k1", 0.0), ("k2", 0.1779), ("k3", 0.2)])
def test_kl_gradients_as_documented(estimator, expected):
    """d/dz0 of the expected loss, samples held fixed: pi = (.7, .3), ref = (.5, .5); the true gradient is 0.1779."""
    logits = torch.tensor([0.7, 0.3]).double().log().requires_grad_()
    logprobs = logits.log_softmax(0)
    kl = estimate_kl(logprobs, torch.tensor([0.5, 0.5]).double().log(), estimator)
    (logprobs.exp().detach() * kl).sum().backward()
    assert logits.grad[0].item() == pytest.approx(expected, abs=1e-4)

    logits = torch.tensor([0.7, 0.3]).double().log().requires_grad_()
    exact_kl(logits.softmax(0), torch.tensor([0.5, 0.5]).double()).backward()
    assert logits.grad[0].item() == pytest.approx(0.1779, abs=1e-4)


def test_kl_of_equal_distributions_is_zero_and_of_far_ones_finite():
    logprobs = torch.tensor([-1.0, -50.0, 0.0])
    for name in ("k1", "k2", "k3"):
        assert (estimate_kl(logprobs, logprobs, name) == 0).all()
        assert estimate_kl(logprobs, torch.tensor([-900.0, 0.0, -900.0]), name).isfinite().all()


# -- denominators -----------------------------------------------------------------------------------------------------


def test_denominators_by_hand():
    mask = torch.tensor([[1.0, 0, 0], [1, 1, 1]])
    losses = torch.tensor([[1.0, 9, 9], [2, 2, 2]])

    def total(denominator: str) -> float:
        weights = token_weights(mask, denominator, num_tokens=4, num_sequences=2, max_length=10)
        return (losses * weights).sum().item()

    assert total("token-mean") == pytest.approx((1 + 2 + 2 + 2) / 4)  # 1.75, where a mean of row means is 1.5
    assert total("sequence-mean") == pytest.approx((1 / 1 + 6 / 3) / 2)
    assert total("constant") == pytest.approx(7 / 20)


def test_an_empty_row_has_no_weight():
    mask = torch.tensor([[0.0, 0.0], [1.0, 1.0]])
    for denominator in ("token-mean", "sequence-mean", "constant"):
        weights = token_weights(mask, denominator, num_tokens=2, num_sequences=1, max_length=2)
        assert weights.tolist() == [[0.0, 0.0], [0.5, 0.5]]


# -- the loss ---------------------------------------------------------------------------------------------------------


def slow_loss(new, old, engine, ref, advantages, lengths, clip_low, clip_high, kl_coef, tis_cap):
    """The docstring's objective token by token in float64, over all tokens."""
    total, count = 0.0, 0
    for i, length in enumerate(lengths):
        for t in range(length):
            ratio = torch.exp(new[i, t] - old[i, t])
            clipped = min(max(ratio, torch.tensor(1 - clip_low)), torch.tensor(1 + clip_high))
            objective = min(ratio * advantages[i], clipped * advantages[i])
            objective = objective * min(math.exp(old[i, t] - engine[i, t]), tis_cap)
            x = ref[i, t] - new[i, t]
            total = total - objective + kl_coef * (torch.exp(x) - x - 1)
            count += 1
    return total / count


def random_case(seed: int):
    generator = torch.Generator().manual_seed(seed)
    lengths = [5, 1, 3]
    mask = torch.tensor([[1.0] * n + [0.0] * (5 - n) for n in lengths])
    new, old, engine, ref = (
        -torch.rand(3, 5, generator=generator, dtype=torch.float64)
        - 0.5 * k * torch.rand(1, generator=generator).double()
        for k in range(4)
    )
    return lengths, mask.double(), new, old, engine, ref, torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)


@pytest.mark.parametrize("seed", range(8))
def test_loss_and_gradient_equal_the_slow_reference(seed):
    lengths, mask, new, old, engine, ref, advantages = random_case(seed)
    fast, slow = new.clone().requires_grad_(), new.clone().requires_grad_()
    loss, _ = compute_loss(
        new_logprobs=fast,
        old_logprobs=old,
        rollout_logprobs=engine,
        ref_logprobs=ref,
        advantages=advantages,
        response_mask=mask,
        weights=mask / mask.sum(),
        clip_low=0.2,
        clip_high=0.28,
        kl_coef=0.1,
        kl_estimator="k3",
        tis_cap=1.1,
    )
    expected = slow_loss(slow, old, engine, ref, advantages, lengths, 0.2, 0.28, 0.1, 1.1)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected, atol=1e-9, rtol=1e-7)
    torch.testing.assert_close(fast.grad, slow.grad, atol=1e-9, rtol=1e-7)
    assert (fast.grad[mask == 0] == 0).all()


def plain_loss(new: torch.Tensor, old: torch.Tensor, mask: torch.Tensor, advantages: torch.Tensor, **changes):
    arguments = {"rollout_logprobs": old, "ref_logprobs": None, "weights": mask / mask.sum().clamp(min=1)}
    arguments |= {"clip_low": 0.2, "clip_high": 0.2, "kl_coef": 0.0, "kl_estimator": "k3", "tis_cap": 0.0}
    return compute_loss(
        new_logprobs=new, old_logprobs=old, advantages=advantages, response_mask=mask, **(arguments | changes)
    )


def test_clip_cases_by_hand():
    """One token, |log ratio| = ln 2: clipped where the advantage asks for more of the same, else not."""
    cases = {(2.0, 1.0): -1.2, (0.5, -1.0): 0.8, (2.0, -1.0): 2.0, (0.5, 1.0): -0.5}
    for (ratio, advantage), expected in cases.items():
        new = torch.tensor([[math.log(ratio)]]).double().requires_grad_()
        loss, metrics = plain_loss(
            new, torch.zeros(1, 1).double(), torch.ones(1, 1).double(), torch.tensor([advantage])
        )
        loss.backward()
        assert loss.item() == pytest.approx(expected)
        is_clipped = expected in (-1.2, 0.8)
        assert metrics["clip_fraction"] == is_clipped
        assert (new.grad.item() == 0) == is_clipped


def test_first_update_has_ratio_one_and_the_policy_gradient():
    """Loss 0 and ratio 1 are no fault: the gradient is -A / N at each token."""
    logprobs = torch.tensor([[-1.0, -2.0], [-0.5, -0.1]], requires_grad=True)
    mask, advantages = torch.ones(2, 2), torch.tensor([1.0, -1.0])
    loss, metrics = plain_loss(logprobs, logprobs.detach(), mask, advantages)
    loss.backward()
    assert loss.item() == 0.0
    assert metrics["clip_fraction"] == 0
    torch.testing.assert_close(logprobs.grad, torch.tensor([[-0.25, -0.25], [0.25, 0.25]]))


def test_padded_positions_do_not_matter_whatever_they_hold():
    mask = torch.tensor([[1.0, 0.0]])
    for junk in (0.0, -1e4, 1e4):
        new = torch.tensor([[-1.0, junk]], requires_grad=True)
        loss, metrics = plain_loss(new, torch.tensor([[-1.5, 0.0]]), mask, torch.tensor([1.0]))
        loss.backward()
        assert loss.item() == pytest.approx(-1.2)
        assert new.grad[0, 1] == 0
        assert all(value.isfinite() for value in metrics.values())


def test_an_all_masked_batch_costs_nothing():
    new = torch.zeros(2, 3, requires_grad=True)
    loss, metrics = plain_loss(new, torch.zeros(2, 3), torch.zeros(2, 3), torch.ones(2))
    loss.backward()
    assert loss.item() == 0.0
    assert (new.grad == 0).all()
    assert all(value == 0 for value in metrics.values())


def test_importance_weights_are_truncated():
    """pi_old / pi_engine of e^1 and e^-1 with cap 2: weights 2 and 0.3679 scale the gradient."""
    new = torch.zeros(1, 2, requires_grad=True)
    engine = torch.tensor([[-1.0, 1.0]])
    loss, metrics = plain_loss(
        new, torch.zeros(1, 2), torch.ones(1, 2), torch.tensor([1.0]), rollout_logprobs=engine, tis_cap=2.0
    )
    loss.backward()
    torch.testing.assert_close(new.grad, torch.tensor([[-1.0, -math.exp(-1) / 2]]))
    assert metrics["tis_capped"] == 1
    assert metrics["mismatch_abs"] == pytest.approx(2.0)
    assert metrics["mismatch_kl"] == pytest.approx(0.0)


# -- log-probs --------------------------------------------------------------------------------------------------------


def test_temperature_divides_the_logits_once():
    hidden, head = torch.tensor([[1.0]]), torch.tensor([[2.0], [0.0]])  # logits [2, 0]
    logprobs, _ = HeadLogprobs.apply(hidden, head, torch.tensor([0]), 0.5, 8)
    assert logprobs.item() == pytest.approx(-0.01815, abs=1e-5)  # not -0.1269 (T = 1), not -0.2539 (log-probs / T)


@pytest.mark.parametrize("cached_logits", [1, 22, 1000])
@pytest.mark.parametrize("chunk_rows", [1, 3, 7, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_chunked_logprobs_equal_dense_ones(chunk_rows, temperature, cached_logits, monkeypatch):
    """A chunk's softmax of one row, two rows or all rows at a time."""
    monkeypatch.setattr(logprobs_module, "CACHED_LOGITS", cached_logits)
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(7, 5, generator=generator, requires_grad=True)
    head = torch.randn(11, 5, generator=generator, requires_grad=True)
    targets = torch.randint(11, (7,), generator=generator)
    upstream = torch.randn(7, generator=generator)

    logprobs, entropy = HeadLogprobs.apply(hidden, head, targets, temperature, chunk_rows)
    (logprobs * upstream).sum().backward()
    grads = hidden.grad.clone(), head.grad.clone()
    hidden.grad = head.grad = None

    dense = (hidden @ head.T / temperature).log_softmax(1)
    (dense[torch.arange(7), targets] * upstream).sum().backward()
    torch.testing.assert_close(logprobs, dense[torch.arange(7), targets], atol=1e-5, rtol=0)
    torch.testing.assert_close(entropy, -(dense.exp() * dense).sum(1), atol=1e-5, rtol=0)
    torch.testing.assert_close(grads, (hidden.grad, head.grad), atol=1e-5, rtol=1e-5)


def test_a_second_backward_gives_the_same_gradient():
    """The first one overwrites the logits that forward has kept."""
    hidden, head = torch.randn(5, 4, requires_grad=True), torch.randn(9, 4, requires_grad=True)
    logprobs, _ = HeadLogprobs.apply(hidden, head, torch.tensor([0, 3, 8, 2, 2]), 0.7, 2)
    first = torch.autograd.grad(logprobs.sum(), (hidden, head), retain_graph=True)
    torch.testing.assert_close(torch.autograd.grad(logprobs.sum(), (hidden, head)), first)


# -- learning rate ----------------------------------------------------------------------------------------------------


def test_learning_rate_by_hand():
    def rates(**k):
        return [round(lr_factor(update, **k), 4) for update in range(6)]

    assert rates(warmup=2, total=6, decay="constant") == [0.5, 1, 1, 1, 1, 1]
    assert rates(warmup=2, total=6, decay="linear") == [0.5, 1, 1, 0.75, 0.5, 0.25]
    assert rates(warmup=0, total=4, decay="cosine") == [1, 0.8536, 0.5, 0.1464, 0, 0]
    assert rates(warmup=6, total=6, decay="linear")[-1] == 1.0  # warm-up to the very end
    # 5 steps of 4 updates: 0 is reached at update 20, not at 5.
    assert lr_factor(20, warmup=0, total=20, decay="linear") == 0.0
    assert lr_factor(5, warmup=0, total=20, decay="linear") == 0.75
