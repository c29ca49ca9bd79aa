"""People who operate the platform: accounts, roles, signing in, API tokens. The role alone decides what one may do."""
