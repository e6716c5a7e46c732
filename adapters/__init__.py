"""What the frameworks expect, one module or folder each. The launch sides import without the framework."""
