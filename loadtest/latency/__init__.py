"""The WAN benchmark: every mode over the same emulated links, compared with a computed floor."""
