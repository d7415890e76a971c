"""Who may connect, and what they show: certificates, and whom they belong to."""
