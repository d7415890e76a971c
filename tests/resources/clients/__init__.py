"""What clients have for themselves or share, and how it ends."""
