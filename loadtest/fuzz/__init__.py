"""Bad input on purpose: real messages mutated, messages made from their descriptors, raw bytes.

A run starts a deployment with small limits, sends it inputs target by target, and looks after every batch whether all
processes live, stay within their bounds and have nothing but refusals in their logs. Healthy requests run beside it.
"""
