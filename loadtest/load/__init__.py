"""The load test: many users at once, every request accounted for, every text checked."""
