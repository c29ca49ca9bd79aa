"""Pages of the console. A view reads by queries, changes by use cases, and adds nothing of its own."""
