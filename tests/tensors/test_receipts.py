"""Receipts: a client deletes what a call has stored, or will store, without knowing the handles."""

import numpy as np
import pytest

from gradserve_server.errors import InvalidArgumentError
from gradserve_server.security.identity import Identity
from gradserve_server.tensors.held import MAX_RECEIPT_BYTES, REMEMBERED_RECEIPTS, Receipt, check_receipt
from tests.tensors.test_leases import World

ARRAYS = [np.zeros(2, np.float32), np.zeros(3, np.float32)]
ANN, BOB = Identity("ann"), Identity("bob")


async def stored(world: World, name: bytes, owner: Identity = ANN) -> list[str]:
    return await world.store.keep(ARRAYS, None, shared=False, owner=owner, receipt=name)


async def test_a_receipt_deletes_what_one_call_has_stored() -> None:
    world = World()
    await stored(world, b"lost")
    kept = await stored(world, b"arrived")
    assert world.store.receipts.redeem(Receipt("ann", b"lost")) == len(ARRAYS)
    assert [each.handle for each in world.store.page(0, 100)] == kept
    assert world.store.receipts.redeem(Receipt("ann", b"lost")) == 0


async def test_what_a_call_stores_after_that_is_deleted_at_once() -> None:
    world = World()
    world.store.receipts.redeem(Receipt("ann", b"lost"))
    await stored(world, b"lost")
    assert world.used == (0, 0)


async def test_a_receipt_is_of_use_to_its_owner_only() -> None:
    world = World()
    handles = await stored(world, b"name")
    assert world.store.receipts.redeem(Receipt("bob", b"name")) == 0
    await stored(world, b"name", BOB)
    assert [each.handle for each in world.store.page(0, 100)] == handles


async def test_receipts_take_no_memory_once_their_tensors_are_gone() -> None:
    world = World()
    world.store.delete(await stored(world, b"name"))
    assert len(world.store.receipts) == 0


def test_the_latest_receipts_are_remembered() -> None:
    receipts = World().store.receipts
    for number in range(REMEMBERED_RECEIPTS + 10):
        receipts.redeem(Receipt("", str(number).encode()))
    assert len(receipts._void) == REMEMBERED_RECEIPTS
    assert Receipt("", b"10") in receipts._void


def test_a_receipt_has_a_longest_length() -> None:
    assert check_receipt(bytes(MAX_RECEIPT_BYTES), "receipt") == bytes(MAX_RECEIPT_BYTES)
    with pytest.raises(InvalidArgumentError, match="at most 64 bytes, got 65"):
        check_receipt(bytes(MAX_RECEIPT_BYTES + 1), "receipt")
