"""Parameters through aggregators."""
