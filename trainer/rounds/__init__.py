"""Decentralised rounds: workers train parts apart, and what they learned is merged now and then."""
