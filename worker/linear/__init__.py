"""Linear layers with packed weights: formats, packing, the routes that compute them, and the table that chooses.

A route never changes what a row's result is, only how fast it comes: see route.py.
"""
