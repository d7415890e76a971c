"""Work that ends before it is done, wherever its parts are."""

import threading
from collections.abc import Callable

import numpy as np
import pytest

from gradserve_server.devices.compute import Cancellation, checkpoint, current
from gradserve_server.devices.host import products
from gradserve_server.devices.host.kernels import ForkJoin
from gradserve_server.devices.host.products import Summation, multiply
from gradserve_server.errors import UnavailableError
from tests.servers.polling import PATIENCE_SECONDS

REASON = UnavailableError("nobody wants it any more")


def test_a_checkpoint_ends_the_work_that_was_cancelled() -> None:
    cancellation, passed = Cancellation(), 0

    def work() -> None:
        nonlocal passed
        while True:
            checkpoint()
            passed += 1
            if passed == 3:
                cancellation.cancel(REASON)

    with pytest.raises(UnavailableError, match=REASON.message):
        cancellation.run(work)
    assert passed == 3
    with pytest.raises(UnavailableError):
        cancellation.run(work)
    assert passed == 3
    checkpoint()  # no work any more


def test_work_that_nobody_can_cancel_goes_on() -> None:
    current().cancel(REASON)
    checkpoint()
    assert Cancellation().run(lambda: 7) == 7


def test_parts_in_other_threads_end_as_well() -> None:
    parallel, cancellation, together = ForkJoin(2), Cancellation(), threading.Barrier(2, timeout=PATIENCE_SECONDS)
    ended, begun = [], []

    def part() -> None:
        together.wait()
        cancellation.cancel(REASON)
        try:
            while True:
                checkpoint()
        finally:
            ended.append(threading.get_ident())

    parts: list[Callable[[], object]] = [part, part, lambda: begun.append(1)]
    with pytest.raises(UnavailableError):
        cancellation.run(parallel.run_all, parts)
    parallel.close()
    assert len(set(ended)) == 2
    assert not begun


def test_no_kernel_of_cancelled_work_begins() -> None:
    parallel, cancellation = ForkJoin(1), Cancellation()
    kernels: list[int] = []

    def work() -> None:
        parallel.run_shared(lambda: None, lambda *_: kernels.append(1), (), 1)
        cancellation.cancel(REASON)
        parallel.run_shared(lambda: None, lambda *_: kernels.append(2), (), 1)

    with pytest.raises(UnavailableError):
        cancellation.run(work)
    assert kernels == [1]


@pytest.mark.parametrize("method", [Summation.CHAIN, Summation.BLOCKS])
@pytest.mark.parametrize("shape", [(3000, 200, 40), (40, 200, 3000)])
def test_large_products_have_checkpoints(
    monkeypatch: pytest.MonkeyPatch, method: Summation, shape: tuple[int, int, int]
) -> None:
    monkeypatch.setattr(products, "_MULTIPLICATIONS_AT_ONCE", 1 << 20)
    count = 0

    def counted() -> None:
        nonlocal count
        count += 1

    monkeypatch.setattr(products, "checkpoint", counted)
    rows, terms, columns = shape
    random = np.random.RandomState(0)
    left, right, out = random.rand(rows, terms), random.rand(terms, columns), np.full((rows, columns), np.nan)
    multiply(left, right, out, method)
    np.testing.assert_allclose(out, left @ right, rtol=1e-12)
    assert count >= 3
