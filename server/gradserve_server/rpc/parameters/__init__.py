"""ParameterService."""
