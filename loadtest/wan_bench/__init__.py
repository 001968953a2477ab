"""The WAN benchmark: every mode on the same emulated links, held against a computed floor."""
