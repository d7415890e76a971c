"""GradientOpsService."""
