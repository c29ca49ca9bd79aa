"""``fairlane bench hazards``: odd requests, the backends they would fell, and what everybody else sees of it."""
