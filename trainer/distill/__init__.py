"""A small drafter for the router's machine, distilled from what an AR pipeline itself says."""
