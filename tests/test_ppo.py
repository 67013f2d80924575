"""PPO's functions against numbers worked out by hand and against slow loops in float64; ranks and micro-batches."""

import math

import pytest
import torch
from conftest import TINY, run_forked, succeeded
from workers.ppo import VARIANTS, make_samples

from algos import ppo
from algos.ppo import adapt_kl_coef, compute_advantages, compute_loss, compute_rewards, compute_value_loss, whiten
from common.critics import check_arguments
from common.device import get_device
from common.launch import UserError

DEVICE = get_device()


@pytest.fixture(scope="module", autouse=True)
def one_process_group():
    """A process group of this process alone: whitening is a collective."""
    import torch.distributed as dist

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def double(rows) -> torch.Tensor:
    return torch.as_tensor(rows, dtype=torch.float64)


def gae(rewards, values, mask, gamma=1.0, gae_lambda=1.0):
    return compute_advantages(
        rewards=double(rewards),
        values=double(values),
        response_mask=double(mask),
        gamma=gamma,
        gae_lambda=gae_lambda,
    )


# -- rewards and advantages -------------------------------------------------------------------------------------------


def rewards_of(scores, mask, *, old=None, ref=None, kl_coef=0.0):
    mask = double(mask)
    return compute_rewards(
        scores=double(scores), old_logprobs=old, ref_logprobs=ref, response_mask=mask, kl_coef=kl_coef
    )


def test_the_score_stands_at_the_last_real_token():
    """[t0, t1, eos, pad]; a truncated response, a single token, no token at all, and a masked one in the middle."""
    mask = [[1, 1, 1, 0], [1, 1, 1, 1], [1, 0, 0, 0], [0, 0, 0, 0], [1, 0, 1, 0]]
    assert rewards_of([1, 2, 3, 4, 5], mask).tolist() == [
        [0, 0, 1, 0],
        [0, 0, 0, 2],
        [3, 0, 0, 0],
        [0, 0, 0, 0],
        [0, 0, 5, 0],
    ]


def test_the_kl_is_paid_at_every_token_and_has_no_gradient():
    old, ref = double([[-1.0, -2.0, 9.0]]), double([[-1.5, -1.0, 7.0]])
    rewards = rewards_of([1.0], [[1, 1, 0]], old=old, ref=ref, kl_coef=0.1)
    torch.testing.assert_close(rewards, double([[-0.05, 1.1, 0.0]]))


def test_advantages_of_a_reward_on_the_last_token():
    rewards, values, mask = [[0, 0, 1, 0]], [[0, 0, 0, 0]], [[1, 1, 1, 0]]
    assert gae(rewards, values, mask)[0].tolist() == [[1, 1, 1, 0]]
    assert gae(rewards, values, mask, gae_lambda=0.0)[0].tolist() == [[0, 0, 1, 0]]


def test_advantages_by_hand():
    """gamma 0.5, lambda 0.5, rewards 1, 0, 2 and values 0.5, 1, -1."""
    advantages, returns = gae([[1, 0, 2]], [[0.5, 1.0, -1.0]], [[1, 1, 1]], gamma=0.5, gae_lambda=0.5)
    # The deltas are 1 + 0.5 - 0.5, 0 - 0.5 - 1 and 2 + 0 + 1; each adds a quarter of the next one's advantage.
    assert advantages.tolist() == [[1 + 0.25 * -0.75, -1.5 + 0.75, 3.0]]
    assert returns.tolist() == [[advantages[0, 0] + 0.5, 0.25, 2.0]]


def test_with_gamma_and_lambda_1_every_return_is_what_came_in_the_end():
    values = torch.randn(3, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    mask = [[1, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 0, 0, 0, 0]]
    _, returns = gae(rewards_of([1.0, -2.0, 0.5], mask), values, mask)
    torch.testing.assert_close(returns, double([[1.0], [-2.0], [0.5]]) * double(mask))


def slow_gae(rewards, values, mask, gamma, gae_lambda):
    """Equation 16 as it stands: the sum over all later deltas, of the response tokens alone."""
    advantages, returns = torch.zeros_like(rewards), torch.zeros_like(rewards)
    for b in range(len(rewards)):
        places = [t for t in range(rewards.shape[1]) if mask[b, t]]
        for i, t in enumerate(places):
            total = 0.0
            for k, u in enumerate(places[i:]):
                following = values[b, places[i + k + 1]] if i + k + 1 < len(places) else 0.0
                total += (gamma * gae_lambda) ** k * (rewards[b, u] + gamma * following - values[b, u])
            advantages[b, t] = total
            returns[b, t] = total + values[b, t]
    return advantages, returns


@pytest.mark.parametrize("seed", range(6))
def test_advantages_equal_the_slow_reference(seed):
    """Ragged, single-token and all-masked rows, and holes in the middle; the masked places hold junk."""
    generator = torch.Generator().manual_seed(seed)
    rewards, values = (torch.randn(6, 9, dtype=torch.float64, generator=generator) for _ in range(2))
    mask = (torch.rand(6, 9, generator=generator) < 0.7).double()
    mask[0], mask[1], mask[2] = 1, 0, 0
    mask[2, 0] = 1
    values[mask == 0] = 1e9
    found = gae(rewards, values, mask, gamma=0.97, gae_lambda=0.9)
    expected = slow_gae(rewards, values, mask, 0.97, 0.9)
    torch.testing.assert_close(found, expected, atol=1e-9, rtol=1e-9)
    assert all((tensor[mask == 0] == 0).all() for tensor in found)


def test_whitening_is_over_the_response_tokens_and_leaves_the_padding():
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    advantages = torch.tensor([[1.0, 3.0, 99.0], [5.0, -99.0, 0.0]])
    white = whiten(advantages, mask, DEVICE)
    spread = math.sqrt(8 / 3)  # mean 3, squares 4, 0 and 4
    torch.testing.assert_close(white, torch.tensor([[-2 / spread, 0.0, 0.0], [2 / spread, 0.0, 0.0]]))


@pytest.mark.parametrize("value", [0.0, 0.1, 0.95, 1e4])
def test_whitening_advantages_that_are_all_the_same_gives_zeros(value):
    white = whiten(torch.full((8, 3), value), torch.ones(8, 3), DEVICE)
    assert white.abs().max() < 1e-3


def test_whitening_a_batch_without_tokens_or_with_one():
    assert whiten(torch.ones(2, 2), torch.zeros(2, 2), DEVICE).tolist() == [[0, 0], [0, 0]]
    assert whiten(torch.full((1, 1), 7.0), torch.ones(1, 1), DEVICE).tolist() == [[0]]


def test_adaptive_kl_by_hand():
    args = ppo.Args(kl_target=6.0, kl_horizon=1000.0, prompts_per_step=50, group_size=2)
    assert adapt_kl_coef(0.2, 6.0, args) == pytest.approx(0.2)
    assert adapt_kl_coef(0.2, 6.6, args) == pytest.approx(0.2 * (1 + 0.1 * 0.1))  # 10 % too much, 100 of 1000 responses
    assert adapt_kl_coef(0.2, 60.0, args) == pytest.approx(0.2 * 1.02)  # the error counts 0.2 at most
    assert adapt_kl_coef(0.2, 0.0, args) == pytest.approx(0.2 * 0.98)
    assert adapt_kl_coef(0.2, 60.0, ppo.Args(kl_target=None)) == 0.2


def test_adaptive_kl_reaches_its_target():
    """A policy whose KL is 1 / beta: the coefficient settles where that is the target."""
    args = ppo.Args(kl_target=4.0, kl_horizon=1000.0, prompts_per_step=256)
    kl_coef = 1.0
    for _ in range(500):
        kl_coef = adapt_kl_coef(kl_coef, 1.0 / kl_coef, args)
    assert 1.0 / kl_coef == pytest.approx(4.0, rel=1e-3)


# -- the policy's loss ------------------------------------------------------------------------------------------------


def policy_loss(new, old, advantages, mask, **changes):
    arguments = {"rollout_logprobs": old, "weights": mask / mask.sum().clamp(min=1)}
    arguments |= {"clip_low": 0.2, "clip_high": 0.2, "dual_clip": 0.0, "tis_cap": 0.0} | changes
    return compute_loss(new_logprobs=new, old_logprobs=old, advantages=advantages, response_mask=mask, **arguments)


@pytest.mark.parametrize(
    ("ratio", "advantage", "dual_clip", "expected", "clipped"),
    [
        (2.0, 1.0, 0.0, -1.2, "clip_fraction"),  # wants more of what it has more of already
        (0.5, -1.0, 0.0, 0.8, "clip_fraction"),
        (2.0, -1.0, 0.0, 2.0, None),  # has moved the wrong way: the gradient stays
        (0.5, 1.0, 0.0, -0.5, None),
        (5.0, -2.0, 3.0, 6.0, "dual_clip_fraction"),  # not 10
        (5.0, 2.0, 3.0, -2.4, "clip_fraction"),  # dual clip is for negative advantages
        (2.0, -1.0, 3.0, 2.0, None),
        (1.0, 0.0, 3.0, 0.0, None),
    ],
)
def test_clip_cases_by_hand(ratio, advantage, dual_clip, expected, clipped):
    new = double([[math.log(ratio)]]).requires_grad_()
    loss, metrics = policy_loss(new, double([[0.0]]), double([[advantage]]), double([[1.0]]), dual_clip=dual_clip)
    loss.backward()
    assert loss.item() == pytest.approx(expected)
    for name in ("clip_fraction", "dual_clip_fraction"):
        assert metrics[name] == (name == clipped)
    assert new.grad.item() == pytest.approx(0.0 if clipped else -ratio * advantage)


def slow_policy_loss(new, old, engine, advantages, mask, low, high, dual_clip, cap):
    total, count = 0.0, 0
    for b in range(len(new)):
        for t in range(new.shape[1]):
            if not mask[b, t]:
                continue
            ratio, advantage = torch.exp(new[b, t] - old[b, t]), advantages[b, t]
            clipped = min(max(ratio, torch.tensor(1 - low).double()), torch.tensor(1 + high).double())
            loss = max(-ratio * advantage, -clipped * advantage)
            if dual_clip and advantage < 0:
                loss = min(loss, -dual_clip * advantage)
            if cap:
                loss = loss * min(math.exp(old[b, t] - engine[b, t]), cap)
            total, count = total + loss, count + 1
    return total / max(count, 1)


@pytest.mark.parametrize("dual_clip", [0.0, 1.5])
@pytest.mark.parametrize("seed", range(4))
def test_policy_loss_and_gradient_equal_the_slow_reference(seed, dual_clip):
    generator = torch.Generator().manual_seed(seed)
    new, old, engine = (-3 * torch.rand(4, 6, dtype=torch.float64, generator=generator) for _ in range(3))
    old = new + 0.8 * (old + 1.5) / 1.5  # ratios on both sides of the clip range
    advantages = torch.randn(4, 6, dtype=torch.float64, generator=generator)
    mask = (torch.arange(6) < torch.tensor([6, 3, 1, 0])[:, None]).double()
    fast, slow = new.clone().requires_grad_(), new.clone().requires_grad_()
    loss, metrics = policy_loss(
        fast, old, advantages, mask, rollout_logprobs=engine, clip_high=0.28, dual_clip=dual_clip, tis_cap=1.2
    )
    expected = slow_policy_loss(slow, old, engine, advantages, mask, 0.2, 0.28, dual_clip, 1.2)
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected, atol=1e-9, rtol=1e-7)
    torch.testing.assert_close(fast.grad, slow.grad, atol=1e-9, rtol=1e-7)
    assert metrics["loss"] / 10 == pytest.approx(expected.item())
    assert (fast.grad[mask == 0] == 0).all()


@pytest.mark.parametrize("junk", [0.0, -1e4, 1e4])
def test_padded_positions_do_not_matter_whatever_they_hold(junk):
    mask = torch.tensor([[1.0, 0.0]])
    new = torch.tensor([[-1.0, junk]], requires_grad=True)
    loss, metrics = policy_loss(new, torch.tensor([[-1.5, 0.0]]), torch.tensor([[1.0, 0.0]]), mask)
    loss.backward()
    assert loss.item() == pytest.approx(-1.2)
    assert new.grad[0, 1] == 0
    assert all(value.isfinite() for value in metrics.values())


def test_an_all_masked_batch_costs_nothing():
    new, values = torch.zeros(2, 3, requires_grad=True), torch.ones(2, 3, requires_grad=True)
    zeros = torch.zeros(2, 3)
    loss, metrics = policy_loss(new, zeros, zeros, zeros)
    value_loss, value_metrics = compute_value_loss(
        values=values, old_values=zeros, returns=zeros, response_mask=zeros, weights=zeros, value_clip=0.2
    )
    (loss + value_loss).backward()
    assert loss.item() == value_loss.item() == 0.0
    assert (new.grad == 0).all()
    assert (values.grad == 0).all()
    assert all(value == 0 for value in (metrics | value_metrics).values())


# -- the critic's loss ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "old", "target", "clip", "expected", "gradient", "clipped"),
    [
        (1.0, 1.0, 3.0, 0.2, 2.0, -2.0, False),  # not moved: half of 2 squared
        (2.0, 1.0, 3.0, 0.2, 0.5 * 1.8**2, 0.0, True),  # moved far towards the target: held at 1.2
        (0.0, 1.0, 3.0, 0.2, 4.5, -3.0, False),  # moved away from it: the gradient stays
        (2.0, 1.0, 3.0, 0.0, 0.5, -1.0, False),  # no limit
    ],
)
def test_value_loss_by_hand(value, old, target, clip, expected, gradient, clipped):
    value = double([[value]]).requires_grad_()
    ones = double([[1.0]])
    loss, metrics = compute_value_loss(
        values=value,
        old_values=old * ones,
        returns=target * ones,
        response_mask=ones,
        weights=ones,
        value_clip=clip,
    )
    loss.backward()
    assert loss.item() == pytest.approx(expected)
    assert metrics["value_loss"].item() == pytest.approx(expected)
    assert value.grad.item() == pytest.approx(gradient)
    assert metrics["value_clip_fraction"] == clipped


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_value_loss_and_gradient_equal_the_slow_reference(clip):
    generator = torch.Generator().manual_seed(3)
    values, old, returns = (torch.randn(4, 6, dtype=torch.float64, generator=generator) for _ in range(3))
    mask = (torch.arange(6) < torch.tensor([6, 3, 1, 0])[:, None]).double()
    fast, slow = values.clone().requires_grad_(), values.clone().requires_grad_()
    loss, _ = compute_value_loss(
        values=fast, old_values=old, returns=returns, response_mask=mask, weights=mask / mask.sum(), value_clip=clip
    )
    expected = 0.0
    for b in range(4):
        for t in range(6):
            if mask[b, t]:
                near = old[b, t] + torch.clamp(slow[b, t] - old[b, t], -clip, clip) if clip else slow[b, t]
                expected += 0.5 * max((slow[b, t] - returns[b, t]) ** 2, (near - returns[b, t]) ** 2) / 10
    loss.backward()
    expected.backward()
    torch.testing.assert_close(loss, expected, atol=1e-9, rtol=1e-7)
    torch.testing.assert_close(fast.grad, slow.grad, atol=1e-9, rtol=1e-7)


# -- whole batches: 1 and 2 ranks, few and many micro-batches ---------------------------------------------------------


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Every variant on 1 and on 2 ranks: advantages, losses and gradients."""
    found = {}
    for nproc in (1, 2):
        out = tmp_path_factory.mktemp(f"ppo{nproc}")
        succeeded(run_forked("tests/workers/ppo.py", TINY / "model", out, nproc=nproc))
        found |= {(nproc, name): torch.load(out / f"{name}.pt", weights_only=True) for name in VARIANTS}
    return found


@pytest.mark.parametrize("nproc", [1, 2])
@pytest.mark.parametrize("variant", VARIANTS)
def test_independent_of_micro_batches_and_ranks(results, variant, nproc):
    expected, result = results[1, "plain"], results[nproc, variant]
    for name in ("advantages", "returns", "values", "scores"):
        for row, other in zip(expected[name], result[name], strict=True):
            torch.testing.assert_close(row, other, atol=2e-5, rtol=1e-4)
    for name, value in expected["sums"].items():
        assert result["sums"][name] == pytest.approx(value, rel=1e-4, abs=2e-5), name
    for model in ("policy", "critic"):
        for name, grad in expected[model].items():
            torch.testing.assert_close(result[model][name], grad, atol=1e-5, rtol=1e-4, msg=f"{model} {name}")


def test_the_variants_really_differ_in_their_micro_batches(results):
    assert results[1, "plain"]["micro_batches"] == 1
    assert results[1, "one_sample"]["micro_batches"] == 8
    assert results[2, "one_sample"]["micro_batches"] == 5  # of rank 0; rank 1 has 3 samples and ran empty ones


def test_values_are_read_before_and_scores_at_the_last_token(results):
    """Against transformers on each sequence alone, with the head that the workers used."""
    from transformers import AutoModel

    model = AutoModel.from_pretrained(TINY / "model", dtype=torch.float32)
    head = torch.linspace(-1, 1, model.config.hidden_size)
    for sample, values, score in zip(
        make_samples(), results[1, "plain"]["values"], results[1, "plain"]["scores"], strict=True
    ):
        ids = torch.tensor([sample.prompt.prompt_ids + sample.response_ids])
        outputs = model(ids).last_hidden_state[0] @ head
        torch.testing.assert_close(values, outputs[len(sample.prompt.prompt_ids) - 1 : -1], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(score, outputs[-1], atol=1e-4, rtol=1e-4)


def test_the_whitened_advantages_of_all_ranks_have_mean_0_and_variance_1(results):
    for nproc in (1, 2):
        advantages = torch.cat(results[nproc, "plain"]["advantages"])
        assert advantages.mean().item() == pytest.approx(0.0, abs=1e-5)
        assert advantages.square().mean().item() == pytest.approx(1.0, abs=1e-4)


def test_blocks_of_ppo_and_reward_model_that_grpo_lacks_are_the_same():
    from shared_blocks import ALGOS, blocks

    ours, theirs = (blocks((ALGOS / name).read_text()) for name in ("ppo.py", "reward_model.py"))
    assert ours["token_scores"].text == theirs["token_scores"].text


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"gamma": 1.01}, "--gamma 1.01"),
        ({"gae_lambda": -0.1}, "--gae-lambda -0.1"),
        ({"value_clip": -1.0}, "--value-clip"),
        ({"dual_clip": 0.5}, "--dual-clip 0.5"),
        ({"kl_target": 6.0}, "--kl-coef 0.0"),
        ({"kl_target": 0.0, "kl_coef": 0.1}, "--kl-target 0.0"),
        ({"critic_warmup": 10}, "--critic-warmup 10 of --steps 10"),
    ],
)
def test_numbers_that_the_formulas_cannot_take_are_refused(changes, words):
    check_arguments(ppo.Args(steps=10, kl_target=6.0, kl_coef=0.1))
    with pytest.raises(UserError, match=words):
        check_arguments(ppo.Args(steps=10, **changes))


# -- what scores which rows -------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reward_folder(tmp_path_factory):
    """A reward model with the embedded tokenizer."""
    from transformers import AutoModelForSequenceClassification, AutoTokenizer

    folder = tmp_path_factory.mktemp("rm")
    AutoModelForSequenceClassification.from_pretrained(TINY / "model", num_labels=1).save_pretrained(folder)
    AutoTokenizer.from_pretrained(TINY / "model").save_pretrained(folder)
    return folder


def check(tokenizer, train: str, reward_model=None, test: str = "test"):
    from common.critics import check_rewards
    from common.data import load_prompts

    train_data, test_data = (
        load_prompts([str(TINY / f"{name}.parquet")], tokenizer=tokenizer, max_prompt_length=99)
        for name in (train, test)
    )
    args = ppo.Args(reward_model=None if reward_model is None else str(reward_model))
    return check_rewards(args, tokenizer, train_data, test_data)


def test_rows_are_scored_by_what_they_ask_for(tokenizer, reward_folder):
    assert check(tokenizer, "train") is None
    assert check(tokenizer, "prompts_model", reward_folder) == reward_folder
    with pytest.raises(UserError, match="solorl/tiny-arith.*--reward-model"):
        check(tokenizer, "prompts_model")
    with pytest.raises(UserError, match="--reward-model"):
        check(tokenizer, "train", test="prompts_model")
    with pytest.raises(UserError, match="would score nothing"):
        check(tokenizer, "train", reward_folder)


def test_a_folder_that_is_no_reward_model_of_this_policy_is_refused(tokenizer, reward_folder):
    from copy import deepcopy

    with pytest.raises(UserError, match="score.weight"):
        check(tokenizer, "prompts_model", TINY / "model")
    other = deepcopy(tokenizer)
    other.add_tokens(["<|more|>"])
    with pytest.raises(UserError, match="tokenizer"):
        check(other, "prompts_model", reward_folder)


def test_styles_are_found_however_the_rows_are_written(tokenizer, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    from common.critics import sources_by_style
    from common.data import load_prompts

    cells = {
        "struct": [{"style": "rule", "ground_truth": "1"}, {"style": "model", "ground_truth": "1"}, {"style": None}],
        "json": ['{"style": "rule"}', '{"style": "model"}', '{"ground_truth": "1"}'],
        "bare": [{"ground_truth": "1"}] * 3,
    }
    for name, column in cells.items():
        rows = {"data_source": ["a", "b", "c"], "prompt": ["1+1=?"] * 3, "reward_model": column}
        pq.write_table(pa.Table.from_pydict(rows), tmp_path / f"{name}.parquet")
        dataset = load_prompts([str(tmp_path / f"{name}.parquet")], tokenizer=tokenizer, max_prompt_length=99)
        expected = {"rule": {"a", "b", "c"}, "model": set()} if name == "bare" else {"rule": {"a", "c"}, "model": {"b"}}
        assert sources_by_style(dataset) == expected, name


def test_the_dry_run_counts_critic_and_reward_model(reward_folder):
    from transformers import AutoModelForCausalLM

    from common.critics import memory_table

    args = ppo.Args(dry_run=1, dtype="fp32", max_response_length=48, reward_model=str(reward_folder))
    *_, critic, judge = memory_table(args).splitlines()
    parameters = sum(p.numel() for p in AutoModelForCausalLM.from_pretrained(TINY / "model").parameters())
    assert float(critic.split()[-1]) == pytest.approx(16 * parameters / 2**30, abs=5.1e-4)
    assert float(judge.split()[-1]) == pytest.approx(4 * parameters / 2**30, abs=5.1e-4)
    assert "critic" in critic
    assert "reward model" in judge
