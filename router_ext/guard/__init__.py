"""The guard: every grammar is proven before a backend sees it.

``grammar`` reads what a request forces its answer into, ``service`` has it compiled in a process of its own
(``nursery``, ``automaton``, ``inline``), ``verdict`` decides by what it would cost the backend.
"""
