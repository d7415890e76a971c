"""Tensors that are put, read, released and deleted."""

from tests.tensors.test_tensors import (
    face,
    raw,
    test_a_broken_off_read_releases_nothing,
    test_big_and_small_in_one_stream,
    test_deleting_what_is_being_read,
    test_every_dtype_and_shape,
    test_get_leaves_the_tensor_and_release_deletes_it,
    test_many_at_once,
    test_the_memory_comes_back,
)

__all__ = [
    "face",
    "raw",
    "test_a_broken_off_read_releases_nothing",
    "test_big_and_small_in_one_stream",
    "test_deleting_what_is_being_read",
    "test_every_dtype_and_shape",
    "test_get_leaves_the_tensor_and_release_deletes_it",
    "test_many_at_once",
    "test_the_memory_comes_back",
]
