"""FusedBatchNorm on a GPU."""
