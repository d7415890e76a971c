"""Parts of the configuration."""
