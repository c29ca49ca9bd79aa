"""REST for operators: ``/api/v1``, and the demo that the one-command start lays down."""
