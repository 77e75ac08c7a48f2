"""Planners: a step graph and a budget in, a plan out. Pure: numbers only, no torch, no threads, no clock."""
