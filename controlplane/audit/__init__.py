"""Who changed what, when: written by one function in the transaction of the change, never updated, never deleted."""
