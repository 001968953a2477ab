"""A small drafter for the router's machine, distilled from an AR pipeline's own outputs."""
