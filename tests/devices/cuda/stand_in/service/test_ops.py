"""Every op, beside recorded results, by value and by handle."""

from tests.ops.cudnn_rnn.test_raw_ops import (
    test_a_reserve_space_of_another_call_is_refused,
    test_dropout_depends_on_the_seed_alone,
    test_every_version,
    test_forward_and_backprop,
    test_inference,
    test_params_and_their_canonical_form,
    test_sequence_lengths_out_of_range,
)
from tests.ops.gru.test_raw_ops import (
    test_a_kept_weight_gradient_is_applied_without_travelling,
    test_a_step_and_its_gradient,
    test_steps_in_a_row_by_handle,
)
from tests.ops.gru.test_raw_ops import (
    test_arrays_and_handles_mix as test_gru_arrays_and_handles_mix,
)
from tests.ops.gru.test_raw_ops import (
    test_cell as test_gru_cell,
)
from tests.ops.gru.test_raw_ops import (
    test_gradient as test_gru_gradient,
)
from tests.ops.layer_norm.test_raw_ops import (
    test_a_forward_and_its_gradient_by_handle,
)
from tests.ops.layer_norm.test_raw_ops import (
    test_forward as test_layer_norm,
)
from tests.ops.layer_norm.test_raw_ops import (
    test_gradient as test_layer_norm_gradient,
)
from tests.raw_ops.test_gradient_ops import (
    test_a_handle_that_is_gone,
    test_a_kept_gradient_is_applied_without_travelling,
    test_arrays_and_handles_mix,
    test_backward_by_handle,
    test_kept_outputs,
    test_one_handle_as_several_inputs,
    test_refusals,
)
from tests.raw_ops.test_gradient_ops import (
    test_forward as test_batch_norm,
)
from tests.raw_ops.test_gradient_ops import (
    test_gradient as test_batch_norm_gradient,
)

__all__ = [
    "test_a_forward_and_its_gradient_by_handle",
    "test_a_handle_that_is_gone",
    "test_a_kept_gradient_is_applied_without_travelling",
    "test_a_kept_weight_gradient_is_applied_without_travelling",
    "test_a_reserve_space_of_another_call_is_refused",
    "test_a_step_and_its_gradient",
    "test_arrays_and_handles_mix",
    "test_backward_by_handle",
    "test_batch_norm",
    "test_batch_norm_gradient",
    "test_dropout_depends_on_the_seed_alone",
    "test_every_version",
    "test_forward_and_backprop",
    "test_gru_arrays_and_handles_mix",
    "test_gru_cell",
    "test_gru_gradient",
    "test_inference",
    "test_kept_outputs",
    "test_layer_norm",
    "test_layer_norm_gradient",
    "test_one_handle_as_several_inputs",
    "test_params_and_their_canonical_form",
    "test_refusals",
    "test_sequence_lengths_out_of_range",
    "test_steps_in_a_row_by_handle",
]
