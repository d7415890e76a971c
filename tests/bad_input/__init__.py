"""Bad input: each with its status, a message that names the field, and the state unchanged."""
