"""What a training run on several servers can be expected to do, before anybody rents machines for it."""
