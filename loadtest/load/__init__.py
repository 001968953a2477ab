"""The load test: many users at once, with every request accounted for and every text checked."""
