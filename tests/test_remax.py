"""What ReMax changes: the baseline is the reward of the greedy response, and that response is never trained on."""

import inspect
from types import SimpleNamespace

import pytest
import torch

from algos import grpo, remax
from algos.remax import compute_advantages, compute_loss


def test_advantages_by_hand():
    rewards, greedy = torch.tensor([[1.0], [1.0], [0.0], [0.0]]), torch.tensor([1.0, 0.0, 1.0, 0.0])
    assert compute_advantages(rewards, greedy).tolist() == [[0.0], [1.0], [-1.0], [0.0]]


def test_a_group_shares_its_greedy_response():
    rewards = torch.tensor([[1.0, 0.5, 0.0], [2.0, 2.0, 2.0]])
    assert compute_advantages(rewards, torch.tensor([0.5, 1.5])).tolist() == [[0.5, 0.0, -0.5], [0.5, 0.5, 0.5]]


@pytest.mark.parametrize("value", [0.0, 1.0, 0.95, 0.35, 1 / 3, -0.1, 1e6])
def test_as_good_as_the_greedy_response_gives_exactly_zero(value):
    assert (compute_advantages(torch.full((3, 4), value), torch.full((3,), value)) == 0).all()


def test_advantages_equal_the_slow_reference():
    generator = torch.Generator().manual_seed(0)
    rewards, greedy = torch.randn(5, 3, generator=generator).double(), torch.randn(5, generator=generator).double()
    expected = [[reward - baseline for reward in group] for group, baseline in zip(rewards.tolist(), greedy.tolist())]
    torch.testing.assert_close(compute_advantages(rewards, greedy), torch.tensor(expected, dtype=torch.float64))


# -- the loss ---------------------------------------------------------------------------------------------------------


def loss_of(new: torch.Tensor, mask: torch.Tensor, advantages: torch.Tensor):
    return compute_loss(
        new_logprobs=new,
        old_logprobs=new.detach(),
        rollout_logprobs=new.detach(),
        ref_logprobs=None,
        advantages=advantages,
        response_mask=mask,
        weights=mask / mask.sum().clamp(min=1),
        clip_low=0.2,
        clip_high=0.2,
        kl_coef=0.0,
        kl_estimator="k3",
        tis_cap=2.0,
    )


def test_the_first_update_is_reinforce_with_the_greedy_baseline():
    """Algorithm 1: the gradient of -mean_i (r_i - r_greedy) log pi(o_i), up to the mean length; ragged rows."""
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 0.0, 0.0], [1.0, 1.0, 0.0]]).double()
    new = (-torch.rand(3, 3, generator=torch.Generator().manual_seed(1)).double() * mask).requires_grad_()
    advantages = compute_advantages(torch.tensor([[1.0], [0.0], [1.0]]), torch.tensor([0.0, 1.0, 1.0]))[:, 0].double()
    loss, _ = loss_of(new, mask, advantages)
    (gradient,) = torch.autograd.grad(loss, new)
    slow = 0.0
    for i, advantage in enumerate([1.0, -1.0, 0.0]):
        for t in range(int(mask[i].sum())):
            slow = slow - advantage * new[i, t] / 3
    (expected,) = torch.autograd.grad(slow, new)
    torch.testing.assert_close(gradient * mask.sum() / 3, expected)
    assert (gradient[2] == 0).all()  # as good as the greedy one: nothing to learn


def test_an_all_masked_batch_costs_nothing():
    new = torch.zeros(2, 3, requires_grad=True)
    loss, metrics = loss_of(new, torch.zeros(2, 3), torch.ones(2))
    loss.backward()
    assert loss.item() == 0.0
    assert (new.grad == 0).all()
    assert all(value == 0 for value in metrics.values())


def test_the_loss_itself_is_that_of_grpo():
    def body(function) -> str:
        source = inspect.getsource(function)
        return source[source.index('"""', source.index('"""') + 3) :]

    assert body(remax.compute_loss) == body(grpo.compute_loss)


# -- the greedy response ----------------------------------------------------------------------------------------------


class Engine:
    """Stands in for vLLM: the response is [seed or 0, temperature in percent], so requests can be told apart."""

    def __init__(self) -> None:
        self.params = []

    def generate(self, inputs, params, use_tqdm):
        self.params += params
        return [
            SimpleNamespace(
                outputs=[
                    SimpleNamespace(
                        token_ids=[7, int(100 * p.temperature)],
                        logprobs=SimpleNamespace(logprobs=[-1.0, -1.0]),
                        finish_reason="stop",
                    )
                ]
            )
            for p in params
        ]


def test_the_greedy_rollout_has_temperature_0_and_one_response_to_a_prompt(tokenizer):
    pytest.importorskip("vllm")
    from common.data import Prompt

    engine = Engine()
    prompts = [Prompt(i, [5, 6], "x", "", {}, "rule", []) for i in range(3)]
    sampling = {
        "llm": engine, "tokenizer": tokenizer, "tp_group": None, "seed": 1, "group_size": 2, "temperature": 1.0,
        "max_tokens": 4, "stop_token_ids": [2],
    }  # fmt: skip
    greedy = remax.rollout(prompts=prompts, step=1, **sampling | {"temperature": 0.0, "group_size": 1})
    assert [sample.prompt.index for sample in greedy] == [0, 1, 2]
    assert [p.temperature for p in engine.params] == [0.0, 0.0, 0.0]


def test_main_scores_the_greedy_responses_and_never_trains_on_them():
    """The list of greedy samples is read in the rollout, the scoring, the advantages and the logging alone."""
    source = inspect.getsource(remax.main)
    phases = source.split("# ==== ")
    used_in = [phase[0] for phase in phases if "greedy" in phase.replace("greedy response", "") and phase[0].isdigit()]
    assert used_in == ["1", "2", "3", "7"]
    rollout = next(phase for phase in phases if phase.startswith("1."))
    assert rollout.index("greedy = rollout") < rollout.index("llm.sleep")  # the same weights, while the engine is awake
