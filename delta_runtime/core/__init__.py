"""The vocabulary that all other parts share.

Covers units, errors, and the records, events and actions that cross a layer. Imports the standard
library and numpy only, never torch: whatever builds on it runs in tests and in the simulator too.
"""
