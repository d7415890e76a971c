"""Who may connect, what they show, and who may do what: certificates and tokens, identities and roles."""
