"""The data set of ``fairlane bench usage``: an installation as large as one should ever need, and its measurements.

``configuration`` makes tenants, keys, pools and people, ``events`` what routers would have sent of a month, ``fill``
puts both into an empty database through the product's own code where that is quick enough. Nothing else uses it.
"""
