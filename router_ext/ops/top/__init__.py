"""``fairlane top``: what routers do now, in a terminal.

sources   which routers, with which token; one JSON document per look
rows      what is shown of it, and the shares of the last minute
command   options, and the plain table of ``--once``
view      the live view (textual), loaded only when it is shown
"""
