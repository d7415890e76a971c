"""ParametersService."""
