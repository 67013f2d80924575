"""The functions that hold on-policy distillation, against hand-worked numbers and slow references in float64."""

import dataclasses
import json
import math
import shutil
from itertools import product
from pathlib import Path

import pytest
import torch
from conftest import TINY
from safetensors import safe_open

from algos.distill import Args, compare, compute_advantages, compute_divergence, compute_loss, keep_top
from common import memory, teachers
from common.launch import UserError
from common.logprobs import HeadLogprobs, compare_heads

DIVERGENCES = ("reverse-kl", "forward-kl", "jsd")


def args(divergence: str = "reverse-kl", **changes) -> Args:
    return Args(teacher="teacher", divergence=divergence, **changes)


def random_logprobs(rows: int, size: int, *, seed: int, scale: float = 2.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (scale * torch.randn(rows, size, generator=generator, dtype=torch.float64)).log_softmax(dim=1)


def slow_divergence(log_p: list[float], log_q: list[float], kind: str, beta: float, top_k: int) -> float:
    """One row, with probabilities instead of their logs, one token at a time."""
    p, q = [math.exp(x) for x in log_p], [math.exp(x) for x in log_q]
    if top_k:
        best = sorted(range(len(p)), key=lambda i: -p[i])[:top_k]
        others = [i for i in range(len(p)) if i not in best]
        p, q = ([x[i] for i in best] + [sum(x[i] for i in others)] for x in (p, q))

    def kl(a: list[float], b: list[float]) -> float:
        return sum(x * math.log(x / y) for x, y in zip(a, b, strict=True))

    if kind == "jsd":
        mixture = [beta * x + (1 - beta) * y for x, y in zip(p, q, strict=True)]
        return beta * kl(p, mixture) + (1 - beta) * kl(q, mixture)
    return kl(p, q) if kind == "forward-kl" else kl(q, p)


def slow_gradient(log_p: torch.Tensor, logits: torch.Tensor, kind: str, beta: float, top_k: int) -> torch.Tensor:
    """Central differences of the slow divergence with respect to the student's logits, one row."""
    gradient, step = torch.zeros_like(logits), 1e-6
    for i in range(len(logits)):
        values = []
        for sign in (1, -1):
            moved = logits.clone()
            moved[i] += sign * step
            values.append(slow_divergence(log_p.tolist(), moved.log_softmax(0).tolist(), kind, beta, top_k))
        gradient[i] = (values[0] - values[1]) / (2 * step)
    return gradient


# -- divergences ------------------------------------------------------------------------------------------------------


def test_divergences_by_hand():
    """p = (1/2, 1/2), q = (1/4, 3/4): KL(p || q) = ln 2/sqrt 3, KL(q || p) = ln 2 - H(q), mixture (3/8, 5/8)."""
    log_p, log_q = torch.tensor([[0.5, 0.5]]).double().log(), torch.tensor([[0.25, 0.75]]).double().log()
    forward = compute_divergence(log_p, log_q, args("forward-kl")).item()
    reverse = compute_divergence(log_p, log_q, args("reverse-kl")).item()
    jsd = compute_divergence(log_p, log_q, args("jsd")).item()
    assert forward == pytest.approx(math.log(2 / math.sqrt(3)), abs=1e-12)  # 0.143841
    assert reverse == pytest.approx(0.25 * math.log(0.5) + 0.75 * math.log(1.5), abs=1e-12)  # 0.130812
    expected = 0.25 * (math.log(4 / 3) + math.log(4 / 5)) + 0.5 * (0.25 * math.log(2 / 3) + 0.75 * math.log(6 / 5))
    assert jsd == pytest.approx(expected, abs=1e-12)  # 0.033821


@pytest.mark.parametrize("kind", DIVERGENCES)
@pytest.mark.parametrize(("beta", "top_k"), [(0.5, 0), (0.1, 0), (0.9, 0), (0.5, 1), (0.3, 3), (0.5, 6)])
def test_value_and_gradient_equal_the_slow_reference(kind, beta, top_k):
    log_p = random_logprobs(5, 7, seed=1)
    logits = random_logprobs(5, 7, seed=2).requires_grad_()
    found = compute_divergence(log_p, logits.log_softmax(dim=1), args(kind, jsd_beta=beta, divergence_top_k=top_k))
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    for row in range(5):
        expected = slow_divergence(log_p[row].tolist(), logits[row].tolist(), kind, beta, top_k)
        assert found[row].item() == pytest.approx(expected, abs=1e-12)
        slow = slow_gradient(log_p[row], logits[row].detach(), kind, beta, top_k)
        torch.testing.assert_close(gradient[row], slow, atol=1e-8, rtol=1e-6)


@pytest.mark.parametrize("kind", DIVERGENCES)
@pytest.mark.parametrize("top_k", [0, 2])
def test_equal_distributions_have_none_and_pull_nowhere(kind, top_k):
    logits = random_logprobs(3, 6, seed=3).requires_grad_()
    log_p = logits.detach().clone()
    found = compute_divergence(log_p, logits.log_softmax(dim=1), args(kind, divergence_top_k=top_k))
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    assert found.abs().max() < 1e-12
    assert gradient.abs().max() < 1e-12


def test_jsd_becomes_the_forward_and_the_reverse_kl_at_its_ends():
    """JSD / beta -> forward KL as beta -> 0, JSD / (1 - beta) -> reverse KL as beta -> 1; values and gradients."""
    log_p = random_logprobs(4, 6, seed=4, scale=1.0)
    logits = random_logprobs(4, 6, seed=5, scale=1.0).requires_grad_()
    log_q = logits.log_softmax(dim=1)
    for kind, beta, share in (("forward-kl", 1e-5, 1e-5), ("reverse-kl", 1 - 1e-5, 1e-5)):
        jsd = compute_divergence(log_p, log_q, args("jsd", jsd_beta=beta)) / share
        limit = compute_divergence(log_p, log_q, args(kind))
        torch.testing.assert_close(jsd, limit, rtol=1e-3, atol=1e-4)
        found, expected = (torch.autograd.grad(x.sum(), logits, retain_graph=True)[0] for x in (jsd, limit))
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)


def test_jsd_is_symmetric_at_one_half_and_bounded():
    log_p, log_q = random_logprobs(4, 6, seed=6), random_logprobs(4, 6, seed=7, scale=30.0)
    one, other = (compute_divergence(a, b, args("jsd")) for a, b in ((log_p, log_q), (log_q, log_p)))
    torch.testing.assert_close(one, other)
    assert (one < math.log(2)).all()


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_top_k_is_a_coarser_look(kind):
    """Never more than over all tokens, growing with k, and the same from k = V - 1 on: one other token is no group."""
    log_p, log_q = random_logprobs(20, 6, seed=8), random_logprobs(20, 6, seed=9)
    values = [compute_divergence(log_p, log_q, args(kind, divergence_top_k=k)) for k in (1, 2, 3, 4, 5, 6, 0)]
    for coarse, fine in zip(values, values[1:], strict=False):
        assert (coarse <= fine + 1e-12).all()
    torch.testing.assert_close(values[4], values[-1])
    assert values[5].equal(values[-1])
    for x in keep_top(log_p, log_q, 2):
        torch.testing.assert_close(x.exp().sum(dim=1), torch.ones(20).double())


def test_mass_outside_the_top_k_costs_something():
    """The student agrees on the kept token's share of what it keeps, but puts half of all its mass elsewhere."""
    log_p = torch.tensor([[0.98, 0.01, 0.01]]).double().log()
    log_q = torch.tensor([[0.5, 0.25, 0.25]]).double().log()
    for kind in DIVERGENCES:
        assert compute_divergence(log_p, log_q, args(kind, divergence_top_k=1)).item() > 0.1


@pytest.mark.parametrize("kind", DIVERGENCES)
@pytest.mark.parametrize("top_k", [0, 2])
def test_extreme_distributions_stay_finite(kind, top_k):
    """fp32, where probabilities underflow: logits 300 apart, in opposite orders."""
    logits = torch.tensor([[300.0, 0.0, -300.0, 5.0]], requires_grad=True)
    log_p = torch.tensor([[-300.0, 0.0, 300.0, 5.0]]).log_softmax(dim=1)
    found = compute_divergence(log_p, logits.log_softmax(dim=1), args(kind, divergence_top_k=top_k))
    (gradient,) = torch.autograd.grad(found.sum(), logits)
    assert found.isfinite().all()
    assert gradient.isfinite().all()


# -- the policy gradient ----------------------------------------------------------------------------------------------


def test_the_expected_policy_gradient_is_the_gradient_of_the_reverse_kl():
    """All 2-token responses over 3 tokens, weighted by their probability, against sum_t KL at their own prefixes."""
    first = random_logprobs(1, 3, seed=10)[0].clone().requires_grad_()
    second = random_logprobs(3, 3, seed=11).clone().requires_grad_()
    teacher = random_logprobs(4, 3, seed=12)

    total, exact = 0.0, 0.0
    for a, b in product(range(3), repeat=2):
        rows = torch.stack([first.log_softmax(0), second[a].log_softmax(0)])
        theirs = torch.stack([teacher[0], teacher[1 + a]])
        new = rows.gather(1, torch.tensor([[a], [b]])).T  # (1, 2)
        probability = new.detach().sum().exp()
        mask = torch.ones_like(new)
        loss, _ = compute_loss(
            new_logprobs=new, rollout_logprobs=new.detach(),
            teacher_logprobs=theirs.gather(1, torch.tensor([[a], [b]])).T,
            divergences=torch.zeros_like(new), response_mask=mask, weights=mask, policy_gradient=True, tis_cap=0.0,
        )  # fmt: skip
        total = total + probability * loss
        exact = exact + probability * compute_divergence(theirs, rows, args("reverse-kl")).sum()
    for parameter in (first, second):
        found, expected = (torch.autograd.grad(x, parameter, retain_graph=True)[0] for x in (total, exact))
        torch.testing.assert_close(found, expected, atol=1e-12, rtol=1e-9)
    assert total.item() == pytest.approx(exact.item(), abs=1e-12)  # the loss estimates the KL itself


def test_advantages_by_hand():
    teacher = torch.tensor([[-0.5, -3.0, -torch.inf, 0.0]])
    student = torch.tensor([[-1.0, -1.0, -2.0, -1.0]], requires_grad=True)
    found = compute_advantages(teacher_logprobs=teacher, old_logprobs=student)
    assert found.tolist() == [[0.5, -2.0, -20.0, 1.0]]  # what the teacher lacks is as bad as anything can be
    assert not found.requires_grad


# -- the loss ---------------------------------------------------------------------------------------------------------


def loss_inputs(seed: int, lengths: list[int]) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """(what compute_loss takes, the mask) for ragged rows; padding holds numbers that must not count."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths))
    mask = torch.tensor([[1.0] * n + [0.0] * (shape[1] - n) for n in lengths]).double()
    new, rollout, teacher = (-torch.rand(shape, generator=generator, dtype=torch.float64) for _ in range(3))
    divergences = torch.rand(shape, generator=generator, dtype=torch.float64)
    return {
        "new_logprobs": new.requires_grad_(), "rollout_logprobs": rollout, "teacher_logprobs": teacher,
        "divergences": divergences.requires_grad_(), "response_mask": mask,
    }, mask  # fmt: skip


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("policy_gradient", [False, True])
def test_loss_and_gradient_equal_the_slow_reference(seed, policy_gradient):
    """Ragged rows, one of them a single token, another one empty."""
    lengths = [5, 1, 3, 0]
    inputs, mask = loss_inputs(seed, lengths)
    settings = {"policy_gradient": policy_gradient, "tis_cap": 1.1}
    loss, metrics = compute_loss(**inputs, weights=mask / 9, **settings)
    names = ("new_logprobs", "divergences")
    gradients = dict(zip(names, torch.autograd.grad(loss, [inputs[n] for n in names], allow_unused=True), strict=True))

    expected, slopes, capped = 0.0, torch.zeros_like(mask), 0
    for i, length in enumerate(lengths):
        for t in range(length):
            new, engine = inputs["new_logprobs"][i, t].item(), inputs["rollout_logprobs"][i, t].item()
            advantage = inputs["teacher_logprobs"][i, t].item() - new
            weight = min(math.exp(new - engine), 1.1)
            capped += math.exp(new - engine) > 1.1
            slopes[i, t] = -weight * advantage / 9 if policy_gradient else 1 / 9
            expected += -weight * advantage / 9 if policy_gradient else inputs["divergences"][i, t].item() / 9
    assert loss.item() == pytest.approx(expected, abs=1e-12)
    used, unused = names if policy_gradient else names[::-1]
    torch.testing.assert_close(gradients[used], slopes, atol=1e-12, rtol=1e-9)
    assert gradients[unused] is None
    assert metrics["divergence"].item() == pytest.approx((inputs["divergences"] * mask).sum().item())
    if policy_gradient:
        assert metrics["tis_capped"].item() == capped


@pytest.mark.parametrize("policy_gradient", [False, True])
def test_the_sum_over_micro_batches_is_the_whole(policy_gradient):
    inputs, mask = loss_inputs(3, [5, 1, 3, 4])
    settings = {"policy_gradient": policy_gradient, "tis_cap": 2.0}
    whole, _ = compute_loss(**inputs, weights=mask / 13, **settings)
    parts = [
        compute_loss(**{name: x[rows] for name, x in inputs.items()}, weights=mask[rows] / 13, **settings)[0]
        for rows in ([0, 2], [1], [3])
    ]
    torch.testing.assert_close(sum(parts), whole)


@pytest.mark.parametrize("policy_gradient", [False, True])
def test_an_all_masked_batch_costs_nothing(policy_gradient):
    inputs, mask = loss_inputs(4, [2, 2])
    mask = torch.zeros_like(mask)
    inputs["response_mask"] = mask
    with torch.no_grad():
        inputs["divergences"][0, 0] = torch.nan  # an empty micro-batch's placeholder may hold anything
    loss, metrics = compute_loss(**inputs, weights=mask, policy_gradient=policy_gradient, tis_cap=2.0)
    loss.backward()
    used = inputs["new_logprobs" if policy_gradient else "divergences"]
    assert loss.item() == 0.0
    assert (used.grad == 0).all()
    assert all(value == 0 for name, value in metrics.items() if name != "divergence")


# -- heads and chunks -------------------------------------------------------------------------------------------------


def models(tokens: int, vocabularies: tuple[int, int], widths: tuple[int, int], seed: int = 0) -> dict:
    """Hidden states and heads of a student and a teacher, and sampled tokens."""
    generator = torch.Generator().manual_seed(seed)
    hidden = tuple(torch.randn(tokens, width, generator=generator, dtype=torch.float64) for width in widths)
    heads = tuple(
        torch.randn(size, width, generator=generator, dtype=torch.float64)
        for size, width in zip(vocabularies, widths, strict=True)
    )
    targets = torch.randint(vocabularies[0], (tokens,), generator=generator)
    return {"hidden": hidden, "heads": heads, "targets": targets}


@pytest.mark.parametrize("kind", DIVERGENCES)
@pytest.mark.parametrize("vocabularies", [(11, 11), (11, 14), (14, 11)])
def test_chunks_and_padded_heads_equal_a_dense_reference(kind, vocabularies):
    """Widths differ; of heads of different sizes the common tokens are compared, renormalised."""
    found, dense = (models(10, vocabularies, (4, 6)) for _ in range(2))
    for inputs in (found, dense):
        for x in (inputs["hidden"][0], inputs["heads"][0]):
            x.requires_grad_()
    settings = args(kind, temperature=0.7)
    values = compare_heads(
        lambda *x: compare(*(y.double() if y.is_floating_point() else y for y in x), args=settings),
        **found, temperature=0.7, chunk_rows=3,
    )  # fmt: skip

    logits, teacher_logits = (h @ head.T / 0.7 for h, head in zip(dense["hidden"], dense["heads"], strict=True))
    shared = min(vocabularies)
    log_q, log_p = logits[:, :shared].log_softmax(1), teacher_logits[:, :shared].log_softmax(1)
    expected = {
        "divergences": compute_divergence(log_p, log_q, args(kind)),
        "new_logprobs": logits.log_softmax(1)[torch.arange(10), dense["targets"]],
        "agreement": (log_p.argmax(1) == log_q.argmax(1)).double(),
        "entropy": -(log_q.exp() * log_q).sum(1),
    }
    for name, reference in expected.items():
        torch.testing.assert_close(values[name].double(), reference.double(), rtol=1e-5, atol=1e-6, msg=name)
    for i, target in enumerate(dense["targets"].tolist()):
        theirs = log_p[i, target].item() if target < shared else -math.inf
        assert values["teacher_logprobs"][i].item() == pytest.approx(theirs, abs=1e-5)
    for results in (values, expected):
        (results["divergences"].sum() + 0.3 * results["new_logprobs"].sum()).backward()
    torch.testing.assert_close(found["hidden"][0].grad, dense["hidden"][0].grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found["heads"][0].grad, dense["heads"][0].grad, rtol=1e-5, atol=1e-5)
    assert vocabularies[0] <= shared or (dense["targets"] >= shared).any()  # the case was there


def test_the_students_logprobs_are_those_of_every_other_script():
    inputs = models(9, (11, 14), (4, 6))
    hidden, heads = ([x.float() for x in inputs[name]] for name in ("hidden", "heads"))
    settings = args()
    values = compare_heads(
        lambda *x: compare(*x, args=settings), hidden=hidden, heads=heads, targets=inputs["targets"],
        temperature=0.7, chunk_rows=4,
    )  # fmt: skip
    logprobs, entropies = HeadLogprobs.apply(hidden[0], heads[0], inputs["targets"], 0.7, 4)
    torch.testing.assert_close(values["new_logprobs"], logprobs)
    torch.testing.assert_close(values["entropy"], entropies)


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_no_tensor_of_all_tokens_by_the_vocabulary_is_kept(kind):
    """What autograd saves between forward and backward: nothing as large as one chunk's logits, but the heads."""
    inputs = models(64, (50, 50), (4, 6))
    for x in (inputs["hidden"][0], inputs["heads"][0]):
        x.requires_grad_()
    saved: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x.numel()) or x, lambda x: x):
        values = compare_heads(
            lambda *x: compare(*x, args=args(kind)), **inputs, temperature=1.0, chunk_rows=8,
        )  # fmt: skip
    assert max(saved, default=0) < 8 * 50
    values["divergences"].sum().backward()
    assert inputs["heads"][0].grad.abs().sum() > 0


# -- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"teacher": None}, "--teacher is missing"),
        ({"divergence": "jsd", "jsd_beta": 0.0}, "--jsd-beta 0.0"),
        ({"divergence": "jsd", "jsd_beta": 1.0}, "--jsd-beta 1.0"),
        ({"divergence_top_k": -1}, "--divergence-top-k -1"),
        ({"policy_gradient": True, "divergence": "jsd"}, "--policy-gradient with --divergence jsd"),
        ({"policy_gradient": True, "divergence_top_k": 5}, "--divergence-top-k 5"),
    ],
)
def test_settings_that_mean_nothing_are_refused(changes, message):
    with pytest.raises(UserError, match=message) as error:
        teachers.check_arguments(dataclasses.replace(args(), **changes))
    assert "\n" not in str(error.value)


@pytest.fixture
def teacher_folder(tmp_path) -> Path:
    """A copy of the embedded model's folder, to be spoilt."""
    shutil.copytree(TINY / "model", tmp_path / "teacher")
    return tmp_path / "teacher"


def check(folder: Path, tokenizer) -> Path:
    return teachers.check_teacher(Args(teacher=str(folder)), TINY / "model", tokenizer)


def edit_json(path: Path, edit) -> None:
    content = json.loads(path.read_text())
    edit(content)
    path.write_text(json.dumps(content))


def test_a_teacher_with_the_same_tokenizer_is_accepted_whatever_its_padding(teacher_folder, tokenizer):
    assert check(teacher_folder, tokenizer) == teacher_folder
    edit_json(teacher_folder / "config.json", lambda config: config.update(vocab_size=192))
    assert check(teacher_folder, tokenizer) == teacher_folder


def test_other_tokens_are_refused(teacher_folder, tokenizer):
    def swap(content: dict) -> None:
        vocabulary = content["model"]["vocab"]
        vocabulary["7"], vocabulary["8"] = vocabulary["8"], vocabulary["7"]

    edit_json(teacher_folder / "tokenizer.json", swap)
    with pytest.raises(UserError, match="another vocabulary.*the id of '7'") as error:
        check(teacher_folder, tokenizer)
    assert "\n" not in str(error.value)


def test_another_end_of_sequence_is_refused(teacher_folder, tokenizer):
    edit_json(teacher_folder / "tokenizer_config.json", lambda config: config.update(eos_token="<|user|>"))
    with pytest.raises(UserError, match="its eos_token is '<|user|>'"):
        check(teacher_folder, tokenizer)


def test_too_few_embeddings_are_refused(teacher_folder, tokenizer):
    edit_json(teacher_folder / "config.json", lambda config: config.update(vocab_size=100))
    with pytest.raises(UserError, match="100 embeddings for a tokenizer with ids up to 127"):
        check(teacher_folder, tokenizer)


def test_a_folder_without_tokenizer_is_refused(teacher_folder, tokenizer):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (teacher_folder / name).unlink()
    with pytest.raises(UserError, match="--teacher"):
        check(teacher_folder, tokenizer)


def test_the_fingerprint_tells_teachers_apart(teacher_folder):
    mine = teachers.fingerprint(TINY / "model")
    assert teachers.fingerprint(teacher_folder) == mine  # a copy elsewhere is the same teacher
    weights = teacher_folder / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert teachers.fingerprint(teacher_folder) != mine
    with pytest.raises(UserError, match="is not the teacher that this run began with"):
        teachers.check_same(mine, teacher_folder)
    teachers.check_same(mine, TINY / "model")


# -- memory -----------------------------------------------------------------------------------------------------------


def test_the_dry_run_counts_the_teacher(monkeypatch):
    """The teacher by its own size, which is not the student's: 344,928 parameters in bf16 over 2 ranks."""
    counted = {}
    monkeypatch.setattr(memory, "table", lambda args, *, ranks, frozen_models, others: counted.update(others) or "")
    settings = Args(teacher=str(TINY / "teacher"), dtype="bf16", dry_run=2, max_response_length=48, steps=1)
    teachers.memory_table(settings)
    with safe_open(TINY / "teacher" / "model.safetensors", "pt") as file:
        parameters = sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())
    assert counted["teacher (sharded)"] == 2 * parameters / 2
    assert counted["teacher: embedding and head gathered"] == 2 * (128 * 96 + 96)  # tied, and the last norm
    assert counted["teacher: logits, and their comparison"] == 4 * 4 * 1024 * 128


def test_the_table_shows_what_is_there_beside_the_trained_model():
    settings = Args(teacher=str(TINY / "teacher"), dtype="bf16", dry_run=2, max_response_length=48, steps=1)
    plain = memory.table(settings, ranks=2, frozen_models=0)
    more = memory.table(settings, ranks=2, frozen_models=0, others={"teacher (sharded)": 2**30, "its layers": 2**30})

    def total(text: str, name: str) -> float:
        return next(float(line.removeprefix(f"  {name}").split()[0]) for line in text.splitlines() if name in line)

    for name, added in (("while sampling", 1.0), ("while training, the engine awake (CPU)", 2.0)):
        assert total(more, name) - total(plain, name) == pytest.approx(added, abs=2e-3)
