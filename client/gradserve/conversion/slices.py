"""Reads rows of a larger tensor in the formats of gradserve, TensorFlow and PyTorch."""

from typing import Any

from gradserve.results import IndexedSlices


def as_slices(value: Any) -> IndexedSlices | None:
    """Returns rows with unchecked contents; None if the value is something else.

    Takes IndexedSlices, also TensorFlow's, and sparse tensors of PyTorch whose first dimension alone is sparse, such as
    the gradient of an embedding with sparse=True. Their equal indices are added up.
    """
    if isinstance(value, IndexedSlices):
        return value
    if getattr(value, "is_sparse", False) is True and value.sparse_dim() == 1:
        rows = value.detach().coalesce()
        return IndexedSlices(rows.values(), rows.indices()[0], tuple(rows.shape))
    if type(value).__name__ == "IndexedSlices":
        return IndexedSlices(value.values, value.indices, value.dense_shape)
    return None
