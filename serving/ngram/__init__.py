"""The n-gram model: what followed the last few symbols, in the user's own text."""
