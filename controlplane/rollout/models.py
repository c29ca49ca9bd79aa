"""Published revisions of the configuration, complete and immutable."""

from __future__ import annotations

from django.db import models


class Revision(models.Model):
    """One published configuration. ``body``: JSON of a ``ConfigSnapshot``; None once trimmed.

    ``delta``: JSON of the ``SnapshotDelta`` from the revision before; None of the first, once trimmed, or where it
    would be no shorter than the whole.
    """

    number = models.BigIntegerField(primary_key=True)
    digest = models.CharField(max_length=64)
    content_digest = models.CharField(max_length=64)
    body = models.BinaryField(null=True)
    delta = models.BinaryField(null=True)
    n_bytes = models.PositiveIntegerField()
    published_at = models.DateTimeField(db_index=True)
    actor = models.TextField()
    reason = models.TextField()

    class Meta:
        constraints = [models.CheckConstraint(condition=models.Q(number__gte=1), name="revision_from_one")]
