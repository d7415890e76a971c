"""What TensorFlow's own tests of accumulators check."""

import numpy as np

import gradserve
from tests.accumulators.test_scenarios import (
    face,
    test_accumulators_are_independent,
    test_all_that_is_in_is_averaged,
    test_bad_take_passes_those_who_wait,
    test_blocked_take,
    test_dense_shape_of_the_result,
    test_each_row_by_its_own_count,
    test_empty_gradients_count,
    test_gradients_of_later_steps_are_welcome,
    test_half_rounds_as_documented,
    test_int32_indices,
    test_matrix,
    test_mean_of_ten,
    test_nan_and_infinity_propagate,
    test_new_accumulator_is_empty,
    test_num_accumulated,
    test_parallel_applies,
    test_parallel_takes,
    test_queue_is_strict,
    test_result_is_independent,
    test_round_shape_is_reported_before_the_declared_one,
    test_scalar,
    test_set_global_step,
    test_set_global_step_keeps_what_is_in,
    test_sparse_blocked_take,
    test_sparse_checks,
    test_sparse_counts,
    test_sparse_cube,
    test_sparse_parallel_applies,
    test_sparse_parallel_takes,
    test_sparse_scalar_shape_takes_vectors,
    test_sparse_values_may_have_more_dimensions,
    test_stale_gradients_are_dropped,
    test_take_bumps_the_current_step,
    test_take_of_none,
    test_two_pointer_merge,
    test_two_rounds,
    test_unknown_reduction_is_refused,
    test_unknown_shape_is_fixed_by_the_first_gradient_of_a_round,
    test_wrong_shape,
)
from tests.devices.cuda.stand_in.installing import StandIn


def test_they_are_in_the_memory_of_the_gpu(client: gradserve.Client, stand_in: StandIn) -> None:
    pool = stand_in.cupy.get_default_memory_pool()
    before = pool.used_bytes()
    model = client.gradient_accumulator({"w": np.zeros(1000, np.float32)})
    model.apply_grad({"w": np.ones(1000, np.float32)}, local_step=0)
    assert pool.used_bytes() > before


__all__ = [
    "face",
    "test_accumulators_are_independent",
    "test_all_that_is_in_is_averaged",
    "test_bad_take_passes_those_who_wait",
    "test_blocked_take",
    "test_dense_shape_of_the_result",
    "test_each_row_by_its_own_count",
    "test_empty_gradients_count",
    "test_gradients_of_later_steps_are_welcome",
    "test_half_rounds_as_documented",
    "test_int32_indices",
    "test_matrix",
    "test_mean_of_ten",
    "test_nan_and_infinity_propagate",
    "test_new_accumulator_is_empty",
    "test_num_accumulated",
    "test_parallel_applies",
    "test_parallel_takes",
    "test_queue_is_strict",
    "test_result_is_independent",
    "test_round_shape_is_reported_before_the_declared_one",
    "test_scalar",
    "test_set_global_step",
    "test_set_global_step_keeps_what_is_in",
    "test_sparse_blocked_take",
    "test_sparse_checks",
    "test_sparse_counts",
    "test_sparse_cube",
    "test_sparse_parallel_applies",
    "test_sparse_parallel_takes",
    "test_sparse_scalar_shape_takes_vectors",
    "test_sparse_values_may_have_more_dimensions",
    "test_stale_gradients_are_dropped",
    "test_take_bumps_the_current_step",
    "test_take_of_none",
    "test_two_pointer_merge",
    "test_two_rounds",
    "test_unknown_reduction_is_refused",
    "test_unknown_shape_is_fixed_by_the_first_gradient_of_a_round",
    "test_wrong_shape",
]
