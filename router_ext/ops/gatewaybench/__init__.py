"""``fairlane bench gateway``: what the router adds and costs, and how it bears clients and servers that fail it."""
