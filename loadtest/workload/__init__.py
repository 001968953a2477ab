"""The deployment under test and its requests: testbeds, prompts, arms, expected texts."""
