"""The order of rows: each once an epoch, split over ranks without overlap, and exactly where it was after a resume."""

import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from common.data import BatchSampler
from common.launch import UserError


def global_batches(steps: int, world_size: int, **settings: int) -> list[list[int]]:
    """What all ranks draw, joined in rank order."""
    samplers = [BatchSampler(rank=rank, world_size=world_size, **settings) for rank in range(world_size)]
    return [[row for sampler in samplers for row in sampler.next_batch()] for _ in range(steps)]


def test_every_row_once_an_epoch_and_another_order_each_epoch() -> None:
    batches = global_batches(8, 1, num_rows=64, batch_size=16, seed=1)
    first, second = sum(batches[:4], []), sum(batches[4:], [])
    assert sorted(first) == sorted(second) == list(range(64))
    assert first != second
    assert first != sorted(first)


def test_an_incomplete_last_batch_is_filled_from_the_next_epoch() -> None:
    rows = sum(global_batches(5, 1, num_rows=10, batch_size=4, seed=1), [])
    assert sorted(rows[:10]) == sorted(rows[10:]) == list(range(10))


@settings(deadline=None)
@given(
    num_rows=st.integers(1, 40), share=st.integers(1, 7), world_size=st.sampled_from([2, 3, 4]), seed=st.integers(0, 99)
)
def test_the_global_order_does_not_depend_on_the_ranks(num_rows: int, share: int, world_size: int, seed: int) -> None:
    batch_size = share * world_size
    alone = global_batches(6, 1, num_rows=num_rows, batch_size=batch_size, seed=seed)
    assert global_batches(6, world_size, num_rows=num_rows, batch_size=batch_size, seed=seed) == alone
    rows = sum(alone, [])
    for start in range(0, len(rows) - num_rows + 1, num_rows):
        assert sorted(rows[start : start + num_rows]) == list(range(num_rows))


@settings(deadline=None)
@given(num_rows=st.integers(1, 40), batch_size=st.integers(1, 20), saved_at=st.integers(0, 12), seed=st.integers(0, 99))
def test_a_resumed_sampler_goes_on_where_it_stood(num_rows: int, batch_size: int, saved_at: int, seed: int) -> None:
    """At every step, the first and those at the end of an epoch included."""
    uninterrupted = BatchSampler(num_rows, batch_size, seed=seed)
    for _ in range(saved_at):
        uninterrupted.next_batch()
    resumed = BatchSampler(num_rows, batch_size, seed=seed)
    resumed.load_state_dict(uninterrupted.state_dict())
    assert (resumed.epoch, resumed.position) == (uninterrupted.epoch, uninterrupted.position)
    for _ in range(6):
        assert resumed.next_batch() == uninterrupted.next_batch()


def test_a_resume_at_the_end_of_an_epoch_trains_on() -> None:
    sampler = BatchSampler(64, 16, seed=3)
    for _ in range(4):
        sampler.next_batch()
    assert sampler.state_dict() == {"epoch": 1, "position": 0, "num_rows": 64, "seed": 3}
    resumed = BatchSampler(64, 16, seed=3)
    resumed.load_state_dict(sampler.state_dict())
    assert sorted(sum((resumed.next_batch() for _ in range(4)), [])) == list(range(64))


def test_a_resume_with_other_ranks_keeps_the_order() -> None:
    alone = global_batches(6, 1, num_rows=20, batch_size=8, seed=1)
    first = BatchSampler(20, 8, seed=1)
    for _ in range(3):
        first.next_batch()
    ranks = [BatchSampler(20, 8, seed=1, rank=rank, world_size=4) for rank in range(4)]
    for sampler in ranks:
        sampler.load_state_dict(first.state_dict())
    assert [sum((sampler.next_batch() for sampler in ranks), []) for _ in range(3)] == alone[3:]


def test_seeds_decide_and_nothing_else_does() -> None:
    draw = dict(num_rows=50, batch_size=10)
    assert global_batches(5, 1, seed=1, **draw) == global_batches(5, 1, seed=1, **draw)
    assert global_batches(5, 1, seed=1, **draw) != global_batches(5, 1, seed=2, **draw)
    torch.manual_seed(7)
    random.seed(7)
    before = torch.get_rng_state()
    assert global_batches(5, 1, seed=1, **draw) == global_batches(5, 1, seed=1, **draw)
    assert torch.equal(torch.get_rng_state(), before), "the global generator was used"


def test_the_order_of_a_seed_never_changes() -> None:
    """Runs of earlier versions must stay reproducible."""
    assert BatchSampler(10, 10, seed=1).next_batch() == [8, 1, 4, 2, 9, 7, 0, 6, 3, 5]


def test_without_shuffling_the_order_is_that_of_the_file() -> None:
    sampler = BatchSampler(5, 2, seed=1, shuffle=False)
    assert [sampler.next_batch() for _ in range(5)] == [[0, 1], [2, 3], [4, 0], [1, 2], [3, 4]]


def test_a_batch_larger_than_the_data() -> None:
    assert sorted(BatchSampler(3, 6, seed=1).next_batch()) == [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(("num_rows", "batch_size", "world_size"), [(0, 4, 1), (8, 0, 1), (8, 3, 2)])
def test_impossible_sizes(num_rows: int, batch_size: int, world_size: int) -> None:
    with pytest.raises(UserError):
        BatchSampler(num_rows, batch_size, seed=1, world_size=world_size)


def test_a_resume_on_other_data_or_another_seed_is_refused() -> None:
    state = BatchSampler(10, 2, seed=1).state_dict()
    with pytest.raises(UserError, match="num_rows=10, this one has 11"):
        BatchSampler(11, 2, seed=1).load_state_dict(state)
    with pytest.raises(UserError, match="seed=1, this one has 2"):
        BatchSampler(10, 2, seed=2).load_state_dict(state)
