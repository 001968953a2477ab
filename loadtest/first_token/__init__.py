"""How long a long prompt takes to its first token: in pieces that overlap along the chain, and in one hop."""
