"""The gradserve server: gradient ops and conditional accumulators over gRPC."""
