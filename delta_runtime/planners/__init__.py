"""Planners: a step graph, or plain numbers, and a budget in; a plan or a schedule out. No torch, no threads."""
