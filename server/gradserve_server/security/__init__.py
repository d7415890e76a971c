"""Authentication and authorization: certificates and tokens, identities, roles and limits."""
