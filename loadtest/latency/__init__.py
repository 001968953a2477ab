"""The WAN benchmark: every mode on the same emulated links, compared with a computed floor."""
