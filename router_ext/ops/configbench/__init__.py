"""``fairlane bench config``: what a change of the configuration costs a serving router, at many tenants and keys."""
