"""FusedBatchNorm on the host."""
