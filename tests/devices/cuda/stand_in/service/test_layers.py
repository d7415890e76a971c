"""Layers, beside TensorFlow's, and under many callers."""

from tests.layers.test_golden_served import (
    test_it_is_tensorflows,
)
from tests.layers.test_served import (
    TestManyCallers,
    raw,
    test_dtypes,
    test_inputs_that_are_given_away_stay_what_they_were,
    test_updates_of_a_collection_across_layers,
    test_values_that_are_given_away_stay_what_they_were,
    threads,
)

__all__ = [
    "TestManyCallers",
    "raw",
    "test_dtypes",
    "test_inputs_that_are_given_away_stay_what_they_were",
    "test_it_is_tensorflows",
    "test_updates_of_a_collection_across_layers",
    "test_values_that_are_given_away_stay_what_they_were",
    "threads",
]
