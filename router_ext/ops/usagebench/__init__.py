"""``fairlane bench usage``: the books, the console and the configuration of a large installation."""
