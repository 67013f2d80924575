"""The functions that hold SPIN, against hand-worked numbers and slow references in float64; its data; its pairs."""

import importlib
import math
import sys
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from conftest import ROOT, TINY, run_forked, succeeded

from algos import spin
from algos.spin import Args, Pair, Sample, best_and_worst, collate_pairs, compute_loss, make_pairs
from common import data
from common.device import get_device
from common.launch import UserError

DEVICE = get_device()
LN_2 = math.log(2.0)

# -- the loss ---------------------------------------------------------------------------------------------------------


def loss_of(new, ref, mask=None, *, beta=0.1, num_pairs=None):
    """(loss, metrics, gradient) of rows (2n, T): n chosen, then n rejected."""
    new = torch.as_tensor(new).double().detach().clone().requires_grad_()
    ref = torch.as_tensor(ref).double()
    mask = torch.ones_like(ref) if mask is None else torch.as_tensor(mask).double()
    loss, metrics = compute_loss(
        new_logprobs=new, ref_logprobs=ref, response_mask=mask, beta=beta, num_pairs=num_pairs or len(new) // 2
    )
    loss.backward()
    return loss.item(), metrics, new.grad


def slow_loss(new: torch.Tensor, ref: torch.Tensor, lengths: list[int], beta: float) -> torch.Tensor:
    """Equation 4.7, pair by pair and token by token, without any mask."""
    n, total = len(new) // 2, 0.0
    for i in range(n):
        rewards = []
        for row in (i, n + i):
            reward = 0.0
            for t in range(lengths[row]):
                reward = reward + beta * (new[row, t] - ref[row, t])
            rewards.append(reward)
        total = total + torch.log(1 + torch.exp(rewards[1] - rewards[0]))
    return total / n


def test_loss_by_hand():
    """beta 1/2; the chosen response has become 3 times as likely, the rejected one a third: margin ln 3."""
    new = [[-1.0, -2.0 + math.log(3.0)], [-1.5, -0.5 - math.log(3.0)]]
    loss, metrics, grad = loss_of(new, [[-1.0, -2.0], [-1.5, -0.5]], beta=0.5)
    assert loss == pytest.approx(math.log(4 / 3))
    assert grad.flatten().tolist() == pytest.approx([-0.125, -0.125, 0.125, 0.125])  # beta x sigmoid(-ln 3)
    assert metrics["margin"] == pytest.approx(math.log(3.0))
    assert metrics["reward_chosen"] == pytest.approx(0.5 * math.log(3.0))
    assert metrics["reward_rejected"] == pytest.approx(-0.5 * math.log(3.0))
    assert metrics["pair_accuracy"] == 1.0
    assert metrics["loss"] == pytest.approx(loss)


def test_at_the_start_of_an_iteration_the_loss_is_ln_2():
    """Policy and opponent are the same; the gradient is there all the same. In fp32, as in training."""
    new = -torch.rand(8, 5, generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(5) < torch.tensor([5, 1, 3, 4, 2, 5, 1, 3])[:, None]).float()
    leaf = new.clone().requires_grad_()
    loss, metrics = compute_loss(new_logprobs=leaf, ref_logprobs=new, response_mask=mask, beta=0.1, num_pairs=4)
    loss.backward()
    assert loss.item() == pytest.approx(LN_2, abs=1e-6)
    assert metrics["pair_accuracy"] == 2.0  # each a tie
    assert metrics["margin"] == 0
    sign = torch.tensor([-1.0] * 4 + [1.0] * 4)[:, None]
    torch.testing.assert_close(leaf.grad, sign * mask * 0.1 / 2 / 4)


@pytest.mark.parametrize("seed", range(6))
def test_loss_and_gradient_equal_the_slow_reference(seed):
    """Ragged pairs, one response a single token, whatever stands in padded positions."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [5, 1, 3, 2, 4, 5]
    mask = torch.tensor([[1.0] * n + [0.0] * (5 - n) for n in lengths]).double()
    new, ref = (-5 * torch.rand(6, 5, generator=generator, dtype=torch.float64) for _ in range(2))
    ref[mask == 0] = -torch.inf
    loss, metrics, grad = loss_of(new, ref, mask, beta=0.7)
    slow = new.clone().requires_grad_()
    expected = slow_loss(slow, ref, lengths, 0.7)
    expected.backward()
    assert loss == pytest.approx(expected.item(), abs=1e-12)
    torch.testing.assert_close(grad, slow.grad, atol=1e-12, rtol=1e-9)
    assert (grad[mask == 0] == 0).all()
    rewards = [0.7 * (new - ref)[row, : lengths[row]].sum().item() for row in range(6)]
    assert metrics["reward_chosen"] == pytest.approx(sum(rewards[:3]))
    assert metrics["reward_rejected"] == pytest.approx(sum(rewards[3:]))
    assert metrics["margin"] == pytest.approx(sum(rewards[:3]) - sum(rewards[3:]))
    assert metrics["pair_accuracy"] == sum(rewards[i] > rewards[3 + i] for i in range(3))


def test_pairs_of_single_tokens():
    loss, _, grad = loss_of([[-1.0], [-3.0]], [[-2.0], [-2.0]], beta=1.0)
    assert loss == pytest.approx(math.log1p(math.exp(-2.0)))
    assert grad.flatten().tolist() == pytest.approx([-1 / (1 + math.exp(2.0)), 1 / (1 + math.exp(2.0))])


def test_margins_far_apart_overflow_nowhere():
    loss, _, grad = loss_of([[0.0], [-1e4], [-1e4], [0.0]], [[-1e4], [0.0], [0.0], [-1e4]], beta=1.0)
    assert loss == pytest.approx(1e4)  # 0 and 2e4
    assert grad.flatten().tolist() == pytest.approx([0.0, -0.5, 0.0, 0.5])


def test_masked_pairs_and_no_pairs():
    pair = ([[-1.0, -2.0], [-1.5, -0.5]], [[-1.2, -2.3], [-1.0, -0.5]])
    alone, metrics_alone, grad_alone = loss_of(*pair)
    rows = ([pair[0][0], [-7.0, -9.0], pair[0][1], [-8.0, -1.0]], [pair[1][0], [0.0, 0.0], pair[1][1], [0.0, 0.0]])
    both, metrics, grad = loss_of(*rows, mask=[[1, 1], [0, 0], [1, 1], [0, 0]], num_pairs=1)
    assert both == pytest.approx(alone)
    torch.testing.assert_close(grad[[0, 2]], grad_alone)
    assert (grad[[1, 3]] == 0).all()
    assert metrics == {name: pytest.approx(value.item()) for name, value in metrics_alone.items()}
    nothing, metrics, grad = loss_of(*rows, mask=torch.zeros(4, 2))
    assert nothing == 0.0
    assert (grad == 0).all()
    assert all(value == 0 for value in metrics.values())


def test_the_sum_over_micro_batches_is_the_whole():
    generator = torch.Generator().manual_seed(3)
    new, ref = (-torch.rand(8, 5, generator=generator) for _ in range(2))
    whole, metrics, _ = loss_of(new, ref)
    parts = [loss_of(new[rows], ref[rows], num_pairs=4) for rows in ([0, 2, 4, 6], [1, 5], [3, 7])]
    assert sum(part[0] for part in parts) == pytest.approx(whole)
    for name in metrics:
        assert sum(part[1][name] for part in parts) == pytest.approx(metrics[name].item())


def test_the_same_response_twice_moves_nothing():
    """chosen == rejected: the log-probs are the same function of the weights, and the gradient is exactly 0."""
    weights = torch.randn(5, generator=torch.Generator().manual_seed(0), requires_grad=True)
    logprobs = weights.log_softmax(0)
    rows = torch.stack([logprobs, logprobs])
    loss, _ = compute_loss(
        new_logprobs=rows, ref_logprobs=torch.randn(1, 5).expand(2, 5), response_mask=torch.ones(2, 5), beta=0.5,
        num_pairs=1,
    )  # fmt: skip
    loss.backward()
    assert loss.item() == pytest.approx(LN_2)
    assert (weights.grad == 0).all()


def test_the_first_gradient_is_that_of_fine_tuning_in_expectation():
    """Two responses, data (.9, .1), opponent = policy (.5, .5): the rejected ones' part has mean 0, E[grad log pi] = 0.

    So the expected gradient is beta/2 that of the cross-entropy, and it is 0 when the policy is what the data are.
    """
    for policy, factor in (([0.5, 0.5], 1.0), ([0.9, 0.1], 0.0)):
        logits = torch.tensor(policy).double().log().requires_grad_()
        logprobs = logits.log_softmax(0)
        total = 0.0
        for y, p_data in enumerate((0.9, 0.1)):
            for other, p_opponent in enumerate(policy):
                rows = torch.stack([logprobs[y], logprobs[other]])[:, None]
                loss, _ = compute_loss(
                    new_logprobs=rows, ref_logprobs=rows.detach(), response_mask=torch.ones(2, 1), beta=0.2, num_pairs=1
                )
                total = total + p_data * p_opponent * loss
        (found,) = torch.autograd.grad(total, logits)
        expected = 0.1 * factor * torch.tensor([0.5 - 0.9, 0.5 - 0.1]).double()
        torch.testing.assert_close(found, expected, atol=1e-7, rtol=1e-5)


@pytest.mark.parametrize("beta", [0.5, 1.0, 2.0])
def test_the_best_policy_is_that_of_theorem_5_4(beta):
    """pi ~ pi_opponent (p_data / pi_opponent)^(1/beta): there the expected gradient is 0, and not at the opponent."""
    p_data, p_opponent = torch.tensor([0.6, 0.3, 0.1]).double(), torch.tensor([0.2, 0.3, 0.5]).double()
    best = p_opponent.log() + (p_data / p_opponent).log() / beta
    for start, is_best in ((best, True), (p_opponent.log(), False)):
        logits = start.clone().requires_grad_()
        logprobs, total = logits.log_softmax(0), 0.0
        for y in range(3):
            for other in range(3):
                new, ref = (values[[y, other]][:, None] for values in (logprobs, p_opponent.log()))
                loss, _ = compute_loss(
                    new_logprobs=new, ref_logprobs=ref, response_mask=torch.ones(2, 1), beta=beta, num_pairs=1
                )
                total = total + p_data[y] * p_opponent[other] * loss
        total.backward()
        assert (logits.grad.abs().max() < 1e-7) == is_best


# -- pairs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rewards", "expected"),
    [
        ([[0.0, 1.0], [1.0, 0.0]], [[1, 0], [2, 3]]),
        ([[0.5, 0.2, 0.9], [0.1, 0.1, 0.1], [1.0, -1.0, 1.0]], [[2, 1], [6, 7]]),
        ([[0.0, 1.0, 1.0, 0.0]], [[1, 0]]),  # of equally good ones the first
        ([[1.0, 1.0], [0.0, 0.0]], []),
        ([[0.35] * 7], []),
        ([[1.0], [0.0]], []),
    ],
)
def test_best_and_worst_by_hand(rewards, expected):
    assert best_and_worst(torch.tensor(rewards)) == expected


def test_a_reward_that_is_nan_is_no_tie():
    [[best, worst]] = best_and_worst(torch.tensor([[0.0, math.nan, 1.0]]))
    assert best == worst == 1
    samples = [sample(reward=reward) for reward in (0.0, math.nan, 1.0)]
    [pair] = make_pairs(samples, [], 3)
    assert math.isnan(pair.reward)  # which makes common/optim.py skip the update, tests/test_reliability.py


def sample(prompt: int = 0, ids: tuple[int, ...] = (7, 8), reward: float = 0.0) -> Sample:
    return Sample(data.Prompt(prompt, [1, 2, 3], "x", "", {}, "rule", []), list(ids), [-0.5] * len(ids), reward=reward)


def test_pairs_by_reward_skip_ties():
    samples = [sample(i // 2, (i,), reward) for i, reward in enumerate([0.0, 0.0, 0.25, 1.0, 1.0, 1.0, 1.0, 0.0])]
    pairs = make_pairs(samples, [], 2)
    assert [(pair.prompt.index, pair.reward) for pair in pairs] == [(1, 0.75), (3, 1.0)]
    assert [(pair.chosen.response_ids, pair.rejected.response_ids) for pair in pairs] == [([3], [2]), ([6], [7])]
    assert make_pairs(samples[:2] + samples[4:6], [], 2) == []


@pytest.mark.parametrize("group_size", [1, 3])
def test_pairs_with_the_data(group_size):
    samples = [sample(i // group_size, (i,)) for i in range(2 * group_size)]
    pairs = make_pairs(samples, [[10, 11, 12], [20]], group_size)
    assert [pair.rejected.response_ids for pair in pairs] == [[i] for i in range(2 * group_size)]
    assert [pair.chosen.response_ids for pair in pairs] == [[10, 11, 12]] * group_size + [[20]] * group_size
    assert [pair.prompt.index for pair in pairs] == [0] * group_size + [1] * group_size
    assert all(pair.chosen.prompt == pair.rejected.prompt and pair.reward == 0.0 for pair in pairs)
    # Each keeps log-probs of its own, computed beside its own rejected response.
    assert len({id(pair.chosen) for pair in pairs}) == len(pairs)


def test_rows_of_pairs():
    first = Pair(sample().prompt, sample(ids=(5,)), sample(ids=(6, 7, 0)))
    second = Pair(sample().prompt, sample(ids=(8, 9)), sample(ids=(4,)))
    batch = collate_pairs([first, second], DEVICE)
    assert batch.response_mask.tolist() == [[1, 0, 0], [1, 1, 0], [1, 1, 1], [1, 0, 0]]
    assert batch.input_ids.tolist() == [
        [1, 2, 3, ids, *rest] for ids, *rest in ([5, 0, 0], [8, 9, 0], [6, 7, 0], [4, 0, 0])
    ]
    assert first.num_tokens == 3 + 1 + 3  # the prompt goes through the model once
    nothing = collate_pairs([], DEVICE)
    assert nothing.response_mask.tolist() == [[0], [0]]
    assert nothing.ref_logprobs.shape == (2, 1)


# -- data -------------------------------------------------------------------------------------------------------------


def test_prompts_and_responses_of_the_embedded_rows(tokenizer):
    """The prompt is token for token what RL and evaluation make of it; the response ends its turn."""
    files = [str(TINY / "worked.parquet")]
    examples = data.load_sft(files, tokenizer=tokenizer, max_length=100)
    prompts, responses = data.read_rows(examples, [5, 17])
    others = data.load_prompts(files, tokenizer=tokenizer, max_prompt_length=100)
    for row, prompt, response in zip((5, 17), prompts, responses, strict=True):
        assert prompt.prompt_ids == others[row].prompt_ids
        assert prompt.index == row
        assert response[-1] == tokenizer.eos_token_id
        assert tokenizer.decode(response[:-1]).endswith(f"#### {others[row].ground_truth}")
    prompts, responses = data.read_rows(others, [5, 17])
    assert [prompt.ground_truth for prompt in prompts] == [others[row].ground_truth for row in (5, 17)]
    assert responses == []


def test_of_a_conversation_the_last_answer_is_the_response(tokenizer, tmp_path):
    import pyarrow as pa

    turns = [
        ("user", "1+1=?"),
        ("assistant", "#### 2"),
        ("user", "2+2=?"),
        ("assistant", "#### 4"),
        ("user", "Thanks."),
    ]
    messages = [{"role": role, "content": content} for role, content in turns]
    pq.write_table(pa.Table.from_pylist([{"messages": messages}]), tmp_path / "chat.parquet")
    examples = data.load_sft([str(tmp_path / "chat.parquet")], tokenizer=tokenizer, max_length=200)
    [prompt], [response] = data.read_rows(examples, [0])
    expected = data.encode_chat(tokenizer, messages[:3], add_generation_prompt=True)
    assert prompt.prompt_ids == expected
    assert tokenizer.decode(response) == "#### 4<|end|>"


def test_the_worked_rows_are_what_their_script_writes(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(ROOT / "data_prep")
    monkeypatch.setattr(sys, "argv", ["tiny_pairs.py", "--out", str(tmp_path)])
    importlib.import_module("tiny_pairs").main()
    assert pq.read_table(tmp_path / "worked.parquet").equals(pq.read_table(TINY / "worked.parquet"))


def test_the_worked_rows_are_right_and_not_those_of_the_test():
    from common.rewards import compute_score

    rows = pq.read_table(TINY / "worked.parquet").to_pylist()
    assert all(compute_score("tiny-arith", r["response"], r["reward_model"]["ground_truth"]) == 1.0 for r in rows)
    assert all(row["response"].count("=") == 3 for row in rows)
    questions = {row["prompt"][0]["content"] for row in rows}
    assert questions.isdisjoint(r["prompt"][0]["content"] for r in pq.read_table(TINY / "test.parquet").to_pylist())
    assert all(Path(name).is_file() for name in (*Args().train_files, *Args().test_files))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"beta": 0.0}, "--beta 0"),
        ({"pairing": "reward", "group_size": 1}, "--group-size 1: the best and the worst"),
        ({"micro_batch_tokens": 600}, "--micro-batch-tokens 600 is less than one longest pair"),
    ],
)
def test_what_cannot_work_is_refused_at_the_start(changes, message):
    with pytest.raises(UserError, match=message):
        spin.main(Args(**changes))


# -- micro-batches and ranks ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def results(tmp_path_factory, untied_model):
    """Every variant of tests/workers/spin.py on 1 and on 2 ranks."""
    found = {}
    for nproc in (1, 2):
        out = tmp_path_factory.mktemp(f"spin{nproc}") / "out.pt"
        succeeded(run_forked("tests/workers/spin.py", untied_model, out, nproc=nproc))
        found[nproc] = torch.load(out, weights_only=True)
    return found


def test_independent_of_micro_batches_and_ranks(results):
    expected = results[1]["plain"]
    assert expected["micro_batches"] == 1
    assert results[1]["one_pair"]["micro_batches"] == 7
    for nproc in (1, 2):
        for variant in ("plain", "one_pair", "two_pairs", "all_on_one_rank"):
            found = results[nproc][variant]
            assert found["sums"] == pytest.approx(expected["sums"], rel=1e-5, abs=1e-5), (nproc, variant)
            for name, grad in expected["grads"].items():
                torch.testing.assert_close(found["grads"][name], grad, atol=1e-6, rtol=1e-4, msg=name)


def test_equal_to_the_dense_reference(results, untied_model):
    """Loss and gradients as transformers and autograd give them: one response at a time, nothing sharded."""
    from transformers import AutoModelForCausalLM
    from workers.spin import BETA, TEMPERATURE, make_pairs_of_odd_lengths

    model = AutoModelForCausalLM.from_pretrained(untied_model, dtype=torch.float32)
    pairs, total = make_pairs_of_odd_lengths(), 0.0
    for pair in pairs:
        log_ratios = []
        for one in (pair.chosen, pair.rejected):
            ids = torch.tensor([one.prompt.prompt_ids + one.response_ids])
            logprobs = (model(ids).logits[0, :-1] / TEMPERATURE).log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
            log_ratios.append(logprobs[len(one.prompt.prompt_ids) - 1 :].sum() - one.ref_logprobs.sum())
        loss = torch.log1p(torch.exp(-BETA * (log_ratios[0] - log_ratios[1]))) / len(pairs)
        loss.backward()
        total += loss.item()
    found = results[2]["two_pairs"]
    assert found["sums"]["total"] == pytest.approx(total, abs=1e-5)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found["grads"][name], parameter.grad, atol=1e-6, rtol=1e-4, msg=name)


def test_an_update_without_any_pair_does_nothing(results):
    for nproc in (1, 2):
        assert results[nproc]["no_pairs"] == {"grad_norm": 0.0, "bad_updates": 0, "moved": False, "micro_batches": 0}


def test_the_opponent_gets_the_policys_weights_and_keeps_them(results):
    """After passes of both, in its own dtype; and what the policy learns later does not reach it."""
    for nproc in (1, 2):
        for dtype in ("fp32", "bf16"):
            assert results[nproc][f"copy {dtype}"] == {
                "different before": True,
                "equal after": True,
                "loss after": pytest.approx(LN_2, abs=1e-6),
                "kept": True,
            }
