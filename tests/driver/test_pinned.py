"""Page-locked host memory, on a driver that keeps count."""

from __future__ import annotations

import ctypes
import gc
import os

import pytest
import torch

from hicache_sched.errors import HiCacheSchedError
from hicache_sched.pools.pinned import pinned_bytes
from tests.driver.stand_in import StandIn

MIB = 1 << 20


def test_each_piece_is_one_registration_and_zero_filled(driver: StandIn) -> None:
    pieces = pinned_bytes([100, 5 * MIB, 4096], driver)

    assert [len(piece) for piece in pieces] == [100, 5 * MIB, 4096]
    assert driver.num_registrations == 3
    assert not any(piece.any() for piece in pieces)
    for piece in pieces:
        assert driver.registration_borders(piece.data_ptr(), piece.data_ptr() + len(piece)) == []
        piece.fill_(7)


def test_a_registration_is_undone_when_the_last_view_of_its_memory_is_gone(driver: StandIn) -> None:
    view = pinned_bytes([MIB], driver)[0].view(torch.float16).view(2, -1)[1, 5:]
    gc.collect()
    assert driver.num_registrations == 1
    assert view.sum() == 0

    del view
    gc.collect()
    assert driver.num_registrations == 0


def test_memory_that_cannot_be_locked_is_an_error_with_size_and_limit_and_leaves_nothing_locked(
    driver: StandIn,
) -> None:
    driver.lib.stand_in_limit(ctypes.c_size_t(3 * MIB))

    with pytest.raises(HiCacheSchedError) as failed:
        pinned_bytes([2 * MIB, 2 * MIB], driver)

    words = str(failed.value)
    assert "cannot page-lock 0.00391 GiB of host memory" in words
    assert "cuMemHostRegister_v2 failed with CUDA_ERROR_OUT_OF_MEMORY at 0.00195 GiB, after 0.00195 GiB" in words
    assert "limit of locked memory (ulimit -l) is" in words
    assert "pin=False" in words
    assert driver.num_registrations == 0
    assert len(pinned_bytes([3 * MIB], driver)[0]) == 3 * MIB


def test_a_forked_child_leaves_its_parents_registration_alone(driver: StandIn) -> None:
    pieces = pinned_bytes([4096], driver)
    child = os.fork()
    if child == 0:
        pieces.clear()
        gc.collect()
        os._exit(driver.num_registrations)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    assert driver.num_registrations == 1
