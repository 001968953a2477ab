"""Decentralised rounds: workers train parts separately, and their updates are merged now and then."""
