"""The disk alone: what anything durable costs at least."""
