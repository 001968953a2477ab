"""An emulated wide-area network on one machine: namespaces, the links between them, and programs inside."""
