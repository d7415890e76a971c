"""The ops on accumulators and the arguments that they require, as tf.raw_ops has them."""

APPLY, TAKE, COUNT, SET_STEP = (
    ("handle", "local_step", "gradient"),
    ("handle", "num_required", "dtype"),
    ("handle",),
    ("handle", "new_global_step"),
)


SPARSE_APPLY = (
    "handle",
    "local_step",
    "gradient_indices",
    "gradient_values",
    "gradient_shape",
    "has_known_shape",
)


REQUIRED: dict[str, tuple[str, ...]] = {
    "ConditionalAccumulator": ("dtype", "shape"),
    "ResourceConditionalAccumulator": ("dtype", "shape"),
    "SparseConditionalAccumulator": ("dtype", "shape"),
    "AccumulatorApplyGradient": APPLY,
    "ResourceAccumulatorApplyGradient": APPLY,
    "SparseAccumulatorApplyGradient": SPARSE_APPLY,
    "AccumulatorTakeGradient": TAKE,
    "ResourceAccumulatorTakeGradient": TAKE,
    "SparseAccumulatorTakeGradient": TAKE,
    "AccumulatorNumAccumulated": COUNT,
    "ResourceAccumulatorNumAccumulated": COUNT,
    "AccumulatorSetGlobalStep": SET_STEP,
    "ResourceAccumulatorSetGlobalStep": SET_STEP,
    "DestroyResourceOp": ("resource",),
}
"""The arguments without a default, as tf.raw_ops has them."""


CREATING = [op for op in REQUIRED if op.endswith("ConditionalAccumulator")]
